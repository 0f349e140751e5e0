"""What the operations of a timeline come to: joules of each component at any time.

A unit and a direction of a link work on one thing at a time, so the joules of each are a line through the starts and
ends of its own operations. The memory that units share, and its power, counts once while any unit works.

Legend: P operations that ran, in the order in which they were asked; D distinct ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from devices.models.sheet import Sheet
from results.records import COMM

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class Usage:
    """Joules by component; which operations ran, and when, is told with every question."""

    def __init__(self, sheet: Sheet) -> None:
        self._sheet = sheet
        self._resources_D: list[str] = []
        self._joules_D: list[float] = []
        self._own_D: dict[str, list[bool]] = {component: [] for component in sheet.components}
        """Whether a component works on it."""
        self._slept: list[tuple[float, float]] = []
        self._forgotten_j: dict[str, float] = defaultdict(float)
        self._forgotten_s: dict[str, float] = defaultdict(float)
        """Joules and busy seconds of what was forgotten."""
        self._slept_before_s = 0.0
        self._awake_before_s = 0.0
        """Seconds in which any unit or link worked, of what was forgotten."""

    def price(self, resource: str, joules: Mapping[str, float | None]) -> None:
        """Of the next distinct operation, as `operation_joules` says them. resource: its unit or link's direction."""
        self._resources_D.append(resource)
        for component, own_D in self._own_D.items():
            own_D.append(self._is_own(component, resource))
        self._joules_D.append(joules[self._sheet.component_of(resource)] or 0.0)

    def slept(self, start_s: float, end_s: float) -> None:
        """Nothing ran, and the machine drew its idle power."""
        self._slept.append((start_s, end_s))

    def forget(self, place_P: Integers, start_P: Floats, end_P: Floats) -> None:
        """All that ran until now is over, and comes in no later question."""
        for component in self._sheet.components:
            own_P = self._own(component, place_P)
            self._forgotten_s[component] += float(_busy(start_P[own_P], end_P[own_P])[1][-1])
            self._forgotten_j[component] += float(np.asarray(self._joules_D)[place_P[own_P]].sum())
        self._awake_before_s += float(_busy(start_P, end_P)[1][-1])
        self._slept_before_s += sum(end_s - start_s for start_s, end_s in self._slept)
        self._slept.clear()

    def readings(
        self, component: str, start_s: float, now_s: float, place_P: Integers, start_P: Floats, end_P: Floats
    ) -> tuple[Floats, Floats]:
        """(times, cumulative joules) at every boundary of an operation or a sleep from `start_s` to `now_s`."""
        edges_s = np.concatenate([[start_s, now_s], start_P, end_P, *map(np.asarray, self._slept)])
        edges_s = np.unique(edges_s[(edges_s >= start_s) & (edges_s <= now_s)])
        own_P = self._own(component, place_P)
        knots_s, busy_s = _busy(start_P[own_P], end_P[own_P])
        busy_at_s = self._forgotten_s[component] + np.interp(edges_s, knots_s, busy_s)
        if component == COMM:
            assert self._sheet.memory is not None
            return edges_s, self._sheet.memory.comm_w.value * busy_at_s
        spent_j = np.full(len(edges_s), self._forgotten_j[component])
        for resource in {self._resources_D[place] for place in np.bincount(place_P[own_P]).nonzero()[0].tolist()}:
            of_D = np.array([one == resource for one in self._resources_D])
            of_P = np.flatnonzero(of_D[place_P])
            of_P = of_P[np.argsort(start_P[of_P], kind="stable")]
            at_s, at_j = _line(start_P[of_P], end_P[of_P], np.asarray(self._joules_D)[place_P[of_P]])
            spent_j += np.interp(edges_s, at_s, at_j)
        unit = self._sheet.units.get(component)
        if unit is not None and self._sheet.has_watts(component):
            idle_w = 0.0 if unit.idle_w is None else unit.idle_w.value
            rest_j = idle_w * (edges_s - busy_at_s)
            if unit.waiting_w is not None:
                awake_at_s = self._awake_before_s + np.interp(edges_s, *_busy(start_P, end_P))
                rest_j += (unit.waiting_w.value - idle_w) * (awake_at_s - busy_at_s)
            if unit.idle_w is not None or unit.waiting_w is not None:
                spent_j = np.maximum.accumulate(spent_j + rest_j)
        if component == "cpu" and self._sheet.idle_w is not None:
            sleeps_s, slept_s = _busy(*np.array(self._slept).reshape(-1, 2).T)
            spent_j = spent_j + self._sheet.idle_w.value * (
                self._slept_before_s + np.interp(edges_s, sleeps_s, slept_s)
            )
        return edges_s, spent_j

    def _own(self, component: str, place_P: Integers) -> NDArray[np.bool_]:
        """Which of them the component works on. The shared memory works with all units, and not with links."""
        own_D = np.array(self._own_D[component], dtype=np.bool_)
        return own_D[place_P] if len(place_P) else np.zeros(0, dtype=np.bool_)

    def _is_own(self, component: str, resource: str) -> bool:
        if component == COMM:
            return resource in self._sheet.units
        return self._sheet.component_of(resource) == component


def _busy(start_P: Floats, end_P: Floats) -> tuple[Floats, Floats]:
    """(times, seconds until then in which any of these ran): a line between the times."""
    if not len(start_P):
        return np.zeros(1), np.zeros(1)
    order = np.argsort(start_P, kind="stable")
    starts_s, ends_s = start_P[order], np.maximum.accumulate(end_P[order])
    begins = np.concatenate([[True], starts_s[1:] > ends_s[:-1]])
    first_s, last_s = starts_s[begins], ends_s[np.concatenate([begins[1:], [True]])]
    return _line(first_s, last_s, last_s - first_s)


def _line(starts_s: Floats, ends_s: Floats, amounts: Floats) -> tuple[Floats, Floats]:
    """(times, amounts until then) through stretches one after another; level between them, to the last bit."""
    so_far = np.concatenate([[0.0], np.cumsum(amounts)])
    return (
        np.stack([starts_s, ends_s], axis=1).reshape(-1),
        np.stack([so_far[:-1], so_far[1:]], axis=1).reshape(-1),
    )
