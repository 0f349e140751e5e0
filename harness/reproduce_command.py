"""The command that sets every number of the sources beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.interrupts import raise_in_command
from harness.terminal import (
    EXIT_BAD_PLAN,
    AsJson,
    check_out,
    end_interrupted,
    fail_each,
    print_rows,
    quiet_libraries,
    write_first,
)

if TYPE_CHECKING:
    from harness.reproduce.ledger import Ledger
    from harness.reproduce.outcome import Reproduced
    from harness.reproduce.sensitivity import Varied

FOLDER = Path("reproduced")
CSV, FLIPS_CSV = "reproduced.csv", "sensitivity.csv"


def reproduce(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE|CLAIM]...", help="Sources (003), claims (000-204) or several of them (000-204..213)."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the CSV and the pages; default: ./reproduced, of some sources ./reproduced-001 and the"
            " like, none for single claims.",
        ),
    ] = None,
    sensitivity: Annotated[
        bool,
        typer.Option(help="Change each constant of the sheets by a fifth, and say which verdicts flip (minutes)."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare every number of the sources with what joulebench computes; all is modelled, not measured."""
    quiet_libraries()
    raise_in_command()
    from harness.reproduce.ledger import LedgerError, ledger, selected
    from harness.reproduce.outcome import aims, counts
    from harness.reproduce.outcome import reproduce as reproduced
    from harness.reproduce.told import count_rows, csv_rows, short_rows

    words = what or []
    try:
        book = ledger()
        claims = selected(book, words) if words else list(book.claims)
    except LedgerError as error:
        fail_each(error.problems, EXIT_BAD_PLAN)
    is_whole = all(len(word) == 3 for word in words)
    folder = out or (default_folder(words) if is_whole else None)
    if folder is not None:
        check_out(folder)
    try:
        done = reproduced(book, claims, is_whole, lambda line: typer.echo(line, err=True))
        changed = _changed(done, claims) if sensitivity else []
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "nothing was written")
    tell_files = write_first(folder, lambda into: _write(book, done, changed, into, is_whole))
    if as_json:
        print_rows(csv_rows(done), True, "")
    elif not is_whole:
        print_rows(short_rows(done), False, "Theirs and ours (modelled)")
    else:
        print_rows(count_rows(counts(done)), False, "Rows of the sources: theirs and ours (modelled)")
        for aim in aims(done):
            typer.echo(f"{'yes' if aim.is_met else 'no ':3}  {aim.words}: {aim.told}")
    if not as_json:
        _say_flips(changed)
    tell_files()


def default_folder(sources: Sequence[str]) -> Path:
    """Of some sources another one than of all, whose table and first page would be replaced by those of some."""
    return Path("-".join((str(FOLDER), *sorted(set(sources)))))


def _changed(done: list[Reproduced], claims: list[str]) -> list[Varied]:
    from harness.reproduce.sensitivity import tested

    return [tested(one.source.id, claims, lambda line: typer.echo(line, err=True)) for one in done]


def _say_flips(changed: list[Varied]) -> None:
    from harness.reproduce.sensitivity import constant_rows

    for one in changed:
        rows = constant_rows(one)
        n_flipped = len({flip.claim for flip in one.flips})
        flips = f"{n_flipped} verdict flips" if n_flipped == 1 else f"{n_flipped} verdicts flip"
        typer.echo(f"{one.source}: with one constant changed by a fifth, {flips}")
        if rows:
            print_rows(rows, False, f"{one.source}: constants that verdicts hang on")


def _write(book: Ledger, done: list[Reproduced], changed: list[Varied], folder: Path, with_pages: bool) -> list[Path]:
    """Raises `OSError`."""
    import pandas as pd

    from harness.reproduce.pages import write_pages
    from harness.reproduce.sensitivity import COLUMNS, flip_records
    from harness.reproduce.told import csv_rows
    from results.report.csv import csv_text
    from results.report.files import replace_text

    is_replaced = (folder / CSV).is_file()
    replace_text(folder / CSV, csv_text(pd.DataFrame(csv_rows(done))))
    if not changed and is_replaced:
        (folder / FLIPS_CSV).unlink(missing_ok=True)  # of the table that was replaced
    written = [folder / CSV]
    if changed:
        flips = pd.DataFrame(list(flip_records(changed)), columns=list(COLUMNS))
        replace_text(folder / FLIPS_CSV, csv_text(flips))
        written.append(folder / FLIPS_CSV)
    return written + (write_pages(book, done, folder, changed) if with_pages else [])
