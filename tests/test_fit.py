"""Fits of prices: known constants come back from times made of them, and what cannot be fitted is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.models.fit import FitError, checked_fit

NAMES = ("launches", "weight_bytes", "flops")
TRUE = {"launches": 2e-3, "weight_bytes": 5e-11, "flops": 7e-12}


def grid() -> list[dict[str, float]]:
    """Launches, bytes and FLOP that vary apart from each other."""
    return [
        {"launches": float(n), "weight_bytes": 1e6 * size, "flops": 2e6 * size * rows}
        for n, size, rows in product((1, 2, 4), (1, 8, 50), (1, 32, 256))
    ]


def times(points: Sequence[dict[str, float]], noise: Sequence[float] | None = None) -> list[float]:
    exact = [sum(TRUE[name] * point[name] for name in NAMES) for point in points]
    return exact if noise is None else [t * (1 + e) for t, e in zip(exact, noise, strict=True)]


def test_constants_come_back_from_exact_times() -> None:
    fit = checked_fit("curve", NAMES, grid(), times(grid()))
    assert fit.constants == pytest.approx([TRUE[name] for name in NAMES], rel=1e-9)
    assert fit.median_miss < 1e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_constants_come_back_from_times_with_noise(seed: int) -> None:
    """Of 27 points with 5 % of noise each: every constant within five of its own standard errors, which the closed form
    of least squares gives: the inverse of the normal matrix of relative amounts."""
    noise = 0.05 * np.random.default_rng(seed).standard_normal(27)
    points = grid()
    fit = checked_fit("curve", NAMES, points, times(points, noise.tolist()))
    relative = np.array([[point[name] for name in NAMES] for point in points]) / np.array(times(points))[:, None]
    errors = 0.05 * np.sqrt(np.diag(np.linalg.inv(relative.T @ relative)))
    # Dividing by noisy times pulls all constants by the mean of the noise squared, 0.25 %.
    for name, found, error in zip(NAMES, fit.constants, errors, strict=True):
        assert abs(found - TRUE[name]) < 5 * error + 0.01 * TRUE[name]
    assert fit.median_miss < 0.08


def test_a_term_that_would_be_negative_is_none() -> None:
    """t = 1 + x at x = 0, 1 and 3, then less: the slope that fits best is below 0."""
    points = [{"launches": 1.0, "flops": x} for x in (0.0, 1.0, 2.0, 3.0)]
    fit = checked_fit("curve", ("launches", "flops"), points, [1.0, 0.9, 0.8, 0.7])
    assert fit.constants[1] == 0
    # With the slope at 0, sum (a / t - 1)^2 is least at a = sum(1 / t) / sum(1 / t^2).
    inverse = [1 / t for t in (1.0, 0.9, 0.8, 0.7)]
    assert fit.constants[0] == pytest.approx(sum(inverse) / sum(i * i for i in inverse))


def test_what_is_known_of_a_time_is_left_out_of_the_fit() -> None:
    points = [{"launches": float(n)} for n in (1, 2, 5)]
    fit = checked_fit("curve", ("launches",), points, [11.0, 22.0, 55.0], known=[1.0, 2.0, 5.0])
    assert fit.constants[0] == pytest.approx(10.0)


def test_an_amount_that_no_point_has_costs_nothing() -> None:
    points = [{"launches": float(n)} for n in (1, 2, 5)]
    assert checked_fit("curve", ("flops", "launches"), points, [1.0, 2.0, 5.0]).constants == pytest.approx((0.0, 1.0))


def test_too_few_points_are_refused() -> None:
    with pytest.raises(FitError, match=r"3 points for 3 terms .*; measure at least 4 shapes"):
        checked_fit("matmul", NAMES, grid()[::9], times(grid()[::9]))


def test_a_grid_that_does_not_tell_amounts_apart_is_refused() -> None:
    """All of one row: FLOP grow with bytes."""
    points = [
        {"launches": float(n), "weight_bytes": size, "flops": 2 * size} for n in (1, 2) for size in (1e6, 5e6, 9e6)
    ]
    with pytest.raises(FitError, match="do not tell weight_bytes and flops apart"):
        checked_fit("gemv", NAMES, points, times(points))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_are_refused_all_at_once(bad: float) -> None:
    took = times(grid())
    took[3] = took[20] = bad
    with pytest.raises(FitError, match=r"point 4 took .* s; measure it again; point 21 took"):
        checked_fit("curve", NAMES, grid(), took)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_amounts_that_are_none_are_refused(bad: float) -> None:
    points = grid()
    points[0]["flops"] = bad
    with pytest.raises(FitError, match=r"point 1 has .* flops"):
        checked_fit("curve", NAMES, points, times(grid()))


def test_points_without_any_of_the_amounts_are_refused() -> None:
    with pytest.raises(FitError, match="no point has any of moved_bytes"):
        checked_fit("curve", ("moved_bytes",), grid(), times(grid()))
