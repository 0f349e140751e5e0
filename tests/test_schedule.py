"""The plan's second reader: amounts of work worked out by hand, and where each operation runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from devices.models.operation import Operation, operation_seconds
from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.calls import CallKind, Calls, ExpertCall, Width
from engines.dispatch import DispatchPlan, Exchange, Transfer, Transfers
from engines.errors import EngineError
from engines.model.checkpoints import tensor_shapes
from engines.model.model_config import parse_model_config
from engines.pricing.model_shape import WeightBits
from engines.pricing.priced_step import PricedStep
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.schedule import lm_head, operations
from engines.pricing.shapes import NAMED_SHAPES, ModelShape, own_shape, priced_shape
from engines.pricing.travels import Travels
from engines.techniques.presets import preset_parameters
from tests.fakes.published import PUBLISHED
from tests.toy_sheet import toy_sheet

# Values per layer: attention 16 + 8 + 8 + 16 = 48, expert 3 x 12 = 36, dense FFN 3 x 32 = 96. A row is 8 bytes.
TOY = ModelShape(
    name="toy", n_layers=2, hidden=4, n_heads=2, n_kv_heads=1, head_dim=2, dense_width=8, n_experts=2, top_k=1,
    expert_width=3, vocabulary=10,
)  # fmt: skip
FFN = "expert_ffn"
STEP = PricedStep(n_tokens=5, kv_length=7)


def plan(*calls: ExpertCall, n_tokens: int = 5, transfers: tuple[Transfer, ...] = ()) -> DispatchPlan:
    n_rows = sum(call.n_rows for call in calls)
    rows = torch.zeros(n_rows), torch.zeros(n_rows)
    return DispatchPlan(n_tokens, *rows, Calls.of(calls), n_tokens, 0, Transfers.of(transfers))


def call(experts: tuple[int, ...], rows: tuple[int, ...], valid: tuple[int, ...], kind: CallKind) -> ExpertCall:
    return ExpertCall(experts, rows, valid, first_row=0, kind=kind)


CPU, GPU, NPU = CallKind("cpu"), CallKind("gpu"), CallKind("npu", static=True)
MIXED = plan(call((0,), (3,), (3,), CPU), call((1,), (4,), (2,), NPU))


def test_a_two_layer_toy_is_priced_as_by_hand() -> None:
    attention = Operation("attention", "npu", "attention", flops=2 * 5 * 48 + 4 * 5 * 7 * 4, weight_bytes=96)
    norm = Operation("norm", "cpu", "norm", moved_bytes=2 * 5 * 8)
    after_attention = Operation("attention residual", "cpu", "residual", moved_bytes=5 * 8)
    residual = Operation("residual", "cpu", "residual", moved_bytes=5 * 8)
    assert operations(STEP, [MIXED, None], TOY, "npu", None) == [
        norm,
        attention,
        after_attention,
        norm,
        Operation("router", "cpu", "router", flops=2 * 5 * 4 * 2, weight_bytes=4 * 2 * 2),
        Operation("gather", "cpu", "gather_dynamic", moved_bytes=3 * 8),
        Operation("gather", "cpu", "gather_static", moved_bytes=2 * 8),
        Operation("padding", "cpu", "padding", moved_bytes=2 * 8),
        Operation("expert FFN", "cpu", "expert_ffn", flops=2 * 3 * 36, weight_bytes=72),
        Operation("expert FFN", "npu", "expert_ffn", flops=2 * 4 * 36, weight_bytes=72),
        Operation("scatter", "cpu", "scatter", moved_bytes=5 * 8),
        residual,
        norm,
        attention,
        after_attention,
        norm,
        Operation("dense FFN", "npu", "expert_ffn", flops=2 * 5 * 96, weight_bytes=192),
        residual,
    ]


@pytest.mark.parametrize(
    ("preset", "attention", "experts"),
    [("coreml-cpu", "cpu", "cpu"), ("anemll", "npu", "cpu"), ("npumoe-t", "npu", "npu")],
)
def test_a_preset_moves_attention_and_static_experts_only(preset: str, attention: str, experts: str) -> None:
    """Table 2 of NPUMoE: attention and expert FFN of Core ML (CPU only), ANEMLL and its own."""
    parameters = preset_parameters(preset)()
    kind = CallKind(*parameters.units, static=True)
    static = plan(call((0,), (4,), (4,), kind), call((1,), (4,), (1,), kind))
    priced = operations(STEP, [static], replace(TOY, dense_width=0), parameters.backbone, None)
    assert {o.unit for o in priced if o.name == "attention"} == {attention}
    assert {o.unit for o in priced if o.name == "expert FFN"} == {experts}
    assert {o.unit for o in priced if o.name not in ("attention", "expert FFN")} == {"cpu"}


def test_a_graph_above_the_limit_falls_back_to_the_cpu() -> None:
    pair = plan(call((0, 1), (4, 4), (4, 1), NPU))  # 2 x 72 bytes of weights
    shape = replace(TOY, n_layers=1)

    def unit(limit: float | None) -> str:
        return next(o.unit for o in operations(STEP, [pair], shape, "npu", limit) if o.kernel == FFN)

    assert [unit(143), unit(144), unit(None)] == ["cpu", "npu", "npu"]


def test_an_npu_takes_no_shape_that_follows_the_routing() -> None:
    dynamic = plan(call((0,), (4,), (4,), CallKind("npu")))
    priced = operations(STEP, [dynamic], replace(TOY, n_layers=1), "npu", None)
    assert [o.unit for o in priced if o.kernel == FFN] == ["cpu"]


def test_a_naive_launch_costs_more_only_where_the_framework_launches_on_the_npu() -> None:
    naive = plan(call((0, 1), (4, 4), (4, 1), replace(NPU, naive_launch=True)))
    units = {}
    for limit in (144, 143):
        (launch,) = [o for o in operations(STEP, [naive], replace(TOY, n_layers=1), "cpu", limit) if o.kernel == FFN]
        units[limit] = launch.unit, launch.naive_launch
    assert units == {144: ("npu", True), 143: ("cpu", False)}


@pytest.mark.parametrize(
    ("cores", "values"),
    [
        # Expert width 3, in slices of 2 and 1 columns: 24 and 12 of 36 values.
        ((CallKind("core:0", width=Width(0, 2)), CallKind("core:1", width=Width(2, 3))), (24, 12)),
        # Model width 4, in slices of 3 and 1: 27 and 9.
        ((CallKind("core:0", hidden=Width(0, 3)), CallKind("core:1", hidden=Width(3, 4))), (27, 9)),
    ],
)
def test_a_slice_of_an_expert_has_its_part_of_flop_and_weights_and_gathers_its_rows_once(
    cores: tuple[CallKind, ...], values: tuple[int, ...]
) -> None:
    parts = [call((0,), (5,), (5,), core) for core in cores]
    shared = DispatchPlan(5, torch.zeros(5), torch.zeros(5), Calls.of(parts), 5, 0)
    priced = operations(STEP, [shared], replace(TOY, n_layers=1), "cpu", None)
    launches = [o for o in priced if o.kernel == FFN]
    assert [(o.unit, o.flops, o.weight_bytes) for o in launches] == [
        (f"core:{i}", 2 * 5 * n, 2 * n) for i, n in enumerate(values)
    ]  # fmt: skip
    assert [(o.name, o.moved_bytes) for o in priced if o.name in ("gather", "padding", "scatter")] == [
        ("gather", 5 * 8), ("scatter", 5 * 8)
    ]  # fmt: skip


def test_a_call_that_finds_its_expert_loaded_reads_no_weights() -> None:
    first = ExpertCall((0,), (4,), (4,), 0, CPU, weight_loads=1)
    again = ExpertCall((0,), (4,), (1,), 4, CPU, weight_loads=0)
    priced = operations(STEP, [plan(first, again)], replace(TOY, n_layers=1), "cpu", None)
    assert [(o.flops, o.weight_bytes) for o in priced if o.kernel == FFN] == [(2 * 4 * 36, 72), (2 * 4 * 36, 0)]


def test_experts_of_units_that_overlap_take_as_long_as_the_longer() -> None:
    """On the toy sheet: the NPU's 4 rows take 0.601 s, the CPU's 3 rows 0.432 s. All else waits."""
    both = [replace(kind, overlaps=True) for kind in (CPU, NPU)]
    together = plan(call((0,), (3,), (3,), both[0]), call((1,), (4,), (2,), both[1]))
    taken = []
    for one in (MIXED, together):
        timeline = Timeline(toy_sheet())
        priced = operations(STEP, [one], replace(TOY, n_layers=1), "npu", None)
        timeline.run(priced)
        taken.append(timeline.now_s())
        assert {o.name for o in priced if o.alongside} == ({"expert FFN"} if one is together else set())
    npu_s, cpu_s = 0.5 + 72e-3 + 2 * 4 * 36 * 1e-4, 2 * 3 * 36 * 2e-3
    assert taken[0] - taken[1] == pytest.approx(min(npu_s, cpu_s))


def test_rows_that_are_not_fetched_cost_no_padding() -> None:
    """The guide's block [T0, T2, T5, -1]: four rows brought in, or three. All four are computed."""
    kinds = CPU, replace(CPU, skips_padding=True)
    for kind, moved in zip(kinds, (4, 3), strict=True):
        priced = operations(STEP, [plan(call((0,), (4,), (3,), kind))], replace(TOY, n_layers=1), "cpu", None)
        assert sum(o.moved_bytes for o in priced if o.name in ("gather", "padding")) == moved * 8
        assert [o.flops for o in priced if o.kernel == FFN] == [2 * 4 * 36]


def test_a_gpu_takes_any_shape_and_size() -> None:
    large = plan(call((0, 1), (4, 4), (4, 1), GPU))
    priced = operations(STEP, [large], replace(TOY, n_layers=1), "gpu", 1.0)
    assert {o.unit for o in priced if o.kernel in (FFN, "attention")} == {"gpu"}


def test_a_grouped_call_is_one_launch_of_all_its_experts() -> None:
    pair = plan(call((0, 1), (4, 4), (4, 1), NPU))
    priced = operations(STEP, [pair], replace(TOY, n_layers=1), "npu", None)
    (launch,) = [o for o in priced if o.kernel == FFN]
    assert (launch.launches, launch.flops, launch.weight_bytes) == (1, 2 * 8 * 36, 2 * 72)


def test_layers_beyond_the_small_models_reuse_its_plans_cyclically() -> None:
    rows = (1, 2, 3)
    plans = [plan(call((0,), (n,), (n,), CPU)) for n in rows]
    priced = operations(STEP, plans, replace(TOY, n_layers=7), "cpu", None)
    assert [o.flops / (2 * 36) for o in priced if o.kernel == FFN] == [1, 2, 3, 1, 2, 3, 1]


def test_a_shape_without_dense_layers_reuses_the_sparse_plans_only() -> None:
    sparse = plan(call((0,), (2,), (2,), CPU))
    priced = operations(STEP, [None, sparse], replace(TOY, n_layers=3, dense_width=0), "cpu", None)
    assert [o.name for o in priced].count("router") == 3
    assert not any(o.name == "dense FFN" for o in priced)


def test_an_all_sparse_shape_cannot_be_priced_from_a_dense_model() -> None:
    with pytest.raises(EngineError, match="2 layers, none of them sparse"):
        operations(STEP, [None, None], replace(TOY, dense_width=0), "cpu", None)


def test_weights_that_move_over_a_link_are_refused_on_unified_memory() -> None:
    fetched = Transfer(expert=0, layer=0, source="cpu", target="gpu", n_bytes=10)
    offloading = plan(call((0,), (1,), (1,), GPU), transfers=(fetched,))
    with pytest.raises(EngineError, match="moves weights from cpu to gpu"):
        operations(STEP, [offloading], TOY, "cpu", None)


def test_activations_that_units_send_each_other_are_refused_not_free() -> None:
    sends = Exchange("all_reduce", ("rank:0", "rank:1"), ((0, 40), (40, 0)))
    exchanging = replace(plan(call((0,), (5,), (5,), CPU)), exchanges=(sends,))
    with pytest.raises(EngineError, match="rank:0, rank:1 send each other activations, and the modelled machine has"):
        operations(STEP, [exchanging], TOY, "cpu", None)


def test_the_head_reads_its_weights_once() -> None:
    assert lm_head(3, TOY) == Operation("LM head", "cpu", "lm_head", flops=2 * 3 * 40, weight_bytes=80)


def test_the_phi_shape_has_the_sources_sizes() -> None:
    """§5.1: an expert is 150 MB, the FP16 checkpoint 83.75 GB. Norms and biases, unpriced, are counted here."""
    phi = PHI_3_5_MOE
    assert phi.expert_weights * 2 == 150 * 2**20
    norms_and_biases = 4 * 4096 + (4096 + 1024 + 1024 + 4096)
    per_layer = phi.attention_weights + 16 * (phi.expert_weights + phi.hidden) + norms_and_biases
    outside_layers = 2 * phi.vocabulary * phi.hidden + 2 * phi.hidden + phi.vocabulary
    assert round(2 * (32 * per_layer + outside_layers) / 1e9, 2) == 83.75


def config(**changes: object):  # type: ignore[no-untyped-def]
    raw: dict[str, object] = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 8, "num_attention_heads": 4, "head_dim": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 24, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
    }  # fmt: skip
    return parse_model_config({**raw, **changes}, None)


def test_a_models_own_shape_is_its_configs() -> None:
    assert own_shape("m", config()) == ModelShape(
        name="m", n_layers=3, hidden=8, n_heads=4, n_kv_heads=2, head_dim=2, dense_width=0, n_experts=16, top_k=2,
        expert_width=6, vocabulary=50, max_length=64,
    )  # fmt: skip
    assert own_shape("m", config(mlp_only_layers=[0])).dense_width == 24


def test_routing_of_sixteen_experts_top_two_can_be_priced_as_phi() -> None:
    assert priced_shape("phi-3.5-moe", config()) is PHI_3_5_MOE


def test_routing_of_other_experts_cannot_be_priced_as_phi() -> None:
    with pytest.raises(EngineError, match=r"8 experts, top-2, phi-3\.5-moe has 16, top-2"):
        priced_shape("phi-3.5-moe", config(num_experts=8))
    with pytest.raises(EngineError, match=r"16 experts, top-4"):
        priced_shape("phi-3.5-moe", config(num_experts_per_tok=4))


def test_an_unknown_shape_names_those_there_are() -> None:
    with pytest.raises(EngineError, match=r"no shape 'gpt-5'; name a published model \(phi-3\.5-moe"):
        priced_shape("gpt-5", config())


@pytest.mark.parametrize(
    "name",
    [
        "Phi-3.5-MoE-instruct",
        "Phi-tiny-MoE-instruct",
        "Qwen3-30B-A3B",
        "Qwen1.5-MoE-A2.7B",
        "Qwen3-0.6B",
        "Mixtral-8x7B-v0.1",
        "deepseek-moe-16b-base",
    ],
)
def test_parameters_of_a_shape_are_the_values_of_the_checkpoints_matrices(name: str) -> None:
    config = parse_model_config(PUBLISHED[name].config, None)
    matrices = {tensor: shape for tensor, shape in tensor_shapes(config).items() if len(shape) > 1}
    counted = own_shape(name, config).parameters
    # Of Qwen 1.5 the gate of the shared expert, a row a layer, is not in the shape.
    assert counted.total == pytest.approx(sum(map(math.prod, matrices.values())), rel=1e-5)
    of_experts = [math.prod(shape) for tensor, shape in matrices.items() if ".experts." in tensor]
    if config.moe is not None:
        unused = sum(of_experts) * (1 - config.moe.top_k / config.moe.n_experts)
        looked_up = config.vocabulary_size * config.hidden
        assert counted.active == pytest.approx(counted.total - unused - looked_up, rel=1e-5)
    else:
        assert counted.active == counted.total, "the head is the embedding"


@pytest.mark.parametrize(
    ("name", "billions"),
    # 001, Table II, whose Mixtral (42.0) is in GiB of two-byte values: 45.1e9. The shared experts are counted there.
    [("qwen3-30b-a3b", 29.0), ("phi-3.5-moe", 40.3), ("mixtral-8x7b", 45.1), ("deepseek-moe-16b", 15.4)],
)
def test_experts_of_a_named_shape_are_as_large_as_the_source_says(name: str, billions: float) -> None:
    shape = NAMED_SHAPES[name]
    shared = shape.n_sparse_layers * 3 * shape.hidden * shape.shared_width
    assert (shape.routed_bytes / 2 + shared) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("name", "gib"),
    # 003, Table 2, in GiB; its GPT-OSS-120B is right at 36 layers of 128 experts, which its own row misprints.
    [("qwen3-30b-a3b", 54), ("gpt-oss-120b", 213)],
)
def test_memory_of_experts_is_as_source_003_says(name: str, gib: float) -> None:
    assert NAMED_SHAPES[name].routed_bytes / 2**30 == pytest.approx(gib, abs=1)


def test_dense_layers_of_a_named_shape_come_first_where_the_plans_have_none() -> None:
    sparse = plan(call((0,), (2,), (2,), CPU))
    priced = operations(STEP, [sparse], replace(TOY, n_layers=3, n_dense_layers=1), "cpu", None)
    assert [o.name for o in priced if o.name in ("dense FFN", "router")] == ["dense FFN", "router", "router"]
    assert replace(TOY, n_layers=3, n_dense_layers=1).routed_bytes == 2 * 2 * 36 * 2


def test_parameters_of_mixed_layers_are_not_guessed() -> None:
    with pytest.raises(EngineError, match="toy has dense and sparse layers"):
        _ = TOY.parameters


def test_shared_experts_are_priced_for_every_token_beside_the_chosen_ones() -> None:
    """Width 5: 3 x 4 x 5 = 60 values for each of five tokens, where attention runs."""
    shared = Operation("shared FFN", "npu", "expert_ffn", flops=2 * 5 * 60, weight_bytes=120)
    without, with_shared = (
        operations(STEP, [MIXED, None], replace(TOY, shared_width=width), "npu", None) for width in (0, 5)
    )
    after_scatter = [operation.name for operation in with_shared].index("scatter") + 1
    assert with_shared == [*without[:after_scatter], shared, *without[after_scatter:]]
    assert own_shape("m", config()).shared_width == 0
    qwen2_moe = config(architectures=["Qwen2MoeForCausalLM"], shared_expert_intermediate_size=5)
    assert own_shape("m", qwen2_moe).shared_width == 5


def test_a_routers_weights_are_read_where_the_sheet_prices_bytes() -> None:
    """A token of Qwen3-30B-A3B: 2048 x 128 values of two bytes over the bandwidth, above 2 x 2048 x 128 FLOP; routers
    stay as they are where experts are narrow. A line by FLOP alone prices no byte."""
    shape, a6000 = NAMED_SHAPES["qwen3-30b-a3b"], load_sheet("a6000")
    roofline = a6000.units["gpu"].roofline
    assert roofline is not None
    token = PricedStep(1, 9, "decode")
    chosen = plan(*(call((e,), (1,), (1,), GPU) for e in range(8)), n_tokens=1)
    for own in (shape, replace(shape, bits=WeightBits(experts=4.0))):
        listed = operations(token, [chosen], own, "gpu", None, Travels(a6000))
        (router,) = {one for one in listed if one.name == "router"}
        by_hand_s = 2048 * 128 * 2 / roofline.bytes_per_s.value
        assert operation_seconds(a6000, router) == pytest.approx(by_hand_s, rel=1e-12)
        on_toy_s = operation_seconds(toy_sheet(), replace(router, unit="cpu"))
        assert on_toy_s == pytest.approx(2 * 2048 * 128 * 1e-2, rel=1e-12)


def test_a_token_reads_all_weights_but_the_embedding_and_the_experts_that_it_does_not_choose() -> None:
    shape = NAMED_SHAPES["qwen3-30b-a3b"]
    chosen = plan(*(call((e,), (1,), (1,), GPU) for e in range(8)), n_tokens=1)
    listed = operations(PricedStep(1, 9, "decode"), [chosen], shape, "gpu", None, Travels(load_sheet("a6000")))
    read = sum(one.weight_bytes for one in (*listed, lm_head(1, shape, "gpu")))
    embedding = shape.vocabulary * shape.hidden * 2
    assert read == pytest.approx(shape.others_bytes - embedding + 48 * 8 * shape.expert_bytes, rel=1e-12)
