"""`joulebench trace`: a step, a request or a whole window of a trial as a file for Perfetto."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.terminal import EXIT_BAD_PLAN, EXIT_NOT_WRITTEN, check_file, fail, fail_each, fail_store, print_rows
from results.printable import printable

if TYPE_CHECKING:
    from results.runs import RunData
    from results.trials import Trial

MOST_EVENTS = 2_000_000
MOST_TOLD = 20


def trace(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="File to write; open it in ui.perfetto.dev.")
    ] = None,
    cell: Annotated[str | None, typer.Option(help="The cell: its id, its label, or its arm if that is enough.")] = None,
    trial: Annotated[
        str | None, typer.Option(help="The trial, by its id; default: the cell's first that is ok.")
    ] = None,
    request: Annotated[int | None, typer.Option(min=1, help="Only this request, counted from 1.")] = None,
    step: Annotated[
        int | None,
        typer.Option(
            min=0, help="Only this step of the request (default: request 1); 0 is the prompt, 1 the first decode step."
        ),
    ] = None,
) -> None:
    """Write what ran when in a trial: phases, units, links, copies, power. DIR alone lists its cells."""
    from results.report.files import replace_text
    from results.store import Store, StoreError
    from results.trace_events import n_events, trace_document
    from results.trace_files import TraceFileError
    from results.tracks import THREADS, timelines

    check_file("--out", out, ".json")
    try:
        with Store.view(directory) as store:
            run = store.data()
            if out is None:
                _list_cells(run, directory, is_listing=(cell, trial, request, step) == (None,) * 4)
                return
            own = _trial(run, cell, trial)
            window, facts = _window(own), _facts(run, own)
            found = timelines(window, run.load_parts(own.trial_id), own.completions, own.decode_steps)
    except (StoreError, TraceFileError) as error:
        fail_store(error)
    if request is not None or step is not None:
        span = _span(own, request or 1, step)
        found = found.between(*span)
        facts["part"] = f"request {request or 1}" + ("" if step is None else f", step {step}")
    n = n_events(found)
    if n > MOST_EVENTS:
        fail(f"{n:,} events are more than a viewer takes; name a --request, or a --step of it", EXIT_BAD_PLAN)
    document = trace_document(found, facts["cell"], facts)
    try:
        replace_text(out, json.JSONEncoder(allow_nan=False).iterencode(document))
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        fail(f"--out {out}: cannot be written ({why}); name another file", EXIT_NOT_WRITTEN)
    length_s = found.end_s - found.begin_s
    # Beside standard output, which may be the file.
    told = f"{printable(str(out))}: {n:,} events in {length_s:.6g} s ({facts['time']}); open it in ui.perfetto.dev"
    typer.echo(told, err=True)
    if own.decode_steps and not any(track.group == THREADS for track in found.tracks):
        kept = f"the first {len(own.decode_steps)} decode steps of the window"
        typer.echo(f"What computed, waited and copied is kept of {kept}, and none of them is in this part.", err=True)


def _list_cells(run: RunData, directory: Path, is_listing: bool) -> None:
    if not is_listing:
        fail("--out: names no file; write --out trace.json", EXIT_BAD_PLAN)
    n_ok = Counter(one.cell_id for one in run.trials if one.status == "ok")
    rows = [{"cell": one.cell_id, "label": one.label, "trials ok": n_ok[one.cell_id]} for one in run.cells]
    print_rows(rows, False, f"{directory}: cells, for --cell (its id, its label or, where it has one cell, its arm)")


def _trial(run: RunData, cell: str | None, trial: str | None) -> Trial:
    cells = [one for one in run.cells if cell in (None, one.cell_id, one.label)]
    cells = cells or [one for one in run.cells if cell == one.engine]
    problems = []
    if not cells or (trial is None and len(cells) > 1):
        told = "; ".join(f"{one.cell_id} ({one.label})" for one in (cells or run.cells)[:MOST_TOLD])
        asked = "the run has several cells" if cell is None else f"--cell {cell[:80]}: "
        what = "" if cell is None else "several cells are of this arm" if cells else "the run has no such cell"
        problems.append(f"{asked}{what}; name one with --cell: {told}")
    own_cells = {one.cell_id: one.label for one in cells}
    if trial is not None:
        own = next((one for one in run.trials if one.trial_id == trial), None)
        if own is None:
            problems.append(f"--trial {trial[:80]}: the run has no such trial; trials.csv has their ids")
        elif cells and own.cell_id not in own_cells:
            problems.append(f"--trial {trial[:80]}: of cell {own.cell_id}, and --cell names another; leave out --cell")
    else:
        own = next((one for one in run.trials if one.cell_id in own_cells and one.status == "ok"), None)
        if own is None and not problems:
            problems.append(f"cell {cells[0].label}: none of its trials is ok, so nothing ran that could be shown")
    if own is None or problems:
        fail_each(problems, EXIT_BAD_PLAN)
    return own


def _window(trial: Trial) -> tuple[float, float]:
    if trial.window_start_s is None or trial.window_end_s is None:
        fail(f"trial {trial.trial_id}: failed before its window; name another with --trial", EXIT_BAD_PLAN)
    return trial.window_start_s, trial.window_end_s


def _span(trial: Trial, request: int, step: int | None) -> tuple[float, float]:
    from results.tracks import step_spans

    n = len(trial.completions)
    if request > n:
        fail(f"--request {request}: the trial answered {n}; name one from 1 to {n}", EXIT_BAD_PLAN)
    own = trial.completions[request - 1]
    if step is None:
        return own.start_s, own.end_s
    spans = step_spans(own)
    if step >= len(spans):
        fail(f"--step {step}: request {request} has steps 0 (the prompt) to {len(spans) - 1}", EXIT_BAD_PLAN)
    return spans[step]


def _facts(run: RunData, trial: Trial) -> dict[str, str]:
    label = next(one.label for one in run.cells if one.cell_id == trial.cell_id)
    return {"run": run.info.run_id, "cell": label, "trial": trial.trial_id, "time": trial.time_method}
