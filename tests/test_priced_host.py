"""What a sheet can say of a machine that computes with this engine: few rows apart, the engine's own time, stand-ins,
copies from a file. Expected values are worked out by hand from the sheet's round numbers.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from devices.base import DeviceError, Unit
from devices.models.figures import KernelPrice, SheetFigure
from devices.models.operation import Operation, operation_seconds
from devices.models.sheet import Sheet, parse_sheet
from devices.models.timeline import Timeline
from engines.calls import CallKind, Calls, ExpertCall
from engines.dispatch import FILE, DispatchPlan, Exchange, Transfer, Transfers
from engines.kernels import native
from engines.pricing.priced_step import PricedStep
from engines.pricing.schedule import operations
from engines.pricing.shapes import ModelShape
from engines.pricing.travels import Travels
from engines.techniques.context import ChunkPhase
from tests.toy_sheet import figure, host, plan_of_rows

SHAPE = ModelShape("toy", 2, 8, 2, 1, 4, 0, 4, 1, 16, 32, bytes_per_value=4)
WEIGHT_BYTES = 3 * 8 * 16 * 4
KERNELS = Path(native.__file__).parent


def plan_of(kind: CallKind, transfers: Transfers | None = None, experts: tuple[int, ...] = (0,)) -> DispatchPlan:
    import torch

    calls = Calls.of([ExpertCall((e,), (1,), (1,), i, kind) for i, e in enumerate(experts)])
    n = len(experts)
    plan = DispatchPlan(n, torch.arange(n), torch.ones(n), calls, n, 0)
    return plan if transfers is None else DispatchPlan(n, plan.token_R, plan.weight_R, calls, n, 0, transfers)


def test_few_rows_have_a_line_of_their_own() -> None:
    few = f", few_rows = {{ most_flops_per_weight_byte = 2, s_per_weight_byte = {figure(3.0)} }}"
    sheet = host(few=few)
    few_rows = Operation("x", "cpu", "expert_ffn", flops=200, weight_bytes=100)
    more_rows = Operation("x", "cpu", "expert_ffn", flops=201, weight_bytes=100)
    assert operation_seconds(sheet, few_rows) == 300
    assert operation_seconds(sheet, more_rows) == 201


def test_few_rows_have_their_own_span() -> None:
    span = {"least": 1.0, "most": 2.0}
    price = KernelPrice.model_validate(
        {
            "s_per_flop": {"value": 1, "kind": "fitted", "origin": "x"},
            "fitted_flops_per_weight_byte": {"least": 10, "most": 20},
            "few_rows": {
                "most_flops_per_weight_byte": 4,
                "s_per_flop": {"value": 1, "kind": "fitted", "origin": "x"},
                "fitted_flops_per_weight_byte": span,
            },
        }
    )
    assert [price.line(1.0, flops).is_fitted_at(1, 1.0, flops) for flops in (1.5, 3.0, 5.0, 15.0, 21.0)] == [
        True, False, False, True, False,
    ]  # fmt: skip


def test_the_engine_takes_time_of_its_own_by_phase() -> None:
    """A step of 3 tokens: 8 bytes for each, and in each of 2 layers 8 for each token and each of its choices."""
    own = "\n".join(f"{name} = {{ s_per_launch = {figure(cost)} }}" for name, cost in (("step", 5.0), ("layer", 7.0)))
    own += f"\ndecode_layer = {{ s_per_moved_byte = {figure(1.0)} }}"
    sheet = host(kernels=own)

    def engine(step: PricedStep) -> float:
        plan = plan_of(CallKind(), experts=(0, 1, 2)[: step.n_tokens])
        found = operations(step, [plan], SHAPE, "cpu", None, Travels(sheet))
        return sum(operation_seconds(sheet, one) for one in found if one.name == "engine")

    assert engine(PricedStep(3, 3)) == 5 + 2 * 7
    assert engine(PricedStep(1, 4, "decode")) == 2 * 8 * 2


def test_scores_that_are_priced_apart_leave_out_what_the_mask_hides() -> None:
    """3 queries behind 2 keys see 3, 4 and 5 of them; 2 heads of 4 features, 4 FLOP a pair and feature."""
    sheet = host(kernels=f"scores = {{ s_per_flop = {figure(1.0)}, s_per_moved_byte = {figure(1.0)} }}")
    plan = plan_of(CallKind(), experts=(0, 1, 2))
    found = operations(PricedStep(3, 5), [plan], SHAPE, "cpu", None, Travels(sheet))
    scores = [one for one in found if one.kernel == "scores"]
    projections = [one for one in found if one.kernel == "attention"]
    assert [one.flops for one in scores] == [4 * 2 * 4 * (3 + 4 + 5)] * 2
    assert [one.moved_bytes for one in scores] == [2 * 5 * 1 * 4 * 4] * 2
    assert [one.flops for one in projections] == [2 * 3 * 8 * 4 * 2 * 3] * 2
    assert operations(PricedStep(3, 5), [plan], SHAPE, "cpu", None)[1].flops == projections[0].flops + 4 * 8 * 15


def test_queries_that_are_taken_together_meet_all_keys_that_the_last_of_them_sees() -> None:
    """Of 5 queries behind 2 keys, tiles of 2 meet 4, 6 and 7 keys; the last has one query and takes as long."""
    pairs = [sum(rows * min(2 + rows * (i + 1), 7) for i in range(-(-5 // rows))) for rows in (1, 2, 8)]
    assert pairs == [3 + 4 + 5 + 6 + 7, 2 * (4 + 6 + 7), 8 * 7]
    assert [PricedStep(5, 7).met_pairs(rows) for rows in (1, 2, 8)] == pairs
    assert PricedStep(10, 7, n_sequences=2).met_pairs(2) == 2 * pairs[1]
    assert PricedStep(1, 9, "decode").met_pairs(8) == 9
    assert PricedStep(3, 9, "decode", 3).met_pairs(8) == 3 * 9


def test_scores_take_queries_in_tiles_where_the_sheet_has_one() -> None:
    """3 queries behind 2 keys, 2 at a time: 4 and 5 keys, twice each; without a tile 3, 4 and 5. What lies between
    products is 8 values that are read and 8 that are given, 8 of queries, 8 of keys and values, and 8 mixed."""
    scores = f"scores = {{ s_per_flop = {figure(1.0)} }}"
    plan = plan_of(CallKind(), experts=(0, 1, 2))

    def of(sheet: Sheet) -> list[Operation]:
        return operations(PricedStep(3, 5), [plan], SHAPE, "cpu", None, Travels(sheet))[1:3]

    each = host(kernels=scores)
    unit = each.units["cpu"].model_copy(update={"query_tile": SheetFigure(value=2, kind="assumed", origin="test")})
    projections, by_two = of(each.model_copy(update={"units": {"cpu": unit}}))
    assert by_two.flops == 4 * 2 * 4 * 2 * (4 + 5)
    assert of(each)[1].flops == 4 * 2 * 4 * (3 + 4 + 5)
    assert projections.moved_bytes == 3 * 5 * 8 * 4
    assert operation_seconds(each, projections) == projections.flops, "an older sheet has no price of these bytes"


def test_rows_between_an_experts_products_are_told_where_the_sheet_prices_them() -> None:
    """5 rows of 16 values of 4 bytes; tiles of 4 compute 8 rows. A line without such bytes, or of few rows, has
    none."""
    few = f", few_rows = {{ most_flops_per_weight_byte = 1, s_per_flop = {figure(1.0)} }}"
    sheet = host(few=f", s_per_moved_byte = {figure(1e9)}{few}")
    unit = sheet.units["cpu"].model_copy(update={"row_tile": SheetFigure(value=4, kind="assumed", origin="test")})
    in_tiles = sheet.model_copy(update={"units": {"cpu": unit}})

    def call(sheet: Sheet, rows: int) -> Operation:
        found = operations(PricedStep(rows, rows), [plan_of_rows(rows)], SHAPE, "cpu", None, Travels(sheet))
        return next(one for one in found if one.kernel == "expert_ffn")

    assert call(sheet, 5).moved_bytes == 5 * 16 * 4
    assert call(in_tiles, 5).moved_bytes == 8 * 16 * 4
    assert operation_seconds(sheet, call(sheet, 5)) == call(sheet, 5).flops + 1e9 * 5 * 16 * 4
    assert operation_seconds(sheet, call(sheet, 2)) == call(sheet, 2).flops
    assert call(host(), 5).moved_bytes == 0
    dense = replace(SHAPE, n_experts=0, top_k=0, dense_width=32)
    (ffn, *_) = [
        one
        for one in operations(PricedStep(5, 5), [None], dense, "cpu", None, Travels(sheet))
        if one.kernel == "expert_ffn"
    ]
    assert ffn.moved_bytes == 5 * 32 * 4


def test_experts_with_few_rows_take_longer_in_a_prompt_than_within_a_token() -> None:
    """5 s a weight byte and 1 s a FLOP of an expert with 2 rows; nothing of one with 3, nor of a decoded token's."""
    few = f", few_rows = {{ most_flops_per_weight_byte = 1, s_per_weight_byte = {figure(3.0)} }}"
    own = f"prompt_few_rows = {{ s_per_weight_byte = {figure(5.0)}, s_per_flop = {figure(1.0)} }}"
    sheet = host(few=few, kernels=own)

    def engine_s(step: PricedStep, *rows: int) -> float:
        found = operations(step, [plan_of_rows(*rows)], SHAPE, "cpu", None, Travels(sheet))
        return sum(operation_seconds(sheet, one) for one in found if one.name == "engine")

    flops = 2 * 2 * 3 * 8 * 16
    assert engine_s(PricedStep(5, 5), 2, 3) == 2 * (5 * WEIGHT_BYTES + flops)
    assert engine_s(PricedStep(3, 3), 3) == 0
    assert engine_s(PricedStep(2, 5, "decode"), 2) == 0


def test_a_stand_in_computes_one_call_after_another() -> None:
    sheet = host(more='stands_in = { npu = "cpu" }')
    plan = plan_of(CallKind(unit="npu", static=True, overlaps=True), experts=(0, 1))
    found = operations(PricedStep(2, 2), [plan], SHAPE, "npu", 1.0, Travels(sheet))
    calls = [one for one in found if one.kernel == "expert_ffn"]
    assert {one.unit for one in found} == {"cpu"}
    assert [(one.unit, one.alongside) for one in calls] == [("cpu", False)] * 4


RANKS = 'stands_in = { "rank:0" = "cpu", "rank:1" = "cpu" }'
FREE = "\n".join(
    f"{kernel} = {{ s_per_moved_byte = {figure(0.0)} }}"
    for kernel in ("residual", "router", "gather_dynamic", "gather_static", "padding", "scatter")
)
BETWEEN_RANKS = f"""{FREE}
[links.ranks]
source = "rank"
target = "rank"
kind = "shared"
bytes_per_s = {figure(0.5)}
latency_s = {figure(7.0)}
"""


def test_two_processes_of_one_unit_compute_after_each_other_and_send_over_their_link() -> None:
    plan = plan_of(CallKind(unit="rank:0"), experts=(0, 1))
    rows = Exchange("all_to_all", ("rank:0", "rank:1"), ((0, 10), (30, 0)))
    back = Exchange("all_to_all", ("rank:0", "rank:1"), ((0, 30), (10, 0)))
    first = Exchange("all_gather", ("rank:0", "rank:1"), ((0, 4), (4, 0)))
    sent_plan = replace(plan, exchanges=(first, rows, back))
    alone, joined = host(more=RANKS, kernels=FREE), host(more=RANKS, kernels=BETWEEN_RANKS)

    def ran(sheet: Sheet, one: DispatchPlan) -> tuple[list[Operation], float]:
        found = operations(PricedStep(2, 2), [one], SHAPE, "cpu", None, Travels(sheet))
        timeline = Timeline(sheet)
        timeline.run(found)
        return found, timeline.now_s()

    without, seconds = ran(alone, sent_plan)
    assert {one.unit for one in without} == {"cpu"}, "no link, nothing that travels"
    found, with_s = ran(joined, sent_plan)
    travels = [one for one in found if one.unit == "ranks"]
    assert [one.moved_bytes for one in travels] == [4, 4, 10, 30, 30, 10] * 2
    assert [one for one in found if one.unit != "ranks"] != []
    # Two layers; each thing takes 7 s and 2 s a byte, and nothing computes meanwhile.
    assert with_s - seconds == 2 * (6 * 7 + 2 * (4 + 4 + 10 + 30 + 30 + 10))


OTHERS = ("rank:0", "rank:1"), ((0, 4), (4, 0))
DEALT = Exchange("all_gather", *OTHERS), Exchange("all_to_all", *OTHERS)
EVERYWHERE = (Exchange("all_reduce", *OTHERS),)
FOUR = (
    Exchange("all_reduce", ("rank:0", "rank:1", "gpu:0", "gpu:1"), ((0, 4, 0, 0), (4, 0, 0, 0), (0,) * 4, (0,) * 4)),
)
LARGE = replace(SHAPE, hidden=512, n_heads=8, n_kv_heads=2, head_dim=64)
"""A layer's attention has 4 * 2 * 512 * 64 * (8 + 2) bytes: 2.6 MB."""


@pytest.mark.parametrize(
    ("shape", "exchanges", "phase", "n_tokens", "weights", "work"),
    [
        (SHAPE, DEALT, "prefill", 2, 2, 1),  # each has tokens of its own
        (SHAPE, EVERYWHERE, "prefill", 2, 2, 2),
        (SHAPE, EVERYWHERE, "decode", 1, 2, 2),  # too small to be split
        (LARGE, EVERYWHERE, "decode", 1, 1, 1),
        (LARGE, EVERYWHERE, "decode", 2, 2, 2),  # split in single decoded tokens alone
        (LARGE, EVERYWHERE, "prefill", 1, 2, 2),  # the last token of a prompt is none
        (replace(LARGE, n_kv_heads=1), EVERYWHERE, "decode", 1, 2, 2),  # fewer heads than processes
        (LARGE, FOUR, "decode", 1, 2, 2),  # of which two are of this unit
        # 96 + 2 * 8 heads of 128 pass 14,336 values of 4 bytes, and 4,096 go back: more than 64 KiB, as of GLM-4.5-Air.
        (replace(LARGE, hidden=4096, n_heads=96, n_kv_heads=8, head_dim=128), EVERYWHERE, "decode", 1, 2, 2),
        (replace(LARGE, hidden=2048, n_heads=96, n_kv_heads=8, head_dim=128), EVERYWHERE, "decode", 1, 1, 1),
        (SHAPE, (), "prefill", 2, 1, 1),
    ],
)
def test_processes_of_one_unit_read_and_compute_attention_as_often_as_they_do(
    shape: ModelShape, exchanges: tuple[Exchange, ...], phase: ChunkPhase, n_tokens: int, weights: int, work: int
) -> None:
    plan = replace(plan_of(CallKind(unit="rank:0"), experts=tuple(range(n_tokens))), exchanges=exchanges)
    step, n_heads, features = PricedStep(n_tokens, n_tokens, phase), shape.n_heads, shape.head_dim
    found = operations(step, [plan], shape, "cpu", None, Travels(host(more=RANKS, kernels=BETWEEN_RANKS)))
    values = 2 * shape.hidden * features * (n_heads + shape.n_kv_heads)
    once = 2 * n_tokens * values + 4 * n_heads * features * n_tokens**2
    own = [one for one in found if one.kernel == "attention"]
    assert [(one.weight_bytes, one.flops) for one in own] == [(weights * 4 * values, work * once)] * shape.n_layers


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('stands_in = { cpu = "cpu" }', "cpu: the sheet has that unit"),
        ('stands_in = { rank = "cpu" }', "rank: such units are numbered; name each, such as rank:0"),
        ('stands_in = { npu = "gpu" }', "npu: gpu is none of the sheet's units; name one of cpu"),
    ],
)
def test_a_stand_in_is_of_a_unit_that_the_sheet_lacks(line: str, told: str) -> None:
    with pytest.raises(DeviceError, match=told):
        host(more=line)


@pytest.mark.parametrize(("whole", "seconds"), [(False, 400.0), (True, 500.0)])
def test_calls_wait_for_their_own_copies_or_for_all_of_the_layer(whole: bool, seconds: float) -> None:
    """Two copies of 100 s each, and two calls of 150 s. Own: the first call from 100 to 250, the second to 400. Whole:
    both copies are done at 200, the calls at 500."""
    link = f"""
[links.file]
source = "file"
target = "cpu"
kind = "shared"
whole_layers = {str(whole).lower()}
bytes_per_s = {figure(WEIGHT_BYTES / 100)}
"""
    prices = f"[units.cpu.kernels]\nexpert_ffn = {{ s_per_weight_byte = {figure(150 / WEIGHT_BYTES)} }}"
    prices += "".join(
        f"\n{name} = {{ s_per_flop = {figure(0.0)} }}"
        for name in ("attention", "norm", "router", "gather_dynamic", "scatter", "residual")
    )
    sheet = parse_sheet(f'name = "host"\ndescription = "x"\nsource = "x"\n{prices}\n{link}', "host")
    moved = Transfers.of(Transfer(e, 0, FILE, "cpu", WEIGHT_BYTES) for e in (0, 1))
    plan = plan_of(CallKind(), moved, experts=(0, 1))
    shape = ModelShape("toy", 1, 8, 2, 1, 4, 0, 4, 1, 16, 32, bytes_per_value=4)
    timeline = Timeline(sheet)
    timeline.run(operations(PricedStep(2, 2), [plan], shape, "cpu", None, Travels(sheet)))
    assert timeline.now_s() == pytest.approx(seconds)


def test_a_layer_that_fetches_takes_the_engine_longer() -> None:
    """7 s of a decoded token and 5 s of a prompt where an expert travels."""
    link = f"""
[links.file]
source = "file"
target = "cpu"
kind = "shared"
bytes_per_s = {figure(1.0)}
"""
    of_prompt = f"prompt_fetching_layer = {{ s_per_launch = {figure(5.0)} }}"
    sheet = host(kernels=f"fetching_layer = {{ s_per_launch = {figure(7.0)} }}\n{of_prompt}{link}")
    moved = Transfers.of([Transfer(0, 0, FILE, "cpu", WEIGHT_BYTES)])
    shape = ModelShape("toy", 1, 8, 2, 1, 4, 0, 4, 1, 16, 32, bytes_per_value=4)

    def engine_s(step: PricedStep, transfers: Transfers | None) -> float:
        found = operations(step, [plan_of(CallKind(), transfers)], shape, "cpu", None, Travels(sheet))
        return sum(operation_seconds(sheet, one) for one in found if one.name == "engine")

    assert engine_s(PricedStep(1, 4, "decode"), moved) == 7
    assert engine_s(PricedStep(1, 4, "decode"), None) == 0
    assert engine_s(PricedStep(1, 4), moved) == 5
    assert engine_s(PricedStep(1, 4), None) == 0


def test_each_expert_that_travels_in_a_prompt_takes_the_engine_longer() -> None:
    """3 s for each of two; nothing for one that its layer has, nor while a token is decoded."""
    link = f'[links.file]\nsource = "file"\ntarget = "cpu"\nkind = "shared"\nbytes_per_s = {figure(1.0)}\n'
    sheet = host(kernels=f"prompt_fetch = {{ s_per_launch = {figure(3.0)} }}\n{link}")
    there = Transfer(2, 0, "cpu", "cpu", WEIGHT_BYTES)
    moved = Transfers.of([Transfer(expert, 0, FILE, "cpu", WEIGHT_BYTES) for expert in (0, 1)] + [there])
    shape = ModelShape("toy", 1, 8, 3, 1, 4, 0, 4, 1, 16, 32, bytes_per_value=4)

    def engine_s(step: PricedStep, transfers: Transfers) -> float:
        found = operations(step, [plan_of(CallKind(), transfers)], shape, "cpu", None, Travels(sheet))
        return sum(operation_seconds(sheet, one) for one in found if one.name == "engine")

    assert engine_s(PricedStep(1, 4), moved) == 6
    assert engine_s(PricedStep(1, 4), Transfers.of([there])) == 0
    assert engine_s(PricedStep(1, 4, "decode"), moved) == 0


def test_experts_that_a_decoded_token_gives_more_than_few_rows_take_the_engine_longer() -> None:
    """A second a weight byte of an expert with 3 rows, which meets each byte of 4 with 1.5 FLOP; nothing of one with 2,
    and nothing while a prompt is read."""
    few = f", few_rows = {{ most_flops_per_weight_byte = 1, s_per_weight_byte = {figure(3.0)} }}"
    sheet = host(few=few, kernels=f"many_rows = {{ s_per_moved_byte = {figure(1.0)} }}")
    shape = ModelShape("toy", 1, 8, 2, 1, 4, 0, 4, 1, 16, 32, bytes_per_value=4)

    def engine_s(step: PricedStep, n_rows: int) -> float:
        import torch

        token_R = torch.tensor([0, *[-1] * (n_rows - 1)])
        calls = Calls.of([ExpertCall((0,), (n_rows,), (1,), 0, CallKind(static=True))])
        plan = DispatchPlan(1, token_R, torch.ones(n_rows), calls, 1, 0)
        found = operations(step, [plan], shape, "cpu", None, Travels(sheet))
        return sum(operation_seconds(sheet, one) for one in found if one.name == "engine")

    assert engine_s(PricedStep(1, 4, "decode"), 3) == WEIGHT_BYTES
    assert engine_s(PricedStep(1, 4, "decode"), 2) == 0
    assert engine_s(PricedStep(1, 4), 3) == 0


def test_rows_of_experts_on_another_unit_have_that_units_prices() -> None:
    """The CPU's prices of few rows and of many are of experts on the CPU: none of a GPU's, in a prompt or a token."""
    few = f", few_rows = {{ most_flops_per_weight_byte = 1, s_per_weight_byte = {figure(3.0)} }}"
    own = f"""many_rows = {{ s_per_moved_byte = {figure(1.0)} }}
prompt_few_rows = {{ s_per_weight_byte = {figure(1.0)} }}
[units.gpu.roofline]
bytes_per_s = {figure(1.0)}
flops_per_s = {figure(1.0)}
[links.pcie]
source = "cpu"
target = "gpu"
kind = "duplex"
bytes_per_s = {figure(1.0)}
"""
    sheet = host(few=few, kernels=own)

    def engine_s(step: PricedStep, unit: Unit, n_rows: int) -> float:
        import torch

        calls = Calls.of([ExpertCall((0,), (n_rows,), (n_rows,), 0, CallKind(unit=unit))])
        plan = DispatchPlan(n_rows, torch.arange(n_rows), torch.ones(n_rows), calls, n_rows, 0)
        found = operations(step, [plan], SHAPE, "cpu", None, Travels(sheet))
        return sum(operation_seconds(sheet, one) for one in found if one.name == "engine")

    of_layers = 2 * WEIGHT_BYTES
    for unit, expected in (("cpu", of_layers), ("gpu", 0)):
        assert engine_s(PricedStep(3, 3, "decode"), unit, 3) == expected
        assert engine_s(PricedStep(2, 2), unit, 2) == expected
