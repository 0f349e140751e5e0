"""The path of accelerators, on the CPU where there is none: fp32 equals transformers, bf16 what bf16 allows."""

from __future__ import annotations

import logging
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.dispatch import Routing
from engines.errors import EngineError
from engines.model.accelerator import Backend, StackedExperts, execute_stacked, find_backend, moved, synchronised
from engines.model.architecture import GatedUnit
from engines.model.attention import AttentionWeights
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.quantised import Quantisation
from engines.model.transformer import Transformer
from engines.model.weights import LayerWeights, SparseWeights
from engines.oracle import Oracle, mix_experts
from engines.profile import Profile
from engines.reference import ReferenceEngine
from engines.techniques.base import Technique
from engines.techniques.context import ChunkPhase
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import DroplessParameters, dropless
from results.records import Completion, Request, Sampling
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import write_random_model
from tests.techniques import built as tiers_of
from tests.techniques import seen

pytestmark = pytest.mark.numbers

FP32_ON_CPU = Backend(torch.device("cpu"), torch.float32)
BF16_ON_CPU = Backend(torch.device("cpu"), torch.bfloat16)
N_TOKENS = 60
FEATURES = ["qwen2-moe", "gemma2", "phi-moe", "deepseek-v3", "glm4-moe", "gpt-oss", "llama4"]
"""Families that together have every part of the architecture that depends on the arithmetic."""
BF16_NAT = 0.1
"""Of a token's log-likelihood on the bundled model: bf16 sends some of its tokens to other experts."""
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
on_mps = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="torch sees no MPS device")
ACCELERATORS = [pytest.param("cuda", marks=on_cuda), pytest.param("mps", marks=on_mps)]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


def ignore(event: str, at_s: float) -> None:
    """A listener that does nothing."""


def random_tokens(n: int = N_TOKENS) -> Tensor:
    return torch.randint(0, 2048, (n,), generator=torch.Generator().manual_seed(3))


def logits(model: Transformer, tokens: Tensor, chunks: list[int]) -> Tensor:
    """Of two sequences in each step, the second of which is the first but for its last tokens."""
    caches = [model.new_cache(), model.new_cache()]
    for cache in caches:
        cache.start(len(tokens))
    hidden = []
    with torch.inference_mode():
        for chunk in torch.split(tokens, chunks):
            phase: ChunkPhase = "decode" if len(chunk) == 1 else "prefill"
            both, _ = model.forward_batch([chunk, chunk[: max(1, len(chunk) // 2)]], caches, dropless(), phase)
            hidden.append(both[: len(chunk)])
        return model.logits(torch.cat(hidden)).cpu()


# --- equality --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_fp32_logits_of_every_family_agree_with_transformers(name: str, tmp_path: Path) -> None:
    """Torch attention, stacked experts, grouped products: all that an accelerator would run, on the CPU."""
    theirs = write_family(tmp_path, CASES[name])
    ours = Transformer(load_checkpoint(str(tmp_path), torch.float32), FP32_ON_CPU)
    tokens = random_tokens()
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert (logits(ours, tokens, [50] + [1] * 10) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", FEATURES)
def test_bf16_logits_are_as_near_as_transformers_own(name: str, tmp_path: Path) -> None:
    """Against fp32: the root mean square error is no more than twice that of transformers computing in bf16.

    bf16 moves some tokens to other experts, in both, so that the largest error says little.
    """
    theirs = write_family(tmp_path, CASES[name])
    ours = Transformer(load_checkpoint(str(tmp_path), torch.float32), BF16_ON_CPU)
    tokens = random_tokens()
    with torch.inference_mode():
        exact = theirs(tokens[None]).logits[0]
        narrow = theirs.to(torch.bfloat16)(tokens[None]).logits[0].float()
    error, their_error = ((x - exact).square().mean().sqrt() for x in (logits(ours, tokens, [N_TOKENS]), narrow))
    assert their_error < exact.std() / 2, "an error this large would allow anything"
    assert 0 < error < 2 * their_error


def test_an_engine_in_bf16_answers_nearly_as_in_fp32(checkpoint: Checkpoint) -> None:
    wide = ReferenceEngine(checkpoint, DroplessParameters())
    narrow = ReferenceEngine(checkpoint, DroplessParameters(), compute_dtype=torch.bfloat16)
    compare(wide, narrow, tolerance=BF16_NAT)


def compare(one: ReferenceEngine, other: ReferenceEngine, tolerance: float) -> None:
    """Log-likelihoods, in nat a token, of a prompt in chunks and of a batch; and that a generation comes out whole."""
    ids = tuple(random_tokens().tolist())
    asked = [
        Request(request_id=f"{n}", sample_id="s", kind="loglikelihood", prompt_ids=ids[:n], continuation_ids=ids[n:])
        for n in (10, 40)
    ]
    for request in asked:
        nat, other_nat = (engine.run(request, ignore).loglikelihood for engine in (one, other))
        assert nat is not None
        assert other_nat == pytest.approx(nat, abs=tolerance * len(request.continuation_ids))
    for a, b in zip(one.run_batch(asked, ignore), other.run_batch(asked, ignore), strict=True):
        assert b.loglikelihood == pytest.approx(a.loglikelihood, abs=tolerance * 50)
    for sampling in (Sampling(), Sampling(temperature=1.0, top_p=0.9, seed=1)):
        generation = Request(
            request_id="g", sample_id="s", kind="generate", prompt_ids=ids[:20], max_new_tokens=5, sampling=sampling
        )
        completion: Completion = other.run(generation, ignore)
        assert completion.n_generated == 5
        assert completion.token_times_s == tuple(sorted(completion.token_times_s))


@pytest.mark.parametrize(("dtype", "value_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_cores_send_values_of_the_dtype_of_the_arithmetic(
    checkpoint: Checkpoint, dtype: torch.dtype, value_bytes: int
) -> None:
    """Of dealt calls, the second core sends a result of each token and layer."""
    parameters = CustomParameters.model_validate({"place": {"kind": "shards", "shard": "blocks"}})
    engine = ReferenceEngine(checkpoint, parameters, 16, compute_dtype=dtype)
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(range(9, 29)), max_new_tokens=1)
    engine.run(request, ignore)
    config = checkpoint.config
    assert engine.take_counters().bytes_exchanged == 20 * config.n_layers * config.hidden * value_bytes


@pytest.mark.parametrize("device", ACCELERATORS)
def test_fp32_on_an_accelerator_answers_as_on_the_cpu(checkpoint: Checkpoint, device: Any) -> None:
    wide = ReferenceEngine(checkpoint, DroplessParameters(), torch_device=device, compute_dtype=torch.float32)
    compare(ReferenceEngine(checkpoint, DroplessParameters()), wide, tolerance=1e-4)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device", ACCELERATORS)
def test_fp32_logits_on_an_accelerator_agree_with_transformers(device: Any, name: str, tmp_path: Path) -> None:
    theirs = write_family(tmp_path, CASES[name])
    ours = Transformer(load_checkpoint(str(tmp_path), torch.float32), Backend(torch.device(device), torch.float32))
    tokens = random_tokens()
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert (logits(ours, tokens, [50] + [1] * 10) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("device", ACCELERATORS)
def test_bf16_on_an_accelerator_answers_nearly_as_fp32_on_the_cpu(checkpoint: Checkpoint, device: Any) -> None:
    narrow = ReferenceEngine(checkpoint, DroplessParameters(), torch_device=device)
    compare(ReferenceEngine(checkpoint, DroplessParameters()), narrow, tolerance=BF16_NAT)


# --- stacked experts -------------------------------------------------------------------------------------------------


def stacked(checkpoint: Checkpoint, layer: int = 0) -> StackedExperts:
    mlp = moved(checkpoint.weights, FP32_ON_CPU).layers[layer].mlp
    assert isinstance(mlp, SparseWeights)
    assert isinstance(mlp.experts, StackedExperts)
    return mlp.experts


def random_routing(n_tokens: int, n_experts: int, top_k: int, seed: int) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    scores_TE = torch.rand(n_tokens, n_experts, generator=generator)
    # Only the upper half is ever chosen: groups without a row must not shift the others.
    scores_TE[:, : n_experts // 2] -= 1
    ids_TK = scores_TE.topk(top_k).indices
    return Routing(ids_TK, torch.rand(n_tokens, top_k, generator=generator), n_experts)


@pytest.mark.parametrize("name", ["qwen2-moe", "gpt-oss", "llama4-top2"])
@pytest.mark.parametrize("technique", [dropless(), Oracle()], ids=["dropless", "oracle"])
def test_grouped_products_are_the_mixture_by_its_definition(name: str, technique: Technique, tmp_path: Path) -> None:
    """SwiGLU; clamped with biases; weighted on the input. The oracle's calls repeat experts, so they go one by one."""
    write_family(tmp_path, CASES[name])
    experts = stacked(load_checkpoint(str(tmp_path), torch.float32), -1 if name == "llama4-top2" else 0)
    hidden = torch.randn(13, experts.down_EHI.shape[1], generator=torch.Generator().manual_seed(1))
    routing = random_routing(13, len(experts.experts), 2, seed=5)
    plan = technique.plan(seen(routing))
    torch.testing.assert_close(
        execute_stacked(plan, hidden, experts), mix_experts(hidden, routing, experts), atol=1e-4, rtol=1e-4
    )


def test_padding_and_drops_of_a_plan_are_kept(checkpoint: Checkpoint) -> None:
    """Capacity for one row an expert: expected is the oracle's mixture with the dropped pairs' weights at zero."""
    experts = stacked(checkpoint)
    profile = Profile({0: (1,) * 16}, top_k=2, n_prompts=1)
    tiers = tiers_of("npumoe-t", 24, profile, multiples=(0.5,), base="B/E", align=3)
    hidden = torch.randn(24, 192, generator=torch.Generator().manual_seed(1))
    routing, saliency = random_routing(24, 16, 2, seed=6), hidden.norm(dim=-1)
    plan = tiers.plan(seen(routing, saliency_T=saliency))
    assert plan.dropped_pairs > 0
    assert (plan.token_R < 0).any() or all(c.valid_per_expert == c.rows_per_expert for c in plan.calls)
    weights_TK = torch.zeros_like(routing.weights_TK)
    for call in plan.calls:
        for row in range(call.first_row, call.first_row + call.n_rows):
            token = int(plan.token_R[row])
            if token >= 0:
                choice = routing.expert_ids_TK[token].tolist().index(call.experts[0])
                weights_TK[token, choice] = routing.weights_TK[token, choice]
    kept = Routing(routing.expert_ids_TK, weights_TK, 16)
    torch.testing.assert_close(
        execute_stacked(plan, hidden, experts), mix_experts(hidden, kept, experts), atol=1e-4, rtol=1e-4
    )


def test_experts_too_narrow_for_groups_go_one_by_one(checkpoint: Checkpoint) -> None:
    wide = stacked(checkpoint)
    width = 6  # features: 24 bytes, no multiple of 16
    down_EHI = wide.down_EHI[..., :width].contiguous()
    gate_up_EJH = torch.cat([wide.gate_up_EJH[:, :width], wide.gate_up_EJH[:, -width:]], dim=1)
    views = tuple(
        type(one)(gate_up_JH[:width], gate_up_JH[width:], down_HI)
        for one, gate_up_JH, down_HI in zip(wide.experts, gate_up_EJH, down_EHI, strict=True)
    )
    narrow = StackedExperts(
        views,
        GatedUnit(),
        gate_up_EJH=gate_up_EJH,
        down_EHI=down_EHI,
        gate_up_bias_EJ=None,
        down_bias_EH=None,
    )
    hidden = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    routing = random_routing(5, 16, 2, seed=7)
    plan = dropless().plan(seen(routing))
    torch.testing.assert_close(
        execute_stacked(plan, hidden, narrow), mix_experts(hidden, routing, narrow), atol=1e-5, rtol=1e-5
    )


# --- moving ----------------------------------------------------------------------------------------------------------


def tensors(part: Any) -> list[Tensor]:
    if isinstance(part, Tensor):
        return [part]
    if isinstance(part, tuple):
        return [tensor for one in part for tensor in tensors(one)]
    if is_dataclass(part):
        return [tensor for field in fields(part) for tensor in tensors(getattr(part, field.name))]
    return []


def test_everything_is_in_the_arithmetic_but_routers_and_a_tied_head_is_moved_once(checkpoint: Checkpoint) -> None:
    weights = moved(checkpoint.weights, BF16_ON_CPU)
    assert weights.head_LH is weights.embedding_LH
    wide = {id(tensor) for tensor in tensors(weights) if tensor.dtype is torch.float32}
    assert wide == {id(layer.mlp.router.weight_EH) for layer in weights.layers if isinstance(layer.mlp, SparseWeights)}
    assert len(tensors(weights)) > 16 * 3 * 4


def test_quantised_weights_are_widened_and_it_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_random_model(tmp_path, "qwen3-moe")
    quantised = load_checkpoint(str(tmp_path), torch.float32, Quantisation(experts="int8"))
    with caplog.at_level(logging.INFO, logger="engines.model.accelerator"):
        ours = Transformer(quantised, FP32_ON_CPU)
    assert "72 quantised matrices widened to torch.float32 on cpu" in caplog.text, "3 layers x 8 experts x 3 matrices"
    difference = logits(ours, random_tokens(), [N_TOKENS]) - logits(Transformer(quantised), random_tokens(), [N_TOKENS])
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        *(
            ({"arithmetic": to}, f"attention in {to} is of the CPU, and .*; leave attention_arithmetic out")
            for to in ("bf16", "int8")
        ),
        ({"kept": torch.float16}, r"a cache in torch.float16 is of the CPU, and .*; leave cache out"),
    ],
)
def test_rounded_attention_and_narrow_caches_are_not_moved(
    checkpoint: Checkpoint, asked: dict[str, Any], told: str
) -> None:
    layers = list[LayerWeights]()
    for layer in checkpoint.weights.layers:
        assert isinstance(layer.attention, AttentionWeights)
        layers.append(replace(layer, attention=replace(layer.attention, **asked)))
    with pytest.raises(EngineError, match=told):
        moved(replace(checkpoint.weights, layers=tuple(layers)), FP32_ON_CPU)


# --- devices ---------------------------------------------------------------------------------------------------------


def test_the_cpu_in_fp32_keeps_its_kernels() -> None:
    assert find_backend("cpu", None) is None
    assert find_backend("cpu", torch.float32) is None
    assert find_backend("cpu", torch.bfloat16) == BF16_ON_CPU


@pytest.mark.parametrize(
    ("device", "is_there"), [("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())]
)
def test_a_device_that_is_not_there_is_refused(device: Any, is_there: bool) -> None:
    if is_there:
        pytest.skip(f"torch sees a {device} device")
    with pytest.raises(EngineError, match=f"sees no {device} device; use cpu"):
        find_backend(device, None)


def test_an_unknown_device_or_arithmetic_is_refused() -> None:
    with pytest.raises(EngineError, match="device 'npu' is not supported; use one of cpu, cuda, mps"):
        find_backend("npu", None)  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"arithmetic in torch\.float16 is not supported"):
        find_backend("cpu", torch.float16)


@pytest.mark.parametrize("device", ACCELERATORS)
def test_a_stamp_waits_for_what_the_device_was_given(device: Any) -> None:
    """Products that take some 100 ms are only queued when they return; the stamp after them is not."""
    import time

    matrix = torch.randn(8192, 8192, device=device)
    now_s = synchronised(time.perf_counter, torch.device(device))
    (matrix @ matrix).sum().item()  # warm-up
    started_s = now_s()
    for _ in range(20):
        product = matrix @ matrix
    queued_s = time.perf_counter()
    stamped_s = now_s()
    at_once_s = time.perf_counter()
    product.sum().item()
    assert stamped_s - started_s > 2 * (queued_s - started_s)
    assert time.perf_counter() - at_once_s < (stamped_s - started_s) / 2
