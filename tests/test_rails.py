"""Power sensors in trees like those of sysfs, whose files move."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from devices.base import DeviceError, Meter, MeterUnavailableError
from devices.meters.rails import HwmonMeter, JetsonMeter
from tests.fakes.sysfs import Sysfs
from tests.meter_windows import CLOCK, read_on_grid, total


def ina3221(
    rails: dict[str, tuple[float, float]], shunt_microohm: int = 5000, interval_ms: int = 9
) -> dict[str, object]:
    """hwmon files of a chip: rail -> (volt, ampere)."""
    files: dict[str, object] = {"name": "ina3221", "update_interval": interval_ms, "in7_label": "sum of shunt voltages"}
    for n, (name, (volt, ampere)) in enumerate(rails.items(), 1):
        files |= {
            f"in{n}_label": name,
            f"in{n}_input": int(volt * 1e3),
            f"curr{n}_input": int(ampere * 1e3),
            f"shunt{n}_resistor": shunt_microohm,
            f"in{n}_enable": 1,
        }
    return files


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def jetson(sysfs: Sysfs) -> JetsonMeter:
    meter = JetsonMeter(0.01, CLOCK, sysfs.root)
    meter.open()
    return meter


def test_orin_nx_board_input_contains_its_rails(sysfs: Sysfs) -> None:
    rails = {"VDD_IN": (5.0, 2.0), "VDD_CPU_GPU_CV": (5.0, 0.8), "VDD_SOC": (5.0, 0.4)}
    sysfs.add("ina3221/1-0040/hwmon/hwmon3", ina3221(rails))
    meter = jetson(sysfs)
    assert {c.component: (c.additive, c.computes) for c in meter.channels} == {
        "VDD_IN": (True, "cpu"),
        "VDD_CPU_GPU_CV": (False, "gpu"),
        "VDD_SOC": (False, "cpu"),
    }
    traces = read_on_grid(meter, sysfs, 0.01, 0.4)
    reading = total(traces, 0.05, 0.35)
    assert reading.average_power_w == pytest.approx(10.0)
    assert reading.method == "integrated power"
    assert total(traces, 0.05, 0.35, "VDD_SOC").average_power_w == pytest.approx(2.0)
    # 40 uV over 5 mOhm is 8 mA, at 5 V 40 mW; 1 % of the shunt and 0.25 % of the chip, uniform.
    assert traces[0].resolution == pytest.approx(0.04)
    assert traces[0].relative_accuracy == pytest.approx(math.hypot(0.01, 0.0025) / 3**0.5)
    assert traces[0].update_period_s == pytest.approx(0.009)


def test_agx_orin_has_no_board_input_and_its_rails_add_up(sysfs: Sysfs) -> None:
    sysfs.add("ina3221/1-0040/hwmon/hwmon2", ina3221({"VDD_GPU_SOC": (19.0, 0.5), "VDD_CPU_CV": (19.0, 0.2)}))
    sysfs.add("ina3221/1-0041/hwmon/hwmon3", ina3221({"VIN_SYS_5V0": (5.0, 1.0), "NC": (5.0, 9.0)}))
    traces = read_on_grid(jetson(sysfs), sysfs, 0.01, 0.3)
    assert [t.component for t in traces] == ["VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0"]
    assert total(traces, 0.05, 0.25).average_power_w == pytest.approx(9.5 + 3.8 + 5.0)


def test_nano_of_the_old_kernel_tells_milliwatts(sysfs: Sysfs) -> None:
    files: dict[str, object] = {}
    for n, (name, milliwatt) in enumerate({"POM_5V_IN": 4200, "POM_5V_GPU": 1100, "POM_5V_CPU": 900}.items()):
        files |= {f"rail_name_{n}": name, f"in_power{n}_input": milliwatt}
    sysfs.add("ina3221x/6-0040/iio:device0", files)
    traces = read_on_grid(jetson(sysfs), sysfs, 0.01, 1.2)
    assert total(traces, 0.05, 1.15).average_power_w == pytest.approx(4.2)
    assert total(traces, 0.05, 1.15, "POM_5V_GPU").average_power_w == pytest.approx(1.1)


def test_ramp_of_a_rail_is_integrated(sysfs: Sysfs) -> None:
    files = ina3221({"VDD_IN": (5.0, 1.0)}, interval_ms=2)
    files["curr1_input"] = lambda passed_s: int(1000 + 1000 * passed_s)
    sysfs.add("ina3221/1-0040/hwmon/hwmon3", files)
    # 5 W and 5 W/s: power at the middle of the window is its mean. A chip of 2 ms may show what was 2 ms ago.
    traces = read_on_grid(jetson(sysfs), sysfs, 0.01, 0.6)
    assert total(traces, 0.05, 0.55).average_power_w == pytest.approx(5 + 5 * 0.3, abs=5 * 2e-3)


def test_rail_that_vanishes_is_an_error_at_stop(sysfs: Sysfs) -> None:
    folder = sysfs.add("ina3221/1-0040/hwmon/hwmon3", ina3221({"VDD_IN": (5.0, 1.0)}))
    meter = jetson(sysfs)
    meter.start()
    sysfs.unplug(folder / "curr1_input")
    with pytest.raises(DeviceError, match="curr1_input vanished or is unreadable"):
        meter.stop()


def test_channel_that_is_switched_off_is_no_rail(sysfs: Sysfs) -> None:
    files = ina3221({"VDD_IN": (5.0, 1.0), "VDD_SOC": (5.0, 1.0)})
    sysfs.add("ina3221/1-0040/hwmon/hwmon3", files | {"in2_enable": 0})
    assert [c.component for c in jetson(sysfs).channels] == ["VDD_IN"]


def test_a_chip_that_says_0_ms_is_not_taken_to_renew_its_values_at_once(sysfs: Sysfs) -> None:
    """Linux rounds to whole ms: one rail at the shortest conversions (140 us each of voltage and shunt) is 0."""
    sysfs.add("ina3221/1-0040/hwmon/hwmon3", ina3221({"VDD_IN": (5.0, 2.0)}, interval_ms=0))
    [channel] = jetson(sysfs).channels
    assert channel.update_period_s >= 2 * 140e-6


# --- hwmon -----------------------------------------------------------------------------------------------------------


def hwmon(sysfs: Sysfs) -> HwmonMeter:
    meter = HwmonMeter(0.01, CLOCK, sysfs.root)
    meter.open()
    return meter


def test_known_drivers_are_read_and_others_are_not(sysfs: Sysfs) -> None:
    sysfs.add("hwmon0", {"name": "nvme", "power1_input": 5_000_000})
    sysfs.add("hwmon1", {"name": "amdgpu", "power1_average": 31_000_000})
    sysfs.add("hwmon10", {"name": "amdgpu", "power1_input": 200_000_000})
    meter = hwmon(sysfs)
    assert [(c.component, c.computes) for c in meter.channels] == [("amdgpu0", "gpu"), ("amdgpu1", "gpu")]
    traces = read_on_grid(meter, sysfs, 0.01, 1.2)
    assert total(traces, 0.05, 1.15).average_power_w == pytest.approx(231.0)


def test_input_of_a_server_contains_its_gpu(sysfs: Sysfs) -> None:
    sysfs.add("hwmon1", {"name": "amdgpu", "power1_average": 31_000_000})
    sysfs.add("hwmon2", {"name": "power_meter", "power1_average": 180_000_000, "power1_average_interval": 500})
    meter = hwmon(sysfs)
    assert {c.component: c.additive for c in meter.channels} == {"amdgpu0": False, "machine0": True}
    assert (meter.channels[1].update_period_s, meter.channels[1].averaged_s) == (0.5, 0.5)
    assert meter.channels[0].averaged_s is None


@pytest.mark.parametrize(
    ("accuracy", "within"),
    [
        ("98.0%", 0.02),
        ("97.500%", 0.025),
        ("98.50%", 0.0195),
        ("98%", 0.02),
        ("98", 0.02),
        ("100.0%", 0.05),
        ("0.0%", 0.05),
        (None, 0.05),
    ],
)
def test_a_servers_input_errs_by_what_its_firmware_states(sysfs: Sysfs, accuracy: str | None, within: float) -> None:
    """Uniform within that, as one sigma; 5 % where it states none, or what no sensor can have."""
    files: dict[str, object] = {"name": "power_meter", "power1_average": 180_000_000}
    sysfs.add("hwmon2", files | ({} if accuracy is None else {"power1_accuracy": accuracy}))
    assert hwmon(sysfs).channels[0].relative_accuracy == pytest.approx(within / 3**0.5)


def test_a_server_that_shows_means_of_a_second_is_right_within_its_uncertainty(sysfs: Sysfs) -> None:
    """100 W, 300 W for 12 s from the 3rd second on, 100 W: what the means of a second, renewed each 0.1 s, tell."""

    def flowed_j(at_s: float) -> float:
        return 100.0 * at_s + 200.0 * min(max(at_s - 3.0, 0.0), 12.0)

    def shown_uw(passed_s: float) -> int:
        at_s = 1.0 + math.floor(passed_s / 0.1 + 1e-9) * 0.1
        return round(1e6 * (flowed_j(at_s) - flowed_j(at_s - 1.0)))

    files = {"name": "power_meter", "power1_average": shown_uw, "power1_average_interval": 1000}
    sysfs.add("hwmon2", files | {"power1_accuracy": "99.500%"})
    # Readings begin with the 1st second: the load is there from the 2nd of them to the 14th.
    reading = total(read_on_grid(hwmon(sysfs), sysfs, 0.02, 17.0), 2.0, 14.0)
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert abs(reading.energy_j - 3600.0) <= 2 * reading.uncertainty_j
    assert reading.uncertainty_j < 0.01 * 3600.0


def test_intel_gpu_counts_joules_of_its_card_and_package(sysfs: Sysfs) -> None:
    files: dict[str, object] = {"name": "xe", "energy1_label": "card", "energy2_label": "pkg"}
    files["energy1_input"] = lambda passed_s: int(90e6 * passed_s)
    files["energy2_input"] = lambda passed_s: int(60e6 * passed_s)
    sysfs.add("hwmon4", files)
    traces = read_on_grid(hwmon(sysfs), sysfs, 0.01, 1.2)
    reading = total(traces, 0.05, 1.15)
    assert (reading.method, traces[1].additive) == ("counter", False)
    assert reading.average_power_w == pytest.approx(90.0, rel=0.01)


XE = {"name": "xe", "energy1_label": "card", "energy2_label": "pkg", "energy1_input": 9, "energy2_input": 6}


def test_a_card_that_contains_its_package_is_no_whole_machine(sysfs: Sysfs) -> None:
    """The other GPU's power was left out of the total, and the card's was added to the machine's, which contains it."""
    sysfs.add("hwmon1", {"name": "amdgpu", "power1_average": 31_000_000})
    sysfs.add("hwmon4", XE)
    assert {c.component for c in hwmon(sysfs).channels if c.additive} == {"amdgpu0", "xe0 card"}
    sysfs.add("hwmon5", {"name": "power_meter", "power1_average": 180_000_000, "power1_average_interval": 500})
    assert {c.component for c in hwmon(sysfs).channels if c.additive} == {"machine0"}


@pytest.mark.parametrize(("meter", "message"), [(JetsonMeter, "is this a Jetson"), (HwmonMeter, "no power sensor of")])
def test_machine_without_sensors_has_no_meter(tmp_path: Path, meter: type[Meter], message: str) -> None:
    with pytest.raises(MeterUnavailableError, match=message):
        meter(0.01, CLOCK, tmp_path).open()  # type: ignore[call-arg]


def test_sensor_that_shows_0_watts_is_missing(sysfs: Sysfs) -> None:
    sysfs.add("hwmon1", {"name": "amdgpu", "power1_average": 0})
    reading = total(read_on_grid(hwmon(sysfs), sysfs, 0.01, 1.2), 0.05, 1.15)
    assert (reading.energy_j, reading.uncertainty_j) == (None, None)
    assert "hwmon amdgpu0: it shows 0 W" in str(reading.reason)


def test_rail_of_a_board_that_fails_to_0_watts_leaves_no_energy(sysfs: Sysfs) -> None:
    files = ina3221({"VDD_IN": (5.0, 2.0)})
    files["curr1_input"] = lambda passed_s: 2000 if passed_s < 0.4 else 0
    sysfs.add("ina3221/1-0040/hwmon/hwmon3", files)
    reading = total(read_on_grid(jetson(sysfs), sysfs, 0.01, 1.2), 0.05, 1.15)
    assert reading.energy_j is None
    assert "jetson VDD_IN: it showed 0 W for" in str(reading.reason)
