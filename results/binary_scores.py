"""Scores that are 0 or 1 for each sample: of which metrics they are, and the interval of their mean, a share.

p of n samples are right. The closed form, p -+ z sqrt(p (1 - p) / n), has no width where all or none are, and may leave
[0, 1]. Wilson's interval (1927) holds every share that the score test does not reject:

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

so that 4 of 4 is [0.51, 1]. Other scores have Student's interval, and share that end (`score_interval`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from results.records import Score
from results.runs import RunData
from results.statistics import CONFIDENCE, NORMAL_95


def binary_metrics(run: RunData) -> dict[str, frozenset[str]]:
    """By workload: metrics whose score was 0 or 1 for every sample of every arm, where more is better.

    That no sample of any arm had another score is the evidence: lm-eval does not tell a metric's range.
    """
    return _metrics_with(run, lambda score: score.higher_is_better and score.value in (0.0, 1.0))


def metrics_within_0_and_1(run: RunData) -> dict[str, frozenset[str]]:
    """By workload: metrics whose score lay there for every sample of every arm. The same evidence.

    Where less is better most scores have no such end, as nats: of them those alone that were 0 or 1, and not always 0.
    """
    within = _metrics_with(run, lambda s: 0.0 <= s.value <= 1.0 and (s.higher_is_better or s.value in (0.0, 1.0)))
    always_0 = _metrics_with(run, lambda score: not score.higher_is_better and score.value == 0.0)
    return {workload: metrics - always_0[workload] for workload, metrics in within.items()}


def metrics_from_0(run: RunData) -> dict[str, frozenset[str]]:
    """By workload: metrics whose score was never below 0. The same evidence."""
    return _metrics_with(run, lambda score: score.value >= 0.0)


def _metrics_with(run: RunData, has: Callable[[Score], bool]) -> dict[str, frozenset[str]]:
    workload_of = {cell.cell_id: cell.workload for cell in run.cells}
    found: dict[str, dict[str, bool]] = {workload: {} for workload in workload_of.values()}
    for trial in run.trials:
        own = found[workload_of[trial.cell_id]]
        for score in trial.scores:
            if score.sample_id is not None:
                if score.metric not in own:
                    own[score.metric] = not _is_overlap(score.metric)
                if not has(score):
                    own[score.metric] = False
    return {workload: frozenset(m for m, holds in own.items() if holds) for workload, own in found.items()}


def is_share(whole: Score, metrics: frozenset[str]) -> bool:
    """Whether a task's aggregate is a share of n samples: a mean of subjects that differ in size is not.

    metrics: those that are 0 or 1. The part of a group (`acc/stem`) is told by the group's own metric.
    """
    if whole.metric.partition("/")[0] not in metrics:
        return False
    n_right = whole.value * whole.n
    return whole.n > 0 and math.isclose(n_right, round(n_right), abs_tol=1e-6)


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """95 % interval of a share that was seen over n samples."""
    z2_n = NORMAL_95**2 / n
    middle = (share + z2_n / 2) / (1 + z2_n)
    half = math.sqrt(z2_n * (share * (1 - share) + z2_n / 4)) / (1 + z2_n)
    # At 0 and 1 an end is the share itself, but for rounding.
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def score_interval(
    mean: float, stderr: float, n: int, is_within_0_and_1: bool, is_from_0: bool = False
) -> tuple[float, float]:
    """95 % interval of the mean of n samples' scores: Student's t, without the part that holds no possible mean.

    Samples that all have 0, or all 1, scatter by nothing, and say little of those that were not asked. Of all scores
    within [0, 1] with such a mean those of 0 and 1 scatter most, so Wilson's interval holds for them.
    """
    from scipy import special

    if stderr == 0.0 and is_within_0_and_1 and mean in (0.0, 1.0):
        return wilson_interval(mean, n)
    half = float(special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * stderr
    low, high = mean - half, mean + half
    return max(0.0, low) if is_within_0_and_1 or is_from_0 else low, min(1.0, high) if is_within_0_and_1 else high


def exponential_interval(value: float, stderr: float, n: int) -> tuple[float | None, float | None]:
    """95 % interval of e to the mean of n samples' logarithms: e to the ends of that mean's, so never below 0.

    stderr: of the value, by the delta method: the value times that of the mean. None: an end is beyond any number.
    """
    low, high = score_interval(math.log(value), stderr / value, n, False)
    try:
        return math.exp(low), math.exp(high)
    except OverflowError:
        return None, None


def _is_overlap(metric: str) -> bool:
    """BLEU and ROUGE run up to 1 or 100, and may be 0 for all samples; TruthfulQA's `bleu_acc` is right or wrong."""
    return metric.startswith(("bleu", "rouge")) and not metric.endswith("_acc")
