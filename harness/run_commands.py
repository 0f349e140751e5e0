"""Commands of a plan and of its run: run, report, plan check, plan schema."""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.interrupts import raise_in_command
from harness.outcome import tell_outcome
from harness.run_folder import folder_of, kept_in, refuse_folder, refuse_no_path
from harness.sweep import MAX_CELLS
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_DEVICE_NOT_READY,
    EXIT_NONE_USABLE,
    EXIT_NOT_WRITTEN,
    AsJson,
    console_of,
    end_interrupted,
    fail,
    fail_store,
    print_rows,
    quiet_libraries,
)
from results.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from engines.parallel.torchrun import Launch
    from harness.plan import Plan
    from harness.run_parts import RunParts
    from harness.runner import RunOutcome

DEVICES_NOT_LOOKED_AT = "not looked at: devices and meters; `joulebench doctor` tests them"
STDERR = 2
MAX_PROBLEMS = 100
"""Lines that a terminal gets of a plan without end."""

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file (TOML).")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a value, such as protocol.repeats=5. May be repeated."),
]
MaxCells = Annotated[int, typer.Option("--max-cells", min=1, help="Most cells that the plan may have.")]
Devices = Annotated[
    list[str] | None,
    typer.Option(
        "--device",
        metavar="NAME",
        help="Only this device of the plan; a plan of one device takes this one in its place. May be repeated.",
    ),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Let workloads run code that the model wrote, each program in a sandbox.")
]


def run(
    plan_path: PlanPath,
    out: Annotated[Path | None, typer.Option(help="Folder for the run; default: runs/NAME.")] = None,
    settings: Settings = None,
    only_devices: Devices = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print the cells and an estimate of the time.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    allow_code: AllowCode = False,
    max_cells: MaxCells = MAX_CELLS,
    wait: Annotated[
        bool, typer.Option("--wait", help="While another run measures this machine, wait for it to end.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan: measure every cell, then write tables and report."""
    console = console_of(stderr=as_json)
    directory: Path | None = None
    launched = _launch()
    if launched is not None and launched.rank > 0:
        _serve(launched)
        return
    raise_in_command(is_long=True)
    # A file of weights that is cut short while it is mapped ends the process (SIGBUS), else without a word.
    faulthandler.enable(STDERR, all_threads=False)
    refuse_no_path(out)
    try:
        begins = None if dry_run else partial(refuse_folder, out, resume)
        with prepared(plan_path, settings, allow_code, max_cells, launched, only_devices or (), begins) as (
            plan,
            run_parts,
        ):
            if dry_run:
                _print_dry_run(plan, run_parts, console, as_json)
                return
            directory = folder_of(out, plan)
            outcome = _run(plan, run_parts, directory, resume, wait, console)
        show_run(directory, directory, console, as_json)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, kept_in(directory))
    tell_outcome(outcome, plan.protocol.max_foreign_cpu_share)


def _launch() -> Launch | None:
    """Where torchrun started this process: the first rank runs the plan, and alone writes."""
    from engines.errors import EngineError
    from engines.parallel.torchrun import launch

    try:
        return launch()
    except EngineError as error:
        fail(str(error), EXIT_BAD_PLAN)


def _serve(launched: Launch) -> None:
    from engines.errors import EngineError
    from engines.parallel.torchrun import serve

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it goes to the whole group; the first rank takes it, and ends us
    try:
        serve(launched)
    except EngineError as error:
        fail(str(error), EXIT_BAD_PLAN)


def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")],
    baseline: Annotated[
        str | None, typer.Option(metavar="ARM", help="Compare all other arms with this one; default: the plan's.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for tables and report; default: that of the run.")] = None,
    rederive: Annotated[
        bool, typer.Option("--rederive", help="Compute all figures again from the raw records, and say what changed.")
    ] = False,
    sheets: Annotated[
        list[str] | None,
        typer.Option(
            "--sheet",
            metavar="DEVICE=FILE",
            help="With --rederive: price a modelled device by this sheet. May be repeated.",
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Change each constant of the hardware sheets by a fifth, and say what flips (minutes).",
        ),
    ] = False,
    overlap_k: Annotated[
        list[int] | None, typer.Option(min=1, metavar="K", help="K of Overlap@K. May be repeated; default: 4 and 8.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the tables and the report of a run again, from its stored trials."""
    from results.database import DATABASE, StoreError
    from results.run_folders import check_is_folder

    try:
        check_is_folder(out or directory)
    except StoreError as error:
        fail(str(error) if out is None else f"--out {error}", EXIT_BAD_PLAN)
    if out is not None and (out / DATABASE).exists() and not (directory.exists() and out.samefile(directory)):
        fail(f"--out {out}: holds another run, whose tables would be replaced; name another folder", EXIT_BAD_PLAN)
    if sheets and not rederive:
        fail("--sheet: works only together with --rederive; add it", EXIT_BAD_PLAN)
    raise_in_command()
    try:
        console = console_of(stderr=as_json)
        show_run(directory, out or directory, console, as_json, baseline, rederive, overlap_k, sheets or ())
        if sensitivity:
            from harness.run_sensitivity import show_sensitivity

            show_sensitivity(directory, out or directory, console)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "tables that were not written yet stay as they were")


def plan_check(
    plan_path: PlanPath,
    settings: Settings = None,
    only_devices: Devices = None,
    allow_code: AllowCode = False,
    max_cells: MaxCells = MAX_CELLS,
) -> None:
    """Check a plan and everything that it names."""
    with prepared(plan_path, settings, allow_code, max_cells, None, only_devices or ()) as (plan, _):
        n = len(plan.cells)
        typer.echo(f"{printable(str(plan_path))}: ok, {n} cell{'s' if n != 1 else ''}")
        for note in notes_on(plan):
            typer.echo(printable(note))
        if _is_measured(plan):
            typer.echo(DEVICES_NOT_LOOKED_AT)


def _is_measured(plan: Plan) -> bool:
    """Whether a device has to be there: a plan may be checked on another machine than it runs on."""
    return not all(cell.is_modelled for cell in plan.cells)


def notes_on(plan: Plan) -> Iterator[str]:
    """What is hardly meant, what of the plan is not run, and sheets that do not stand for their machine."""
    from harness.sheets import sheet_purposes
    from results.rederivation import purpose_words

    yield from plan.warnings
    yield from (f"left out: {note}" for note in plan.not_run)
    yield from itertools.starmap(purpose_words, sheet_purposes(plan))


def plan_schema() -> None:
    """Print the JSON Schema of plans, for editors."""
    from harness.schema import PlanFile

    schema = PlanFile.model_json_schema()
    typer.echo(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))


@contextlib.contextmanager
def prepared(
    plan_path: Path,
    settings: list[str] | None,
    allow_code: bool,
    max_cells: int,
    launched: Launch | None = None,
    devices: Sequence[str] = (),
    begins: Callable[[Plan], None] | None = None,
) -> Iterator[tuple[Plan, RunParts]]:
    """A plan that is valid in itself and against what it names, with the parts that it names. launched: as the first
    of the ranks that torchrun started. begins: told the plan before what it names is looked at."""
    quiet_libraries()
    from engines.errors import EngineError
    from engines.parallel.torchrun import Meeting
    from harness.plan import PlanError, read_draft
    from harness.preflight import preflight
    from harness.run_parts import RunParts, data_root
    from results.scratch import remove_left

    remove_left()
    with contextlib.ExitStack() as closing:
        try:
            with console_of(stderr=True).status("checking the plan and what it names"):
                meeting = None if launched is None else Meeting(launched)
                if meeting is not None:
                    closing.callback(meeting.close)
                draft = read_draft(plan_path, settings or (), data_root(), max_cells, devices)
                if begins is not None:
                    begins(draft.plan)
                run_parts = RunParts(draft.plan.protocol, allow_code, meeting)
                closing.callback(run_parts.close)
                plan = preflight(draft, run_parts)
        except PlanError as error:
            for problem in error.problems[:MAX_PROBLEMS]:
                typer.echo(f"error: {problem}", err=True)
            if len(error.problems) > MAX_PROBLEMS:
                typer.echo(f"error: and {len(error.problems) - MAX_PROBLEMS} more problems", err=True)
            raise typer.Exit(EXIT_BAD_PLAN) from error
        except EngineError as error:
            fail(str(error), EXIT_BAD_PLAN)
        yield plan, run_parts


def _run(plan: Plan, run_parts: RunParts, directory: Path, resume: bool, wait: bool, console: Console) -> RunOutcome:
    from devices.device_lock import DeviceBusyError
    from harness.host_lock import host_lock

    def told(busy: str) -> None:
        console.print(f"{busy}; waiting", markup=False, highlight=False, soft_wrap=True)

    for note in notes_on(plan):
        console.print(note, markup=False, highlight=False)
    devices = (cell.cell.device for cell in plan.cells)
    with contextlib.ExitStack() as closing:
        try:
            closing.enter_context(host_lock(devices, told if wait else None))
        except DeviceBusyError as error:
            fail(f"{error}, or start with --wait", EXIT_DEVICE_NOT_READY)
        return _measured(plan, run_parts, directory, resume, console)


def _measured(plan: Plan, run_parts: RunParts, directory: Path, resume: bool, console: Console) -> RunOutcome:
    from harness.opening import DeviceNotReadyError, open_run
    from harness.progress import LiveProgress, PlainProgress
    from harness.runner import Runner
    from results.store import StoreError

    try:
        with LiveProgress(console) if console.is_terminal else PlainProgress(console) as progress:
            run_parts.on_wait = progress.waiting
            run_parts.on_note = partial(console.print, markup=False, highlight=False)
            with open_run(plan, directory, resume, run_parts) as store:
                return Runner(plan, store, run_parts, progress).run()
    except StoreError as error:
        fail_store(error)
    except DeviceNotReadyError as error:
        fail(str(error), EXIT_DEVICE_NOT_READY)


def show_run(
    directory: Path,
    out: Path,
    console: Console,
    as_json: bool,
    baseline: str | None = None,
    rederive: bool = False,
    overlap_k: Sequence[int] | None = None,
    sheets: Sequence[str] = (),
) -> None:
    """Writes the tables and the report of a stored run, prints the summary, says where everything is."""
    from devices.base import DeviceError
    from harness.rederive import as_it_ran, as_record, print_rederived, rederived_run
    from harness.sheets import given_sheets
    from harness.summary import print_summary
    from results.collection import no_collection
    from results.disk_errors import remedy_of
    from results.heat import MOST_CHOSEN
    from results.report.csv import json_records, write_csv
    from results.report.html import write_html
    from results.report.standings import NoArmError, standings_table
    from results.run_frames import RunFrames
    from results.store import Store, StoreError
    from results.stored_run import PACKED_FROM

    try:
        with Store.view(directory) as store, no_collection():
            run = store.data(None if rederive else PACKED_FROM)
            again = rederived_run(run, given_sheets(run, sheets)) if rederive else None
            derived = RunFrames(
                as_it_ran(run) if again is None else again.run, baseline, tuple(dict.fromkeys(overlap_k or MOST_CHOSEN))
            )
            files = [*write_csv(derived.run, out, derived), out / "report.html"]
            write_html(derived.run, out / "report.html", derived)
    except NoArmError as error:
        fail(f"--baseline: {error}", EXIT_BAD_PLAN)
    except DeviceError as error:
        fail(str(error), EXIT_BAD_PLAN)
    except StoreError as error:
        fail_store(error)
    except OSError as error:
        command = f"joulebench report {shlex.quote(str(directory))}"
        fail(
            f"{error.filename or out}: cannot be written ({error.strerror or error}); every finished trial is kept:"
            f" {remedy_of(error)}, then `{command}` writes the tables, and with --out into another one",
            EXIT_NOT_WRITTEN,
        )
    if as_json:
        tables = {"arms": standings_table(derived.standings), "summary": derived.summary}
        found = {name: json_records(table) for name, table in tables.items()}
        changed = {} if again is None else {"rederived": as_record(again)}
        typer.echo(json.dumps({"files": [str(f) for f in files]} | found | changed))
    else:
        print_summary(derived, console)
        if again is not None:
            print_rederived(again, console)
        for file in files:
            console.print(str(file), markup=False, highlight=False, soft_wrap=True)
    if again is not None and again.kept and not again.n_derived:
        fail(
            f"--rederive: none of the {len(again.kept)} trials that have joules could be derived again; all stored"
            f" figures stay ({again.kept[0]})",
            EXIT_NONE_USABLE,
        )


def _print_dry_run(plan: Plan, run_parts: RunParts, console: Console, as_json: bool) -> None:
    from harness.estimate import estimate, guessed_words
    from results.units import format_long_duration

    found = estimate(plan, run_parts)
    rows = [
        {
            "engine": e.cell_plan.cell.engine,
            "workload": e.cell_plan.cell.workload,
            "device": e.cell_plan.cell.device,
            "trials": e.n_trials,
            "requests": e.n_requests,
            "prefill_tokens": e.prefill_tokens,
            "decode_tokens": e.decode_tokens,
            "estimated_s": round(e.seconds, 1),
        }
        for e in found
    ]
    print_rows(rows, as_json, f"{plan.name}: {len(rows)} cell{'s' if len(rows) != 1 else ''}")
    if not as_json:
        total_s = sum(e.seconds for e in found)
        for note in notes_on(plan):
            console.print(note, markup=False, highlight=False)
        if _is_measured(plan):
            console.print(DEVICES_NOT_LOOKED_AT, markup=False, highlight=False)
        console.print(
            f"about {format_long_duration(total_s)} (decode tokens at most; {guessed_words(found)})", highlight=False
        )
