"""`joulebench compare`: two runs, arms or machines, and which of their figures differ for certain."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.interrupts import raise_in_command
from harness.regress_command import EXIT_WORSE, Allow, CsvFile, HtmlFile, allowed, check_files, write_files
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_NONE_USABLE,
    EXIT_NOT_WRITTEN,
    AsJson,
    console_of,
    end_interrupted,
    fail,
    fail_each,
    fail_store,
    print_verdicts,
)
from results.printable import printable

if TYPE_CHECKING:
    from results.history.comparison import Comparison, RunTold, Side

LARGE_BYTES = 32_000_000
"""Of a database, from which another process is worth its start."""
Sided = "Folder of a run; an arm of it as RUN:ARM; a device as RUN@DEVICE; both as RUN:ARM@DEVICE."


def compare(
    first: Annotated[str, typer.Argument(metavar="A", help=Sided)],
    second: Annotated[str, typer.Argument(metavar="B", help="The same; what changed from A to B is told.")],
    allow: Allow = None,
    least: Annotated[
        float, typer.Option("--least", min=0.0, metavar="PERCENT", help="A smaller change is not called certain.")
    ] = 0.0,
    csv: CsvFile = None,
    html: HtmlFile = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print what is not certain, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare two runs, arms or machines. Ends with 1 where B is worse for certain."""
    raise_in_command()
    check_files(csv, html)
    kinds = allowed(allow or ())
    try:
        from results.history.comparison import CompareError
        from results.history.comparison import compare as compared

        sides = _sides(first, second)
        try:
            found = compared(*sides, kinds, least / 100)
        except CompareError as error:
            fail(str(error), EXIT_BAD_PLAN)
        from results.report.compare_page import write_comparison_csv, write_comparison_page

        unwritten = write_files(found, (csv, write_comparison_csv), (html, write_comparison_page))
        if as_json:
            from results.report.compare_page import comparison_frame
            from results.report.csv import json_records

            rows = json_records(comparison_frame(found))
            typer.echo(json.dumps({"notes": list(found.notes), "rows": rows}, indent=2))
        else:
            _print(found, show_all)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "nothing was changed")
    if unwritten:
        fail_each(unwritten, EXIT_NOT_WRITTEN)
    if found.has_worse:
        raise typer.Exit(EXIT_WORSE)
    if not found.n_tested:
        fail(f"nothing could be compared{_why_nothing(found)}", EXIT_NONE_USABLE)


def _why_nothing(found: Comparison) -> str:
    why = Counter(row.reason for row in found.rows).most_common()
    if len(why) > 1:
        return f"; most often: {why[0][0]} (--all shows every figure, and its reason)"
    return f": {why[0][0] if why else 'A has no figure'}"


def _sides(first: str, second: str) -> tuple[Side, Side]:
    """Reads each run once."""
    from results.history.comparison import Side

    asked = [(told, *_parsed(told)) for told in (first, second)]
    read = _read([folder for _, folder, _, _ in asked])
    found = []
    for told, folder, arm, device in asked:
        run = read[folder.resolve()]
        if arm is not None and arm not in {cell.engine for cell in run.cells} and "@" in arm:
            arm, _, device = arm.rpartition("@")
        found.append(Side(told, run, arm, device))
    return found[0], found[1]


def _parsed(told: str) -> tuple[Path, str | None, str | None]:
    """(folder, arm, device): the folder is the longest beginning that there is."""
    places = [i for i, letter in enumerate(told) if letter in ":@"]
    place = next((i for i in (len(told), *reversed(places)) if told[:i] and Path(told[:i]).is_dir()), None)
    if place is None:
        what = "a file, and no folder" if Path(told).exists() else "no such folder"
        wanted = "give the folder of a run, an arm of it as RUN:ARM, a device as RUN@DEVICE"
        fail(f"{told}: {what}; {wanted}", EXIT_BAD_PLAN)
    folder, rest = Path(told[:place]), told[place + 1 :] or None
    return (folder, None, rest) if told[place : place + 1] == "@" else (folder, rest, None)


def _read(folders: Sequence[Path]) -> dict[Path, RunTold]:
    """By resolved folder. Of two large runs another process reads one meanwhile."""
    from results.database import DATABASE, StoreError

    each = list({folder.resolve(): folder for folder in folders}.items())
    with console_of(stderr=True).status("reading the runs"):
        try:
            sizes = [_bytes(folder / DATABASE) for _, folder in each]
            if len(each) < 2 or min(sizes) < LARGE_BYTES:
                return {resolved: read_told(folder) for resolved, folder in each}
            from harness.processes import processes

            (here, own), (there, other) = each
            with processes(1) as pool:
                asked = pool.submit(read_told, other)
                return {here: read_told(own), there: asked.result()}
        except StoreError as error:
            fail_store(error)


def _bytes(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def read_told(folder: Path) -> RunTold:
    """Raises `StoreError`."""
    from results.history.comparison import told_of
    from results.store import Store

    with Store.view(folder) as store:
        return told_of(store.data())


def _print(found: Comparison, show_all: bool) -> None:
    from results.report.compare_page import COLUMNS, NUMBERS, ORDER, ordered, table_row

    console = console_of()
    rows = ordered(found)
    shown = [row for row in rows if show_all or row.verdict in ("worse", "better", "different")]
    whys = {why: i + 1 for i, why in enumerate(dict.fromkeys(table_row(row)[-1] for row in shown))}
    if shown:
        cells = [(f"{whys[why]}.", *cells) for *cells, why in map(table_row, shown)]
        print_verdicts(("", *COLUMNS[:-1]), cells, NUMBERS)
    counts = Counter[str](row.verdict for row in rows)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ORDER if counts[verdict])
    refused = dict.fromkeys(f"Refused: {row.reason}" for row in rows if row.verdict == "refused")
    said = dict.fromkeys(f"Compared although they are unlike, as asked: {one}" for row in rows for one in row.said)
    hint = "" if show_all or len(shown) == len(rows) else " (--all shows every figure)"
    lines = [
        *(f"{number}. {why}" for why, number in whys.items()),
        f"From A, {found.first.name}, to B, {found.second.name}: {told}{hint}",
        *said,
        *refused,
        *found.notes,
    ]
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
