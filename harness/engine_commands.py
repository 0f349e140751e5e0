"""`joulebench engines doctor`: which engines that are not ours are here, what each can, and what is missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.terminal import AsJson, print_rows

if TYPE_CHECKING:
    from harness.external.base import ExternalSpec

engines_app = typer.Typer(no_args_is_help=True, help="Engines that are not ours: which are here, and what they can.")


@engines_app.command("doctor")
def engines_doctor(
    device: Annotated[
        str, typer.Option("--device", help="Tell only engines that go onto this device: host, adb:SERIAL, ios:UDID.")
    ] = "host",
    as_json: AsJson = False,
) -> None:
    """Show engines that a plan may name with `runs`: here or missing, version, abilities. Nothing is started."""
    from harness.device_specs import DEVICE_KINDS
    from harness.schema import DEVICE
    from harness.terminal import EXIT_BAD_PLAN, fail

    kind = DEVICE.read({"name": device}).tag
    if kind not in {own.tag for own in DEVICE_KINDS} or kind == "model" or (kind == "host" and device != "host"):
        fail(f"--device {device}: engines go onto host, adb:SERIAL or ios:UDID; a sheet runs none", EXIT_BAD_PLAN)
    if kind == "adb":
        typer.echo(phone_words(device), err=True)
    print_rows(engine_rows(kind), as_json, f"Engines that are not ours, on {device}")


def phone_words(device: str) -> str:
    """Whether a plan could use this phone now."""
    from devices.android.server import find_phone
    from devices.base import DeviceError

    try:
        return f"{device}: attached and ready ({find_phone(device).serial})"
    except DeviceError as error:
        return f"{device}: not there or not ready: {error}"


NAMED = {
    "adb": "a plan names the program, built for Android arm64, and joulebench puts it there (docs/engines)",
    "ios": "a plan names the app, which is installed beforehand (docs/engines)",
}


def _on_this_host(spec: type[ExternalSpec]) -> dict[str, Any]:
    from engines.errors import EngineError

    try:
        found = spec.look()
    except EngineError as error:
        return {"here": False, "remark": str(error)}
    return {"version": found.version, "remark": found.where}


def engine_rows(kind: str) -> list[dict[str, Any]]:
    """One row an engine that goes onto this kind of device."""
    from harness.external.catalog import EXTERNAL

    rows: list[dict[str, Any]] = []
    for name, spec in EXTERNAL.items():
        can = spec.abilities
        if kind not in can.devices:
            continue
        row: dict[str, Any] = {"runs": name, "here": True, "version": None, "what": spec.what}
        if kind != "host":
            # What lies in this host's PATH was built for it, and not for a phone.
            row |= {"here": None, "remark": f"not looked for on a phone; {NAMED[kind]}"}
        else:
            row |= _on_this_host(spec)
        row |= {
            "asked": "lengths only" if can.only_fixed_lengths else "our token ids",
            "log_likelihoods": can.loglikelihoods,
            "stamps": f"each {can.stamps}",
            "threads": can.threads,
            "cores": can.cores,
        }
        rows.append(row)
    return rows
