"""Virtual time of a machine that is not here: operations in, seconds and joules out.

Every operation has a resource, a unit or a link, which works on one thing at a time, in the order in which it was
asked. An operation starts when its resource is free and all that it waits for is done; nothing else decides. It waits

    in the line    for the whole line before it: the design of 000-npumoe (§4.2: one device queue; §3.1: activations
                   return to the CPU), and of any layer that needs the one before
    alongside      for the line before the first of those that stand alongside it: units work at the same time, and the
                   next operation in the line waits for all of them
    aside          for the same, and the line does not wait for it: a transfer while others compute

and besides for those that it names (`after`): a call for the transfer of its expert, a sum for what it adds up. A unit
that launches are queued for hides their cost behind its work (`devices.models.queues`). The clock stands at the end of
the line, so it counts only what was priced.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.models.operation import TRANSFER, Operation, is_fitted, launch_seconds, operation_joules, operation_seconds
from devices.models.queues import LaunchingHost
from devices.models.sheet import Sheet
from devices.models.terms import Term, term_seconds
from devices.models.usage import Usage
from results.resource_use import Again, MachineUse, Ran, machine_use

Listed = list[tuple[Operation, float]]
MOST_TUPLES = 1 << 13
"""Operations that were asked for together."""


class Program(NamedTuple):
    """Of operations in the order of their starts: the order in which each was asked for, and how long its resource was
    free and waited for what it names."""

    order: NDArray[np.int64]
    waited_s: NDArray[np.float64]


class Launched(NamedTuple):
    """Of the same operations: from when to when each was launched; NaN of a unit without a queue."""

    begins_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]


class _Asked(NamedTuple):
    """An operation, its place among those that differ, and what it is asked for every time it runs."""

    operation: Operation
    place: int
    unit: str
    in_line: bool
    is_aside: bool
    after: tuple[int, ...]
    seconds: float
    is_plain: bool
    """Whether it stands alongside, and waits for its unit and the line alone."""


class _Priced(NamedTuple):
    """What work takes. number: in the order in which such work was first asked for. launch_s: what a queue hides
    besides."""

    number: int
    seconds: float
    launch_s: float
    joules: Mapping[str, float | None]


class Timeline:
    """Clock and energy counters of a modelled machine. Implements `devices.base.Clock`."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self._line_s = 0.0
        self._free_s: dict[str, float] = defaultdict(float)
        """When each resource is done with what it was asked."""
        self._latest_s = 0.0
        """When the last of them is."""
        self._known: dict[Operation, _Asked] = {}
        self._same: dict[int, _Asked] = {}
        """By the identity of the operation that it keeps."""
        self._tuples: dict[int, tuple[tuple[Operation, ...], list[_Asked]]] = {}
        """By the identity of the tuple, which each keeps."""
        self._distinct: list[Operation] = []
        """By place: a model asks for few of them, many times."""
        self._priced: dict[Operation, _Priced] = {}
        """Of work that waits for nothing, and of all that is as much."""
        self._work_D: list[int] = []
        """Which of these each distinct operation is."""
        self._n_named = 0
        """Operations since `settle`, until the last that stood aside or waited for one that it names."""
        self._resources: dict[str, int] = {}
        self._resource_D: list[int] = []
        """By number, and which each distinct operation runs on."""
        self._seconds: list[float] = []
        self._launch_s: list[float] = []
        """Of each too: while its unit works on it, and what a queue hides beside that."""
        self._host = LaunchingHost(sheet)
        self._usage = Usage(sheet)
        self._ran, self._starts_s, self._ends_s, self._waited_s = array("i"), array("d"), array("d"), array("d")
        """Of each operation since `settle`: which it was, when it began and ended, how long it waited for `after`."""
        self._launched_s = array("d"), array("d")
        """Of each too, from when to when it was launched; empty of a sheet without queues."""
        self._n_forgotten = 0
        self._n_before: dict[int, int] = defaultdict(int)
        """Of those forgotten: how many of each place."""

    @property
    def has_queues(self) -> bool:
        """Whether a unit of the sheet hides what launches cost."""
        return bool(self._host.queues)

    def now_s(self) -> float:
        return self._line_s

    def sleep_until_s(self, at_s: float) -> None:
        """Idles until `at_s`, at the sheet's idle power, or at 0 W where the sheet does not know it."""
        if at_s > self._line_s:
            self._usage.slept(self._line_s, at_s)
            self._line_s = at_s
            self._host.wait_until(at_s)

    def run(self, operations: Iterable[Operation]) -> None:
        """Advances until the line is done. Raises `DeviceError` on an operation that the sheet cannot price."""
        line_s = group_s = self._line_s
        latest_s, free_s, ends_s = self._latest_s, self._free_s, self._ends_s
        add_start, add_end, waited_s, n_ran = self._starts_s.append, ends_s.append, self._waited_s, len(ends_s)
        host, queues = self._host, self._host.queues
        all_asked = self._asked(operations)
        self._ran.extend([one.place for one in all_asked])
        waited_s.frombytes(bytes(waited_s.itemsize * len(all_asked)))
        for operation, place, unit, in_line, is_aside, after, seconds, is_plain in all_asked:
            if is_plain:
                start_s = free_s[unit]
                if start_s < line_s:
                    start_s = line_s
                end_s = start_s + seconds
                free_s[unit] = end_s
                if end_s > group_s:
                    group_s = end_s
                n_ran += 1
                add_start(start_s)
                add_end(end_s)
                continue
            if in_line:
                line_s = group_s
                if queues:
                    host.close_group()
            ready_s = free_s[unit]
            if ready_s < line_s:
                ready_s = line_s
            start_s = ready_s
            for back in after:
                if back <= n_ran and ends_s[-back] > start_s:
                    start_s = ends_s[-back]
            waited_s[n_ran] = start_s - ready_s
            n_ran += 1
            if is_aside or after:
                self._n_named = n_ran
            if queues:
                if unit in queues:
                    start_s = host.start_s(operation, self._launch_s[place], seconds, start_s)
                for kept, at_s in zip(self._launched_s, host.launched(unit), strict=True):
                    kept.append(at_s)
            end_s = start_s + seconds
            free_s[unit] = end_s
            if end_s > latest_s:
                latest_s = end_s
            add_start(start_s)
            add_end(end_s)
            if in_line:
                line_s = end_s
            if not is_aside:
                if end_s > group_s:
                    group_s = end_s
                if queues:
                    host.did(operation, end_s)
        self._line_s, self._latest_s = group_s, max(latest_s, group_s)

    def _asked(self, operations: Iterable[Operation]) -> Sequence[_Asked]:
        """What is known of each; of the same tuple the same list."""
        if isinstance(operations, tuple) and id(operations) in self._tuples:
            return self._tuples[id(operations)][1]
        same = self._same.get
        found = [same(id(operation)) or self._known_or_made(operation) for operation in operations]
        if isinstance(operations, tuple):
            if len(self._tuples) >= MOST_TUPLES:
                self._tuples.clear()
            self._tuples[id(operations)] = operations, found
        return found

    def _known_or_made(self, operation: Operation) -> _Asked:
        asked = self._known.get(operation)
        if asked is None:
            asked = self._known[operation] = self._make(operation)
            self._same[id(operation)] = asked
        return asked

    def _make(self, operation: Operation) -> _Asked:
        place, is_aside = self._place(operation), operation.aside
        in_line = not (is_aside or operation.alongside)
        is_plain = not (in_line or is_aside or operation.after or self._host.queues)
        seconds = self._seconds[place]
        return _Asked(operation, place, operation.unit, in_line, is_aside, operation.after, seconds, is_plain)

    def _place(self, operation: Operation) -> int:
        """A new one. Work that stood there before, and waited for something else, is not priced again."""
        place, work = len(self._distinct), operation
        if operation.after:
            work = replace(operation, after=())
        known = self._priced.get(work)
        if known is None:
            seconds = operation_seconds(self.sheet, work)
            launch_s = launch_seconds(self.sheet, work) if work.unit in self._host.queues else 0.0
            joules = operation_joules(self.sheet, work, seconds - launch_s)
            known = self._priced[work] = _Priced(len(self._priced), seconds - launch_s, launch_s, joules)
        self._distinct.append(operation)
        self._work_D.append(known.number)
        self._seconds.append(known.seconds)
        self._launch_s.append(known.launch_s)
        self._resource_D.append(self._resources.setdefault(work.unit, len(self._resources)))
        self._usage.price(work.unit, known.joules)
        return place

    def settle(self) -> None:
        """Waits for what is aside, and drops all that ran: its joules stay counted, and nothing to come can name it."""
        self.sleep_until_s(self._latest_s)
        places, starts_s, ends_s = self._arrays()
        self._usage.forget(places, starts_s, ends_s)
        for place, n in zip(*np.unique(places, return_counts=True), strict=True):
            self._n_before[int(place)] += int(n)
        self._n_forgotten += len(places)
        for kept in (self._ran, self._starts_s, self._ends_s, self._waited_s, *self._launched_s):
            del kept[:]
        self._n_named = 0

    def seconds_by_operation(self) -> Mapping[tuple[str, str], float]:
        """Seconds since the start by (operation, unit), in the form of Table 4; also where units worked alongside."""
        found: dict[tuple[str, str], float] = defaultdict(float)
        for n, (operation, priced) in self._n_by_work():
            found[operation.name, operation.unit] += n * priced.seconds
        return dict(found)

    def seconds_by_term(self) -> Mapping[tuple[str, Term], float]:
        """Seconds since the start by unit or link and what they were spent on; launches that a queue hides are not
        among them."""
        found: dict[tuple[str, Term], float] = defaultdict(float)
        for n, (operation, _) in self._n_by_work():
            for term, seconds in term_seconds(self.sheet, operation).items():
                if term != "launches" or operation.unit not in self._host.queues:
                    found[operation.unit, term] += n * seconds
        return dict(found)

    def seconds_outside_fit(self) -> float:
        """Since the start, of operations unlike all that their price was fitted on."""
        return sum(
            n * priced.seconds
            for n, (operation, priced) in self._n_by_work()
            if is_fitted(self.sheet, operation) is False
        )

    def bytes_by_link(self) -> Mapping[str, float]:
        """Bytes since the start that travelled, by each way of a link."""
        found: dict[str, float] = defaultdict(float)
        for n, (operation, _) in self._n_by_work():
            if operation.kernel == TRANSFER:
                found[operation.unit] += n * operation.moved_bytes
        return dict(found)

    def _n_by_work(self) -> Iterator[tuple[int, tuple[Operation, _Priced]]]:
        """How many of each work ran since the start, whatever they waited for."""
        n_W = [0] * len(self._priced)
        for number, n in zip(self._work_D, self._n_by_place(), strict=True):
            n_W[number] += n
        return zip(n_W, self._priced.items(), strict=True)

    def _n_by_place(self) -> list[int]:
        """How many of each distinct operation ran since the start."""
        n_run = np.bincount(np.asarray(self._ran, dtype=np.int64), minlength=len(self._distinct))
        return [n + self._n_before.get(place, 0) for place, n in enumerate(n_run.tolist())]

    @property
    def n_run(self) -> int:
        """Operations since the start."""
        return self._n_forgotten + len(self._ran)

    def operations(self, first: int) -> tuple[NDArray[np.float64], NDArray[np.int32], Listed]:
        """From the operation of that number on, by their starts: when each began, and its place in the list of those
        that differ, which has the seconds that each of them takes."""
        since = max(first - self._n_forgotten, 0)
        places, starts_s, _ = self._arrays(since)
        by_start = np.argsort(starts_s, kind="stable")
        used, listed_at = np.unique(places[by_start], return_inverse=True)
        listed = [(self._distinct[i], self._seconds[i]) for i in used.tolist()]
        return starts_s[by_start], listed_at.astype(np.int32), listed

    def use(self, begin_s: float, again: Sequence[Again] = ()) -> MachineUse:
        """Busy, waiting, idle and overlap of units and links from then until now; not before `settle`. again: as of
        `machine_use`."""
        places, starts_s, ends_s = self._arrays()
        resource_P = np.array(self._resource_D, dtype=np.int64)[places]
        return machine_use(Ran(tuple(self._resources), resource_P, starts_s, ends_s), begin_s, self._line_s, again)

    def program(self, first: int) -> Program | None:
        """Of the same operations, in the same order. None where all stand in the line or alongside each other: the
        order of their starts says all."""
        since = max(first - self._n_forgotten, 0)
        if self._n_named <= since:
            return None
        starts_s = self._arrays(since)[1]
        by_start = np.argsort(starts_s, kind="stable")
        return Program(by_start.astype(np.int64), np.asarray(self._waited_s[since:])[by_start])

    def launched(self, first: int) -> Launched | None:
        """Of the same operations, in the same order. None of a sheet without queues."""
        if not self._host.queues:
            return None
        since = max(first - self._n_forgotten, 0)
        by_start = np.argsort(self._arrays(since)[1], kind="stable")
        begins_s, ends_s = (np.asarray(one[since:])[by_start] for one in self._launched_s)
        return Launched(begins_s, ends_s)

    def energy_j(self, component: str) -> float:
        """Joules of one of the sheet's components since the start; 0 of one whose watts are not stated."""
        return float(self.readings(component, self._line_s)[1][-1])

    def readings(self, component: str, start_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Times and cumulative joules at every boundary of an operation from `start_s` until now.

        `start_s` is a boundary when it came from `now_s`, which is the only clock there is; not before `settle`.
        """
        return self._usage.readings(component, start_s, self._line_s, *self._arrays())

    def _arrays(
        self, first: int = 0, end: int | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        own = slice(first, end)
        return np.array(self._ran[own], dtype=np.int64), np.array(self._starts_s[own]), np.array(self._ends_s[own])
