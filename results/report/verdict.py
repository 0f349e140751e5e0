"""The verdict in words: which arm is fastest, uses the fewest joules, is most accurate; or that the data cannot tell.

Arms are ranked only against arms of the same workload, device, method and meter. Where they were asked the same, pairs
decide (`results.compare`): repeat i of both arms for time and energy, the same sample for a score; one arm is named the
winner where the 95 % interval of its difference to each other arm leaves out 0, and the test agrees. Where there are no
pairs, its own interval must overlap no other's, which is stricter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import pandas as pd

from results.asked import hashes_by_cell
from results.cells import trials_of, usable
from results.compare import Difference, UnlikeError, compare_scores, compare_trials, sample_scores
from results.records import RunData, Trial
from results.report.arms import Arm
from results.units import format_interval, format_mean, si_scale
from results.zero_one import zero_one_metrics

_QUESTIONS = (("Fastest", "e2e"), ("Fewest joules", "energy_per_token"))
_PER_WINDOW = {"energy_per_token": "energy"}
"""Where some arms compute fewer tokens for the same requests, a joule per computed token would rank against them."""


@dataclass(frozen=True)
class Figure:
    """An arm's mean with its interval, None where there is no interval or no figure. cell: which of the run's."""

    cell: str
    arm: Arm
    mean: float | None
    low: float | None
    high: float | None
    unit: str


@dataclass(frozen=True)
class Verdict:
    """Answer to one question for one workload on one device. `decided` is True only for a single winner."""

    workload: str
    device: str
    question: str
    method: str
    answer: str
    decided: bool


Paired = Callable[[Figure, Figure], Difference | None]
"""The difference of two arms over what both were asked; None where nothing pairs."""


def verdicts(run: RunData, frame: pd.DataFrame, arms: dict[str, Arm]) -> list[Verdict]:
    """All verdicts of a run's tidy table, by workload and device."""
    cells = {cell.cell_id: cell for cell in run.cells}
    trials = {cell_id: usable(own) for cell_id, own in trials_of(run).items()}
    rising = _rising_is_better(run)
    hashes, zero_one = hashes_by_cell(run), zero_one_metrics(run)
    found = []
    for (workload, device), group in frame.groupby(["workload", "device"], sort=False):
        rows = [{str(k): v for k, v in row.items()} for row in group.to_dict("records")]
        alike = len({h for row in rows for h in hashes[row["cell"]]}) <= 1
        reuse = {bool(cells[row["cell"]].engine_parameters.get("reuse_prefix")) for row in rows}
        for question, per_token in _QUESTIONS:
            metric = per_token if len(reuse) == 1 else _PER_WINDOW.get(per_token, per_token)
            asked = [r for r in rows if r["metric"] == metric and r["phase"] == "all"]
            for (method, meter), figures in _comparable(asked, arms):
                paired = partial(_paired_repeats, trials, metric, meter or None)
                where = (str(workload), str(device), question, _way_words(method, meter))
                found.append(_verdict(*where, figures, False, paired, alike))
        scores = [r for r in rows if r["metric"] in rising]
        if scores:
            main = [r for r in scores if r["metric"] == scores[0]["metric"]]
            question = f"Most accurate ({scores[0]['metric']})"
            notes = {cells[r["cell"]].model_note for r in main}
            if notes == {"random weights"}:
                answer = "not ranked: the weights are random, scores say nothing about the method"
                found.append(Verdict(str(workload), str(device), question, "measured", answer, decided=False))
                continue
            for (method, meter), figures in _comparable(main, arms):
                paired = partial(
                    _paired_samples, trials, str(scores[0]["metric"]), zero_one[cells[main[0]["cell"]].workload]
                )
                where = (str(workload), str(device), question, _way_words(method, meter))
                found.append(_verdict(*where, figures, rising[scores[0]["metric"]], paired, alike))
    return found


def _unpaired(best: Figure, other: Figure) -> None:
    return None


def ranked(
    figures: Sequence[Figure], rising: bool, modelled: bool = False, paired: Paired = _unpaired
) -> tuple[str, bool]:
    """(answer in words, decided). rising: more is better. modelled: figures that repeats could not change."""
    known = [f for f in figures if f.mean is not None]
    missing = [f.arm.letter for f in figures if f.mean is None]
    tail = f"; no figure for {', '.join(missing)}" if missing else ""
    if not known:
        return "no arm has a figure", False
    best = (max if rising else min)(known, key=lambda f: f.mean or 0.0)
    if len(known) == 1:
        return f"only {best.arm.letter} has a figure: {_shown(best)}{tail}", False
    unsure = [f for f in known if f.low is None or f.high is None]
    if modelled and len(unsure) == len(known):
        return f"{best.arm.name}, {_shown(best)}; modelled once, so without an interval{tail}", False
    if unsure:
        return f"no interval for {', '.join(f.arm.letter for f in unsure)}: more repeats are needed{tail}", False
    differences = {f.cell: paired(best, f) for f in known if f is not best}
    rivals = [f for f in known if f is not best and not _differ(best, f, differences[f.cell])]
    if rivals:
        names = ", ".join(sorted(f.arm.letter for f in (best, *rivals)))
        all_paired = all(_is_told(differences[f.cell]) for f in rivals)
        why = "their paired differences may be 0" if all_paired else "intervals overlap"
        return f"no clear difference between {names} ({why}){tail}", False
    return f"{best.arm.name}, {_shown(best)}{tail}", True


def _is_told(difference: Difference | None) -> bool:
    return difference is not None and difference.low is not None


def _differ(best: Figure, other: Figure, difference: Difference | None) -> bool:
    """Whether pairs set them apart; where there are none, whether their intervals do."""
    if difference is not None and _is_told(difference):
        return difference.is_clear
    return not _overlap(best, other)


def _paired_repeats(
    trials: dict[str, list[Trial]], metric: str, meter: str | None, best: Figure, other: Figure
) -> Difference | None:
    try:
        return compare_trials(trials[best.cell], trials[other.cell], metric, "all", meter)
    except UnlikeError:
        return None


def _paired_samples(
    trials: dict[str, list[Trial]], metric: str, zero_one: frozenset[str], best: Figure, other: Figure
) -> Difference | None:
    first, second = (sample_scores(trials[f.cell], metric) for f in (best, other))
    try:
        return compare_scores(first, second, metric in zero_one)
    except UnlikeError:
        return None


def _verdict(
    workload: str,
    device: str,
    question: str,
    method: str,
    figures: Sequence[Figure],
    rising: bool,
    paired: Paired,
    alike: bool,
) -> Verdict:
    """alike: whether the arms were asked the same. Figures of unlike questions are ranked, and that is said."""
    answer, decided = ranked(figures, rising, method.startswith("modelled"), paired)
    if not alike and sum(f.mean is not None for f in figures) > 1:
        answer += "; the arms were not asked the same requests"
    return Verdict(workload, device, question, method, answer, decided)


def _comparable(
    rows: Sequence[dict[str, object]], arms: dict[str, Arm]
) -> Iterator[tuple[tuple[str, str], list[Figure]]]:
    """Figures that may be ranked together: one method and meter. Arms without a figure go along with every group."""
    missing = [r for r in rows if r["method"] == "missing"]
    known = sorted((r for r in rows if r["method"] != "missing"), key=_way)
    if not known:
        yield ("missing", ""), [_figure(r, arms) for r in missing]
    for way, group in groupby(known, key=_way):
        named = {str(r["cell"]): _figure(r, arms) for r in missing}
        named |= {str(r["cell"]): _figure(r, arms) for r in group}
        yield way, list(named.values())


def _way(row: dict[str, object]) -> tuple[str, str]:
    return str(row["method"]), str(row["meter"] or "")


def _way_words(method: str, meter: str) -> str:
    return f"{method}, {meter}" if meter else method


def _figure(row: dict[str, object], arms: dict[str, Arm]) -> Figure:
    mean, low, high = (_number(row[key]) for key in ("mean", "ci_low", "ci_high"))
    return Figure(str(row["cell"]), arms[str(row["cell"])], mean, low, high, str(row["unit"]))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, float) and value == value else None


def _overlap(a: Figure, b: Figure) -> bool:
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return True
    return a.low <= b.high and b.low <= a.high


def _shown(figure: Figure) -> str:
    mean = figure.mean or 0.0
    scale, unit = si_scale(abs(mean), figure.unit)
    if figure.low is None or figure.high is None:
        return f"{format_mean(mean / scale, 0.0, 0.0)} {unit}".rstrip()
    low, high = figure.low / scale, figure.high / scale
    return f"{format_mean(mean / scale, low, high)} {unit} {format_interval(low, high)}".replace("  ", " ")


def _rising_is_better(run: RunData) -> dict[str, bool]:
    return {s.metric: s.higher_is_better for t in run.trials for s in t.scores if s.sample_id is None}
