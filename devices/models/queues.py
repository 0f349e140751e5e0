"""Launches that a unit is given before they are done: their cost hides behind the unit's own work.

An operation of n launches takes n * l for launching and n * x for its work. A unit of queue depth Q is given launch j

    once launch j-1 of that unit was issued, which takes l each,
    once launch j-Q is done,
    and once the host can: the line before it is done on every other unit and link, and the last router and head before
    it wherever they ran, for the host reads which experts and which token they chose;

and works on it once it is issued, launch j-1 is done, and all that its operation waits for is done. With Q = 1 a launch
waits for the one before, and an operation takes n * (l + x): what holds where a sheet gives no depth. What an operation
names (`after`) holds up its work, not its launches: a unit waits for an event, and the host does not.

The unit is booked for the n * x before the end of its last launch, so that launches cost time and no watts of the unit.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from devices.models.operation import Operation
from devices.models.sheet import Sheet

READ_BY_HOST: Final = frozenset({"router", "lm_head"})
"""Kernels whose results the host reads before it launches what follows."""


Span = tuple[float, float]
NOT_LAUNCHED: Final[Span] = (math.nan, math.nan)


class LaunchingHost:
    """What launches on the units of a sheet, and when it can. Nothing on a sheet without queues."""

    def __init__(self, sheet: Sheet) -> None:
        self.queues = {
            unit: _LaunchQueue(int(costs.queue_depth.value))
            for unit, costs in sheet.units.items()
            if costs.queue_depth is not None and costs.queue_depth.value > 1
        }
        self._read_s = 0.0
        self._line_ends_s: dict[str, float] = {}
        self._group_ends_s: dict[str, float] = {}
        """By resource: of the line, and with those that stand alongside each other behind it."""

    def wait_until(self, at_s: float) -> None:
        """Nothing is asked before."""
        self._read_s = max(self._read_s, at_s)

    def close_group(self) -> None:
        """What follows waits for the group too."""
        if self.queues:
            self._line_ends_s = dict(self._group_ends_s)

    def start_s(self, operation: Operation, launch_s: float, work_s: float, ready_s: float) -> float:
        """When its unit is booked. launch_s, work_s: of all its launches. ready_s: when all that it waits for is done,
        and the unit with what it was asked."""
        elsewhere_s = (end_s for unit, end_s in self._line_ends_s.items() if unit != operation.unit)
        host_s = max(self._read_s, *elsewhere_s, 0.0)
        end_s = self.queues[operation.unit].end_s(operation.launches, launch_s, work_s, host_s, ready_s)
        return max(end_s - work_s, ready_s)

    def launched(self, unit: str) -> Span:
        """From when to when the last operation of that unit was launched."""
        return self.queues[unit].launched if unit in self.queues else NOT_LAUNCHED

    def did(self, operation: Operation, end_s: float) -> None:
        """An operation in the line, or alongside it."""
        if not self.queues:
            return
        self._group_ends_s[operation.unit] = end_s
        if not operation.alongside:
            self._line_ends_s[operation.unit] = end_s
        if operation.kernel in READ_BY_HOST:
            self.wait_until(end_s)


class _LaunchQueue:
    """Of one unit. depth: Q, 2 or more."""

    def __init__(self, depth: int) -> None:
        self._done_s: deque[float] = deque([0.0] * depth, maxlen=depth)
        """When each of the last Q launches was done."""
        self._issued_s = 0.0
        self.launched: Span = NOT_LAUNCHED
        """From when to when the last operation was launched."""

    def end_s(self, launches: int, launch_s: float, work_s: float, host_s: float, ready_s: float) -> float:
        """When an operation is done, as `LaunchingHost.start_s` is told of it."""
        if launches == 0:
            self.launched = NOT_LAUNCHED
            return ready_s + work_s
        each_launch_s, each_work_s = launch_s / launches, work_s / launches
        end_s = ready_s
        first_s = max(self._issued_s, self._done_s[0], host_s)
        for _ in range(launches):
            self._issued_s = max(self._issued_s, self._done_s[0], host_s) + each_launch_s
            end_s = max(end_s, self._issued_s) + each_work_s
            self._done_s.append(end_s)
        self.launched = first_s, self._issued_s
        return end_s
