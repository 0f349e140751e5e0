"""Which readings of a power sensor are next to nothing, and which stick: by hand, of 100 W read every 100 ms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from results.liveness import Array, shows_nothing, stuck_runs
from tests.fakes.waveforms import trace

APART_S = 0.1


def found(watts: Array, resolution: float = 1e-6, **fields: float) -> list[int]:
    """The readings that are as good as 0 W."""
    times_s = APART_S * np.arange(len(watts))
    taken = trace("power", times_s, watts, APART_S, resolution=resolution, **fields)
    found_at: list[int] = np.flatnonzero(shows_nothing(taken)).tolist()
    return found_at


def low(low_w: Sequence[float], *others: int, floor_w: float = 100.0) -> Array:
    """100 W with `low_w` from reading 20 on, and with other runs of 0.4 W of so many readings; floor_w at its end."""
    watts = np.full(80 + 20 * len(others), 100.0)
    watts[20 : 20 + len(low_w)] = low_w
    for i, n in enumerate(others):
        watts[60 + 20 * i : 60 + 20 * i + n] = 0.4
    watts[-3:] = floor_w
    return watts


@pytest.mark.parametrize(
    ("watts", "is_found"),
    [
        # Half a per cent of what is beside it, for a moment.
        (low([0.5]), True),
        (low([0.51]), False),
        (low([0.4, 0.4]), True),
        (low([0.4, 0.4, 0.4]), False),
        # A part that idles at 2 W may be at 0.4: a fifth of that is as low as it gets.
        (low([0.4], floor_w=2.0), True),
        (low([0.41], floor_w=2.0), False),
        # Three of four are that short: then longer ones are too, up to ten readings.
        (low([0.4] * 3, 2, 1, 1), True),
        (low([0.4] * 3, 2, 1), False),
        (low([0.4] * 3, 2, 3, 1), False),
        (low([0.4] * 10, 2, 2, 2), True),
        (low([0.4] * 11, 2, 2, 2), False),
    ],
)
def test_a_dip_is_short_and_far_below_all_else(watts: Array, is_found: bool) -> None:
    assert (20 in found(watts)) is is_found


@pytest.mark.parametrize(
    ("update_s", "n", "is_found"), [(0.2, 4, True), (0.2, 5, False), (0.1, 3, False), (0.05, 3, False)]
)
def test_a_moment_is_two_renewals_where_these_are_slower_than_readings(update_s: float, n: int, is_found: bool) -> None:
    assert found(low([0.4] * n), update_period_s=update_s) == (list(range(20, 20 + n)) if is_found else [])


@pytest.mark.parametrize(
    ("low_w", "resolution", "is_found"),
    [
        # A thousandth of the load, for long: of a sensor that measures there where it changes by its own steps.
        ([0.1] * 5, 0.01, True),
        ([0.11] * 5, 0.01, False),
        ([0.05, 0.06, 0.07, 0.05, 0.06], 0.01, False),
        ([0.05, 0.06, 0.07, 0.05], 0.01, True),
        ([0.05, 0.06, 0.05, 0.06, 0.05], 0.01, True),
        ([0.06, 0.08, 0.10, 0.06, 0.08], 0.02, False),
        ([0.05, 0.08, 0.10, 0.06, 0.08], 0.02, True),
    ],
)
def test_next_to_nothing_is_power_where_it_is_measured(low_w: list[float], resolution: float, is_found: bool) -> None:
    assert found(low(low_w), resolution) == (list(range(20, 20 + len(low_w))) if is_found else [])


def test_0_watts_are_nothing_for_however_long() -> None:
    assert found(low([0.0] * 30)) == list(range(20, 50))
    assert found(np.zeros(3)) == [0, 1, 2]


def test_what_a_sensor_shows_under_load_is_of_its_higher_readings_alone() -> None:
    """Two of three readings failed."""
    assert found(np.tile([100.0, 0.4, 0.4], 20)) == [i for i in range(60) if i % 3]


def sticking(n: int) -> Array:
    """Readings that turn each time, but for one value that `n` of them show."""
    watts: Array = 100.0 + np.random.default_rng(0).normal(size=100)
    watts[40 : 40 + n] = 100.0
    return watts


@pytest.mark.parametrize("begins_s", [0.0, 1e5])
@pytest.mark.parametrize(
    ("update_s", "n", "is_stuck"),
    [(0.0, 13, True), (0.0, 12, False), (0.125, 13, True), (0.25, 24, False), (0.25, 25, True)],
)
def test_a_value_that_lasts_for_twelve_renewals_is_stuck(
    begins_s: float, update_s: float, n: int, is_stuck: bool
) -> None:
    """Whenever the clock began."""
    t = begins_s + 0.125 * np.arange(100)
    taken = trace("power", t, sticking(n), 0.125, resolution=1e-3, update_period_s=update_s)
    assert stuck_runs(taken) == ([(40, 40 + n - 1)] if is_stuck else [])


def test_a_battery_gauge_may_show_one_value_and_so_may_what_is_read_at_will() -> None:
    t = 0.125 * np.arange(100)
    assert stuck_runs(trace("held", t, sticking(30), 0.125)) == []
    assert stuck_runs(trace("power", t, sticking(30), 0.0)) == []


@pytest.mark.parametrize(
    ("step_w", "stuck_w", "is_stuck"),
    [
        # A coarse sensor repeats itself where it rests: at its lowest value, and one step above.
        (1.0, 95.0, False),
        (1.0, 96.0, False),
        (1.0, 97.0, True),
        # A fine one never does. A thousandth of the value is fine.
        (0.1, 95.0, False),
        (0.05, 95.0, True),
    ],
)
def test_a_coarse_sensor_may_repeat_its_lowest_values(step_w: float, stuck_w: float, is_stuck: bool) -> None:
    """It moves by several steps between 95 and 105 W, and by one at least once."""
    moves = 95.0 + np.array([0.0, 6.0, 2.0, 9.0, 3.0, 10.0, 4.0, 7.0, 1.0, 8.0])
    watts = np.tile(moves, 12)
    watts[60:80], watts[80] = stuck_w, 99.0
    watts[0], watts[1] = 95.0 + 5 * step_w, 95.0 + 6 * step_w
    taken = trace("power", 0.125 * np.arange(120), watts, 0.125, resolution=step_w)
    assert stuck_runs(taken) == ([(60, 79)] if is_stuck else [])
