"""What of a device in a plan cannot be meant: its name, its meters, settings that would do nothing beside others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from urllib.parse import urlsplit

from devices.host import AUTO_ORDER
from devices.meters.same_counter import shared_counter
from devices.models.sheet import SheetError, available_sheets
from harness.catalog import METERS
from harness.combinations import sheet_of
from harness.device_specs import (
    ANDROID_METERS,
    ANDROID_PREFIX,
    IOS_METERS,
    AndroidSpec,
    DeviceSpec,
    HostSpec,
    IPhoneSpec,
    ModelledSpec,
)
from harness.external.base import ExternalSpec
from harness.external.openai import OpenAISpec
from harness.matrix import CellPlan, Part, external_engines, own_engines
from harness.plan_values import shown
from harness.problems import nearest
from harness.schema import AnyEngineSpec, EngineSpec
from results.meter_units import SEE_NO_CPU, SEE_NO_GPU
from results.records import MODEL_PREFIX


def device_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    """What of a device cannot be meant: its name, its meters, settings that would do nothing."""
    if isinstance(device, ModelledSpec):
        return _modelled_problems(path, device)
    if not isinstance(device, HostSpec):
        return _phone_problems(path, device)
    if device.name == "host":
        return _host_problems(path, device)
    if device.name.rpartition(":")[2].isdecimal():
        own = f"{ANDROID_PREFIX}{device.name}"
        told = f"{shown(device.name)} is no name; an Android phone at an address is named {own!r}"
        return iter([f"{path}.name: {told}, and adb is told to connect to it"])
    known = ["host", "adb:SERIAL", "ios:UDID", *(f"{MODEL_PREFIX}{s}" for s in available_sheets())]
    return iter([f"{path}.name: unknown device {shown(device.name)}; {nearest(device.name, known)}"])


def sheet_problems(device: DeviceSpec) -> tuple[str, ...]:
    """Why a modelled device has no sheet; empty of one that has, and of every other device."""
    if not isinstance(device, ModelledSpec):
        return ()
    try:
        sheet_of(device)
    except SheetError as error:
        return error.lines
    return ()


COMPUTE_ELSEWHERE = frozenset({"openai", "coreml"})
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Is there where a driver of NVIDIA's is loaded."""


def blind_warning(
    device: DeviceSpec, engines: Sequence[Part[EngineSpec]], others: Sequence[Part[ExternalSpec]]
) -> str | None:
    """Where all meters of a host look away from what an engine computes on: their joules are of a part that rests.

    others: engines that are not ours. A server and Core ML compute where they were told, and not by the plan. Programs
    are asked to compute on the CPU where they can be asked: a build for GPUs may use one all the same.
    """
    if not isinstance(device, HostSpec):
        return None

    def is_on_it(engine: Part[EngineSpec] | Part[ExternalSpec]) -> bool:
        return engine.spec.devices is None or device.name in engine.spec.devices

    has_ours = any(map(is_on_it, engines))
    programs = [one.spec.name for one in others if is_on_it(one) and one.spec.runs not in COMPUTE_ELSEWHERE]
    sees = f"device {device.name}: {', '.join(device.meters)} {'see' if len(device.meters) > 1 else 'sees'}"
    left_out = "joules leave out what it draws"
    if set(device.meters) <= SEE_NO_CPU:
        remedy = "name a meter of the CPU"
        if has_ours and device.computes == "cpu":
            either = "" if programs else 'set computes = "cuda", or '
            return f"{sees} GPUs alone, and an engine computes on the CPU: {left_out}; {either}{remedy}"
        if programs:
            return f"{sees} GPUs alone: what the CPU computes for {', '.join(programs)} is in no joules; {remedy}"
    elif servers := [one.spec.name for one in others if is_on_it(one) and _may_compute_on_gpu(one.spec, device)]:
        return (
            f"{sees} no GPU, and this machine has one: where {', '.join(servers)} computes on it, its joules are in"
            ' none of these; write meters = ["nvml", "rapl"]'
        )
    elif set(device.meters) <= SEE_NO_GPU and has_ours and device.computes != "cpu":
        remedy = 'name "nvml", "zeus" or "auto"' if device.computes == "cuda" else 'name "auto"'
        return f"{sees} the CPU alone, and an engine computes on the GPU: {left_out}; {remedy}"
    return None


def _may_compute_on_gpu(server: ExternalSpec, device: HostSpec) -> bool:
    """Of a server on this machine, which has an NVIDIA GPU that no meter of the device sees. Ours computes on the
    CPU."""
    from engines.external.openai_host import is_here

    blind = set(device.meters) <= SEE_NO_GPU | {"auto"} and device.computes == "cpu"
    if not blind or not isinstance(server, OpenAISpec) or server.flavour == "joulebench":
        return False
    host = urlsplit(server.url).hostname
    return host is not None and NVIDIA_DRIVER.exists() and is_here(host)


def blind_doubts(plan: CellPlan) -> Iterator[str]:
    """The same of a cell, for its trials: a report outlives what the check told."""
    arm: list[Part[AnyEngineSpec]] = [Part("engine", "", plan.engine, plan.cell.engine)]
    found = blind_warning(plan.device, own_engines(arm), external_engines(arm))
    if found is not None:
        yield found


def same_name_problems(devices: Sequence[DeviceSpec]) -> Iterator[str]:
    """Of sheets in different files of one name: a device is called after its sheet."""
    files: dict[str, list[str]] = {}
    for device in devices:
        if isinstance(device, ModelledSpec) and device.sheet is not None:
            files.setdefault(device.name, []).append(device.sheet)
    for name, own in files.items():
        if len(set(own)) > 1:
            told = " and ".join(map(shown, dict.fromkeys(own)))
            yield f"device: {told} would both be {shown(name)}; give each file, and the sheet in it, a name of its own"


def _phone_problems(path: str, device: AndroidSpec | IPhoneSpec) -> Iterator[str]:
    known = ["auto", *(IOS_METERS if isinstance(device, IPhoneSpec) else ANDROID_METERS)]
    for meter in dict.fromkeys(device.meters):
        if meter not in known:
            yield f"{path}.meters: a phone has no meter {shown(meter)}; it has {', '.join(known)}"
    if isinstance(device, IPhoneSpec) and ("energy gauge" in device.meters) != (device.app is not None):
        yield f'{path}.app: the meter "energy gauge" follows one app, found {shown(device.app)}; give both or neither'


def _host_problems(path: str, device: HostSpec) -> Iterator[str]:
    known = ["auto", *METERS]
    named = [*device.meters, *device.cross_check]
    for meter in dict.fromkeys(named):
        key = "meters" if meter in device.meters else "cross_check"
        if meter not in known:
            yield f"{path}.{key}: unknown meter {shown(meter)}; {nearest(meter, known)}"
        # Joules are summed by the meter's name, so one that runs twice would count twice.
        if named.count(meter) > 1:
            yield f"{path}.{key}: {shown(meter)} is named {named.count(meter)} times; name it once"
    for first, second in combinations(dict.fromkeys(device.meters), 2):
        if shared := shared_counter(first, second):
            yield (
                f"{path}.meters: {first!r} and {second!r} both read {shared}, the same joules twice; name one of them,"
                f' and the other as its check: cross_check = ["{second}"]'
            )
    for meter in dict.fromkeys(device.cross_check):
        if meter in known and not any(shared_counter(meter, m) for m in device.meters):
            yield (
                f"{path}.cross_check: {meter!r} reads nothing that one of {', '.join(device.meters)} reads; name the"
                " meter that it is to check, or name it under meters"
            )
    doubled = [m for m in AUTO_ORDER if m in device.meters]
    if "auto" in device.meters and doubled:
        yield f'{path}.meters: "auto" may choose {doubled[0]!r} a second time; name the meters, or "auto" without it'
    if "replay" in device.meters and device.recording is None:
        yield f'{path}.recording: missing; the replay meter needs recording = "trace.parquet"'
    if device.recording is not None and "replay" not in device.meters:
        yield f'{path}.recording: has no effect; add "replay" to meters'
    if device.watts_sheet != HostSpec.model_fields["watts_sheet"].default and not {"auto", "modelled"} & {
        *device.meters
    }:
        yield f'{path}.watts_sheet: has no effect; add "modelled" to meters'


def _modelled_problems(path: str, device: ModelledSpec) -> Iterator[str]:
    from engines.pricing.shapes import NAMED_SHAPES

    sheet = device.name.removeprefix(MODEL_PREFIX)
    if device.sheet is None and sheet not in available_sheets():
        remedy = nearest(sheet, available_sheets())
        yield f'{path}.name: no sheet {shown(sheet)}; {remedy}; a sheet of your own is named by sheet = "FILE.toml"'
    elif device.sheet is not None:
        yield from (f"{path}.sheet: {shown(device.sheet)}: {problem}" for problem in sheet_problems(device))
    if device.priced_as is not None and device.priced_as not in NAMED_SHAPES:
        yield f"{path}.priced_as: unknown shape {shown(device.priced_as)}; {nearest(device.priced_as, NAMED_SHAPES)}"
