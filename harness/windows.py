"""A window: the device's meters run in it, and what taints their readings. Idle windows too.

A trial, a recording and the doctor take theirs by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from devices.base import CarriesMarks, Clock, Device, DeviceError, KeepsRaw, Meter, sees_all_cpus
from devices.state_watch import state_marks, watched
from harness.schema import TrialProtocol
from results.cpu_time import CpuSeconds, foreign_share
from results.environments import Conditions
from results.records import PowerTrace

CPU_TICK_S = 0.01
"""Linux counts the CPU time of a machine in ticks (USER_HZ)."""


@contextmanager
def running_meters(meters: Sequence[Meter], interrupted: list[str] | None = None) -> Iterator[list[PowerTrace]]:
    """Meters run inside; the list holds their traces afterwards. None is left running, whatever fails.

    interrupted: where given, a window that broke or whose meter was lost is no error: what was received is kept, and
    the reason is put there.
    """
    traces: list[PowerTrace] = []
    # A meter that failed to start is stopped too: it may have acquired something before it failed.
    to_stop: list[Meter] = []
    try:
        for meter in meters:
            to_stop.append(meter)
            meter.start()
        yield traces
        while to_stop:
            try:
                traces.extend(to_stop.pop(0).stop())
            except DeviceError as error:
                if interrupted is None:
                    raise
                interrupted.append(str(error))
                traces.extend(error.traces)
    finally:
        for meter in to_stop:
            # Another error is on its way up, and is the one to tell.
            with suppress(DeviceError):
                meter.stop()


def raw_traces(meters: Sequence[Meter]) -> list[PowerTrace]:
    """What meters read in the window that ended last, before it became power; of those that keep it."""
    return [trace for meter in meters if isinstance(meter, KeepsRaw) for trace in meter.raw_traces()]


class Idle(NamedTuple):
    """is_busy: whether others took too much of the CPU for its power to be that of this machine at rest."""

    traces: list[PowerTrace]
    raw: list[PowerTrace]
    states: list[Conditions]
    is_busy: bool = False


def idle(device: Device, clock: Clock, protocol: TrialProtocol) -> Idle:
    """The machine doing nothing for us. What disturbs it makes net energy wrong."""
    if protocol.idle_s <= 0:
        return Idle([], [], [])
    # Only such a meter has the joules of others in it, and on a phone each reading of CPU time is a call.
    reads_cpu = any(map(sees_all_cpus, device.meters))
    cpu_before = device.cpu_seconds() if reads_cpu else None
    with watched(device) as states, running_meters(device.meters) as traces:
        clock.sleep_until_s(clock.now_s() + protocol.idle_s)
    cpu_after = device.cpu_seconds() if reads_cpu else None
    is_busy = is_contended(cpu_before, cpu_after, protocol.max_foreign_cpu_share)
    return Idle(traces, raw_traces(device.meters), states, is_busy)


def is_contended(before: CpuSeconds | None, after: CpuSeconds | None, max_foreign_cpu_share: float) -> bool:
    share = foreign_share(before, after)
    if share is None or before is None or after is None:
        return False
    # The share lies between two counts, each of them up to a tick off: less than that above the limit says nothing.
    return share > max_foreign_cpu_share + 2 * CPU_TICK_S / (after.available_s - before.available_s)


def window_marks(conditions: Sequence[Conditions], meters: Sequence[Meter]) -> list[str]:
    """What taints the readings of these meters, from the states around and in their last window."""
    own = state_marks(conditions, any(m.method == "battery gauge" for m in meters))
    carried = [mark for meter in meters if isinstance(meter, CarriesMarks) for mark in meter.marks()]
    return list(dict.fromkeys([*own, *carried]))
