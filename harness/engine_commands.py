"""`joulebench engines doctor`: which engines that are not ours are here, what each can, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.terminal import AsJson, print_rows
from results.printable import printable, with_colon

if TYPE_CHECKING:
    from harness.external.base import ExternalSpec

engines_app = typer.Typer(no_args_is_help=True, help="Engines that are not ours: which are here, and what they can.")


@engines_app.command("doctor")
def engines_doctor(
    device: Annotated[
        str, typer.Option("--device", help="Tell only engines that go onto this device: host, adb:SERIAL, ios:UDID.")
    ] = "host",
    environments: Annotated[
        list[Path] | None,
        typer.Option(
            "--environment",
            metavar="DIR",
            help="A virtual environment that may have the wheel of an engine, as a plan names it. May be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show engines that a plan may name with `runs`: here or missing, version, abilities. Nothing is started.

    Ends with 4 where the phone of --device is not there or not ready.
    """
    from harness.device_specs import DEVICE_KINDS
    from harness.schema import DEVICE
    from harness.terminal import EXIT_BAD_PLAN, EXIT_DEVICE_NOT_READY, fail

    kind = DEVICE.read({"name": device}).tag
    if kind not in {own.tag for own in DEVICE_KINDS} or kind == "model" or (kind == "host" and device != "host"):
        fail(f"--device {device}: engines go onto host, adb:SERIAL or ios:UDID; a sheet runs none", EXIT_BAD_PLAN)
    refuse_no_environments(kind, environments or ())
    is_ready = kind == "host" or _told_phone(device, kind)
    rows = engine_rows(kind, environments or ())
    title = f"Engines that are not ours, on {device}"
    if as_json:
        print_rows(rows, True, title)
    else:
        _print(rows, kind, title)
    if not is_ready:
        raise typer.Exit(EXIT_DEVICE_NOT_READY)


def _print(rows: list[dict[str, Any]], kind: str, title: str) -> None:
    print_rows([_short(row) for row in rows], False, title)
    lines = [f"{row['runs']}: {row['what']}" for row in rows]
    if kind == "host":
        lines = [f"{line}. {_where(row)}" for line, row in zip(lines, rows, strict=True)]
    else:
        lines.append(f"All are {NOT_LOOKED_FOR[kind]}")
    for line in lines:
        typer.echo(printable(f"{line}."))


YES_NO = {True: "yes", False: "no"}
BRIEF = {"our token ids": "token ids", "lengths only": "lengths", "each phase": "by phase", "both phases": "one"}


def _short(row: dict[str, Any]) -> dict[str, str]:
    """What fits into 80 columns; the sentences stand below the table."""
    looked_for = {} if row["here"] is None else {"here": YES_NO[row["here"]]}
    can = {key: BRIEF.get(row[key], row[key]) for key in ("threads", "cores")}
    asked, stamps = BRIEF[row["asked"]], row["stamps"].removeprefix("each ")
    scores = YES_NO[row["log_likelihoods"]]
    return {"runs": row["runs"], **looked_for, "asked": asked, "scores": scores, "stamps": stamps, **can}


def _where(row: dict[str, Any]) -> str:
    if not row["here"]:
        return f"Missing: {row['remark']}"
    return f"Here: {', '.join(filter(None, (row['version'], row['remark'])))}"


def refuse_no_environments(kind: str, environments: Sequence[Path]) -> None:
    """Ends the command where one is no virtual environment, or wheels cannot run."""
    from engines.external.programs.wheel import python_of
    from harness.terminal import EXIT_BAD_PLAN, fail

    if environments and kind != "host":
        fail("--environment: a wheel runs on the host alone; leave it out, or --device", EXIT_BAD_PLAN)
    none = [str(one) for one in environments if not python_of(one).exists()]
    if none:
        fail(f"--environment: no virtual environment (no bin/python in it): {', '.join(none)}", EXIT_BAD_PLAN)


def _told_phone(device: str, kind: str) -> bool:
    """Whether a plan could use this phone now."""
    from devices.android.server import find_phone
    from devices.base import DeviceError
    from devices.ios.survey import ready_for_apps

    try:
        phone = ready_for_apps(device) if kind == "ios" else find_phone(device).serial
    except DeviceError as error:
        typer.echo(printable(f"{with_colon(device)} not there or not ready: {error}"), err=True)
        return False
    typer.echo(printable(f"{with_colon(device)} there and ready ({phone})"), err=True)
    return True


NOT_LOOKED_FOR = {
    "adb": "not looked for on a phone; a plan names the program, as program = PATH, built for Android arm64, and"
    " joulebench puts it there",
    "ios": "not looked for on a phone; a plan names the app, as app = ID, which is installed beforehand",
}


def _on_this_host(spec: type[ExternalSpec], environments: Sequence[Path]) -> dict[str, Any]:
    from engines.errors import EngineError

    try:
        found = spec.look(environments)
    except EngineError as error:
        return {"here": False, "remark": str(error)}
    return {"version": found.version, "remark": found.where}


def engine_rows(kind: str, environments: Sequence[Path] = ()) -> list[dict[str, Any]]:
    """One row an engine that goes onto this kind of device. environments: besides joulebench's own, with wheels."""
    from harness.external.catalog import EXTERNAL

    rows: list[dict[str, Any]] = []
    for name, spec in EXTERNAL.items():
        can = spec.abilities
        if kind not in can.devices:
            continue
        row: dict[str, Any] = {"runs": name, "here": True, "version": None, "what": spec.what}
        if kind != "host":
            # What lies in this host's PATH was built for it, and not for a phone.
            row |= {"here": None, "remark": NOT_LOOKED_FOR[kind]}
        else:
            row |= _on_this_host(spec, environments)
        row |= {
            "asked": "lengths only" if can.only_fixed_lengths else "our token ids",
            "log_likelihoods": can.loglikelihoods,
            "stamps": f"each {can.stamps}",
            "threads": can.threads,
            "cores": can.cores,
        }
        rows.append(row)
    return rows
