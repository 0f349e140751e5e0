"""Two arms over the same samples, or the same repeats: the difference of each pair, and what it proves.

Of 0/1 scores only the discordant pairs tell: n10 samples that the reference alone got right, n01 the arm alone.

    difference    (n01 - n10) / n
    p             McNemar's exact test: n01 is binomial(n01 + n10, 1/2) where neither arm is better (McNemar 1947)
    interval      of Bonett and Price 2012, eq. 9: one sample is added to each discordant count, so that no discordant
                  pair at all does not claim certainty; it holds its level from few samples on (Fagerland et al. 2014)

Other values have the mean of their differences with its interval (`results.statistics.mean_interval`: Student's t, from
20 pairs on BCa bootstrap), and p of the paired t test.

All intervals are two-sided at 95 %, uncorrected for how many arms are compared.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from results.metrics import energy_observations, latency_observations
from results.records import Phase, Trial
from results.statistics import BOOTSTRAP_FROM, CONFIDENCE, NORMAL_95, mean_interval

MCNEMAR = "McNemar, exact"
PAIRED_T = "paired t"
PAIRED_T_BOOTSTRAP = "paired t, interval BCa bootstrap"


SAME = 1e-12
"""Relative spread of differences that is rounding, and no scatter to judge by."""


class UnlikeError(Exception):
    """Two arms that were not asked the same: what differs, in a sentence for readers."""


@dataclass(frozen=True)
class Difference:
    """Mean of (arm - reference) over n pairs. Without an interval `reason` says why.

    n_changed: pairs that differ at all.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    test: str | None
    n_changed: int
    reason: str | None = None

    @property
    def is_clear(self) -> bool:
        """Whether interval and test both leave out 0: with few discordant pairs the exact test is the stricter."""
        if self.low is None or self.high is None or self.low <= 0.0 <= self.high:
            return False
        return self.p is None or self.p < 1 - CONFIDENCE


def compare_scores(reference: Mapping[str, float], arm: Mapping[str, float], is_zero_one: bool) -> Difference:
    """Scores by sample id; is_zero_one: each is right or wrong. Raises `UnlikeError` where samples are not the same."""
    if reference.keys() != arm.keys():
        raise UnlikeError(_unlike(reference.keys(), arm.keys(), "sample"))
    if not reference:
        raise UnlikeError("no sample has a score of its own, so nothing can be paired")
    samples = sorted(reference)
    pairs = [(reference[s], arm[s]) for s in samples]
    if is_zero_one:
        n10 = sum(before > after for before, after in pairs)
        n01 = sum(before < after for before, after in pairs)
        return mcnemar(n10, n01, len(pairs))
    return mean_difference([after - before for before, after in pairs])


def mcnemar(n10: int, n01: int, n: int) -> Difference:
    """n10: right with the reference only; n01: right with the arm only; n: all samples."""
    from scipy import stats

    p = 1.0 if n10 + n01 == 0 else float(stats.binomtest(n01, n10 + n01, 0.5).pvalue)
    share10, share01 = (n10 + 1) / (n + 2), (n01 + 1) / (n + 2)
    middle = share01 - share10
    half = NORMAL_95 * math.sqrt((share10 + share01 - middle**2) / (n + 2))
    low, high = max(-1.0, middle - half), min(1.0, middle + half)
    return Difference(n, (n01 - n10) / n, low, high, p, MCNEMAR, n10 + n01)


def mean_difference(differences: Sequence[float]) -> Difference:
    """Of one difference a pair. Values that all differ alike leave no scatter to judge them by."""
    from scipy import stats

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
    test = PAIRED_T if n < BOOTSTRAP_FROM else PAIRED_T_BOOTSTRAP
    return Difference(n, mean, low, high, float(stats.ttest_1samp(x, 0.0).pvalue), test, n_changed)


# --- what is paired --------------------------------------------------------------------------------------------------


def sample_scores(trials: Sequence[Trial], metric: str) -> dict[str, float]:
    """Score of each sample, the mean over the trials. Raises `UnlikeError` where trials scored different samples."""
    found: list[dict[str, float]] = []
    for trial in trials:
        own = {s.sample_id: s.value for s in trial.scores if s.metric == metric and s.sample_id is not None}
        if found and own.keys() != found[0].keys():
            raise UnlikeError(f"repeats of one arm: {_unlike(found[0].keys(), own.keys(), 'sample')}")
        found.append(own)
    return {s: math.fsum(own[s] for own in found) / len(found) for s in found[0]} if found else {}


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
    return mean_difference([after[i] - before[i] for i in repeats])


def _by_repeat(trials: Sequence[Trial], metric: str, phase: Phase, meter: str | None) -> dict[int, float]:
    read = latency_observations if meter is None else energy_observations
    return {
        trial.repeat: o.value
        for trial in trials
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
