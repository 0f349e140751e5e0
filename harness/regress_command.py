"""`joulebench regress`: whether anything got worse since a baseline."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.history_command import RUNS, HistoryFolder, opened
from harness.interrupts import raise_in_command
from harness.terminal import EXIT_BAD_PLAN, EXIT_NONE_USABLE, AsJson, console_of, end_interrupted, fail
from results.printable import printable

if TYPE_CHECKING:
    from results.history.regress import Judged, Judgement
    from results.history.unlike import What

EXIT_WORSE = 1
VERDICTS = ("REGRESSION", "UNRELIABLE", "IMPROVED", "PASS")

Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="WHAT",
        help="Compare although these are unlike: requests, methods, meters, machines, systems, versions, roads."
        " Repeatable.",
    ),
]


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
    show_all: Annotated[bool, typer.Option("--all", help="Print what passed, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Judge the newest runs against a baseline. Ends with 1 where something got worse for certain."""
    from results.history.index import HistoryError
    from results.history.regress import ALLOWED, Asked
    from results.history.regress import regress as judge

    raise_in_command()
    asked = Asked(anchor, ALLOWED | allowed(allow or ()), least / 100, most_noise / 100, tuple(metric or ()))
    try:
        with opened(directory) as found:
            try:
                judgement = judge(found, baseline, asked)
            except HistoryError as error:
                fail(str(error), EXIT_BAD_PLAN)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "nothing was changed")
    if as_json:
        typer.echo(json.dumps(_record(judgement), indent=2))
    else:
        _print(judgement, show_all)
    if judgement.has_regressed:
        raise typer.Exit(EXIT_WORSE)
    if all(one.verdict == "UNRELIABLE" for one in judgement.counted):
        why = Counter(one.reason for one in judgement.counted).most_common(1)
        most = why[0][0] if why else "only the anchor is there"
        fail(f"nothing can be said of any figure; most often: {most}", EXIT_NONE_USABLE)


def allowed(names: Sequence[str]) -> frozenset[What]:
    """Ends the command where a name is none."""
    from results.history.unlike import WHATS

    strangers = [name for name in names if name not in WHATS]
    if strangers:
        told = "; ".join(f"{name} ({words})" for name, words in WHATS.items())
        fail(f"--allow {strangers[0]}: no such kind; take one of {told}", EXIT_BAD_PLAN)
    return frozenset(what for what in WHATS if what in names)


def _print(judgement: Judgement, show_all: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    console = console_of()
    counts = Counter[str](one.verdict for one in judgement.counted)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("", "verdict", "arm", "workload", "device", "figure"):
        table.add_column(title, overflow="fold")
    for title in ("runs", "baseline", "now", "change", "95 %", "noise"):
        table.add_column(title, justify="right", overflow="fold")
    shown = [one for one in judgement.judged if show_all or one.verdict != "PASS" or one.is_anchor]
    shown = sorted(shown, key=lambda one: (one.is_anchor, VERDICTS.index(one.verdict)))
    whys = {why: i + 1 for i, why in enumerate(dict.fromkeys(map(_why, shown)))}
    for one in shown:
        table.add_row(*(Text(printable(cell)) for cell in (f"{whys[_why(one)]}.", *_row(one))))
    if shown:
        console.print(table)
    for why, number in whys.items():
        console.print(f"{number}. {printable(why)}", markup=False, highlight=False, soft_wrap=True)
    baseline = ", ".join(run.folder for run in judgement.baseline)
    hint = " (--all shows what passed)" if counts["PASS"] and not show_all else ""
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS)
    for line in (f"Against {baseline}, over {judgement.n_runs} runs: {told}{hint}", *judgement.notes):
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)


def _row(one: Judged) -> list[str]:
    figure, shown = one.figure, one.series.shown
    verdict = f"anchor: {one.verdict}" if one.is_anchor else one.verdict
    how = "" if figure.method == "measured" else f", {figure.method}"
    ends = "" if one.low is None or one.high is None else f"[{shown(one.low)}, {shown(one.high)}]"
    return [
        verdict, one.arm, one.workload, one.device, f"{figure.name}{how}", str(len(one.series.points)),
        told_value(one, one.base), told_value(one, one.last), "" if one.change is None else shown(one.change), ends,
        "" if one.noise is None else shown(one.noise).lstrip("+"),
    ]  # fmt: skip


def told_value(one: Judged, value: float | None) -> str:
    from results.units import format_number, format_quantity

    if value is None:
        return ""
    if one.series.is_anchored:
        return f"{format_number(value)}× the anchor"
    return format_quantity(100 * value, "%") if one.figure.unit == "1" else format_quantity(value, one.figure.unit)


def _why(one: Judged) -> str:
    from results.history.unlike import unlike_environments

    parts = [one.reason]
    if one.since is not None and one.change is not None:
        parts.append(f"since {one.since.folder} ({one.since.created_at[:10]})")
        runs = [point.run for point in one.series.points]
        at = next(i for i, run in enumerate(runs) if run.folder == one.since.folder)
        before = runs[at - 1].environments.get(one.device) if at else None
        changed = unlike_environments(before, one.since.environments.get(one.device))
        parts += [f"with it changed: {unlike.words}" for unlike in changed]
    parts += [f"left out: {why}" for why in one.left_out[:2]]
    return "; ".join(parts)


def _record(judgement: Judgement) -> dict[str, Any]:
    return {
        "baseline": [run.folder for run in judgement.baseline],
        "runs": judgement.n_runs,
        "regressed": judgement.has_regressed,
        "notes": list(judgement.notes),
        "judged": [
            {
                "verdict": one.verdict, "is_anchor": one.is_anchor, "device": one.device, "arm": one.arm,
                "model": one.model, "workload": one.workload, "metric": one.figure.metric, "phase": one.figure.phase,
                "unit": one.figure.unit, "method": one.figure.method, "meter": one.figure.meter,
                "runs": len(one.series.points), "is_relative": one.series.is_log, "baseline": one.base,
                "now": one.last, "change": one.change, "low": one.low, "high": one.high, "p": one.p,
                "noise": one.noise, "floor": one.floor,
                "since": one.since.folder if one.since is not None else None, "reason": one.reason,
                "left_out": list(one.left_out),
            }
            for one in judgement.judged
        ],
    }  # fmt: skip
