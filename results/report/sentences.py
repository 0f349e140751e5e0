"""Who is best of a group, in words, and how ratios are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from results.ratios import Ratio
from results.report.against import MODELLED_ONCE
from results.report.arm_figures import NO_SHARES, NOT_SCORED, Quantity
from results.report.standings import Group, Standing, Verdict
from results.roads import in_list
from results.units import format_interval, format_mean, format_number

SHOWN_RIVALS = 3
"""Names that a sentence holds; of more it says how many."""
SHOWN_SCORES = 3
"""Workloads with a score of their own that have a sentence on the first screen."""
BEST: dict[Quantity, str] = {"time": "fastest", "energy": "fewest joules", "accuracy": "most accurate"}
MOST_DIGITS = 12
OF_THE_QUESTION = (NOT_SCORED, NO_SHARES)
"""Why no arm has a score, those that failed neither."""


def sentences(whole: Group, single: Sequence[Group]) -> Iterator[tuple[bool, str]]:
    """(whether it is certain, the words) of each quantity. Where right answers are of a part of the workloads, it says
    of which, and each other score has words of its own."""
    for quantity, verdict in whole.verdicts.items():
        if quantity == "accuracy" and whole.other_scores and whole.shared_scores:
            title = f"most right answers, {', '.join(whole.shared_scores)} alone"
            yield verdict.is_certain, sentence(verdict, title)
        else:
            yield verdict.is_certain, sentence(verdict)
    others = [g for g in single if g.workload in whole.other_scores and g.verdicts["accuracy"].leader is not None]
    for group in others[:SHOWN_SCORES]:
        verdict = group.verdicts["accuracy"]
        yield (
            verdict.is_certain,
            sentence(verdict, f"{'highest' if group.rising else 'lowest'} {group.score} on {group.workload}"),
        )
    if len(others) > SHOWN_SCORES:
        yield False, f"{len(others) - SHOWN_SCORES} more scores stand by workload."


def sentence(verdict: Verdict, title: str | None = None) -> str:
    """ "Fastest for certain: int4, 0.87× dropless [0.82, 0.93]." Or which arms may be as good as the leader.

    title: what it is best in, in place of the quantity's words.
    """
    words = title or BEST[verdict.quantity]
    best = words[0].upper() + words[1:]
    leader = verdict.leader
    if leader is None:
        return f"{best}: {_why_nobody(verdict)}."
    names = ", ".join(_named(s) for s in verdict.without[:SHOWN_RIVALS])
    more = len(verdict.without) - SHOWN_RIVALS
    verb = "have" if len(verdict.without) > 1 else "has"
    without = f"; {names}{f' and {more} more' if more > 0 else ''} {verb} no figure" if names else ""
    if verdict.is_certain:
        how = "for certain" if leader.model_error is None else "beyond the model's own error"
        among = " of those that have a figure" if without else ""
        return f"{best}{among} {how}: {_named(leader)}{_times(leader)}{_next(verdict)}{_worse(verdict)}{without}."
    if not verdict.rivals:
        return f"{best}: {verdict.why} ({_named(leader)}){without}."
    behind = f"; behind {_named(leader)} for certain: {_behind(verdict)}" if verdict.behind else ""
    return f"{best}: not certain between {_named(leader)}, {_rivals(verdict)}{behind}{without}."


def _rivals(verdict: Verdict) -> str:
    """Their names, and in brackets why it is not certain, where several reasons hold each behind its arms."""
    if verdict.why:
        reasons = {verdict.why: [r.standing for r in verdict.rivals]}
    else:
        reasons = {}
        for rival in verdict.rivals:
            reasons.setdefault(rival.why, []).append(rival.standing)
    return _told(reasons)


def _why_nobody(verdict: Verdict) -> str:
    """Why no arm has a figure: a reason that holds for all, or the commonest first, each behind its arms."""
    reasons: dict[str, list[Standing]] = {}
    for standing in verdict.without:
        assert standing.reason is not None  # a figure that is missing says why
        reasons.setdefault(standing.reason, []).append(standing)
    of_all = [why for why in reasons if len(reasons) == 1 or why in OF_THE_QUESTION]
    if of_all:
        return of_all[0]
    return f"no arm has a figure: {_told(dict(sorted(reasons.items(), key=lambda one: -len(one[1]))))}"


def _told(reasons: Mapping[str, Sequence[Standing]]) -> str:
    told = []
    for why, standings in reasons.items():
        more = len(standings) - SHOWN_RIVALS
        names = ", ".join(_named(s) for s in standings[: SHOWN_RIVALS if more > 1 else SHOWN_RIVALS + 1])
        told.append(f"{names}{f' and {more} more' if more > 1 else ''} ({why})")
    return ", ".join(told)


def _behind(verdict: Verdict) -> str:
    """The closest first; of more it says how many, up to how far."""
    found = [(s, ratio) for s, ratio in verdict.behind if ratio is not None]
    shown = [f"{_named(s)}, {ratio_words(ratio)}" for s, ratio in found[:SHOWN_RIVALS]]
    if len(found) > SHOWN_RIVALS:
        standing, ratio = found[-1]
        shown.append(f"{len(found) - SHOWN_RIVALS} more up to {_named(standing)}, {ratio_words(ratio)}")
    return "; ".join(shown)


def _next(verdict: Verdict) -> str:
    """The closest arm behind a leader, unless it is the baseline: that ratio is told already."""
    standing, ratio = verdict.behind[0]
    if standing.is_baseline or ratio is None or verdict.leader is None:
        return ""
    return f"; the next is {_named(standing)}, {ratio_words(ratio)} {_named(verdict.leader)}"


def _worse(verdict: Verdict) -> str:
    """Workloads where a leader over all of them is behind."""
    told = [f"{workload}: {ratio_words(ratio)} {_named(first)}" for workload, first, ratio in verdict.worse_on if ratio]
    more = f" and {len(told) - SHOWN_RIVALS} more" if len(told) > SHOWN_RIVALS else ""
    return f"; but behind for certain on {', '.join(told[:SHOWN_RIVALS])}{more}" if told else ""


def _named(standing: Standing) -> str:
    return in_list(standing.arm.name)


def _times(standing: Standing) -> str:
    if standing.is_baseline:
        return ", the baseline"
    return f", {ratio_words(standing.ratio)}" if standing.ratio is not None and standing.ratio.value is not None else ""


def ratio_words(ratio: Ratio) -> str:
    """Without an interval with two digits: of one pair more would be noise. A model gives the same figure again."""
    if ratio.value is None:
        return "none"
    if ratio.low is not None and ratio.high is not None:
        return f"{ratio_text_words(ratio.value, ratio.low, ratio.high)} {interval_words(ratio.low, ratio.high)}"
    if ratio.value < 0.1:
        return f"{ratio.value:.2g}×"
    if ratio.value >= 10:
        return f"{format_number(ratio.value)}×"
    return f"{ratio.value:.{1 if ratio.value >= 1 and ratio.reason != MODELLED_ONCE else 2}f}×"


def ratio_text_words(value: float, low: float, high: float) -> str:
    """With the digits that its interval supports, and two at least where fewer would be a tenth off."""
    text = format_mean(value, low, high)
    return f"{text}×" if abs(float(text) - value) <= 0.1 * value else f"{value:.2g}×"


def interval_words(low: float, high: float) -> str:
    """With more digits where rounding would let an interval that leaves out 1 touch it, or one around 1 end there:
    [0.73, 6.7] is not [1, 7]."""
    text = format_interval(low, high)
    if low < 1 < high and 1.0 in _ends(text):
        return f"[{low:.2f}, {high:.2f}]"
    digits = 2
    while (low <= 1 <= high) != (_ends(text)[0] <= 1 <= _ends(text)[1]) and digits <= MOST_DIGITS:
        text, digits = f"[{low:.{digits}f}, {high:.{digits}f}]", digits + 1
    return text


def _ends(interval: str) -> list[float]:
    return [float(end) for end in interval.strip("[]").split(", ")]
