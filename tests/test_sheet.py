"""Hardware sheets: provenance of every figure, and errors that name the key."""

from __future__ import annotations

import pytest

from devices.base import DeviceError
from devices.models.sheet import KernelPrice, available_sheets, load_sheet, parse_sheet
from tests.toy_sheet import TOY_TOML, toy_sheet


def test_all_sheets_of_the_package_load() -> None:
    assert "m2-ultra" in available_sheets()
    assert [load_sheet(name).name for name in available_sheets()] == list(available_sheets())


def test_an_unknown_sheet_names_those_there_are() -> None:
    with pytest.raises(DeviceError, match=r"sheet m3: no hardware sheet has this name; available: .*m2-ultra"):
        load_sheet("m3")


def test_an_unknown_key_is_an_error_that_names_it() -> None:
    with pytest.raises(DeviceError, match=r"sheet toy: units\.cpu\.watts: unknown key"):
        parse_sheet(TOY_TOML.replace("[units.cpu]", "[units.cpu]\nwatts = 3", 1), "toy")


def test_a_missing_key_is_an_error_that_names_it() -> None:
    with pytest.raises(DeviceError, match=r"memory\.comm_w: missing"):
        parse_sheet(TOY_TOML.replace("comm_w", "bytes_per_s", 1), "toy")


def test_a_figure_without_its_origin_does_not_load() -> None:
    with pytest.raises(DeviceError, match=r"graph_bytes_limit\.origin: missing"):
        parse_sheet(TOY_TOML.replace(', origin = "test" }', " }", 1), "toy")


def test_an_unknown_kind_of_figure_does_not_load() -> None:
    with pytest.raises(DeviceError, match=r"graph_bytes_limit\.kind"):
        parse_sheet(TOY_TOML.replace('"assumed"', '"tuned"', 1), "toy")


def test_a_price_without_terms_does_not_load() -> None:
    with pytest.raises(DeviceError, match="a price without terms; give at least one of s_per_launch"):
        parse_sheet(TOY_TOML + "lm_head = {}\n", "toy")


def test_a_sheet_without_a_cpu_does_not_load() -> None:
    only_npu = TOY_TOML.replace("units.cpu", "units.xpu")
    with pytest.raises(DeviceError, match="units"):
        parse_sheet(only_npu, "toy")


@pytest.mark.parametrize("unit", ["xpu", "cpu:0", "ndp", "rank:x"])
def test_a_unit_of_another_name_does_not_load(unit: str) -> None:
    with pytest.raises(DeviceError, match=r"sheet toy: units[.:]"):
        parse_sheet(TOY_TOML.replace("units.npu", f'units."{unit}"'), "toy")


@pytest.mark.parametrize("unit", ["gpu", "ndp:2", "rank:1"])
def test_units_of_a_sheet_are_any_that_work_can_run_on(unit: str) -> None:
    assert list(parse_sheet(TOY_TOML.replace("units.npu", f'units."{unit}"'), "toy").units) == ["cpu", unit]


def test_a_misnamed_sheet_does_not_load() -> None:
    with pytest.raises(DeviceError, match="calls itself 'toy'"):
        parse_sheet(TOY_TOML, "other")


def test_broken_toml_is_an_error_of_the_sheet() -> None:
    with pytest.raises(DeviceError, match="sheet toy: not TOML"):
        parse_sheet("name = ", "toy")


def test_a_price_adds_its_terms() -> None:
    price: KernelPrice = toy_sheet().units["npu"].kernels["expert_ffn"]
    # 2 launches of 0.5 s, 300 B at 1 ms, 4000 FLOP at 0.1 ms; moved bytes have no price here.
    assert price.seconds(launches=2, weight_bytes=300, moved_bytes=1e9, flops=4000) == pytest.approx(1.0 + 0.3 + 0.4)


def test_m2_ultra_takes_eight_phi_experts_in_a_graph_and_not_sixteen() -> None:
    """Table 5 runs 8 experts of 150 MB; §4.2: 16 fall back."""
    limit = load_sheet("m2-ultra").graph_bytes_limit
    assert limit is not None
    expert_bytes = 3 * 4096 * 6400 * 2
    assert 8 * expert_bytes <= limit.value < 16 * expert_bytes


@pytest.mark.parametrize(
    ("name", "bytes_per_s", "flops_per_s", "gib", "dma_bytes_per_s", "link_bytes_per_s"),
    [("trn2", 2.9e12, 667e12, 96, 3.5e12, 1.28e12), ("trn3", 4.9e12, 671e12, 144, 4.9e12, 2.56e12)],
)
def test_trainium_is_as_its_maker_states_it(
    name: str, bytes_per_s: float, flops_per_s: float, gib: int, dma_bytes_per_s: float, link_bytes_per_s: float
) -> None:
    """Figures of AWS's pages of the chips. A core is an eighth of a chip of eight; a link goes half each way."""
    sheet = load_sheet(name)
    for unit, share in (("gpu", 1), ("rank:1", 1), ("core:1", 8)):
        roofline = sheet.units[unit].roofline
        assert roofline is not None
        assert roofline.bytes_per_s.value == pytest.approx(bytes_per_s / share)
        assert roofline.flops_per_s.value == pytest.approx(flops_per_s / share)
        assert sheet.capacity_bytes(unit) == gib * 2**30 / share
    assert sheet.links["dma"].bytes_per_s.value == pytest.approx(dma_bytes_per_s / 8)
    assert sheet.links["neuronlink"].bytes_per_s.value == pytest.approx(link_bytes_per_s / 2)
    assert sheet.resource_between("rank:1", "rank:0") == "neuronlink:back"
    assert not sheet.has_watts("gpu")
