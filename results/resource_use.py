"""Busy, waiting, idle and overlap of the units and links of a machine: the one place where these words are defined.

Within a window, at any time, a resource (a unit, or one direction of a link) is in one of four states:

    alone      it works, and no other resource does
    overlap    it works, and another does too
    waiting    it does nothing, and another works: it is kept awake between its operations
    idle       no resource of the machine works

busy = alone + overlap, and alone + overlap + waiting + idle = the window. Everything follows from which operations ran,
where, from when to when; that is what a trial stores, and what a timeline has.

Legend: P operations, E stretches between neighbouring starts and ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Curve = tuple[Floats, Floats]
"""Times, and cumulative joules at each."""


@dataclass(frozen=True)
class Ran:
    """Operation i ran on `resources[resource_P[i]]` from `start_P[i]` to `end_P[i]`, in seconds."""

    resources: Sequence[str]
    resource_P: NDArray[np.int64]
    start_P: Floats
    end_P: Floats

    def between(self, begin_s: float, end_s: float) -> slice:
        """Where those that reach between the two times stand, and few others: thousands of windows are cut of hours."""
        if not self._is_in_order:
            return slice(None)
        first = int(np.searchsorted(self._ended_by_P, begin_s, side="right"))
        return slice(first, int(np.searchsorted(self.start_P, end_s)))

    @cached_property
    def _is_in_order(self) -> bool:
        return bool(np.all(self.start_P[1:] >= self.start_P[:-1]))

    @cached_property
    def _ended_by_P(self) -> Floats:
        """When it, and all before it, had ended."""
        return np.maximum.accumulate(self.end_P)

    @cached_property
    def n_ran(self) -> NDArray[np.int64]:
        """Operations of each resource."""
        return np.bincount(self.resource_P, minlength=len(self.resources))


class ResourceUse(NamedTuple):
    """Seconds of one resource in each state."""

    alone_s: float = 0.0
    overlap_s: float = 0.0
    waiting_s: float = 0.0
    idle_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.alone_s + self.overlap_s


class StateJoules(NamedTuple):
    """Of one component: what it drew while it worked, waited, and while nothing on the machine worked."""

    busy_j: float
    waiting_j: float
    idle_j: float


@dataclass(frozen=True)
class MachineUse:
    """Of a whole machine in a window, or in several windows that follow each other.

    overlap_s: in which at least two resources worked. idle_s: in which none did.
    """

    window_s: float
    overlap_s: float
    idle_s: float
    by_resource: Mapping[str, ResourceUse]

    def of(self, resource: str) -> ResourceUse:
        """Also of one that nothing ran on: it waited while others worked."""
        return self.by_resource.get(resource, ResourceUse(waiting_s=self.window_s - self.idle_s, idle_s=self.idle_s))

    def __add__(self, other: object) -> MachineUse:
        """Of both windows together."""
        if not isinstance(other, MachineUse):
            return NotImplemented
        return MachineUse(
            self.window_s + other.window_s,
            self.overlap_s + other.overlap_s,
            self.idle_s + other.idle_s,
            {
                name: ResourceUse(*(a + b for a, b in zip(self.of(name), other.of(name), strict=True)))
                for name in dict.fromkeys([*self.by_resource, *other.by_resource])
            },
        )

    def repeated(self, n: float) -> MachineUse:
        """Of `n` windows like this one."""
        return MachineUse(
            n * self.window_s,
            n * self.overlap_s,
            n * self.idle_s,
            {name: ResourceUse(*(n * seconds for seconds in use)) for name, use in self.by_resource.items()},
        )


class Again(NamedTuple):
    """A window that counts n times."""

    begin_s: float
    end_s: float
    n: int


def machine_use(ran: Ran, begin_s: float, end_s: float, again: Sequence[Again] = ()) -> MachineUse:
    """From `begin_s` to `end_s`; what lies outside does not count, and resources on which nothing ran are left out.

    again: windows that count besides, inside or before.
    """
    windows_W3 = np.array([Again(begin_s, end_s, 1), *again])
    cuts_W2, n_W = windows_W3[:, :2], windows_W3[:, 2]
    stretches = _Stretches(ran, cuts_W2.min(), cuts_W2.max(), cuts_W2.reshape(-1) if again else ())
    seconds_E, working_E = np.diff(stretches.edges_s), stretches.n_working_E()
    window_s = end_s - begin_s
    if again:
        seconds_E *= stretches.n_windows_E(cuts_W2, n_W)
        window_s += float((np.diff(cuts_W2[1:], axis=1)[:, 0] * n_W[1:]).sum())
    idle_s = float(seconds_E[working_E == 0].sum())
    by_resource = {}
    for place, name in enumerate(ran.resources):
        if not stretches.has(place):
            continue
        own_E = stretches.is_busy_E(place)
        by_resource[name] = ResourceUse(
            float(seconds_E[own_E & (working_E == 1)].sum()),
            float(seconds_E[own_E & (working_E > 1)].sum()),
            float(seconds_E[~own_E & (working_E > 0)].sum()),
            idle_s,
        )
    return MachineUse(window_s, float(seconds_E[working_E > 1].sum()), idle_s, by_resource)


def joules_by_state(ran: Ran, begin_s: float, end_s: float, counters: Mapping[str, Curve]) -> dict[str, StateJoules]:
    """Of each component that has a counter. ran: its `resources` are components. NaN where the counter knows nothing.

    A component that is no resource of `ran`, such as a memory that all share, is busy while any works.
    """
    stretches = _Stretches(ran, begin_s, end_s)
    any_E = stretches.n_working_E() > 0
    found = {}
    for component, (times_s, values_j) in counters.items():
        is_known = component in ran.resources
        own_E = stretches.is_busy_E(ran.resources.index(component)) if is_known else any_E
        joules_E = np.diff(np.interp(stretches.edges_s, times_s, values_j))
        found[component] = StateJoules(
            float(joules_E[own_E].sum()), float(joules_E[any_E & ~own_E].sum()), float(joules_E[~any_E].sum())
        )
    return found


class _Stretches:
    """A window cut at every start and end: within a stretch nothing changes."""

    def __init__(self, ran: Ran, begin_s: float, end_s: float, cuts_s: Floats | tuple[()] = ()) -> None:
        """cuts_s: where it is cut besides."""
        near = ran.between(begin_s, end_s)
        start_P, end_P, resource_P = ran.start_P[near], ran.end_P[near], ran.resource_P[near]
        inside_P = (end_P > begin_s) & (start_P < end_s)
        start_P, end_P = np.maximum(start_P[inside_P], begin_s), np.minimum(end_P[inside_P], end_s)
        self.edges_s = np.unique(np.concatenate([[begin_s, end_s], start_P, end_P, cuts_s]))
        self._first_P = np.searchsorted(self.edges_s, start_P)
        self._last_P = np.searchsorted(self.edges_s, end_P)
        self._resource_P = resource_P[inside_P]
        self._n_resources = len(ran.resources)
        self._n_ran = ran.n_ran
        self._busy: dict[int, NDArray[np.bool_]] = {}

    def n_windows_E(self, cuts_W2: Floats, n_W: Floats) -> Floats:
        """How often each counts, of windows that begin and end at cuts."""
        n, at_W2 = len(self.edges_s), self.edges_s.searchsorted(cuts_W2)
        change = np.bincount(at_W2[:, 0], n_W, minlength=n) - np.bincount(at_W2[:, 1], n_W, minlength=n)
        found: Floats = np.cumsum(change)[:-1]
        return found

    def has(self, place: int) -> bool:
        """Whether anything ran on that resource, outside the window too."""
        return bool(self._n_ran[place])

    def is_busy_E(self, place: int) -> NDArray[np.bool_]:
        if place not in self._busy:
            own_P, n = self._resource_P == place, len(self.edges_s)
            change = np.bincount(self._first_P[own_P], minlength=n) - np.bincount(self._last_P[own_P], minlength=n)
            self._busy[place] = np.cumsum(change)[:-1] > 0
        return self._busy[place]

    def n_working_E(self) -> NDArray[np.int64]:
        """Resources that work."""
        n_E = np.zeros(len(self.edges_s) - 1, dtype=np.int64)
        for place in range(self._n_resources):
            n_E += self.is_busy_E(place)
        return n_E
