"""P90 power: closed forms for each kind of trace, and what a meter cannot resolve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from results.energy import energy_between
from results.peak_power import p90_power
from results.records import PowerTrace, TraceKind
from results.tables import energy
from tests.fakes.stopped import frozen
from tests.fakes.waveforms import StepPower, counter_trace
from tests.run_builders import cell, run, trial

WINDOW = (1.0, 11.0)


def trace(times_s: Any, values: Any, kind: TraceKind = "power", **changes: Any) -> PowerTrace:
    fields: dict[str, Any] = {
        "meter": "m", "component": "c", "kind": kind, "method": "counter" if kind == "counter" else "integrated power",
        "times_s": np.asarray(times_s, dtype=float), "values": np.asarray(values, dtype=float),
        "sample_interval_s": 0.1,
    }  # fmt: skip
    return PowerTrace(**(fields | changes))


TIMES_S = np.linspace(0.0, 12.0, 121)


def test_of_a_ramp_it_is_nine_tenths_of_the_way_up() -> None:
    watts, why = p90_power([trace(TIMES_S, TIMES_S)], WINDOW, "m")
    assert why is None
    # From 1 W to 11 W in the window; readings lie 0.1 s apart.
    assert watts == pytest.approx(10.0, abs=0.1)


def test_a_burst_of_a_fifth_of_the_window_is_above_it_and_one_of_a_twentieth_is_not() -> None:
    def burst(seconds: float) -> float | None:
        # A counter that climbs at 5 W, and at 50 W from 4 s on.
        joules = 5 * TIMES_S + 45 * np.clip(TIMES_S - 4.0, 0.0, seconds)
        return p90_power([trace(TIMES_S, joules, "counter")], WINDOW, "m")[0]

    assert burst(2.0) == pytest.approx(50.0)
    assert burst(0.5) == pytest.approx(5.0)


def test_a_held_value_counts_for_as_long_as_it_stands() -> None:
    times_s = np.arange(0.0, 12.5, 0.5)
    watts = np.where((times_s >= 3.0) & (times_s < 4.5), 40.0, 10.0)
    assert p90_power([trace(times_s, watts, "held")], WINDOW, "m")[0] == pytest.approx(40.0), "1.5 of 10 s"


def test_dense_readings_at_an_edge_have_no_more_say() -> None:
    dense_s = np.union1d(TIMES_S, np.linspace(5.0, 5.4, 1000))
    watts = np.where((dense_s >= 5.0) & (dense_s <= 5.4), 90.0, 10.0)
    assert p90_power([trace(dense_s, watts)], WINDOW, "m")[0] == pytest.approx(10.0, abs=1e-6)


def pulses(lasting_s: float) -> StepPower:
    """150 W for so much of each second, and 30 W for the rest of it."""
    edges_s = np.arange(0.0, 42.0)[:, None] + [0.0, lasting_s]
    return StepPower(np.append(edges_s.reshape(-1), 42.0), np.tile([150.0, 30.0], 42))


@pytest.mark.parametrize(("lasting_s", "watts"), [(0.06, 30.0), (0.14, 150.0)])
@pytest.mark.parametrize("update_s", [0.0, 0.02])
def test_between_two_readings_of_a_sensor_no_power_is_made_up(lasting_s: float, watts: float, update_s: float) -> None:
    """A line between them took 6 % of pulses for 11 %, and of 14 % the edges away: 90 W of 30 W, and of 150 W."""
    power, rng = pulses(lasting_s), np.random.default_rng(20261128)
    times_s = np.cumsum(rng.uniform(0.025, 0.075, 800))
    shown_w = power.power_w(np.floor(times_s / update_s) * update_s if update_s else times_s)
    sensor = trace(times_s, shown_w, sample_interval_s=0.05, update_period_s=update_s)
    assert p90_power([sensor], (1.0, 39.0), "m") == (pytest.approx(watts), None)


def test_parts_of_a_meter_add_up_and_contained_ones_do_not() -> None:
    parts = [trace(TIMES_S, np.full(121, w), component=f"c{w}") for w in (3.0, 4.0)]
    inner = trace(TIMES_S, np.full(121, 2.0), component="core", additive=False)
    other = trace(TIMES_S, np.full(121, 9.0), meter="other")
    assert p90_power([*parts, inner, other], WINDOW, "m")[0] == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("traces", "why"),
    [
        ([], "meter m has no trace"),
        ([trace(TIMES_S, TIMES_S, update_period_s=2.0)], "5 new values in the window, 10 are needed"),
        ([trace(TIMES_S, np.floor(TIMES_S / 3.0), "counter")], "3 new values in the window"),
        # Fifty readings, five of them in the window.
        ([trace(np.arange(0.0, 100.0, 2.0), np.ones(50), sample_interval_s=2.0)], "5 new values in the window"),
        ([trace(TIMES_S, TIMES_S, gaps_s=((5.0, 6.0),))], "a gap"),
        ([trace(TIMES_S, TIMES_S, method="relative gauge")], "a relative gauge counts in units of its own"),
    ],
)
def test_what_a_meter_cannot_resolve_is_none_with_the_reason(traces: list[PowerTrace], why: str) -> None:
    watts, reason = p90_power(traces, WINDOW, "m")
    assert watts is None
    assert why in (reason or "")


@pytest.mark.parametrize("update_s", [0.0, 0.001])
@pytest.mark.parametrize("method", ["modelled", "counter"])
def test_readings_of_edges_that_lie_closer_than_one_power_needs_are_none_with_the_reason(
    method: Any, update_s: float
) -> None:
    """Four requests in 12 ms are marked at each edge, and readings between them come every 0.1 s: a trial was lost."""
    times_s = 5 + np.linspace(0.0, 0.012, 13)
    marked = trace(times_s, 30 * (times_s - 5), "counter", method=method, update_period_s=update_s)
    assert p90_power([marked], (5.0, 5.012), "m") == (
        None, "P90 power: m c: its readings span 0.012 s, too little for one power",
    )  # fmt: skip


def test_ten_readings_in_the_window_are_enough_and_a_gap_beside_it_takes_nothing() -> None:
    times_s = np.arange(0.5, 20.0)
    few = trace(times_s, np.where(times_s < 9.5, 5.0, 8.0), sample_interval_s=1.0, gaps_s=((0.5, 0.9), (11.0, 12.0)))
    assert p90_power([few], WINDOW, "m") == (pytest.approx(8.0), None), "two of ten seconds"


def test_a_part_that_is_switched_off_takes_no_total_away() -> None:
    """As of joules: 50 W beside a counter of memory that never moves."""
    package = trace(TIMES_S, 50 * TIMES_S, "counter", component="package")
    off = trace(TIMES_S, np.full(121, 7.0), "counter", component="dram")
    assert p90_power([package, off], WINDOW, "m") == (pytest.approx(50.0), None)


def test_what_a_model_states_by_few_points_is_known_between_them() -> None:
    """A timeline's counter at operation boundaries: 20 W, and 60 W in the last quarter."""
    modelled = trace([0.0, 9.0, 12.0], [0.0, 180.0, 360.0], "counter", method="modelled", sample_interval_s=0.0)
    assert p90_power([modelled], (0.0, 12.0), "m") == (pytest.approx(60.0), None)


# --- a source that stands still --------------------------------------------------------------------------------------

WORKING = StepPower(np.array([-5.0, 2.0, 2.7, 15.0]), np.array([20.0, 300.0, 150.0]))
"""Of the ten seconds from 1 s on: 1 s of 20 W, 0.7 s of 300 W, then 150 W: for nine tenths it is 150 W or less."""


def counter_and_sensor(from_s: float, to_s: float, catches_up: bool = False) -> tuple[PowerTrace, PowerTrace]:
    """A counter that stands still for so long, and the power beside it."""
    times_s = np.arange(0.0, 12.0, 0.05)
    beside = trace(times_s, WORKING.power_w(times_s), component="c power", additive=False, sample_interval_s=0.05)
    counter = counter_trace(WORKING, times_s, 0.1, 0.013, component="c")
    return frozen(counter, from_s, to_s, catches_up), beside


@pytest.mark.parametrize("catches_up", [False, True])
def test_where_a_counter_stood_still_the_sensor_beside_says_what_flowed(catches_up: bool) -> None:
    counter, beside = counter_and_sensor(4.0, 9.5, catches_up)
    assert p90_power([counter, beside], WINDOW, "m") == (pytest.approx(150.0), None)
    watts, why = p90_power([counter], WINDOW, "m")
    assert watts is None
    assert "stood still" in str(why)


def test_a_short_stand_matters_where_what_it_hides_may_be_the_highest_power() -> None:
    """Half a second of ten: to 7 % of 300 W it may add more than 3 %; to 40 % it adds nothing new."""
    watts, why = p90_power([counter_and_sensor(6.0, 6.5)[0]], WINDOW, "m")
    assert watts is None
    assert "a source stood still or was late" in str(why)
    halves = StepPower(np.array([-5.0, 7.0, 15.0]), np.array([150.0, 300.0]))
    counter = counter_trace(halves, np.arange(0.0, 12.0, 0.05), 0.1, 0.013, component="c")
    assert p90_power([frozen(counter, 4.0, 4.5)], WINDOW, "m")[0] == pytest.approx(300.0, rel=0.05)


def test_a_window_without_energy_has_no_p90_power_either() -> None:
    stuck_w = 100 + np.random.default_rng(0).standard_normal(121)
    stuck_w[40:90] = stuck_w[40]
    one = trace(TIMES_S, stuck_w, resolution=1e-3)
    reason = energy_between([one], [WINDOW], "all", "m").reason
    assert "stuck at one value" in str(reason)
    assert p90_power([one], WINDOW, "m") == (None, f"P90 power: {reason}")


def test_readings_above_what_can_flow_are_no_peak() -> None:
    watts = 100 + np.random.default_rng(0).standard_normal(121)
    watts[[20, 40, 60, 80]] = 65535.0
    assert p90_power([trace(TIMES_S, watts)], WINDOW, "m")[0] == pytest.approx(101.3, abs=1.0)


@pytest.mark.parametrize(("watts", "update_s"), [(3.0, 10.0), (4.0, 10.0), (3.0, 1.0), (2.0, 5.0)])
def test_a_coarse_step_of_a_counter_is_no_peak(watts: float, update_s: float) -> None:
    """1 mAh at 3.85 V is 13.86 J. Of a steady 3 W two or three of them come in 10 s, and three are 4.16 W."""
    steady = StepPower(np.array([-50.0, 4000.0]), np.array([watts]))
    counter = counter_trace(steady, np.arange(-40.0, 3640.0, 1.0), update_s, 0.3, step_j=13.86)
    assert p90_power([counter], (0.0, 3600.0), "m")[0] == pytest.approx(watts, rel=0.1)


def test_when_a_renewal_came_is_no_peak() -> None:
    """A counter of 100 ms that is read every 50: between two readings lie 50 to 150 ms of its energy."""
    steady = StepPower(np.array([-5.0, 15.0]), np.array([100.0]))
    for seed in range(10):
        rng = np.random.default_rng(seed)
        times_s = np.cumsum(np.concatenate([[0.0], rng.uniform(0.04, 0.06, 240)]))
        counter = counter_trace(steady, times_s, 0.1, rng.uniform(0, 0.1))
        assert p90_power([counter], WINDOW, "m")[0] == pytest.approx(100.0, rel=0.1)


def test_p90_of_several_trials_has_students_interval_over_them() -> None:
    """Of 10, 12 and 14 W: 12 +- 4.302653 x 2 / sqrt(3)."""
    trials = []
    for repeat, watts in enumerate((10.0, 12.0, 14.0)):
        reading = energy_between([trace(TIMES_S, np.full(len(TIMES_S), watts))], [WINDOW], "all", "m")
        trials.append(trial(repeat=repeat, energy=(reading.model_copy(update={"p90_power_w": watts}),)))
    table = energy(run([cell()], trials))
    [row] = table[(table["metric"] == "power_p90") & (table["phase"] == "all")].to_dict("records")
    half = 4.302653 * 2.0 / np.sqrt(3)
    assert (row["mean"], row["ci_low"], row["ci_high"]) == pytest.approx((12.0, 12.0 - half, 12.0 + half), rel=1e-6)
