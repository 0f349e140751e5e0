"""A timeline that does not run the same operations twice: they take what they took before.

Where nothing is under way, what a tuple of operations takes hangs on nothing that ran before it. So the same tuple,
told by its identity, is counted and not run; in between the timeline's own time stands still. What it all came to can
be asked, and not operation by operation.

Where transfers are under way, what a tuple takes hangs on how much longer: on when the resources that it asks for are
free, and on when the operations that it names are done. Where both are as before, it is not worked out again: all its
operations are written down as they stood then, from now on. Where launches queue, every operation runs: a queue
remembers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.models.operation import Operation
from devices.models.sheet import Sheet
from devices.models.terms import Term
from devices.models.timeline import Timeline
from results.resource_use import Again, MachineUse


class Reading(NamedTuple):
    """Since the start of the timeline; joules of components whose watts the sheet states."""

    at_s: float
    joules: Mapping[str, float]
    spent: Mapping[tuple[str, str], float]
    """Seconds by operation and unit or link."""
    terms: Mapping[tuple[str, Term], float]
    outside_fit_s: float
    n_bytes: Mapping[str, float]
    """By one way of a link."""


@dataclass
class _Part:
    """A tuple of operations that ran once: from operation `first` to `end`, from `start_s` to `end_s`."""

    operations: tuple[Operation, ...]
    first: int
    end: int
    start_s: float
    end_s: float
    n_again: int = 0
    joules: Mapping[str, float] | None = None


SAME_PER_S = 2.0**40
"""Stretches of less than a picosecond's difference are the same: sums of seconds differ by rounding."""
MOST_FLOWS = 1 << 15


class _Leans(NamedTuple):
    """What the start of a tuple's operations hangs on besides the line. named: how far before its first operation
    stand those that it names; they may be under way."""

    operations: tuple[Operation, ...]
    resources: tuple[str, ...]
    named: tuple[int, ...]


class _Flow(NamedTuple):
    """What a tuple came to once, in seconds from when it was asked. free_s: of its resources. n_named: its operations
    until the last that stands aside or names another."""

    ran: bytes
    starts_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]
    waited_s: bytes
    line_s: float
    latest_s: float
    free_s: tuple[tuple[str, float], ...]
    n_named: int


class RepeatingTimeline(Timeline):
    def __init__(self, sheet: Sheet) -> None:
        super().__init__(sheet)
        self._parts: dict[int, _Part] = {}
        """By the identity of the tuple, which each keeps."""
        self._again_s = 0.0
        """Of all that was not run again; times of the timeline itself leave it out."""
        self._n_again = 0
        self._leans: dict[int, _Leans] = {}
        """By the identity of the tuple, which each keeps."""
        self._flows: dict[Hashable, _Flow] = {}
        """By the tuple and how long what it leans on is under way."""
        self._read_s = 0.0
        self._read_n: dict[int, int] = {}
        """When `use` was asked last, and how often each part had come again."""

    def now_s(self) -> float:
        return self._line_s + self._again_s

    def run(self, operations: Iterable[Operation]) -> None:
        if not isinstance(operations, tuple) or self._host.queues:
            super().run(operations)
            return
        if not self.is_at_rest:
            self._flow(operations)
            return
        part = self._parts.get(id(operations))
        if part is not None:
            part.n_again += 1
            self._again_s += part.end_s - part.start_s
            self._n_again += len(operations)
            return
        first, start_s = len(self._ran), self._line_s
        super().run(operations)
        if self.is_at_rest:
            self._parts[id(operations)] = _Part(operations, first, len(self._ran), start_s, self._line_s)

    def _flow(self, operations: tuple[Operation, ...]) -> None:
        """Runs them while something is under way."""
        leans = self._leans.get(id(operations))
        if leans is None:
            leans = self._leans[id(operations)] = _leans(operations)
        line_s, ends_s, n = self._line_s, self._ends_s, len(self._ends_s)
        left_s = [self._free_s[one] - line_s for one in leans.resources]
        left_s += [ends_s[n - back] - line_s for back in leans.named if back <= n]
        key = id(operations), *[round(one * SAME_PER_S) if one > 0 else 0 for one in left_s]
        flow = self._flows.get(key)
        if flow is not None:
            self._ran.frombytes(flow.ran)
            self._starts_s.frombytes((flow.starts_s + line_s).tobytes())
            ends_s.frombytes((flow.ends_s + line_s).tobytes())
            self._waited_s.frombytes(flow.waited_s)
            self._line_s = line_s + flow.line_s
            self._latest_s = max(self._latest_s, line_s + flow.latest_s)
            for resource, free_s in flow.free_s:
                self._free_s[resource] = line_s + free_s
            if flow.n_named:
                self._n_named = n + flow.n_named
            return
        super().run(operations)
        if len(self._flows) >= MOST_FLOWS:
            self._flows.clear()
        own_ends_s = np.array(ends_s[n:])
        self._flows[key] = _Flow(
            self._ran[n:].tobytes(),
            np.array(self._starts_s[n:]) - line_s,
            own_ends_s - line_s,
            self._waited_s[n:].tobytes(),
            self._line_s - line_s,
            float(own_ends_s.max()) - line_s,
            tuple((one, self._free_s[one] - line_s) for one in leans.resources),
            max(self._n_named - n, 0),
        )

    @property
    def n_run(self) -> int:
        return len(self._ran) + self._n_again

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way for which the line does not wait."""
        return self._latest_s <= self._line_s

    def energy_j(self, component: str) -> float:
        again_j = sum(part.n_again * self._joules_of(part)[component] for part in self._parts.values() if part.n_again)
        return super().energy_j(component) + again_j

    def _n_by_place(self) -> list[int]:
        again = [(part.first, part.end, part.n_again) for part in self._parts.values() if part.n_again]
        first_W, end_W, n_W = np.array(again, dtype=np.int64).reshape(-1, 3).T
        # How often each that ran came again: whole numbers, exact in floating point.
        n = len(self._ran) + 1
        change = np.bincount(first_W, n_W, n) - np.bincount(end_W, n_W, n)
        ran = np.asarray(self._ran, dtype=np.int64)
        n_again = np.bincount(ran, change.cumsum()[:-1], len(self._distinct))
        return [once + round(more) for once, more in zip(super()._n_by_place(), n_again.tolist(), strict=True)]

    def read(self) -> Reading:
        """What all came to until now."""
        return Reading(
            self.now_s(),
            {one: self.energy_j(one) for one in self.sheet.components if self.sheet.has_watts(one)},
            self.seconds_by_operation(),
            self.seconds_by_term(),
            self.seconds_outside_fit(),
            self.bytes_by_link(),
        )

    def take_use(self) -> MachineUse:
        """Busy, waiting, idle and overlap since it was asked last."""
        news = [(part, part.n_again - self._read_n.get(key, 0)) for key, part in self._parts.items()]
        found = self.use(self._read_s, [Again(part.start_s, part.end_s, n) for part, n in news if n])
        self._read_s, self._read_n = self._line_s, {key: part.n_again for key, part in self._parts.items()}
        return found

    def _joules_of(self, part: _Part) -> Mapping[str, float]:
        """Of one time."""
        if part.joules is None:
            part.joules = {}
            ran = self._arrays(part.first, part.end)
            for one in self.sheet.components:
                if self.sheet.has_watts(one):
                    values_j = self._usage.readings(one, part.start_s, part.end_s, *ran)[1]
                    part.joules[one] = float(values_j[-1] - values_j[0])
        return part.joules


def _leans(operations: tuple[Operation, ...]) -> _Leans:
    named = {back - place for place, one in enumerate(operations) for back in one.after if back > place}
    return _Leans(operations, tuple(dict.fromkeys(one.unit for one in operations)), tuple(sorted(named)))
