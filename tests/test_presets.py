"""Every preset computes what it says: each kept pair once, in rows of its own, and the oracle's answer where it is
lossless.

Legend: T tokens, K experts per token, E experts, R rows.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.calls import CallKind, Width
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import ExpertWeights, execute
from engines.model.quantised import quantise_int8
from engines.model.transformer import KeyValueCache, Transformer
from engines.oracle import Oracle, mix_experts
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.shapes import sizes_of
from engines.profile import Profile
from engines.profiling import profile_of
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ChunkPhase, ModelSizes
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import PRESETS, preset_parameters
from tests.fakes.random_models import BUNDLED
from tests.techniques import seen
from tests.test_experts import random_experts, random_routing, unusual_experts

pytestmark = pytest.mark.numbers

N_EXPERTS, WIDTH = 6, 24
SIZES = ModelSizes(
    n_experts=N_EXPERTS,
    top_k=2,
    hidden=16,
    expert_width=WIDTH,
    expert_bytes=3 * 16 * WIDTH * 4,
    n_layers=1,
    n_sparse_layers=1,
)


# --- on the bundled model --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(load_checkpoint(str(BUNDLED), torch.float32))


def logits(model: Transformer, technique: Technique) -> torch.Tensor:
    """Two chunks of 24 and one of 5 prefilled, then three tokens decoded."""
    tokens = torch.randint(1, 2000, (56,), generator=torch.Generator().manual_seed(5))
    cache = KeyValueCache(model.config)
    cache.start(len(tokens))
    phases: list[ChunkPhase] = ["prefill"] * 3 + ["decode"] * 3
    shown = Shown(technique.asks, own_sizes(model.config))
    with torch.inference_mode():
        hidden = [
            model.forward(chunk, cache, technique, phase, shown=shown)[0]
            for chunk, phase in zip(tokens.split([24, 24, 5, 1, 1, 1]), phases, strict=True)
        ]
        return model.logits(torch.cat(hidden))


@pytest.mark.parametrize(
    "name",
    [name for name, p in PRESETS.items() if p.choices.route.kind == "router" and not p.choices.move.loads_from_file],
)
def test_a_preset_is_the_oracle_where_it_is_lossless_or_has_room(name: str, model: Transformer) -> None:
    checkpoint = load_checkpoint(str(BUNDLED), torch.float32)
    kind = preset_parameters(name)
    profile = profile_of(model, KeyValueCache(model.config), [list(range(10, 74))], 24)
    # Of techniques over ranks one process computes the calls of all.
    context = BuildContext(24, own_sizes(checkpoint.config), profile, None, model, ranks=2)
    expected = logits(model, Oracle())

    def error(**changes: object) -> float:
        found = logits(model, kind.model_validate(changes).build(context))
        return float((found - expected).norm() / expected.norm())

    if kind().lossless:
        assert error() < 1e-5
    else:
        assert math.isfinite(error())
        room: dict[str, object] = {"multiples": (100.0,)} if "multiples" in kind.model_fields else {"factor": 100.0}
        assert error(**room) < 1e-5


# --- rows ------------------------------------------------------------------------------------------------------------


def pairs_of(plan: DispatchPlan, width: int) -> Counter[tuple[int, int, int]]:
    """How often each (token, expert, column) is computed; of padding, that it weighs nothing. width: columns of the
    expert, or of the model where the calls slice that."""
    found: Counter[tuple[int, int, int]] = Counter()
    for call in plan.calls:
        first, end = call.kind.width or call.kind.hidden or (0, width)
        row = call.first_row
        for expert, n_rows, n_valid in zip(call.experts, call.rows_per_expert, call.valid_per_expert, strict=True):
            assert n_valid <= n_rows
            for r in range(row, row + n_rows):
                token = int(plan.token_R[r])
                assert (token >= 0) == (r < row + n_valid)
                if token < 0:
                    assert float(plan.weight_R[r]) == 0.0
                else:
                    found.update((token, expert, column) for column in range(first, end))
            row += n_rows
    return found


PLACES: tuple[dict[str, object] | None, ...] = (
    None,
    {"kind": "shards", "cores": 3},
    {"kind": "shards", "shard": "hidden", "cores": 3},
    {"kind": "shards", "shard": "blocks", "cores": 2},
)
LAYOUTS = (
    {"kind": "exact"},
    {"kind": "capacity"},
    {"kind": "capacity", "overflow": "saliency", "renormalise_survivors": False},
    {"kind": "tiers", "align": 2},
    {"kind": "tiers", "align": 2, "grouped": True, "overflow": "order"},
    {"kind": "blocks", "block_size": 4},
    {"kind": "blocks", "block_size": 3, "skip_padding_blocks": False, "block_count": "tight"},
    {"kind": "selective", "switch_alpha": 0.8},
    {"kind": "all_experts"},
)


def custom(place: dict[str, object] | None, layout: dict[str, object], profile: Profile, chunk: int) -> Technique:
    chosen = {"layout": layout} | ({} if place is None else {"place": place})
    sizes = SIZES._replace(top_k=profile.top_k)
    return CustomParameters.model_validate(chosen).build(BuildContext(chunk, sizes, profile))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=15)
@given(st.integers(1, 30), st.integers(1, 3), st.sampled_from(["prefill", "decode"]), st.integers(0, 2**31))
def test_each_kept_pair_is_computed_once_over_all_calls_and_slices(
    place: dict[str, object] | None, layout: dict[str, object], n_tokens: int, top_k: int, phase: ChunkPhase, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(n_tokens, N_EXPERTS, generator=generator).argsort(-1)[:, :top_k]
    routing = Routing(ids_TK, torch.rand(n_tokens, top_k, generator=generator) + 0.1, N_EXPERTS)
    counts = tuple(torch.randint(1, 9, (N_EXPERTS,), generator=generator).tolist())
    technique = custom(place, layout, Profile({0: counts}, top_k, n_prompts=1), chunk=max(n_tokens, 8))
    plan = technique.plan(seen(routing, phase, torch.rand(n_tokens, generator=generator)))
    columns = SIZES.hidden if place is not None and place.get("shard") == "hidden" else WIDTH
    computed = pairs_of(plan, columns)
    assert set(computed.values()) <= {1}
    kept = {(token, expert) for token, expert, _ in computed}
    assert len(computed) == columns * len(kept)
    routed = {(token, expert) for token, experts in enumerate(ids_TK.tolist()) for expert in experts}
    assert kept <= routed
    assert len(kept) == plan.kept_pairs
    if layout["kind"] not in ("capacity", "tiers"):
        assert kept == routed


# --- slices ----------------------------------------------------------------------------------------------------------


def int8_experts() -> ExpertWeights:
    experts = random_experts(hidden=16, width=WIDTH)
    narrow = (
        replace(
            one,
            gate_IH=quantise_int8(one.gate_IH),
            up_IH=quantise_int8(one.up_IH),
            down_HI=quantise_int8(one.down_HI),
        )
        for one in experts.experts
    )
    return ExpertWeights(tuple(narrow))


@pytest.mark.parametrize("cores", [1, 2, 5, 16])
@pytest.mark.parametrize("shard", ["hidden", "intermediate"])
@pytest.mark.parametrize("kind", ["plain", "biased", "input", "int8", "gelu"])
def test_slices_of_experts_add_up_to_the_oracle(kind: str, shard: str, cores: int) -> None:
    """Five slices of 24 or 16 columns are of unequal widths; a bias is added once."""
    experts = {"plain": random_experts, "int8": int8_experts}.get(kind, lambda: unusual_experts(kind))()
    hidden, routing = random_routing(13)
    place: dict[str, object] = {"kind": "shards", "shard": shard, "cores": cores}
    plan = custom(place, {"kind": "exact"}, Profile({0: (1,) * 6}, 2, 1), 16).plan(seen(routing))
    assert {call.unit for call in plan.calls} == {f"core:{core}" for core in range(cores)}
    assert plan.counters().computed_rows == 26
    torch.testing.assert_close(
        execute(plan, hidden, experts), mix_experts(hidden, routing, experts), atol=1e-5, rtol=1e-5
    )


def test_slices_are_cut_once() -> None:
    """Cutting columns copies them, which took longer than computing them."""
    experts = random_experts()
    first, other = (CallKind("core:0", width=Width(0, 12)), CallKind("core:1", width=Width(0, 12)))
    assert experts.parts(first) is experts.parts(other)
    down_HI = experts.parts(first).experts[2].down_HI
    assert isinstance(down_HI, torch.Tensor)
    assert torch.equal(down_HI, experts.experts[2].down_HI[:, :12])
    assert experts.parts(CallKind("core:0")) is experts


@pytest.mark.parametrize("layout", [{"kind": "blocks", "block_size": 4}, {"kind": "all_experts"}], ids=str)
@pytest.mark.parametrize("shard", ["hidden", "intermediate", "blocks"])
def test_blocks_on_two_cores_are_the_oracle(shard: str, layout: dict[str, object]) -> None:
    """With padding; decoding too."""
    experts, (hidden, routing) = random_experts(hidden=16, width=WIDTH), random_routing(13)
    technique = custom({"kind": "shards", "shard": shard}, layout, Profile({0: (1,) * 6}, 2, 1), 16)
    phases: tuple[ChunkPhase, ...] = ("prefill", "decode")
    for phase in phases:
        found = execute(technique.plan(seen(routing, phase)), hidden, experts)
        torch.testing.assert_close(found, mix_experts(hidden, routing, experts), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("shard", "cores", "kind", "sent"),
    [
        # Sums of gate and up: 26 rows x 2 x 24 values x 4 bytes. Of two cores each adds up one half and sends it back.
        ("hidden", 2, "all_reduce", [[0, 4992], [4992, 0]]),
        ("hidden", 3, "all_reduce", [[0, 3328, 3328], [3328, 0, 3328], [3328, 3328, 0]]),
        # Results: 26 rows x 16 values x 4 bytes; of dealt calls, one row for each of the 13 tokens.
        ("intermediate", 3, "reduce", [[0, 0, 0], [1664, 0, 0], [1664, 0, 0]]),
        ("blocks", 2, "reduce", [[0, 0], [832, 0]]),
    ],
)
def test_cores_send_each_other_what_they_add_up(shard: str, cores: int, kind: str, sent: list[list[int]]) -> None:
    _, routing = random_routing(13)
    place: dict[str, object] = {"kind": "shards", "shard": shard, "cores": cores}
    plan = custom(place, {"kind": "exact"}, Profile({0: (1,) * 6}, 2, 1), 16).plan(seen(routing))
    (exchange,) = plan.exchanges
    assert (exchange.kind, exchange.units) == (kind, tuple(f"core:{core}" for core in range(cores)))
    assert [list(row) for row in exchange.bytes_NN] == sent
    assert plan.counters().bytes_exchanged == sum(map(sum, sent))


@pytest.mark.parametrize(("value_bytes", "n_sent"), [(4, 26 * 16 * 4), (2, 26 * 16 * 2)])
def test_what_cores_send_is_as_wide_as_activations_are_computed(value_bytes: int, n_sent: int) -> None:
    parameters = CustomParameters.model_validate({"place": {"kind": "shards"}, "layout": {"kind": "exact"}})
    technique = parameters.build(BuildContext(16, SIZES._replace(activation_bytes=value_bytes)))
    assert technique.plan(seen(random_routing(13)[1])).counters().bytes_exchanged == n_sent


def test_a_sheet_prices_activations_as_wide_as_its_shape_has_them() -> None:
    sizes = sizes_of(replace(PHI_3_5_MOE, bytes_per_value=2))
    assert sizes is not None
    assert sizes.activation_bytes == 2


@pytest.mark.parametrize(("shard", "columns"), [("intermediate", 24), ("hidden", 16)])
def test_more_cores_than_columns_are_refused(shard: str, columns: int) -> None:
    place: dict[str, object] = {"kind": "shards", "shard": shard, "cores": 25}
    with pytest.raises(EngineError, match=f"25 cores cannot share {columns} columns"):
        custom(place, {"kind": "exact"}, Profile({0: (1,) * 6}, 2, 1), 16)


# --- loads of weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["hidden", "intermediate"])
@pytest.mark.parametrize("cores", [1, 2, 5])
@pytest.mark.parametrize("layout", [{"kind": "exact"}, {"kind": "blocks", "block_size": 4}], ids=str)
def test_slices_of_an_expert_are_one_load(shard: str, cores: int, layout: dict[str, object]) -> None:
    """So that as many loads are told as of whole experts: one of each that has tokens."""
    _, routing = random_routing(13)
    place: dict[str, object] = {"kind": "shards", "shard": shard, "cores": cores}
    plan = custom(place, layout, Profile({0: (1,) * 6}, 2, 1), 16).plan(seen(routing))
    assert plan.counters().weight_loads == len(set(routing.expert_ids_TK.reshape(-1).tolist()))


@pytest.mark.parametrize(
    ("skips", "loads"),
    [
        # Blocks of experts 0 0 0 | 1 1 | 2, in turn on two cores: the first has 0 0 1, the second 0 1 2.
        (True, [1, 1, 0, 1, 1, 1]),
        (False, [1] * 6),
    ],
)
def test_each_core_of_dealt_blocks_loads_its_own_copy(skips: bool, loads: list[int]) -> None:
    routing = Routing(torch.tensor([[0]] * 6 + [[1]] * 4 + [[2]] * 2), torch.ones(12, 1), N_EXPERTS)
    layout: dict[str, object] = {"kind": "blocks", "block_size": 2, "skip_weight_loads": skips}
    place: dict[str, object] = {"kind": "shards", "shard": "blocks"}
    plan = custom(place, layout, Profile({0: (1,) * 6}, 1, 1), 16).plan(seen(routing))
    assert [(call.unit, call.experts[0]) for call in plan.calls] == [
        ("core:0", 0), ("core:1", 0), ("core:0", 0), ("core:1", 1), ("core:0", 1), ("core:1", 2)
    ]  # fmt: skip
    assert [call.n_weight_loads for call in plan.calls] == loads


def test_the_first_block_of_padding_loads_what_no_block_before_it_left() -> None:
    """One block of expert 0; ceil(2 / 2) + 5 = 6 are provisioned, the rest run the last expert."""
    layout: dict[str, object] = {"kind": "blocks", "block_size": 2, "skip_padding_blocks": False}
    routing = Routing(torch.tensor([[0], [0]]), torch.ones(2, 1), N_EXPERTS)
    plan = custom(None, layout, Profile({0: (1,) * 6}, 1, 1), 16).plan(seen(routing))
    assert [(call.experts[0], call.n_weight_loads) for call in plan.calls] == [(0, 1), (5, 1), *[(5, 0)] * 4]
