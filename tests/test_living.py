"""Powers of a counter between its renewals, by hand: 100, 20, 40, 30 W, a step that stood still, 50, 10, 70, 20 W."""

from __future__ import annotations

import numpy as np
import pytest

from results.energy import energy_between
from results.living import Array, Living
from tests.fakes.waveforms import trace

LASTED_S = np.array([1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 1.0, 2.0, 1.0])
STEPS_J = np.array([100.0, 20.0, 80.0, 30.0, 6.0, 50.0, 10.0, 140.0, 20.0])
STILL = 4


def since_first(steps: Array) -> Array:
    return np.concatenate([[0.0], np.cumsum(steps)])


@pytest.fixture
def living() -> Living:
    return Living(since_first(LASTED_S), since_first(STEPS_J), np.arange(9) == STILL)


@pytest.mark.parametrize(
    ("k", "over_s", "watts"),
    [
        (4, 3.0, 110 / 3),
        (4, 3.5, 110 / 3),
        (4, 4.0, 130 / 4),
        (4, 100.0, 230 / 5),
        # Two steps at least, however long they take; of one alone nothing is known.
        (4, 0.5, 110 / 3),
        (1, 100.0, None),
        # No further back than where it stood still.
        (6, 100.0, None),
        (7, 100.0, 60 / 2),
        (8, 100.0, 200 / 4),
    ],
)
def test_the_power_before_a_renewal(living: Living, k: int, over_s: float, watts: float | None) -> None:
    assert living.before_w(k, over_s) == pytest.approx(watts)


@pytest.mark.parametrize(
    ("k", "over_s", "watts"),
    [
        (0, 2.0, 120 / 2),
        (0, 2.5, 200 / 4),
        (0, 100.0, 230 / 5),
        (1, 0.5, 100 / 3),
        (3, 100.0, None),
        (5, 3.0, 200 / 4),
        (5, 100.0, 220 / 5),
        (8, 100.0, None),
    ],
)
def test_the_power_behind_a_renewal(living: Living, k: int, over_s: float, watts: float | None) -> None:
    assert living.after_w(k, over_s) == pytest.approx(watts)


@pytest.mark.parametrize(
    ("over_s", "watts"),
    [
        # The 60 W of its first two seconds are of less than three.
        (3.0, 160 / 3),
        (4.0, 200 / 4),
        # It never moved for six: then it is the highest of what there is.
        (6.0, 120 / 2),
        # No two steps are so close: means of two.
        (0.1, 120 / 2),
    ],
)
def test_the_highest_power_is_of_stretches_in_which_it_moved_for_so_long(
    living: Living, over_s: float, watts: float
) -> None:
    assert living.peak_w(over_s) == pytest.approx(watts)


@pytest.mark.parametrize(("peak_w", "watts"), [(20.0, (6 + 60 - 40) / 3), (30.0, 6 / 3), (40.0, 6 / 3)])
def test_what_came_late_is_what_two_renewals_brought_above_the_highest_power(
    living: Living, peak_w: float, watts: float
) -> None:
    assert living.late_w(STILL, peak_w) == pytest.approx(watts)


def test_renewals_behind_a_stand_end_with_the_next() -> None:
    living = Living(since_first(LASTED_S), since_first(STEPS_J), np.isin(np.arange(9), [0, STILL, 6]))
    assert [living.moving_after(k) for k in (0, 1, 3, 4, 5, 6, 7, 9)] == [0, 3, 4, 4, 6, 6, 9, 9]
    assert living.late_w(STILL, 20.0) == pytest.approx((6 + 50 - 20) / 3)
    assert living.late_w(0, 20.0) == pytest.approx((100 + 100 - 60) / 1)


def test_of_a_counter_that_hardly_moved_no_power_is_known() -> None:
    t = np.array([0.0, 1.0, 2.0, 3.0])
    living = Living(t, t, np.array([False, True, False]))
    assert living.peak_w(1.0) == 0.0
    assert living.range_w(1.0) is None


@pytest.mark.parametrize("over_s", [0.9, 3.0, 4.2])
def test_the_range_is_of_means_over_up_to_an_eighth_of_an_octave_less(over_s: float) -> None:
    """t W at t: a mean over L that ends at 20 s is 20 - L / 2, and the first of two steps is that of one of them."""
    apart_s = 1 / 128
    t = apart_s * np.arange(20 * 128 + 1, dtype=np.float64)
    living = Living(t, t**2 / 2, np.zeros(len(t) - 1, dtype=np.bool_))
    found = living.range_w(over_s)
    assert found is not None
    lowest_w, highest_w = found
    assert lowest_w == pytest.approx(apart_s)
    eighths = {0.9: -2, 3.0: 12, 4.2: 16}[over_s]
    assert highest_w == pytest.approx(20.0 - 2 ** (eighths / 8) / 2, abs=apart_s)


@pytest.mark.parametrize("sample_interval_s", [0.0, 0.05, 1.0])
def test_a_loss_of_a_counter_that_is_read_seldom_is_told(sample_interval_s: float) -> None:
    """100 W, renewed every 100 ms and read each second, whatever was asked for. 1.5 s are lost, in which one reading
    repeats: with no highest power known, all that came behind was late, and it was 2650 J ± 5 J."""
    t = np.arange(0.0, 31.0)
    counted_j = 100.0 * np.where(t <= 10, t, np.maximum(10.0, t - 1.5))
    taken = trace("counter", t, counted_j, sample_interval_s, update_period_s=0.1, resolution=1e-3)
    reading = energy_between([taken], [(1.0, 29.0)], "all", "m")
    assert reading.energy_j is not None
    assert reading.uncertainty_j is not None
    assert abs(reading.energy_j - 2800.0) <= 2 * reading.uncertainty_j
    assert "its counter stood still for 2 s" in str(reading.remark)
