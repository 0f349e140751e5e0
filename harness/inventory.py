"""What there is to name in a plan, and what this machine can measure with."""

from __future__ import annotations

from typing import Any

from devices.base import DeviceError
from devices.clock import MonotonicClock
from devices.host import AUTO_ORDER
from devices.models.device import available_sheets
from harness.catalog import METERS, TECHNIQUES, WORKLOADS
from harness.plan import DeviceSpec, Protocol

Row = dict[str, Any]
CATALOGS = ("engines", "techniques", "workloads", "devices", "meters")


def catalog_rows(what: str) -> list[Row]:
    """One row a name, of one of `CATALOGS`."""
    if what == "engines":
        return [
            {"name": "reference", "what": "torch, on this host: every technique through its dispatch plan"},
            {"name": "modelled", "what": "the same plans priced on a hardware sheet: chosen by a model:NAME device"},
        ]
    if what == "devices":
        sheets = [
            {"name": f"model:{s}", "what": "hardware sheet; times and joules are modelled"} for s in available_sheets()
        ]
        return [{"name": "host", "what": "this machine"}, *sheets]
    if what == "meters":
        return [{"name": n, "method": m.method, "what": m.what} for n, m in METERS.items()]
    entries = TECHNIQUES if what == "techniques" else WORKLOADS
    return [{"name": n, "what": e.what} for n, e in entries.items()]


def device_rows() -> list[Row]:
    """One row a meter of this host: ready, or why not; then the modelled devices."""
    clock = MonotonicClock()
    spec = DeviceSpec(name="host")
    rows: list[Row] = []
    for name in AUTO_ORDER:
        meter = METERS[name].build(Protocol().sample_interval_s, clock, spec)
        row: Row = {"device": "host", "meter": name, "method": METERS[name].method, "ready": True, "components": ""}
        try:
            meter.open()
            row["components"] = ", ".join(c.component for c in meter.channels)
            row["update_period_ms"] = max((c.update_period_s for c in meter.channels), default=0.0) * 1e3
            row["remark"] = next((c.note for c in meter.channels if c.note), None)
        except DeviceError as error:
            row |= {"ready": False, "update_period_ms": None, "remark": str(error)}
        finally:
            meter.close()
        rows.append(row)
    for sheet in available_sheets():
        rows.append(
            {
                "device": f"model:{sheet}",
                "meter": "timeline",
                "method": "modelled",
                "ready": True,
                "components": "cpu, npu, comm",
                "update_period_ms": 0.0,
                "remark": "a hardware sheet, no hardware",
            }
        )
    return rows
