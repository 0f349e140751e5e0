"""RAPL at a powercap tree whose counters move."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from devices import rapl_packages
from devices.base import DeviceError, MeterUnavailableError
from devices.meters.rapl import RaplMeter
from results.energy import energy_between
from tests.fakes.powercap import WRAP_UJ, Powercap
from tests.fakes.stepped_clock import stepped
from tests.meter_windows import CLOCK, measure, read_on_grid, sleep, total

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits, and none is late."""
    monkeypatch.setattr(Powercap, "by_steps", stepped(monkeypatch.setattr))


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Powercap]:
    """One package with its parts, its memory, and the platform around it."""
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 40.0)
    tree.add("intel-rapl:0:0", "core", 30.0)
    tree.add("intel-rapl:0:1", "uncore", 0.0)
    tree.add("intel-rapl:0:2", "dram", 5.0)
    tree.add("intel-rapl:1", "psys", 60.0)
    with tree:
        yield tree


def rapl(tree: Powercap) -> RaplMeter:
    meter = RaplMeter(0.01, tree.clock, tree.root)
    meter.open()
    return meter


def test_a_counter_whose_maker_states_no_gain_says_that_its_uncertainty_holds_none(laptop: Powercap) -> None:
    traces, _, _ = measure(rapl(laptop), sleep(0.3))
    assert {t.note for t in traces} == {"its maker states no gain error, and the uncertainty holds none"}


def test_rapl_sums_packages_and_memory_but_neither_their_parts_nor_the_platform(laptop: Powercap) -> None:
    meter = rapl(laptop)
    assert {c.component: c.additive for c in meter.channels} == {
        "package-0": True,
        "core of intel-rapl:0": False,
        "uncore of intel-rapl:0": False,
        "dram of intel-rapl:0": True,
        "psys": False,
    }
    traces, start_s, end_s = measure(meter, sleep(0.6))
    reading = total(traces, start_s, end_s)
    # 40 + 5 W; 105 W with the platform, 75 W with the cores.
    assert reading.average_power_w == pytest.approx(45.0, rel=0.05)
    assert reading.method == "counter"
    assert total(traces, start_s, end_s, "psys").average_power_w == pytest.approx(60.0, rel=0.05)


def test_rapl_knows_the_zones_of_two_packages_apart(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    for i in range(2):
        tree.add(f"intel-rapl:{i}", f"package-{i}", 10.0)
        tree.add(f"intel-rapl:{i}:0", "dram", 2.0)
    with tree:
        meter = rapl(tree)
        traces, start_s, end_s = measure(meter, sleep(0.2))
    assert len({c.component for c in meter.channels}) == 4
    assert total(traces, start_s, end_s).average_power_w == pytest.approx(24.0, rel=0.05)


def of_four_dies(tmp_path: Path) -> Powercap:
    """As Linux 6.9 lists an EPYC of Zen 4: two packages of 100 and 60 W, and two dies of each."""
    tree = Powercap(tmp_path / "powercap")
    for i, (name, watts) in enumerate(
        [("package-0-die-0", 100.0), ("package-0-die-1", 100.0), ("package-1-die-2", 60.0), ("package-1-die-3", 60.0)]
    ):
        tree.add(f"intel-rapl:{i}", name, watts)
        tree.add(f"intel-rapl:{i}:0", "core", 5.0)
    return tree


@pytest.mark.parametrize(
    ("vendor", "expected_w"), [("AuthenticAMD", 160.0), ("HygonGenuine", 160.0), ("GenuineIntel", 320.0)]
)
def test_the_one_counter_of_amds_package_is_counted_once_and_those_of_intels_dies_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, expected_w: float
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 25\n\nprocessor\t: 1\n")
    monkeypatch.setattr(rapl_packages, "CPUINFO", cpuinfo)
    with of_four_dies(tmp_path) as tree:
        traces, start_s, end_s = measure(rapl(tree), sleep(0.3))
    assert total(traces, start_s, end_s).average_power_w == pytest.approx(expected_w, rel=0.05)


def test_rapl_counter_wraps_during_a_window(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    # It reaches its range 0.3 s after the tree starts to count; opening takes 0.05 s of them.
    tree.add("intel-rapl:0", "package-0", 50.0, start_uj=WRAP_UJ - 15e6)
    with tree:
        traces, start_s, end_s = measure(rapl(tree), sleep(0.6))
    assert (np.diff(traces[0].values) < 0).sum() == 1
    assert traces[0].wrap_at_j == pytest.approx(262143.32885)
    assert total(traces, start_s, end_s).average_power_w == pytest.approx(50.0, rel=0.05)


def test_rapl_marks_resolve_phases_shorter_than_the_sampling_interval(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 50.0)
    with tree:
        meter = RaplMeter(1.0, tree.clock, tree.root)
        meter.open()
        meter.start()
        edges_s = []
        for _ in range(5):
            edges_s.append(CLOCK.now_s())
            meter.mark()
            time.sleep(0.1)
        traces = meter.stop()
    phases = [*itertools.pairwise(edges_s)][::2]
    reading = energy_between(traces, phases, "decode", "rapl")
    assert reading.average_power_w == pytest.approx(50.0, rel=0.15), reading.reason


@pytest.mark.parametrize(
    ("stated", "limit_w"),
    [
        ({}, 2000.0),
        ({"constraint_0_power_limit_uw": "28000000", "constraint_1_power_limit_uw": "64000000"}, 192.0),
        # Limited by hand, and what the part is made for.
        ({"constraint_0_power_limit_uw": "15000000", "constraint_0_max_power_uw": "125000000"}, 375.0),
        # A limit that says "none", and one that is not told.
        ({"constraint_0_power_limit_uw": "4095000000", "constraint_1_max_power_uw": "0"}, 2000.0),
        ({"constraint_0_max_power_uw": "0"}, 2000.0),
    ],
)
def test_a_zone_draws_no_more_than_three_times_its_highest_limit(
    tmp_path: Path, stated: dict[str, str], limit_w: float
) -> None:
    tree = Powercap(tmp_path / "powercap")
    zone = tree.add("intel-rapl:0", "package-0", 20.0)
    for name, text in stated.items():
        (zone / name).write_text(text + "\n")
    with tree:
        [channel] = rapl(tree).channels
    assert channel.max_power_w == limit_w


def test_no_rapl_zone_is_no_meter(tmp_path: Path) -> None:
    with pytest.raises(MeterUnavailableError, match="no intel-rapl zone under"):
        RaplMeter(0.01, CLOCK, tmp_path / "nothing here").open()
    with pytest.raises(MeterUnavailableError, match="no intel-rapl zone under"):
        RaplMeter(0.01, CLOCK, Powercap(tmp_path / "no zones").root).open()


def test_rapl_part_that_never_counts_is_no_joule_of_the_total_and_is_told(tmp_path: Path) -> None:
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 20.0)
    tree.add("intel-rapl:0:0", "dram", 0.0)
    with tree:
        traces, start_s, end_s = measure(rapl(tree), sleep(0.3))
    reading = total(traces, start_s, end_s)
    assert reading.average_power_w == pytest.approx(20.0, rel=0.05)
    assert "dram of intel-rapl:0 counts as 0 J: its counter stands still at 0 J all the time" in str(reading.remark)
    alone = total(traces, start_s, end_s, "dram of intel-rapl:0")
    assert (alone.energy_j, alone.uncertainty_j) == (None, None)
    assert "nothing that is switched on uses 0 J" in str(alone.reason)


def test_rapl_without_a_package_that_moves_is_no_meter(tmp_path: Path) -> None:
    dead = Powercap(tmp_path / "virtual")
    dead.add("intel-rapl:0", "package-0", 0.0)
    with pytest.raises(MeterUnavailableError, match=r"stand still \(package-0\) for 4 s"):
        rapl(dead)
    page = Path(__file__).parents[1] / "docs" / "devices" / "linux.md"
    assert "| the counters stand still (package-0) for 4 s |" in page.read_text("utf-8")


def test_rapl_counter_that_freezes_in_a_window_leaves_it_without_energy(tmp_path: Path) -> None:
    """The half of a second is lost: 20 of 40 J."""
    tree = Powercap(tmp_path / "powercap")
    tree.add("intel-rapl:0", "package-0", 40.0)

    def freezes() -> None:
        time.sleep(0.3)
        tree.freeze("intel-rapl:0")
        time.sleep(0.5)
        tree.resume("intel-rapl:0", after_s=0.5)
        time.sleep(0.2)

    with tree:
        traces, start_s, end_s = measure(rapl(tree), freezes)
    reading = total(traces, start_s, end_s)
    assert reading.energy_j is None
    assert "rapl package-0: its counter stood still for " in str(reading.reason)


def test_rapl_memory_that_froze_since_the_last_window_is_not_left_out_of_the_total(laptop: Powercap) -> None:
    meter = rapl(laptop)
    measure(meter, sleep(0.1))
    laptop.freeze("intel-rapl:0:2")
    traces, start_s, end_s = measure(meter, sleep(0.3))
    reading = total(traces, start_s, end_s)
    assert reading.energy_j is None
    assert "dram of intel-rapl:0" in str(reading.reason)
    assert "it has stopped, and the total would lack it" in str(reading.reason)


@pytest.mark.parametrize("renewal_s", [0.02, 0.06])
def test_rapl_that_is_renewed_slowly_is_seen_to_be(tmp_path: Path, renewal_s: float) -> None:
    """20 W before, 20 W within: whatever the phase, the truth lies within three standard uncertainties."""
    tree = Powercap(tmp_path / "powercap", renewal_s)
    tree.add("intel-rapl:0", "package-0", 20.0)
    with tree:
        traces, start_s, end_s = measure(rapl(tree), sleep(1.0))
    reading = total(traces, start_s, end_s)
    assert reading.energy_j is not None, reading.reason
    assert reading.uncertainty_j is not None
    assert abs(reading.energy_j - 20.0 * (end_s - start_s)) <= 3 * reading.uncertainty_j


@pytest.mark.parametrize("renewal_s", [0.02, 0.06])
def test_rapl_that_is_renewed_slowly_has_no_energy_in_five_renewals(tmp_path: Path, renewal_s: float) -> None:
    """Ten are not there in five of them, whatever the data sheet says."""
    tree = Powercap(tmp_path / "powercap", renewal_s)
    tree.add("intel-rapl:0", "package-0", 20.0)
    with tree:
        meter = rapl(tree)
    traces = read_on_grid(meter, tree, 0.01, 1.5)
    assert "10 are needed" in str(total(traces, 0.5, 0.5 + 5 * renewal_s).reason)
    assert total(traces, 0.15, 1.35).energy_j == pytest.approx(24.0, rel=0.05)


@pytest.mark.parametrize("damage", ["directory", "text", "no range"])
def test_rapl_zone_that_cannot_be_read_is_no_meter(tmp_path: Path, damage: str) -> None:
    tree = Powercap(tmp_path / "powercap")
    zone = tree.add("intel-rapl:0", "package-0", 20.0)
    if damage == "no range":
        (zone / "max_energy_range_uj").unlink()
    else:
        (zone / "energy_uj").unlink()
    if damage == "directory":
        (zone / "energy_uj").mkdir()
    elif damage == "text":
        (zone / "energy_uj").write_text("unavailable")
    with pytest.raises(MeterUnavailableError, match="RAPL:"):
        rapl(tree)


def test_rapl_without_permission_says_how_to_get_it() -> None:
    # As any other user: to root everything is readable. pytest's folders are closed to others, hence a folder of /tmp.
    code = """
        import os, sys, tempfile
        from pathlib import Path
        from devices.base import MeterUnavailableError
        from devices.clock import MonotonicClock
        from devices.meters.rapl import RaplMeter
        from tests.fakes.powercap import Powercap
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            zone = Powercap(Path(folder) / "powercap").add("intel-rapl:0", "package-0", 20.0)
            (zone / "energy_uj").chmod(0o400 if os.geteuid() == 0 else 0)
            if os.geteuid() == 0:
                os.seteuid(65534)
            try:
                RaplMeter(0.01, MonotonicClock(), Path(folder) / "powercap").open()
            except MeterUnavailableError as error:
                print(error)
            if os.getuid() == 0:
                os.seteuid(0)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "energy_uj is readable by root only" in ended.stdout
    assert "sudo chmod a+r" in ended.stdout


def test_rapl_zone_that_vanishes_is_an_error_at_stop(laptop: Powercap) -> None:
    meter = rapl(laptop)
    meter.start()
    laptop.unplug("intel-rapl:0:2")
    time.sleep(0.05)
    with pytest.raises(DeviceError, match="a counter vanished or is unreadable"):
        meter.stop()
    with pytest.raises(DeviceError, match="is not running"):
        meter.stop()


def test_meter_of_a_lost_device_can_still_be_closed(laptop: Powercap) -> None:
    meter = rapl(laptop)
    meter.start()
    laptop.unplug("intel-rapl:0")
    meter.close()
    meter.close()


def test_meter_that_failed_to_start_is_not_running(laptop: Powercap) -> None:
    meter = rapl(laptop)
    laptop.unplug("intel-rapl:0")
    for _ in range(2):
        with pytest.raises(DeviceError, match="vanished or is unreadable"):
            meter.start()
    with pytest.raises(DeviceError, match="is not running"):
        meter.stop()


def test_meter_runs_window_after_window_but_not_two_at_once(laptop: Powercap) -> None:
    meter = rapl(laptop)
    first, *_ = measure(meter, sleep(0.05))
    time.sleep(0.001)
    meter.start()
    with pytest.raises(DeviceError, match="already running"):
        meter.start()
    second = meter.stop()
    assert second[0].times_s[0] > first[0].times_s[-1]
