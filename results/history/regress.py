"""Whether what a baseline measured got slower, hungrier or worse since: a verdict for each figure of each cell.

series       the baseline's cells in all runs that are like it (`results.history.unlike`), in their order, divided
             by an anchor of the same run where one is named
levels       `results.history.changes`: the level that the baseline's runs are on against the last one
noise        of one run, the larger of two: runs of one level around it; the baseline's own runs (A/A) from
             `LEAST_AA` of them on
floor        the change that `LEAST_SEGMENT` more runs would prove at p < 0.001. Smaller ones may be there
family       Benjamini and Hochberg 1995 over all series at `DISCOVERY_RATE`; p of a change counts every place where
             it could have been

REGRESSION   the last level is worse for certain, by more than what was asked to count, and by more than the floor
IMPROVED     the same for the better
PASS         neither, and the floor is below what was asked
UNRELIABLE   nothing can be said: too few runs, too much noise, a baseline that is on two levels, last runs that
             stand off and are too few to be a level
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from results.history.changes import LEAST_POINTS, MOST_POINTS, ROUNDING, Levels, Segment
from results.history.copies import copies_told, without_copies
from results.history.index import History, HistoryError
from results.history.judged import Judged, Judgement
from results.history.marks import baseline_runs
from results.history.places import LEAST_SEGMENT, P_VALUE
from results.history.points import CellPoint, Figure, RunPoint
from results.history.regress_notes import not_judged, notes_of
from results.history.series import Lacking, Series, anchored, of_one_sitting, same_way, series_of
from results.history.unlike import What, unlike_cells, unlike_environments, unlike_figures

LEAST_AA: Final = 3
NONE_COUNTS: Final = "no trial of it counts"
OF_ONE_LEVEL: Final = "noise of runs of one level"
IS_GONE: Final = "the arm is not in it"
UNFINISHED: Final = "it has not come to its end"
OF_THESE: Final = "of these {n} samples, whatever others would say: `joulebench compare` tests that"
DISCOVERY_RATE: Final = 0.01
LEAST_PERCENT: Final = 0.5
MOST_NOISE_PERCENT: Final = 5.0
ALLOWED: Final[frozenset[What]] = frozenset({"systems", "versions"})
"""What a history may change in without being left out: it is told beside the change."""


@dataclass(frozen=True)
class Asked:
    """least: a change that counts, as a share. most_noise: a floor above it proves nothing, as a share."""

    anchor: str | None = None
    allowed: frozenset[What] = ALLOWED
    least: float = LEAST_PERCENT / 100
    most_noise: float = MOST_NOISE_PERCENT / 100
    metrics: tuple[str, ...] = ()


def regress(history: History, name: str, asked: Asked) -> Judgement:
    """Raises `HistoryError`."""
    all_of_baseline = baseline_runs(history, name)
    counted, copies = without_copies(history.runs, [run.folder for run in all_of_baseline])
    finished = [run for run in counted if not run.is_unfinished]
    baseline = [run for run in all_of_baseline if run in finished]
    if not baseline:
        raise HistoryError(f"baseline {name}: {'; '.join(line for run in all_of_baseline for line in run.told)}")
    if len(finished) < 2:
        only = "one run only" if len(counted) == 1 else "one run only that has come to its end"
        raise HistoryError(f"{history.directory} holds {only}; run the plan again, and there is something to judge")
    whose = baseline[0].folder if len(baseline) == 1 else f"baseline {name}"
    by_run = history.cells_by_run([run.folder for run in baseline])
    marks = _marked(by_run, baseline)
    wanted = [one for one in marks if not asked.metrics or one.figure.metric in asked.metrics]
    known = dict.fromkeys(one.figure.metric for one in marks)
    for metric in asked.metrics:
        if metric not in known:
            raise HistoryError(f"--metric {metric}: {whose} has no such figure; it has {', '.join(known)}")
    if not wanted:
        raise HistoryError(f"baseline {name}: {whose} has no figure: every trial of it failed or is marked")
    cells = list({cell.key: cell for run in reversed(baseline) for cell in by_run[run.folder]}.values())
    anchors = _anchors(cells, asked.anchor, whose)
    runs = [(run, {cell.key: cell for cell in by_run[run.folder]}) for run in counted]
    marked = {run.folder for run in baseline}
    judged = []
    for first, cell, figure in wanted:
        anchor = anchors.get((cell.device, cell.workload, cell.model)) or anchors.get((cell.device, cell.workload, ""))
        own = _Line(first, cell, figure, anchor if anchor is not None and anchor.key != cell.key else None, asked)
        one = own.judged(runs, marked)
        judged.append(replace(one, is_anchor=anchor is not None and anchor.key == cell.key))
    notes = (
        *notes_of(asked.anchor, judged),
        *not_judged(history, baseline, {one.cell.key for one in marks}),
        *copies_told(copies),
    )
    keys = {cell.key for _, cell, _ in wanted}
    n_runs = sum(not run.is_unfinished and not keys.isdisjoint(cells_of_run) for run, cells_of_run in runs)
    return Judgement(tuple(baseline), tuple(_controlled(judged)), n_runs, notes)


class _Marked(NamedTuple):
    """A figure that is judged, by the first run of the baseline that has it."""

    run: RunPoint
    cell: CellPoint
    figure: Figure


def _marked(by_run: Mapping[str, Sequence[CellPoint]], baseline: Sequence[RunPoint]) -> list[_Marked]:
    """Of all runs of the baseline: in one of them an arm may have failed, or every trial of it may be marked."""
    found: dict[tuple[object, ...], list[_Marked]] = {}
    for run in baseline:
        own: dict[tuple[object, ...], list[_Marked]] = {}
        for cell in by_run[run.folder]:
            for figure in cell.figures:
                if figure.better != "neither":
                    own.setdefault((*cell.key, *figure.key), []).append(_Marked(run, cell, figure))
        found |= {key: figures for key, figures in own.items() if key not in found}
    return [one for figures in found.values() for one in figures]


def _anchors(cells: Sequence[CellPoint], name: str | None, whose: str) -> dict[tuple[str, str, str], CellPoint]:
    """By device, workload and model; without the model where it has another one than the arms."""
    if name is None:
        return {}
    own = [cell for cell in cells if cell.engine == name]
    if not own:
        arms = ", ".join(dict.fromkeys(cell.engine for cell in cells))
        raise HistoryError(f"--anchor {name}: {whose} has no such arm; it has {arms}")
    return {(cell.device, cell.workload, ""): cell for cell in own} | {
        (cell.device, cell.workload, cell.model): cell for cell in own
    }


class _Line:
    """One figure of one cell of the baseline, over the history."""

    def __init__(
        self, first: RunPoint, cell: CellPoint, figure: Figure, anchor: CellPoint | None, asked: Asked
    ) -> None:
        self._first, self._cell, self._figure, self._anchor, self._asked = first, cell, figure, anchor, asked

    def judged(
        self, runs: Sequence[tuple[RunPoint, dict[tuple[str, str, str, str], CellPoint]]], marked: Collection[str]
    ) -> Judged:
        series, left_out, behind = self._series(runs)
        at = [i for i, point in enumerate(series.points) if point.run.folder in marked]
        cell = self._cell
        none = Judged(
            cell.device, cell.engine, cell.model, cell.workload, self._figure, series, None, "UNRELIABLE", "",
            left_out=tuple(f"{words} ({n} runs)" if n > 1 else words for words, n in left_out.items()),
            remarks=tuple(line for run, cells in runs if cell.key in cells for line in _told_of(run)),
        )  # fmt: skip
        if not at and len(series.points) == MOST_POINTS:
            return replace(
                none, reason=f"the baseline is older than the last {MOST_POINTS} runs, and no others are looked at"
            )
        if not at:
            # What is left out stands beside the reason.
            return replace(none, reason="the baseline is not in the series" + ("" if left_out else ": no figure of it"))
        changed = (f"{run.folder}: {words}" for run, words in series.settings_changed(at[0]))
        none = replace(none, settings_changed=tuple(changed))
        if at[-1] == len(series.points) - 1:
            return replace(none, reason="no run like the baseline is newer than it")
        levels = series.levels()
        judge = self._by_levels if len(series.points) >= LEAST_POINTS else self._by_baseline
        found = judge(replace(none, levels=levels), levels, at)
        if not behind:
            return found
        ends = list(dict.fromkeys((behind[0][0].folder, behind[-1][0].folder)))
        words = f"the newest run{'s' if len(ends) > 1 else ''}, {' to '.join(ends)}: {behind[-1][1]}"
        found = replace(found, behind=words)
        if behind[-1][1] not in (NONE_COUNTS, IS_GONE) or found.verdict == "REGRESSION":
            return found
        return replace(found, verdict="UNRELIABLE", reason=f"nothing is known of {words}")

    def _series(
        self, runs: Sequence[tuple[RunPoint, dict[tuple[str, str, str, str], CellPoint]]]
    ) -> tuple[Series, Counter[str], list[tuple[RunPoint, str]]]:
        """And why runs that have the cell are not in it; and those of them that are newer than all that are, with runs
        of its plan that lack the cell."""
        kept: list[tuple[RunPoint, CellPoint, Figure]] = []
        bases: list[tuple[CellPoint, Figure]] = []
        left_out: Counter[str] = Counter()
        behind: list[tuple[RunPoint, str]] = []
        lacking: list[Lacking] = []
        for run, cells in runs:
            cell = cells.get(self._cell.key)
            if run.is_unfinished:
                # Its first repeats alone, which may be unlike the later ones, and of some arms none.
                if cell is not None:
                    left_out[UNFINISHED] += 1
                continue
            if cell is None:
                if kept and kept[-1][0].plan == run.plan:
                    behind.append((run, IS_GONE))
                continue
            figure = same_way(self._figure, cell.by_key.get(self._figure.key, []))
            if figure is None:
                left_out[NONE_COUNTS] += 1
                if self._unlike(run, cell) is None:
                    lacking.append(Lacking(run, cell, cells.get(self._anchor.key) if self._anchor else None))
                behind.append((run, NONE_COUNTS))
                continue
            why = self._unlike(run, cell, figure)
            if why is None and self._anchor is not None and figure.kind in ("time", "energy"):
                pair = self._anchored_by(cells, cell, figure)
                if isinstance(pair, str):
                    why = pair
                else:
                    figure, anchor, base = pair
                    bases.append((anchor, base))
            if why is not None:
                left_out[why] += 1
                behind.append((run, why))
                continue
            kept.append((run, cell, figure))
            behind = []
        pairs = ((*one, *base) for one, base in zip(kept, bases, strict=True)) if bases else ()
        series = anchored(pairs) if bases else series_of(kept)
        return replace(series, lacking=tuple(lacking)), left_out, behind

    def _anchored_by(
        self, cells: dict[tuple[str, str, str, str], CellPoint], own: CellPoint, figure: Figure
    ) -> tuple[Figure, CellPoint, Figure] | str:
        """The figure, its anchor and the anchor's figure, of the repeats that count; or why the run is left out."""
        cell = cells.get(self._anchor.key) if self._anchor is not None else None
        found = same_way(figure, cell.by_key.get(figure.key, [])) if cell is not None else None
        way = figure.method, figure.meter, figure.unit
        if cell is None or found is None or (found.method, found.meter, found.unit) != way:
            return "the anchor has no such figure"
        both = of_one_sitting(own, figure, cell, found)
        return "no repeat of it and of the anchor is of one sitting" if both is None else (both[0], cell, both[1])

    def _unlike(self, run: RunPoint, cell: CellPoint, figure: Figure | None = None) -> str | None:
        device, allowed = self._cell.device, self._asked.allowed
        found = [
            *unlike_environments(self._first.environments.get(device), run.environments.get(device)),
            *unlike_cells(self._cell, cell),
            *(unlike_figures(self._figure, figure, (self._cell, cell), allowed) if figure is not None else ()),
        ]
        return next((f"other {one.what} ({one.words})" for one in found if one.what not in allowed), None)

    # --- verdicts ---

    def _by_levels(self, none: Judged, levels: Levels, at: Sequence[int]) -> Judged:
        of_baseline = {_index_of(levels, i) for i in at}
        base, last = levels.segments[min(of_baseline)], levels.segments[-1]
        aa = _noise_of_baseline(none.series, at)
        noise, told = (aa, f"noise of {len(at)} A/A runs") if aa > levels.noise else (levels.noise, OF_ONE_LEVEL)
        error = noise * math.sqrt(1 / base.n + 1 / LEAST_SEGMENT)
        floor = _quantile(levels.degrees, 1 - P_VALUE / 2) * error
        found = replace(
            none, noise=noise, floor=floor, base=none.series.value(base.mean), last=none.series.value(last.mean)
        )
        if len(of_baseline) > 1:
            return replace(found, reason="the baseline's own runs are on several levels: mark runs of one")
        ends = self._standing_off(none.series, last, aa)
        if base is not last:
            found = _with_change(found, levels, base, last, noise)
        off = self._off_its_level(none.series, base, at)
        if off is not None and base is not last and abs(found.change or 0.0) > _at_most(*off):
            off = None  # the newest runs are further off than it could explain
        if off is not None:
            size, error, degrees = off
            # The newer runs of its level are a level by themselves, if they are enough.
            if len(at) < LEAST_AA or base is not last or list(at) != list(range(base.first, base.first + len(at))):
                words = (
                    f"the baseline's runs stand off by {none.series.shown(-size)} from those they are on a level with"
                )
                return replace(found, reason=f"{words}, and are too few to be one: mark {LEAST_SEGMENT} that are alike")
            own, half = _mean_x(none.series, at), _quantile(degrees, 0.975) * error
            found = replace(
                found, base=none.series.value(own), last=none.series.value(own + size), change=size, low=size - half,
                high=size + half, p=_p(size, error, degrees), since=none.series.points[at[-1] + 1].run,
            )  # fmt: skip
        if ends is not None:
            return replace(found, reason=ends)
        return self._told(found, f"{told}, {len(none.series.points)} runs")

    def _by_baseline(self, none: Judged, levels: Levels, at: Sequence[int]) -> Judged:
        """Too few runs for levels: the baseline's own against all that are newer."""
        x = np.array([point.x for point in none.series.points])
        own, newer = x[list(at)], x[at[-1] + 1 :]
        needed = f"{LEAST_POINTS}, or {LEAST_AA} of the baseline itself (`joulebench baseline set NAME RUN RUN RUN`)"
        if len(own) < LEAST_AA:
            return replace(none, reason=f"{len(x)} runs are too few to know the noise: it takes {needed}")
        noise = max(float(own.std(ddof=1)), ROUNDING)
        degrees = len(own) - 1
        error = math.hypot(noise * math.sqrt(1 / len(own) + 1 / len(newer)), _of_fewer_repeats(none.series, at))
        floor = _quantile(degrees, 1 - P_VALUE / 2) * error
        size, half = float(newer.mean() - own.mean()), _quantile(degrees, 0.975) * error
        value = none.series.value
        found = replace(
            none, noise=noise, floor=floor, base=value(float(own.mean())), last=value(float(newer.mean())),
            change=size, low=size - half, high=size + half, p=_p(size, error, degrees),
            since=none.series.points[at[-1] + 1].run,
        )  # fmt: skip
        return self._told(found, f"noise of {len(own)} A/A runs, {len(newer)} newer")

    def _off_its_level(self, series: Series, base: Segment, at: Sequence[int]) -> tuple[float, float, int] | None:
        """(size, its error, degrees) of how far the others of that level are off the baseline's runs, for certain.

        Fewer runs than a level takes are put on that of their neighbours, however far off they are.
        """
        x = np.array([point.x for point in series.points])
        own, others = x[list(at)], np.delete(x[base.first : base.end], [i - base.first for i in at])
        if len(others) < LEAST_SEGMENT:
            return None
        noise = max(float(others.std(ddof=1)), _noise_of_baseline(series, at), ROUNDING)
        size, error = float(others.mean() - own.mean()), noise * math.sqrt(1 / len(own) + 1 / len(others))
        least = series.counts_from(self._asked.least, float(own.mean()))
        is_certain = _p(size, error, len(others) - 1) < P_VALUE and abs(size) > least
        return (size, error, len(others) - 1) if is_certain else None

    def _standing_off(self, series: Series, last: Segment, aa: float) -> str | None:
        """Last runs that are off the level before them, and too few to be one. Their own distance is in no noise."""
        x = np.array([point.x for point in series.points])
        for n in range(1, min(LEAST_SEGMENT, last.n - 1)):
            before, end = x[last.first : last.end - n], x[last.end - n : last.end]
            noise = max(float(before.std(ddof=1)), aa, ROUNDING)
            size, error = float(end.mean() - before.mean()), noise * math.sqrt(1 / n + 1 / len(before))
            least = series.counts_from(self._asked.least, float(before.mean()))
            # Each number of last runs is a chance of its own.
            if _p(size, error, len(before) - 1) < P_VALUE / (LEAST_SEGMENT - 1) and abs(size) > least:
                runs = f"last {n} runs stand" if n > 1 else "last run stands"
                return (
                    f"the {runs} off by {series.shown(size)}, and the ends of a series are unsure:"
                    f" {LEAST_SEGMENT - n} more run{'s tell' if LEAST_SEGMENT - n > 1 else ' tells'}"
                )
        return None

    def _told(self, found: Judged, how: str) -> Judged:
        """The verdict, before the family of all series is looked at."""
        floor, level = found.floor or 0.0, found.base or 0.0
        least, most_noise = (found.series.counts_from(s, level) for s in (self._asked.least, self._asked.most_noise))
        change = found.change or 0.0
        shown = found.series.shown
        if found.p is not None and found.p < P_VALUE and abs(change) >= max(least, floor):
            of = f"; {OF_THESE.format(n=self._figure.n_samples)}" if self._figure.kind == "accuracy" else ""
            return replace(found, verdict="REGRESSION" if found.is_worse else "IMPROVED", reason=f"{how}{of}")
        if floor > most_noise:
            return replace(
                found, reason=f"too much noise: only a change above {shown(floor)} would show ({how})".replace("+", "")
            )
        small = f"; {shown(change)} is below what counts or shows" if found.p is not None and found.p < P_VALUE else ""
        return replace(found, verdict="PASS", reason=f"{how}{small}")


def _with_change(found: Judged, levels: Levels, base: Segment, last: Segment, noise: float) -> Judged:
    size = last.mean - base.mean
    error = max(math.hypot(base.error, last.error), noise * math.sqrt(1 / base.n + 1 / last.n))
    half = _quantile(levels.degrees, 0.975) * error
    at = next(c.at for c in levels.changes if c.at > base.first) if last.first > base.first else last.end
    since = found.series.points[at].run if at < len(found.series.points) else None
    return replace(
        found, change=size, low=size - half, high=size + half, since=since,
        p=min(1.0, len(found.series.points) * _p(size, error, levels.degrees)),
    )  # fmt: skip


def _at_most(size: float, error: float, degrees: int) -> float:
    return abs(size) + _quantile(degrees, 0.975) * error


def _mean_x(series: Series, at: Sequence[int]) -> float:
    return float(np.mean([series.points[i].x for i in at]))


def _noise_of_baseline(series: Series, at: Sequence[int]) -> float:
    """0 where it has too few runs."""
    return float(np.std([series.points[i].x for i in at], ddof=1)) if len(at) >= LEAST_AA else 0.0


def _of_fewer_repeats(series: Series, at: Sequence[int]) -> float:
    """Standard error that runs behind the baseline's add to their mean by what the baseline's noise does not know:
    fewer repeats than its runs have."""
    own, newer = [series.points[i] for i in at], series.points[at[-1] + 1 :]
    known2 = float(np.mean([point.error**2 for point in own]))
    least = min(point.figure.n for point in own)
    return math.sqrt(sum(max(0.0, p.error**2 - known2) for p in newer if p.figure.n < least)) / len(newer)


def _told_of(run: RunPoint) -> list[str]:
    return [f"{line} No verdict is of it." for line in run.told] if run.is_unfinished else run.told


def _index_of(levels: Levels, i: int) -> int:
    return next(k for k, segment in enumerate(levels.segments) if segment.first <= i < segment.end)


def _quantile(degrees: int, share: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(max(degrees, 1), share))


def _p(size: float, error: float, degrees: int) -> float:
    from scipy.special import stdtr

    return 2 * float(stdtr(max(degrees, 1), -abs(size) / error))


def _controlled(judged: Sequence[Judged]) -> Iterator[Judged]:
    """Verdicts that hold among all of them."""
    from scipy.stats import false_discovery_control

    ps = [1.0 if one.p is None else one.p for one in judged]
    for one, p in zip(judged, false_discovery_control(ps) if ps else (), strict=True):
        if one.verdict in ("REGRESSION", "IMPROVED") and p >= DISCOVERY_RATE:
            yield replace(one, verdict="UNRELIABLE", reason=f"certain alone, and not among {len(ps)} series")
        else:
            yield one
