"""The command line: its commands and their order. Prints; everything else logs.

Heavy packages are imported by the command that needs them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from harness.device_commands import devices, doctor, record
from harness.run_commands import plan_check, plan_schema, report, run
from harness.terminal import EXIT_BAD_PLAN, EXIT_INTERRUPTED, AsJson, fail, print_rows, quiet_libraries

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How fast, how many joules, how accurate: language models and MoE placements, measured in one run.",
)
plan_app = typer.Typer(no_args_is_help=True, help="Check a plan, or print the schema of plans.")
app.add_typer(plan_app, name="plan")


@app.callback()
def start(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what happens.")] = False) -> None:
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    if not verbose:
        # It warns of every vendor's library that is absent, which `devices` says in its own words.
        logging.getLogger("zeus").setLevel(logging.ERROR)


app.command()(run)
app.command()(report)
plan_app.command("check")(plan_check)
plan_app.command("schema")(plan_schema)
app.command()(devices)
app.command()(doctor)
app.command()(record)


@app.command("list")
def list_names(
    what: Annotated[str, typer.Argument(metavar="engines|techniques|workloads|devices|meters")], as_json: AsJson = False
) -> None:
    """List what a plan can name."""
    from harness.inventory import CATALOGS, catalog_rows

    if what not in CATALOGS:
        fail(f"list {what}: no such list; take one of {', '.join(CATALOGS)}", EXIT_BAD_PLAN)
    print_rows(catalog_rows(what), as_json, what.capitalize())


@app.command("train-tiny")
def train_tiny_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Model folder to write, or to go on with.")],
    device: Annotated[str, typer.Option(help="Where torch computes: cpu, cuda, mps.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own number by default.")] = None,
) -> None:
    """Train the bundled Qwen3-MoE again, from its seed: 40 minutes on two cores. An interrupted training goes on."""
    quiet_libraries()
    import torch

    from engines.errors import EngineError
    from harness.train_tiny import train_tiny

    logging.getLogger("engines.training").setLevel(logging.INFO)
    if threads:
        torch.set_num_threads(threads)
    try:
        train_tiny(folder, device)
    except KeyboardInterrupt:
        fail(f"interrupted; the same command goes on with what is in {folder}", EXIT_INTERRUPTED)
    except (EngineError, OSError, RuntimeError) as error:
        fail(f"{folder}: {error}", EXIT_BAD_PLAN)
    typer.echo(str(folder))


def main() -> None:
    app()
