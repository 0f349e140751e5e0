"""What stands below the verdicts over a history: what they are of, and what they are not of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from results.history.index import History
from results.history.judged import Judged
from results.history.places import LEAST_SEGMENT
from results.history.points import RunPoint
from results.history.rests import PROTOCOL

MOST_TOLD: Final = 4


def notes_of(anchor: str | None, judged: Sequence[Judged]) -> Iterator[str]:
    if anchor is not None:
        yield _over_anchor(anchor, judged)
    arms: dict[str, dict[str, None]] = {}
    for one in judged:
        for words in one.settings_changed:
            arms.setdefault(words, {})[one.arm] = None
    for words, own in arms.items():
        yield f"Set otherwise: {', '.join(own)}, since {words}. A change may be of that."
    yield from _behind(judged)
    remarks = list(dict.fromkeys(line for one in judged for line in one.remarks))
    yield from remarks[:MOST_TOLD]
    if (n_more := len(remarks) - MOST_TOLD) > 0:
        yield f"More such remarks of runs: {n_more}; --json and --csv name them."
    if any(one.figure.method == "modelled" for one in judged):
        yield "Modelled joules are a model's: a change of them is one of CPU time or of the model, not of a meter."
    yield (
        f"The ends of a series are unsure: a change within the last {LEAST_SEGMENT - 1} runs can't be told from chance."
    )


def _over_anchor(anchor: str, judged: Sequence[Judged]) -> str:
    """What drifts within a run is in both arms of a pair only where these followed each other."""
    over = f"Times and joules are of each arm over {anchor} in the same run"
    orders = {
        point.run.folder: point.run.rests.get(f"{PROTOCOL}order")
        for one in judged
        if one.series.is_anchored
        for point in one.series.points
    }
    n_in_turn = sum(order == "sequential" for order in orders.values())
    if n_in_turn == 0:
        return f"{over}: the machine's drift is out."
    return (
        f'{over}. In {n_in_turn} of {len(orders)} runs protocol.order is "sequential": all repeats of an arm were'
        " measured before those of the next, and what drifted meanwhile is in the figures."
    )


def _behind(judged: Sequence[Judged]) -> Iterator[str]:
    """Arms of which newer runs are not in the verdicts; where that is so of some of its figures, these."""
    n_of = Counter(one.arm for one in judged)
    found: dict[str, dict[str, list[str]]] = {}
    for one in judged:
        if one.behind is not None:
            figure = f"{one.workload}: {one.figure.name}"
            found.setdefault(one.behind, {}).setdefault(one.arm, []).append(figure)
    for words, arms in found.items():
        whose = []
        for arm, figures in arms.items():
            n_more = len(figures) - MOST_TOLD
            more = f" and {n_more} more" if n_more > 0 else ""
            some = f" ({'; '.join(figures[:MOST_TOLD])}{more})" if len(figures) < n_of[arm] else ""
            whose.append(f"{arm}{some}")
        yield f"No verdict of {', '.join(whose)} is of {words}."


def not_judged(history: History, baseline: Sequence[RunPoint], known: Collection[object]) -> Iterator[str]:
    """Cells of the newest run of these plans that the baseline lacks, or that failed in all of it: nothing says what
    they were before. known: keys of cells that it has."""
    plans = {run.plan for run in baseline}
    newest = [run for run in history.runs if run.plan in plans][-1:]
    labels = [cell.label for run in newest for cell in history.cells(run.folder) if cell.key not in known]
    if labels:
        more = f" and {len(labels) - MOST_TOLD} more" if len(labels) > MOST_TOLD else ""
        yield (
            "No run of the baseline has a figure of these, so they are not judged:"
            f" {'; '.join(labels[:MOST_TOLD])}{more}."
        )
