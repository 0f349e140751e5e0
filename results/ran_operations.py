"""The operations that a modelled trial stored, read again: what ran, on which unit or link, from when to when."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from results.records import BACK, PowerTrace
from results.resource_use import Ran
from results.trace_files import WINDOW, TraceFileError, raw_part

OPERATIONS: Final = "operations"
"""The component under which a trace of operations is stored: values are places in the list of its basis."""
ORDER: Final = "order of operations"
"""Beside it, where operations name others: of each of them, which in turn it was asked."""
WAITED: Final = "waits of operations"
"""Beside it then too: seconds in which the unit or link of each was free and waited for what it names."""
LAUNCH_BEGINS: Final = "begins of launches"
LAUNCH_ENDS: Final = "ends of launches"
"""Beside it where units have queues: from when to when each was launched; NaN where its unit has none."""
SECONDS: Final = "seconds"
"""In that list: how long the operation takes. Stores of before lack it; no units worked at the same time there."""
FITTED: Final = "fitted"
"""In that list: whether the rows that its price was fitted on had any such; None of a price that no rows were fitted
to. Stores of before lack it."""
MOVED_BYTES: Final = "moved_bytes"
"""In that list, with links."""
KERNEL: Final = "kernel"
"""In that list: the kind of work."""
TRANSFER: Final = "transfer"
"""Such a kind: a link's. Stores that lack kinds had no links."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StoredOperations:
    """Operation i was `names[places[i]]`, and ran from `starts_s[i]` to `ends_s[i]`, in the order of the starts.

    names: (operation, unit or direction of a link) of each distinct one. listed: all that was kept of it. is_outside:
    whether its price was fitted on nothing like it; NaN where nobody knows. moved_bytes: over a link, or within a unit.
    waited_s: in which its resource was free and waited for what it names. launched_s: when its launch began and ended;
    NaN where that is in its time. counters: joules so far of each component, at every start and end.
    """

    names: Sequence[tuple[str, str]]
    listed: Sequence[Mapping[str, object]]
    is_transfer: Sequence[bool]
    is_outside: Floats
    moved_bytes: Floats
    places: NDArray[np.int64]
    starts_s: Floats
    ends_s: Floats
    waited_s: Floats
    launched_s: tuple[Floats, Floats]
    counters: Sequence[PowerTrace]

    @property
    def window(self) -> tuple[float, float]:
        """What the counters were read over; what is aside may end after it."""
        times_s = self.counters[0].times_s
        return float(times_s[0]), float(times_s[-1])

    def ran(self) -> Ran:
        """By unit and direction of a link, in the order in which they first ran."""
        resource_D = [unit for _, unit in self.names]
        resources = list(dict.fromkeys(resource_D[place] for place in self.places.tolist()))
        at = {name: i for i, name in enumerate(resources)}
        resource_P = np.array([at.get(one, -1) for one in resource_D], dtype=np.int64)[self.places]
        return Ran(resources, resource_P, self.starts_s, self.ends_s)


def stored_operations(parts: Mapping[str, Sequence[PowerTrace]]) -> StoredOperations | None:
    """None where no operations were kept. Raises `TraceFileError` where their list is damaged."""
    raw = parts.get(raw_part(WINDOW), ())
    kept = [trace for trace in raw if trace.component == OPERATIONS]
    counters = [trace for trace in parts.get(WINDOW, ()) if trace.kind == "counter" and trace.additive]
    if not kept or not counters:
        return None
    places, starts_s = kept[0].values.astype(np.int64), kept[0].times_s
    try:
        listed = json.loads(kept[0].basis or "")
        names = [(str(one["name"]), str(one["unit"])) for one in listed]
        is_transfer = [one.get(KERNEL) == TRANSFER for one in listed]
        taken_s = np.array([float(one.get(SECONDS, np.nan)) for one in listed])
        moved_bytes = np.array([float(one.get(MOVED_BYTES, 0.0)) for one in listed])
        fitted = [one.get(FITTED) for one in listed]
        is_outside = np.array([np.nan if one is None else float(not one) for one in fitted])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TraceFileError(f"the list of operations cannot be read ({error})") from error
    if np.any((places < 0) | (places >= len(names))):
        raise TraceFileError(f"an operation is none of the {len(names)} that are listed")
    if np.any(taken_s < 0):
        raise TraceFileError("an operation is listed as taking less than no time")
    ends_s = starts_s + taken_s[places]
    if np.isnan(ends_s).any():
        # Ends at the next boundary, before any waiting; where the next one begins at once, it took no time.
        edges_s = counters[0].times_s
        next_s = np.append(starts_s[1:], edges_s[-1])
        following = np.minimum(np.searchsorted(edges_s, starts_s, side="right"), len(edges_s) - 1)
        ends_s = np.minimum(next_s, edges_s[following])
    waits = next((trace.values for trace in raw if trace.component == WAITED), np.zeros(len(places)))
    unknown = np.full(len(places), np.nan)
    begins_s, launched_s = (
        next((trace.values for trace in raw if trace.component == one), unknown) for one in (LAUNCH_BEGINS, LAUNCH_ENDS)
    )
    return StoredOperations(
        names,
        listed,
        is_transfer,
        is_outside,
        moved_bytes,
        places,
        starts_s,
        ends_s,
        waits,
        (begins_s, launched_s),
        counters,
    )


def joules_of_operations(ran: StoredOperations, shared: bool = True) -> Floats:
    """Of each operation: its unit's or link's own counter meanwhile, and its part of the counters that are no unit's.

    shared: False leaves out the latter. NaN of a unit whose joules are missing. Where nothing ran on that unit, nobody
    has a part of them.
    """
    joules = np.zeros(len(ran.places))
    drawn_by = np.array([unit.removesuffix(BACK) for _, unit in ran.names])[ran.places]
    is_back = np.array([unit.endswith(BACK) for _, unit in ran.names])[ran.places]
    for counter in ran.counters:
        is_own = drawn_by == counter.component
        if not is_own.any() and (not shared or np.isnan(counter.values).all()):
            continue
        if is_own.any() and not is_back[is_own].any():
            at_start, at_end = (
                np.interp(at_s[is_own], counter.times_s, counter.values) for at_s in (ran.starts_s, ran.ends_s)
            )
            joules[is_own] += at_end - at_start
        elif is_own.any():
            joules[is_own] += _by_bytes_j(counter, ran, is_own)
        else:
            joules += _parts_j(counter, ran.starts_s, ran.ends_s)
    return joules


def _by_bytes_j(counter: PowerTrace, ran: StoredOperations, is_own: NDArray[np.bool_]) -> Floats:
    """Of what a link's counter says, the part of each transfer: a bit costs the same either way."""
    begin_s, end_s = ran.window
    starts_s, ends_s = ran.starts_s[is_own], ran.ends_s[is_own]
    inside_s = np.clip(ends_s, begin_s, end_s) - np.clip(starts_s, begin_s, end_s)
    n_bytes = ran.moved_bytes[ran.places[is_own]] * inside_s / np.maximum(ends_s - starts_s, np.finfo(float).tiny)
    whole_j = float(counter.values[-1] - counter.values[0])
    found: Floats = whole_j * n_bytes / max(float(n_bytes.sum()), np.finfo(float).tiny)
    return found


def _parts_j(counter: PowerTrace, starts_s: Floats, ends_s: Floats) -> Floats:
    """Of what a counter says, the part of each operation: those that run at a time share it alike."""
    edges_s = np.unique(np.concatenate([counter.times_s, starts_s, ends_s]))
    middle_s = (edges_s[1:] + edges_s[:-1]) / 2
    n_working = np.searchsorted(np.sort(starts_s), middle_s) - np.searchsorted(np.sort(ends_s), middle_s)
    shared_j = np.diff(np.interp(edges_s, counter.times_s, counter.values)) / np.maximum(n_working, 1)
    so_far_j = np.concatenate([[0.0], np.cumsum(shared_j)])
    found: Floats = np.interp(ends_s, edges_s, so_far_j) - np.interp(starts_s, edges_s, so_far_j)
    return found
