"""What travels over links, priced: identities of sources 001 and 003 from plans made by hand, and waiting by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from devices.base import DeviceError
from devices.models.operation import TRANSFER, Operation, operation_seconds
from devices.models.sheet import Sheet, load_sheet
from devices.models.timeline import Timeline
from engines.calls import CallKind, Calls, ExpertCall, Width
from engines.dispatch import NO_TRANSFERS, DispatchPlan, Exchange, Transfer, Transfers
from engines.pricing.priced_step import PricedStep
from engines.pricing.room import lacks_room
from engines.pricing.schedule import operations
from engines.pricing.shapes import NAMED_SHAPES, ModelShape
from engines.pricing.travels import Travels
from engines.techniques.context import ModelSizes
from tests.test_links import linked_sheet

# Values per layer: attention 48, expert 3 x 12 = 36. A row is 8 bytes, an expert 72.
TOY = ModelShape(
    name="toy", n_layers=4, hidden=4, n_heads=2, n_kv_heads=1, head_dim=2, dense_width=0, n_experts=4, top_k=2,
    expert_width=3, vocabulary=10,
)  # fmt: skip
TOKEN = PricedStep(n_tokens=1, kv_length=7)
SHEET = linked_sheet()
GPU = CallKind("gpu")


def of_one_token(kinds: Sequence[CallKind], n_experts: int = 2, transfers: Transfers = NO_TRANSFERS) -> DispatchPlan:
    """Each expert is called with the one row by each kind."""
    calls = [ExpertCall((e,), (1,), (1,), e, kind) for e in range(n_experts) for kind in kinds]
    rows = torch.zeros(n_experts, dtype=torch.int64), torch.ones(n_experts)
    return DispatchPlan(1, *rows, Calls.of(calls), n_experts, 0, transfers)


def transfers_to(layer: int, n_bytes: Sequence[int], as_one: bool, source: str = "cpu") -> Transfers:
    made = Transfers.of(Transfer(e, layer, source, "gpu", n) for e, n in enumerate(n_bytes))
    return replace(made, as_one=as_one)


def joined(*parts: Transfers) -> Transfers:
    listed = [one for part in parts for one in part]
    return replace(Transfers.of(listed), as_one=any(part.as_one for part in parts)) if listed else NO_TRANSFERS


def priced(plans: Sequence[DispatchPlan], shape: ModelShape = TOY, sheet: Sheet = SHEET) -> list[Operation]:
    return operations(TOKEN, plans, shape, "gpu", None, Travels(sheet))


def seconds_of(plans: Sequence[DispatchPlan], shape: ModelShape = TOY, sheet: Sheet = SHEET) -> float:
    timeline = Timeline(sheet)
    timeline.run(priced(plans, shape, sheet))
    return timeline.now_s()


def stages_s(shape: ModelShape = TOY) -> list[float]:
    """Of a step whose experts all lie on the GPU, one after another: up to the first choice of experts, from each to
    the next, and from the last to the end."""
    found = [0.0]
    for operation in priced([of_one_token([GPU])] * shape.n_layers, shape):
        found[-1] += operation_seconds(SHEET, operation)
        if operation.name == "router":
            found.append(0.0)
    return found


copies = st.lists(st.lists(st.integers(1, 2000), min_size=1, max_size=2), min_size=4, max_size=4)


@given(copies)
def test_time_per_token_on_demand_is_the_sum_of_compute_and_copy(bytes_LX: list[list[int]]) -> None:
    """003, §4: sum(t_compute + t_copy): a layer's experts are awaited together."""
    plans = [of_one_token([GPU], 2, transfers_to(layer, own, True)) for layer, own in enumerate(bytes_LX)]
    copy_s = sum(0.25 + n / 20 for own in bytes_LX for n in own)
    assert seconds_of(plans) == pytest.approx(sum(stages_s()) + copy_s)


@given(copies)
def test_time_per_token_with_prefetch_is_the_first_copy_and_the_longer_of_each_pair(bytes_LX: list[list[int]]) -> None:
    """003, §4: t_copy,0 + sum max(t_compute, t_copy), as the copy for layer l + 1 runs beside the compute from l's
    choice to that of l + 1."""
    plans = []
    for layer, own in enumerate(bytes_LX):
        first = transfers_to(0, own, True) if layer == 0 else NO_TRANSFERS
        ahead = NO_TRANSFERS if layer == 3 else transfers_to(layer + 1, bytes_LX[layer + 1], True)
        plans.append(of_one_token([GPU], 2, joined(first, ahead)))
    before, *between, last = stages_s()
    copy_s = [sum(0.25 + n / 20 for n in own) for own in bytes_LX]
    pairs = zip(between, copy_s[1:], strict=True)
    assert seconds_of(plans) == pytest.approx(before + copy_s[0] + sum(max(pair) for pair in pairs) + last)


def test_each_call_waits_for_its_own_expert_where_they_do_not_fill_a_buffer() -> None:
    """001: computing hides behind fetching. Two experts of 200 B take 10.25 s each; a call 0.572 s."""
    one = replace(TOY, n_layers=1)
    plan = of_one_token([GPU], 2, transfers_to(0, [200, 200], False))
    before, last = stages_s(one)
    call_s = 0.5 + 72 / 1000
    gather_s = 0.5 + 16 / 1000
    assert seconds_of([plan], one) == pytest.approx(before + 2 * 10.25 + last - call_s - gather_s)


@pytest.mark.parametrize("said", [True, False], ids=["rows said", "rows derived"])
@pytest.mark.parametrize("n", range(1, 7))
def test_slices_over_dimms_take_the_right_side_of_equation_1(n: int, said: bool) -> None:
    """(N + 1) T_a + T_n E_n with all K experts on the units: T_n = W / (102.4 GB/s N), T_a a row over PCIe."""
    sheet = load_sheet("rtx5080-ndp")
    shape = ModelShape("m", 1, 2048, 32, 4, 128, 0, 128, 8, 768, 1000)
    ends = [768 * i // n for i in range(n + 1)]
    kinds = [CallKind(f"ndp:{i}", width=Width(ends[i], ends[i + 1]), overlaps=True) for i in range(n)]
    sent = (*((0,) * n + (4096,) for _ in range(n)), (4096 if said else 0,) * n + (0,))
    units = tuple(kind.unit for kind in kinds)
    plan = replace(of_one_token(kinds, 8), exchanges=(Exchange("reduce", (*units, "gpu"), sent),))
    timeline = Timeline(sheet)
    listed = operations(TOKEN, [plan], shape, "gpu", None, Travels(sheet))
    timeline.run(listed)
    others_s = sum(
        operation_seconds(sheet, one) for one in listed if one.unit == "gpu"
    )  # everything else stands in the line
    expert_bytes = 3 * 2048 * 768 * 2
    widest = max(end - first for first, end in pairwise(ends)) / 768
    wanted_s = (n + 1) * 4096 / 63e9 + 8 * expert_bytes * widest / 102.4e9
    assert timeline.now_s() - others_s == pytest.approx(wanted_s)


def test_rows_go_to_units_with_memories_of_their_own_and_results_come_back() -> None:
    """One token on two units: a row of 8 B to each and back. Its expert on the GPU needs none."""
    kinds = [CallKind("ndp:0", overlaps=True), CallKind("ndp:1", overlaps=True), replace(GPU, overlaps=True)]
    calls = [ExpertCall((e,), (1,), (1,), e, kind) for e, kind in enumerate(kinds)]
    rows = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    listed = priced([DispatchPlan(1, *rows, Calls.of(calls), 3, 0)], replace(TOY, n_layers=1))
    sent = [(one.name, one.unit, one.moved_bytes) for one in listed if one.kernel == TRANSFER]
    assert sent == [("activations", "pcie:back", 8.0)] * 2 + [("results", "pcie", 8.0)] * 2
    timeline = Timeline(SHEET)
    timeline.run(listed)
    starts_s, places, distinct = timeline.operations(0)
    began = {}
    for at_s, place in zip(starts_s.tolist(), places.tolist(), strict=True):
        began.setdefault((distinct[place][0].name, distinct[place][0].unit), at_s)
    gathered_s = began["activations", "pcie:back"]
    assert began["expert FFN", "gpu"] == gathered_s, "it waits for no row"
    assert began["expert FFN", "ndp:0"] == pytest.approx(gathered_s + 0.25 + 8 / 20)
    assert began["expert FFN", "ndp:1"] == pytest.approx(gathered_s + 2 * (0.25 + 8 / 20))
    assert began["results", "pcie"] == pytest.approx(began["expert FFN", "ndp:0"] + 72 / 50)
    assert began["scatter", "gpu"] == pytest.approx(began["expert FFN", "ndp:1"] + 72 / 50 + 0.25 + 8 / 20)


def test_tokens_not_pairs_travel() -> None:
    """Three tokens with two experts each on ndp:0 and ndp:1: tokens 0, 1 to one unit, 0, 1, 2 to the other."""
    token_R = torch.tensor([0, 1, 1, 0, 1, 2])
    kinds = CallKind("ndp:0"), CallKind("ndp:1")
    calls = [
        ExpertCall((0,), (2,), (2,), 0, kinds[0]),
        ExpertCall((1,), (1,), (1,), 2, kinds[0]),
        ExpertCall((2,), (3,), (3,), 3, kinds[1]),
    ]
    plan = DispatchPlan(3, token_R, torch.ones(6), Calls.of(calls), 6, 0)
    listed = operations(PricedStep(3, 3), [plan], replace(TOY, n_layers=1), "gpu", None, Travels(SHEET))
    assert [one.moved_bytes for one in listed if one.name == "activations"] == [16.0, 24.0]


def test_weights_fetched_in_a_step_are_awaited_in_the_next() -> None:
    """A prefill fetches experts 2 and 3 for decoding, 100.25 s each: the first token waits, the second does not."""
    one = replace(TOY, n_layers=1)
    fetched = Transfers.of(Transfer(e, 0, "ndp:0", "gpu", 2000) for e in (2, 3))
    others = Calls.of(ExpertCall((e,), (1,), (1,), e - 2, GPU) for e in (2, 3))
    decoding = replace(of_one_token([GPU]), calls=others)
    travels, timeline, taken = Travels(SHEET), Timeline(SHEET), []
    for plan in (of_one_token([GPU], 2, fetched), decoding, decoding):
        start_s = timeline.now_s()
        timeline.run(operations(TOKEN, [plan], one, "gpu", None, travels, timeline.n_run))
        taken.append(timeline.now_s() - start_s)
    before, last = stages_s(one)
    call_s, gather_s = 0.5 + 72 / 1000, 0.5 + 16 / 1000
    assert (taken[0], taken[2]) == pytest.approx((before + last, before + last))
    assert taken[0] + taken[1] == pytest.approx(before + 2 * 100.25 + last - call_s - gather_s)


def test_what_no_link_joins_is_refused_not_free() -> None:
    stray = of_one_token([GPU], 2, transfers_to(0, [8], False, "file"))
    with pytest.raises(DeviceError, match="experts would travel from file to gpu, and sheet linked has no link"):
        priced([stray])
    unlinked = SHEET.model_copy(update={"links": {}})
    with pytest.raises(DeviceError, match="activations would travel from gpu to ndp:0, and sheet linked has no link"):
        priced([of_one_token([CallKind("ndp:0")])], sheet=unlinked)


def test_slices_of_another_model_are_priced_at_the_size_of_the_named_one() -> None:
    """The computing model has experts of 6 columns and rows of 2 values; the priced one 3 of 24 bytes and 4. Two units
    cut its 3 columns in 1 and 2. What units send each other is of the priced one in the plan."""
    computed = ModelSizes(4, 2, 2, 6, 72, 4, 4, 2)
    kinds = [CallKind(f"ndp:{i}", width=Width(3 * i, 3 * i + 3), overlaps=True) for i in range(2)]
    sent = ((0, 0, 8), (0, 0, 8), (0, 0, 0))  # 4 values of 2 bytes
    plan = replace(of_one_token(kinds), exchanges=(Exchange("reduce", ("ndp:0", "ndp:1", "gpu"), sent),))
    listed = operations(TOKEN, [plan], replace(TOY, n_layers=1), "gpu", None, Travels(SHEET, computed))
    assert {one.weight_bytes for one in listed if one.name == "expert FFN"} == {24.0, 48.0}
    assert {one.moved_bytes for one in listed if one.name in ("activations", "results")} == {8.0}


def test_a_deeper_model_finds_nothing_fetched_ahead_in_its_first_layer_alone() -> None:
    """Three layers ran, six are priced: as if six had run. The first fetches its own two experts, each but the last
    those of the next."""
    both, shape = [72, 72], replace(TOY, n_layers=6)

    def of(n_layers: int) -> list[DispatchPlan]:
        ahead = [transfers_to(layer + 1, both, True) for layer in range(n_layers - 1)]
        moved = [joined(transfers_to(0, both, True), ahead[0]), *ahead[1:], NO_TRANSFERS]
        return [of_one_token([GPU], 2, one) for one in moved]

    names = [one.name for one in priced(of(3), shape)]
    assert (names.count("expert transfer"), names.count("expert prefetch")) == (2, 5 * 2)
    assert seconds_of(of(3), shape) == pytest.approx(seconds_of(of(6), shape))


def test_a_gpu_does_all_but_the_experts_of_others_and_reads_its_cache() -> None:
    """Keys and values of 7 tokens: 2 x 7 x 2 values of two bytes."""
    listed = priced([of_one_token([CallKind("ndp:0")])], replace(TOY, n_layers=1))
    assert {one.unit for one in listed if one.kernel != TRANSFER and one.name != "expert FFN"} == {"gpu"}
    assert next(one.moved_bytes for one in listed if one.name == "attention") == 2 * 7 * 2 * 2


@pytest.mark.parametrize(
    ("name", "n", "why"),
    [
        ("qwen3-30b-a3b", 2, None),
        ("deepseek-moe-16b", 1, None),
        (
            "phi-3.5-moe",
            2,
            "N.S.: 75.0 GiB of experts of phi-3.5-moe, and ndp:0, ndp:1 of sheet rtx5080-ndp",
        ),
        ("mixtral-8x7b", 2, "N.S.: 84.0 GiB of experts"),
        ("mixtral-8x7b", 4, None),
    ],
)
def test_models_that_the_dimms_cannot_hold_are_not_supported(name: str, n: int, why: str | None) -> None:
    """001, Fig. 9: N.S. at two DIMMs for the two large models."""
    found = lacks_room([f"ndp:{i}" for i in range(n)], True, load_sheet("rtx5080-ndp"), NAMED_SHAPES[name])
    assert (found is None) if why is None else str(found).startswith(why)


def test_experts_that_are_not_fetched_must_fit_where_they_are_computed() -> None:
    sheet, qwen = load_sheet("rtx5080-ndp"), NAMED_SHAPES["qwen3-30b-a3b"]
    assert str(lacks_room(["gpu"], False, sheet, qwen)).startswith("oom: 54.0 GiB of experts of qwen3-30b-a3b, and gpu")
    assert lacks_room(["gpu"], True, sheet, qwen) is None, "192 GB on the host"
    assert lacks_room(["cpu"], False, load_sheet("m2-ultra"), qwen) is None, "the sheet states no memory"


def test_experts_of_a_unit_that_another_stands_in_for_must_fit_into_the_memory_of_that_one() -> None:
    """A fitted sheet has one unit, and plans for a GPU or an NPU are priced there."""
    sheet, qwen = load_sheet("rtx5080-ndp"), NAMED_SHAPES["qwen3-30b-a3b"]
    small = sheet.model_copy(update={"stands_in": {"npu": "gpu"}})
    for backbone in ("gpu", "npu"):
        assert str(lacks_room(["npu", "gpu"], False, small, qwen, backbone)).startswith(
            "oom: 54.0 GiB of experts of qwen3-30b-a3b, and gpu of sheet rtx5080-ndp holds 16.0 GiB"
        )


def test_what_every_token_passes_through_must_fit_too() -> None:
    """By hand, in bf16. Attention of a layer: 4096 x 128 x 2 x (32 + 8) values, of 32 layers 2.68 GB; embedding and
    head: 32000 x 4096 each, 0.52 GB; routers: 4096 x 8. Beside 15 GB of experts they are more than the GPU's 17.2."""
    sheet, mixtral = load_sheet("rtx5080-ndp"), NAMED_SHAPES["mixtral-8x7b"]
    by_hand = 2 * (32 * (4096 * 128 * 2 * 40 + 4096 * 8) + 2 * 32000 * 4096)
    assert mixtral.others_bytes == by_hand
    few = replace(mixtral, n_layers=5)
    assert few.routed_bytes == pytest.approx(14.1e9, rel=0.01)
    assert lacks_room(["gpu"], False, sheet, few) is None
    assert lacks_room(["gpu"], False, sheet, few, "gpu") is None
    wide = replace(few, vocabulary=320_000)
    found = str(lacks_room(["gpu"], False, sheet, wide, "gpu"))
    assert found.startswith("oom: 13.1 GiB of experts of mixtral-8x7b beside 5.27 GiB of the rest, and gpu of sheet")
    large = replace(few, vocabulary=3_200_000)
    found = str(lacks_room(["ndp:0", "ndp:1"], True, sheet, large, "gpu"))
    assert found.startswith("oom: 49.2 GiB of what every token of mixtral-8x7b passes through, and gpu of sheet")
