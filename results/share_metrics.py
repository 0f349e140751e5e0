"""Which scores are shares of right answers, by the name of the metric: its values do not say it.

A BLEU of 0.8 would be a share in one run, and one of 2.3 a plain number in the next. lm-eval does not tell a metric's
range. F1 ends at 1 in most of its tasks and at 100 in SQuAD's, and EM at 100 in QuALITY's of SCROLLS: so these are none
here. Nor is a name that is not known.
"""

from __future__ import annotations

import re
from typing import Final

WORDS: Final = {"acc", "accuracy", "match", "pass", "mc1", "mc2"}
NAMES: Final = {"same_top1", "rouge_l"}
"""Joulebench's own: `workloads.fidelity`, `workloads.rolebench`."""
NOT_WITH: Final = {"diff", "difference", "count"}


def is_share_metric(metric: str) -> bool:
    """metric: also the part of a group (`acc/stem`), and with lm-eval's filter behind a comma. RULER's metrics are
    numbers: the length that was asked."""
    name = metric.partition("/")[0].partition(",")[0].lower()
    words = set(re.split(r"[^a-z0-9]+", name))
    return name in NAMES or name.isdigit() or (bool(words & WORDS) and not words & NOT_WITH)
