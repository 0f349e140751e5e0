"""The state of a device around a window: read before it, every few seconds in it, and after it; what changed marks it.

A charger, a restart, the heat or a brighter screen in the middle of a window changes what its joules mean, and may be
gone again at its end. The readings inside a window are made by a thread, or by a meter that sees the state beside its
own readings. A reading that fails in the middle is left out: the link is then told by whoever needs it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

from devices.base import Device, DeviceError, Meter, SeesState, WatchesState
from results.cells import CLOCK_LIMITS_CHANGED, THROTTLED
from results.clock_limits import limits_changed
from results.core_lists import core_words, parse_cores
from results.environments import Conditions

SUSPENDED_S = 0.1
"""Less is the distance of two readings of two clocks."""
LEVEL_FALL_PERCENT_PER_S = 5 / 60
"""More than a battery gives: a phone at 25 W takes 3 % of 15 Wh in a minute."""
LEVEL_STEP_PERCENT = 2.0
"""Levels are told in whole per cent; two steps may come at once."""
JOIN_S = 1.0
"""How long the end of a window waits for a reading of the state that is under way."""

log = logging.getLogger(__name__)


@contextmanager
def watched(device: Device, may_be_lost: bool = False) -> Iterator[list[Conditions]]:
    """The list grows while the body runs, and is whole after it: before, during, after, in order of time.

    Raises `DeviceError` of the first and the last reading; where the body fails, its error alone. may_be_lost: the last
    reading may fail, and is left out then.
    """
    seen = [device.conditions()]
    ended = threading.Event()
    during: list[Conditions] = []
    thread = threading.Thread(target=_watch, args=(device, ended, during), name="state-watch", daemon=True)
    is_watched = isinstance(device, WatchesState) and device.watch_every_s is not None
    if is_watched:
        thread.start()
    try:
        yield seen
    finally:
        ended.set()
        if is_watched:
            # One that hangs ends with its own limit, and what it says then belongs to no window.
            thread.join(JOIN_S)
        seen += [*during, *_states(device.meters)]
    try:
        seen.append(device.conditions())
    except DeviceError as error:
        if not may_be_lost:
            raise
        log.info("%s: its state behind the window cannot be read: %s", device.name, error)
    seen.sort(key=lambda c: c.at_s)


def _watch(device: Device, ended: threading.Event, during: list[Conditions]) -> None:
    assert isinstance(device, WatchesState)
    while not ended.wait(device.watch_every_s):
        try:
            state = device.watched_state()
        except DeviceError as error:
            log.info("%s: its state cannot be read now: %s", device.name, error)
            continue
        if not ended.is_set():
            during.append(state)


def _states(meters: Sequence[Meter]) -> list[Conditions]:
    return [state for meter in meters if isinstance(meter, SeesState) for state in meter.states()]


def changes(seen: Sequence[Conditions]) -> tuple[Conditions, ...]:
    """The first, the last, and between them those whose state is not that of the one before: the rest says nothing."""
    kept = [state for before, state in pairwise(seen[:-1]) if _watched_part(state) != _watched_part(before)]
    return (*seen[:1], *kept, *(seen[-1:] if len(seen) > 1 else ()))


def _watched_part(state: Conditions) -> tuple[object, ...]:
    return (
        state.charging,
        state.boot_id,
        state.throttled,
        state.thermal_status,
        state.frequency_caps,
        state.cores_online,
        state.screen_on,
        state.screen_brightness,
        state.airplane_mode,
        state.battery_percent,
        state.cpu_policy,
        state.gpu_limits,
        state.gpu_others,
    )


def state_marks(seen: Sequence[Conditions], reads_battery: bool) -> tuple[str, ...]:
    """What taints a window, from the states around and in it, in order of time.

    reads_battery: whether its joules come from the battery's gauge. A charger hides the load from it and from no other
    meter, an app's energy gauge neither; but with a power source a machine may change its limits.
    """
    marks = []
    if any(c.throttled for c in seen):
        marks.append(THROTTLED)
    charging = [c.charging for c in seen]
    known = {c for c in charging if c is not None}
    if reads_battery and True in known:
        marks.append("charging")
    elif len(known) > 1:
        marks.append("power source changed")
    elif reads_battery and None in charging:
        # Between the rounds of a series nothing asks again: a phone that fell silent may be silent all through one.
        marks.append("power source unknown")
    if len({c.boot_id for c in seen} - {None}) > 1:
        marks.append("restarted")
    suspended_s = [c.suspended_s for c in seen if c.suspended_s is not None]
    if suspended_s and max(suspended_s) - min(suspended_s) > SUSPENDED_S:
        marks.append("suspended")
    if any(len({getattr(c, name) for c in seen} - {None}) > 1 for name in ("screen_on", "screen_brightness")):
        marks.append("screen changed")
    if len({c.airplane_mode for c in seen} - {None}) > 1:
        marks.append("radio changed")
    if limits_changed(seen):
        # Idle power and load are of two machines then, and so are times.
        marks.append(CLOCK_LIMITS_CHANGED)
    if reads_battery and "charging" not in marks:
        marks += _level_marks(seen)
    return tuple(marks)


def switched_cores(seen: Sequence[Conditions]) -> tuple[str, ...]:
    """Of a phone some of whose cores were off line at times. No mark: some switch cores off while they have no work."""
    online = [parse_cores(c.cores_online) for c in seen if c.cores_online is not None]
    at_times = frozenset[int]().union(*online) - frozenset.intersection(*online) if online else ()
    return (f"cores {core_words(at_times)} were off line at times, in the window or idle",) if at_times else ()


def _level_marks(seen: Sequence[Conditions]) -> Iterator[str]:
    """A battery that only gives falls slowly. Rising: something charged it and did not say so."""
    told = [(c.at_s, c.battery_percent) for c in seen if c.battery_percent is not None]
    steps = [(later_s - at_s, after - before) for (at_s, before), (later_s, after) in pairwise(told)]
    if any(change > 0 for _, change in steps):
        yield "battery level rose"
    if any(-change > LEVEL_STEP_PERCENT + LEVEL_FALL_PERCENT_PER_S * max(0.0, s) for s, change in steps):
        yield "battery level jumped"
