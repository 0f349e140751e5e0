"""What of a device in a plan cannot be meant: its name, its meters, settings that would do nothing beside others."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from devices.host import AUTO_ORDER
from devices.meters.same_counter import shared_counter
from devices.models.device import available_sheets
from harness.catalog import METERS
from harness.device_specs import (
    ANDROID_METERS,
    IOS_METERS,
    MODEL_PREFIX,
    AndroidSpec,
    DeviceSpec,
    HostSpec,
    IPhoneSpec,
    ModelledSpec,
)
from harness.plan_values import shown
from harness.problems import nearest


def device_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    """What of a device cannot be meant: its name, its meters, settings that would do nothing."""
    if isinstance(device, ModelledSpec):
        return _modelled_problems(path, device)
    if not isinstance(device, HostSpec):
        return _phone_problems(path, device)
    if device.name == "host":
        return _host_problems(path, device)
    known = ["host", "adb:SERIAL", "ios:UDID", *(f"model:{s}" for s in available_sheets())]
    return iter([f"{path}.name: unknown device {shown(device.name)}; {nearest(device.name, known)}"])


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
            yield f"{path}.{key}: {shown(meter)} stands {named.count(meter)} times; name it once"
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
    if sheet not in available_sheets():
        yield f"{path}.name: no sheet {shown(sheet)}; {nearest(sheet, available_sheets())}"
    if device.priced_as is not None and device.priced_as not in NAMED_SHAPES:
        yield f"{path}.priced_as: unknown shape {shown(device.priced_as)}; {nearest(device.priced_as, NAMED_SHAPES)}"
