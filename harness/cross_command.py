"""`joulebench cross`: every technique on every machine where it makes sense."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from harness.interrupts import raise_in_command
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_SOME_FAILED,
    AsJson,
    check_out,
    end_interrupted,
    fail,
    print_rows,
    quiet_libraries,
    write_first,
)
from harness.weights_option import quantisation_of, table_of
from results.printable import printable

if TYPE_CHECKING:
    from devices.models.sheet import Sheet
    from engines.model.quantised import Quantisation
    from harness.conclusions import Effect
    from harness.cross.table import Question, Row


class Range(NamedTuple):
    """What an option takes, in the words of its help and of its refusal."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least} to {self.most}"


TOKENS = Range(1, 131_072)
"""More takes minutes for each technique."""
JOBS = Range(1, 256)
RECALL = Range(0, 1)
MOST_REASONS = 12
CSV, EFFECTS_CSV = "cross.csv", "sensitivity.csv"


def cross(
    model: Annotated[str, typer.Option(help="A named shape, or the path of a config.json.")] = "qwen3-30b-a3b",
    prompt: Annotated[int, typer.Option(help=f"Tokens of the prompt, {TOKENS}.")] = 512,
    decode: Annotated[int, typer.Option(help=f"Tokens decoded after the prompt, {TOKENS}.")] = 32,
    chunk: Annotated[int, typer.Option(help=f"Tokens of a prefill step, {TOKENS}.")] = 256,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORM|TOML",
            help='Form of the weights: int8, ..., or { experts = "int4-g32" }; default: 16 bits.',
        ),
    ] = None,
    machine: Annotated[
        list[str] | None,
        typer.Option(help="A hardware sheet by name, or its file. May be repeated; default: all."),
    ] = None,
    technique: Annotated[list[str] | None, typer.Option(help="A technique. May be repeated; default: all.")] = None,
    recall: Annotated[
        float,
        typer.Option(help=f"Recall of techniques that predict experts, {RECALL}; source 003 states about 0.9."),
    ] = 0.9,
    routing: Annotated[
        str,
        typer.Option(
            metavar="TOML", help='uniform, { kind = "generated", imbalance = 4, reuse = 0.3 }, or from a file.'
        ),
    ] = "uniform",
    sensitivity: Annotated[
        bool, typer.Option(help="Change each constant of the sheets by a fifth, and say which conclusions flip.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(help=f"Processes that price rows, {JOBS}; default: one a core, 4 at most, 1 for few rows."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the CSV and the page.")] = None,
    as_json: AsJson = False,
) -> None:
    """Price every technique on every machine where it makes sense, for one model and one request. All is modelled."""
    quiet_libraries()
    raise_in_command()
    from concurrent.futures.process import BrokenProcessPool

    from harness.conclusions import effect_records
    from harness.cross.pricing import pricing, wanted_processes
    from harness.cross.sensitivity import effects
    from harness.cross.table import cross_table, records

    question, sheets, techniques = _asked(
        model, weights, prompt, decode, chunk, recall, routing, machine, technique, jobs
    )
    if out is not None:
        check_out(out)

    def say(line: str) -> None:
        typer.echo(printable(line), err=True)

    n_rows = sum(len(question.arms_on(sheet, techniques)) for sheet in sheets)
    n_processes = wanted_processes(jobs, n_rows, sensitivity)
    try:
        with pricing(question, n_processes) as price:
            rows = cross_table(question, sheets, techniques, say, price)
            found: list[Effect] | None = None
            if sensitivity:
                found = []
                for sheet in sheets:
                    own = [row for row in rows if row.machine == sheet.name]
                    found += effects(sheet, question.shape, own, price, say, question.n_tokens)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "nothing was written")
    except BrokenProcessPool:
        fail(
            f"one of {n_processes} processes was ended from outside; for want of memory? Try --jobs 1", EXIT_SOME_FAILED
        )
    tell_files = write_first(out, lambda folder: _write(question, sheets, rows, found, folder))
    if as_json:
        effects_told = {} if found is None else {"sensitivity": list(effect_records(found))}
        print_rows([{"asked": question.words, "rows": list(records(rows)), **effects_told}], True, "")
    else:
        priced = [_short(row) for row in rows if row.costs is not None]
        if priced:
            print_rows(priced, False, "Techniques by machine (modelled)")
        typer.echo(printable(f"Asked: {question.words}."))
        _say_rest(rows, found, out is None or not priced)
    tell_files()


def _asked(
    model: str,
    weights: str | None,
    prompt: int,
    decode: int,
    chunk: int,
    recall: float,
    routing: str,
    machine: list[str] | None,
    technique: list[str] | None,
    jobs: int | None,
) -> tuple[Question, list[Sheet], tuple[str, ...]]:
    """All problems at once."""
    from devices.models.sheet import SheetError, available_sheets, load_sheet
    from engines.errors import EngineError, lines_of
    from engines.pricing.routing_specs import parse_routing, routing_of_spec
    from engines.pricing.shapes import quantised, shape_named, sizes_of
    from engines.techniques.presets import PRESETS
    from harness.cross.table import Question
    from harness.problems import nearest
    from harness.sheets import unknown_sheet

    shape, source, forms = None, None, None
    problems = list(_beyond(prompt, decode, chunk, recall, jobs))
    sheets: dict[str, Sheet] = {}
    machines: dict[str, str] = {}
    try:
        forms = None if weights is None else _forms(weights)
    except ValueError as error:
        problems.append(f"--weights {weights}: {error}")
    try:
        shape = shape_named(model)
        if shape.n_sparse_layers == 0:
            problems.append(f"--model {model}: no layer of it has experts, and techniques place experts")
        if (told := shape.beyond_context(prompt + decode)) is not None:
            problems.append(f"--prompt and --decode: {told}; ask for fewer, or give --model a config.json with more")
        if forms is not None:
            shape = quantised(shape, forms)
    except EngineError as error:
        problems += [f"--model: {problem}" for problem in lines_of(error)]
    try:
        spec, sizes = parse_routing(routing), None if shape is None else sizes_of(shape)
        source = None if sizes is None else routing_of_spec(spec, sizes)
    except EngineError as error:
        problems.append(f"--routing: {error}")
    for name in dict.fromkeys(machine or available_sheets()):
        if (told := unknown_sheet(name)) is not None:
            problems.append(f"--machine: sheet {name}: {told}")
            continue
        try:
            sheet = load_sheet(Path(name) if name.endswith(".toml") else name)
        except SheetError as error:
            problems += [f"--machine: sheet {name}: {line}" for line in error.lines]
            continue
        if sheet != sheets.setdefault(sheet.name, sheet):
            both = f"{machines[sheet.name]!r} and {name!r}"
            problems.append(
                f"--machine: {both} are both called {sheet.name}; give each file, and its sheet, its own name"
            )
        machines[sheet.name] = name
    unknown = [name for name in technique or () if name not in PRESETS]
    problems += [f"--technique {name}: no such technique; {nearest(name, list(PRESETS))}" for name in unknown]
    for problem in problems:
        typer.echo(f"error: {printable(problem)}", err=True)
    if problems or shape is None or source is None:
        raise typer.Exit(EXIT_BAD_PLAN)
    question = Question(shape, source, prompt, decode, chunk, recall)
    found = [sheet for sheet in sheets.values() if machine is not None or sheet.only_for is None]
    return question, found, tuple(dict.fromkeys(technique or PRESETS))


def _beyond(prompt: int, decode: int, chunk: int, recall: float, jobs: int | None) -> Iterator[str]:
    """Typer would tell the first alone."""
    given = (
        ("prompt", prompt, TOKENS),
        ("decode", decode, TOKENS),
        ("chunk", chunk, TOKENS),
        ("recall", recall, RECALL),
        ("jobs", jobs, JOBS),
    )
    for option, value, allowed in given:
        if value is not None and not allowed.least <= value <= allowed.most:
            yield f"--{option} {value}: must be {allowed}"


def _forms(weights: str) -> Quantisation:
    """Raises `ValueError` in one line."""
    from engines.pricing.model_shape import WeightBits

    table = table_of(weights, WeightBits._fields)
    for key in ("arithmetic", "attention_arithmetic", "cache"):
        if key in table:
            raise ValueError(f"{key}: no sheet has prices for it; leave it out")
    return quantisation_of(table)


def _short(row: Row) -> dict[str, Any]:
    return {
        "machine": row.machine,
        "technique": row.arm.name,
        "first token s": _figure(row.ttft_s),
        "token ms": _figure(None if row.tpot_s is None else 1e3 * row.tpot_s),
        "J/decoded token": _figure(row.j_per_token),
        "lost %": f"{100 * (row.lost_prefill or 0):.2g}, {100 * (row.lost_decode or 0):.2g}",
        "decoding is bound by": row.binds_decode,
        "front": row.front_words,
    }


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _say_rest(rows: list[Row], found: list[Effect] | None, with_reasons: bool) -> None:
    absent = [row for row in rows if row.costs is None]
    if absent:
        counts = {result: sum(row.result == result for row in absent) for result in ("N.S.", "oom", "not priced")}
        told = ", ".join(f"{n} {result}" for result, n in counts.items() if n)
        typer.echo(
            f"Without figures: {told}." + ("" if with_reasons else f" The reasons stand in {CSV} and on the page.")
        )
    if with_reasons:
        reasons = Counter((row.machine, row.why_not) for row in absent)
        for (machine, why_not), n in reasons.most_common(MOST_REASONS):
            typer.echo(printable(f"  {machine}, {n} of them: {why_not}"))
        if len(reasons) > MOST_REASONS:
            typer.echo(f"  and {len(reasons) - MOST_REASONS} more reasons: --out DIR writes them all")
    for one in found or ():
        if one.flips:
            typer.echo(printable(one.words))
    if found is not None and not any(one.flips for one in found):
        is_asked = any(one.lead_before is not None for one in found)
        why = "" if is_asked else ": on no machine is another arm near the first"
        typer.echo(f"No conclusion flips when one constant changes by a fifth{why}.")


def _write(
    question: Question, sheets: list[Sheet], rows: list[Row], found: list[Effect] | None, folder: Path
) -> list[Path]:
    """Raises `OSError`."""
    import pandas as pd

    from harness.conclusions import effect_records
    from harness.cross.pages import write_page
    from harness.cross.table import records
    from results.report.csv import csv_text
    from results.report.files import replace_text

    tables = {CSV: records(rows)} | ({} if found is None else {EFFECTS_CSV: effect_records(found)})
    is_replaced = (folder / CSV).is_file()
    for name, table in tables.items():
        replace_text(folder / name, csv_text(pd.DataFrame(list(table)).assign(asked=question.words)))
    if found is None and is_replaced:
        (folder / EFFECTS_CSV).unlink(missing_ok=True)  # of the table that was replaced
    return [*(folder / name for name in tables), write_page(question, sheets, rows, found, folder)]
