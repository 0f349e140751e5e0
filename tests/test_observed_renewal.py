"""How often a counter renews its value, by hand: (period, how long it shows one at most), as its readings tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from results.renewal import observed_renewal

Told = tuple[float, float]


def told(times_s: Sequence[float], shown: Sequence[float], stated_s: float) -> Told:
    return observed_renewal(np.array(times_s, dtype=np.float64), np.array(shown, dtype=np.float64), stated_s)


def renewed_each(period_s: float, times_s: Sequence[float]) -> list[float]:
    return [float(np.floor(t / period_s + 1e-9)) for t in times_s]


def test_readings_that_marks_place_close_to_each_other_tell_nothing_where_no_others_are_near() -> None:
    """Read each second, and again a millisecond after: as stated, and not each second."""
    times_s = sorted([*range(20), *(k + 1e-3 for k in range(0, 20, 2))])
    assert told(times_s, renewed_each(0.1, times_s), 0.1) == pytest.approx((0.1, 1.5 * 0.3))


def test_nor_do_they_behind_a_stretch_that_was_read_closely() -> None:
    """There each value was seen twice."""
    close_s = [0.05 * k for k in range(20)]
    times_s = close_s + sorted([*range(1, 20), *(k + 1e-3 for k in range(1, 20, 2))])
    assert told(times_s, renewed_each(0.1, times_s), 0.3) == pytest.approx((0.1, 1.5 * 0.1))


def test_a_value_that_is_shown_for_longer_than_stated_is_believed() -> None:
    """Pairs of one value 0.4 s apart, each 10 s: of a counter that is said to be renewed each 50 ms."""
    times_s = [10.0 * (k // 2) + 0.4 * (k % 2) for k in range(20)]
    assert told(times_s, [k // 2 for k in range(20)], 0.05) == pytest.approx((10.0, 15.0))


def test_values_that_every_third_reading_repeats_are_shown_for_two() -> None:
    """Renewed each 200 ms and read each 150 ms."""
    times_s = [0.15 * k + 0.01 for k in range(60)]
    assert told(times_s, renewed_each(0.2, times_s), 0.3) == pytest.approx((0.2, 1.5 * 0.3), rel=0.03)


@pytest.mark.parametrize(("stated_s", "period_s"), [(1.0, 0.25), (0.24, 0.24), (0.1, 0.1)])
def test_the_first_of_few_changes_may_be_as_old_as_the_reading_before(stated_s: float, period_s: float) -> None:
    """Three renewals in 0.3 s, the first of them within a second: with half of that 0.25 s each, at most."""
    found_s, _ = told([0.0, 1.0, 1.1, 1.2, 1.3], range(5), stated_s)
    assert found_s == pytest.approx(period_s)


@pytest.mark.parametrize(("pairs", "of"), [(3, (0.12, 1.5 * 0.24)), (2, (0.05, 1.5 * 0.15))])
def test_three_values_that_were_seen_for_longer_than_stated_tell_the_least_period(pairs: int, of: Told) -> None:
    """Read each 200 ms, all others differ; some are there still 120 ms later, and not 120 ms after that."""
    times_s, shown, at_s = [0.0], [0.0], 0.0
    for k in range(90):
        is_pair = k in (1, 31, 61)[:pairs]
        for later_s in (0.12, 0.24) if is_pair else (0.2,):
            times_s.append(at_s + later_s)
            shown.append(float(k + 1) if later_s != 0.12 else shown[-1])
        at_s = times_s[-1]
    assert told(times_s, shown, 0.05) == pytest.approx(of)


@pytest.mark.parametrize(
    ("close_s", "stated_s", "period_s"),
    [
        # Three renewals in 0.1 s each, the first of them within a second: 0.3 s and half of 0.9 s are of three.
        (0.1, 0.3, 0.25),
        # 0.6 s of a second are not twice as close: they may be chance, and what is stated stands.
        (0.52, 0.8, 0.8),
    ],
)
def test_a_few_readings_tell_where_they_are_twice_as_close(close_s: float, stated_s: float, period_s: float) -> None:
    times_s = [*range(31), *(30 + close_s * k for k in range(1, 4))]
    found_s, _ = told(times_s, range(len(times_s)), stated_s)
    assert found_s == pytest.approx(period_s)
