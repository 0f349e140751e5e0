"""Two runs, arms or machines, figure by figure: what is compared with what, and what was refused and why.

How surely a figure changed is judged in `results.history.compared`. What drifts between two sessions is in no interval
of two runs: `joulebench regress` knows it, from more runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from results.binary_scores import binary_metrics
from results.cells import answering, trials_of, usable
from results.compare import (
    LOGARITHMS,
    SampleScores,
    UnlikeError,
    compare_exponentials,
    compare_scores,
    sample_logarithms,
    sample_scores,
)
from results.history.compared import RATE, Compared, controlled, model_error, of_groups, of_pairs, with_difference
from results.history.points import CellPoint, Figure, cell_point, trials_told
from results.history.rests import changed_rests, rests_of
from results.history.series import same_way
from results.history.settings import changed_settings, engine_changes, settings_of
from results.history.unlike import Unlike, What, unlike_cells, unlike_environments, unlike_figures
from results.records import Cell
from results.runs import OWN_CODE, RunData, RunInfo
from results.sittings import APART, Sittings, pairs_that_count, sittings_of, told_apart, told_in_turn
from results.trials import Trial
from results.units import number_of


class CompareError(Exception):
    """What was named is not there, or nothing is common: what, the value, the remedy."""


@dataclass(frozen=True)
class RunTold:
    """What is compared of a run, without its trials. By cell id: points; scores of each metric by sample, or why they
    have none; mean seconds of each request. binary: by workload, scores that are right or wrong."""

    info: RunInfo
    cells: tuple[Cell, ...]
    points: Mapping[str, CellPoint]
    scores: Mapping[str, Mapping[str, SampleScores | str]]
    times_s: Mapping[str, Mapping[str, float]]
    binary: Mapping[str, frozenset[str]]
    rests: Mapping[str, str]
    remarks: tuple[str, ...]
    sittings: Sittings


def told_of(run: RunData) -> RunTold:
    trials = trials_of(run)
    points = {cell.cell_id: cell_point(cell, trials[cell.cell_id]) for cell in run.cells}
    return RunTold(
        info=run.info,
        cells=run.cells,
        points=points,
        scores={cell_id: _scores(points[cell_id], answering(own)) for cell_id, own in trials.items()},
        times_s={cell_id: _times(usable(own)) for cell_id, own in trials.items()},
        binary=binary_metrics(run),
        rests=rests_of(run),
        remarks=run.remarks,
        sittings=sittings_of(run.trials),
    )


def _scores(point: CellPoint, trials: Sequence[Trial]) -> dict[str, SampleScores | str]:
    found: dict[str, SampleScores | str] = {}
    for figure in point.figures:
        if figure.kind == "accuracy":
            try:
                own = sample_scores(trials, figure.metric)
                found[figure.metric] = own or sample_logarithms(trials, figure.metric, figure.mean)
            except UnlikeError as error:
                found[figure.metric] = str(error)
    return found


class Side(NamedTuple):
    """One side: a run, or an arm or a device of it. name: as it was given."""

    name: str
    run: RunTold
    arm: str | None = None
    device: str | None = None

    @property
    def cells(self) -> list[Cell]:
        return [
            cell
            for cell in self.run.cells
            if self.arm in (None, cell.engine, cell.label) and self.device in (None, cell.device)
        ]


@dataclass(frozen=True)
class Comparison:
    first: Side
    second: Side
    rows: tuple[Compared, ...]
    notes: tuple[str, ...]

    @cached_property
    def n_tested(self) -> int:
        return sum(row.p is not None for row in self.rows)

    @property
    def has_worse(self) -> bool:
        return any(row.verdict == "worse" for row in self.rows)


class Pair(NamedTuple):
    first: Cell
    second: Cell


def compare(first: Side, second: Side, allowed: frozenset[What], least: float = 0.0) -> Comparison:
    """least: a smaller change is not certain, as a share. Raises `CompareError`."""
    pairs = _pairs(first, second)
    rows = [row for pair in pairs for row in _CellPair(first, second, pair, allowed).rows()]
    notes = tuple(_notes(first, second, rows, pairs))
    return Comparison(first, second, tuple(controlled(rows, least)), notes)


def _pairs(first: Side, second: Side) -> list[Pair]:
    """Cells of the same workload; of the same arm, unless two arms were named; of the same device, unless each side
    has one only."""
    sides = first.cells, second.cells
    for side, cells in zip((first, second), sides, strict=True):
        if not cells:
            arms = ", ".join(dict.fromkeys(cell.engine for cell in side.run.cells))
            devices = ", ".join(dict.fromkeys(cell.device for cell in side.run.cells))
            raise CompareError(f"{side.name}: no cell is so; its arms are {arms}; its devices {devices}")
    by_arm = first.arm is None or second.arm is None
    by_device = any(len({cell.device for cell in cells}) > 1 for cells in sides)
    by_model = any(len({(c.engine, c.workload, c.device) for c in cells}) < len(cells) for cells in sides)

    def key(cell: Cell) -> tuple[str, ...]:
        return (
            cell.workload,
            cell.engine if by_arm else "",
            cell.device if by_device else "",
            cell.model if by_model else "",
        )

    others = {key(cell): cell for cell in sides[1]}
    pairs = [Pair(cell, others[key(cell)]) for cell in sides[0] if key(cell) in others]
    if first.run.info.run_id == second.run.info.run_id:
        pairs = [pair for pair in pairs if pair.first.cell_id != pair.second.cell_id]
        if not pairs:
            both = f"{first.name} and {second.name}"
            raise CompareError(f"{both} have only the same cells in common; name two runs, arms or devices")
    if not pairs:
        raise CompareError(
            f"{first.name} and {second.name} have no cell in common: the one has {_has(sides[0])}; the other has"
            f" {_has(sides[1])}; name arms as"
            " RUN:ARM, machines as RUN@DEVICE"
        )
    return pairs


def _has(cells: Sequence[Cell]) -> str:
    told = [f"{cell.engine} · {cell.workload} · {cell.device}" for cell in cells[:2]]
    return ", ".join(told) + (f" and {len(cells) - 2} more" if len(cells) > 2 else "")


def _notes(first: Side, second: Side, rows: Sequence[Compared], pairs: Sequence[Pair]) -> Iterator[str]:
    for number, side in (
        (len({p.first.cell_id for p in pairs}), first),
        (len({p.second.cell_id for p in pairs}), second),
    ):
        if number < len(side.cells):
            n = len(side.cells) - number
            like = "has none like it" if n == 1 else "have none like them"
            yield f"{number_of(n, 'cell')} of {side.name} {like} on the other side: left out."
    yield from dict.fromkeys(note for pair in pairs if (note := _settings_note(pair)))
    yield from _rests_notes(first.run, second.run, pairs)
    for side, ids in (
        (first, dict.fromkeys(pair.first.cell_id for pair in pairs)),
        (second, dict.fromkeys(pair.second.cell_id for pair in pairs)),
    ):
        remarks = (*side.run.remarks, *trials_told([side.run.points[cell_id] for cell_id in ids]))
        yield from (f"{side.name}: {remark}" for remark in remarks)
    if first.run.info.run_id == second.run.info.run_id:
        cells = list({cell.cell_id: cell for pair in pairs for cell in pair}.values())
        yield from told_apart(cells, first.run.sittings)
        yield from told_in_turn(first.run.info.plan, cells, first.run.sittings)
    yield from _alone(first, second, pairs)
    methods = {f.method for row in rows for f in (row.first, row.second) if f is not None and row.verdict != "refused"}
    if "modelled" in methods:
        yield "Modelled figures are a model's, not a meter's or a clock's; no difference within its error is certain."
    if first.run.info.run_id != second.run.info.run_id:
        yield (
            "Intervals are from the trials within each run. What drifts between two sessions is not in them:"
            " `joulebench regress` judges that from more runs."
        )
    if any(_turns(row) for row in rows):
        yield (
            "A and B are means of trials, and a change is that of their geometric means, which single slow trials move"
            " less. Where trials scatter much one can rise while the other falls."
        )
    yield f"Certain: p < {RATE:.2g} by Benjamini and Hochberg over all tested figures, and an interval without 0."
    if any(pair.first.device != pair.second.device for pair in pairs):
        yield "Of two machines: a difference is of machine, software and arm together."


def _settings_note(pair: Pair) -> str | None:
    """An arm of the same name may have other weights or other arithmetic in the other run."""
    # Two arms have two techniques on purpose.
    differ = changed_settings if pair.first.engine == pair.second.engine else engine_changes
    found = differ(settings_of(pair.first), settings_of(pair.second))
    if not found:
        return None
    arms = dict.fromkeys((pair.first.engine, pair.second.engine))
    return f"{' → '.join(arms)}: the plan's settings differ: {', '.join(found)}."


def _alone(first: Side, second: Side, pairs: Sequence[Pair]) -> Iterator[str]:
    """Rows are of the figures of the first side: what the second alone has stands in none."""
    found: dict[str, None] = {}
    for pair in pairs:
        own = first.run.points[pair.first.cell_id].by_key
        found |= {f.name: None for f in second.run.points[pair.second.cell_id].figures if f.key not in own}
    if found:
        yield f"{second.name} alone has {', '.join(found)}: nothing to compare with."


def _rests_notes(first: RunTold, second: RunTold, pairs: Sequence[Pair]) -> Iterator[str]:
    """A checkpoint or a sheet may have been replaced under its name, and the protocol may be another."""
    found = dict.fromkeys(
        word for _, cell in pairs for word in changed_rests(first.rests, second.rests, cell.model, cell.device)
    )
    if found:
        yield f"Files, variables, clock rules or protocol of the two runs differ: {', '.join(found)}."
    infos = first.info, second.info
    codes = [{i.value for i in info.inputs if i.name == OWN_CODE} for info in infos]
    versions = {environment.joulebench for info in infos for environment in info.environments.values()}
    if all(codes) and codes[0] != codes[1] and len(versions) == 1:
        yield f"The code of joulebench differs, though both call it {versions.pop()}."


def _turns(row: Compared) -> bool:
    """Whether A and B say the other direction than the change."""
    if row.second is None or row.change is None or row.verdict == "refused":
        return False
    return (row.second.mean - row.first.mean) * row.change < 0


class _CellPair:
    """All figures of one pair of cells."""

    def __init__(self, first: Side, second: Side, pair: Pair, allowed: frozenset[What]) -> None:
        self._runs, self._ids, self._allowed = (
            (first.run, second.run),
            (pair.first.cell_id, pair.second.cell_id),
            allowed,
        )
        self._points = first.run.points[pair.first.cell_id], second.run.points[pair.second.cell_id]
        self._shares = first.run.binary[pair.first.workload] & second.run.binary[pair.second.workload]
        self._same_run = first.run.info.run_id == second.run.info.run_id
        self._same_device = pair.first.device == pair.second.device
        environments = (
            first.run.info.environments.get(pair.first.device),
            second.run.info.environments.get(pair.second.device),
        )
        self._unlike = [*unlike_environments(*environments), *unlike_cells(*self._points)]
        self._same_machine = self._same_device and not any(one.what == "machines" for one in self._unlike)

    def rows(self) -> Iterator[Compared]:
        one, other = self._points
        for key, figures in one.by_key.items():
            theirs = other.by_key.get(key, [])
            figure = next((own for own in figures if _alike(own, theirs)), figures[0])
            yield self._row(figure, same_way(figure, theirs))

    def _row(self, figure: Figure, other: Figure | None) -> Compared:
        one, two = self._points
        arm = one.engine if one.engine == two.engine else f"{one.engine} → {two.engine}"
        device = one.device if self._same_device else f"{one.device} → {two.device}"
        row = Compared(one.workload, device, arm, figure, other, "not tested")
        if other is None:
            return replace(row, reason="the other side has no such figure")
        unlike = [*self._unlike, *unlike_figures(figure, other, self._points, self._allowed)]
        refused = [u for u in unlike if u.what not in self._allowed and _matters(u, figure)]
        if refused:
            told = "; ".join(f"other {u.what}: {u.words}" for u in refused)
            allowing = " ".join(dict.fromkeys(f"--allow {u.what}" for u in refused))
            return replace(row, verdict="refused", reason=f"{told} ({allowing})")
        row = replace(row, said=tuple(f"unlike {u.what}: {u.words}" for u in unlike if _matters(u, figure)))
        return self._of_scores(row, other) if row.is_score else self._of_costs(row, other)

    def _of_scores(self, row: Compared, other: Figure) -> Compared:
        metric = row.first.metric
        scores = [run.scores[cell_id][metric] for run, cell_id in zip(self._runs, self._ids, strict=True)]
        row = replace(row, change=other.mean - row.first.mean)
        before, after = scores
        if isinstance(before, str) or isinstance(after, str):
            return replace(row, reason=before if isinstance(before, str) else str(after))
        try:
            if metric in LOGARITHMS:
                found = compare_exponentials(before, after)
            else:
                found = compare_scores(before, after, is_binary=metric in self._shares)
        except UnlikeError as error:
            return replace(row, reason=str(error))
        return with_difference(row, found, found.mean, (found.low, found.high))

    def _of_costs(self, row: Compared, other: Figure) -> Compared:
        figure = row.first
        if min(*figure.values.values(), *other.values.values()) <= 0:
            return replace(row, reason="a value is not above 0: no ratio")
        row = replace(row, change=other.mean / figure.mean - 1)
        if figure.metric == "e2e":
            times_s = [run.times_s[cell_id] for run, cell_id in zip(self._runs, self._ids, strict=True)]
            row = replace(row, longer=_share_longer(*times_s))
        meters = self._meter_error(figure, other)
        is_modelled = "modelled" in (figure.method, other.method)
        row = replace(row, model_error=model_error(figure, other) if is_modelled else None)
        both = sorted(figure.values.keys() & other.values.keys())
        if self._same_run and len(both) >= 2:
            own = [[run.sittings.get(cell_id, {})] for run, cell_id in zip(self._runs, self._ids, strict=True)]
            (counted,) = pairs_that_count([both], *own)
            if len(counted) < 2:
                return replace(row, reason=APART)
            return of_pairs(row, [math.log(other.values[i] / figure.values[i]) for i in counted], meters)
        return of_groups(row, other, meters)

    def _meter_error(self, figure: Figure, other: Figure) -> float | None:
        """Relative, that repeats do not narrow; None where a meter states none that would be needed."""
        if figure.kind != "energy" or "modelled" in (figure.method, other.method):
            return 0.0
        if self._same_machine and figure.meter == other.meter and figure.method == other.method:
            return math.hypot(figure.meter_error, other.meter_error)
        if figure.whole_error is None or other.whole_error is None:
            return None
        return math.hypot(figure.whole_error, other.whole_error)


def _alike(figure: Figure, others: Sequence[Figure]) -> bool:
    return any((figure.method, figure.meter, figure.unit) == (o.method, o.meter, o.unit) for o in others)


def _matters(unlike: Unlike, figure: Figure) -> bool:
    """A score is compared on every road; how its seconds came to be is of no matter to it."""
    return figure.kind != "accuracy" or unlike.what not in ("roads", "methods", "meters")


def _share_longer(one: Mapping[str, float], other: Mapping[str, float]) -> float | None:
    """Of the requests that both answered, those whose mean time over trials is longer on the second side."""
    both = one.keys() & other.keys()
    return sum(other[r] > one[r] for r in both) / len(both) if both else None


def _times(trials: Sequence[Trial]) -> Mapping[str, float]:
    found: dict[str, tuple[float, int]] = {}
    for trial in trials:
        for completion in trial.completions:
            total, n = found.get(completion.request_id, (0.0, 0))
            found[completion.request_id] = total + completion.e2e_s, n + 1
    return {request: total / n for request, (total, n) in found.items()}
