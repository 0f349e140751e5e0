"""Linux' performance counters by the system call itself (perf_event_open(2)): no perf binary, no library.

A counter is a file descriptor: reading it gives the count and, where asked for, how long it was wanted and how long it
was on the hardware (counters take turns where there are more of them than the hardware has).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from pathlib import Path
from typing import NamedTuple

from devices.base import MeterUnavailableError
from devices.sysfs import read_word

TYPE_HARDWARE = 0
HW_CPU_CYCLES = 0
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")

_SYSCALL_NUMBERS = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
_FORMAT_TIMES = 0b11  # PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_CLOSE_ON_EXEC = 8
_ATTRIBUTES = struct.Struct("=II QQQQQ IIQ")
"""perf_event_attr of its first version (64 bytes): type, size, config, sample period, sample type, read format, flags,
wakeup events, breakpoint type, config1."""


class Event(NamedTuple):
    """What is counted: a PMU's number (/sys/bus/event_source/devices/*/type) and its event."""

    pmu: int
    config: int


class Count(NamedTuple):
    """A counter's value, and for how long it was wanted and on the hardware."""

    value: int
    wanted_ns: int
    running_ns: int


def open_counter(event: Event, task: int = -1, cpu: int = -1, user_mode_only: bool = False) -> int:
    """A descriptor that counts one task on all CPUs (and what it starts from now on), or all tasks of one CPU.

    Raises `OSError` as the kernel does, `MeterUnavailableError` where there is no such system call.
    """
    number = _SYSCALL_NUMBERS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        raise MeterUnavailableError(f"perf events: {sys.platform} on {platform.machine()} has none that is known here")
    flags = _INHERIT if task >= 0 else 0
    if user_mode_only:
        flags |= _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
    attributes = _ATTRIBUTES.pack(event.pmu, _ATTRIBUTES.size, event.config, 0, 0, _FORMAT_TIMES, flags, 0, 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    descriptor = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_char_p(attributes),
        ctypes.c_int(task),
        ctypes.c_int(cpu),
        ctypes.c_int(-1),
        ctypes.c_ulong(_CLOSE_ON_EXEC),
    )
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(descriptor)


def read_counter(descriptor: int) -> Count:
    """Raises `OSError`."""
    content = os.read(descriptor, 24)
    if len(content) < 24:
        # The kernel's way to say that the event is in an error state and counts no more.
        raise OSError(errno.EIO, "the counter has stopped")
    return Count(*struct.unpack("=QQQ", content))


def why_refused(error: OSError) -> str:
    """What an error of `open_counter` means to a user, with the remedy."""
    if error.errno in (errno.EACCES, errno.EPERM):
        level = read_word(PARANOID) or "unknown"
        return (
            f"the kernel allows it to root only (perf_event_paranoid is {level});"
            " run as root, or: sudo sysctl kernel.perf_event_paranoid=0 (a container also needs CAP_PERFMON)"
        )
    if error.errno in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV):
        return "this machine shows no such hardware counter (virtual machines usually do not)"
    if error.errno == errno.ENOSYS:
        return "this kernel or container has no perf_event_open"
    return f"perf_event_open failed ({error.strerror})"
