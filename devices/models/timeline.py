"""Virtual time and energy of a machine that is not here: operations in, seconds and joules out.

Operations run one after the other, as in the design of 000-npumoe (§4.2: one device queue; §3.1: activations return to
the CPU). Those marked `alongside` wait for their own unit only: units work on them at the same time, and the next
operation that is not so marked waits for all. Time stands still between operations, so it counts only what was priced.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devices.base import DeviceError, Unit
from devices.models.sheet import COMM, Kernel, KernelPrice, Sheet, UnitSheet


@dataclass(frozen=True)
class Operation:
    """Work of one kind on one unit, in amounts that a sheet can price.

    name: its row in a breakdown such as Table 4. weight_bytes: constants read. moved_bytes: activations copied.
    naive_launch: the framework chose the unit at run time, which costs `s_per_naive_launch` more. alongside: does not
    wait for operations of other units that are marked alike and stand right before it.
    """

    name: str
    unit: Unit
    kernel: Kernel
    launches: int = 1
    flops: float = 0.0
    weight_bytes: float = 0.0
    moved_bytes: float = 0.0
    naive_launch: bool = False
    alongside: bool = False


def operation_seconds(sheet: Sheet, operation: Operation) -> float:
    """Price of one operation in time; the formula stands in `devices.models.sheet`."""
    price = _price(sheet, operation)
    seconds = price.seconds(operation.launches, operation.weight_bytes, operation.moved_bytes, operation.flops)
    if operation.naive_launch:
        seconds += operation.launches * _naive_launch_s(sheet, operation)
    bandwidth = sheet.memory.bytes_per_s
    if bandwidth is not None:
        seconds = max(seconds, operation.weight_bytes / bandwidth.value)
    return seconds


def is_fitted(sheet: Sheet, operation: Operation) -> bool:
    """False where an operation is unlike all that its price was fitted on."""
    price = _price(sheet, operation)
    return price.is_fitted_at(operation.launches, operation.weight_bytes, operation.flops)


def operation_joules(sheet: Sheet, operation: Operation, seconds: float) -> dict[str, float]:
    """Energy of an operation that takes `seconds`: its unit's, and communication."""
    unit = _unit(sheet, operation)
    dynamic_j = unit.j_per_flop.value * operation.flops if unit.j_per_flop is not None else 0.0
    return {
        operation.unit: unit.busy_w.value * seconds + dynamic_j,
        COMM: sheet.memory.comm_w.value * seconds,
    }


def _unit(sheet: Sheet, operation: Operation) -> UnitSheet:
    if operation.unit not in sheet.units:
        raise DeviceError(
            f"sheet {sheet.name} has no unit {operation.unit!r} for {operation.name!r}; it has {sorted(sheet.units)}: "
            "choose a placement that keeps to these"
        )
    return sheet.units[operation.unit]


def _price(sheet: Sheet, operation: Operation) -> KernelPrice:
    kernels = _unit(sheet, operation).kernels
    if operation.kernel not in kernels:
        raise DeviceError(
            f"sheet {sheet.name} has no price for {operation.kernel!r} on {operation.unit!r}; add "
            f"[units.{operation.unit}.kernels.{operation.kernel}] with the origin of its figures"
        )
    return kernels[operation.kernel]


def _naive_launch_s(sheet: Sheet, operation: Operation) -> float:
    figure = _unit(sheet, operation).s_per_naive_launch
    if figure is None:
        raise DeviceError(
            f"sheet {sheet.name} has no price for a naive launch on {operation.unit!r}; add "
            f"s_per_naive_launch to [units.{operation.unit}] with the origin of its figure"
        )
    return figure.value


class Timeline:
    """Clock and energy counters of a modelled machine. Implements `devices.base.Clock`."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._times_s: list[float] = [0.0]
        self._energy_j: dict[str, list[float]] = {component: [0.0] for component in sheet.components}
        self._places: dict[Operation, int] = {}
        """Of each distinct operation in `_priced`: a model asks for few of them, many times."""
        self._priced: list[tuple[float, dict[str, float]]] = []
        self._ran, self._starts_s = array("i"), array("d")
        """Which operations ran, and when each began."""

    def now_s(self) -> float:
        return self._times_s[-1]

    def sleep_until_s(self, at_s: float) -> None:
        """Idles until `at_s`, at the sheet's idle power, or at 0 W where the sheet does not know it."""
        if at_s > self.now_s():
            idle_w = self.sheet.idle_w.value if self.sheet.idle_w is not None else 0.0
            self._advance(at_s, {"cpu": idle_w * (at_s - self.now_s())})

    def run(self, operations: Iterable[Operation]) -> None:
        """Advances until all units are free again. Raises `DeviceError` on one that the sheet cannot price."""
        together: list[Operation] = []
        for operation in operations:
            if operation.alongside:
                together.append(operation)
                continue
            self._run_together(together)
            together.clear()
            place = self._place(operation)
            seconds, joules = self._priced[place]
            self._ran.append(place)
            self._starts_s.append(self.now_s())
            self._advance(self.now_s() + seconds, joules)
        self._run_together(together)

    def _place(self, operation: Operation) -> int:
        """In `_priced`."""
        place = self._places.get(operation)
        if place is None:
            seconds = operation_seconds(self.sheet, operation)
            self._priced.append((seconds, operation_joules(self.sheet, operation, seconds)))
            place = self._places[operation] = len(self._places)
        return place

    def _run_together(self, operations: Sequence[Operation]) -> None:
        """Each unit takes its own in their order, from now on. The memory's power counts once while any unit works."""
        if not operations:
            return
        began_s = self.now_s()
        free_s: dict[Unit, list[float]] = {}
        spent_j: dict[Unit, list[float]] = {}
        started: list[tuple[float, int]] = []
        for operation in operations:
            place, unit = self._place(operation), operation.unit
            seconds, joules = self._priced[place]
            ends_s, so_far_j = free_s.setdefault(unit, [began_s]), spent_j.setdefault(unit, [0.0])
            started.append((ends_s[-1], place))
            ends_s.append(ends_s[-1] + seconds)
            so_far_j.append(so_far_j[-1] + joules[unit])
        started.sort(key=lambda one: one[0])
        self._starts_s.extend(at_s for at_s, _ in started)
        self._ran.extend(place for _, place in started)
        edges_s = np.unique(np.concatenate(list(free_s.values())))
        steps_j = {unit: np.diff(np.interp(edges_s, free_s[unit], so_far_j)) for unit, so_far_j in spent_j.items()}
        steps_j[COMM] = self.sheet.memory.comm_w.value * np.diff(edges_s)
        for i, until_s in enumerate(edges_s[1:].tolist()):
            self._advance(until_s, {component: float(step_j[i]) for component, step_j in steps_j.items()})

    def seconds_by_operation(self) -> Mapping[tuple[str, Unit], float]:
        """Seconds since the start by (operation, unit), in the form of Table 4; also where units worked alongside."""
        found: dict[tuple[str, Unit], float] = defaultdict(float)
        n_run = np.bincount(np.asarray(self._ran), minlength=len(self._places))
        for (operation, place), (seconds, _) in zip(self._places.items(), self._priced, strict=True):
            found[operation.name, operation.unit] += int(n_run[place]) * seconds
        return dict(found)

    @property
    def n_run(self) -> int:
        """Operations since the start."""
        return len(self._ran)

    def operations(self, first: int) -> tuple[NDArray[np.float64], NDArray[np.int32], list[tuple[Operation, float]]]:
        """From the operation of that number on: when each began, and its place in the list of those that differ, which
        has the seconds that each of them takes."""
        distinct = list(self._places)
        used, places = np.unique(np.asarray(self._ran[first:], dtype=np.int32), return_inverse=True)
        listed = [(distinct[i], self._priced[i][0]) for i in used.tolist()]
        return np.asarray(self._starts_s[first:]), places.astype(np.int32), listed

    def energy_j(self, component: str) -> float:
        """Joules of one of the sheet's components since the start."""
        return self._energy_j[component][-1]

    def readings(self, component: str, start_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times and cumulative joules at every operation boundary from `start_s` until now.

        `start_s` is a boundary when it came from `now_s`, which is the only clock there is.
        """
        first = bisect_left(self._times_s, start_s)
        return np.asarray(self._times_s[first:]), np.asarray(self._energy_j[component][first:])

    def _advance(self, until_s: float, spent_j: Mapping[str, float]) -> None:
        if until_s <= self.now_s():
            return  # work of size zero: two readings at one time would make a counter's power infinite
        self._times_s.append(until_s)
        for component in self.sheet.components:
            self._energy_j[component].append(self.energy_j(component) + spent_j.get(component, 0.0))
