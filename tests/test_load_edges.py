"""Loads that begin, change and end at the edges of what is measured: joules are those of the power's integral, and no
lower because a gauge shows a step late, or spread over its update.

Before, a second's gauge beside a window of 14 s told 2.1 % (instants) or 2.4 % (means) too little on average.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from devices.android.calibration import Calibration
from devices.android.raw_gauge import power_of
from devices.base import Channel
from results.charge import C_PER_UAH, VOLTAGE
from results.derivation import RequestEnergies, energies_of, energy_of_spans
from results.energy import MeterEnergy
from results.intervals import Interval
from results.load_edges import LoadEdges
from results.records import Completion, EnergyReading, Phase, PowerTrace
from results.trace_files import WINDOW, raw_part
from tests.fakes.waveforms import StepPower, trace

IDLE_W = 0.6
VOLTS = 4.0
READ_S = 0.05


def answered(start_s: float, first_s: float, end_s: float) -> Completion:
    return Completion(
        request_id=f"r{start_s}", sample_id="s", n_prompt_tokens=9, start_s=start_s, prefill_end_s=first_s,
        end_s=end_s, token_ids=(1, 2), token_times_s=(first_s, end_s),
    )  # fmt: skip


def load_of(done: Sequence[Completion], prefill_w: float, decode_w: float) -> StepPower:
    edges_s = [0.0, *(at_s for one in done for at_s in (one.start_s, one.prefill_end_s)), done[-1].end_s, 1e4]
    return StepPower(np.array(edges_s), np.array([IDLE_W, *[prefill_w, decode_w] * len(done), IDLE_W]))


def shown_w(load: StepPower, at_s: np.ndarray, mean_s: float) -> np.ndarray:
    """At renewals: the power of the instant, or the mean of so long before."""
    if mean_s == 0:
        return load.power_w(at_s)
    return np.asarray((load.since_start_j(at_s) - load.since_start_j(at_s - mean_s)) / mean_s)


def phone(
    load: StepPower, end_s: float, update_s: float, mean_s: float, draw: np.random.Generator, late_s: float = 0.0
) -> list[PowerTrace]:
    """A phone's gauge with a random phase, read as the loop reads it: (power, voltage). Its last digits flicker."""
    at_s = np.cumsum(draw.uniform(0.5 * READ_S, 1.5 * READ_S, int(end_s / READ_S * 1.2)))
    at_s = at_s[at_s < end_s + min(update_s, 1.0) + READ_S]
    phase_s = draw.uniform(0.0, update_s)
    nth = np.floor((at_s - phase_s) / update_s).astype(int)
    watts = shown_w(load, np.maximum(nth * update_s + phase_s - late_s, mean_s), mean_s)
    current_ua = -np.round(watts / VOLTS * 1e6 + draw.normal(0, 2e3, nth.max() + 2)[nth])
    current, volts = (
        Channel(name, "raw", additive=False, note="").trace("battery", "battery gauge", at_s, values, READ_S)
        for name, values in (("battery current", current_ua), (VOLTAGE, np.full(len(at_s), VOLTS * 1e6)))
    )
    gauge = Channel("battery", "held", relative_accuracy=0.0)
    return [power_of([current, volts], Calibration(-1, 1e-6, 1e-6), gauge), volts]


def of_phase(done: Sequence[Completion], traces: Sequence[PowerTrace], window: Interval, phase: Phase) -> EnergyReading:
    found = energies_of(done, {WINDOW: traces[:1], raw_part(WINDOW): traces[1:]}, window).readings
    return next(one for one in found if one.phase == phase)


@pytest.mark.parametrize("update_s", [0.25, 1.0])
@pytest.mark.parametrize("is_of_means", [False, True])
def test_joules_of_a_window_that_begins_and_ends_with_its_load_are_not_too_low(
    update_s: float, is_of_means: bool
) -> None:
    """2.4 W for 14 s are 33.6 J."""
    done = [answered(6.0, 6.3, 20.0)]
    load = load_of(done, 2.4, 2.4)
    off = []
    for seed in range(20):
        traces = phone(load, 21.0, update_s, update_s * is_of_means, np.random.default_rng(seed))
        found = of_phase(done, traces, (6.0, 20.0), "all")
        assert found.energy_j is not None
        assert found.uncertainty_j is not None
        assert found.charge_uah == pytest.approx(found.energy_j / VOLTS / C_PER_UAH, rel=1e-3)
        off.append(found.energy_j / 33.6 - 1)
        assert abs(found.energy_j - 33.6) <= 2 * found.uncertainty_j
    assert abs(np.mean(off)) <= 0.002


@pytest.mark.parametrize("n_late", [2, 3])
@pytest.mark.parametrize("update_s", [0.25, 1.0])
def test_what_a_gauge_shows_some_updates_late_is_in_the_uncertainty(update_s: float, n_late: int) -> None:
    """2.4 W for 14 s. Of 0.25 s and two updates late 2 of 100 windows held the 33.6 J, before."""
    done = [answered(6.0, 6.3, 20.0)]
    load = load_of(done, 2.4, 2.4)
    n_within = 0
    for seed in range(30):
        traces = phone(load, 21.0, update_s, 0.0, np.random.default_rng(seed), n_late * update_s)
        found = of_phase(done, traces, (6.0, 20.0), "all")
        assert found.energy_j is not None
        assert found.uncertainty_j is not None
        n_within += abs(found.energy_j - 33.6) <= 2 * found.uncertainty_j
        assert found.uncertainty_j <= 2.4 * (n_late + 1.5) * update_s
    assert n_within >= 28


@pytest.mark.parametrize("update_s", [0.25, 1.0])
@pytest.mark.parametrize("is_of_means", [False, True])
def test_joules_of_phases_are_their_own(update_s: float, is_of_means: bool) -> None:
    """7 W and 3 W in turns, of 12 to 20 updates. Prefill was told 2 % too low, and decoding 3 % too high."""
    off: dict[Phase, list[float]] = {"prefill": [], "decode": []}
    for seed in range(8):
        draw = np.random.default_rng(seed)
        edges_s = 3.0 + update_s * np.concatenate([[0.0], np.cumsum(draw.uniform(12, 20, 12))])
        done = [answered(*edges_s[i : i + 3].tolist()) for i in range(0, 12, 2)]
        load, window = load_of(done, 7.0, 3.0), (float(edges_s[0]), float(edges_s[-1]))
        traces = phone(load, window[1], update_s, update_s * is_of_means, draw)
        for phase, own in off.items():
            found = of_phase(done, traces, window, phase)
            is_prefill = phase == "prefill"
            seconds = sum(c.prefill_end_s - c.start_s if is_prefill else c.end_s - c.prefill_end_s for c in done)
            assert found.energy_j is not None
            own.append(found.energy_j / (seconds * (7.0 if is_prefill else 3.0)) - 1)
        one = RequestEnergies(traces[:1], "battery", done).of(done[2:3])
        assert one.energy_j == pytest.approx(load.energy_j(done[2].start_s, done[2].end_s), rel=0.03)
    for own in off.values():
        assert abs(np.mean(own)) <= 0.006


# --- closed forms ----------------------------------------------------------------------------------------------------


def joules(read: PowerTrace, *spans: Interval) -> float:
    found = MeterEnergy([read], read.meter, of_load=True).between(spans, "all")
    assert found.energy_j is not None, found.reason
    return found.energy_j


def by_lines(read: PowerTrace, *spans: Interval) -> float:
    found = energy_of_spans([read], spans, read.meter)
    assert found.energy_j is not None, found.reason
    return found.energy_j


@pytest.mark.parametrize("phase_s", [0.01, 0.2, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("mean_s", [0.0, 1.0])
def test_a_steady_load_has_its_joules_wherever_the_gauge_renews(phase_s: float, mean_s: float) -> None:
    """1 W, and 5 W from 10 to 30 s: 100 J, of instants and of means."""
    load = StepPower(np.array([0.0, 10.0, 30.0, 1e3]), np.array([1.0, 5.0, 1.0]))
    at_s = 5.0 + phase_s + np.arange(30.0)
    read = trace("held", at_s, shown_w(load, at_s, mean_s), 0.001, update_period_s=1.0)
    assert joules(read, (10.0, 30.0)) == pytest.approx(100.0, abs=0.01)
    assert by_lines(read, (10.0, 30.0)) < 100.0 - 0.8


@pytest.mark.parametrize("phase_s", [0.01, 0.06])
@pytest.mark.parametrize("apart_s", [0.05, 0.1])
def test_means_of_a_known_time_are_those_of_what_is_behind_a_start_and_before_an_end(
    phase_s: float, apart_s: float
) -> None:
    """50 W, and 300 W from 10 to 24 s: 4200 J. A line through means of 1 s has 250 J / 4 less."""
    load = StepPower(np.array([0.0, 10.0, 24.0, 1e3]), np.array([50.0, 300.0, 50.0]))
    at_s = 6.0 + phase_s + np.arange(0.0, 24.0, apart_s)
    flicker_w = np.random.default_rng(0).normal(0.0, 0.01, len(at_s))
    read = trace("power", at_s, shown_w(load, at_s, 1.0) + flicker_w, apart_s, averaged_s=1.0)
    assert joules(read, (10.0, 24.0)) == pytest.approx(4200.0, abs=0.5)
    assert by_lines(read, (10.0, 24.0)) == pytest.approx(4200.0 - 62.5, abs=2.0)
    # Steps far from the edges lie where the means draw them.
    assert joules(read, (8.0, 27.0)) == pytest.approx(4200.0 + 5.0 * 50.0, abs=0.5)


def test_phases_of_means_of_a_known_time_have_their_own_joules() -> None:
    """300 W for 12 s and 150 W for 20 s in turns. Prompts were told 1.1 % too low, answers 1 % too high."""
    edges_s = 10.0 + np.cumsum([0.0, *[12.0, 20.0] * 4])
    done = [answered(*edges_s[i : i + 3].tolist()) for i in range(0, 8, 2)]
    load = StepPower(np.array([0.0, *edges_s, 1e4]), np.array([50.0, *[300.0, 150.0] * 4, 50.0]))
    at_s = np.arange(5.03, edges_s[-1] + 4.0, 0.1)
    watts = shown_w(load, at_s, 1.0) + np.random.default_rng(0).normal(0.0, 0.01, len(at_s))
    read = trace("power", at_s, watts, 0.1, averaged_s=1.0, relative_accuracy=0.0)
    window = (float(edges_s[0]), float(edges_s[-1]))
    true_of: dict[Phase, float] = {"prefill": 4 * 12 * 300.0, "decode": 4 * 20 * 150.0, "all": 26_400.0}
    for phase, true_j in true_of.items():
        found = of_phase(done, [read], window, phase)
        assert found.energy_j == pytest.approx(true_j, rel=1e-3)


def test_a_fresh_reading_at_an_edge_shows_what_is_behind_it() -> None:
    """1 W, 5 W from 2 to 6 s, read each half second from 0 on."""
    load = StepPower(np.array([0.0, 2.0, 6.0, 1e3]), np.array([1.0, 5.0, 1.0]))
    at_s = np.arange(0.0, 10.0, 0.25)
    read = trace("power", at_s, load.power_w(at_s), 0.25)
    assert joules(read, (2.0, 6.0)) == pytest.approx(20.0)
    assert joules(read, (2.1, 6.0)) == pytest.approx(5.0 * 3.9)


def test_a_ramp_across_an_edge_is_no_step() -> None:
    """1 W a second."""
    at_s = np.arange(0.0, 20.0, 0.25)
    assert joules(trace("power", at_s, at_s, 0.25), (3.1, 15.2)) == pytest.approx((15.2**2 - 3.1**2) / 2)


def test_two_edges_between_the_same_readings_saw_no_step_of_their_own() -> None:
    """5 W, and 1 W from 10.2 to 10.4 s, which no reading met; then 3 W. The second's step is not put to both."""
    load = StepPower(np.array([0.0, 10.2, 10.4, 1e3]), np.array([5.0, 1.0, 3.0]))
    at_s = np.arange(0.0, 30.0, 1.0)
    read = trace("power", at_s, load.power_w(at_s), 0.5)
    apart = joules(read, (0.0, 10.2), (10.4, 29.0))
    assert apart == pytest.approx(by_lines(read, (0.0, 10.2), (10.4, 29.0)))


@pytest.mark.parametrize("phase_s", [0.0, 0.3, 0.7])
def test_a_step_that_is_shown_late_may_be_missing_since_the_start(phase_s: float) -> None:
    """1 W, and 5 W from 10 to 30 s, shown three updates of a second late: between 12 + phase and 13 + phase."""
    load = StepPower(np.array([0.0, 10.0, 30.0, 1e3]), np.array([1.0, 5.0, 1.0]))
    at_s = 5.0 + phase_s + np.arange(40.0)
    for late_s, missing_s in ((0.0, 0.0), (3.0, 2.5 + phase_s)):
        read = trace("held", at_s, load.power_w(at_s - late_s), 0.05, update_period_s=1.0)
        edges = LoadEdges(read, 0.0)
        assert edges.late_j2(np.array([[10.0, 30.0]])) == pytest.approx((4.0 * missing_s) ** 2 / 3)
    of_means = trace("held", at_s, shown_w(load, at_s, 1.0), 0.05, update_period_s=1.0)
    assert LoadEdges(of_means, 0.0).late_j2(np.array([[10.0, 30.0]])) == 0.0


def test_one_step_that_is_shown_late_counts_where_nothing_moved_before_it() -> None:
    """1 W, and 5 W from 10 to 30 s, 40 to 60 s and 70 to 90 s. The gauge of 1 s shows 1 W until 48 s."""
    load = StepPower(np.array([0.0, 10, 30, 40, 60, 70, 90, 1e3]), np.array([1.0, 5, 1, 5, 1, 5, 1]))
    at_s = 5.5 + np.arange(100.0)
    shown_w = np.where((at_s > 40) & (at_s < 48), 1.0, load.power_w(at_s))
    stretches = np.array([[10.0, 30], [30, 40], [40, 60], [60, 70], [70, 90]])
    stuck = LoadEdges(trace("held", at_s, shown_w, 0.05, update_period_s=1.0), 0.0)
    assert stuck.late_j2(stretches) == pytest.approx((4.0 * 8.0) ** 2 / 3)
    # What moves by a tenth of the step meanwhile is a load that rises late.
    moving_w = shown_w + np.where((at_s > 42) & (at_s < 45), 0.4, 0.0)
    moving = LoadEdges(trace("held", at_s, moving_w, 0.05, update_period_s=1.0), 0.0)
    assert moving.late_j2(stretches) == 0.0


@pytest.mark.parametrize("method", ["modelled", "replayed"])
def test_what_is_computed_or_played_back_knows_no_load(method: str) -> None:
    load = StepPower(np.array([0.0, 10.0, 30.0, 1e3]), np.array([1.0, 5.0, 1.0]))
    at_s = np.arange(5.3, 40.0, 1.0)
    read = trace("held", at_s, load.power_w(at_s), 0.05, update_period_s=1.0, method=method)
    assert joules(read, (10.0, 30.0)) == by_lines(read, (10.0, 30.0))
