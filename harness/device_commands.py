"""Commands of devices: what is here, whether its meters tell the truth, what it draws now."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.interrupts import code_once_kept, hold, raise_held, raise_in_command, words_once_kept
from harness.terminal import (
    EXIT_BAD_PLAN,
    EXIT_DEVICE_NOT_READY,
    EXIT_MODELLED_ONLY,
    EXIT_NOT_WRITTEN,
    EXIT_SOME_FAILED,
    AsJson,
    console_of,
    end_interrupted,
    fail,
    print_rows,
    quiet_libraries,
    rounded,
)
from results.printable import printable, with_colon

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

    from harness.device_building import WaitListener
    from harness.device_specs import DeviceSpec
    from results.self_tests import SelfTest

DeviceName = Annotated[
    str, typer.Option("--device", help="host, or a phone: adb:SERIAL, ios:UDID (`joulebench devices` lists them).")
]

Wait = Annotated[
    float,
    typer.Option(
        "--wait",
        min=0.0,
        max=86400.0,
        metavar="SECONDS",
        help="Seconds to wait for a phone that is not ready (hot, on a charger); 0: do not wait.",
    ),
]
WAIT_S = 600.0


def devices(as_json: AsJson = False) -> None:
    """Show this machine, its meters, and what is missing for the others."""
    from harness.inventory import device_rows

    print_rows(device_rows(), as_json, "Devices and meters")


def doctor(
    device: DeviceName = "host",
    seconds: Annotated[float, typer.Option(min=1.0, max=600.0, help="Seconds of each part: idle, load, idle.")] = 10.0,
    wait_s: Wait = WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Check a device, and test its meters: idle against a known load. Reports show the verdict from then on."""
    quiet_libraries()
    from rich.markup import escape

    from devices.device_lock import DeviceBusyError
    from harness.examination import examine_device
    from harness.host_lock import host_lock
    from harness.schema import TrialProtocol
    from harness.state import keep_self_test, state_folder

    console = console_of(stderr=True)
    spec = _device_spec(device, "auto")
    raise_in_command()
    try:
        with host_lock([device]), console.status(f"opening {escape(printable(device))}") as status:
            found = examine_device(
                spec, seconds, status.update, _waits_on(status, console), TrialProtocol(gate_wait_s=wait_s)
            )
    except DeviceBusyError as error:
        fail(f"{error}; the verdict before stands", EXIT_DEVICE_NOT_READY)
    except KeyboardInterrupt as interrupt:
        end_interrupted(interrupt, "the verdict before stands")
    kept, trouble = None, ""
    try:
        kept = keep_self_test(found, state_folder())
    except OSError as error:
        trouble = f"the verdict cannot be kept ({error}); name another folder with JOULEBENCH_STATE"
    # What was measured is told, also where it cannot be kept.
    if as_json:
        told = {"verdict": found.verdict, "file": None if kept is None else str(kept)}
        typer.echo(json.dumps(found.model_dump(mode="json") | told, indent=2))
    else:
        _print_self_test(found, kept)
    if trouble:
        fail(trouble, EXIT_NOT_WRITTEN)
    if found.verdict == "not ready":
        raise typer.Exit(EXIT_DEVICE_NOT_READY)
    if found.verdict == "modelled only":
        raise typer.Exit(EXIT_MODELLED_ONLY)
    if found.verdict != "ready":
        raise typer.Exit(EXIT_SOME_FAILED)


def record(
    path: Annotated[Path, typer.Argument(metavar="TRACE.parquet", help="File to write; a PNG appears beside it.")],
    device: DeviceName = "host",
    meter: Annotated[str, typer.Option(help="`joulebench devices` lists them; auto: the first that opens.")] = "auto",
    app: Annotated[str | None, typer.Option(help="The app that an iPhone's energy gauge follows.")] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=86400.0, help="Seconds to record; Ctrl-C ends it early.")
    ] = 10.0,
    interval_s: Annotated[
        float, typer.Option("--interval", min=0.001, max=10.0, help="Seconds between readings.")
    ] = 0.05,
    wait_s: Wait = WAIT_S,
    as_json: AsJson = False,
) -> None:
    """Record the power of a device; a plan plays it back with meters = ["replay"]."""
    quiet_libraries()
    from rich.markup import escape

    from devices.base import DeviceError
    from devices.clock import MonotonicClock
    from harness.device_building import build_device
    from harness.host_lock import host_lock
    from harness.recording import record, target_problem, write_recording
    from harness.schema import TrialProtocol

    if path.suffix != ".parquet":
        fail(f"{path}: a recording is a Parquet file; end its name with .parquet", EXIT_BAD_PLAN)
    try:
        problem = target_problem(path)
    except OSError as error:
        code = EXIT_BAD_PLAN if error.errno == errno.ENAMETOOLONG else EXIT_NOT_WRITTEN
        fail(f"{path}: cannot be written ({error.strerror}); name a file in another folder", code)
    if problem is not None:
        fail(problem, EXIT_BAD_PLAN)
    if meter == "replay":
        fail("--meter replay: a recording is not recorded again; name a meter of this machine", EXIT_BAD_PLAN)
    spec, clock = _device_spec(device, meter, app), MonotonicClock()
    console = console_of(stderr=True)

    def tick(left_s: float) -> None:
        # From the first one on there is something to keep, also while a meter is tended, or ends.
        hold("ending, and keeping what was recorded; a second Ctrl-C discards it")
        status.update(f"recording, {left_s:.0f} s left")
        raise_held()

    raise_in_command()
    with console.status(f"opening {escape(printable(device))}") as status:
        protocol = TrialProtocol(sample_interval_s=interval_s, gate_wait_s=wait_s)
        found = build_device(spec, protocol, clock, _waits_on(status, console))
        try:
            with host_lock([device]):
                found.open()
                recording = record(found, clock, seconds, tick)
            # Before it is closed: a driver may hang in that.
            files, troubles = write_recording(recording, path)
        except DeviceError as error:
            fail(str(error), EXIT_DEVICE_NOT_READY)
        except KeyboardInterrupt as interrupt:
            end_interrupted(interrupt, "the recording had not begun, and nothing was written")
        finally:
            found.close()
    readings = [r.model_dump(mode="json") | {"average_power_w": r.average_power_w} for r in recording.readings()]
    if as_json:
        told = {
            "files": [str(f) for f in files],
            "marks": recording.marks,
            "interrupted": recording.interrupted,
            "readings": readings,
        }
        typer.echo(json.dumps(told, indent=2))
    else:
        _print_recording(device, readings, files)
    if recording.marks:
        typer.echo(f"marked: {', '.join(recording.marks)}; its joules are not those of an undisturbed device", err=True)
    faults = [f"no energy: {'; '.join(missing)}"] if (missing := recording.missing_totals()) else []
    if recording.interrupted:
        faults.insert(0, f"interrupted: {'; '.join(recording.interrupted)}")
    ended = [f"{words_once_kept()}; {seconds:g} s were asked for"] if code_once_kept() else []
    kept = " (what was received is kept)" if files else ""
    for line in (*troubles, *(fault + kept for fault in (*faults, *ended))):
        typer.echo(f"error: {printable(line)}", err=True)
    if code := code_once_kept() or (EXIT_NOT_WRITTEN if troubles else EXIT_SOME_FAILED if faults else 0):
        raise typer.Exit(code)


def _print_recording(device: str, readings: Sequence[Mapping[str, Any]], files: Sequence[Path]) -> None:
    shown = ("meter", "component", "method", "duration_s", "energy_j", "uncertainty_j", "average_power_w", "reason")
    print_rows([{key: rounded(r[key]) for key in shown} for r in readings], False, f"{device}, recorded")
    for file in files:
        typer.echo(printable(str(file)))


def _print_self_test(found: SelfTest, kept: Path | None) -> None:
    from results.report.self_test import CHECK_WORDS, agreement_line, check_line, meter_line, verdict_line

    lines = [
        *(f"{CHECK_WORDS[c.ok]:5}{check_line(c)}" for c in found.checks),
        *(["", f"idle against {found.load}:"] if found.load else []),
        *map(meter_line, found.meters),
        *map(agreement_line, found.agreements),
        "",
        verdict_line(found),
        *([] if kept is None else [f"kept in {kept}; reports of runs made from now on show it"]),
    ]
    for line in lines:
        typer.echo(printable(line))


def _device_spec(device: str, meter: str, app: str | None = None) -> DeviceSpec:
    """Of a device that is here. Fails where a name is unknown, or only a model."""
    from pydantic import ValidationError

    from harness.device_problems import device_problems
    from harness.problems import told
    from harness.schema import DEVICE
    from results.records import MODEL_PREFIX

    if device.startswith(MODEL_PREFIX):
        fail(
            f"device {device} is a hardware sheet, there is nothing to measure; name host or adb:SERIAL", EXIT_BAD_PLAN
        )
    given: dict[str, object] = {} if app is None else {"app": app}
    try:
        spec = DEVICE.read({"name": device, "meters": [meter]} | given)
    except ValidationError as error:
        fail(told("device", error, DEVICE.schema)[0], EXIT_BAD_PLAN)
    for problem in device_problems("device", spec):
        fail(problem, EXIT_BAD_PLAN)
    return spec


def _waits_on(status: Status, console: Console) -> WaitListener:
    """A countdown on a terminal; elsewhere a line, so that nobody wonders for ten minutes.

    In words as they are: a phone's name is no markup.
    """
    from rich.text import Text

    from harness.progress import WaitLines

    def count_down(device: str, reason: str, left_s: float) -> None:
        status.update(Text(printable(f"{with_colon(device)} {reason}; waiting, {left_s:.0f} s left")))

    if console.is_terminal:
        return count_down
    return WaitLines(lambda line: typer.echo(f"{printable(line)} (--wait 0: not at all)", err=True)).waiting
