"""Energy above idle: what is known of both idle times."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from results.idle import idle_baseline
from results.records import IdleBaseline, PowerTrace
from tests.benchmarks.idle_strays import errors_in_sigma
from tests.energy_readings import counted, energy
from tests.fakes.waveforms import trace

# --- idle and net ----------------------------------------------------------------------------------------------------


def flat(watts: float, start_s: float, end_s: float, **fields: Any) -> PowerTrace:
    times_s = np.arange(start_s, end_s + 1e-9, 0.01)
    return trace("power", times_s, np.full(len(times_s), watts), 0.01, **fields)


def test_net_energy_is_gross_less_idle_and_carries_the_idle_drift() -> None:
    idle = idle_baseline("m", [flat(4.0, 0, 1)], [flat(6.0, 20, 21)])
    assert (idle.before_w, idle.after_w, idle.power_w, idle.drift_w) == pytest.approx((4.0, 6.0, 5.0, 2.0))
    reading = energy(flat(30.0, 5, 15), (6.0, 14.0), idle=idle)
    assert reading.energy_j == pytest.approx(240.0)
    assert reading.net_energy_j == pytest.approx(240.0 - 5 * 8)
    # Idle power somewhere between 4 and 6 W, uniform, for 8 s.
    assert reading.net_uncertainty_j == pytest.approx(2 / math.sqrt(12) * 8)
    assert reading.uncertainty_j == pytest.approx(0)


def test_means_of_a_known_time_have_net_energy_too() -> None:
    """The last mean stands in the middle of its time: an idle time that ended with it was uncovered, always."""
    mean = {"averaged_s": 1.0, "update_period_s": 1.0}
    idle = idle_baseline("m", [flat(4.0, 0, 12, **mean)], [flat(6.0, 40, 52, **mean)])
    assert (idle.before_w, idle.after_w, idle.reason) == (pytest.approx(4.0), pytest.approx(6.0), None)
    reading = energy(flat(30.0, 14, 36, **mean), (15.0, 35.0), idle=idle)
    assert reading.net_energy_j == pytest.approx(600.0 - 5 * 20)


def test_a_part_of_another_meter_is_none_that_lacks() -> None:
    other = flat(7.0, 0, 1, meter="other", component="z")
    idle = idle_baseline("m", [flat(4.0, 0, 1), other], [flat(6.0, 20, 21)])
    assert (idle.power_w, idle.reason) == (pytest.approx(5.0), None)


def test_gain_error_scales_the_net_energy_once() -> None:
    # A meter that reads g too much reads g (E - P t) too much: window and idle err together.
    before, after = flat(9.0, 0, 1, relative_accuracy=0.2), flat(9.0, 20, 21, relative_accuracy=0.2)
    idle = idle_baseline("m", [before], [after])
    reading = energy(flat(10.0, 5, 15, relative_accuracy=0.2), (5.0, 15.0), idle=idle)
    assert reading.uncertainty_j == pytest.approx(0.2 * 100)
    assert (reading.net_energy_j, reading.net_uncertainty_j) == pytest.approx((10.0, 0.2 * 10))


def test_uncertainty_of_the_idle_power_grows_with_the_window() -> None:
    idle = IdleBaseline(meter="m", component="total", before_w=5.0, after_w=5.0, uncertainty_w=0.3)
    assert energy(flat(30.0, 0, 10), (1.0, 9.0), idle=idle).net_uncertainty_j == pytest.approx(0.3 * 8)


def test_what_leaves_net_energy_open_adds_up_in_quadrature() -> None:
    """30 W in steps of 3 W for 8 s, of a meter that is right to 2 %; 4 to 6 W idle, to 0.3 W, that strays."""
    idle = IdleBaseline(meter="m", component="total", before_w=4.0, after_w=6.0, uncertainty_w=0.3, strays_j2_per_s=0.5)
    reading = energy(flat(30.0, 0, 10, resolution=3.0, relative_accuracy=0.02), (1.0, 9.0), idle=idle)
    step_j2 = (3.0 * 8) ** 2 / 12
    assert reading.uncertainty_j == pytest.approx(math.sqrt(step_j2 + (0.02 * 240) ** 2))
    idle_j2 = (0.3 * 8) ** 2 + (2 * 8) ** 2 / 12 + 0.5 * 8
    assert reading.net_uncertainty_j == pytest.approx(math.sqrt(step_j2 + (0.02 * 200) ** 2 + idle_j2))


def test_idle_power_that_strays_by_itself_is_in_the_uncertainty_of_net_energy() -> None:
    """20 W idle and 50 W more for 20 s, idle times of 6 s: of how far these differ alone, 56 of 100 lay within."""
    z = np.abs(errors_in_sigma(keeps_s=0.5, idle_s=6.0, n_windows=60))
    assert np.mean(z <= 3) >= 0.95
    assert np.mean(z <= 1) <= 0.9  # and is no wider than it has to be


@pytest.mark.parametrize("step_j", [0.0, 1.5])
def test_how_far_idle_power_strays_is_the_variance_of_its_fifths_beyond_what_readings_leave_open(step_j: float) -> None:
    """1, 2, 3, 4 and 5 J in the five seconds: a variance of 2.5 J^2, less the two edges' step^2 / 12 each. Idle power
    is then known to sqrt(2 x (its readings' variance + that of 5 s) / 5^2) / 2, and a window of 8 s strays too."""
    times_s = np.arange(100.0, 105.25, 0.5)
    joules = np.interp(times_s, np.arange(100.0, 106.0), [0, 1, 3, 6, 10, 15])
    one = trace("counter", times_s, joules, 0.5, method="modelled", resolution=step_j)
    idle = idle_baseline("m", [one], [one])
    edges_j2 = 2 * step_j**2 / 12
    strays_j2_per_s = 2.5 - edges_j2
    assert (idle.power_w, idle.strays_j2_per_s) == pytest.approx((3.0, strays_j2_per_s))
    idle_w2 = (edges_j2 / 5**2 + strays_j2_per_s / 5) * 2 / 2**2
    assert idle.uncertainty_w == pytest.approx(math.sqrt(idle_w2))
    reading = energy(flat(30.0, 5, 15), (6.0, 14.0), idle=idle)
    assert reading.net_uncertainty_j == pytest.approx(math.sqrt(idle_w2 * 8**2 + strays_j2_per_s * 8))


def test_idle_power_that_stands_does_not_stray() -> None:
    assert idle_baseline("m", [flat(5.0, 0, 5)], [flat(5.0, 20, 25)]).strays_j2_per_s == pytest.approx(0)


def test_a_meter_too_slow_for_pieces_of_the_idle_time_says_nothing_of_its_ways() -> None:
    """12 updates of 100 ms: a fifth of them is no measurement."""
    slow = [flat(5.0, a, a + 1.2, update_period_s=0.1) for a in (0, 20)]
    idle = idle_baseline("m", slow[:1], slow[1:])
    assert (idle.power_w, idle.strays_j2_per_s) == (pytest.approx(5.0), None)


def test_missing_idle_leaves_net_energy_unknown_with_its_reason() -> None:
    idle = idle_baseline("m", [], [])
    assert idle.power_w is None
    reading = energy(flat(30.0, 0, 10), (1.0, 9.0), idle=idle)
    assert reading.energy_j == pytest.approx(240.0)
    assert (reading.net_energy_j, reading.net_uncertainty_j) == (None, None)
    assert reading.reason == "no idle trace before the window; no idle trace after the window"


def test_one_idle_side_alone_gives_no_net_energy_and_says_what_became_of_the_other() -> None:
    # The idle power may have drifted by any amount to the other side: 5 W of 4 W here.
    for other, why in (
        ([], "no idle trace after the window"),
        ([flat(9.0, 20, 20.05)], "idle after the window: m c: unresolved"),
        ([trace("counter", np.arange(0, 1, 0.01), np.full(100, 7.0), 0.01)], "idle after the window: m c: its counter"),
    ):
        idle = idle_baseline("m", [flat(4.0, 0, 1)], other)
        assert (idle.before_w, idle.after_w, idle.power_w, idle.drift_w) == (pytest.approx(4.0), None, None, None)
        reading = energy(flat(30.0, 5, 15), (6.0, 14.0), idle=idle)
        assert reading.energy_j == pytest.approx(240.0)
        assert (reading.net_energy_j, reading.net_uncertainty_j) == (None, None)
        assert why in str(reading.reason)


@pytest.mark.parametrize("dead_w", [(0.0, 0.0), (0.0, 50.0), (50.0, 0.0)])
def test_a_part_that_stands_still_in_an_idle_time_and_lives_in_the_window_leaves_no_net_energy(
    dead_w: tuple[float, float],
) -> None:
    # 50 W each, all the time: the true net energy is 0 J, and that of the part that stands still would be added.
    idle = idle_baseline(
        "m",
        [counted(50.0, "a", 0, 2), counted(dead_w[0], "b", 0, 2)],
        [counted(50.0, "a", 20, 22), counted(dead_w[1], "b", 20, 22)],
    )
    reading = energy([counted(50.0, "a", 5, 15), counted(50.0, "b", 5, 15)], (5.0, 15.0), idle=idle)
    assert reading.energy_j == pytest.approx(1000.0)
    assert reading.net_energy_j is None
    assert "m b" in str(reading.reason)
    assert "has stopped" in str(reading.reason)


def test_a_part_that_counts_in_the_idle_times_alone_leaves_no_net_energy() -> None:
    both = [counted(50.0, "a", 0, 2), counted(50.0, "b", 0, 2)]
    reading = energy(
        [counted(50.0, "a", 5, 15), counted(0.0, "b", 5, 15)], (5.0, 15.0), idle=idle_baseline("m", both, both)
    )
    assert reading.net_energy_j is None
    assert "m b moves in the idle time alone" in str(reading.reason)


def test_a_part_without_readings_in_one_idle_time_leaves_no_net_energy() -> None:
    one = trace("counter", [0.0], [5.0], 0.01, component="b")
    for lacking in ([counted(50.0, "a", 0, 2)], [counted(50.0, "a", 0, 2), one]):
        idle = idle_baseline("m", lacking, [counted(50.0, "a", 20, 22), counted(50.0, "b", 20, 22)])
        reading = energy([counted(50.0, "a", 5, 15), counted(50.0, "b", 5, 15)], (5.0, 15.0), idle=idle)
        assert (reading.net_energy_j, reading.reason) == (None, "no idle trace before the window of b")


def test_a_part_that_may_be_off_while_idle_counts_as_0_j_there_and_the_net_energy_says_so() -> None:
    # A GPU that wakes for the window: 50 W of a are idle, 100 W for 10 s are not.
    own = {"can_rest": True}
    off = [counted(50.0, "a", 0, 2), counted(0.0, "gpu", 0, 2, **own)]
    reading = energy(
        [counted(50.0, "a", 5, 15), counted(100.0, "gpu", 5, 15, **own)], (5.0, 15.0), idle=idle_baseline("m", off, off)
    )
    assert (reading.net_energy_j, reading.reason) == (pytest.approx(1000.0), None)
    assert str(reading.remark).count("the window: gpu counts as 0 J") == 2


@pytest.mark.parametrize(
    ("before_w", "after_w", "net_j"),
    [
        (30.0, 30.0, 0.0),
        # Drift is uniform between both sides: 1 W over 8 s is one sigma of 8 J / sqrt(12), and -4 J are 1.7 of them.
        (30.0, 31.0, -4.0),
        # Three of them are 6.93 J.
        (30.35, 31.35, -6.8),
        (30.4, 31.4, None),
        # -8 J without any drift, and -80 J with the same 1 W, are of an idle time that is not this machine's.
        (31.0, 31.0, None),
        (39.5, 40.5, None),
    ],
)
def test_idle_power_above_that_of_the_window_is_no_idle_power(
    before_w: float, after_w: float, net_j: float | None
) -> None:
    idle = idle_baseline("m", [flat(before_w, 0, 1)], [flat(after_w, 20, 21)])
    reading = energy(flat(30.0, 5, 15), (6.0, 14.0), idle=idle)
    assert reading.energy_j == pytest.approx(240.0)
    if net_j is not None:
        assert (reading.net_energy_j, reading.reason) == (pytest.approx(net_j, abs=1e-9), None)
        return
    assert (reading.net_energy_j, reading.net_uncertainty_j) == (None, None)
    assert f"showed {(before_w + after_w) / 2:.4g} W in the idle time around the window and 30 W in it" in str(
        reading.reason
    )


def test_window_without_idle_asked_for_has_no_net() -> None:
    reading = energy(flat(30.0, 0, 10), (1.0, 9.0))
    assert (reading.net_energy_j, reading.reason) == (None, None)
