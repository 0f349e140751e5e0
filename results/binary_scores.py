"""Scores that are 0 or 1 for each sample: of which metrics they are, and the interval of their mean, a share.

p of n samples are right. The closed form, p -+ z sqrt(p (1 - p) / n), has no width where all or none are, and may leave
[0, 1]. Wilson's interval (1927) holds every share that the score test does not reject:

    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

so that 4 of 4 is [0.51, 1].
"""

from __future__ import annotations

import math

from results.records import Score
from results.runs import RunData
from results.statistics import NORMAL_95


def binary_metrics(run: RunData) -> dict[str, frozenset[str]]:
    """By workload: metrics whose score was 0 or 1 for every sample of every arm, where more is better.

    That no sample of any arm had another score is the evidence: lm-eval does not tell a metric's range.
    """
    workload_of = {cell.cell_id: cell.workload for cell in run.cells}
    found: dict[str, dict[str, bool]] = {workload: {} for workload in workload_of.values()}
    for trial in run.trials:
        own = found[workload_of[trial.cell_id]]
        for score in trial.scores:
            if score.sample_id is not None:
                if score.metric not in own:
                    own[score.metric] = not _is_overlap(score.metric)
                if not (score.higher_is_better and score.value in (0.0, 1.0)):
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


def _is_overlap(metric: str) -> bool:
    """BLEU and ROUGE run up to 1 or 100, and may be 0 for all samples; TruthfulQA's `bleu_acc` is right or wrong."""
    return metric.startswith(("bleu", "rouge")) and not metric.endswith("_acc")
