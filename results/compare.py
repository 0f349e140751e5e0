"""Two arms over the same samples, or the same repeats: the difference of each pair, and what it proves.

Of 0/1 scores only the discordant pairs tell: n10 answers that the reference alone got right, n01 the arm alone. An
answer is one sample in one repeat; N = n samples x R repeats of them. Answers to one sample are not independent of each
other, so the sample is the cluster (d_s: n01 - n10 within sample s).

    difference    (n01 - n10) / N: a sample that is right in 4 of 5 repeats lost a fifth of itself
    p             exact: of all ways to swap the two arms within samples (each sign of d_s as likely as the other), the
                  share that is as lopsided. Where repeats answer alike this is McNemar's exact test over n samples
                  (McNemar 1947): n01 is binomial(n01 + n10, 1/2) where neither arm is better
    interval      of Bonett and Price 2012, eq. 9: one answer is added to each discordant count, so that no discordant
                  pair at all does not claim certainty; it holds its level from few samples on (Fagerland et al. 2014).
                  All counts are first divided by the design effect, sum d_s^2 / (n01 + n10), from 1 (answers to a
                  sample vary freely) to R (they are all alike, and the interval is that of n samples)

Over several workloads an item may be asked more than once, as in a sweep of `max_new_tokens`: its answers are mostly
alike, and it is the cluster then.

A perplexity is e to the mean of its samples' nll_nats (P of the arm, P0 of the reference, l_s and l0_s of a sample).
The difference P - P0 has the interval of the mean of P l_s - P0 l0_s (the delta method), and p of the paired t test of
nll_nats.

Other values have the mean of their differences with its interval (`results.statistics.mean_interval`: Student's t, from
20 pairs on BCa bootstrap, from 200 its closed form), and p of the paired t test.

All intervals are two-sided at 95 %, uncorrected for how many arms are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from results.metrics import energy_observations, latency_observations, load_observations
from results.records import Phase
from results.sittings import APART, pairs_that_count, sittings_of
from results.statistics import BOOTSTRAP_FROM, CONFIDENCE, NORMAL_95, SERIES_FROM, mean_interval
from results.trials import Trial

MCNEMAR = "McNemar, exact"
MCNEMAR_CLUSTERED = "McNemar, exact, clustered by sample"
PAIRED_T = "paired t"
PAIRED_T_BOOTSTRAP = "paired t, interval BCa bootstrap"
PAIRED_T_SERIES = "paired t, interval corrected for skewness"


SAME = 1e-12
"""Relative spread of differences that is rounding, and no scatter to judge by."""


class UnlikeError(Exception):
    """Two arms that were not asked the same: what differs, in a sentence for readers."""


@dataclass(frozen=True)
class Difference:
    """Mean of (arm - reference) over n pairs. Without an interval `reason` says why.

    n_changed: pairs that differ at all. n_answers: of 0/1 scores that vary between repeats, samples x repeats that were
    compared, and n_answers_changed how many of them differ; None where a sample is one answer.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    test: str | None
    n_changed: int
    reason: str | None = None
    n_answers: int | None = None
    n_answers_changed: int | None = None
    base: float | None = None
    """Of costs: the reference's mean over the pairs, which some of its repeats may not be in."""

    @property
    def is_clear(self) -> bool:
        """Whether interval and test both leave out 0: with few discordant pairs the exact test is the stricter."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return False
        return self.p is None or self.p < 1 - CONFIDENCE


LOGARITHMS = {"perplexity": "nll_nats"}
"""A score that no sample has alone, by what samples have: e to the mean of it."""
PAIRED_T_OF_LOGARITHMS = "paired t of nll_nats"

SampleScores = Mapping[str, Sequence[float]]
"""By sample id: its score in each repeat, in their order. Of several workloads: `sample_of` them."""
_OF_WORKLOAD = "\0"
SAME_ITEMS = {"gsm8k_cot": "gsm8k", "gsm8k_cot_zeroshot": "gsm8k"}
"""Tasks that ask the items of another one in other words: by the name before a sample's number."""


def sample_of(workload: str, sample_id: str) -> str:
    """The id of a workload's sample among those of several."""
    return f"{workload}{_OF_WORKLOAD}{sample_id}"


def items_of(samples: Sequence[str]) -> list[str]:
    """What each sample asks: several workloads may ask the same."""
    asked = [sample.rpartition(_OF_WORKLOAD)[2].partition("/") for sample in samples]
    return [f"{SAME_ITEMS.get(task, task)}{slash}{number}" for task, slash, number in asked]


def compare_scores(reference: SampleScores, arm: SampleScores, is_binary: bool) -> Difference:
    """is_binary: each score is right or wrong. Raises `UnlikeError` where samples are not the same."""
    if reference.keys() != arm.keys():
        raise UnlikeError(_unlike(reference.keys(), arm.keys(), "sample"))
    if not reference:
        raise UnlikeError("no sample has a score of its own, so nothing can be paired")
    samples = sorted(reference)
    if is_binary:
        return _compare_answers([reference[s] for s in samples], [arm[s] for s in samples], items_of(samples))
    return mean_difference([_mean(arm[s]) - _mean(reference[s]) for s in samples])


def compare_exponentials(reference: SampleScores, arm: SampleScores) -> Difference:
    """Of e to the means of two arms' logarithms, by sample. Raises `UnlikeError` where samples are not the same."""
    logarithms = compare_scores(reference, arm, is_binary=False)
    before, after = math.exp(mean_score(reference)), math.exp(mean_score(arm))
    influences = [after * _mean(arm[s]) - before * _mean(reference[s]) for s in sorted(reference)]
    found, change = mean_difference(influences), after - before
    if found.low is None or found.high is None:
        return replace(found, mean=change)
    low, high = (change + end - found.mean for end in (found.low, found.high))
    return replace(found, mean=change, low=low, high=high, p=logarithms.p, test=PAIRED_T_OF_LOGARITHMS)


def _compare_answers(
    reference: Sequence[Sequence[float]], arm: Sequence[Sequence[float]], items: Sequence[str]
) -> Difference:
    """Right or wrong, by sample and repeat. Swapping arms within a sample is fair only where both answered as often."""
    if len(set(items)) == len(items) and not any(len(set(own)) > 1 for own in (*reference, *arm)):
        pairs = [(before[0], after[0]) for before, after in zip(reference, arm, strict=True)]
        return mcnemar(sum(before > after for before, after in pairs), sum(a > b for b, a in pairs), len(pairs))
    n_repeats = min(len(own) for own in (*reference, *arm))
    before, after = (np.asarray([own[:n_repeats] for own in scores], dtype=np.int64) for scores in (reference, arm))
    found = clustered_mcnemar(after - before, items)
    if any(len(own) > n_repeats for own in (*reference, *arm)):
        return replace(found, reason=f"over the first {n_repeats} repeats of both arms")
    return found


def mcnemar(n10: int, n01: int, n: int) -> Difference:
    """n10: right with the reference only; n01: right with the arm only; n: all samples."""
    from scipy import special

    # The mean of a binomial(n, 1/2) lies in its middle: one side twice is both sides.
    p = min(1.0, 2 * float(special.bdtr(min(n10, n01), n10 + n01, 0.5)))
    low, high = _bonett_price(n10, n01, n)
    return Difference(n, (n01 - n10) / n, low, high, p, MCNEMAR, n10 + n01)


def clustered_mcnemar(changes: NDArray[np.int64], items: Sequence[str] | None = None) -> Difference:
    """changes: samples x repeats, each 1 (right with the arm only), -1 (with the reference only) or 0. items: what each
    sample asks; None: each another one."""
    n, n_repeats = changes.shape
    n01, n10 = int((changes > 0).sum()), int((changes < 0).sum())
    effect = design_effect(changes, items)
    low, high = _bonett_price(*(count / effect for count in (n10, n01, n * n_repeats)))
    return Difference(
        n=n,
        mean=(n01 - n10) / (n * n_repeats),
        low=low,
        high=high,
        p=_share_of_sign_flips(_by_item(changes, items)),
        test=MCNEMAR_CLUSTERED,
        n_changed=int((changes != 0).any(axis=1).sum()),
        n_answers=n * n_repeats,
        n_answers_changed=n01 + n10,
    )


def design_effect(changes: NDArray[np.int64], items: Sequence[str] | None = None) -> float:
    """How many answers to one item count as one: from 1 to how many there are, whose mean stands where none changed."""
    n_changed, by_item = int((changes != 0).sum()), _by_item(changes, items)
    if not n_changed:
        return changes.size / len(by_item)
    return max(float((by_item**2).sum()) / n_changed, 1.0)


def _by_item(changes: NDArray[np.int64], items: Sequence[str] | None) -> NDArray[np.int64]:
    """The sum of its answers' changes."""
    by_sample: NDArray[np.int64] = changes.sum(axis=1)
    if items is None:
        return by_sample
    places = np.unique(np.asarray(items), return_inverse=True)[1]
    found = np.zeros(len(set(items)), dtype=np.int64)
    np.add.at(found, places, by_sample)
    return found


def _bonett_price(n10: float, n01: float, n: float) -> tuple[float, float]:
    share10, share01 = (n10 + 1) / (n + 2), (n01 + 1) / (n + 2)
    middle = share01 - share10
    half = NORMAL_95 * math.sqrt((share10 + share01 - middle**2) / (n + 2))
    return max(-1.0, middle - half), min(1.0, middle + half)


def _share_of_sign_flips(by_item: NDArray[np.int64]) -> float:
    """Of all choices of signs of the items' differences, the share whose sum is at least as far from 0.

    m items that differ by size k add k (2 binomial(m, 1/2) - m); the sum over the sizes is their convolution.
    """
    sizes, counts = np.unique(np.abs(by_item[by_item != 0]), return_counts=True)
    total = int((sizes * counts).sum())
    sums = np.zeros(2 * total + 1)
    sums[total] = 1.0
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        before, sums = sums, np.zeros_like(sums)
        for n_up, share in enumerate(_fair_binomial(count).tolist()):
            step = size * (2 * n_up - count)
            if share > 0:
                sums[max(step, 0) : len(sums) + min(step, 0)] += (
                    share * before[max(-step, 0) : len(before) - max(step, 0)]
                )
    is_as_far = np.abs(np.arange(-total, total + 1)) >= abs(int(by_item.sum()))
    return min(1.0, float(sums[is_as_far].sum()))


def _fair_binomial(n: int) -> NDArray[np.float64]:
    """Probabilities of 0..n of n with 1/2 each."""
    from scipy.special import gammaln

    k = np.arange(n + 1)
    logarithms: NDArray[np.float64] = gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1) - n * math.log(2)
    return np.exp(logarithms)


def mean_difference(differences: Sequence[float]) -> Difference:
    """Of one difference a pair. Values that all differ alike leave no scatter to judge them by."""
    from scipy.special import stdtr

    x = np.asarray(differences, dtype=np.float64)
    n, mean, n_changed = len(x), float(x.mean()), int(np.count_nonzero(x))
    if not np.isfinite(x).all():
        return Difference(n, mean, None, None, None, None, n_changed, "a value is infinite or no number")
    if n < 2:
        return Difference(n, mean, None, None, None, None, n_changed, "n = 1: no interval from one pair")
    if n_changed == 0:
        return Difference(n, 0.0, 0.0, 0.0, 1.0, PAIRED_T, 0)
    if float(np.ptp(x)) <= SAME * float(np.abs(x).max()):
        reason = f"all {n} pairs differ alike: no scatter to judge by"
        return Difference(n, mean, None, None, None, None, n_changed, reason)
    low, high = mean_interval(x)
    test = PAIRED_T if n < BOOTSTRAP_FROM else PAIRED_T_BOOTSTRAP if n < SERIES_FROM else PAIRED_T_SERIES
    t = mean / (float(x.std(ddof=1)) / math.sqrt(n))
    return Difference(n, mean, low, high, 2 * float(stdtr(n - 1, -abs(t))), test, n_changed)


# --- what is paired --------------------------------------------------------------------------------------------------


def sample_scores(trials: Sequence[Trial], metric: str) -> dict[str, tuple[float, ...]]:
    """Scores of each sample, one a trial. Raises `UnlikeError` where trials scored different samples."""
    found: list[dict[str, float]] = []
    for trial in trials:
        own = {s.sample_id: s.value for s in trial.scores if s.metric == metric and s.sample_id is not None}
        if found and own.keys() != found[0].keys():
            raise UnlikeError(f"repeats of one arm: {_unlike(found[0].keys(), own.keys(), 'sample')}")
        found.append(own)
    return {s: tuple(own[s] for own in found) for s in found[0]} if found else {}


def sample_logarithms(trials: Sequence[Trial], metric: str, whole: float) -> dict[str, tuple[float, ...]]:
    """Of a score that is e to the mean of its samples' logarithms, those; else empty. Raises `UnlikeError`."""
    found = sample_scores(trials, LOGARITHMS[metric]) if metric in LOGARITHMS else {}
    return found if found and math.isclose(math.exp(mean_score(found)), whole, rel_tol=1e-6) else {}


def mean_score(scores: SampleScores) -> float:
    """Over all samples and repeats."""
    return math.fsum(map(_mean, scores.values())) / len(scores)


def compare_trials(
    reference: Sequence[Trial], arm: Sequence[Trial], metric: str, phase: Phase, meter: str | None = None
) -> Difference:
    """A latency or energy metric of repeat i against repeat i: what drifts in a run drifts for both.

    Both must have asked the same requests; the rest of their scatter is between repeats. Raises `UnlikeError`.
    """
    before, after = _by_repeat(reference, metric, phase, meter), _by_repeat(arm, metric, phase, meter)
    repeats = sorted(before.keys() & after.keys())
    if not repeats:
        raise UnlikeError(f"no repeat has {metric} of both arms")
    asked = {frozenset(c.request_id for c in t.completions) for t in (*reference, *arm)}
    hashes = {t.requests_sha256 for t in (*reference, *arm)}
    if len(asked) > 1 or len(hashes) > 1:
        raise UnlikeError("the arms were not asked the same requests")
    (counted,) = pairs_that_count([repeats], *([_sittings(trials)] for trials in (reference, arm)))
    has_pairs = bool(counted)
    counted = counted or repeats
    found = mean_difference([after[i] - before[i] for i in counted])
    if not has_pairs:
        found = replace(found, low=None, high=None, p=None, test=None, reason=APART)
    return replace(found, base=_mean([before[i] for i in counted]))


def _sittings(trials: Sequence[Trial]) -> Mapping[int, int]:
    """Of one cell."""
    return next(iter(sittings_of(trials).values()), {})


def _by_repeat(trials: Sequence[Trial], metric: str, phase: Phase, meter: str | None) -> dict[int, float]:
    reads = (latency_observations, load_observations) if meter is None else (energy_observations,)
    return {
        trial.repeat: o.value
        for trial in trials
        for read in reads
        for o in read(trial)
        if (o.metric, o.phase, o.meter) == (metric, phase, meter) and o.value is not None
    }


def _unlike(reference: Collection[str], arm: Collection[str], what: str) -> str:
    only, other = sorted(set(reference) - set(arm)), sorted(set(arm) - set(reference))
    examples = ", ".join([*only[:1], *other[:1]])
    return (
        f"not the same {what}s: {len(only)} of {len(reference)} only in the first, {len(other)} of {len(arm)} only in"
        f" the second (such as {examples}); ask all arms the same"
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
