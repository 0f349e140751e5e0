"""`joulebench coreml`: packages for the Apple Neural Engine, and what would leave it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    fail_each,
    print_rows,
    quiet_libraries,
)
from results.printable import printable
from results.units import MIB

if TYPE_CHECKING:
    from engines.coreml.lint import Linted

EXIT_FINDINGS = 1
MOST_ROWS = 40
"""Of a terminal; a file, the manifest and JSON hold all."""

coreml_app = typer.Typer(no_args_is_help=True, help="Packages for the Apple Neural Engine (Core ML).")


@contextmanager
def told_ends(what_stays: str) -> Iterator[None]:
    """Ends a command on all that is in its way, a line each, and on an interrupt."""
    from engines.errors import EngineError, ProblemsError

    try:
        yield
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, what_stays)
    except ProblemsError as error:
        fail_each(error.problems, EXIT_BAD_PLAN)
    except EngineError as error:
        fail(str(error), EXIT_BAD_PLAN)


def print_first(rows: list[dict[str, Any]], title: str, where_all_are: str) -> None:
    """The first of many rows, and how many are left out."""
    print_rows(rows[:MOST_ROWS], False, title)
    if len(rows) > MOST_ROWS:
        typer.echo(printable(f"and {len(rows) - MOST_ROWS} more: {where_all_are}"))


@coreml_app.command("lint")
def lint_packages(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with packages, or one .mlpackage.")],
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE.csv", help="Write every finding here.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read packages back, and tell what would leave the Neural Engine by the rules that others reported.

    Exit code 1: there are findings. 2: a package is missing, cannot be read, or is not as it was written.
    """
    quiet_libraries()
    raise_in_command()
    check_file("--csv", csv, ".csv")
    from engines.coreml.lint import lint_folder

    with told_ends("nothing was written"), console_of(stderr=True).status("reading packages"):
        linted = lint_folder(folder)
    if csv is not None:
        _write_csv(linted, csv)
    if as_json:
        print_rows(_rows(linted), True, "")
    else:
        _print_linted(linted, folder, csv)
    if not linted.passes:
        raise typer.Exit(EXIT_FINDINGS)


def _rows(linted: Linted) -> list[dict[str, Any]]:
    return [
        {
            "package": one.package or None,
            "function": one.function or None,
            "operation": one.operation or None,
            "type": one.kind or None,
            "rule": one.rule.name,
            "effect": one.rule.effect,
            "found": one.found,
            "says": one.rule.says,
            "source": one.rule.origin,
            "remedy": one.rule.remedy,
        }
        for one in linted.findings
    ]


def _print_linted(linted: Linted, folder: Path, csv: Path | None) -> None:
    shown = ("package", "function", "operation", "type", "rule", "effect", "found")
    rows = _rows(linted)
    if rows:
        where = "--csv FILE.csv writes all" if csv is None else f"all stand in {csv}"
        print_first([{key: row[key] for key in shown} for row in rows], f"{folder}: what was found", where)
        counted = Counter(one.rule.name for one in linted.findings)
        rules = {one.rule.name: one.rule for one in linted.findings}
        told = [
            {
                "rule": name,
                "found": n,
                "says": rules[name].says,
                "source": rules[name].origin,
                "to do": rules[name].remedy,
            }
            for name, n in counted.most_common()
        ]
        print_rows(told, False, "The rules behind them")
    n_notes = sum(one.is_note for one in linted.findings)
    typer.echo(
        f"{linted.n_packages} packages, {linted.n_graphs} graphs, of which a process holds {linted.n_held};"
        f" {linted.n_operations} operations; the heaviest graph"
        f" has {linted.most_weight_bytes / MIB:.4g} MiB of weights: {len(linted.findings) - n_notes} findings,"
        f" {n_notes} notes"
    )
    if linted.unlisted:
        kinds = ", ".join(f"{kind} ({n})" for kind, n in sorted(linted.unlisted.items()))
        typer.echo(printable(f"No source says where these run: {kinds}"))
    typer.echo("The rules are reports of others. No Mac has confirmed them here: MLComputePlan on yours decides.")


def _write_csv(linted: Linted, path: Path) -> None:
    import pandas as pd

    from results.report.csv import csv_text
    from results.report.files import replace_text

    columns = ["package", "function", "operation", "type", "rule", "effect", "found", "says", "source", "remedy"]
    try:
        replace_text(path, csv_text(pd.DataFrame(_rows(linted), columns=columns)))
    except OSError as error:
        fail(f"--csv {path}: cannot be written ({error.strerror or error}); name another file", EXIT_NOT_WRITTEN)
