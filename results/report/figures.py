"""The figures of a report: which arms share a panel, what the captions say, and what is left out.

A panel holds one workload on one device, with one method of time and one of energy: modelled and measured figures never
meet in a picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from results.cells import trials_of, usable
from results.cumulative import UnresolvedError
from results.packed import column_of
from results.records import Cell, Completion, PowerTrace
from results.report.arms import Arm
from results.report.charts import EnergyBar, energy_chart, power_chart, shown_part
from results.report.numbers import Numbers, with_interval
from results.report.page_units import PageUnits
from results.runs import RunData
from results.trial_traces import traces_of
from results.trials import Trial
from results.units import format_number

SHOWN_TOKENS = 300
"""A power trace is drawn up to the request that reaches this many tokens: single ticks can be told apart."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """title and caption as text; spec None where there is nothing to draw, then the caption says why."""

    title: str
    caption: str
    spec: dict[str, Any] | None
    description: str = ""
    numbers: Numbers | None = None


def energy_figures(run: RunData, frame: pd.DataFrame, arms: dict[str, Arm], units: PageUnits) -> list[Chart]:
    found = []
    for panel, rows in _panels(run, frame):
        per_token = [r for r in rows if r["metric"] == "energy_per_token" and r["phase"] in ("prefill", "decode")]
        ways = dict.fromkeys((r["method"], r["meter"]) for r in per_token if r["method"] != "missing")
        for method, meter in ways:
            own = [r for r in per_token if (r["method"], r["meter"]) == (method, meter)]
            how = method if meter == method else f"{method}, {meter}"
            found.append(_energy(f"{panel}: energy {how}", own, per_token, arms, units))
    return found


def power_figures(run: RunData, arms: dict[str, Arm]) -> list[Chart]:
    """One example trial per device, its power and its tokens on one clock."""
    trials = trials_of(run)
    found = []
    for device in dict.fromkeys(c.device for c in run.cells):
        example = _example_trial(run, [c for c in run.cells if c.device == device], trials)
        if example is None:
            why = "No usable trial of this device has both token times and readings in watts or joules."
            found.append(Chart(device, why, None))
        else:
            found.append(_power(device, *example, arms))
    return found


# --- energy by phase ----------------------------------------------------------------------------------------------


def _panels(run: RunData, frame: pd.DataFrame) -> Iterator[tuple[str, list[Row]]]:
    for (workload, device), group in frame.groupby(["workload", "device"], sort=False):
        yield f"{workload} on {device}", [{str(k): v for k, v in r.items()} for r in group.to_dict("records")]


def _energy(title: str, rows: Sequence[Row], all_rows: Sequence[Row], arms: dict[str, Arm], units: PageUnits) -> Chart:
    scale, unit = units.on(rows[0]["device"]).of("energy_per_token", "all", rows[0]["unit"])
    drawn = {(r["cell"], r["phase"]): r for r in rows}
    bars = []
    for cell, phase in dict.fromkeys((r["cell"], r["phase"]) for r in all_rows):
        row = drawn.get((cell, phase))
        if row is None:
            bars.append(EnergyBar(arms[cell].name, phase, None, None, None, f"{phase}: missing, see the table"))
            continue
        mean, low, high = _figure(row, scale)
        bars.append(EnergyBar(arms[cell].name, phase, mean, low, high, f"{phase} {format_number(mean)}"))
    description = f"{title}. " + "; ".join(f"{b.arm} {b.label}" for b in bars) + f" ({unit})."
    caption = "Thin lines are 95 % intervals of the mean."
    told = tuple((b.arm, b.phase, "missing" if b.energy is None else _with_ends(b)) for b in bars)
    numbers = Numbers(("Arm", "Phase", f"Energy per token, {unit}"), told)
    return Chart(title, caption, energy_chart(bars, unit, description), description, numbers)


def _with_ends(bar: EnergyBar) -> str:
    ends = (None if end is None else format_number(end) for end in (bar.low, bar.high))
    return with_interval(format_number(bar.energy or 0.0), *ends)


def _figure(row: Row, scale: float) -> tuple[float, float | None, float | None]:
    """(mean, interval's ends) in a chart's unit."""
    ends = [None if pd.isna(row[key]) else float(row[key]) / scale for key in ("ci_low", "ci_high")]
    return float(row["mean"]) / scale, ends[0], ends[1]


# --- power and tokens ------------------------------------------------------------------------------------------------


def _example_trial(
    run: RunData, cells: Sequence[Cell], trials: dict[str, list[Trial]]
) -> tuple[Cell, Trial, list[PowerTrace]] | None:
    for cell in cells:
        for trial in usable(trials[cell.cell_id]):
            if not trial.energy or not any(column_of(trial.completions, "token_times_s")):
                continue
            if not all(map(_is_timed, _shown_requests(trial.completions))):
                continue
            traces = [t for t in traces_of(run, trial).traces if t.method != "relative gauge" and _can_be_drawn(t)]
            if traces:
                return cell, trial, traces
    return None


def _power(device: str, cell: Cell, trial: Trial, traces: Sequence[PowerTrace], arms: dict[str, Arm]) -> Chart:
    shown = _shown_requests(trial.completions)
    start_s = trial.window_start_s if trial.window_start_s is not None else shown[0].start_s
    end_s = max(c.end_s for c in shown)
    tokens_s = [t for c in shown for t in c.token_times_s]
    method = ", ".join(dict.fromkeys(t.method for t in traces))
    what = f"{arms[cell.cell_id].name}, {cell.workload}, trial {trial.repeat + 1}"
    extent = f"its first {len(shown)} of {len(trial.completions)} requests, {len(tokens_s)} tokens"
    caption = (
        f"One trial as an example, not an average: {what}; {extent}. Power {method}, time {trial.time_method}. "
        "Shaded: prefill. Ticks along the bottom: tokens."
    )
    try:
        prefills_s = [(c.start_s, c.prefill_end_s) for c in shown]
        spec = power_chart(traces, prefills_s, tokens_s, start_s, end_s, caption)
    except UnresolvedError as reason:
        return Chart(device, f"{what}: power cannot be drawn: {reason}", None)
    return Chart(device, caption, spec, caption, _power_numbers(traces, start_s, end_s))


def _power_numbers(traces: Sequence[PowerTrace], start_s: float, end_s: float) -> Numbers:
    rows = []
    for trace in traces:
        _, watts = shown_part(trace, start_s, end_s)
        told = (
            f"{trace.meter} {trace.component}",
            str(len(watts)),
            *(format_number(float(w)) for w in (watts.min(), watts.max())),
        )
        rows.append((*told, trace.method))
    note = "joulebench export writes every reading of every trial, into traces.parquet."
    return Numbers(("Component", "Points drawn", "Least, W", "Most, W", "Method"), tuple(rows), note)


def _can_be_drawn(trace: PowerTrace) -> bool:
    return len(trace.times_s) >= 2 and bool(np.isfinite(trace.values).all())


def _is_timed(completion: Completion) -> bool:
    """Whether all its times are numbers."""
    times_s = (completion.start_s, completion.prefill_end_s, completion.end_s, *completion.token_times_s)
    return all(map(math.isfinite, times_s))


def _shown_requests(completions: Sequence[Completion]) -> list[Completion]:
    shown: list[Completion] = []
    n_tokens = 0
    for completion in sorted(completions, key=lambda c: c.start_s):
        if n_tokens >= SHOWN_TOKENS:
            break
        shown.append(completion)
        n_tokens += completion.n_generated
    return shown
