"""`joulebench regress`: whether anything got worse since a baseline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from harness.history_command import RUNS, HistoryFolder, opened
from harness.interrupts import raise_in_command
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_NONE_USABLE,
    EXIT_NOT_WRITTEN,
    AsJson,
    check_file,
    console_of,
    end_interrupted,
    fail,
    fail_each,
    print_verdicts,
)
from results.printable import printable

if TYPE_CHECKING:
    from results.history.judged import Judgement
    from results.history.unlike import What

EXIT_WORSE = 1
MOST_ALIKE = 3
"""Figures without a change that share a reason: more stand in a line, for rows of them say nothing else."""
TOLD_ARMS = 3

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="WHAT",
        help="Compare although these are unlike: requests, methods, meters, machines, systems, versions, roads."
        " Repeatable.",
    ),
]

CsvFile = Annotated[Path | None, typer.Option("--csv", metavar="FILE.csv", help="Write all figures as a table.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", metavar="FILE.html", help="Write a page.")]
Write: TypeAlias = "Callable[[T, Path], None]"
T = TypeVar("T")


def regress(
    baseline: Annotated[str, typer.Option(metavar="NAME", help="What to hold against: a baseline, or one run.")],
    directory: HistoryFolder = RUNS,
    anchor: Annotated[
        str | None,
        typer.Option(metavar="ARM", help="Reference arm of every run: other arms are taken over it, run by run."),
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this metric. Repeatable.")] = None,
    least: Annotated[
        float, typer.Option("--least", min=0.0, metavar="PERCENT", help="A smaller change does not count.")
    ] = 0.5,
    most_noise: Annotated[
        float, typer.Option(min=0.0, metavar="PERCENT", help="Where only larger changes would show: UNRELIABLE.")
    ] = 5.0,
    allow: Allow = None,
    csv: CsvFile = None,
    html: HtmlFile = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print every figure: what passed, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Judge the newest runs against a baseline. Ends with 1 where something got worse for certain."""
    from results.history.index import HistoryError
    from results.history.regress import ALLOWED, Asked
    from results.history.regress import regress as judge

    raise_in_command()
    check_files(csv, html)
    asked = Asked(anchor, ALLOWED | allowed(allow or ()), least / 100, most_noise / 100, tuple(metric or ()))
    try:
        with opened(directory) as found:
            try:
                judgement = judge(found, baseline, asked)
            except HistoryError as error:
                fail(str(error), EXIT_BAD_PLAN)
        from results.report.regress_page import write_judgement_csv, write_judgement_page

        unwritten = write_files(judgement, (csv, write_judgement_csv), (html, write_judgement_page))
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "nothing was changed")
    if as_json:
        typer.echo(json.dumps(_record(judgement), indent=2))
    else:
        _print(judgement, show_all)
    if unwritten:
        fail_each(unwritten, EXIT_NOT_WRITTEN)
    if judgement.has_regressed:
        raise typer.Exit(EXIT_WORSE)
    if all(one.verdict == "UNRELIABLE" for one in judgement.counted):
        why = Counter(one.reason for one in judgement.counted).most_common(1)
        most = why[0][0] if why else "only the anchor is there"
        fail(f"nothing can be said of any figure; most often: {most}", EXIT_NONE_USABLE)


def check_files(csv: Path | None, html: Path | None) -> None:
    """Ends the command where one would replace the other, or a file of another kind."""
    check_file("--csv", csv, ".csv")
    check_file("--html", html, ".html")
    if csv is not None and csv == html and (csv.is_file() or not csv.exists()):
        fail(f"--csv {csv}: is --html too; name two files", EXIT_BAD_PLAN)


def write_files(found: T, csv: tuple[Path | None, Write[T]], html: tuple[Path | None, Write[T]]) -> list[str]:
    """Those that were asked for. What could not be written, in words: whoever asked prints what was found, and ends
    the command with them then."""
    problems = []
    for option, (path, write) in (("--csv", csv), ("--html", html)):
        if path is None:
            continue
        try:
            write(found, path)
        except OSError as error:
            problems.append(f"{option} {path}: cannot be written ({error.strerror or error}); name another file")
    return problems


def allowed(names: Sequence[str]) -> frozenset[What]:
    """Ends the command where a name is none."""
    from results.history.unlike import WHATS

    strangers = [name for name in names if name not in WHATS]
    if strangers:
        told = "; ".join(f"{name} ({words})" for name, words in WHATS.items())
        fail(f"--allow {strangers[0]}: no such kind; take one of {told}", EXIT_BAD_PLAN)
    return frozenset(what for what in WHATS if what in names)


def _print(judgement: Judgement, show_all: bool) -> None:
    from results.report.regress_page import COLUMNS, NUMBERS, VERDICTS, lead, ordered, table_row, why

    console = console_of()
    counts = Counter[str](one.verdict for one in judgement.counted)
    told = [one for one in ordered(judgement) if show_all or one.verdict != "PASS" or one.is_anchor]
    alike = Counter(why(one) for one in told if one.change is None and not one.is_anchor)
    folded = {reason: n for reason, n in alike.items() if n > MOST_ALIKE and not show_all}
    shown = [one for one in told if one.change is not None or one.is_anchor or why(one) not in folded]
    whys = {reason: i + 1 for i, reason in enumerate(dict.fromkeys(map(why, shown)))}
    if shown:
        print_verdicts(("", *COLUMNS), [(f"{whys[why(one)]}.", *table_row(one)) for one in shown], NUMBERS)
    for reason, number in whys.items():
        console.print(f"{number}. {printable(reason)}", markup=False, highlight=False, soft_wrap=True)
    for reason, n in folded.items():
        own = [one for one in told if one.change is None and why(one) == reason]
        arms = list(dict.fromkeys(one.arm for one in own))
        named = ", ".join(arms[:TOLD_ARMS]) + (f" and {len(arms) - TOLD_ARMS} more" if len(arms) > TOLD_ARMS else "")
        line = f"{own[0].verdict}, {n} figures of {named}: {reason}"
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    hint = " (--all shows each)" if (counts["PASS"] or folded) and not show_all else ""
    counted = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    for line in (f"{lead(judgement)}: {counted}{hint}", *judgement.notes):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _record(judgement: Judgement) -> dict[str, Any]:
    from results.report.regress_page import records

    return {
        "baseline": [run.folder for run in judgement.baseline],
        "runs": judgement.n_runs,
        "regressed": judgement.has_regressed,
        "notes": list(judgement.notes),
        "judged": records(judgement),
    }
