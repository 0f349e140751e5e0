"""One wide row per cell, for people: a run's summary, made of its tidy table.

A row has the means of what most readers ask for with their intervals, the methods behind them, and what is missing and
why. What n is stands in `results.tables`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pandas as pd

from results.cells import counters_of, data_sources, distinct, left_out_reason, own_reason, trials_of, usable
from results.counters import COUNTERS
from results.energy import NO_JOULES
from results.metrics import SIZE_METRICS, TECHNIQUE_METRICS, time_words
from results.records import Cell
from results.roads import roads_of
from results.runs import RunData
from results.same_requests import hashes_by_cell
from results.tables import accuracy_rows, frame_of, joined_reasons, tidy
from results.trials import Trial

_WIDE: tuple[tuple[str, str, str | None, float], ...] = (
    ("ttft_ms", "ttft", "prefill", 1e3),
    ("tpot_ms", "tpot", "decode", 1e3),
    ("e2e_ms", "e2e", "all", 1e3),
    ("prefill_token_per_s", "throughput", "prefill", 1),
    ("decode_token_per_s", "throughput", "decode", 1),
    ("prefill_j_per_token", "energy_per_token", "prefill", 1),
    ("decode_j_per_token", "energy_per_token", "decode", 1),
    ("all_j_per_token", "energy_per_token", "all", 1),
    ("net_all_j_per_token", "net_energy_per_token", "all", 1),
    ("j_per_response", "energy_per_response", "all", 1),
    ("mean_power_w", "average_power", "all", 1),
    ("p90_power_w", "power_p90", "all", 1),
    ("parameters", "parameters", None, 1),
    ("weight_bytes", "weight_bytes", None, 1),
    ("peak_memory_bytes", "peak_memory", None, 1),
    ("queueing_ms", "queueing", None, 1e3),
    ("ttft_from_arrival_ms", "ttft_from_arrival", "prefill", 1e3),
    ("e2e_from_arrival_ms", "e2e_from_arrival", "all", 1e3),
    ("utilisation_percent", "utilisation", None, 1),
    *((counter.column, counter.metric, None, 1) for counter in COUNTERS),
)
FIGURES = {column: (metric, phase) for column, metric, phase, _ in _WIDE}
"""Of a tidy table: which row a column is."""
_NO_ROW = {"unit": "", "mean": math.nan, "ci_low": math.nan, "ci_high": math.nan}
"""Of a load metric where requests do not arrive by themselves."""


def summary(run: RunData, frame: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row per cell: means with `_low` and `_high` of their 95 % intervals, methods, and what is missing and why.

    frame: the run's tidy table, where the caller has it already. With several meters the first one is shown.
    """
    frame = tidy(run) if frame is None else frame
    by_cell, of_cell, sources = trials_of(run), rows_of_cells(run, frame), data_sources(run)
    hashes = hashes_by_cell(run)
    rows = [
        _wide_identity(run, cell, sources[cell.workload])
        | {"requests_sha256": " ".join(hashes[cell.cell_id]) or None}
        | {"road": " / ".join(roads_of(by_cell[cell.cell_id])) or None}
        | _wide(by_cell[cell.cell_id], of_cell[cell.cell_id])
        for cell in run.cells
    ]
    columns = list(rows[0]) if rows else []
    text = (
        "model_note",
        "data_source",
        "requests_sha256",
        "road",
        "counters_of",
        "energy_meter",
        "accuracy_metric",
        "reason",
    )
    numbers = [c for c in columns if c.removesuffix("_low").removesuffix("_high") in _WIDE_NAMES]
    return frame_of(rows, columns, text, numbers, ("accuracy_samples",)) if rows else pd.DataFrame()


def rows_of_cells(run: RunData, frame: pd.DataFrame) -> dict[str, list[dict[str, Any]]]:
    """The rows of a tidy table by their cell."""
    found: dict[str, list[dict[str, Any]]] = {cell.cell_id: [] for cell in run.cells}
    for record in frame.to_dict("records"):
        found[record["cell"]].append({str(k): v for k, v in record.items()})
    return found


def missing_reason(
    trials: list[Trial],
    rows: list[dict[str, Any]],
    is_told: Callable[[dict[str, Any], str], bool] = lambda figure, reason: True,
) -> str | None:
    """Which trials of a cell are in none of its figures, and why figures lack values.

    rows: of a tidy table. is_told: whether the reason of a row is wanted.
    """
    good = len(usable(trials))
    left_out = left_out_reason(trials, with_errors=not good) or ""
    # Of a figure that some trials lack, too: `n` counts them.
    lacking = [r for r in rows if r["metric"] in _SAID_IN_SUMMARY and (pd.isna(r["mean"]) or r["n"] < good)]
    found = ((r, own_reason(r["reason"], left_out)) for r in lacking)
    reasons = distinct(reason for r, reason in found if reason is not None and is_told(r, reason))
    energy_row = next(r for r in rows if (r["metric"], r["phase"]) == FIGURES["all_j_per_token"])
    if energy_row["method"] == "relative gauge":
        reasons.append(NO_JOULES)
    return joined_reasons([left_out, *reasons])


def _wide_identity(run: RunData, cell: Cell, source: str | None) -> dict[str, Any]:
    return {
        "run_id": run.info.run_id,
        "cell": cell.cell_id,
        "label": cell.label,
        "device": cell.device,
        "engine": cell.engine,
        "technique": cell.technique,
        "technique_parameters": json.dumps(cell.technique_parameters, sort_keys=True),
        "engine_parameters": json.dumps(cell.engine_parameters, sort_keys=True),
        "placement": cell.placement,
        "model": cell.model,
        "model_note": cell.model_note,
        "workload": cell.workload,
        "data_source": source,
    }


def _wide(trials: list[Trial], rows: list[dict[str, Any]]) -> dict[str, Any]:
    first: dict[tuple[str, str | None], dict[str, Any]] = {}
    for row in rows:
        first.setdefault((row["metric"], row["phase"]), row)
    wide: dict[str, Any] = {
        "n": len(usable(trials)),
        "n_failed": sum(t.has_failed for t in trials),
        "n_marked": sum(t.status == "ok" and bool(t.marks) for t in trials),
        "time_method": time_words(first["e2e", "all"]["method"], first["ttft", "prefill"]["method"]),
        "counters_of": counters_of(trials),
    }
    for column, metric, phase, scale in _WIDE:
        row = first.get((metric, phase), _NO_ROW)
        in_joules = not row["unit"].startswith("gauge unit")
        for suffix, statistic in (("", "mean"), ("_low", "ci_low"), ("_high", "ci_high")):
            wide[column + suffix] = row[statistic] * scale if in_joules else None
    energy_row = first["energy_per_token", "all"]
    wide |= {
        "energy_method": energy_row["method"],
        "energy_meter": energy_row["meter"],
        "energy_uncertainty_percent": first["energy_uncertainty", "all"]["mean"],
    }
    wide |= _wide_accuracy(rows)
    return wide | {"reason": missing_reason(trials, rows)}


_WIDE_NAMES = {column for column, _, _, _ in _WIDE} | {"energy_uncertainty_percent", "accuracy", "accuracy_stderr"}
_ACCURACY = ("accuracy_metric", "accuracy", "accuracy_low", "accuracy_high", "accuracy_stderr", "accuracy_samples")
_SAID_IN_SUMMARY = {metric for _, metric, _, _ in _WIDE} - {
    *dict(TECHNIQUE_METRICS), *dict(SIZE_METRICS), "energy_per_response", "average_power", "power_p90"
}  # fmt: skip


def _wide_accuracy(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The task's first metric; all of them are in the accuracy table."""
    own = accuracy_rows(pd.DataFrame(rows)).to_dict("records") if rows else []
    if not own:
        return dict.fromkeys(_ACCURACY)
    row = own[0]
    stderr = next((r["mean"] for r in own if r["metric"] == f"{row['metric']}_stderr"), None)
    return {
        "accuracy_metric": row["metric"],
        "accuracy": row["mean"],
        "accuracy_low": row["ci_low"],
        "accuracy_high": row["ci_high"],
        "accuracy_stderr": stderr,
        "accuracy_samples": row["n"],
    }
