"""`joulebench history` and `joulebench baseline`: a folder of runs over time, and names for runs in it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from harness.interrupts import raise_in_command
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_NOT_WRITTEN,
    AsJson,
    check_file,
    console_of,
    end_interrupted,
    fail,
    print_rows,
)
from results.printable import printable

if TYPE_CHECKING:
    from results.history.index import History, RunRead
    from results.history.points import RunPoint

RUNS = Path("runs")
TOLD_EVERY = 25
FEW_RUNS, RUNS_AT_ONCE = 100, 8
"""Fewer take less time here than it takes to start processes."""
MOST_PROCESSES = 4
MOST_ARMS_TOLD = MOST_DEVICES_TOLD = 3
AHEAD = timedelta(hours=1)
"""Clocks of two machines may be so far apart."""
EARLIEST = "2025-01-01"
"""No run was made before: a machine without a battery for its clock begins in 1970."""
NO_RUN = "holds no run yet; `joulebench run PLAN --out {}` makes one"

HistoryFolder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder of runs, which lie at most four folders down.")
]
AtFolder = Annotated[Path, typer.Option("--history", metavar="DIR", help="Folder of runs.")]

baseline_app = typer.Typer(no_args_is_help=True, help="Name runs that others are held against.")


def history(
    directory: HistoryFolder = RUNS,
    plan: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only runs of this plan. Repeatable.")] = None,
    device: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this device. Repeatable.")] = None,
    last: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the last N runs.")] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="Write a page: each figure over time, with its changes.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder, the newest last, or draw their figures over time."""
    raise_in_command()
    check_file("--html", html, ".html")
    try:
        with opened(directory) as found:
            runs = chosen(found, plan or (), device or (), last)
            if as_json:
                typer.echo(json.dumps([_record(run) for run in runs], indent=2))
            if html is not None:
                _write_page(found, runs, device or (), html, beside_json=as_json)
            elif not as_json:
                _print(found, runs)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "runs that were read are in the index")


def opened(directory: Path, given_by: str = "") -> History:
    """Tells what is skipped, and ends the command where there is no run. given_by: the option that names the folder."""
    from results.history.index import HistoryError, open_history

    console = console_of(stderr=True)
    try:
        with console.status("looking at the runs") as status:

            def told(done: int, of: int) -> None:
                if done % TOLD_EVERY == 0 and of > TOLD_EVERY:
                    status.update(f"reading runs: {done} of {of}")

            found = open_history(directory, told, _read_runs)
    except HistoryError as error:
        fail(f"{error}{given_by and f' with {given_by}'}", EXIT_BAD_PLAN)
    for one in found.skipped:
        typer.echo(f"skipped: {printable(one.why)}", err=True)
    for told_date in _odd_dates(found):
        typer.echo(printable(told_date), err=True)
    if not found.runs:
        what = "every run of it was skipped" if found.skipped else NO_RUN.format(shlex.quote(str(directory / "NAME")))
        fail(f"{directory}: {what}", EXIT_BAD_PLAN)
    return found


def _odd_dates(found: History) -> Iterator[str]:
    """Of runs whose clock was wrong, as far as one can tell: their place in the order is not theirs."""
    soon = (datetime.now(UTC) + AHEAD).isoformat()
    for run in found.runs:
        date = f"{run.folder}: its date, {run.created_at[:16].replace('T', ' ')} UTC,"
        if run.created_at > soon:
            yield (
                f"{date} lies ahead of this machine's clock; until then it counts as newer than every run that is made"
                " here"
            )
        elif run.created_at < EARLIEST:
            yield f"{date} is older than joulebench; the clock was not set, and it counts as older than every other run"


def _read_runs(directory: Path, folders: Sequence[str]) -> Generator[RunRead | str]:
    """Of many runs other processes read most."""
    from concurrent.futures.process import BrokenProcessPool

    from devices.cpu_seconds import usable_cpus
    from harness.processes import processes
    from results.history.index import read_in_turn, read_run

    n_processes, n_read = min(len(usable_cpus() or ()) or os.cpu_count() or 1, MOST_PROCESSES), 0
    if len(folders) > FEW_RUNS and n_processes > 1:
        # One that ended by itself, as where memory was short, costs time and no run.
        with suppress(BrokenProcessPool), processes(n_processes) as pool:
            for told in pool.map(read_run, repeat(directory), folders, chunksize=RUNS_AT_ONCE):
                yield told
                n_read += 1
    yield from read_in_turn(directory, folders[n_read:])


def chosen(found: History, plans: Sequence[str], devices: Sequence[str], last: int | None) -> list[RunPoint]:
    """Ends the command where a name fits no run."""
    for option, names, known in (
        ("--plan", plans, {run.plan for run in found.runs}),
        ("--device", devices, {name for run in found.runs for name in run.devices}),
    ):
        for name in names:
            if name not in known:
                fail(f"{option} {name}: no run of {found.directory} has it; it has {', '.join(sorted(known))}", 2)
    runs = [
        run
        for run in found.runs
        if (not plans or run.plan in plans) and (not devices or set(devices) & set(run.devices))
    ]
    if not runs:
        fail(f"{found.directory}: no run is of this plan and on this device", EXIT_BAD_PLAN)
    return runs[-last:] if last else runs


def _record(run: RunPoint) -> dict[str, Any]:
    return json.loads(run.model_dump_json(exclude={"environments"}))  # type: ignore[no-any-return]


COLUMNS = (
    "when (UTC)", "run", "plan", "device", "arms", "cells", "ok", "failed", "figures, from the lowest to the highest"
)  # fmt: skip
RIGHT = {"cells", "ok", "failed"}
WIDEST = 44


def _print(found: History, runs: Sequence[RunPoint]) -> None:
    """Plain lines: of a thousand runs a table of rich takes seconds."""
    from rich.cells import cell_len

    marks: dict[str, list[str]] = {}
    with suppress(Exception):
        from results.history.marks import read_marks

        for name, folders in read_marks(found.directory).items():
            for folder in folders:
                marks.setdefault(folder, []).append(name)
    rows = [COLUMNS, *(_row(run, marks.get(run.folder, ())) for run in runs)]
    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = []
    for row in rows:
        blanks = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            blank + cell if name in RIGHT else cell + blank
            for name, cell, blank in zip(COLUMNS, row, blanks, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    lines += [
        printable(line)
        for line in (*_settings_told(found, runs), *_copies_told(runs), *(line for run in runs for line in run.told))
    ]
    typer.echo("\n".join(lines))


def _settings_told(found: History, runs: Sequence[RunPoint]) -> Iterator[str]:
    from results.history.otherwise import otherwise_than_before

    changed = otherwise_than_before(found.runs)
    for run in runs:
        yield from (f"{run.folder}: {one.sentence}" for one in changed.get(run.folder, ()))


def _copies_told(runs: Sequence[RunPoint]) -> Iterator[str]:
    from results.history.copies import copies_told, without_copies

    yield from copies_told(without_copies(runs)[1])


def _row(run: RunPoint, baselines: Sequence[str]) -> tuple[str, ...]:
    arms = ", ".join(run.arms[:MOST_ARMS_TOLD]) + (
        f" and {len(run.arms) - MOST_ARMS_TOLD} more" if len(run.arms) > MOST_ARMS_TOLD else ""
    )
    marked = f" [{', '.join(baselines)}]" if baselines else ""
    left_out = f" ({run.n_left_out} marked)" if run.n_left_out else ""
    return (
        printable(run.created_at[:16].replace("T", " ")),
        _short(run.folder) + printable(marked),
        _short(run.plan),
        _short(", ".join(run.devices)),
        _short(arms),
        str(run.n_cells),
        f"{run.n_ok}{left_out}",
        str(run.n_failed),
        figures_told(run),
    )


def _short(text: str) -> str:
    return printable(text, WIDEST + 60) if len(text) <= WIDEST else printable(text)[: WIDEST - 1] + "…"


def figures_told(run: RunPoint) -> str:
    """ "e2e 7.08 to 11 ms; energy_per_response 0.14 to 0.22 J (modelled); acc 65 to 100 %". Times and joules of several
    devices stand apart, each behind its name."""
    from results.history.points import WORDS
    from results.units import figure_scale, format_number

    told: dict[str, list[str]] = {}
    for device, metric, unit, method, low, high in run.ranges:
        scale, shown = figure_scale(max(abs(low), abs(high)), unit)
        ends = list(dict.fromkeys(format_number(end / scale) for end in (low, high)))
        how = "" if method == "measured" else f" ({method})"
        words = f"{WORDS.get(metric, printable(metric))} {' to '.join(ends)} {shown}{how}"
        told.setdefault(device, []).append(words)
    scores = told.pop("", [])
    parts = [f"{printable(device)}: {'; '.join(own)}" for device, own in told.items()]
    if len(run.devices) == 1:
        parts = ["; ".join(own) for own in told.values()]
    if len(parts) > MOST_DEVICES_TOLD:
        parts[MOST_DEVICES_TOLD:] = [f"and of {len(parts) - MOST_DEVICES_TOLD} more devices"]
    return "; ".join([*parts, *scores]) or "none"


def _write_page(
    found: History, runs: Sequence[RunPoint], devices: Sequence[str], html: Path, beside_json: bool
) -> None:
    from results.report.history_page import write_history_page

    try:
        told = write_history_page(found, runs, devices, html)
    except OSError as error:
        fail(f"--html {html}: cannot be written ({error.strerror or error}); name another file", EXIT_NOT_WRITTEN)
    typer.echo(f"{printable(str(html))}: {told}", err=beside_json)


# --- baselines -------------------------------------------------------------------------------------------------------


@baseline_app.command("set")
def set_baseline(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the baseline.")],
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Its runs: folders, or run ids.")],
    directory: AtFolder = RUNS,
    add: Annotated[bool, typer.Option("--add", help="Beside the runs that have the name already.")] = False,
) -> None:
    """Give one run a name, or several of the same thing: they tell the noise between runs."""
    from results.history.index import HistoryError
    from results.history.marks import mark, run_named

    with opened(directory, "--history") as found:
        try:
            folders = [run_named(found, run).folder for run in runs]
        except HistoryError as error:
            fail(f"{error}; --history names another folder of runs", EXIT_BAD_PLAN)
        try:
            own = mark(found, name, folders, add)
        except HistoryError as error:
            fail(str(error), EXIT_BAD_PLAN)
        except OSError as error:
            _fail_unmarked(directory, error)
    typer.echo(f"baseline {printable(name)} of {printable(str(directory))}: {', '.join(map(printable, own))}")


@baseline_app.command("list")
def list_baselines(directory: AtFolder = RUNS, as_json: AsJson = False) -> None:
    """List the baselines of a folder of runs."""
    from results.history.index import HistoryError
    from results.history.marks import read_marks

    try:
        marks = read_marks(directory)
    except HistoryError as error:
        fail(str(error), EXIT_BAD_PLAN)
    if not marks and not as_json:
        typer.echo(f"{printable(str(directory))}: no baselines yet; `joulebench baseline set NAME RUN` makes one")
        return
    rows = [{"baseline": name, "runs": ", ".join(own)} for name, own in marks.items()]
    print_rows(rows, as_json, "Baselines")


@baseline_app.command("remove")
def remove_baseline(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the baseline.")], directory: AtFolder = RUNS
) -> None:
    """Forget a baseline; its runs stay."""
    from results.history.index import HistoryError
    from results.history.marks import unmark

    try:
        unmark(directory, name)
    except HistoryError as error:
        fail(str(error), EXIT_BAD_PLAN)
    except OSError as error:
        _fail_unmarked(directory, error)
    typer.echo(f"baseline {printable(name)}: removed; its runs stay")


def _fail_unmarked(directory: Path, error: OSError) -> NoReturn:
    fail(
        f"{error.filename or directory}: cannot be written ({error.strerror or error}); baselines are kept in the"
        f" folder of the runs, so make {directory} writable",
        EXIT_NOT_WRITTEN,
    )
