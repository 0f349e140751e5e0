"""The summary on a terminal: a table for each workload and device, titled with how its figures came to be, the tables
that the plan asks for, and at its end, where a reader looks, the answer of the report's first screen: each device's
arms as times a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

from harness.asked_summary import print_asked_tables
from harness.terminal import print_whole, table_of_arms
from results.cells import trials_of, usable, without_figures
from results.counters import COUNTERS
from results.meter_units import unlike_unit_notes
from results.metrics import NO_GENERATION, ONE_TOKEN
from results.operations import extrapolation_notes
from results.records import MODEL_PREFIX
from results.rederivation import derivation_notes
from results.resources import resource_notes
from results.roads import arithmetic_notes, placement_notes, road_notes
from results.run_notes import run_notes
from results.same_requests import unlike_notes
from results.sittings import sitting_notes
from results.stop_reached import not_reached
from results.summary import FIGURES, missing_reason, rows_of_cells
from results.trial_traces import lost_trace_notes, meter_notes
from results.units import (
    format_amount,
    format_interval,
    format_known,
    format_mean,
    format_number,
    format_p,
    si_scale,
    signed,
)

if TYPE_CHECKING:
    from rich.console import Console

    from results.report.first_screen import ArmFigure
    from results.report.page_units import PageUnits
    from results.report.standings import Group
    from results.run_frames import RunFrames

Row = Mapping[str, Any]
JOULES = "all_j_per_token"
COLUMNS = (
    ("TTFT", "ttft_ms", 1e-3, "s"),
    ("TPOT", "tpot_ms", 1e-3, "s"),
    ("queue", "queueing_ms", 1e-3, "s"),
    ("busy", "utilisation_percent", 1.0, "%"),
    ("prefill", "prefill_token_per_s", 1.0, "token/s"),
    ("all", JOULES, 1.0, "J/token"),
    *((counter.short, counter.column, 1.0, "") for counter in COUNTERS if counter.short),
)
"""Heading, column of the summary, what it is in units of, and its unit."""
NOT_ASKED = (NO_GENERATION, ONE_TOKEN)
"""Why there is no time of tokens where a workload asks for none."""
LONGEST_BESIDE = 7
"""Characters of a heading and its unit that stand in one line."""
MOST_LAYERS = 8
"""Whose predictions are told one by one."""
REPEATED = 1e-9
"""Relative width below which an interval only says that the same number was computed again."""


def print_summary(derived: RunFrames, console: Console) -> None:
    """Fits 80 columns."""
    run = derived.run
    rows: list[dict[str, Any]] = [{str(k): v for k, v in r.items()} for r in derived.summary.to_dict("records")]
    reasons: list[str] = []
    for model in dict.fromkeys(_model(r) for r in rows):
        console.print(f"model {model}", markup=False, highlight=False)
    by_cell, figures = trials_of(run), rows_of_cells(run, derived.tidy)
    for workload, device in dict.fromkeys((r["workload"], r["device"]) for r in rows):
        own = [r for r in rows if (r["workload"], r["device"]) == (workload, device)]
        for row in own:
            row["reason"] = missing_reason(by_cell[row["cell"]], figures[row["cell"]], partial(_is_told, own))
        _print_table(own, _units([r for r in rows if r["device"] == device]), reasons, console)
        for line in (*_counted(own), *_foretold(own, derived)):
            console.print(line, markup=False, highlight=False)
    for line in _changes(derived):
        console.print(line, markup=False, highlight=False)
    for i, reason in enumerate(reasons, start=1):
        console.print(f"[{i}] {reason}", markup=False, highlight=False)
    meters = meter_notes(run) if any(str(r["device"]).startswith(MODEL_PREFIX) for r in rows) else {}
    notes = [
        *_notes(rows, meters),
        *resource_notes(derived.resources),
        *extrapolation_notes(derived.operations),
        *arithmetic_notes(run),
        *unlike_notes(run),
        *road_notes(run),
        *placement_notes(run),
        *run_notes(run),
        *sitting_notes(run),
        *not_reached(run),
        *unlike_unit_notes(run),
    ]
    for note in [*notes, *derivation_notes(run), *lost_trace_notes(run)]:
        console.print(note, markup=False, highlight=False)
    print_asked_tables(derived.asked_tables, console)
    _print_endurance(derived, console)
    _print_answers(derived, console)
    n_failed = sum(t.has_failed for t in run.trials)
    n_ok = len(usable(run.trials))
    n_marked = sum(t.status == "ok" for t in run.trials) - n_ok
    marked = f"{n_marked} marked, whose times and joules are in no mean" if n_marked else ""
    trials = "trial" if n_ok == 1 else "trials"
    counts = [f"{n_ok} {trials} ok", f"{n_failed} failed", without_figures(run.trials), marked]
    console.print(", ".join(filter(None, counts)), highlight=False)


def _is_told(rows: Sequence[Row], figure: Row, reason: str) -> bool:
    """Whether it is why a column of the table is empty, or is not there: one of tokens that nobody asked for is not."""
    column = next((c for _, c, _, _ in COLUMNS if FIGURES[c] == (figure["metric"], figure["phase"])), None)
    return column is not None and (reason not in NOT_ASKED or any(_known(r[column]) for r in rows))


def _units(rows: Sequence[Row]) -> dict[str, tuple[float, str]]:
    """By column: what its values are divided by, and the unit then, one for all tables of a device."""
    found = {}
    for _, column, factor, unit in COLUMNS:
        known = [abs(r[column]) for r in rows if _known(r[column]) and r[column]]
        scale, shown = si_scale(geometric_mean(known) * factor if known else 1.0, unit)
        found[column] = scale / factor, shown
    return found


def _print_endurance(derived: RunFrames, console: Console) -> None:
    from results.report.endurance_words import sentences_of

    for series in derived.endurance:
        console.print(
            f"{series.cell.engine} · {series.cell.workload} · {series.cell.device}: speed and power over time",
            markup=False, highlight=False, style="bold",
        )  # fmt: skip
        for sentence in sentences_of(series):
            console.print(f"  {sentence}", markup=False, highlight=False)


def _print_answers(derived: RunFrames, console: Console) -> None:
    from results.report.page_units import PageUnits

    units = PageUnits(derived.tidy, derived.standings)
    for whole, single in derived.standings:
        only_for = derived.run.info.only_for.get(whole.device)
        _print_standings(whole, single, units, console, f" · only for {only_for}" if only_for else "")


def _print_standings(group: Group, single: Sequence[Group], units: PageUnits, console: Console, purpose: str) -> None:
    """purpose: what the device's sheet is only for, behind its name."""
    from rich.text import Text

    from results.report.first_screen import arm_table
    from results.report.sentences import sentences

    shown = arm_table("", group, units)
    title = f"{group.device}{purpose} · {group.workload or 'all workloads'} · times {shown.baseline}"
    table = table_of_arms(title, console)
    for heading in shown.headings:
        table.add_column(Text(f"{heading.title}, {heading.below}"), justify="right")
    for row in shown.rows:
        told = (_standing(f, best) for f, best in zip(row.figures, shown.best, strict=True))
        table.add_row(Text(row.arm.name), *map(Text, told))
    print_whole(table, console)
    for _, words in sentences(group, single):
        console.print(words, markup=False, highlight=False)
    for i, note in enumerate(shown.notes, start=1):
        console.print(f"({i}) {note}", markup=False, highlight=False)
    console.print()


def _standing(figure: ArmFigure, best: str) -> str:
    """ "0.36× [0.33,0.40] fastest": on a narrow terminal it folds at its blanks."""
    interval = figure.interval.replace(", ", ",") if figure.interval.startswith("[") else ""
    note = f"({figure.note})" if figure.note else ""
    # Without a ratio to others, the figure itself.
    value = f"({figure.value})" if figure.value and (figure.is_baseline or figure.order is None) else ""
    return " ".join(filter(None, [figure.ratio + note, value, interval, best if figure.is_best else ""]))


def _counted(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each counter that has no column and tells the arms of a table apart."""
    for counter in COUNTERS:
        known = [row for row in rows if _known(row[counter.column])]
        if counter.short is None and len({row[counter.column] for row in known}) > 1:
            each = "; ".join(f"{row['engine']} {row[counter.column]:,.0f}" for row in known)
            layers = "".join(f" ({words})" for words in dict.fromkeys(row["counters_of"] for row in known) if words)
            window = "" if counter.unit in ("%", "B/s") else " a window"
            unit = "" if counter.unit == counter.heading else f", {counter.unit}"
            yield f"{counter.heading}{unit}{window}{layers}: {each}"


def _foretold(rows: Sequence[Row], derived: RunFrames) -> Iterator[str]:
    """A line for each arm that predicts: recall@k and rank alignment of each layer, or of many the range."""
    for row in rows:
        heat = derived.heats.get(row["cell"])
        if heat is None or heat.foretold is None:
            continue
        told = [(layer, one) for layer, one in zip(heat.layers, heat.foretold, strict=True) if one is not None]
        if len(told) > MOST_LAYERS:
            by_recall = sorted((one.recall, layer) for layer, one in told)
            ends = " to ".join(
                f"{100 * recall:.0f} % (layer {layer})" for recall, layer in (by_recall[0], by_recall[-1])
            )
            yield f"predictions of {row['engine']}, recall: {ends}; every layer stands in experts.csv"
            continue
        each = "; ".join(
            f"layer {layer} {100 * one.recall:.0f} % ({' '.join(f'{100 * share:.0f}' for share in one.rank_alignment)})"
            for layer, one in told
        )
        yield f"predictions of {row['engine']}, recall (right expert by rank, %): {each}"


def _changes(derived: RunFrames) -> Iterator[str]:
    """A line for each workload and device: how the first score of its arms differs from the reference's."""
    import pandas as pd

    scores = derived.compared[derived.compared["n_of"] == "samples"]
    untrained = {c.cell_id for c in derived.run.cells if c.model_note == "random weights"}
    for (workload, device), rows in scores.groupby(["workload", "device"], sort=False):
        first = rows[(rows["quantity"] == rows["quantity"].iloc[0]) & ~rows["cell"].isin(untrained)]
        told = [_change(row) for _, row in first.iterrows() if not pd.isna(row["change"])]
        if told:
            references = ", ".join(dict.fromkeys(first["reference"].dropna()))
            yield f"{workload} · {device} · {first['quantity'].iloc[0]} against {references}: {'; '.join(told)}"


def _change(row: Any) -> str:
    text = f"{row['engine']} {signed(format_number(row['change']))}"
    if not _known(row["change_low"]):
        return f"{text} (no interval: {row['change_reason']})"
    return f"{text} {format_interval(row['change_low'], row['change_high'])}, {format_p(row['p'])}"


def _print_table(
    rows: list[dict[str, Any]], units: Mapping[str, tuple[float, str]], reasons: list[str], console: Console
) -> None:
    from rich.text import Text

    first = rows[0]
    several_models = len({_model(r) for r in rows}) > 1
    metric = f" · accuracy: {first['accuracy_metric']}" if isinstance(first["accuracy_metric"], str) else ""
    title = (
        f"{first['workload']} · {first['device']} · items: {first['data_source'] or 'none'} · {_methods(rows)}{metric}"
    )
    scored = any(_known(r["accuracy"]) for r in rows)
    columns = [c for c in COLUMNS if any(_known(r[c[1]]) for r in rows)]
    table = table_of_arms(title, console)
    for heading, column, _, _ in columns:
        # A long heading stands above its unit: the table has 80 columns.
        unit = units[column][1]
        between = "\n" if len(heading + unit) > LONGEST_BESIDE else " "
        table.add_column(f"{heading}{between}{unit}".strip(), justify="right", no_wrap=True)
    accuracies = [_accuracy(row) for row in rows]
    if scored:
        # On a narrow terminal the interval stands below its value, whole.
        longest = max(len(word) for text in ("accuracy", *accuracies) for word in text.split())
        table.add_column("accuracy", justify="right", min_width=longest)
    table.add_column("n", justify="right", no_wrap=True)
    for row, accuracy in zip(rows, accuracies, strict=True):
        name = f"{row['engine']} {_model(row)}" if several_models else str(row["engine"])
        entries = [name + _mark(row, reasons), *(_figure(row, column, units[column][0]) for _, column, _, _ in columns)]
        if scored:
            entries.append(accuracy)
        failed = f" ({row['n_failed']} failed)" if row["n_failed"] else ""
        table.add_row(*map(Text, [*entries, f"{row['n']}{failed}"]))
    print_whole(table, console)


def _mark(row: Row, reasons: list[str]) -> str:
    """[k]: note k says why figures of this row are missing."""
    reason = row["reason"]
    if reason is None:
        return ""
    if reason not in reasons:
        reasons.append(reason)
    return f" [{reasons.index(reason) + 1}]"


def _figure(row: Row, column: str, scale: float) -> str:
    """The mean, and how far the farther end of its 95 % interval is: one that would go below 0 was cut off there."""
    value, low, high = row[column], row[f"{column}_low"], row[f"{column}_high"]
    if not _known(value):
        return ""
    if not (_known(low) and _known(high)) or high - low <= REPEATED * abs(value):
        error = row["energy_uncertainty_percent"]
        return format_known(value / scale, error / 100 if column == JOULES and _known(error) else None)
    return format_amount(value / scale, max(high - value, value - low) / scale).replace(" ± ", "±")


def _accuracy(row: Row) -> str:
    """The score with its 95 % interval over samples, which is not symmetric: "0.75 [0.53,0.89]"."""
    value, low, high = (row[f"accuracy{end}"] for end in ("", "_low", "_high"))
    if not _known(value):
        return ""
    if not (_known(low) and _known(high)) or low == high:
        return format_number(value)
    return f"{format_mean(value, low, high)} {format_interval(low, high).replace(', ', ',')}"


def _methods(rows: list[dict[str, Any]]) -> str:
    """How time and energy came to be, in words."""
    time = "/".join(dict.fromkeys(str(r["time_method"]) for r in rows))
    energy = "/".join(dict.fromkeys(str(r["energy_method"]) for r in rows))
    shares = [r["energy_uncertainty_percent"] for r in rows if _known(r["energy_uncertainty_percent"])]
    if not shares:
        return f"time {time}, joules {energy}{', error not stated' if energy == 'modelled' else ''}"
    low, high = format_number(min(shares)), format_number(max(shares))
    spread = f"±{low} %" if low == high else f"±{low} to {high} %"
    return f"time {time}, joules {energy} ({spread} each)"


def _model(row: Row) -> str:
    return f"{row['model']} ({row['model_note']})" if isinstance(row["model_note"], str) else str(row["model"])


def _notes(rows: list[dict[str, Any]], meters: Mapping[tuple[str, str], str]) -> list[str]:
    """meters: what they say of themselves, by device and meter."""
    scored = any(_known(r["accuracy_low"]) for r in rows)
    of_scores = "; [ ] is that of an accuracy over its samples" if scored else ""
    notes = [f"± is as far as the farther end of the 95 % interval over the trials{of_scores}; n: trials."]
    if any(_known(r["energy_uncertainty_percent"]) for r in rows):
        notes.append("In a title ± is one standard uncertainty of a window's joules.")
    for device in dict.fromkeys(str(r["device"]) for r in rows if r["energy_method"] == "modelled"):
        why = "CPU time x watts of a sheet"
        if device.startswith(MODEL_PREFIX):
            why = next((note for (name, _), note in meters.items() if name == device), "by a hardware sheet")
        notes.append(f"{device}: joules are modelled, not measured ({why}).")
    notes += [
        f"{device}: joules are replayed: each window has the recording from its first row. They are not of this run."
        for device in dict.fromkeys(str(r["device"]) for r in rows if r["energy_method"] == "replayed")
    ]
    if any(isinstance(r["model_note"], str) and "random" in r["model_note"] for r in rows):
        notes.append("Random weights: the accuracy says nothing about a trained model.")
    return notes


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)
