"""The command that measures a machine and writes a sheet of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from harness.elsewhere import stamp, written_somewhere
from harness.interrupts import raise_in_command
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_DEVICE_NOT_READY,
    EXIT_NOT_WRITTEN,
    AsJson,
    check_out,
    console_of,
    end_interrupted,
    fail,
    fail_each,
    print_rows,
    quiet_libraries,
    warn_of_crowded,
)
from harness.weights_option import Weights
from results.printable import printable
from results.units import format_share

if TYPE_CHECKING:
    from engines.curves.machine import FittedMachine
    from engines.curves.rounds import Measured, Rounds

DISTURBED_SHARE = 0.1
"""Of the runs so far, beyond which it is told."""


def fit(
    out: Annotated[Path, typer.Option(metavar="SHEET.toml", help="The sheet; its points go to SHEET.csv.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes and rounds: about a minute.")] = False,
    weights: Annotated[Weights, typer.Option(help="Form of the weights; each form needs its own sheet.")] = "fp32",
    threads: Annotated[
        int | None, typer.Option(min=1, max=4096, help="CPU threads; default: one for each CPU that may be used.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto: the CPU, and CUDA if it is there.")] = (
        "auto"
    ),
    even_if_busy: Annotated[
        bool, typer.Option("--even-if-busy", help="Write the sheet even if others used the machine; it will say so.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure matrix products, copies, calls and whole requests here, and write a hardware sheet with its residuals."""
    quiet_libraries()
    raise_in_command()
    if problems := list(_name_problems(out)):
        fail_each(problems, EXIT_BAD_PLAN)
    check_out(out.parent)
    warn_of_crowded(threads)
    from devices.base import DeviceError
    from engines.curves.machine import doubts, fit_machine, points_text, residual_rows
    from engines.errors import EngineError
    from harness.host_lock import HOST, host_lock

    console = console_of(stderr=True)
    try:
        with console.status("making models of several shapes") as status:

            def on_round(unit: str, done: Rounds, n_rounds: int) -> None:
                line = _told_of_rounds(unit, done, n_rounds, even_if_busy)
                status.update(line)
                if not console.is_terminal:
                    console.print(line, markup=False, highlight=False)

            with host_lock([HOST]):
                found = fit_machine(out.stem, weights, quick, threads, device, on_round)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "no sheet was written")
    except (DeviceError, EngineError) as error:
        fail(str(error), EXIT_DEVICE_NOT_READY)
    except OSError as error:
        fail(f"made models cannot be written ({error}); set TMPDIR to a folder with room", EXIT_NOT_WRITTEN)
    busy = [told for unit, one in found.measured.items() if (told := _busy(unit, one)) is not None]
    if busy and not even_if_busy:
        fail(f"{'; '.join(busy)}; fit on a quiet machine, or give --even-if-busy", EXIT_DEVICE_NOT_READY)
    # Before it is told: a reader who leaves (`| head`) leaves the sheet there.
    kept, trouble = written_somewhere(
        out, f"{out.stem}-{stamp()}.toml", partial(_write_both, found, points_text(found))
    )
    print_rows(residual_rows(found), as_json, f"{out.stem}: how far the fitted prices miss what was measured")
    if not as_json:
        for told in (*busy, *doubts({unit: one.residuals for unit, one in found.fitted.items()})):
            typer.echo(f"warning: {printable(told)}", err=True)
    if kept is None:
        fail(f"{trouble}; the sheet is lost", EXIT_NOT_WRITTEN)
    if not as_json:
        typer.echo(f"{', '.join(printable(str(path)) for path in _files(kept))}: written")
        typer.echo(
            "To price with it (--model takes a smaller model, where this machine does not hold the default one):"
            f" joulebench cross --machine {shlex.quote(printable(str(kept)))} --weights {weights}"
        )
    if trouble:
        fail(f"{trouble}; the sheet is in {kept}", EXIT_NOT_WRITTEN)


def _files(out: Path) -> tuple[Path, Path]:
    """The sheet, and its points."""
    return out, out.with_suffix(".csv")


def _write_both(found: FittedMachine, points: str, out: Path) -> None:
    """Both or none: the same command can be given again. Raises `OSError`."""
    from results.report.files import write_new_text

    sheet_path, points_path = _files(out)
    write_new_text(points_path, points)
    try:
        write_new_text(sheet_path, found.text(out.stem))
    except BaseException:
        points_path.unlink()
        raise


def _name_problems(out: Path) -> Iterator[str]:
    from devices.models.sheet import name_taken

    is_sheet = out.suffix == ".toml"
    if not is_sheet:
        yield f"--out {out}: a sheet is a TOML file; end its name with .toml"
    for path in _files(out) if is_sheet else (out,):
        if path.exists() or path.is_symlink():
            yield f"{path}: exists already and is left as it is; give another name"
    if is_sheet and (taken := name_taken(out.stem)) is not None:
        yield f"{out}: {taken}"
    if not out.parent.is_dir():
        yield f"{out}: its folder does not exist; make it first"


def _told_of_rounds(unit: str, done: Rounds, n_rounds: int, even_if_busy: bool) -> str:
    """Early where others use the machine: it may go on for minutes, and write nothing."""
    line = f"{unit}: {done.n_done} of {n_rounds} rounds"
    if done.n_disturbed <= DISTURBED_SHARE * done.n_runs:
        return line
    line = f"{line}; {done.n_disturbed} of {done.n_runs} runs were disturbed so far"
    return line if even_if_busy else f"{line}: no sheet may come of it without --even-if-busy"


def _busy(unit: str, measured: Measured) -> str | None:
    """What to say of a machine that others used; None of a quiet one."""
    if measured.is_quiet:
        return None
    share = (
        ""
        if measured.foreign_share is None
        else f": {format_share(measured.foreign_share)} of the CPU time went to others"
    )
    return f"{unit}: {measured.n_disturbed} of {measured.n_runs} runs were disturbed{share}"
