"""Tables that a plan asks for, on a terminal: small, one after another, each with its notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.terminal import print_whole, table_of_arms
from results.asked_tables import AskedTable
from results.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

    from results.report.asked_figures import Entry


def print_asked_tables(tables: Sequence[AskedTable], console: Console) -> None:
    """Each fits 80 columns: seconds stand in the page and the file."""
    from rich.text import Text

    from results.report.asked_figures import asked_figures

    for figure in asked_figures(tables):
        table = table_of_arms(printable(figure.title), console)
        for column in figure.columns:
            table.add_column(Text(printable(column)), justify="right", overflow="fold")
        for name, entries in figure.rows:
            table.add_row(Text(printable(name)), *(Text(_words(entry)) for entry in entries))
        print_whole(table, console)
        console.print(printable(figure.subject), markup=False, highlight=False)
        for i, note in enumerate(figure.notes, start=1):
            console.print(f"({i}) {printable(note)}", markup=False, highlight=False)
        console.print()


def _words(entry: Entry) -> str:
    """ "1.33× [1.30,1.36](2)": on a narrow terminal it folds at its blanks."""
    return entry.text.replace(", ", ",") + (f"({entry.note})" if entry.note else "")
