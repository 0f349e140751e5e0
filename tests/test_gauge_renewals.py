"""What the readings of a gauge stand for: one sample a renewal, placed by the renewals and not by the readings."""

from __future__ import annotations

import numpy as np
import pytest

from results.cumulative import power_samples
from results.energy import energy_between
from results.records import PowerTrace
from tests.fakes.waveforms import StepPower, trace

WINDOW_S = 12.0
SEEDS = 60


def gauge(power: StepPower, update_s: float, every_s: float, rng: np.random.Generator, means: bool) -> PowerTrace:
    """Values that are renewed every update at some phase, without any noise, read on a grid that jitters by 10 ms."""
    n = round((WINDOW_S + 6 * update_s) / every_s)
    at_s = -2 * update_s + np.arange(n) * every_s + rng.uniform(0, 0.01, n)
    phase_s = rng.uniform(0, update_s)
    shown_s = np.floor((at_s - phase_s) / update_s) * update_s + phase_s
    if means:
        watts = (power.since_start_j(shown_s) - power.since_start_j(shown_s - update_s)) / update_s
    else:
        watts = power.power_w(shown_s)
    return trace("held", at_s, np.round(watts, 3), every_s, update_period_s=update_s, resolution=1e-3)


def busy_in_between(rng: np.random.Generator) -> StepPower:
    begin_s, end_s = 0.7 + rng.uniform(-0.3, 0.3), 6.0 + rng.uniform(-0.3, 0.3)
    return StepPower(np.array([-5.0, begin_s, end_s, 60.0]), np.array([50.0, 400.0, 50.0]))


def rare_squares(rng: np.random.Generator) -> StepPower:
    edges_s = -8.0 - rng.uniform(0, 7.7) + np.arange(20) * 3.85
    return StepPower(edges_s, np.where(np.arange(19) % 2, 50.0, 250.0))


@pytest.mark.parametrize("power_of", [busy_in_between, rare_squares])
@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize(("update_s", "every_s"), [(1.0, 0.25), (1.0, 0.05), (0.25, 0.05), (0.1, 0.05)])
def test_flat_plateaus_and_their_steps_are_within_two_sigma(
    update_s: float, every_s: float, means: bool, power_of: type
) -> None:
    """42 to 52 of 60 before: a plateau's repeats drifted against its renewals, and its last lay anywhere."""
    inside = 0
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        power = power_of(rng)
        reading = energy_between([gauge(power, update_s, every_s, rng, means)], [(0.0, WINDOW_S)], "all", "m")
        assert reading.energy_j is not None
        assert reading.uncertainty_j is not None
        inside += abs(reading.energy_j - power.energy_j(0.0, WINDOW_S)) <= 2 * reading.uncertainty_j
    assert inside >= 0.95 * SEEDS


@pytest.mark.parametrize("every_s", [0.05, 0.1, 0.25])
def test_a_plateau_ends_one_update_before_the_next_wherever_it_was_read(every_s: float) -> None:
    """Renewed each second from 0.3 s on, 2 W up to 5.3 s and 12 W then: the last of 2 W at 4.3 s."""
    at_s = np.arange(0.0, 12.0, every_s)
    held = trace("held", at_s, np.where(at_s < 5.3 - 1e-9, 2.0, 12.0), every_s, update_period_s=1.0)
    times_s, watts = power_samples(held, held.values)
    last, first = float(times_s[watts == 2.0][-1]), float(times_s[watts == 12.0][0])
    assert first - last == pytest.approx(1.0, abs=0.2)
    # A quarter of an update early: an instant, or the mean of the update before.
    assert first == pytest.approx(5.3 - 0.25, abs=every_s)
    assert np.diff(times_s[1:-1]) == pytest.approx(1.0, abs=0.21)


def test_what_changes_with_every_renewal_is_one_sample_a_renewal() -> None:
    at_s = np.arange(0.0, 10.0, 0.05)
    held = trace("held", at_s, np.floor(at_s / 0.25 + 1e-6), 0.05, update_period_s=0.25)
    times_s, watts = power_samples(held, held.values)
    assert list(watts[1:-1]) == list(range(40))
    assert np.diff(times_s[1:-1]) == pytest.approx(0.25)


def test_readings_that_are_rarer_than_updates_are_samples_each() -> None:
    at_s = np.arange(0.0, 10.0, 0.5)
    held = trace("held", at_s, np.where(at_s < 5, 2.0, 12.0), 0.5, update_period_s=0.1)
    times_s, _ = power_samples(held, held.values)
    assert times_s[1:-1] == pytest.approx(at_s - 0.05 - 0.025, abs=0.03)
