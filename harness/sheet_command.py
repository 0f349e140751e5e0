"""`joulebench sheets`: which hardware sheets there are, what stands in one, and a copy to start from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.terminal import EXIT_BAD_PLAN, EXIT_NOT_WRITTEN, AsJson, fail, fail_each, print_rows
from results.printable import printable

if TYPE_CHECKING:
    from devices.models.links import LinkSheet
    from devices.models.sheet import Sheet, SheetRef

KINDS = ("stated", "fitted", "assumed")
UNITS = {
    "bytes_per_s": "B/s", "flops_per_s": "FLOP/s", "s_per_flop": "s/FLOP", "j_per_flop": "J/FLOP",
    "s_per_weight_byte": "s/B", "s_per_moved_byte": "s/B", "_launch": "s/launch", "_w": "W", "_hz": "Hz",
    "latency_s": "s",
}  # fmt: skip
"""By how a key ends. All take a prefix."""
SIZES = ("_bytes", "graph_bytes_limit")
"""Keys end so whose figures are bytes that a memory holds."""
NAME_LINE = re.compile(r"^name[ \t]*=.*$", re.MULTILINE)
"""Of a sheet's text: the first is the sheet's own."""
PLAIN_UNITS = {"pj_per_bit": "pJ/bit", "tokens_per_s": "token/s"}


def sheets(
    which: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.toml", help="The sheet to show, with all its figures.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Write a copy here, to start a sheet of your own.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List hardware sheets, show the figures of one, or write a copy to start from."""
    from devices.models.sheet import SheetError, available_sheets, load_sheet
    from harness.sheets import unknown_sheet

    if which is None:
        if out is not None:
            fail(f"--out {out}: which sheet? name one of {', '.join(available_sheets())}", EXIT_BAD_PLAN)
        print_rows([_about(load_sheet(name)) for name in available_sheets()], as_json, "Hardware sheets")
        return
    if (told := unknown_sheet(which)) is not None:
        fail(f"sheet {which}: {told}", EXIT_BAD_PLAN)
    ref: SheetRef = which if which in available_sheets() else Path(which)
    try:
        sheet = load_sheet(which if not which.endswith(".toml") else ref)
    except SheetError as error:
        fail_each((f"sheet {which}: {line}" for line in error.lines), EXIT_BAD_PLAN)
    if out is not None:
        _write(ref, sheet.name, out)
        return
    if as_json:
        typer.echo(sheet.model_dump_json(indent=2))
        return
    from harness.unheeded_sheets import unheeded_of_sheet

    print_rows(list(_figures(sheet)), False, f"{sheet.name}: {sheet.description} (source {sheet.source})")
    for told in unheeded_of_sheet(sheet):
        typer.echo(printable(told), err=True)


def _about(sheet: Sheet) -> dict[str, Any]:
    kinds = [row["kind"] for row in _figures(sheet)]
    return {
        "name": sheet.name,
        "machine": sheet.description,
        "source": sheet.source,
        "units": ", ".join(dict.fromkeys(unit.partition(":")[0] for unit in sheet.units)),
        "links": ", ".join(sheet.links),
        "joules of": ", ".join(c for c in sheet.components if sheet.has_watts(c)),
        "figures": ", ".join(f"{n} {kind}" for kind in KINDS if (n := kinds.count(kind))),
        "only for": sheet.only_for,
    }


def _figures(sheet: Sheet) -> Iterator[dict[str, Any]]:
    """Each with its key, its value, its kind and its origin; units of one table once."""
    from devices.models.efficiency import EfficiencyPoint
    from devices.models.figures import Misses, SheetFigure
    from devices.models.links import LinkSheet
    from results.records import Record

    def of(key: str, value: object) -> Iterator[dict[str, Any]]:
        if isinstance(value, SheetFigure):
            yield {"key": key, "value": _with_unit(key, value.value), "kind": value.kind, "origin": value.origin}
        elif isinstance(value, EfficiencyPoint):
            row = {"key": key, "value": f"{value.share:.4g} at {value.at:.6g}"}
            yield row | {"kind": value.kind, "origin": value.origin}
        elif isinstance(value, Misses):
            yield {"key": key, "value": value.words, "kind": "compared", "origin": value.origin}
        elif isinstance(value, dict):
            for name, one in value.items():
                yield from of(f"{key}.{name}", one)
        elif isinstance(value, tuple):
            for i, one in enumerate(value):
                yield from of(f"{key}[{i}]", one)
        elif isinstance(value, Record):
            if isinstance(value, LinkSheet):
                yield {"key": key, "value": _joined(value), "kind": "", "origin": ""}
            for name in type(value).model_fields:
                yield from of(f"{key}.{name}" if key else name, getattr(value, name))

    once = {id(unit): (name, unit) for name, unit in reversed(sheet.units.items())}
    units = dict(reversed(once.values()))
    yield from of("", sheet.model_copy(update={"units": units}))


def _joined(link: LinkSheet) -> str:
    return f"{', '.join(link.source)} to {', '.join(link.target)} and back, {link.kind}"


def _with_unit(key: str, value: float) -> str:
    from results.units import format_bytes, with_prefix

    if key.startswith("memories.") or key.endswith(SIZES):
        return format_bytes(round(value))
    for ending, unit in PLAIN_UNITS.items():
        if key.endswith(ending):
            return f"{value:.6g} {unit}"
    unit = next((unit for ending, unit in UNITS.items() if key.endswith(ending)), "")
    return with_prefix(value, unit) if unit else f"{value:.6g}"


def _write(ref: SheetRef, name: str, out: Path) -> None:
    from devices.models.sheet import SheetError, available_sheets, parse_sheet, sheet_path
    from results.report.files import write_new_text
    from results.report.plan_text import value_text

    if out.suffix != ".toml" or out.stem in available_sheets():
        fail(f"{out}: name it NAME.toml, after no sheet of joulebench; the device is then model:NAME", EXIT_BAD_PLAN)
    text = sheet_path(ref).read_text(encoding="utf-8-sig")
    called = f"name = {value_text(out.stem)}"
    copy = f"# A copy of sheet {name}, to change.\n{NAME_LINE.sub(lambda line: called, text, count=1)}"
    try:
        parse_sheet(copy, out.stem)
    except SheetError:
        fail(f"{name}: its name is not in a line of its own; copy the file, and write {called} in it", EXIT_BAD_PLAN)
    try:
        write_new_text(out, copy)
    except FileExistsError:
        fail(f"{out}: exists already and is left as it is; give another name", EXIT_BAD_PLAN)
    except OSError as error:
        fail(f"{out}: cannot be written ({error.strerror}); name a file in another folder", EXIT_NOT_WRITTEN)
    except ValueError as error:
        fail(f"{out}: cannot be written ({error}); give another name", EXIT_BAD_PLAN)
    typer.echo(f"{printable(str(out))}: written; change it, and then")
    typer.echo(f"  joulebench sheets {printable(shlex.quote(str(out)))}  # shows its figures, or every problem at once")
    typer.echo(f"  in a plan beside it:  [[device]]  sheet = {printable(value_text(out.name))}")
