"""Keys of a hardware sheet that are valid and change nothing in it. They are told, as a plan's are."""

from __future__ import annotations

from collections.abc import Iterator

from devices.models.sheet import Sheet, UnitSheet
from harness.combinations import sheet_of
from harness.device_problems import sheet_problems
from harness.device_specs import DeviceSpec, ModelledSpec

OF_JOULES = ("waiting_w", "idle_w", "j_per_flop")
OF_WORK = ("s_per_naive_launch", "row_tile", "query_tile")


def unheeded_of_device(device: DeviceSpec) -> Iterator[str]:
    """Of a device of a plan whose sheet its user wrote."""
    if isinstance(device, ModelledSpec) and device.sheet is not None and not sheet_problems(device):
        yield from (f"device {device.name}: {told}" for told in unheeded_of_sheet(sheet_of(device)))


def unheeded_of_sheet(sheet: Sheet) -> Iterator[str]:
    """Units of one table once."""
    seen: set[int] = set()
    for name, unit in sheet.units.items():
        if id(unit) not in seen:
            seen.add(id(unit))
            is_alone = len(sheet.units) == 1 and not sheet.links
            yield from (_told(f"units.{name}.{key}", why) for key, why in _of_unit(unit, is_alone))
    if sheet.graph_bytes_limit is not None and "npu" not in (*sheet.units, *sheet.stands_in):
        yield _told("graph_bytes_limit", "it is of an NPU's graphs, and the sheet has no npu")


def _of_unit(unit: UnitSheet, is_alone: bool) -> Iterator[tuple[str, str]]:
    """is_alone: on its machine, without a link."""
    for key in OF_JOULES:
        if getattr(unit, key) is None:
            continue
        if unit.busy_w is None:
            yield key, "without busy_w the unit has no joules"
        elif key == "waiting_w" and is_alone:
            yield key, "the unit waits while another unit or a link works, and the sheet has no other"
    if unit.roofline is None and not unit.kernels:
        yield from ((key, "the unit has no prices, and computes nothing") for key in OF_WORK if getattr(unit, key))
        return
    if unit.row_tile is not None and unit.price("expert_ffn") is None:
        yield "row_tile", "it is of experts' rows, and the unit has no price for expert_ffn"
    if unit.query_tile is not None and "scores" not in unit.kernels:
        yield "query_tile", "it is of scores that have a price of their own, and the unit has no kernels.scores"


def _told(key: str, why: str) -> str:
    return f"{key} changes nothing: {why}; remove it"
