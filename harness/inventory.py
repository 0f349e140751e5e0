"""What there is to name in a plan, and what this machine can measure with."""

from __future__ import annotations

from typing import Any, cast

from devices.base import Channel, DeviceError
from devices.clock import MonotonicClock
from devices.host import AUTO_ORDER, open_meter
from devices.models.sheet import available_sheets, load_sheet
from engines.techniques.parameters import Composed, CustomParameters
from harness.bundled_plans import about_plan, bundled_plans
from harness.catalog import METERS, TECHNIQUES, WORKLOADS
from harness.device_specs import HostSpec
from harness.external.catalog import EXTERNAL
from harness.schema import TECHNIQUE, TrialProtocol
from results.records import MODEL_PREFIX, Record

Row = dict[str, Any]


def catalog_rows(what: str) -> list[Row]:
    """One row a name: of engines, techniques, workloads, devices, meters or plans."""
    if what == "engines":
        return [
            {
                "name": "reference",
                "what": "our kernels or torch, on this host: every technique through its dispatch plan",
            },
            {"name": "modelled", "what": "the same plans priced on a hardware sheet: chosen by a model:NAME device"},
            *({"name": name, "what": spec.what} for name, spec in EXTERNAL.items()),
        ]
    if what == "devices":
        sheets = [
            {"name": f"{MODEL_PREFIX}{s}", "what": f"hardware sheet: {load_sheet(s).description}"}
            for s in available_sheets()
        ]
        phone = {
            "name": "adb:SERIAL",
            "what": "an Android phone by its battery or its power rails; `joulebench devices` lists those attached",
        }
        iphone = {"name": "ios:UDID", "what": "an iPhone by its battery, or one app by Xcode's energy gauge"}
        return [{"name": "host", "what": "this machine"}, phone, iphone, *sheets]
    if what == "meters":
        return [{"name": n, "method": m.method, "what": m.what} for n, m in METERS.items()]
    if what == "plans":
        return [{"name": name, "what": about_plan(path)} for name, path in bundled_plans().items()]
    told = {n: e.what for n, e in TECHNIQUES.items()} if what == "techniques" else WORKLOADS
    return [{"name": n, "what": w} for n, w in told.items()]


def technique_rows() -> list[Row]:
    """One row a technique: where it comes from, whether it is lossless, its four choices and the unit of the backbone.

    What a plan spells out (custom), or what is no composition (oracle), has None.
    """
    rows: list[Row] = []
    for name, entry in TECHNIQUES.items():
        row: Row = {"name": name, "what": entry.what, "source": entry.source}
        row |= dict.fromkeys(("lossless", "route", "place", "layout", "decode_layout", "move", "backbone"))
        if entry.parameters is not CustomParameters:
            parameters = TECHNIQUE.read({"name": name})  # a preset has a default for every parameter
            row |= {"lossless": parameters.lossless, "backbone": parameters.backbone}
            if isinstance(parameters, Composed):
                choices = parameters.choices
                row |= {"route": _dumped(choices.route), "move": _dumped(choices.move)}
                row |= {"place": _dumped(choices.place), "layout": _dumped(choices.layout)}
                row["decode_layout"] = _dumped(choices.decode or choices.layout)
        rows.append(row)
    return rows


def _dumped(choice: object) -> Row:
    """The kind of a choice with its parameters. Every choice is a record."""
    return cast(Record, choice).model_dump(mode="json")


def probed_meters(sample_interval_s: float) -> dict[str, tuple[Channel, ...] | str]:
    """Every meter of this host by name: its channels, or why it does not open. Each is opened once and closed again."""
    clock = MonotonicClock()
    spec = HostSpec(name="host")
    found: dict[str, tuple[Channel, ...] | str] = {}
    for name in AUTO_ORDER:
        meter = METERS[name].build(sample_interval_s, clock, spec)
        try:
            open_meter(name, meter)
            found[name] = meter.channels
        except DeviceError as error:
            found[name] = str(error)
        finally:
            meter.close()
    return found


def _phone_rows() -> list[Row]:
    """Phones in reach, Android's and Apple's; where there are none, one row of each kind that says why."""
    from devices.android.survey import attached_phones as androids
    from devices.ios.survey import attached_phones as iphones

    return [_phone_row(*phone) for phone in androids()] + [_phone_row(*phone) for phone in iphones()]


def _phone_row(device: str, meter: str, method: str, ready: bool, remark: str) -> Row:
    return {
        "device": device,
        "meter": meter,
        "method": method,
        "ready": ready,
        "components": meter if ready else "",
        "update_period_ms": None,
        "remark": f"{remark}; its update period is observed when it is opened" if ready else remark,
    }


def device_rows() -> list[Row]:
    """One row a meter of this host: ready, or why not; then attached phones; then the modelled devices,
    ready where a plan can be priced on them."""
    rows: list[Row] = []
    for name, found in probed_meters(TrialProtocol().sample_interval_s).items():
        row: Row = {"device": "host", "meter": name, "method": METERS[name].method, "ready": not isinstance(found, str)}
        if isinstance(found, str):
            row |= {"components": "", "update_period_ms": None, "remark": found}
        else:
            row["components"] = ", ".join(c.component for c in found)
            row["update_period_ms"] = max((c.update_period_s for c in found), default=0.0) * 1e3
            row["remark"] = next((c.note for c in found if c.note), None)
        rows.append(row)
    rows += _phone_rows()
    for sheet in map(load_sheet, available_sheets()):
        unpriced = sheet.why_unpriced
        rows.append(
            {
                "device": f"{MODEL_PREFIX}{sheet.name}",
                "meter": "timeline",
                "method": "modelled",
                "ready": unpriced is None,
                "components": ", ".join(sheet.components),
                "update_period_ms": 0.0,
                "remark": f"a sheet, no hardware: {sheet.description}" + (f"; it {unpriced}" if unpriced else ""),
            }
        )
    return rows
