"""Experts between a GPU and where they lie: the source's baselines, against slow readings of their rules.

Prices are a closed form, so that every decision can be worked out by hand.

Legend: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.base import DeviceError, Unit
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.experts import execute
from engines.model.transformer import KeyValueCache, Transformer
from engines.oracle import Oracle, mix_experts
from engines.profile import Profile
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ChunkPhase, ModelSizes
from engines.techniques.parameters import CustomParameters
from harness.plan import build_plan
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import BUNDLED, copy_tokenizer
from tests.plans import HOST, raw_plan
from tests.test_experts import random_experts, random_routing, unusual_experts
from tests.test_prediction import SPARSE
from tests.test_preflight import checked, problems
from tests.test_presets import pairs_of

pytestmark = pytest.mark.numbers

FETCH: dict[str, object] = {"kind": "fetch"}
SMALL = ModelSizes(6, 2, 16, 24, 2 * 3 * 16 * 24, 4, 4)


@dataclass(frozen=True)
class ToyCosts:
    """Of a call: a launch, and so much a row. Of a link: so much an expert."""

    launch_s: dict[str, float]
    row_s: dict[str, float]
    fetch_s: float = 0.0

    def call_s(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        kind = unit.partition(":")[0]
        if kind not in self.launch_s:
            raise DeviceError(f"the toy has no {unit}")
        return n_experts * share * self.launch_s[kind] + share * n_rows * self.row_s[kind]

    def call_j(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        return 0.0

    def transfer_s(self, source: Unit, target: Unit, n_bytes: float) -> float:
        return self.fetch_s

    def capacity_bytes(self, unit: Unit) -> float | None:
        return None


TOY = ToyCosts({"gpu": 0.5, "cpu": 1.0, "ndp": 2.0}, {"gpu": 0.1, "cpu": 1.0, "ndp": 2.0}, 6.0)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(load_checkpoint(str(BUNDLED), torch.float32))


@pytest.fixture(scope="module")
def context(model: Transformer) -> BuildContext:
    counts = {layer: tuple(16 * layer + (7 * e) % 16 for e in range(16)) for layer in range(model.config.n_layers)}
    return BuildContext(64, own_sizes(model.config), Profile(counts, 2, 4), TOY, model)


def custom(place: dict[str, object], move: dict[str, object] | None = None) -> CustomParameters:
    return CustomParameters.model_validate({"place": place, "move": move or {"kind": "nothing"}, "backbone": "gpu"})


def planned(technique: Technique, context: BuildContext, load: Sequence[int], layer: int = 0) -> DispatchPlan:
    """Of a chunk in which expert e has load[e] rows, top-1."""
    ids = torch.tensor([[e] for e, n in enumerate(load) for _ in range(n)], dtype=torch.int64).reshape(-1, 1)
    shown = Shown(technique.asks, context.sizes)
    seen = shown.layer(layer, "prefill", Routing(ids, torch.ones(ids.shape), len(load)), None, None)
    plan = technique.plan(seen)
    shown.ran(seen, plan)
    return plan


def units(plan: DispatchPlan) -> dict[int, str]:
    return {call.experts[0]: call.unit for call in plan.calls}


LOADS = st.lists(st.integers(0, 9), min_size=16, max_size=16)


# --- the decisions, each against a slow reading -----------------------------------------------------------------------


def seconds(unit: str, load: int, resident: bool = True) -> float:
    launch, row = {"gpu": (0.5, 0.1), "cpu": (1.0, 1.0), "ndp": (2.0, 2.0)}[unit]
    return launch + row * load + (0.0 if resident else 6.0)


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(0, 16))
def test_least_sum_puts_each_expert_where_it_costs_less(model: Transformer, load: list[int], n_slots: int) -> None:
    """Experts of the lowest numbers lie in the GPU's memory, in each layer alike: of layer 0 one of every n_layers."""
    n_layers = model.config.n_layers
    context = BuildContext(64, own_sizes(model.config), None, TOY, model)
    move = FETCH | {"gpu_slots": n_slots * n_layers, "stay": "first"} if n_slots else FETCH
    plan = planned(custom({"kind": "cheaper"}, move).build(context), context, load)
    expected = {
        e: "gpu" if seconds("gpu", n, e < n_slots) <= seconds("cpu", n) else "cpu" for e, n in enumerate(load) if n
    }
    assert units(plan) == expected
    on_gpu = [e for e, unit in expected.items() if unit == "gpu"]
    fetched = [e for e in on_gpu if e >= n_slots]
    assert [(t.expert, t.source, t.target, t.stays) for t in plan.transfers] == [
        (e, "cpu", "gpu", False) for e in fetched
    ]
    assert (plan.hits, plan.misses) == (len(on_gpu) - len(fetched), len(fetched))


def test_least_max_shares_the_work(context: BuildContext) -> None:
    """Three experts of ten rows: 11 s each on the CPU, 7.5 s on the GPU. All on the GPU is the least sum, 22.5 s; two
    there and one on the CPU end after 15 s."""
    load = [10, 10, 10] + [0] * 13
    assert set(units(planned(custom({"kind": "cheaper"}, FETCH).build(context), context, load)).values()) == {"gpu"}
    sharing = custom({"kind": "cheaper", "objective": "max"}, FETCH).build(context)
    found = sorted(units(planned(sharing, context, load)).values())
    assert found == ["cpu", "gpu", "gpu"]


def test_units_work_side_by_side_only_where_the_objective_says_so(context: BuildContext) -> None:
    for objective, overlaps in (("sum", False), ("max", True)):
        technique = custom({"kind": "cheaper", "objective": objective}, FETCH).build(context)
        assert {call.kind.overlaps for call in planned(technique, context, [1] * 16).calls} == {overlaps}


def slow_monde(load: Sequence[int], n: int, h: int | None) -> dict[int, str]:
    """h: None tries all."""
    active = sorted((e for e in range(16) if load[e]), key=lambda e: (-load[e], e))

    def took(h: int) -> float:
        busy = [sum(seconds("ndp", load[e]) for e in active[h:] if e % n == unit) for unit in range(n)]
        return max(sum(seconds("gpu", load[e], resident=False) for e in active[:h]), *busy)

    best = min(range(len(active) + 1), key=took) if h is None else h
    return {e: "gpu" if i < best else f"ndp:{e % n}" for i, e in enumerate(active)}


@settings(max_examples=60, deadline=None)
@given(LOADS, st.integers(1, 6), st.one_of(st.none(), st.integers(0, 16)))
def test_the_hottest_run_on_the_gpu_and_the_rest_where_they_lie(
    context: BuildContext, load: list[int], n: int, h: int | None
) -> None:
    place = {"kind": "hottest", "ndps": n, "h": "least" if h is None else h}
    plan = planned(custom(place, FETCH).build(context), context, load)
    expected = slow_monde(load, n, h)
    assert units(plan) == expected
    fetched = {t.expert: (t.source, t.target) for t in plan.transfers}
    assert fetched == {e: (f"ndp:{e % n}", "gpu") for e, unit in expected.items() if unit == "gpu"}


@pytest.mark.parametrize(("alpha", "active", "h"), [(1.0, 16, 2), (2.0, 16, 5), (1.0, 3, 0), (100.0, 16, 16)])
def test_the_factor_is_alpha_of_the_links_share(context: BuildContext, alpha: float, active: int, h: int) -> None:
    """An expert of one row takes 4 s on an NDP unit, 1 s of four together; fetching it takes 6 s. 1 / 7 of 16 experts
    is 2.3, twice that 4.6; of three it is 0.4."""
    place = {"kind": "hottest", "ndps": 4, "h": "factor", "alpha": alpha}
    plan = planned(custom(place, FETCH).build(context), context, [1] * active + [0] * (16 - active))
    assert list(units(plan).values()).count("gpu") == h


def test_without_memory_of_its_own_the_gpu_fetches_nothing(context: BuildContext) -> None:
    """Duplex: two experts of ten rows and two of one. 1.5 and 0.6 s on the GPU, 22 and 4 s on the other: all but one of
    the light ones on the GPU is 3.6 s, beside 4 s; all there are 4.2 s."""
    technique = custom({"kind": "hottest", "ndps": 1}).build(context)
    plan = planned(technique, context, [1, 10, 1, 10] + [0] * 12)
    assert units(plan) == {0: "gpu", 1: "gpu", 2: "ndp:0", 3: "gpu"}
    assert not len(plan.transfers)
    assert (plan.hits, plan.misses) == (None, None)


# --- what lies in the GPU's memory ------------------------------------------------------------------------------------


def lying(technique: Technique, context: BuildContext) -> list[tuple[int, int]]:
    shown = Shown(technique.asks, context.sizes)
    assert shown.residency is not None
    layers, experts = shown.residency.whole_LE("gpu").nonzero()
    return list(zip(layers.tolist(), experts.tolist(), strict=True))


def test_the_most_popular_of_all_layers_lie_there_from_the_start(context: BuildContext) -> None:
    """The last of four layers was chosen most; there the experts with the highest (7 e) mod 16: 9, 2, 11."""
    technique = custom({"kind": "cheaper"}, FETCH | {"gpu_slots": 3}).build(context)
    assert lying(technique, context) == [(3, 2), (3, 9), (3, 11)]


def test_the_first_of_each_layer_lie_there_from_the_start(context: BuildContext) -> None:
    technique = custom({"kind": "one_unit", "unit": "gpu"}, FETCH | {"gpu_slots": 6, "stay": "first"}).build(context)
    assert lying(technique, context) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), LOADS), max_size=6), st.integers(0, 64))
def test_what_is_fetched_is_not_kept_and_the_memory_holds_what_it_may(
    context: BuildContext, steps: list[tuple[int, list[int]]], n_slots: int
) -> None:
    """Of each step, every expert that the GPU calls lies there or is fetched, and each only once."""
    technique = custom({"kind": "hottest", "ndps": 2}, FETCH | {"gpu_slots": n_slots}).build(context)
    shown, start = Shown(technique.asks, context.sizes), lying(technique, context)
    assert len(start) == n_slots
    for layer, load in steps:
        ids = torch.tensor([[e] for e, n in enumerate(load) for _ in range(n)], dtype=torch.int64).reshape(-1, 1)
        seen = shown.layer(layer, "prefill", Routing(ids, torch.ones(ids.shape), 16), None, None)
        plan = technique.plan(seen)
        shown.ran(seen, plan)
        called = {call.experts[0] for call in plan.calls if call.unit == "gpu"}
        fetched = [t.expert for t in plan.transfers]
        assert sorted(fetched) == sorted(called - {e for own, e in start if own == layer})
        assert plan.transfers.n_bytes == len(fetched) * context.bytes_to_move
        assert shown.residency is not None
        layers, experts = shown.residency.whole_LE("gpu").nonzero()
        assert list(zip(layers.tolist(), experts.tolist(), strict=True)) == start


def test_of_equal_loads_those_in_the_memory_come_first(context: BuildContext) -> None:
    """Expert 5 lies there; two of six equal ones run on the GPU."""
    counts = {layer: tuple(9 if (layer, e) == (0, 5) else 1 for e in range(16)) for layer in range(4)}
    known = replace(context, profile=Profile(counts, 2, 4))
    technique = custom({"kind": "hottest", "ndps": 3, "h": 2}, FETCH | {"gpu_slots": 1}).build(known)
    found = units(planned(technique, known, [1] * 6 + [0] * 10))
    assert found == {0: "gpu", 1: "ndp:1", 2: "ndp:2", 3: "ndp:0", 4: "ndp:1", 5: "gpu"}


# --- what units send each other ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [{"kind": "cheaper"}, {"kind": "hottest", "ndps": 3, "h": 1}])
@pytest.mark.parametrize("n_tokens", [1, 13])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_row_of_a_token_goes_to_each_unit_that_computes_for_it_and_a_result_comes_back(
    model: Transformer, place: dict[str, object], n_tokens: int, phase: ChunkPhase
) -> None:
    """16 values of 4 bytes each way, for tokens one by one."""
    _, routing = random_routing(n_tokens)
    context = BuildContext(16, SMALL, Profile(dict.fromkeys(range(4), (1,) * 6), 2, 1), TOY, model)
    technique = custom(place, FETCH).build(context)
    plan = technique.plan(Shown(technique.asks, SMALL).layer(0, phase, routing, None, None))
    where = units(plan)
    visits = [unit for ids in routing.expert_ids_TK.tolist() for unit in {where[e] for e in ids} if unit != "gpu"]
    out, back = plan.exchanges
    assert out.units == back.units
    assert dict(zip(out.units, out.bytes_NN[0], strict=True)) == {
        "gpu": 0,
        **{unit: 64 * visits.count(unit) for unit in visits},
    }
    assert [list(column) for column in zip(*back.bytes_NN, strict=True)] == [list(row) for row in out.bytes_NN]
    assert plan.counters().bytes_exchanged == 2 * 64 * len(visits)


def test_where_the_gpu_computes_all_nothing_is_sent_and_in_one_memory_none_is_counted(context: BuildContext) -> None:
    load = [1, 2, 3] + [0] * 13
    on_gpu = custom({"kind": "hottest", "h": 16}, FETCH).build(context)
    assert planned(on_gpu, context, load).counters().bytes_exchanged == 0
    of_one_memory = custom({"kind": "hottest", "h": 1}).build(context)
    assert planned(of_one_memory, context, load).counters().bytes_exchanged is None


def test_tokens_start_where_the_backbone_is(context: BuildContext) -> None:
    """Three rows of 192 values, attention on the CPU: the GPU computes an expert of two rows, and a unit one of one."""
    place, load = {"kind": "hottest", "ndps": 1, "h": 1}, [2, 1] + [0] * 14
    raw = {"place": place, "move": FETCH, "backbone": "cpu"}
    plan = planned(CustomParameters.model_validate(raw).build(context), context, load)
    assert plan.exchanges[0].units == ("cpu", "gpu", "ndp:0")
    assert plan.exchanges[0].bytes_NN[0] == (0, 2 * 192 * 4, 1 * 192 * 4)


# --- what is computed is the oracle's ---------------------------------------------------------------------------------

ARMS: tuple[tuple[dict[str, object], dict[str, object]], ...] = (
    ({"kind": "cheaper"}, FETCH | {"gpu_slots": 2}),
    ({"kind": "cheaper", "objective": "max"}, FETCH),
    ({"kind": "hottest", "ndps": 3}, FETCH),
    ({"kind": "hottest", "h": "factor", "ndps": 4}, FETCH | {"gpu_slots": 4, "stay": "first"}),
    ({"kind": "hottest", "ndps": 1}, {"kind": "nothing"}),
    ({"kind": "one_unit", "unit": "gpu"}, FETCH),
)


@pytest.mark.parametrize(("place", "move"), ARMS)
@pytest.mark.parametrize("kind", ["plain", "biased", "input", "gelu"])
@pytest.mark.parametrize("load", ["drawn", "one takes all", "a single token"])
def test_answers_of_experts_are_the_oracles(
    model: Transformer, place: dict[str, object], move: dict[str, object], kind: str, load: str
) -> None:
    """Six experts, some of them without rows."""
    experts = random_experts() if kind == "plain" else unusual_experts(kind)
    hidden, routing = random_routing(1 if load == "a single token" else 13)
    if load == "one takes all":
        routing = replace(routing, expert_ids_TK=torch.full((13, 1), 4), weights_TK=routing.weights_TK[:, :1])
    context = BuildContext(16, SMALL, Profile(dict.fromkeys(range(4), (1,) * 6), 2, 1), TOY, model)
    technique = custom(place, move).build(context)
    phases: tuple[ChunkPhase, ...] = ("prefill", "decode")
    for phase in phases:
        shown = Shown(technique.asks, SMALL)
        plan = technique.plan(shown.layer(0, phase, routing, None, None))
        found, expected = execute(plan, hidden, experts), mix_experts(hidden, routing, experts)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert set(pairs_of(plan, 24).values()) == {1}
        assert plan.dropped_pairs == 0


@pytest.fixture(scope="module", params=SPARSE)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder = tmp_path_factory.mktemp(request.param)
    write_family(folder, CASES[request.param])
    copy_tokenizer(folder)
    return Transformer(load_checkpoint(str(folder), torch.float32))


def logits(model: Transformer, technique: Technique, shown: Shown | None = None) -> torch.Tensor:
    """Two sequences together: 24 and 16 tokens prefilled, then three steps of one each."""
    tokens = torch.randint(1, 2000, (2, 27), generator=torch.Generator().manual_seed(5))
    caches = [KeyValueCache(model.config) for _ in tokens]
    for cache in caches:
        cache.start(27)
    steps: list[tuple[ChunkPhase, list[torch.Tensor]]] = [("prefill", [tokens[0][:24], tokens[1][:16]])]
    steps += [("decode", [tokens[0][24 + i : 25 + i], tokens[1][16 + i : 17 + i]]) for i in range(3)]
    with torch.inference_mode():
        rows = [model.forward_batch(parts, caches, technique, phase, None, None, shown)[0] for phase, parts in steps]
        return model.logits(torch.cat(rows))


def test_answers_of_each_family_are_the_oracles(family: Transformer) -> None:
    """In batches: prefill and decode."""
    expected, sizes = logits(family, Oracle()), own_sizes(family.config)
    assert sizes is not None
    counts = dict.fromkeys(range(sizes.n_layers), (1,) * sizes.n_experts)
    for place, move in ARMS:
        context = BuildContext(64, sizes, Profile(counts, sizes.top_k, 1), TOY, family)
        technique = custom(place, move).build(context)
        found = logits(family, technique, Shown(technique.asks, sizes))
        assert float((found - expected).norm() / expected.norm()) < 1e-5, (place, move)


# --- what does not fit is told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "move", "words"),
    [
        ({"kind": "cheaper"}, {"kind": "cache"}, "use place one_unit with unit cpu"),
        ({"kind": "one_unit", "unit": "cpu"}, FETCH, "brings experts to a gpu, and place one_unit computes on cpu"),
        ({"kind": "hottest", "h": "factor"}, {"kind": "nothing"}, "nothing travels"),
        ({"kind": "hottest", "alpha": 2.0}, FETCH, 'alpha needs h = "factor"'),
        ({"kind": "cheaper"}, FETCH | {"stay": "first"}, "stay needs gpu_slots"),
        ({"kind": "hottest", "ndps": 0}, FETCH, "greater than or equal to 1"),
        ({"kind": "hottest", "h": -1}, FETCH, "greater than or equal to 0"),
    ],
)
def test_choices_that_do_not_fit_are_refused(place: dict[str, object], move: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        custom(place, move)


@pytest.mark.parametrize("layout", [{"kind": "blocks", "block_size": 4}, {"kind": "all_experts"}])
def test_layouts_whose_rows_are_not_priced_are_refused(layout: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="place cheaper prices exact rows"):
        CustomParameters.model_validate({"place": {"kind": "cheaper"}, "layout": layout})


def test_a_machine_without_the_units_is_told_when_the_technique_is_built(context: BuildContext) -> None:
    without = replace(context, costs=ToyCosts({"gpu": 1.0, "cpu": 1.0}, {"gpu": 1.0, "cpu": 1.0}))
    with pytest.raises(DeviceError, match="the toy has no ndp:0"):
        custom({"kind": "hottest"}, FETCH).build(without)


def test_more_slots_than_experts_are_refused(context: BuildContext) -> None:
    with pytest.raises(EngineError, match="gpu_slots = 65 experts in the GPU's memory, and the model has 64"):
        custom({"kind": "cheaper"}, FETCH | {"gpu_slots": 65}).build(context)


@pytest.mark.parametrize(
    ("technique", "words"),
    [
        ({"name": "monde", "ndps": 7}, "costs_of: ndps = 7, and sheet rtx5080-ndp has 6 NDP units; lower it"),
        ({"name": "ndp", "ndps": 7}, "costs_of: ndps = 7, and sheet rtx5080-ndp has 6 NDP units; lower it"),
        ({"name": "monde", "ndps": 0}, "technique.ndps: must be greater than or equal to 1, found 0"),
        ({"name": "monde", "h": 17}, "h = 17 experts on the GPU, and a layer has 16; lower it"),
        ({"name": "fiddler", "costs_of": "m2-ultra"}, "costs_of: sheet m2-ultra has no link from cpu to gpu"),
        ({"name": "fiddler", "costs_of": "rtx5080"}, "costs_of: no sheet 'rtx5080'; did you mean rtx5080-ndp?"),
        ({"name": "fiddler", "gpu_slots": 65}, "gpu_slots = 65 experts in the GPU's memory, and the model has 64"),
    ],
)
def test_a_plan_check_tells_what_does_not_fit(technique: dict[str, object], words: str) -> None:
    (told,) = problems(engine=[{"name": "arm", "technique": technique}])
    assert words in told


def test_experts_that_stay_fit_in_the_gpus_memory() -> None:
    """16 GiB. Phi-3.5-MoE's experts have 157,286,400 bytes: 109 fit. Its 32 layers take the plans of 4 in turn, so 13
    experts are 104, and 14 are 112."""
    device = {"name": "model:rtx5080-ndp", "priced_as": "phi-3.5-moe"}
    arms = [{"name": f"{n}", "technique": {"name": "fiddler", "gpu_slots": n, "stay": "first"}} for n in (13, 14)]
    assert checked(engine=arms[:1], device=[device]).cells
    (told,) = problems(engine=arms, device=[device])
    assert told == (
        "engine 14: gpu_slots = 14 of 4 layers are 112 of 32, 17.6 GB, and the GPU of model:rtx5080-ndp holds 17.2 GB;"
        " lower it"
    )


def test_units_that_share_a_memory_are_not_priced_where_a_link_lies_between_them() -> None:
    duplex = {"name": "duplex", "technique": {"name": "duplex"}}
    plan = build_plan(raw_plan(engine=[duplex], device=[HOST, {"name": "model:rtx5080-ndp"}]))
    assert [cell.cell.device for cell in plan.cells] == ["host"]
    assert "duplex takes the gpu and ndp:0 to share a memory, and its sheet has link pcie" in plan.skipped[0]
