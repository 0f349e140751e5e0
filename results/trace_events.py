"""Timelines as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open: the Trace Event Format, as an
object with `traceEvents`.

    X   a slice: `ts` and `dur` in microseconds; those of one thread never overlap
    C   a counter: its value from `ts` on, in `args`
    M   names and the order of processes and threads; processes are the groups of tracks, threads are tracks

Microseconds have three digits, for nanoseconds are the finest that readers keep. Both ends of a slice are rounded, and
its duration is their difference, so that slices that touch do so in the file too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from results.printable import printable
from results.tracks import LINKS, REQUESTS, THREADS, UNITS, Timelines

GROUPS: Final = (REQUESTS, THREADS, UNITS, LINKS)
"""In the order that readers are asked for, power behind them. Perfetto has an order of its own for them."""
POWER: Final = "power"
FIRST_THREAD: Final = 1000
"""Times the number of its process: behind that a process's threads are numbered, far above all processes."""
POWER_DIGITS: Final = 6
"""Watts are joules over seconds: beyond, rounding makes 19.99999999 of 20."""
Event = dict[str, Any]


def trace_document(timelines: Timelines, title: str, facts: Mapping[str, str]) -> dict[str, Any]:
    """facts: what the file is of, for whoever opens it without the run."""
    return {
        "displayTimeUnit": "ms",
        "otherData": {"title": printable(title), **{name: printable(value) for name, value in facts.items()}},
        "traceEvents": [*_metadata(timelines), *_slices(timelines), *_counters(timelines)],
    }


def n_events(timelines: Timelines) -> int:
    """Of its slices and counters."""
    return sum(len(track.slices) for track in timelines.tracks) + sum(len(one.times_s) for one in timelines.power)


def _metadata(timelines: Timelines) -> Iterator[Event]:
    groups = {track.group for track in timelines.tracks} | ({POWER} if timelines.power else set())
    for pid, group in enumerate((*GROUPS, POWER), start=1):
        if group in groups:
            yield _named("process_name", pid, 0, {"name": group})
            yield _named("process_sort_index", pid, 0, {"sort_index": pid})
    for (pid, tid), track in _places(timelines):
        yield _named("thread_name", pid, tid, {"name": printable(track.name)})
        yield _named("thread_sort_index", pid, tid, {"sort_index": tid})


def _named(what: str, pid: int, tid: int, args: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": dict(args)}


def _places(timelines: Timelines) -> Iterator[tuple[tuple[int, int], Any]]:
    """Process and thread of each track. Readers take a thread with its process's number for the main one, and show it
    first: none has one."""
    n_of: dict[int, int] = {}
    for track in timelines.tracks:
        pid = GROUPS.index(track.group) + 1
        n_of[pid] = n_of.get(pid, 0) + 1
        yield (pid, pid * FIRST_THREAD + n_of[pid]), track


def _slices(timelines: Timelines) -> Iterator[Event]:
    for (pid, tid), track in _places(timelines):
        for one in track.slices:
            begin_ns, end_ns = (_ns(at_s, timelines.begin_s) for at_s in (one.begin_s, one.end_s))
            yield {
                "ph": "X",
                "name": printable(one.name),
                "cat": track.group,
                "ts": begin_ns / 1000,
                "dur": (end_ns - begin_ns) / 1000,
                "pid": pid,
                "tid": tid,
                "args": {name: printable(v) if isinstance(v, str) else v for name, v in one.details.items()},
            }


def _counters(timelines: Timelines) -> Iterator[Event]:
    pid = len(GROUPS) + 1
    for power in timelines.power:
        name = printable(f"{power.name} ({power.unit})")
        for at_s, value in zip(power.times_s.tolist(), power.values.tolist(), strict=True):
            if math.isfinite(value):
                ts = _ns(at_s, timelines.begin_s) / 1000
                told = float(f"{value:.{POWER_DIGITS}g}")
                yield {"ph": "C", "name": name, "ts": ts, "pid": pid, "tid": 0, "args": {power.unit: told}}


def _ns(at_s: float, zero_s: float) -> int:
    return round((at_s - zero_s) * 1e9)
