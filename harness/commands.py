"""The commands and their order. Prints; everything else logs.

Heavy packages are imported by the command that needs them.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

import typer

from harness.bundled_plans import FIRST_PLAN, bundled_plans, write_bundled_plan
from harness.calibrate_command import calibrate
from harness.compare_command import compare
from harness.coreml_command import coreml_app
from harness.coreml_convert_command import convert_model
from harness.cross_command import cross
from harness.device_commands import devices, doctor, record
from harness.engine_commands import engines_app
from harness.fleet_command import fleet_app
from harness.history_command import baseline_app, history
from harness.interrupts import raise_in_command
from harness.keep_commands import bundle, export, open_run, verify
from harness.model_command import fit
from harness.regress_command import regress
from harness.reproduce_command import reproduce
from harness.run_commands import plan_check, plan_schema, report, run
from harness.schedule_command import schedule_app
from harness.serve_command import serve
from harness.sheet_command import sheets
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_NOT_WRITTEN,
    AsJson,
    end_interrupted,
    fail,
    log_to_terminal,
    print_rows,
    quiet_libraries,
    warn_of_crowded,
)
from harness.trace_command import trace
from harness.tune_command import tune
from results.printable import printable

LISTS = ("engines", "techniques", "workloads", "devices", "meters", "plans")

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How fast, how many joules, how accurate: language models and MoE placements, measured in one run.",
)
plan_app = typer.Typer(no_args_is_help=True, help="Check a plan, or print the schema of plans.")
app.add_typer(plan_app, name="plan")
model_app = typer.Typer(no_args_is_help=True, help="Make a hardware sheet of this machine.")
app.add_typer(model_app, name="model")
app.add_typer(engines_app, name="engines")
app.add_typer(schedule_app, name="schedule")
app.add_typer(fleet_app, name="fleet")
app.add_typer(coreml_app, name="coreml")
app.add_typer(baseline_app, name="baseline")


def _names_starting(names: Iterable[str]) -> Callable[[str], list[str]]:
    """For the shell's completion."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def _tell_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"joulebench {version('joulebench')}")
        except PackageNotFoundError:
            fail("joulebench is not installed here, so its version is not known; `pip install .`", EXIT_BAD_PLAN)
        raise typer.Exit


@app.callback()
def start(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False,
    _version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    log_to_terminal(logging.INFO if verbose else logging.WARNING)


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="PLAN.toml", help="Plan file to write.")] = Path("plan.toml"),
    name: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="NAME",
            help="The plan to copy; `joulebench list plans` shows them.",
            autocompletion=_names_starting(bundled_plans()),
        ),
    ] = FIRST_PLAN,
) -> None:
    """Write a plan to start from, explained line by line."""
    known = bundled_plans()
    if name not in known:
        fail(f"--from {name}: no such plan; take one of {', '.join(known)}", EXIT_BAD_PLAN)
    try:
        write_bundled_plan(name, path)
    except FileExistsError:
        fail(f"{path}: exists already and is left as it is; give another name", EXIT_BAD_PLAN)
    except OSError as error:
        fail(f"{path}: cannot be written ({error.strerror}); name a file in another folder", EXIT_NOT_WRITTEN)
    except ValueError as error:
        fail(f"{path}: cannot be written ({error}); give another name", EXIT_BAD_PLAN)
    shown = shlex.quote(str(path))
    typer.echo(f"{printable(str(path))}: written; read it, change it, and then")
    for step, why in (
        (f"plan check {shown}", "tells every problem at once"),
        (f"run {shown} --dry-run", "shows the cells, and estimates the time"),
        (f"run {shown}", "measures; tables and report.html stand in runs/"),
    ):
        typer.echo(f"  joulebench {step:30}  # {why}")


app.command()(run)
app.command()(calibrate)
app.command()(report)
app.command()(history)
app.command()(compare)
app.command()(regress)
app.command("open")(open_run)
app.command()(export)
app.command()(bundle)
app.command()(verify)
app.command()(trace)
app.command()(serve)
plan_app.command("check")(plan_check)
plan_app.command("schema")(plan_schema)
model_app.command()(fit)
coreml_app.command("convert")(convert_model)
app.command()(devices)
app.command()(sheets)
app.command()(doctor)
app.command()(record)
app.command()(reproduce)
app.command()(cross)
app.command()(tune)


@app.command("list")
def list_names(
    what: Annotated[str, typer.Argument(metavar="|".join(LISTS), autocompletion=_names_starting(LISTS))],
    as_json: AsJson = False,
) -> None:
    """List what a plan can name, and the bundled plans."""
    if what not in LISTS:
        fail(f"list {what}: no such list; take one of {', '.join(LISTS)}", EXIT_BAD_PLAN)
    from harness.inventory import catalog_rows, technique_rows

    rows = technique_rows() if what == "techniques" and as_json else catalog_rows(what)
    print_rows(rows, as_json, what.capitalize())


@app.command("train-tiny")
def train_tiny_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder to write, or to continue.")],
    device: Annotated[str, typer.Option(help="Where torch computes: cpu, cuda, mps.")] = "cpu",
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads; default: torch's own number.")
    ] = None,
) -> None:
    """Train the bundled Qwen3-MoE again, from its seed: 40 minutes on two cores. Continues if it was interrupted."""
    quiet_libraries()
    warn_of_crowded(threads)
    import torch

    from engines.errors import EngineError
    from harness.train_tiny import train_tiny

    logging.getLogger("engines.tiny.training").setLevel(logging.INFO)
    raise_in_command()
    if threads:
        torch.set_num_threads(threads)
    try:
        train_tiny(folder, device)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, f"the same command goes on with what is in {folder}")
    except OSError as error:
        fail(f"{folder}: cannot be written ({error.strerror or error}); name another folder", EXIT_NOT_WRITTEN)
    except (EngineError, RuntimeError) as error:
        fail(f"{folder}: {error}", EXIT_BAD_PLAN)
    typer.echo(printable(str(folder)))
