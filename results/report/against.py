"""Two arms' figures against each other: their ratio with its interval, and whether they differ for certain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from results.compare import Difference, compare_scores, items_of
from results.ratios import BASELINE, ONE_PAIR, Ratio, ratio_of_exponentials, ratio_of_means, ratio_of_shares, widened
from results.report.arm_figures import ArmFigure
from results.roads import unlike_roads
from results.sittings import APART, pairs_that_count
from results.statistics import NORMAL_95

ASKED_OTHERWISE = "the arms were not asked the same requests: nothing can be paired"
MODELLED_ONCE = "modelled once, so without an interval: a model gives the same figure every time"
ROUNDING = 1e-5
"""Relative: what the order of sums in fp32 may change. Techniques that compute the same differ by so much."""
WITHIN_ROUNDING = "their difference is no more than the order of sums makes"


class Against(NamedTuple):
    """reason: why there is no ratio, or none with an interval. remark: what the ratio leaves out."""

    ratio: Ratio | None
    reason: str | None = None
    remark: str | None = None


def against(figure: ArmFigure, base: ArmFigure) -> Against:
    name = base.arm.name
    if figure.value is None:
        return Against(None, figure.reason)
    if base.value is None:
        return Against(None, f"{name} has no figure: {base.reason}")
    if figure.is_log != base.is_log:
        return _untested(figure, base, "this score is no mean over samples, so nothing tests it")
    if figure.way != base.way:
        ways = [f.spoken_way if figure.unit == base.unit else f"{f.spoken_way}, in {f.unit}" for f in (figure, base)]
        return Against(None, f"not compared: {figure.arm.name} is {ways[0]}; {name} is {ways[1]}")
    if base.value == 0:
        return Against(None, f"{name} has 0, and nothing is a multiple of 0")
    if figure.scores is not None and base.scores is not None:
        return _of_scores(figure, base)
    if not figure.sums:
        return _untested(figure, base, "this score is no mean over samples, so nothing tests it")
    if (unlike := other_roads(figure, base)) is not None:
        return Against(None, unlike)
    if figure.asked != base.asked:
        return _untested(figure, base, ASKED_OTHERWISE)
    return _of_pairs(figure, base)


def _untested(figure: ArmFigure, base: ArmFigure, why: str) -> Against:
    return Against(Ratio((figure.value or 0.0) / (base.value or math.nan), reason=why), why)


def _of_scores(figure: ArmFigure, base: ArmFigure) -> Against:
    own, other = figure.scores or {}, base.scores or {}
    if own.keys() != other.keys():
        return Against(None, f"not the same samples as those of {base.arm.name}")
    samples = sorted(other)
    if figure.is_share:
        ratio = _named(ratio_of_shares(own, other), base)
        n_repeats = [max(map(len, scores.values())) for scores in (own, other)]
        told = []
        if n_repeats[0] != n_repeats[1]:
            told.append(f"as times {base.arm.name}: of the first {min(n_repeats)} repeats that count of either")
        if (n_items := len(set(items_of(samples)))) < len(samples):
            told.append(
                f"several workloads ask the same: {len(samples)} samples are of {n_items} items, and the interval is"
                " over the items"
            )
        return Against(ratio if ratio.value is not None else None, ratio.reason, "; ".join(told) or None)
    if figure.is_log:
        ratio = ratio_of_exponentials(own, other)
        return Against(ratio, ratio.reason)
    means = [[math.fsum(scores[s]) / len(scores[s]) for s in samples] for scores in (own, other)]
    ratio = _named(ratio_of_means([(means[0], means[1])]), base)
    return Against(ratio if ratio.value is not None else None, ratio.reason)


def _of_pairs(figure: ArmFigure, base: ArmFigure) -> Against:
    common = [sorted(own.keys() & other.keys()) for own, other in zip(figure.sums, base.sums, strict=True)]
    if not all(common):
        return Against(None, f"no repeat has a figure of {figure.arm.name} and of {base.arm.name}")
    counted = pairs_that_count(common, figure.sittings, base.sittings)
    has_pairs = all(counted)
    counted = counted if has_pairs else list(common)
    both = zip(figure.sums, base.sums, counted, strict=True)
    pairs = [([own[i] for i in repeats], [other[i] for i in repeats]) for own, other, repeats in both]
    ratio = _named(ratio_of_means(pairs), base)
    if not has_pairs:
        ratio = replace(ratio, low=None, high=None, reason=APART)
    if figure.is_priced and ratio.n == 1:
        ratio = replace(ratio, reason=MODELLED_ONCE)
    elif figure.model_error is None and base.model_error is None:
        ratio = widened(ratio, math.hypot(figure.unshared_error, base.unshared_error))
    remark = _windows(figure, base)
    if counted != common:
        remark = "; ".join(filter(None, [_counted(counted, "that were measured in one sitting", base), remark]))
    elif any(own.keys() != other.keys() for own, other in zip(figure.sums, base.sums, strict=True)):
        remark = "; ".join(filter(None, [_counted(counted, "that both have", base), remark]))
    return Against(ratio if ratio.value is not None else None, ratio.reason, remark)


def _counted(repeats: Sequence[Sequence[int]], which: str, base: ArmFigure) -> str:
    least, most = min(map(len, repeats)), max(map(len, repeats))
    counts = str(most) if least == most else f"{least} to {most}"
    over = (
        f"one repeat {which}" if most == 1 else f"{counts} repeats {'' if least == most else 'of a workload '}{which}"
    )
    return f"as times {base.arm.name}: over the {over}; the figure below the interval is over all repeats of its arm"


def _named(ratio: Ratio, base: ArmFigure) -> Ratio:
    """With the name of what it is a multiple of in its reason: in a verdict that is who leads, and not the baseline."""
    return ratio if ratio.reason is None else replace(ratio, reason=ratio.reason.replace(BASELINE, base.arm.name))


def _window_ratio(figure: ArmFigure, base: ArmFigure) -> float | None:
    """Of one pass over all that was asked, where requests of one of them overlap."""
    if not (figure.overlaps or base.overlaps) or not figure.window_s or not base.window_s:
        return None
    return figure.window_s / base.window_s


def _windows(figure: ArmFigure, base: ArmFigure) -> str | None:
    ratio = _window_ratio(figure, base)
    if ratio is None:
        return None
    whose = f"requests of {' and '.join(f.arm.name for f in (figure, base) if f.overlaps)} overlap"
    once = ", in one repeat" if all(len(own) == 1 for own in figure.sums) else ""
    return f"{whose}: the whole window took {ratio:.2f}× that of {base.arm.name}{once}"


def says_otherwise(figure: ArmFigure, base: ArmFigure, ratio: Ratio | None) -> str | None:
    """Where the mean time of a request rises and the window shrinks, or the other way round; None elsewhere."""
    window = _window_ratio(figure, base)
    if window is None or ratio is None or ratio.value is None or (ratio.value > 1) == (window > 1):
        return None
    names = f"{figure.arm.name} and {base.arm.name}"
    return f"their requests overlap, and {names} stand the other way round by their windows"


def differ(figure: ArmFigure, other: ArmFigure, ratio: Ratio | None) -> bool:
    """Whether two figures differ for certain: beyond the interval of their pairs, and beyond the error of a model."""
    if ratio is None or ratio.value is None or ratio.value <= 0 or within_rounding(ratio):
        return False
    if "replayed" in (figure.method, other.method):
        return False
    if says_otherwise(figure, other, ratio) is not None:
        return False
    if figure.model_error is not None or other.model_error is not None:
        error = math.hypot(figure.model_error or 0.0, other.model_error or 0.0)
        beyond = abs(math.log(ratio.value)) > NORMAL_95 * error
        return beyond and (ratio.is_clear or (ratio.low is None and ratio.reason != ONE_PAIR))
    if figure.is_share and figure.scores is not None and other.scores is not None:
        return ratio.is_clear and _tested(figure, other).is_clear
    return ratio.is_clear


def within_rounding(ratio: Ratio | None) -> bool:
    """Whether two figures are unlike, and no more so than rounding makes them."""
    return ratio is not None and ratio.value is not None and 0 < abs(ratio.value - 1) <= ROUNDING


def other_roads(figure: ArmFigure, other: ArmFigure) -> str | None:
    """How two arms' seconds or joules were computed in unlike ways; None where they were not."""
    unlike = (unlike_roads(*pair, other.arm.name) for pair in zip(figure.roads, other.roads, strict=False))
    found = next(filter(None, unlike), None)
    return None if found is None else f"{found}: that would be in a ratio too, so there is none"


def _tested(figure: ArmFigure, other: ArmFigure) -> Difference:
    return compare_scores(other.scores or {}, figure.scores or {}, is_binary=True)
