"""What an operation is, and what it costs by a hardware sheet: seconds and joules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from devices.base import DeviceError
from devices.models.figures import Kernel, PriceLine, Roofline
from devices.models.links import LinkSheet
from devices.models.sheet import Sheet, UnitSheet
from results.records import COMM

TRANSFER: Final = "transfer"
"""The kind of work that links do; every other is a kernel of units."""


@dataclass(frozen=True)
class Operation:
    """Work of one kind on one unit, or bytes that travel over a link, in amounts that a sheet can price.

    name: its row in a breakdown such as Table 4. unit: or the link's direction, as `Sheet.resource_between` calls it.
    weight_bytes: constants read. moved_bytes: activations copied, or bytes that travel, weights too.
    naive_launch: the framework chose the unit at run time, which costs `s_per_naive_launch` more. as_few: the code of
    few rows computes it, however many it has. alongside: does not wait for operations of other units that are marked
    alike and stand before it, since the last one in the line. aside: the same, and nothing waits for it but what names
    it. after: how many places before it stand those that it waits for besides. See `devices.models.timeline`.
    """

    name: str
    unit: str
    kernel: Kernel | Literal["transfer"]
    launches: int = 1
    flops: float = 0.0
    weight_bytes: float = 0.0
    moved_bytes: float = 0.0
    naive_launch: bool = False
    as_few: bool = False
    alongside: bool = False
    aside: bool = False
    after: tuple[int, ...] = ()

    def __hash__(self) -> int:
        """Computed once: a timeline looks each operation up every time it stands there again."""
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))
            object.__setattr__(self, "_hash", known)
        return known


def operation_seconds(sheet: Sheet, operation: Operation) -> float:
    """Price of one operation in time; the formulas stand in `devices.models.sheet` and `devices.models.links`."""
    if operation.kernel == TRANSFER:
        return link_of(sheet, operation).seconds(operation.launches, operation.moved_bytes)
    price = price_of(sheet, operation)
    seconds = price.seconds(operation.launches, operation.weight_bytes, operation.moved_bytes, operation.flops)
    seconds += naive_launch_seconds(sheet, operation)
    if sheet.memory is not None and sheet.memory.bytes_per_s is not None:
        seconds = max(seconds, operation.weight_bytes / sheet.memory.bytes_per_s.value)
    return seconds


def launch_seconds(sheet: Sheet, operation: Operation) -> float:
    """Of `operation_seconds`, what its launches cost, which a queue can hide; not what naive ones cost besides."""
    if operation.kernel == TRANSFER:
        return 0.0
    price, amounts = price_of(sheet, operation), (operation.weight_bytes, operation.moved_bytes, operation.flops)
    return price.seconds(operation.launches, *amounts) - price.seconds(0, *amounts)


def is_fitted(sheet: Sheet, operation: Operation) -> bool | None:
    """False where an operation is unlike all that its price was fitted on; None where that was fitted on nothing."""
    price = None if operation.kernel == TRANSFER else price_of(sheet, operation)
    if price is None or isinstance(price, Roofline):
        return None
    return price.is_fitted_at(operation.launches, operation.weight_bytes, operation.flops)


def operation_joules(sheet: Sheet, operation: Operation, seconds: float) -> dict[str, float | None]:
    """Energy of an operation that takes `seconds`: its unit's or link's, and communication. None: not stated."""
    if operation.kernel == TRANSFER:
        pj_per_bit = link_of(sheet, operation).pj_per_bit
        joules = None if pj_per_bit is None else 8e-12 * operation.moved_bytes * pj_per_bit.value
        return {sheet.component_of(operation.unit): joules}
    unit = _unit(sheet, operation)
    dynamic_j = unit.j_per_flop.value * operation.flops if unit.j_per_flop is not None else 0.0
    busy_j = None if unit.busy_w is None else unit.busy_w.value * seconds + dynamic_j
    comm_j = {} if sheet.memory is None else {COMM: sheet.memory.comm_w.value * seconds}
    return {operation.unit: busy_j, **comm_j}


def link_of(sheet: Sheet, operation: Operation) -> LinkSheet:
    link = sheet.link_of(operation.unit)
    if link is None:
        raise DeviceError(
            f"sheet {sheet.name} has no link {operation.unit!r} for {operation.name!r}; it has {sorted(sheet.links)}:"
            " choose a technique that moves nothing there"
        )
    return link


def _unit(sheet: Sheet, operation: Operation) -> UnitSheet:
    if operation.unit not in sheet.units:
        raise DeviceError(
            f"sheet {sheet.name} has no unit {operation.unit!r} for {operation.name!r}; it has {sorted(sheet.units)}: "
            "choose a placement that keeps to these"
        )
    return sheet.units[operation.unit]


def price_of(sheet: Sheet, operation: Operation) -> PriceLine | Roofline:
    """Of work on a unit, by the line that holds for its rows. Raises `DeviceError` where the sheet has none."""
    unit = _unit(sheet, operation)
    price = None if operation.kernel == "transfer" else unit.price(operation.kernel)
    if price is None:
        raise DeviceError(
            f"sheet {sheet.name} has no price for {operation.kernel!r} on {operation.unit!r}; add "
            f"[units.{operation.unit}.kernels.{operation.kernel}] with the origin of its figures"
        )
    if isinstance(price, Roofline):
        return price
    return price.line(operation.weight_bytes, operation.flops, operation.as_few)


def naive_launch_seconds(sheet: Sheet, operation: Operation) -> float:
    """What a framework takes that chooses the unit at run time; 0 of an operation that is placed."""
    if not operation.naive_launch:
        return 0.0
    figure = _unit(sheet, operation).s_per_naive_launch
    if figure is None:
        raise DeviceError(
            f"sheet {sheet.name} has no price for a naive launch on {operation.unit!r}; add "
            f"s_per_naive_launch to [units.{operation.unit}] with the origin of its figure"
        )
    return operation.launches * figure.value
