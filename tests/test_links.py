"""Sheets with links, memories and units alike: what they say, what costs follow, and what does not load."""

from __future__ import annotations

import math

import pytest

from devices.base import DeviceError
from devices.models.device import ModelDevice
from devices.models.figures import Roofline
from devices.models.operation import TRANSFER, Operation, is_fitted, operation_joules, operation_seconds
from devices.models.sheet import Sheet, load_sheet, parse_sheet
from devices.models.timeline import Timeline
from engines.pricing.costs import SheetCosts
from engines.techniques.context import ModelSizes
from results.energy import energy_between
from tests.run_builders import ENVIRONMENT
from tests.toy_sheet import figure

LINKED_TOML = f"""
name = "linked"
description = "round numbers"
source = "hand"

[units.cpu.roofline]
bytes_per_s = {figure(10.0)}
flops_per_s = {figure(100.0)}

[units.gpu]
busy_w = {figure(5.0)}
idle_w = {figure(1.0)}
roofline = {{ bytes_per_s = {figure(1000.0)}, flops_per_s = {figure(10000.0)}, s_per_launch = {figure(0.5)} }}

[units.ndp]
count = 2
roofline = {{ bytes_per_s = {figure(50.0)}, flops_per_s = {figure(50.0)} }}

[memories]
gpu = {figure(300.0)}
ndp = {figure(200.0)}

[links.pcie]
source = ["cpu", "ndp"]
target = "gpu"
kind = "duplex"
bytes_per_s = {figure(20.0)}
latency_s = {figure(0.25)}

[links.bus]
source = "cpu"
target = "ndp"
kind = "shared"
bytes_per_s = {figure(40.0)}
pj_per_bit = {figure(2.0)}
"""


def linked_sheet() -> Sheet:
    return parse_sheet(LINKED_TOML, "linked")


def test_one_table_stands_for_units_alike() -> None:
    sheet = linked_sheet()
    assert sheet.components == ("cpu", "gpu", "ndp:0", "ndp:1", "pcie", "bus")
    assert sheet.units["ndp:0"] == sheet.units["ndp:1"]
    assert [sheet.capacity_bytes(unit) for unit in ("cpu", "gpu", "ndp:1")] == [None, 300.0, 200.0]


@pytest.mark.parametrize(
    ("source", "target", "resource"),
    [
        ("cpu", "gpu", "pcie"),
        ("ndp:1", "gpu", "pcie"),
        ("gpu", "ndp:0", "pcie:back"),
        ("cpu", "ndp:0", "bus"),
        ("ndp:1", "cpu", "bus"),
        ("ndp:0", "ndp:1", None),
        ("file", "cpu", None),
    ],
)
def test_a_duplex_link_has_a_resource_each_way_and_a_shared_one_has_one(
    source: str, target: str, resource: str | None
) -> None:
    assert linked_sheet().resource_between(source, target) == resource


def test_costs_of_a_call_and_a_transfer_by_hand() -> None:
    """Two experts of 600 B and 300 values, three rows: 1800 FLOP in all. Half of the columns is half of both."""
    costs = SheetCosts(linked_sheet(), ModelSizes(4, 2, 10, 10, 600, 1, 1))
    assert costs.call_s("ndp:1", 2, 3) == pytest.approx(max(1200 / 50, 1800 / 50))
    assert costs.call_s("ndp:0", 2, 3, share=0.5) == pytest.approx(900 / 50)
    assert costs.call_s("gpu", 2, 3) == pytest.approx(0.5 + 1.2)
    assert costs.transfer_s("ndp:0", "gpu", 600) == costs.transfer_s("gpu", "cpu", 600) == pytest.approx(0.25 + 30)
    assert costs.transfer_s("cpu", "ndp:1", 600) == pytest.approx(15)
    assert (costs.capacity_bytes("gpu"), costs.capacity_bytes("cpu")) == (300, None)
    with pytest.raises(DeviceError, match="no link from ndp:0 to ndp:1"):
        costs.transfer_s("ndp:0", "ndp:1", 1)
    with pytest.raises(DeviceError, match="no unit 'ndp:2'"):
        costs.call_s("ndp:2", 1, 1)
    assert costs.call_j("gpu", 2, 3) == pytest.approx(5 * 1.7)
    with pytest.raises(DeviceError, match="states no power of ndp:0"):
        costs.call_j("ndp:0", 2, 3)


def test_bytes_over_a_link_take_latency_and_bandwidth_and_joules_by_the_bit() -> None:
    sheet = linked_sheet()
    over_bus = Operation("weights", "bus", TRANSFER, launches=3, moved_bytes=80)
    assert operation_seconds(sheet, over_bus) == pytest.approx(2.0)
    assert operation_joules(sheet, over_bus, 2.0) == pytest.approx({"bus": 80 * 8 * 2e-12})
    back = Operation("rows", "pcie:back", TRANSFER, launches=2, moved_bytes=80)
    assert operation_seconds(sheet, back) == pytest.approx(2 * 0.25 + 4.0)
    assert operation_joules(sheet, back, 4.5) == {"pcie": None}
    assert is_fitted(sheet, back) is None, "a peak was fitted on nothing"
    with pytest.raises(DeviceError, match="no link 'usb' for 'rows'; it has"):
        operation_seconds(sheet, Operation("rows", "usb", TRANSFER))


def test_both_ways_of_a_duplex_link_draw_its_energy_at_the_same_time() -> None:
    """80 B take 4.25 s there and 40 B 2.25 s back, at 1 J a bit."""
    toml = LINKED_TOML.replace(
        f"latency_s = {figure(0.25)}", f"latency_s = {figure(0.25)}\npj_per_bit = {figure(1e12)}"
    )
    timeline = Timeline(parse_sheet(toml, "linked"))
    there = Operation("weights", "pcie", TRANSFER, moved_bytes=80, aside=True)
    back = Operation("rows", "pcie:back", TRANSFER, moved_bytes=40, aside=True)
    timeline.run([there, back])
    timeline.sleep_until_s(5.0)
    times_s, values_j = timeline.readings("pcie", 0.0)
    assert times_s == pytest.approx([0, 2.25, 4.25, 5.0])
    assert values_j == pytest.approx([0, 640 * 2.25 / 4.25 + 320, 960, 960])


def test_joules_whose_watts_nobody_states_are_missing_with_the_reason_and_never_zero() -> None:
    """The GPU works for 1.5 s at 5 W and waits for 1 s at 1 W; the CPU has no watts."""
    device = ModelDevice(linked_sheet(), lambda: ENVIRONMENT)
    (meter,) = device.meters
    meter.start()
    device.timeline.run(
        [Operation("x", "gpu", "norm", moved_bytes=1000), Operation("x", "cpu", "norm", moved_bytes=10)]
    )
    traces = meter.stop()
    window = [(0.0, device.timeline.now_s())]
    gpu = energy_between(traces, window, "all", "timeline", "gpu")
    assert gpu.energy_j == pytest.approx(5 * 1.5 + 1 * 1.0)
    for component in ("cpu", "ndp:0", "pcie", "total"):
        found = energy_between(traces, window, "all", "timeline", component)
        assert found.energy_j is None
        assert str(found.reason).startswith("sheet ")  # no name of a channel before it: the reader knows none
        assert "states no power of cpu, ndp:0, ndp:1, pcie" in str(found.reason)


def test_all_problems_of_a_sheet_are_told_at_once() -> None:
    """Figures, units and links of one file."""
    broken = (
        LINKED_TOML.replace(figure(40.0), figure(-1.0), 1)
        .replace(f"latency_s = {figure(0.25)}", "", 1)
        .replace(f"bytes_per_s = {figure(20.0)}", "", 1)
        .replace("gpu = {", "npu = {", 1)
        .replace(f"bytes_per_s = {figure(10.0)}", f"bytes_per_s = {figure(0.0)}")
    )
    with pytest.raises(DeviceError) as refused:
        parse_sheet(broken, "linked")
    told = str(refused.value)
    assert "links.bus.bytes_per_s.value: must be greater than or equal to 0, found -1.0" in told
    assert "links.pcie.bytes_per_s: missing; add it" in told
    assert "units.cpu.roofline.bytes_per_s: must be above 0" in told


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('target = "ndp"', 'target = "npu"', "bus: ends at npu, and the sheet has no such unit"),
        ('target = "ndp"', 'target = "ndp:2"', "bus: ends at ndp:2, and the sheet has no such unit"),
        ("gpu = {", "npu = {", "memories: npu: the sheet has no such unit"),
        ('source = "cpu"', 'source = "gpu"', "pcie and bus both join gpu and ndp:0; leave one"),
        ("[links.bus]", "[links.total]", "total: no link can be called so"),
        ("[links.bus]", '[links."<b>x</b>"]', r"links\.<b>x</b>"),
        ("[links.bus]", '[links."\\u001b[31m"]', r"links\.\\x1b\[31m"),
        ("count = 2", "", "ndp: such units are numbered; say how many with count"),
        ("count = 2", "count = 65", r"units\.ndp\.count: must be less than or equal to 64"),
        ("[units.gpu]", "[units.gpu]\ncount = 2", "gpu: count is of tables of units alike"),
        (
            "[memories]",
            f"[units.'ndp:1'.roofline]\nbytes_per_s = {figure(1.0)}\nflops_per_s = {figure(1.0)}\n[memories]",
            "ndp:1: two tables are of this unit",
        ),
        ('kind = "shared"', 'kind = "half"', r"links\.bus\.kind"),
        ('source = "cpu"', "source = []", r"links\.bus\.source"),
    ],
)
def test_a_sheet_that_contradicts_itself_is_refused_in_a_line(old: str, new: str, why: str) -> None:
    with pytest.raises(DeviceError, match=why) as refused:
        parse_sheet(LINKED_TOML.replace(old, new, 1), "linked")
    assert str(refused.value).isprintable()


# --- the RTX 5080 with NDP-DIMMs -----------------------------------------------------------------------------------

NDP = load_sheet("rtx5080-ndp")
MIXTRAL = ModelSizes(8, 2, 4096, 14336, 3 * 4096 * 14336 * 2, 32, 32, 2)


def test_memory_bound_times_of_a_decoded_row_are_those_of_the_source() -> None:
    """T_n = W / (102.4 GB/s N) and T_w = W / 63 GB/s, for one expert W and one row."""
    costs = SheetCosts(NDP, MIXTRAL)
    for n in range(1, 7):
        assert costs.call_s(f"ndp:{n - 1}", 1, 1, share=1 / n) == pytest.approx(MIXTRAL.expert_bytes / (102.4e9 * n))
    assert costs.transfer_s("ndp:5", "gpu", MIXTRAL.expert_bytes) == pytest.approx(MIXTRAL.expert_bytes / 63e9)
    assert costs.transfer_s("cpu", "gpu", MIXTRAL.expert_bytes) == costs.transfer_s("ndp:0", "gpu", 352321536)
    assert math.isclose(costs.call_s("cpu", 1, 1), MIXTRAL.expert_bytes / 89.6e9)


def test_every_watt_of_the_dimms_system_is_missing() -> None:
    """The source states none, and none is invented."""
    assert not any(NDP.has_watts(component) for component in NDP.components)
    assert len(NDP.units) == 2 + 6
    assert [NDP.capacity_bytes(u) for u in ("cpu", "gpu", "ndp:3")] == [192 * 2**30, 16 * 2**30, 32 * 2**30]


def test_a_unit_at_rest_draws_its_idle_power_whatever_was_dropped_before() -> None:
    """1 W, and 5 W for 0.5 + 1 s of each 10 s: 8.5 + 7.5 J. The CPU works for 2 s before it."""
    timeline = Timeline(linked_sheet())
    for n_done in (1, 2, 3):
        scatter = Operation("scatter", "cpu", "scatter", flops=200.0)
        timeline.run([scatter, Operation("attention", "gpu", "attention", flops=10_000.0, after=(1,))])
        timeline.sleep_until_s(10.0 * n_done)
        times_s, joules = timeline.readings("gpu", 10.0 * (n_done - 1))
        assert (times_s[0], times_s[-1]) == pytest.approx((10.0 * (n_done - 1), 10.0 * n_done))
        assert (joules[0], joules[-1]) == pytest.approx((16.0 * (n_done - 1), 16.0 * n_done))
        timeline.settle()


@pytest.mark.parametrize(
    ("name", "tensor_cores", "clock_hz", "flop_a_cycle"),
    # Dense, half precision, accumulating in FP32: cores, top clock (001 has 2.30 GHz), and what NVIDIA's rates
    # come to a core and cycle, of an RTX 5080 (112.6e12), an A40 (149.7e12), an A100 (312e12), an H100 SXM (989e12).
    [
        ("rtx5080-ndp", 336, 2.30e9, 112.6e12 / 336 / 2.617e9),
        ("a6000", 336, 1.80e9, 149.7e12 / 336 / 1.74e9),
        ("a100", 432, 1.41e9, 512),
        ("gh200", 528, 1.83e9, 1024),
    ],
)
def test_tensor_rates_are_dense_and_accumulate_in_fp32(
    name: str, tensor_cores: int, clock_hz: float, flop_a_cycle: float
) -> None:
    """Sparse rates are twice as high, and so is a GeForce that accumulates in FP16."""
    price = load_sheet(name).units["gpu"].price("expert_ffn")
    assert isinstance(price, Roofline)
    assert price.flops_per_s.value == pytest.approx(tensor_cores * clock_hz * flop_a_cycle, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "gpu_gb", "host_gb", "link_s"),
    # 003, Table 3; a gigabyte over PCIe 4.0 x16, and over half of NVLink-C2C's 900 GB/s.
    [("a6000", 48, 128, 1 / 31.5), ("a100", 80, 256, 1 / 31.5), ("gh200", 96, 480, 1 / 450)],
)
def test_machines_of_source_003_hold_and_move_what_it_says(name: str, gpu_gb: int, host_gb: int, link_s: float) -> None:
    sheet = load_sheet(name)
    assert (sheet.capacity_bytes("gpu"), sheet.capacity_bytes("cpu")) == (gpu_gb * 2**30, host_gb * 2**30)
    costs = SheetCosts(sheet, MIXTRAL)
    assert costs.transfer_s("cpu", "gpu", 1e9) == pytest.approx(link_s)
    assert not any(sheet.has_watts(component) for component in sheet.components)
    with pytest.raises(DeviceError, match="no price for 'expert_ffn' on 'cpu'"):
        costs.call_s("cpu", 1, 1)
