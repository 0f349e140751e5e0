"""A sheet with one constant changed, and what an operation's seconds come from."""

from __future__ import annotations

import pytest

from devices.models.operation import Operation, operation_seconds
from devices.models.sheet import Sheet, available_sheets, load_sheet, parse_sheet
from devices.models.terms import term_seconds
from devices.models.timeline import Timeline
from devices.models.variations import constants, varied

ORIGIN = 'kind = "stated", origin = "a test"'


def figure(value: float) -> str:
    return f"{{ value = {value}, {ORIGIN} }}"


TOY = parse_sheet(
    f"""
    name = "toy"
    description = "a toy"
    source = "a test"
    [units.cpu.kernels.expert_ffn]
    s_per_launch = {figure(1e-3)}
    s_per_weight_byte = {figure(1e-9)}
    s_per_flop = {figure(1e-12)}
    [units.cpu.kernels.attention]
    s_per_launch = {figure(1e-3)}
    s_per_flop = {figure(3e-12)}
    [units.cpu.kernels.norm]
    s_per_moved_byte = {figure(2e-9)}
    [units.npu]
    s_per_naive_launch = {figure(5e-3)}
    [units.npu.kernels.expert_ffn]
    s_per_flop = {figure(1e-13)}
    [units.ndp]
    count = 2
    [units.ndp.roofline]
    bytes_per_s = {figure(100e9)}
    flops_per_s = {figure(1e12)}
    s_per_launch = {figure(1e-4)}
    flops_share = {{ by = "flops", points = [
        {{ at = 1, share = 0.5, {ORIGIN} }}, {{ at = 1e12, share = 0.9, {ORIGIN} }} ] }}
    [memories]
    ndp = {figure(32e9)}
    [links.bus]
    source = "cpu"
    target = "ndp"
    kind = "shared"
    bytes_per_s = {figure(10e9)}
    latency_s = {figure(1e-5)}
    """,
    "toy",
)


def ffn(unit: str, launches: int = 1, flops: float = 0.0, weight_bytes: float = 0.0, naive: bool = False) -> Operation:
    return Operation("expert FFN", unit, "expert_ffn", launches, flops, weight_bytes, naive_launch=naive)


@pytest.mark.parametrize(
    ("operation", "terms"),
    [
        (ffn("cpu", 2, 3e9, 5e6), {"launches": 2e-3, "weights": 5e-3, "arithmetic": 3e-3}),
        (ffn("npu", 2, 1e10, naive=True), {"launches": 1e-2, "arithmetic": 1e-3}),
        (ffn("ndp:1", 1, 1e6, 1e9), {"launches": 1e-4, "memory": 1e-2}),
        (ffn("ndp:0", 1, 1e12, 1e9), {"launches": 1e-4, "arithmetic": 1 / 0.9}),
        (Operation("norm", "cpu", "norm", moved_bytes=1e6), {"activations": 2e-3}),
        (Operation("rows", "bus", "transfer", 3, moved_bytes=1e9), {"latency": 3e-5, "bytes": 0.1}),
    ],
)
def test_seconds_come_from_the_terms_that_the_formulas_have(operation: Operation, terms: dict[str, float]) -> None:
    assert term_seconds(TOY, operation) == pytest.approx(terms, rel=1e-12)
    assert sum(terms.values()) == pytest.approx(operation_seconds(TOY, operation), rel=1e-12)


def test_a_bandwidth_that_all_share_binds_what_reads_weights_faster() -> None:
    sheet = load_sheet("m2-ultra")
    assert sheet.memory is not None
    assert sheet.memory.bytes_per_s is not None
    operation = Operation("attention", "cpu", "attention", launches=0, weight_bytes=1e12)
    slow = sheet.model_copy(
        update={
            "memory": sheet.memory.model_copy(
                update={"bytes_per_s": sheet.memory.bytes_per_s.model_copy(update={"value": 1e9})}
            )
        }
    )
    assert term_seconds(slow, operation) == {"memory": pytest.approx(1000.0)}


def test_a_timeline_sums_terms_by_unit_and_link() -> None:
    timeline = Timeline(TOY)
    timeline.run([ffn("cpu", 1, 1e9), ffn("cpu", 1, 1e9), ffn("ndp:0", 1, 0.0, 1e9)])
    assert timeline.seconds_by_term() == pytest.approx(
        {("cpu", "launches"): 2e-3, ("cpu", "arithmetic"): 2e-3, ("ndp:0", "launches"): 1e-4, ("ndp:0", "memory"): 0.01}
    )


def test_constants_are_named_by_their_place_and_one_line_is_one_constant() -> None:
    assert [one.name for one in constants(TOY)] == [
        "units.cpu.kernels.expert_ffn+attention.s_per_launch",
        "units.cpu.kernels.expert_ffn.s_per_weight_byte",
        "units.cpu.kernels.expert_ffn.s_per_flop",
        "units.cpu.kernels.attention.s_per_flop",
        "units.cpu.kernels.norm.s_per_moved_byte",
        "units.npu.s_per_naive_launch",
        "units.npu.kernels.expert_ffn.s_per_flop",
        "units.ndp.roofline.bytes_per_s",
        "units.ndp.roofline.flops_per_s",
        "units.ndp.roofline.s_per_launch",
        "units.ndp.roofline.flops_share",
        "memories.ndp",
        "links.bus.bytes_per_s",
        "links.bus.latency_s",
    ]


def seconds(sheet: Sheet, operation: Operation) -> float:
    return operation_seconds(sheet, operation)


def test_one_constant_changes_and_nothing_else() -> None:
    by_name = {one.name: one for one in constants(TOY)}
    launch = varied(TOY, by_name["units.cpu.kernels.expert_ffn+attention.s_per_launch"], 1.2)
    assert seconds(launch, ffn("cpu")) == pytest.approx(1.2e-3)
    assert seconds(launch, Operation("attention", "cpu", "attention")) == pytest.approx(1.2e-3)
    assert seconds(launch, ffn("ndp:0")) == seconds(TOY, ffn("ndp:0"))
    rate = varied(TOY, by_name["units.ndp.roofline.bytes_per_s"], 0.8)
    for unit in ("ndp:0", "ndp:1"):
        assert seconds(rate, ffn(unit, 0, 0.0, 1e9)) == pytest.approx(0.01 / 0.8)
    assert rate.units["ndp:0"] is rate.units["ndp:1"]


def test_shares_change_together_and_stay_at_most_one() -> None:
    share = next(one for one in constants(TOY) if one.name.endswith("flops_share"))
    assert seconds(varied(TOY, share, 0.8), ffn("ndp:0", 0, 1e12)) == pytest.approx(1 / 0.72)
    assert seconds(varied(TOY, share, 1.2), ffn("ndp:0", 0, 1e12)) == pytest.approx(1.0)


@pytest.mark.parametrize("name", available_sheets())
def test_every_constant_of_every_sheet_can_be_changed_there_and_back(name: str) -> None:
    sheet = load_sheet(name)
    for one in constants(sheet):
        other = varied(sheet, one, 1.2)
        assert other != sheet
        if one.value is not None:
            back = next(c for c in constants(varied(other, one, 1 / 1.2)) if c.places == one.places)
            assert back.value == pytest.approx(one.value, rel=1e-12)
