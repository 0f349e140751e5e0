"""The arithmetic of a race: paired least squares against numpy's, the bound against simulated sessions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from harness.tuning.paired import Fit, fit_rounds, spread
from harness.tuning.verdicts import Compared, Rules, bound, bounds_of, compare, following_look, verdict

Array = NDArray[np.float64]


def fallen_out(seed: int = 1) -> Array:
    """12 rounds of 4 candidates; one is out after the third round, one joins at the sixth."""
    values_RK = np.exp(np.random.default_rng(seed).normal(0, 0.05, (12, 4)) + np.arange(4) / 10)
    values_RK[3:, 1] = np.nan
    values_RK[:5, 3] = np.nan
    return values_RK


def test_effects_and_errors_are_those_of_ordinary_least_squares() -> None:
    """Rounds and candidates as columns of noughts and ones, solved by numpy; the errors by its covariance."""
    values_RK = fallen_out()
    fit = fit_rounds(values_RK, spread(values_RK))
    rows, columns = np.nonzero(~np.isnan(values_RK))
    design = np.zeros((len(rows), 12 + 4))
    design[np.arange(len(rows)), rows] = 1
    design[np.arange(len(rows)), 12 + columns] = 1
    design = design[:, :-1]  # the last candidate is the reference
    y = np.log(values_RK[rows, columns])
    solution, (squares,), rank, _ = np.linalg.lstsq(design, y)
    dof = len(y) - rank
    covariance = np.linalg.inv(design.T @ design) * squares / dof
    assert fit.dof == dof
    assert fit.drawn_in == 0
    assert fit.noise == pytest.approx(np.sqrt(squares / dof))
    errors_KK = fit.standard_errors_KK()
    for k in range(3):
        assert fit.effect_K[k] - fit.effect_K[3] == pytest.approx(solution[12 + k])
        assert errors_KK[k, 3] == pytest.approx(np.sqrt(covariance[12 + k, 12 + k]))


def test_drift_between_rounds_changes_no_comparison() -> None:
    values_RK = fallen_out()
    drift_R = np.exp(np.linspace(0, -0.4, 12))
    fit, drifted = (fit_rounds(x_RK, spread(x_RK)) for x_RK in (values_RK, values_RK * drift_R[:, None]))
    assert drifted.effect_K == pytest.approx(fit.effect_K)
    assert drifted.noise == pytest.approx(fit.noise)


def test_one_disturbed_probe_is_drawn_in_and_counted() -> None:
    values_RK = np.exp(np.random.default_rng(3).normal(0, 0.02, (20, 4)))
    disturbed_RK = values_RK.copy()
    disturbed_RK[7, 2] *= 0.5
    clean, found = (fit_rounds(x_RK, spread(x_RK)) for x_RK in (values_RK, disturbed_RK))
    assert found.drawn_in == clean.drawn_in + 1
    # As it was, the mean would be off by log(2) / 20 = 0.035 against the others'.
    assert abs(found.effect_K[2] - clean.effect_K[2]) < 0.012
    # And its noise sqrt(3/4 log(2)^2 / 57) = 0.08 larger, 3.6 times.
    assert found.noise < 1.5 * clean.noise


@pytest.mark.parametrize("drift", [0.0, 0.05])
def test_intervals_of_one_candidate_hold_its_value_where_rounds_drift_too(drift: float) -> None:
    """Simulated: 1 % noise within a round; of 95 % intervals 92 % or more hold the truth."""
    rng = np.random.default_rng(4)
    held = []
    for _ in range(400):
        values_RK = np.exp(rng.normal(0, 0.01, (8, 4)) + rng.normal(0, drift, (8, 1)))
        values_RK[4:, 3] = np.nan
        fit = fit_rounds(values_RK, spread(values_RK))
        for k in range(4):
            error, dof = fit.value_error(k)
            held.append(abs(fit.effect_K[k] + fit.level) < stats.t.ppf(0.975, dof) * error)
    assert 0.92 < np.mean(held) < 0.985


def test_what_was_drawn_in_counts_as_far_as_it_was_drawn_and_tells_nothing_of_its_own() -> None:
    """Two candidates, ten rounds: in eight they differ by 2 %, now the one, now the other, and in two by a factor of e.
    By symmetry the effects are 0, and no level moves: a residual of 0.01 each, and 0.5 drawn in to 3.5 deviations."""
    difference_R = np.array([0.02, -0.02] * 4 + [1.0, -1.0])
    values_RK = np.exp(np.stack([difference_R / 2, -difference_R / 2], axis=1))
    fit = fit_rounds(values_RK, spread(values_RK))
    assert fit.effect_K == pytest.approx([0.0, 0.0], abs=1e-12)
    assert (fit.dof, fit.drawn_in) == (20 - 10 - 2 + 1, 4)
    most = 3.5 * 1.4826 * 0.01 * math.sqrt(20 / 9)
    assert fit.noise == pytest.approx(math.sqrt((16 * 0.01**2 + 4 * most**2) / 9) * 20 / 16, rel=1e-5)


@pytest.mark.parametrize(
    ("rounds_R", "level_error"), [([1.0, 1.2], 0.1), ([1.0, 1.2, 1.4], 0.2 / math.sqrt(3)), ([1.0], math.inf)]
)
def test_how_rounds_differ_tells_the_error_of_their_level(rounds_R: list[float], level_error: float) -> None:
    values_RK = np.exp(np.array(rounds_R)[:, None] + np.array([0.1, -0.1]))
    fit = fit_rounds(values_RK, spread(values_RK))
    assert fit.level == pytest.approx(np.mean(rounds_R))
    assert fit.level_error == pytest.approx(level_error)


@pytest.mark.parametrize(
    ("noise", "dof", "level_error", "n_rounds", "error", "degrees"),
    [
        # Satterthwaite: the square of the sum of two variances over the squares of each by its degrees.
        (0.1, 4, 0.2, 6, math.sqrt(0.045), 0.045**2 / (0.005**2 / 4 + 0.04**2 / 5)),
        (0.1, 1, 0.2, 2, math.sqrt(0.045), 0.045**2 / (0.005**2 + 0.04**2)),
        (0.1, 4, 0.0, 6, math.sqrt(0.005), 4.0),
        (0.0, 4, 0.0, 6, 0.0, 4.0),
        (0.0, 7, 0.0, 6, 0.0, 5.0),
        (math.inf, 0, 0.2, 6, math.inf, 0.0),
        (0.1, 4, math.inf, 1, math.inf, 0.0),
    ],
)
def test_the_error_of_a_value_is_of_its_effect_and_of_the_level(
    noise: float, dof: int, level_error: float, n_rounds: int, error: float, degrees: float
) -> None:
    fit = Fit(np.zeros(2), np.array([[0.5, -0.5], [-0.5, 0.5]]), noise, dof, 0, 0.0, level_error, n_rounds)
    assert fit.value_error(0) == pytest.approx((error, degrees))


def test_rounds_that_share_no_candidate_cannot_be_compared() -> None:
    apart_RK = np.array([[1.0, 2.0, np.nan, np.nan], [np.nan, np.nan, 3.0, 4.0]])
    with pytest.raises(ValueError, match="do not connect all candidates"):
        spread(apart_RK)


@pytest.mark.parametrize("alpha", [0.05, 0.025, 0.005])
def test_looking_often_the_bound_errs_no_more_often_than_stated(alpha: float) -> None:
    """Simulated: the mean of n normal values against its bound at each look, until the bound can tell d."""
    indifference = 0.3
    looks = [3]
    while bound(np.array([1 / np.sqrt(looks[-1])]), indifference, alpha, dof=10**9)[0] > indifference:
        looks.append(following_look(looks[-1]))
    half_L = bound(1 / np.sqrt(looks), indifference, alpha, dof=10**9)
    sums = np.random.default_rng(7).standard_normal((20_000, looks[-1])).cumsum(axis=1)
    wrong = float((sums[:, np.array(looks) - 1] / np.array(looks) > half_L).any(axis=1).mean())
    assert 0.3 * alpha < wrong < alpha + 3 * np.sqrt(alpha / 20_000)


@pytest.mark.parametrize("indifference", [1.0, 0.3])
def test_the_bound_of_two_candidates_errs_no_more_often_though_their_noise_is_estimated(indifference: float) -> None:
    """Simulated: differences of two candidates alone, so that n rounds have n - 1 degrees of freedom."""
    alpha, n_sessions = 0.0125, 20_000
    looks = [3]
    while looks[-1] < 140 / indifference:
        looks.append(following_look(looks[-1]))
    values = np.random.default_rng(11).standard_normal((n_sessions, looks[-1]))
    n_L = np.array(looks)
    mean = values.cumsum(axis=1)[:, n_L - 1] / n_L
    squares = (values**2).cumsum(axis=1)[:, n_L - 1] - n_L * mean**2
    error = np.sqrt(squares / (n_L - 1) / n_L)
    half = np.stack([bound(error[:, i], indifference, alpha, int(n) - 1) for i, n in enumerate(n_L)], axis=1)
    is_asked = np.cumsum(half < indifference, axis=1) <= 1  # the race ends once it is told
    wrong = float(((mean > half) & is_asked).any(axis=1).mean())
    assert 0.3 * alpha < wrong < 1.15 * alpha + 3 * np.sqrt(alpha / n_sessions)


def test_speed_and_cost_share_the_risk_of_an_error() -> None:
    """Either may mislead: of both together the stated risk, so of each half of it. One alone has all of it."""
    rng = np.random.default_rng(4)
    speed_RK, cost_RK = np.exp(rng.normal(0, 0.05, (2, 6, 3)))
    compared = compare(speed_RK, cost_RK)
    rules = Rules(objective="energy", confidence=0.9, edge=0.02, indifference=0.02)
    speed, cost = bounds_of(compared, rules)
    alone, _ = bounds_of(compared, replace(rules, objective="latency", confidence=0.95))
    other, _ = bounds_of(compare(cost_RK, None), replace(rules, objective="latency", confidence=0.95))
    assert cost is not None
    for one, by_itself in ((speed, alone), (cost, other)):
        np.testing.assert_allclose(one.low, by_itself.low)
        np.testing.assert_allclose(one.high, by_itself.high)


def test_candidates_far_apart_are_told_apart_at_once_however_large_the_noise() -> None:
    """A busy laptop: one candidate costs 15 times the other, and probes fluctuate by 60 %. ln 15 is 10 standard errors
    of 10 rounds (0.6 sqrt(2 / 10))."""
    rng = np.random.default_rng(2)
    told = 0
    for _ in range(40):
        noise_RK = np.exp(rng.normal(0, 0.6, (10, 2)))
        speed_RK, cost_RK = np.array([15.0, 1.0]) * noise_RK, np.array([1.0, 15.0]) / noise_RK
        found = verdict(compare(speed_RK, cost_RK), Rules())
        told += found.is_over and found.leader == 0
    assert told >= 36


def test_few_readings_widen_the_bound_as_student_has_it() -> None:
    """At a standard error below what tells d the boundary is flat, made as rare as t."""
    wide = bound(np.array([0.001]), 0.02, 0.01, dof=3)[0] / 0.001
    assert stats.t.sf(wide, 3) == pytest.approx(stats.norm.sf(np.sqrt(stats.norm.isf(0.01) ** 2 + 1.2)))


def test_all_bad_rules_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"indifference is 0.*slowdown is 1.*first_rounds is 1.*most_probes is 0"):
        Rules(indifference=0.0, slowdown=1.0, first_rounds=1, most_probes=0)


def exact(columns: list[tuple[float, float]]) -> tuple[Array, Array]:
    """Four rounds without noise of (token/s, J)."""
    table = np.array(columns)
    return np.tile(table[:, 0], (4, 1)), np.tile(table[:, 1], (4, 1))


def test_the_front_holds_what_no_other_beats() -> None:
    """By hand: 2 is slower and costlier than 1; 3 is as fast as 1 and costlier."""
    found = verdict(compare(*exact([(10, 1.0), (20, 2.0), (15, 2.5), (20, 2.2), (30, 4.0)])), Rules("pareto"))
    assert found.is_over
    assert found.front == (0, 1, 4)
    assert found.states[2] == found.states[3] == "beaten"


def test_latency_takes_the_fastest_and_tells_who_is_as_good() -> None:
    speed_RK, _ = exact([(10, 1.0), (20, 2.0), (19.8, 2.5), (19.0, 1.0)])
    found = verdict(compare(speed_RK, None), Rules("latency"))
    assert found.states == ("slower", "chosen", "as good", "slower")


def test_one_on_the_floor_is_told_as_on_the_edge() -> None:
    """At 92 % of the fastest, with noise: an estimate decides, and the verdict says so."""
    rng = np.random.default_rng(5)
    speed_RK = np.array([20.0, 0.923 * 20.0]) * np.exp(rng.normal(0, 0.02, (60, 2)))
    cost_RK = np.array([1.0, 0.5]) * np.exp(rng.normal(0, 0.02, (60, 2)))
    assert verdict(compare(speed_RK, cost_RK), Rules()).on_edge == (1,)


def known_to(effects: list[float], error: float) -> Fit:
    """Of logarithms whose differences all have this standard error."""
    return Fit(np.array(effects), np.eye(len(effects)) / 2, error, 10**9, 0, 0.0, 0.0, 5)


ERROR, TIE = 0.05, float(np.log(1.02))
HALF = float(bound(np.array([ERROR]), TIE, 0.05 / 2, 10**9)[0])
"""Of two candidates in speed and in cost: a difference of so much is certain."""
SURE, NEARLY, UNSURE = 1.1 * HALF, HALF - 0.9 * TIE, 0.5 * HALF
"""NEARLY: what is left open is less than is indifferent."""


@pytest.mark.parametrize(
    ("faster", "costlier", "slowdown", "states"),
    [
        (SURE, SURE, 0.08, ("chosen", "on the front")),
        (SURE, SURE, 0.9, ("on the front", "chosen")),
        (SURE, UNSURE, 0.9, ("undecided", "chosen")),
        (UNSURE, SURE, 0.9, ("undecided", "chosen")),
        (SURE, -SURE, 0.9, ("chosen", "beaten")),
        (SURE, -NEARLY, 0.9, ("chosen", "beaten")),
        (NEARLY, -SURE, 0.9, ("chosen", "beaten")),
        (SURE, -UNSURE, 0.9, ("chosen", "undecided")),
        (UNSURE, -SURE, 0.9, ("chosen", "undecided")),
    ],
)
def test_a_front_is_open_while_one_may_be_beaten_by_the_other(
    faster: float, costlier: float, slowdown: float, states: tuple[str, str]
) -> None:
    """Of two, by hand: the first is faster and costlier by so much."""
    rules = Rules("pareto", slowdown=slowdown)
    found = verdict(Compared(known_to([faster, 0.0], ERROR), known_to([costlier, 0.0], ERROR)), rules)
    assert found.states == states
    assert found.is_over == ("undecided" not in states)
    assert found.still_in == (() if found.is_over else (0, 1))


@pytest.mark.parametrize(
    ("behind", "state"), [(SURE, "slower"), (NEARLY, "slower"), (UNSURE, "undecided"), (0.0, "undecided")]
)
def test_the_fastest_is_sought_until_no_other_may_be_faster(behind: float, state: str) -> None:
    """Its bound is that of one comparison for each candidate."""
    behind += float(bound(np.array([ERROR]), TIE, 0.05, 10**9)[0]) - HALF
    found = verdict(Compared(known_to([0.0, -max(behind, 0.0)], ERROR), None), Rules("latency"))
    assert found.states == ("chosen", state)
    assert found.is_over == (state == "slower")
    assert found.still_in == (() if found.is_over else (0, 1))


@pytest.mark.parametrize(
    ("costlier", "state"), [(SURE, "costlier"), (NEARLY, "costlier"), (UNSURE, "undecided"), (0.0, "undecided")]
)
def test_the_cheapest_is_sought_until_no_other_may_be_cheaper_by_more_than_is_indifferent(
    costlier: float, state: str
) -> None:
    """As fast as each other, for certain."""
    found = verdict(Compared(known_to([0.0, 0.0], 1e-4), known_to([0.0, costlier], ERROR)), Rules())
    assert found.states == ("chosen", state)
    assert found.is_over == (state != "undecided")


def test_energy_without_a_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="the objective is energy, and no probe has a cost"):
        verdict(compare(exact([(1, 1), (2, 2)])[0], None), Rules())
