"""The guide's worked examples, computed by our plans, router and shapes.

Legend: T tokens, E experts, K experts per token, B rows of a block.
"""

from __future__ import annotations

import torch

from engines.dispatch import DispatchPlan
from engines.model.architecture import RouterConfig
from engines.model.router import RouterWeights, route
from engines.pricing.priced_step import PricedStep
from engines.pricing.published_shapes import GPT_OSS_120B, PHI_3_5_MOE
from engines.pricing.schedule import operations
from engines.techniques.layout.blocks import n_blocks
from harness.reproduce.neuron.plans import blocks_of, in_turn, of_loads, planned, routed, weight_loads_of

T, E, K, B = 1000, 8, 2, 256
"""The guide's example of padding."""
HOT_LOADS = (1750, 36, 36, 36, 36, 36, 35, 35)
"""As it prints them: one expert with 1750 tokens, the others with about 36."""
DECODE_BATCH, PREFILL_ROWS, INNER, COLUMNS = 32, 8192, 4096, 12288
BF16_BYTES = 2

# --- router ----------------------------------------------------------------------------------------------------------


def router_mb(n_layers: int) -> float:
    """Weights of the routers of GPT-OSS-120B in bf16: [E, H] in each layer."""
    return n_layers * GPT_OSS_120B.n_experts * GPT_OSS_120B.hidden * BF16_BYTES / 1e6


def gathered_ratio() -> float:
    """Values that ranks gather: all logits, over the weights of the chosen."""
    generator = torch.Generator().manual_seed(1)
    weights = RouterWeights(torch.randn(128, 16, generator=generator))
    chosen = route(torch.randn(32, 16, generator=generator), weights, RouterConfig("softmax", 8, normalise=True))
    return 32 * 128 / chosen.weights_TK.numel()


# --- blocks and padding ----------------------------------------------------------------------------------------------


def six_tokens() -> str:
    """Tokens of each block, in the order of the experts."""
    plan = planned("blockwise", routed([[0], [1], [0], [2], [1], [0]], 3), block_size=4)
    return ",".join(str(tokens) for _, tokens in sorted(blocks_of(plan)))


def balanced(skip_padding_blocks: bool = True) -> DispatchPlan:
    routing = in_turn(T, E, K)
    return planned("blockwise", routing, block_size=B, skip_padding_blocks=skip_padding_blocks)


def one_hot(skip_padding_blocks: bool = True) -> DispatchPlan:
    """Of the loads as the guide prints them."""
    routing = of_loads(HOT_LOADS)
    return planned("blockwise", routing, block_size=B, skip_padding_blocks=skip_padding_blocks)


def one_hot_that_can_be() -> DispatchPlan:
    """Every token has the hot expert, once, and the others in turn."""
    return planned("blockwise", routed([[0, 1 + t % (E - 1)] for t in range(T)], E), block_size=B)


def provisioned() -> int:
    return n_blocks(T * K, E, B, "sufficient")


def rows(plan: DispatchPlan) -> int:
    return plan.counters().computed_rows


def beyond(more: int, base: int) -> float:
    """Percent."""
    return 100 * (more - base) / base


def flop_per_weight_byte() -> float:
    """Of the operations that the balanced plan is priced as, all provisioned blocks computed, each weight read once."""
    plan = balanced(skip_padding_blocks=False)
    ffn = [o for o in operations(PricedStep(T, T), [plan], PHI_3_5_MOE, "npu", None) if o.name == "expert FFN"]
    return sum(o.flops for o in ffn) / PHI_3_5_MOE.n_layers / (BF16_BYTES * PHI_3_5_MOE.expert_weights * E)


# --- skips -----------------------------------------------------------------------------------------------------------


def rows_not_fetched_percent() -> float:
    """Of the block [T0, T2, T5, -1]."""
    counters = planned("blockwise", routed([[0], [0], [0]], 1), block_size=4).counters()
    return 100 * (counters.rows_not_fetched or 0) / counters.computed_rows


def weight_loads(skips: bool) -> int:
    """Of the blocks [E0, E0, E1, E2, E2]."""
    routing = routed([[e] for e in (0, 0, 0, 1, 2, 2, 2)], 3)
    return weight_loads_of(planned("blockwise", routing, block_size=2, skip_weight_loads=skips))


def blocks_not_computed_percent() -> float:
    """ceil(10 / 2) + 5 = 10 blocks for 10 pairs, which need 6."""
    ten = routed([[e] for e in (0, 0, 1, 1, 2, 2, 3, 3, 4, 5)], 6)
    every, needed = (planned("blockwise", ten, block_size=2, skip_padding_blocks=skips) for skips in (False, True))
    return 100 * (1 - rows(needed) / rows(every))


def capacity_factor() -> float:
    """Rows of an expert over its mean load, of balanced loads."""
    n_tokens = 160
    plan = planned("dropping", in_turn(n_tokens, E, K))
    return float(plan.calls.rows_S.max()) / (n_tokens * K / E)


# --- intensity -------------------------------------------------------------------------------------------------------


def flop_per_byte(n_rows: int) -> float:
    """Of [rows, 4096] @ [4096, 12288], all three matrices in bf16 moved once."""
    moved = BF16_BYTES * (n_rows * INNER + INNER * COLUMNS + n_rows * COLUMNS)
    return 2 * n_rows * INNER * COLUMNS / moved
