"""Paired comparisons: published examples, brute force over all sign flips, coverage, and what is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.compare import (
    MCNEMAR,
    MCNEMAR_CLUSTERED,
    PAIRED_T,
    PAIRED_T_BOOTSTRAP,
    PAIRED_T_OF_LOGARITHMS,
    PAIRED_T_SERIES,
    UnlikeError,
    clustered_mcnemar,
    compare_exponentials,
    compare_scores,
    compare_trials,
    mcnemar,
    mean_difference,
    sample_logarithms,
    sample_of,
    sample_scores,
)
from results.ratios import ratio_of_shares
from results.records import Score
from results.trials import Trial
from tests.run_builders import completion, reading, trial


def scores(*repeats: str) -> dict[str, tuple[float, ...]]:
    """One sample a digit."""
    return {f"s{i}": tuple(map(float, values)) for i, values in enumerate(zip(*repeats, strict=True))}


def test_the_published_example_of_paired_proportions() -> None:
    """Fagerland, Lydersen & Laake 2014, table I: 21 children, 7 changed one way and 1 the other; exact p 0.0703.

    Interval by hand: (2 - 8) / 23 -+ 1.96 sqrt((10 - 36 / 23) / 23 / 23).
    """
    found = mcnemar(n10=7, n01=1, n=21)
    assert found.p == pytest.approx(9 * 2 / 2**8)
    assert found.mean == pytest.approx(-6 / 21)
    assert (found.low, found.high) == pytest.approx((-0.5084, -0.0134), abs=1e-4)
    assert (found.test, found.n, found.n_changed) == (MCNEMAR, 21, 8)
    assert not found.is_clear, "the interval leaves out 0, the exact test does not agree"


@given(st.integers(0, 6), st.integers(0, 6))
def test_mcnemar_is_the_share_of_sign_flips_that_are_as_lopsided(n10: int, n01: int) -> None:
    flips = [sum(flip) for flip in itertools.product((-1, 1), repeat=n10 + n01)]
    as_lopsided = sum(abs(total) >= abs(n01 - n10) for total in flips) / len(flips)
    assert mcnemar(n10, n01, 20).p == pytest.approx(as_lopsided)


@pytest.mark.parametrize("shares", [(0.02, 0.0), (0.1, 0.05), (0.3, 0.3)])
def test_the_interval_of_proportions_covers_the_truth_in_95_of_100_runs(shares: tuple[float, float]) -> None:
    rng, n, n_runs = np.random.default_rng(7), 60, 600
    lost, won = shares
    counts = rng.multinomial(n, [lost, won, 1 - lost - won], size=n_runs)
    covered = 0
    for n10, n01, _ in counts.tolist():
        found = mcnemar(n10, n01, n)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= won - lost <= found.high
    assert covered / n_runs >= 0.94


def test_no_share_of_samples_is_above_all_of_them() -> None:
    """3 of 3 became right: 0.6 + 1.96 sqrt((1 - 0.36) / 5) = 1.30 by the formula."""
    won, lost = mcnemar(0, 3, 3), mcnemar(3, 0, 3)
    assert (won.mean, won.high, lost.mean, lost.low) == (1.0, 1.0, -1.0, -1.0)
    assert (won.low, lost.high) == (pytest.approx(-0.1012, abs=1e-4), pytest.approx(0.1012, abs=1e-4))


def test_no_changed_sample_is_no_proof_of_equality() -> None:
    found = mcnemar(0, 0, 20)
    assert (found.mean, found.p) == (0.0, 1.0)
    assert found.low is not None
    assert found.low < -0.05
    assert not found.is_clear


def test_scores_are_joined_by_sample_whatever_their_order() -> None:
    reference, arm = scores("110100"), scores("100101")
    shuffled = dict(reversed(arm.items()))
    assert compare_scores(reference, shuffled, is_binary=True) == mcnemar(n10=1, n01=1, n=6)


def test_unlike_samples_are_refused_in_a_sentence() -> None:
    with pytest.raises(UnlikeError, match=r"not the same samples: 1 of 3 only in the first, 0 of 2 .* \(such as s2\)"):
        compare_scores(scores("101"), scores("10"), is_binary=True)
    with pytest.raises(UnlikeError, match="no sample has a score of its own"):
        compare_scores({}, {}, is_binary=True)


def test_divergences_that_are_all_zero_are_no_answers() -> None:
    """Two arms of KL 0: nothing changed, and no share of right answers has an interval here."""
    found = compare_scores(scores("0000"), scores("0000"), is_binary=False)
    assert (found.mean, found.low, found.high, found.test) == (0.0, 0.0, 0.0, PAIRED_T)


def test_other_scores_have_the_paired_t_test_of_scipy() -> None:
    from scipy import stats

    rng = np.random.default_rng(3)
    before, after = rng.normal(2.0, 1.0, 12), rng.normal(2.4, 1.0, 12)
    expected = stats.ttest_rel(after, before)
    interval = expected.confidence_interval()
    found = compare_scores(
        {f"s{i}": (float(v) - 1, float(v) + 1) for i, v in enumerate(before)},
        {f"s{i}": (float(v), float(v)) for i, v in enumerate(after)},
        is_binary=False,
    )
    assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, interval.low, interval.high))
    assert found.test == PAIRED_T


def test_perplexities_differ_by_their_geometric_means_and_the_delta_method_says_how_surely() -> None:
    """d exp(mean of logs) = exp(mean) d mean, of both arms at once; p is that of the logarithms, by scipy."""
    from scipy import stats

    rng, n = np.random.default_rng(4), 15
    before = np.exp(rng.normal(2.0, 0.3, n))
    after = before * np.exp(rng.normal(0.05, 0.04, n))
    found = compare_exponentials(
        {f"s{i}": (float(v),) for i, v in enumerate(np.log(before))},
        {f"s{i}": (float(v),) for i, v in enumerate(np.log(after))},
    )
    change = stats.gmean(after) - stats.gmean(before)
    moved = stats.gmean(after) * np.log(after) - stats.gmean(before) * np.log(before)
    half = stats.t.ppf(0.975, n - 1) * moved.std(ddof=1) / np.sqrt(n)
    assert (found.mean, found.low, found.high) == pytest.approx((change, change - half, change + half))
    assert found.p == pytest.approx(stats.ttest_rel(np.log(after), np.log(before)).pvalue)
    assert (found.test, found.n) == (PAIRED_T_OF_LOGARITHMS, n)


def test_perplexities_of_one_text_have_a_difference_and_no_interval() -> None:
    found = compare_exponentials({"s0": (np.log(8.0),)}, {"s0": (np.log(10.0),)})
    assert (found.mean, found.low, found.high, found.p) == (pytest.approx(2.0), None, None, None)
    assert "no interval from one pair" in str(found.reason)


def test_from_twenty_pairs_on_the_interval_is_the_bootstrap() -> None:
    x = np.random.default_rng(5).exponential(1.0, 40) - 0.2
    found = mean_difference(x.tolist())
    assert found.test == PAIRED_T_BOOTSTRAP
    assert found.low is not None
    assert found.high is not None
    assert found.low < x.mean() < found.high
    assert x.mean() - found.low < found.high - x.mean(), "as the values lean"


def test_from_200_pairs_on_no_bootstrap_is_named() -> None:
    """The interval is mean + g s (1 + 2 t^2) / 6n -+ t s / sqrt(n), with g the skewness (decision 4)."""
    from scipy import stats

    x = np.random.default_rng(3).exponential(size=200)
    found = mean_difference(x.tolist())
    n, t, s = 200, float(stats.t.ppf(0.975, 199)), float(x.std(ddof=1))
    shift = float(np.mean(((x - x.mean()) / s) ** 3)) * s * (1 + 2 * t * t) / (6 * n)
    expected = x.mean() + shift - t * s / np.sqrt(n), x.mean() + shift + t * s / np.sqrt(n)
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.test == PAIRED_T_SERIES


@pytest.mark.parametrize(
    ("differences", "reason"),
    [([1.5], "n = 1"), ([0.5, 0.5, 0.5], "all 3 pairs differ alike"), ([1.0, float("inf")], "infinite")],
)
def test_where_there_is_no_interval_a_reason_stands(differences: list[float], reason: str) -> None:
    found = mean_difference(differences)
    assert (found.low, found.p) == (None, None)
    assert reason in (found.reason or "")
    assert not found.is_clear


def scored(repeat: int, **values: float) -> Trial:
    return trial(repeat=repeat, scores=tuple(Score(metric="acc", value=v, sample_id=s) for s, v in values.items()))


def test_a_sample_keeps_its_score_of_each_repeat() -> None:
    found = sample_scores([scored(0, a=1.0, b=0.0), scored(1, a=0.0, b=0.0)], "acc")
    assert found == {"a": (1.0, 0.0), "b": (0.0, 0.0)}
    with pytest.raises(UnlikeError, match="repeats of one arm: not the same samples"):
        sample_scores([scored(0, a=1.0), scored(1, b=1.0)], "acc")


# --- answers that vary between repeats -------------------------------------------------------------------------------


def test_repeats_that_answer_alike_are_no_more_evidence_than_one() -> None:
    before, after = "1" * 15 + "0" * 5, "1" * 11 + "0" * 8 + "1"
    once = compare_scores(scores(before), scores(after), is_binary=True)
    assert compare_scores(scores(*[before] * 5), scores(*[after] * 5), is_binary=True) == once
    # The same where one sample varies and changes nothing between the arms: all of the rest counts as it did.
    varied = [before + "1", before + "0"], [after + "1", after + "0"]
    found = compare_scores(scores(*varied[0]), scores(*varied[1]), is_binary=True)
    assert found.p == pytest.approx(once.p)
    assert (found.test, found.n_changed) == (MCNEMAR_CLUSTERED, 5)


@given(st.lists(st.tuples(*[st.sampled_from((-1, 0, 1))] * 3), min_size=1, max_size=9))
def test_p_of_varying_answers_is_the_share_of_swaps_of_arms_within_samples(changes: list[tuple[int, int, int]]) -> None:
    found = clustered_mcnemar(np.array(changes))
    sums = [sum(own) for own in changes]
    swaps = [
        sum(s * d for s, d in zip(signs, sums, strict=True)) for signs in itertools.product((-1, 1), repeat=len(sums))
    ]
    assert found.p == pytest.approx(sum(abs(swap) >= abs(sum(sums)) for swap in swaps) / len(swaps))


@pytest.mark.parametrize("n_times", [2, 3])
def test_an_item_that_several_workloads_ask_is_one(n_times: int) -> None:
    """A sweep of a limit that no answer reaches asks the same again: 7 lost and 1 won are no 21 and 3."""
    before, after = scores("1" * 20 + "0" * 5), scores("0" * 7 + "1" * 13 + "1" + "0" * 4)
    several = [
        {sample_of(f"w{i}", s): own for i in range(n_times) for s, own in one.items()} for one in (before, after)
    ]
    once, found = mcnemar(n10=7, n01=1, n=25), compare_scores(*several, is_binary=True)
    assert found.p == pytest.approx(9 * 2 / 2**8)
    assert (found.mean, found.low, found.high) == pytest.approx((once.mean, once.low, once.high))
    ratios = ratio_of_shares(several[1], several[0]), ratio_of_shares(after, before)
    assert (ratios[0].value, ratios[0].low, ratios[0].high) == pytest.approx(
        (ratios[1].value, ratios[1].low, ratios[1].high)
    )
    unchanged = compare_scores(several[0], several[0], is_binary=True)
    assert (unchanged.low, unchanged.high) == pytest.approx((mcnemar(0, 0, 25).low, mcnemar(0, 0, 25).high))


def test_two_arms_alike_are_told_apart_over_items_that_one_workload_asks_more_of_in_5_of_100_runs_at_most() -> None:
    """The second workload asks a half of the items again, and three in four answers are those of the first."""
    rng, n, n_runs = np.random.default_rng(13), 60, 500
    items = [*map(str, range(n)), *map(str, range(n // 2))]
    n_false = 0
    for _ in range(n_runs):
        before, after = (rng.random(n) < 0.7 for _ in range(2))
        kept, *others = (rng.random(n // 2) < share for share in (0.75, 0.7, 0.7))
        again = [np.where(kept, own[: n // 2], other) for own, other in zip((before, after), others, strict=True)]
        changes = np.r_[after, again[1]].astype(np.int64) - np.r_[before, again[0]]
        found = clustered_mcnemar(changes[:, None], items)
        assert found.p is not None
        n_false += found.p < 0.05
    assert n_false / n_runs <= 0.08, "three standard errors of 500 draws at 0.05 are 0.03"


SHARES_RIGHT = {
    "the same for all": lambda rng, n: np.full(n, 0.95),
    "most sure, some not": lambda rng, n: rng.beta(0.5, 0.3, n),
    "half of them sure": lambda rng, n: np.where(rng.random(n) < 0.5, 1.0, rng.random(n)),
}


@pytest.mark.parametrize("n_repeats", [2, 5])
@pytest.mark.parametrize("kind", SHARES_RIGHT)
def test_two_arms_alike_that_vary_are_told_apart_in_5_of_100_runs_at_most(kind: str, n_repeats: int) -> None:
    """Each sample is right with a chance of its own, the same for both arms; samples are drawn anew for each run."""
    rng, n, n_runs = np.random.default_rng(11), 40, 500
    n_false = n_covered = 0
    for _ in range(n_runs):
        chance = SHARES_RIGHT[kind](rng, n)[:, None]
        before, after = (rng.random((n, n_repeats)) < chance for _ in range(2))
        found = clustered_mcnemar(after.astype(np.int64) - before)
        assert found.p is not None
        assert found.low is not None
        assert found.high is not None
        n_false += found.p < 0.05
        n_covered += found.low <= 0 <= found.high
    # Three standard errors of 500 draws at 0.05 are 0.03.
    assert n_false / n_runs <= 0.08
    assert n_covered / n_runs >= 0.92


def test_the_interval_of_varying_answers_covers_a_true_loss() -> None:
    """A tenth of the samples loses half of its chance: -0.05 by all samples there are."""
    rng, n, n_repeats, n_runs = np.random.default_rng(12), 60, 3, 500
    covered = 0
    for _ in range(n_runs):
        chance = np.where(rng.random(n) < 0.1, 0.5, 1.0)[:, None]
        after = rng.random((n, n_repeats)) < chance
        found = clustered_mcnemar(after.astype(np.int64) - 1)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= -0.05 <= found.high
    assert covered / n_runs >= 0.93


def test_an_arm_with_fewer_repeats_is_compared_over_those_that_both_have() -> None:
    found = compare_scores(scores("11", "11", "00"), scores("11", "10"), is_binary=True)
    assert (found.n_answers, found.n_answers_changed, found.mean) == (4, 1, -0.25)
    assert found.reason == "over the first 2 repeats of both arms"


# --- repeats ---------------------------------------------------------------------------------------------------------


def lasting(cell_id: str, repeat: int, e2e_s: float, sample: str = "s") -> Trial:
    done = completion(sample, 0.0, 4, (e2e_s / 2, e2e_s))
    return trial(cell_id, repeat, completions=[done], energy=(reading("all", 3.0 * e2e_s),))


def test_repeats_are_paired_so_that_a_drift_common_to_both_arms_cancels() -> None:
    """Both arms slow down by 1 s a repeat; the second is 0.1 s slower, give or take 0.01 s."""
    reference = [lasting("a", i, 1.0 + i) for i in range(4)]
    arm = [lasting("b", i, 1.1 + i + 0.01 * (-1) ** i) for i in range(4)]
    found = compare_trials(reference, arm, "e2e", "all")
    assert found.mean == pytest.approx(0.1)
    # d = 0.11, 0.09, 0.11, 0.09: s = 0.02 / sqrt(3), t_{0.975,3} = 3.182446.
    assert found.low == pytest.approx(0.1 - 3.182446 * 0.02 / np.sqrt(3) / 2)
    assert found.is_clear
    joules = compare_trials(reference, arm, "energy", "all", "nvml")
    assert joules.mean == pytest.approx(0.3)


def test_only_repeats_that_both_arms_have_are_paired() -> None:
    reference, arm = [lasting("a", i, 1.0) for i in (0, 2, 3)], [lasting("b", i, 1.0 + 0.1 * i) for i in (1, 2, 3)]
    found = compare_trials(reference, arm, "e2e", "all")
    assert (found.n, found.mean) == (2, pytest.approx(0.25))


def test_arms_that_were_asked_other_requests_are_not_paired() -> None:
    with pytest.raises(UnlikeError, match="not asked the same requests"):
        compare_trials([lasting("a", 0, 1.0)], [lasting("b", 0, 1.0, sample="t")], "e2e", "all")
    with pytest.raises(UnlikeError, match="no repeat has tpot of both"):
        compare_trials([lasting("a", 0, 1.0)], [lasting("b", 1, 1.0)], "tpot", "decode")


@pytest.mark.parametrize(
    ("metric", "whole", "are_there"),
    [("perplexity", 20.0, True), ("perplexity", 20.001, False), ("accuracy", 20.0, False)],
)
def test_samples_stand_for_a_perplexity_only_where_it_is_that_of_their_mean(
    metric: str, whole: float, are_there: bool
) -> None:
    """Of texts of different lengths it is not: each token counts there, and here each text."""
    logarithms = {"a": math.log(10.0), "b": math.log(40.0)}
    own = tuple(
        Score(metric="nll_nats", value=v, n=1, higher_is_better=False, sample_id=s) for s, v in logarithms.items()
    )
    assert sample_logarithms([trial(scores=own)], metric, whole) == (
        {s: (v,) for s, v in logarithms.items()} if are_there else {}
    )
