"""Where a series changed: steps that a generator made, and none where it made none."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from results.history.changes import Levels, find_levels
from results.history.places import LEAST_SEGMENT

STEP, NOISE, N_RUNS = 0.01, 0.003, 60


def levels_of(values: np.ndarray, errors: float | np.ndarray = 0.0) -> Levels:
    return find_levels(values, np.broadcast_to(errors, len(values)))


def noise(seed: int, n: int = N_RUNS) -> np.ndarray:
    return NOISE * np.random.default_rng(seed).standard_normal(n)


@pytest.mark.parametrize("seed", range(25))
def test_a_step_of_one_percent_at_a_third_of_a_percent_of_noise_is_found_where_it_is(seed: int) -> None:
    at = int(np.random.default_rng([1, seed]).integers(LEAST_SEGMENT + 1, N_RUNS - LEAST_SEGMENT))
    x = noise(seed) + STEP * (np.arange(N_RUNS) >= at)
    (change,) = levels_of(x).changes
    assert abs(change.at - at) <= 2
    # Four runs at an end tell their level to NOISE / 2.
    assert change.size == pytest.approx(STEP, abs=4 * NOISE / 2)
    assert change.p < 0.001


def test_steady_series_have_no_change() -> None:
    assert sum(bool(levels_of(noise(1000 + seed)).changes) for seed in range(60)) == 0


def test_a_step_that_goes_back_is_two_changes() -> None:
    inside = (np.arange(N_RUNS) >= 25) & (np.arange(N_RUNS) < 35)
    changes = levels_of(noise(3) + STEP * inside).changes
    assert [change.at for change in changes] == [25, 35]
    assert changes[0].size > 0 > changes[1].size


def test_one_odd_run_is_no_level() -> None:
    x = noise(4)
    x[30] += 20 * NOISE
    assert levels_of(x).changes == ()


def test_runs_that_are_alike_to_the_last_digit_have_one_level_and_a_step_among_them_is_found() -> None:
    assert levels_of(np.full(20, 0.75)).changes == ()
    (change,) = levels_of(np.repeat([0.75, 0.70], 10)).changes
    assert (change.at, change.size) == (10, pytest.approx(-0.05))


def test_fewer_runs_than_two_segments_have_one_level() -> None:
    assert levels_of(np.repeat([0.0, 1.0], [3, 4])).changes == ()


def test_points_with_wide_error_bars_hardly_move_a_level() -> None:
    """The plain mean of 60 points, every other one a hundred times as unsure, is off 0 by 0.05 / sqrt(120)."""
    errors = np.tile([0.0005, 0.05], 30)
    off = []
    for seed in range(30):
        (segment,) = levels_of(errors * np.random.default_rng(seed).standard_normal(60), errors).segments
        off.append(segment.mean)
    assert np.sqrt(np.mean(np.square(off))) < 0.25 * 0.05 / np.sqrt(120)


def test_a_step_that_error_bars_explain_is_none() -> None:
    x = noise(6) + STEP * (np.arange(N_RUNS) >= 57)
    errors = np.where(np.arange(N_RUNS) >= 56, 5 * STEP, 0.0)
    assert levels_of(x, errors).changes == ()


@pytest.mark.parametrize("seed", [83, 99, 113, 233])
def test_a_step_is_not_lost_to_weights_of_the_first_look(seed: int) -> None:
    """A first look that shuffled split these into levels so narrow that a few points of small error weighed nearly all:
    four of 200 such series lost their step by that."""
    rng = np.random.default_rng([seed, 77, 1])
    n = int(rng.integers(10, 41))
    errors = NOISE * 10 ** rng.uniform(-1.5, 1, n)
    x = rng.normal(0, 1, n) * np.hypot(errors, NOISE)
    at = int(rng.integers(3, n - 3))
    x[at:] += rng.choice([-1, 1]) * NOISE * rng.uniform(1, 5)
    (change,) = levels_of(x, errors).changes
    assert abs(change.at - at) <= 2


def test_of_a_known_split_size_and_p_are_those_of_the_pooled_t_test() -> None:
    """Against scipy's, where weights are alike."""
    x = noise(7, 24) + 5 * NOISE * (np.arange(24) >= 12)
    (change,) = levels_of(x).changes
    expected = stats.ttest_ind(x[change.at :], x[: change.at], equal_var=True)
    assert change.p == pytest.approx(expected.pvalue, rel=1e-6)
    interval = expected.confidence_interval(0.95)
    assert (change.low, change.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


@pytest.mark.parametrize(("values", "errors"), [([1.0, np.nan], [0.0, 0.0]), ([1.0], [0.0, 0.0]), ([1.0], [-1.0])])
def test_what_is_no_series_is_refused(values: list[float], errors: list[float]) -> None:
    with pytest.raises(ValueError, match="a series is of finite values"):
        find_levels(values, errors)
