"""What one expert call costs on a unit, by the prices of a hardware sheet: for techniques that place by cost."""

from __future__ import annotations

import math

from devices.base import DeviceError, Unit
from devices.models.operation import Operation, operation_joules, operation_seconds
from devices.models.sheet import Sheet, load_sheet
from engines.errors import EngineError
from engines.pricing.shapes import NAMED_SHAPES, sizes_of
from engines.techniques.context import ModelSizes


class SheetCosts:
    """An `engines.techniques.context.Costs`."""

    def __init__(self, sheet: Sheet, sizes: ModelSizes) -> None:
        self._sheet = sheet
        self._sizes = sizes

    def call_s(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        """Infinite for a graph above the NPU's limit. Raises `DeviceError` for a unit that the sheet does not have."""
        call = self._call(unit, n_experts, n_rows, share)
        return math.inf if call is None else operation_seconds(self._sheet, call)

    def call_j(self, unit: Unit, n_experts: int, n_rows: float, share: float = 1.0) -> float:
        """Of the unit and of communication; infinite and raising as `call_s`, and where the sheet states no power."""
        call = self._call(unit, n_experts, n_rows, share)
        if call is None:
            return math.inf
        joules = operation_joules(self._sheet, call, operation_seconds(self._sheet, call))
        missing = [component for component, spent_j in joules.items() if spent_j is None]
        if missing:
            raise DeviceError(
                f"sheet {self._sheet.name} states no power of {missing[0]}, so nothing can be placed by joules;"
                " place by seconds"
            )
        return sum(spent_j for spent_j in joules.values() if spent_j is not None)

    def _call(self, unit: Unit, n_experts: int, n_rows: float, share: float) -> Operation | None:
        """None where the unit does not take it."""
        sizes, limit = self._sizes, self._sheet.graph_bytes_limit
        flops = 2.0 * n_rows * 3 * sizes.hidden * sizes.expert_width * share
        weight_bytes = float(n_experts * sizes.expert_bytes) * share
        if unit == "npu" and limit is not None and weight_bytes > limit.value:
            return None
        return Operation("expert FFN", unit, "expert_ffn", flops=flops, weight_bytes=weight_bytes)

    def transfer_s(self, source: Unit, target: Unit, n_bytes: float) -> float:
        resource = self._sheet.resource_between(source, target)
        link = None if resource is None else self._sheet.link_of(resource)
        if link is None:
            raise DeviceError(
                f"sheet {self._sheet.name} has no link from {source} to {target}; choose a technique that moves nothing"
                " there"
            )
        return link.seconds(1, n_bytes)

    def capacity_bytes(self, unit: Unit) -> float | None:
        return self._sheet.capacity_bytes(unit)


def costs_of(sheet: str, sizes: ModelSizes) -> SheetCosts:
    """By a sheet's name. Raises `DeviceError`."""
    return SheetCosts(load_sheet(sheet), sizes)


def sizes_of_named(shape: str) -> ModelSizes:
    """Of a model that is known by name. Raises `EngineError`."""
    sizes = sizes_of(NAMED_SHAPES[shape]) if shape in NAMED_SHAPES else None
    if sizes is None:
        raise EngineError(f"no shape {shape!r} of a model with experts; there is {', '.join(NAMED_SHAPES)}")
    return sizes
