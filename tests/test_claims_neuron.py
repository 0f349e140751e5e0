"""Every claim of the Neuron guide (004) that needs no machine: its worked examples, computed by our plans."""

from __future__ import annotations

import math

import pytest
import torch

from engines.dispatch import DispatchPlan
from engines.model.architecture import RouterConfig
from engines.model.checkpoints import tensor_shapes
from engines.model.model_config import parse_model_config
from engines.model.router import RouterWeights, route
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.schedule import PricedStep, operations
from engines.techniques.layout.blocks import n_blocks
from tests.claims import Claim, check
from tests.fakes.published import PUBLISHED
from tests.test_static_shapes import blocks_of, planned, routed

T, E, K, B = 1000, 8, 2, 256
"""The guide's example of padding."""
HOT = (1750, 36, 36, 36, 36, 36, 35, 35)


def gathered() -> list[float]:
    """Values that ranks gather: all logits, or the weights of the chosen."""
    generator = torch.Generator().manual_seed(1)
    weights = RouterWeights(torch.randn(128, 16, generator=generator))
    chosen = route(torch.randn(32, 16, generator=generator), weights, RouterConfig("softmax", 8, normalise=True))
    return [32 * 128 / chosen.weights_TK.numel()]


def six_tokens() -> list[float]:
    """Token of every row, block after block."""
    plan = planned("blockwise", routed([[0], [1], [0], [2], [1], [0]], 3), block_size=4)
    assert [expert for expert, _ in blocks_of(plan)] == [0, 1, 2]
    return [token for _, tokens in blocks_of(plan) for token in tokens]


# --- padding ---------------------------------------------------------------------------------------------------------


def of_balanced(**parameters: object) -> DispatchPlan:
    choices = [[t % E, (t + 1) % E] for t in range(T)]
    return planned("blockwise", routed(choices, E), block_size=B, **parameters)


def of_loads(loads: tuple[int, ...], **parameters: object) -> DispatchPlan:
    """A pair a token: loads that no routing of top 2 gives have a plan too."""
    choices = [[expert] for expert, load in enumerate(loads) for _ in range(load)]
    return planned("blockwise", routed(choices, E), block_size=B, **parameters)


def beyond(more: int, base: int) -> float:
    """Percent."""
    return 100 * (more - base) / base


def rows(plan: DispatchPlan) -> int:
    return plan.counters().computed_rows


def most_of_one_expert() -> list[float]:
    """Tokens of the busiest expert where every token chooses it, as second choices or first: dropping has no more."""
    everyone = routed([[0, 1 + t % (E - 1)] for t in range(T)], E)
    return [int(planned("dropping", everyone, factor=100.0).calls.rows_S.max())]


def flop_per_byte() -> list[float]:
    """Of the operations that the plan is priced as, all provisioned blocks computed, each weight read once."""
    plan = of_balanced(skip_padding_blocks=False)
    ffn = [o for o in operations(PricedStep(T, T), [plan], PHI_3_5_MOE, "npu", None) if o.name == "expert FFN"]
    flop = sum(o.flops for o in ffn) / PHI_3_5_MOE.n_layers
    n_bytes = 2.0 * PHI_3_5_MOE.expert_weights * E
    return [flop / n_bytes]


# --- skips -----------------------------------------------------------------------------------------------------------


def rows_not_fetched() -> list[float]:
    counters = planned("blockwise", routed([[0], [0], [0]], 1), block_size=4).counters()
    return [100 * (counters.rows_not_fetched or 0) / counters.computed_rows]


def weight_loads() -> list[float]:
    """Of the blocks [E0, E0, E1, E2, E2], without skipping and with."""
    routing = routed([[e] for e in (0, 0, 0, 1, 2, 2, 2)], 3)
    plans = [planned("blockwise", routing, block_size=2, skip_weight_loads=skips) for skips in (False, True)]
    assert [expert for expert, _ in blocks_of(plans[0])] == [0, 0, 1, 2, 2]
    return [plan.counters().weight_loads for plan in plans]


def blocks_not_computed() -> list[float]:
    """ceil(10 / 2) + 5 = 10 blocks for 10 pairs, which need 6."""
    ten = routed([[e] for e in (0, 0, 1, 1, 2, 2, 3, 3, 4, 5)], 6)
    every, needed = (planned("blockwise", ten, block_size=2, skip_padding_blocks=skips) for skips in (False, True))
    assert (len(every.calls), len(needed.calls)) == (10, 6)
    return [100 * (1 - rows(needed) / rows(every))]


# --- loads -----------------------------------------------------------------------------------------------------------


def most_loads(n_experts: int, top_k: int, batch: int) -> int:
    """Of tokens that share no expert."""
    choices = [[(t * top_k + k) % n_experts for k in range(top_k)] for t in range(batch)]
    return planned("selective", routed(choices, n_experts), "decode").counters().weight_loads


def loads_of_a_switch() -> list[float]:
    """Of DeepSeek at batch 32, random choices: 256 pairs, so all are loaded though fewer are needed."""
    generator = torch.Generator().manual_seed(7)
    choices = torch.rand(32, 256, generator=generator).argsort(-1)[:, :8].tolist()
    return [planned("selective", routed(choices, 256), "decode").counters().weight_loads]


def capacity_of_balanced() -> list[float]:
    """Rows of an expert over its mean load."""
    balanced = routed([[t % 8, (t + 1) % 8] for t in range(160)], 8)
    (size,) = set(planned("dropping", balanced).calls.rows_S.tolist())
    return [size / (160 * 2 / 8)]


def load_claims() -> list[Claim]:
    found = []
    for first, model, n_experts, top_k, batch, most in (
        (30, "DeepSeek", 256, 8, 16, "128"),
        (32, "GPT-OSS at top 8 (the model has 4)", 128, 8, 8, "64"),
        (34, "Llama 4", 16, 1, 8, "8"),
    ):
        sizes = (n_experts, top_k, batch)
        where = "selective loading"
        found += [
            Claim(
                f"004-{first:03}", where, f"{model}: most experts of {batch} tokens", (most,),
                lambda s=sizes: [most_loads(*s)], "plan",
            ),
            Claim(
                f"004-{first + 1:03}", where, f"{model}: loads saved, %", ("50",),
                lambda s=sizes: [100 * (1 - most_loads(*s) / s[0])], "plan",
            ),
        ]  # fmt: skip
    return found


# --- bytes and intensity ---------------------------------------------------------------------------------------------


def router_mb(n_layers: int) -> list[float]:
    """Of GPT-OSS-120B, bf16."""
    config = parse_model_config(PUBLISHED["gpt-oss-120b"].config, None)
    shape = tensor_shapes(config)["model.layers.1.mlp.router.weight"]
    return [n_layers * math.prod(shape) * 2 / 1e6]


def intensity(rows: int) -> list[float]:
    """FLOP a byte of [rows, 4096] @ [4096, 12288], all three matrices in bf16 moved once."""
    inner, columns = 4096, 12288
    return [2 * rows * inner * columns / (2 * (rows * inner + inner * columns + rows * columns))]


PADDING = "padding analysis"
CLAIMS = [
    Claim(
        "004-001", "router", "weights of GPT-OSS-120B's router, MB a layer", ("0.07",), lambda: router_mb(1), "shape",
        instead=("0.74",), why="2880 x 128 x 2 bytes are 737,280",
    ),
    Claim(
        "004-002", "router", "weights of its routers, MB in 36 layers", ("2.4",), lambda: router_mb(36), "shape",
        instead=("26.5",), why="the same",
    ),
    Claim("004-004", "router", "less to gather after the choice, 128 experts, top 8", ("16",), gathered, "router"),
    Claim(
        "004-005", "blocks", "six tokens in blocks of four",
        ("0", "2", "5", "-1", "1", "4", "-1", "-1", "3", "-1", "-1", "-1"), six_tokens, "plan",
    ),
    Claim("004-006", PADDING, "pairs", ("2000",), lambda: [of_balanced().routed_pairs], "plan"),
    Claim(
        "004-007", PADDING, "blocks provisioned, sufficient and tight", ("15", "15"),
        lambda: [n_blocks(T * K, E, B, "sufficient"), n_blocks(T * K, E, B, "tight")], "plan",
    ),
    Claim("004-008", PADDING, "blocks of balanced loads", ("8",), lambda: [len(of_balanced().calls)], "plan"),
    Claim("004-009", PADDING, "their slots", ("2048",), lambda: [rows(of_balanced())], "plan"),
    Claim(
        "004-010", PADDING, "slots provisioned", ("3840",),
        lambda: [rows(of_balanced(skip_padding_blocks=False))], "plan",
    ),
    Claim(
        "004-011", PADDING, "provisioned beyond the needed, balanced, %", ("87.5",),
        lambda: [beyond(rows(of_balanced(skip_padding_blocks=False)), rows(of_balanced()))], "plan",
    ),
    Claim(
        "004-012", PADDING, "needed beyond the pairs, balanced, %", ("2.4",),
        lambda: [beyond(rows(of_balanced()), of_balanced().routed_pairs)], "plan",
    ),
    Claim("004-013", PADDING, "blocks of one hot expert's loads", ("14",), lambda: [len(of_loads(HOT).calls)], "plan"),
    Claim(
        "004-013", PADDING, "tokens of the hot expert", ("1750",), most_of_one_expert, "plan",
        instead=("1000",), why="each of 1000 tokens chooses an expert once at most",
    ),
    Claim("004-014", PADDING, "their slots", ("3584",), lambda: [rows(of_loads(HOT))], "plan"),
    Claim(
        "004-015", PADDING, "provisioned beyond the needed, one hot expert, %", ("7.14",),
        lambda: [beyond(rows(of_loads(HOT, skip_padding_blocks=False)), rows(of_loads(HOT)))], "plan",
    ),
    Claim(
        "004-016", PADDING, "needed beyond the pairs, one hot expert, %", ("79.2",),
        lambda: [beyond(rows(of_loads(HOT)), of_loads(HOT).routed_pairs)], "plan",
    ),
    Claim(
        "004-018", "AIF", "FLOP a byte of bf16 weights of the example above, B n_blocks / E", ("480",), flop_per_byte,
        "plan", why="256 * 15 / 8; the formula is not in its text",
    ),
    Claim("004-019", "DMA skip", "rows of [T0, T2, T5, -1] not fetched, %", ("25",), rows_not_fetched, "plan"),
    Claim("004-020", "DMA skip", "weight loads of [E0, E0, E1, E2, E2]", ("5", "3"), weight_loads, "plan"),
    Claim("004-021", "dynamic loop", "saved of 10 blocks, 6 of them real, %", ("40",), blocks_not_computed, "plan"),
    *load_claims(),
    Claim("004-036", "all-experts", "DeepSeek: loads at batch 32", ("256",), loads_of_a_switch, "plan"),
    Claim(
        "004-028", "decode", "FLOP a byte of a prefill, [8192, 4096] @ [4096, 12288]", ("400",),
        lambda: intensity(8192), instead=("2234",), why="of its own shapes, bf16",
    ),
    Claim(
        "004-029", "decode", "FLOP a byte of decoding, [32, 4096] @ [4096, 12288]", ("50", "100"),
        lambda: intensity(32), is_range=True, instead=("31.7",), why="of its own shapes, bf16",
    ),
    Claim("004-039", "config", "capacity over the mean load", ("1.25",), capacity_of_balanced, "plan"),
]  # fmt: skip


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.case)
def test_claim(claim: Claim) -> None:
    check(claim)
