"""The phone's clock on the host's: known truth, simulated links."""

from __future__ import annotations

import numpy as np
import pytest

from devices.android.device_clock import WALL_RESOLUTION_S, fit_clock, steady_stamps
from devices.base import TransientDeviceError

Burst = list[tuple[float, float, float]]

OFFSET_S = 1.7e9
"""Of a wall clock against a monotonic one."""


def burst(
    rng: np.random.Generator,
    at_s: float,
    offset_s: float,
    ppm: float = 0.0,
    jitter_s: float = 0.02,
    base_s: float = 0.0,
) -> Burst:
    """Twelve markers, each sent when the one before is back. base_s: what every trip takes at least, each way."""
    trips, now_s = [], at_s
    for _ in range(12):
        out_s, back_s = base_s + rng.uniform(0.0, jitter_s, 2)
        stamped_s = now_s + out_s
        trips.append((now_s, stamped_s + offset_s + ppm * 1e-6 * stamped_s, stamped_s + back_s))
        now_s = stamped_s + back_s
    return trips


def test_the_offset_is_known_to_5_ms_over_a_link_with_20_ms_jitter() -> None:
    """In 1000 seeded bursts: the error is never outside the stated bound, and above 5 ms in fewer than one of 200."""
    rng = np.random.default_rng(7)
    errors_s = []
    for _ in range(1000):
        fit = fit_clock([burst(rng, 100.0, OFFSET_S)])
        error_s = abs(float(fit.offset_s[0]) - OFFSET_S)
        assert error_s <= fit.uncertainty_s + 1e-6  # 1e-6: what a double keeps of 1.7e9 s
        errors_s.append(error_s)
    assert np.quantile(errors_s, 0.995) < 5e-3


def test_drift_over_an_hour_is_followed_to_5_ms() -> None:
    """A phone that is fast by 100 ppm gains 360 ms in an hour; markers at both ends alone take it out again."""
    rng = np.random.default_rng(8)
    fit = fit_clock([burst(rng, 0.0, OFFSET_S, ppm=100.0), burst(rng, 3600.0, OFFSET_S, ppm=100.0)])
    host_s = np.linspace(0.0, 3600.0, 1000)
    seen_s = fit.to_host_s(host_s + OFFSET_S + 100e-6 * host_s)
    assert np.abs(seen_s - host_s).max() < 5e-3
    assert fit.drift_ppm == pytest.approx(100.0, abs=2.0)


def test_a_drift_that_changes_is_followed_with_a_burst_a_minute() -> None:
    """A phone that warms up: its rate goes from 0 to 60 ppm in an hour, a gain of 108 ms on a parabola."""
    rng = np.random.default_rng(9)
    rate_per_s = 60e-6 / 3600.0
    bursts = [burst(rng, t, OFFSET_S + rate_per_s * t * t / 2) for t in range(0, 3601, 60)]
    host_s = np.linspace(0.0, 3600.0, 1000)
    seen_s = fit_clock(bursts).to_host_s(host_s + OFFSET_S + rate_per_s * host_s**2 / 2)
    assert np.abs(seen_s - host_s).max() < 5e-3


def test_what_both_ways_take_at_least_widens_the_bound() -> None:
    fit = fit_clock([burst(np.random.default_rng(1), 0.0, 5.0, jitter_s=0.0, base_s=0.01)])
    assert fit.uncertainty_s == pytest.approx(0.01)
    assert fit.offset_s[0] == pytest.approx(5.0)


def test_a_clock_that_steps_within_a_burst_is_told() -> None:
    rng = np.random.default_rng(2)
    trips = burst(rng, 0.0, 0.0)
    trips[6:] = [(sent, device + 3.0, back) for sent, device, back in trips[6:]]
    with pytest.raises(TransientDeviceError, match=r"stepped by at least 2\.\d+ s.*automatic time off"):
        fit_clock([trips])


def test_a_wall_clock_that_was_set_is_not_gone_by() -> None:
    at_s = 0.05 * np.arange(200, dtype=np.float64)
    uptime_s = np.floor((at_s + 5000.0) * 100) / 100
    wall_s = at_s + OFFSET_S
    stamps = steady_stamps(wall_s, uptime_s)
    assert (stamps.source, stamps.resolution_s) == ("wall clock", WALL_RESOLUTION_S)
    assert stamps.times_s is wall_s
    held_up = wall_s.copy()
    held_up[[50, 51, 120]] += 0.2  # between the readings of the two clocks, on a busy phone
    assert steady_stamps(held_up, uptime_s).source == "wall clock"
    stamps = steady_stamps(wall_s + np.where(at_s > 5.0, -2.0, 0.0), uptime_s)
    assert stamps.source == "uptime (its wall clock was set by 2 s meanwhile)"
    assert np.abs(stamps.times_s - (at_s + 5000.0)).max() <= stamps.resolution_s / 2 + 1e-9


def test_a_shell_without_a_fine_clock_goes_by_the_uptime() -> None:
    uptime_s = np.array([1.0, 1.05])
    stamps = steady_stamps(np.array([np.nan, np.nan]), uptime_s)
    assert stamps.source == "uptime (its shell has no EPOCHREALTIME)"
    assert stamps.times_s.tolist() == [1.005, 1.055]


def test_a_coarse_clock_widens_the_bound_and_does_not_contradict_itself() -> None:
    """Trips of up to 1 ms each way, stamped to 10 ms: the stamps err by more than a trip takes."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        trips = burst(rng, rng.uniform(0.0, 10.0), 5.0, jitter_s=1e-3)
        coarse = [(sent, np.floor(device * 100) / 100 + 0.005, back) for sent, device, back in trips]
        fit = fit_clock([coarse], resolution_s=0.01)
        assert abs(float(fit.offset_s[0]) - 5.0) <= fit.uncertainty_s <= 0.006


def test_microseconds_of_a_wall_clock_do_not_contradict_themselves_either() -> None:
    """Trips of no time at all: what EPOCHREALTIME cuts off, and what a double keeps of it, is no step of the clock."""
    rng = np.random.default_rng(4)
    for _ in range(200):
        trips = burst(rng, rng.uniform(0.0, 1e5), OFFSET_S, jitter_s=0.0, base_s=1e-4)
        cut = [(device - OFFSET_S, np.floor(device * 1e6) / 1e6, device - OFFSET_S) for _, device, _ in trips]
        fit = fit_clock([cut], steady_stamps(np.array([device for _, device, _ in cut]), np.full(12, 1.0)).resolution_s)
        assert abs(float(fit.offset_s[0]) - OFFSET_S) <= fit.uncertainty_s < 5e-6


@pytest.mark.parametrize("bursts", [[], [[]], [[], [(1.0, float("nan"), 1.1)]]])
def test_no_marker_at_all_is_told(bursts: list[list[tuple[float, float, float]]]) -> None:
    with pytest.raises(TransientDeviceError, match="no marker came back"):
        fit_clock(bursts)


def test_a_marker_without_a_stamp_is_left_out() -> None:
    clock = fit_clock([[(1.0, 11.0, 1.002), (2.0, float("nan"), 2.1)], []])
    assert clock.to_host_s(np.array([11.0])) == pytest.approx([1.001])
