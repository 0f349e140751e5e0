"""Accuracy beside energy: for each arm what it scores and costs, and how that differs from the reference arm.

The form of Table 3 of 000 and Table 1 of 003, in one tidy frame: a row per cell and quantity. Accuracy is compared
sample by sample with the arm that `Cell.reference_id` names, on whatever device that ran; time and energy repeat by
repeat, and only where both arms were read on the same device in the same way (`results.compare`) and computed on the
same road (decision 0025). What is modelled has a change and no p, for repeats do not show a model's error. Drop and pad
rates are what the arm's dispatch plans did, and are compared with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from results.binary_scores import binary_metrics
from results.cells import answering, trials_of, usable
from results.compare import (
    Difference,
    UnlikeError,
    compare_exponentials,
    compare_scores,
    compare_trials,
    mean_score,
    sample_logarithms,
    sample_scores,
)
from results.metrics import FROM_ARRIVAL, TECHNIQUE_METRICS
from results.records import OF_A_RECORDING, Cell, Phase
from results.roads import comparable_roads, unlike_roads
from results.runs import RunData
from results.tables import accuracy_rows
from results.units import format_error

COLUMNS = (
    "run_id", "cell", "workload", "device", "engine", "technique", "model", "quantity", "phase", "unit", "method",
    "meter", "n", "n_of", "value", "standard_error", "ci_low", "ci_high", "meter_uncertainty_percent", "reference",
    "change", "change_low", "change_high", "change_percent", "p", "test", "n_pairs", "n_changed", "n_answers",
    "n_answers_changed", "reason", "change_reason",
)  # fmt: skip
COSTS: tuple[tuple[str, Phase], ...] = (("energy_per_token", "all"), ("ttft", "prefill"), ("e2e", "all"))
"""Metrics that are put beside the accuracy, with their phase; of requests that arrive, as they count from then."""
IS_REFERENCE = "the reference itself"
NO_REFERENCE = "no arm of the plan is lossless in full precision; add one with technique = oracle or dropless"
NO_SAMPLE_SCORES = "no sample has a score of its own, so nothing can be paired"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Change:
    """Of a figure against the reference's. `difference` is None where there is none to give, then reason says why."""

    difference: Difference | None
    percent: float | None = None
    reason: str | None = None


def accuracy_energy(run: RunData, frame: pd.DataFrame) -> pd.DataFrame:
    """frame: the run's tidy table. One row per cell and quantity; columns `COLUMNS`."""
    comparison = Comparison(run, frame)
    rows = [row for cell in run.cells for row in comparison.rows(cell)]
    table = pd.DataFrame(rows, columns=list(COLUMNS))
    text = ("phase", "meter", "reference", "test", "reason", "change_reason")
    counts = ("n", "n_pairs", "n_changed", "n_answers", "n_answers_changed")
    numbers = (
        "value", "standard_error", "ci_low", "ci_high", "meter_uncertainty_percent", "change", "change_low",
        "change_high", "change_percent", "p",
    )  # fmt: skip
    for column in text:
        table[column] = table[column].astype(object).where(table[column].notna(), None)
    return table.astype(dict.fromkeys(numbers, "float64") | dict.fromkeys(counts, "Int64"))


class Comparison:
    """A run's figures with their changes against the reference arms."""

    def __init__(self, run: RunData, frame: pd.DataFrame) -> None:
        self._cells = {cell.cell_id: cell for cell in run.cells}
        self._trials = {cell_id: usable(trials) for cell_id, trials in trials_of(run).items()}
        self._answering = {cell_id: answering(trials) for cell_id, trials in trials_of(run).items()}
        self._rows: dict[str, list[dict[str, Any]]] = {cell.cell_id: [] for cell in run.cells}
        self._binary = binary_metrics(run)
        self._scores = {m for m in accuracy_rows(frame)["metric"] if not m.endswith("_stderr")}
        for record in frame.to_dict("records"):
            self._rows[record["cell"]].append({str(k): v for k, v in record.items()})

    def rows(self, cell: Cell) -> Iterator[dict[str, Any]]:
        own = self._rows[cell.cell_id]
        seen = {row["metric"] for row in own}
        wanted = {(late if (late := FROM_ARRIVAL.get(m)) in seen else m, phase) for m, phase in COSTS}
        for row in own:
            metric = row["metric"]
            is_score = metric in self._scores
            if is_score or metric in dict(TECHNIQUE_METRICS) or (metric, row["phase"]) in wanted:
                yield self._row(cell, row, is_score)

    def _row(self, cell: Cell, row: Row, is_score: bool) -> dict[str, Any]:
        found = self.change(cell, row, is_score)
        reference = self._cells.get(cell.reference_id or "")
        difference = found.difference
        return {
            "run_id": row["run_id"],
            "cell": cell.cell_id,
            "workload": row["workload"],
            "device": cell.device,
            "engine": cell.engine,
            "technique": row["technique"],
            "model": row["model"],
            "quantity": row["metric"],
            "phase": row["phase"],
            "unit": row["unit"],
            "method": row["method"],
            "meter": row["meter"],
            "n": row["n"],
            "n_of": "samples" if is_score else "trials",
            "value": row["mean"],
            "standard_error": self._mean_of(cell, f"{row['metric']}_stderr") if is_score else None,
            "ci_low": row["ci_low"],
            "ci_high": row["ci_high"],
            "meter_uncertainty_percent": self._uncertainty(cell, row) if row["meter"] else None,
            "reference": reference.engine if reference is not None else None,
            "change": difference.mean if difference else None,
            "change_low": difference.low if difference else None,
            "change_high": difference.high if difference else None,
            "change_percent": found.percent,
            "p": difference.p if difference else None,
            "test": difference.test if difference else None,
            "n_pairs": difference.n if difference else None,
            "n_changed": difference.n_changed if difference else None,
            "n_answers": difference.n_answers if difference else None,
            "n_answers_changed": difference.n_answers_changed if difference else None,
            "reason": row["reason"],
            "change_reason": found.reason or (difference.reason if difference else None),
        }

    def change(self, cell: Cell, row: Row, is_score: bool) -> Change:
        """Of one row of the tidy table."""
        if row["metric"] in dict(TECHNIQUE_METRICS):
            return Change(None)
        reference = self._cells.get(cell.reference_id or "")
        if reference is None:
            return Change(None, reason=NO_REFERENCE)
        if reference.cell_id == cell.cell_id:
            return Change(None, reason=IS_REFERENCE)
        other = self._same_figure(reference, row, is_score)
        if other is None or pd.isna(row["mean"]) or pd.isna(other["mean"]):
            return Change(None, reason=f"no figure of both arms that was obtained in the same way: {reference.engine}")
        if not is_score and (unlike := self._other_road(cell, reference, row["phase"])) is not None:
            return Change(None, reason=f"{unlike}: that would be in a change too, so there is none")
        try:
            difference = self._difference(cell, reference, row, other, is_score)
        except UnlikeError as error:
            return Change(None, reason=f"not compared with {reference.engine}: {error}")
        if row["method"] in ("modelled", "replayed") and difference.p is not None:
            why = OF_A_RECORDING if row["method"] == "replayed" else self._of_a_model(cell, row)
            difference = replace(difference, p=None, test=None, reason=why)
        base = other["mean"] if difference.base is None else difference.base
        percent = 100 * difference.mean / abs(base) if base else None
        return Change(difference, percent)

    def _other_road(self, cell: Cell, reference: Cell, phase: Phase) -> str | None:
        """How seconds and joules of the two were computed in unlike ways; None where they were not."""
        own, its = (comparable_roads(self._trials[one.cell_id], phase) for one in (cell, reference))
        return unlike_roads(own, its, reference.engine)

    def _of_a_model(self, cell: Cell, row: Row) -> str:
        """Why a change that the repeats would find certain has no p."""
        percent = self._uncertainty(cell, row) if row["meter"] else None
        error = "no error is stated" if percent is None else format_error(percent / 100)
        return (
            f"modelled, {error}: the interval holds the scatter of the repeats and not the error of the model, so there"
            " is no p"
        )

    def _difference(self, cell: Cell, reference: Cell, row: Row, other: Row, is_score: bool) -> Difference:
        kept = self._answering if is_score else self._trials
        before, after = kept[reference.cell_id], kept[cell.cell_id]
        if not is_score:
            return compare_trials(before, after, row["metric"], row["phase"], row["meter"])
        before_by_sample, after_by_sample = (sample_scores(trials, row["metric"]) for trials in (before, after))
        if not before_by_sample and not after_by_sample:
            logarithms = [
                sample_logarithms(trials, row["metric"], r["mean"]) for trials, r in ((before, other), (after, row))
            ]
            if all(logarithms):
                return compare_exponentials(*logarithms)
            return _unpaired(row, other, NO_SAMPLE_SCORES)
        found = compare_scores(before_by_sample, after_by_sample, row["metric"] in self._binary[cell.workload])
        means = (mean_score(own) for own in (before_by_sample, after_by_sample))
        if not all(math.isclose(m, r["mean"], rel_tol=1e-6) for m, r in zip(means, (other, row), strict=True)):
            return _unpaired(row, other, f"{row['metric']} is no mean over samples: their differences do not test it")
        return found

    def _same_figure(self, reference: Cell, row: Row, is_score: bool) -> Row | None:
        """The reference's row of the same metric; for a cost only of the same device, method and meter."""
        keys = ("metric",) if is_score else ("metric", "phase", "device", "method", "meter")
        wanted = [row[key] for key in keys]
        return next((r for r in self._rows[reference.cell_id] if [r[key] for key in keys] == wanted), None)

    def _mean_of(self, cell: Cell, metric: str) -> float | None:
        found = (r["mean"] for r in self._rows[cell.cell_id] if r["metric"] == metric)
        return next(found, None)

    def _uncertainty(self, cell: Cell, row: Row) -> float | None:
        keys = ("phase", "method", "meter")
        same = (r for r in self._rows[cell.cell_id] if r["metric"] == "energy_uncertainty")
        return next((r["mean"] for r in same if all(r[key] == row[key] for key in keys)), None)


def _unpaired(row: Row, other: Row, reason: str) -> Difference:
    """The difference of two aggregates that nothing tests."""
    return Difference(0, row["mean"] - other["mean"], None, None, None, None, 0, reason)
