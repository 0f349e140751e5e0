"""Gauges that repeat a value until they have a new one."""

from __future__ import annotations

import numpy as np
import pytest

from devices.gauges import observed_update_period_s, plausible_power, renewed_readings, stuck_stretches_s


def test_the_update_period_is_seen_through_repeated_samples() -> None:
    at_s = 0.05 * np.arange(200, dtype=np.float64)
    current = np.floor(at_s / 0.25 + 1e-9)
    assert observed_update_period_s(at_s, current) == pytest.approx(0.25)


def test_a_gauge_without_updates_resolves_nothing() -> None:
    at_s = 0.05 * np.arange(201, dtype=np.float64)
    assert observed_update_period_s(at_s, np.full(len(at_s), 5.0)) == pytest.approx(10.0)
    assert observed_update_period_s(at_s, np.where(at_s < 4.0, 5.0, 6.0)) == pytest.approx(5.0)


def test_a_gauge_that_stops_is_a_gap_from_its_last_update() -> None:
    at_s = 0.05 * np.arange(201, dtype=np.float64)
    current = np.floor(np.minimum(at_s, 4.0) / 0.25 + 1e-9)
    [stretch_s] = stuck_stretches_s(at_s, current, 0.25)
    assert stretch_s == pytest.approx((4.0, 10.0))
    assert stuck_stretches_s(at_s, np.floor(at_s / 0.25 + 1e-9), 0.25) == ()


def test_a_repeated_reading_is_kept_once_an_update_and_at_the_ends() -> None:
    """Read 16 times a second: new at 0.25 and 0.5 s, then the same until 19/16 s; an update takes 250 ms."""
    at_s = np.arange(20, dtype=np.float64) / 16
    shown = np.select([at_s < 0.25, at_s < 0.5], [1.0, 2.0], 3.0)
    assert at_s[renewed_readings(at_s, shown, 0.25)].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0, 1.1875]


def test_what_is_said_of_readings_that_are_left_out_counts_each_kind() -> None:
    """ "1 are no number" stood there."""
    shown = np.array([3.0, np.nan, -2.0, -1.0, 99.0])
    plausible, told = plausible_power(shown)
    assert plausible.tolist() == [True, False, False, False, False]
    assert str(told).startswith("of 5 readings 1 is no number, 2 are below 0 W,")
    assert ", 1 is not in 0.05 to 25 W" in str(told)
    assert plausible_power(shown[:1])[1] is None
