"""A figure of one cell over the runs of a history, as logarithms so that a step is a ratio; shares and what may be 0
(divergences) as they are.

With an anchor, a reference arm of the same run, device and workload, each point is the arm over its anchor: what the
machine does to both in that session (heat, a neighbour, another clock) is in neither. Repeat i of both is a pair, if
both are of one sitting.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from results.history.changes import MOST_POINTS, Levels, find_levels
from results.history.points import CellPoint, Figure, RunPoint
from results.history.rests import changed_rests, known_rests
from results.history.settings import changed_settings
from results.units import format_number, signed

MOST_PERCENT = 1000
"""Changes above it are told as times."""


class Point(NamedTuple):
    """x: what a series is made of. error: its standard error, as the run itself tells it. anchor: of the same run."""

    run: RunPoint
    cell: CellPoint
    figure: Figure
    x: float
    error: float
    anchor: CellPoint | None = None


class Lacking(NamedTuple):
    """A run that has the cell, and not this figure of it: it tells what the arm was set to. anchor: of the same run."""

    run: RunPoint
    cell: CellPoint
    anchor: CellPoint | None


@dataclass(frozen=True)
class Series:
    """points: the oldest first, at most `MOST_POINTS`. is_log: whether x is a logarithm. Without points: why."""

    points: tuple[Point, ...]
    is_log: bool
    is_anchored: bool = False
    is_share: bool = True
    """Of what is no logarithm: a share, whose differences are points."""
    lacking: tuple[Lacking, ...] = ()

    def levels(self) -> Levels:
        return find_levels([p.x for p in self.points], [p.error for p in self.points])

    def shown(self, size: float) -> str:
        """A difference of x: "+1.2 %", of much more than the whole "230,000 times", of scores "-0.5 points"."""
        if not (self.is_log or self.is_share):
            return signed(format_number(size))
        number = 100 * self.size(size)
        if self.is_log and number >= MOST_PERCENT:
            return f"{float(f'{1 + number / 100:.2g}'):,.0f} times"
        return f"{number:+.{1 if abs(number) >= 1 else 2}f} {'%' if self.is_log else 'points'}"

    def settings_changed(self, after: int = 0) -> list[tuple[RunPoint, str]]:
        """Runs behind this point whose arm, or whose anchor, was set otherwise than in the one before, or rests on
        other files and variables: of a run that did not keep them nothing is known."""
        found: list[tuple[RunPoint, str]] = []
        if not self.points:
            return found
        one, *others = self._runs_since(self.points[after])
        rests: Mapping[str, str] = one.run.rests
        before, base = one.cell, one.anchor
        for other in others:
            words = changed_settings(before.settings, other.cell.settings)
            rested = changed_rests(rests, other.run.rests, other.cell.model, other.cell.device)
            if base is not None and other.anchor is not None:
                words += [f"the anchor's {word}" for word in changed_settings(base.settings, other.anchor.settings)]
                rested += changed_rests(rests, other.run.rests, other.anchor.model, other.anchor.device)
            words += [f"the run's {word}" for word in dict.fromkeys(rested)]
            rests = known_rests(rests, other.run.rests)
            before, base = other.cell, other.anchor or base
            if words:
                found.append((other.run, ", ".join(words)))
        return found

    def _runs_since(self, first: Point) -> list[Point | Lacking]:
        """The oldest first, with those that lack the figure: an arm was set otherwise in one of them, too."""
        runs: list[Point | Lacking] = [*self.points, *self.lacking]
        runs.sort(key=lambda one: (one.run.created_at, one.run.folder))
        return runs[runs.index(first) :]

    def counts_from(self, share: float, level: float) -> float:
        """From where on a difference of x counts, that is asked as a share: of the level, or in points of a share."""
        return share if self.is_log or self.is_share else share * abs(level)

    def size(self, x: float) -> float:
        """A difference of x as a share, of scores as it is."""
        return math.expm1(x) if self.is_log else x

    def value(self, x: float) -> float:
        return math.exp(x) if self.is_log else x


def series_of(found: Iterable[tuple[RunPoint, CellPoint, Figure]]) -> Series:
    """Of figures that are alike, the oldest run first."""
    kept = list(found)[-MOST_POINTS:]
    is_log = all(not figure.is_share and min(figure.values.values()) > 0 for _, _, figure in kept)
    points = tuple(_of_few_repeats([Point(*one, *_plain(one[2], is_log)) for one in kept]))
    return Series(points, is_log, is_share=all(figure.is_share for _, _, figure in kept))


def anchored(found: Iterable[tuple[RunPoint, CellPoint, Figure, CellPoint, Figure]]) -> Series:
    """The last two of each: the anchor and its figure in the same run."""
    points = []
    for run, cell, figure, anchor, base in list(found)[-MOST_POINTS:]:
        if min(*figure.values.values(), *base.values.values()) > 0:
            points.append(Point(run, cell, figure, *_over(figure, base), anchor))
    return Series(tuple(_of_few_repeats(points)), is_log=True, is_anchored=True)


def _of_few_repeats(points: Sequence[Point]) -> Iterator[Point]:
    """A run of fewer repeats than most, as one that failed for a part, has no error bar or one that is small by chance,
    and would weigh most: it has at least that which the repeats of all runs tell of so few."""
    most = np.median([point.figure.n for point in points]) if points else 0
    degrees = sum(point.figure.n - 1 for point in points)
    of_one2 = sum((p.figure.n - 1) * p.figure.n * p.error**2 for p in points) / degrees if degrees else 0.0
    for point in points:
        n = point.figure.n
        yield point._replace(error=max(point.error, math.sqrt(of_one2 / n))) if n < most else point


def _plain(figure: Figure, is_log: bool) -> tuple[float, float]:
    error = figure.standard_error or 0.0
    if not is_log:
        return figure.mean, math.hypot(error, figure.meter_error * figure.mean)
    return math.log(figure.mean), math.hypot(error / figure.mean, figure.meter_error)


def of_one_sitting(cell: CellPoint, figure: Figure, anchor: CellPoint, base: Figure) -> tuple[Figure, Figure] | None:
    """Both figures, without repeats of which one is of another sitting than the other: what changed meanwhile is in
    their ratio. Without a pair what both have of one sitting, that of most repeats. None where nothing is left."""
    if not cell.sittings and not anchor.sittings:  # most runs, whose figures are many
        return figure, base
    both = figure.values.keys() & base.values.keys()
    together = {i for i in both if cell.sittings.get(i, 0) == anchor.sittings.get(i, 0)}
    if together == both and len(both) >= 2:
        return figure, base
    if together:
        return _of_repeats(figure, together), _of_repeats(base, together)
    own, its = _by_sitting(cell, figure), _by_sitting(anchor, base)
    shared = sorted(own.keys() & its.keys())
    if not shared:
        return None
    most = max(shared, key=lambda one: min(len(own[one]), len(its[one])))
    return _of_repeats(figure, own[most]), _of_repeats(base, its[most])


def _by_sitting(cell: CellPoint, figure: Figure) -> dict[int, set[int]]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for repeat in figure.values:
        found[cell.sittings.get(repeat, 0)].add(repeat)
    return found


def _of_repeats(figure: Figure, repeats: Set[int]) -> Figure:
    """A new one: a copy would keep the mean of all that was worked out before."""
    values = {i: value for i, value in figure.values.items() if i in repeats}
    return Figure(**figure.model_dump(exclude={"values"}), values=values)


def _over(figure: Figure, anchor: Figure) -> tuple[float, float]:
    both = sorted(figure.values.keys() & anchor.values.keys())
    meters = math.hypot(figure.meter_error, anchor.meter_error)
    if len(both) < 2:
        (x, error), (base, base_error) = _plain(figure, True), _plain(anchor, True)
        return x - base, math.hypot(error, base_error)
    pairs = np.log([figure.values[i] / anchor.values[i] for i in both])
    error = float(pairs.std(ddof=1)) / math.sqrt(len(both))
    return float(pairs.mean()), math.hypot(error, meters)


def same_way(figure: Figure, others: Sequence[Figure]) -> Figure | None:
    """Of several figures of one metric (methods, meters) the one that came to be alike, else the first."""
    way = figure.method, figure.meter, figure.unit
    alike = [other for other in others if (other.method, other.meter, other.unit) == way]
    return next(iter(alike or others), None)
