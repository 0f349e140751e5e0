"""The command line. Prints; everything else logs. Heavy packages are imported by the command that needs them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from harness.plan import Plan
    from harness.runner import RunOutcome
    from harness.schema import DeviceSpec
    from harness.workbench import WaitListener, Workbench
    from results.records import SelfTest

PIPE_WIDTH = 160
EXIT_BAD_PLAN, EXIT_DEVICE_NOT_READY, EXIT_SOME_FAILED, EXIT_INTERRUPTED = 2, 4, 5, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How fast, how many joules, how accurate: language models and MoE placements, measured in one run.",
)
plan_app = typer.Typer(no_args_is_help=True, help="Check a plan, or print the schema of plans.")
app.add_typer(plan_app, name="plan")

PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file (TOML).")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override a value, such as protocol.repeats=5. May be repeated."),
]
DeviceName = Annotated[
    str, typer.Option("--device", help="host, or a phone: adb:SERIAL, ios:UDID (`joulebench devices` lists them).")
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Let workloads run code that the model wrote, each program in a sandbox.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]


@app.callback()
def start(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if not verbose:
        # It warns of every vendor's library that is absent, which `devices` says in its own words.
        logging.getLogger("zeus").setLevel(logging.ERROR)


@app.command()
def run(
    plan_path: PlanPath,
    out: Annotated[Path | None, typer.Option(help="Folder of the run; runs/NAME by default.")] = None,
    settings: Settings = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the matrix and an estimate of time only.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Run a plan: measure every cell, then write tables and report."""
    console = _console(stderr=as_json)
    try:
        with _prepared(plan_path, settings, allow_code) as (plan, workbench):
            if dry_run:
                _print_dry_run(plan, workbench, console, as_json)
                return
            directory = out or Path("runs") / plan.name
            outcome = _run(plan, workbench, directory, resume, console)
        _show_run(directory, console, as_json)
    except KeyboardInterrupt:
        _fail("interrupted; finished trials are kept, go on with --resume", EXIT_INTERRUPTED)
    if outcome.n_failed:
        _fail(
            f"{outcome.n_failed} of {outcome.n_ok + outcome.n_failed} trials failed; their reasons are in report.html"
            " and trials.csv",
            EXIT_SOME_FAILED,
        )


@app.command()
def report(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")], as_json: AsJson = False
) -> None:
    """Write tables and report again from what a run stored."""
    _show_run(directory, _console(stderr=as_json), as_json)


@plan_app.command("check")
def plan_check(plan_path: PlanPath, settings: Settings = None, allow_code: AllowCode = False) -> None:
    """Check a plan and everything that it names."""
    with _prepared(plan_path, settings, allow_code) as (plan, _):
        typer.echo(f"{plan_path}: ok, {len(plan.cells)} cells")


@plan_app.command("schema")
def plan_schema() -> None:
    """Print the JSON Schema of plans, for editors."""
    from harness.schema import PlanFile

    schema = PlanFile.model_json_schema()
    typer.echo(json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2))


@app.command()
def devices(as_json: AsJson = False) -> None:
    """Show this machine, its meters, and what is missing for the others."""
    from harness.inventory import device_rows

    _print_rows(device_rows(), as_json, "Devices and meters")


@app.command()
def doctor(
    device: DeviceName = "host",
    seconds: Annotated[
        float, typer.Option(min=1.0, max=600.0, help="Length of each stretch: idle, load, idle.")
    ] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Check a device, and test its meters: idle against a known load. Reports show the verdict from then on."""
    _quiet_libraries()
    from harness.examination import examine_device
    from harness.state import keep_self_test, state_folder

    console = _console(stderr=True)
    spec = _device_spec(device, "auto")
    try:
        with console.status(f"opening {device}") as status:
            found = examine_device(spec, seconds, on_stage=status.update, on_wait=_waits_on(status))
    except KeyboardInterrupt:
        _fail("interrupted; the verdict before stands", EXIT_INTERRUPTED)
    try:
        kept = keep_self_test(found, state_folder())
    except OSError as error:
        _fail(f"the verdict cannot be kept ({error}); name another folder with JOULEBENCH_STATE", EXIT_BAD_PLAN)
    if as_json:
        typer.echo(json.dumps(found.model_dump(mode="json") | {"verdict": found.verdict, "file": str(kept)}, indent=2))
    else:
        _print_self_test(found, kept)
    if found.verdict == "not ready":
        raise typer.Exit(EXIT_DEVICE_NOT_READY)
    if found.verdict != "ready":
        raise typer.Exit(EXIT_SOME_FAILED)


@app.command()
def record(
    path: Annotated[Path, typer.Argument(metavar="TRACE.parquet", help="File to write; a PNG appears beside it.")],
    device: DeviceName = "host",
    meter: Annotated[str, typer.Option(help="`joulebench devices` lists them; auto: the first that opens.")] = "auto",
    app: Annotated[str | None, typer.Option(help="An iPhone's energy gauge: the app that it follows.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=86400.0, help="How long; Ctrl-C ends it early.")] = 10.0,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.001, max=10.0, help="Seconds between readings.")
    ] = 0.05,
    as_json: AsJson = False,
) -> None:
    """Record what a device draws; a plan plays it back with meters = ["replay"]."""
    _quiet_libraries()
    from devices.base import DeviceError
    from devices.clock import MonotonicClock
    from harness.recording import record, write_recording
    from harness.schema import Protocol
    from harness.workbench import build_device

    if path.suffix != ".parquet":
        _fail(f"{path}: a recording is a Parquet file; end its name with .parquet", EXIT_BAD_PLAN)
    if not path.parent.is_dir():
        _fail(f"{path}: no folder {path.parent}; make it first", EXIT_BAD_PLAN)
    if meter == "replay":
        _fail("--meter replay: a recording is not recorded again; name a meter of this machine", EXIT_BAD_PLAN)
    spec, clock = _device_spec(device, meter, app), MonotonicClock()
    console = _console(stderr=True)
    with console.status(f"opening {device}") as status:
        found = build_device(spec, Protocol(sample_interval_s=interval_s), clock, _waits_on(status))
        try:
            found.open()
            recording = record(found, clock, seconds, lambda left_s: status.update(f"recording, {left_s:.0f} s left"))
        except DeviceError as error:
            _fail(str(error), EXIT_DEVICE_NOT_READY)
        except KeyboardInterrupt:
            _fail("interrupted before the recording began; nothing was written", EXIT_INTERRUPTED)
        finally:
            found.close()
    try:
        files = write_recording(recording, path)
    except OSError as error:
        _fail(f"{path} cannot be written ({error})", EXIT_BAD_PLAN)
    readings = [r.model_dump(mode="json") | {"average_power_w": r.average_power_w} for r in recording.readings()]
    if as_json:
        typer.echo(json.dumps({"files": [str(f) for f in files], "readings": readings}, indent=2))
        return
    shown = ("meter", "component", "method", "duration_s", "energy_j", "uncertainty_j", "average_power_w", "reason")
    _print_rows([{key: _rounded(r[key]) for key in shown} for r in readings], False, f"{device}, recorded")
    for file in files:
        typer.echo(str(file))


@app.command("list")
def list_names(
    what: Annotated[str, typer.Argument(metavar="engines|techniques|workloads|devices|meters")], as_json: AsJson = False
) -> None:
    """List what a plan can name."""
    from harness.inventory import CATALOGS, catalog_rows

    if what not in CATALOGS:
        _fail(f"list {what}: no such list; take one of {', '.join(CATALOGS)}", EXIT_BAD_PLAN)
    _print_rows(catalog_rows(what), as_json, what.capitalize())


@app.command("train-tiny")
def train_tiny_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder to write, or to go on with.")],
    device: Annotated[str, typer.Option(help="Where torch computes: cpu, cuda, mps.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own number by default.")] = None,
) -> None:
    """Train the bundled Qwen3-MoE again, from its seed: 40 minutes on two cores. An interrupted training goes on."""
    _quiet_libraries()
    import torch

    from engines.errors import EngineError
    from harness.train_tiny import train_tiny

    logging.getLogger("engines.training").setLevel(logging.INFO)
    if threads:
        torch.set_num_threads(threads)
    try:
        train_tiny(folder, device)
    except KeyboardInterrupt:
        _fail(f"interrupted; the same command goes on with what is in {folder}", EXIT_INTERRUPTED)
    except (EngineError, OSError, RuntimeError) as error:
        _fail(f"{folder}: {error}", EXIT_BAD_PLAN)
    typer.echo(str(folder))


def main() -> None:
    app()


# --- a run -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _prepared(plan_path: Path, settings: list[str] | None, allow_code: bool) -> Iterator[tuple[Plan, Workbench]]:
    """A plan that is valid in itself and against what it names, with the workbench that holds its parts."""
    _quiet_libraries()
    from harness.plan import PlanError, load_plan
    from harness.preflight import preflight
    from harness.workbench import Workbench, data_root

    with contextlib.ExitStack() as closing:
        try:
            with _console(stderr=True).status("checking the plan and what it names"):
                plan = load_plan(plan_path, settings or (), data_root())
                workbench = Workbench(plan.protocol, allow_code)
                closing.callback(workbench.close)
                plan = preflight(plan, workbench)
        except PlanError as error:
            for problem in error.problems:
                typer.echo(f"error: {problem}", err=True)
            raise typer.Exit(EXIT_BAD_PLAN) from error
        yield plan, workbench


def _quiet_libraries() -> None:
    """Their progress bars and advice would tear our display apart. Read when they are imported, so it comes first."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def _run(plan: Plan, workbench: Workbench, directory: Path, resume: bool, console: Console) -> RunOutcome:
    from harness.progress import LiveProgress, PlainProgress
    from harness.runner import DeviceNotReadyError, Runner, open_run
    from results.store import StoreError

    for note in (*plan.skipped, *plan.left_out):
        console.print(f"left out: {note}", markup=False, highlight=False)
    try:
        with LiveProgress(console) if console.is_terminal else PlainProgress(console) as progress:
            workbench.on_wait = progress.waiting
            with open_run(plan, directory, resume, workbench) as store:
                return Runner(plan, store, workbench, progress).run()
    except StoreError as error:
        _fail(str(error), EXIT_BAD_PLAN)
    except DeviceNotReadyError as error:
        _fail(str(error), EXIT_DEVICE_NOT_READY)


def _show_run(directory: Path, console: Console, as_json: bool) -> None:
    """Writes the tables and the report of a stored run, prints the summary, says where everything is."""
    from harness.summary import print_summary
    from results.derived import Derived
    from results.report.csv import write_csv
    from results.report.html import write_html
    from results.store import Store, StoreError

    try:
        with Store.view(directory) as store:
            derived = Derived(store.data())
            files = [*write_csv(derived.run, directory, derived), directory / "report.html"]
            write_html(derived.run, directory / "report.html", derived)
    except (StoreError, OSError) as error:
        _fail(str(error), EXIT_BAD_PLAN)
    if as_json:
        typer.echo(
            json.dumps(
                {"files": [str(f) for f in files], "summary": json.loads(derived.summary.to_json(orient="records"))}
            )
        )
        return
    print_summary(derived, console)
    for file in files:
        console.print(str(file), markup=False, highlight=False, soft_wrap=True)


def _print_dry_run(plan: Plan, workbench: Workbench, console: Console, as_json: bool) -> None:
    from harness.estimate import estimate

    found = estimate(plan, workbench)
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
    _print_rows(rows, as_json, f"{plan.name}: {len(rows)} cells")
    if not as_json:
        total_s = sum(e.seconds for e in found)
        for note in (*plan.skipped, *plan.left_out):
            console.print(f"left out: {note}", markup=False, highlight=False)
        console.print(f"about {total_s / 60:.1f} minutes (decode tokens at most; speeds are guessed from a probe)")


# --- printing --------------------------------------------------------------------------------------------------------


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    found = Console(stderr=stderr)
    # A file or a pipe has no width of its own: wide enough that no table folds its words.
    return found if found.is_terminal or "COLUMNS" in os.environ else Console(stderr=stderr, width=PIPE_WIDTH)


def _print_rows(rows: list[dict[str, Any]], as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for key in rows[0] if rows else ():
        numeric = all(isinstance(r[key], int | float) for r in rows)
        table.add_column(key.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text("" if value is None else str(value)) for value in row.values()))
    _console().print(table)


def _print_self_test(found: SelfTest, kept: Path) -> None:
    from results.report.self_test import CHECK_WORDS, agreement_line, check_line, meter_line, verdict_line

    lines = [
        *(f"{CHECK_WORDS[c.ok]:5}{check_line(c)}" for c in found.checks),
        *(["", f"idle against {found.load}:"] if found.load else []),
        *map(meter_line, found.meters),
        *map(agreement_line, found.agreements),
        "",
        verdict_line(found),
        f"kept in {kept}; reports of runs made from now on show it",
    ]
    for line in lines:
        typer.echo(line)


def _device_spec(device: str, meter: str, app: str | None = None) -> DeviceSpec:
    """Of a device that is here. Fails where a name is unknown, or only a model."""
    from harness.plan import device_problems
    from harness.schema import DeviceSpec

    spec = DeviceSpec(name=device, meters=(meter,), app=app)
    if spec.is_modelled:
        _fail(
            f"device {device} is a hardware sheet, there is nothing to measure; name host or adb:SERIAL", EXIT_BAD_PLAN
        )
    for problem in device_problems("device", spec):
        _fail(problem, EXIT_BAD_PLAN)
    return spec


def _waits_on(status: Status) -> WaitListener:
    return lambda device, reason, left_s: status.update(f"{device}: {reason}; waiting, {left_s:.0f} s left")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
