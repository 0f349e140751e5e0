"""The summary on a terminal: one table a workload, with the method of every column of joules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from results.units import format_number

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from results.records import RunData

Row = Mapping[str, Any]


def print_summary(run: RunData, table: pd.DataFrame, console: Console) -> None:
    """table: `results.tables.summary` of the run."""
    from rich import box
    from rich.table import Table

    rows: list[dict[str, Any]] = [{str(k): v for k, v in r.items()} for r in table.to_dict("records")]
    reasons: list[str] = []
    for workload in dict.fromkeys(r["workload"] for r in rows):
        own = [r for r in rows if r["workload"] == workload]
        title = f"{workload}   items: {own[0]['data_source'] or 'none'}   model: {_model(own[0])}"
        shown = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for heading in ("device", "arm"):
            shown.add_column(heading, overflow="fold")
        for heading in ("TTFT ms", "TPOT ms", "prefill token/s", "mJ/token", "±", "accuracy", "drop %", "pad %", "n"):
            shown.add_column(heading, justify="right")
        shown.add_column("method")
        for row in own:
            shown.add_row(*_entries(row, reasons))
        console.print(shown)
    for i, reason in enumerate(reasons, start=1):
        console.print(f"[{i}] {reason}", markup=False, highlight=False)
    for note in _notes(rows):
        console.print(note, markup=False, highlight=False)
    failed = [t for t in run.trials if t.status == "failed"]
    console.print(f"{len(run.trials) - len(failed)} trials ok, {len(failed)} failed", highlight=False)


def _entries(row: Row, reasons: list[str]) -> list[str]:
    mark = ""
    if isinstance(row["reason"], str) and row["reason"]:
        if row["reason"] not in reasons:
            reasons.append(row["reason"])
        mark = f" [{reasons.index(row['reason']) + 1}]"
    accuracy = ""
    if _known(row["accuracy"]):
        stderr = float(row["accuracy_stderr"]) if _known(row["accuracy_stderr"]) else None
        accuracy = f"{row['accuracy_metric']} {format_number(float(row['accuracy']), stderr)}"
    return [
        row["device"],
        row["engine"] + mark.replace("[", "\\["),
        _number(row["ttft_ms"]),
        _number(row["tpot_ms"]),
        _number(row["prefill_token_per_s"]),
        _number(row["all_j_per_token"], 1e3),
        f"{_number(row['energy_uncertainty_percent'])} %" if _known(row["energy_uncertainty_percent"]) else "",
        accuracy,
        _number(row["dropped_percent"]),
        _number(row["padded_percent"]),
        str(row["n"]),
        _method(row),
    ]


def _method(row: Row) -> str:
    """How time and energy came to be; one word where it is the same."""
    if row["time_method"] == row["energy_method"]:
        return str(row["time_method"])
    return f"time {row['time_method']}, J {row['energy_method']}"


def _model(row: Row) -> str:
    return f"{row['model']} ({row['model_note']})" if isinstance(row["model_note"], str) else str(row["model"])


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    notes = []
    methods = {(r["device"], r["energy_method"], r["energy_meter"]) for r in rows if isinstance(r["energy_meter"], str)}
    for device, method, meter in sorted(methods):
        if method == "modelled":
            notes.append(
                f"{device}: energy is modelled (meter {meter}), not measured; ± is the model's own uncertainty"
            )
    if any(isinstance(r["model_note"], str) and "random" in r["model_note"] for r in rows):
        notes.append("the model has random weights: its accuracy means nothing but that the arms can be compared")
    return notes


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _number(value: Any, scale: float = 1.0) -> str:
    return format_number(float(value) * scale) if _known(value) else ""
