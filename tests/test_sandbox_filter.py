"""The filter of system calls: its numbers are the kernel's, and a model of the kernel's interpreter decides by it."""

from __future__ import annotations

import re
import signal
import struct
import sys
from pathlib import Path

import pytest

from workloads.sandbox_filter import CALL_TABLES, COMMON_REFUSED, filter_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Landlock and seccomp of Linux")


HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("machine", HEADERS)
def test_numbers_of_calls_are_the_kernels(machine: str) -> None:
    header = HEADERS[machine]
    if not header.is_file():
        pytest.skip(f"no {header}")
    defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    kernels = {name: int(number) for name, number in reversed(defined)}
    table = CALL_TABLES[machine]
    ours = {name: n for calls in (*table.refused.values(), *COMMON_REFUSED.values()) for name, n in calls.items()}
    ours |= {name: getattr(table, name) for name in ("clone", "clone3", "fcntl", "ioctl", "prctl", "prlimit64")}
    known = {name: number for name, number in ours.items() if name in kernels}
    assert len(known) > 50
    assert known == {name: kernels[name] for name in known}
    # What an older header does not have is newer than all that it has.
    assert all(number > max(kernels.values()) for name, number in ours.items() if name not in kernels)


def decide(program: bytes, machine: int, number: int, *arguments: int) -> int:
    """Runs a filter as the kernel would: seccomp(2), linux/filter.h. Returns the action."""
    seen = struct.pack("<iIQ6Q", number, machine, 0, *arguments, *[0] * (6 - len(arguments)))
    instructions = list(struct.iter_unpack("<HBBI", program))
    at, loaded = 0, 0
    while True:
        code, if_true, if_false, operand = instructions[at]
        at += 1
        match code:
            case 0x20:
                (loaded,) = struct.unpack_from("<I", seen, operand)
            case 0x15:
                at += if_true if loaded == operand else if_false
            case 0x25:
                at += if_true if loaded > operand else if_false
            case 0x45:
                at += if_true if loaded & operand else if_false
            case 0x06:
                return int(operand)
            case _:
                raise AssertionError(f"code {code:#x}")


ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000


@pytest.mark.parametrize("machine", CALL_TABLES)
def test_the_filter_decides_by_number_and_argument(machine: str) -> None:
    table = CALL_TABLES[machine]
    program = filter_program(table)

    def action(number: int, *arguments: int) -> int:
        return decide(program, table.audit_machine, number, *arguments)

    assert {action(n) for calls in table.refused.values() for n in calls.values()} == {EPERM}
    assert {action(n) for calls in COMMON_REFUSED.values() for n in calls.values()} == {EPERM}
    assert action(table.clone, 0x3D0F00) == ALLOW  # what the C library gives a new thread
    assert action(table.clone, signal.SIGCHLD) == EPERM
    assert (action(table.clone3), action(10_000), action(0x40000000)) == (ENOSYS,) * 3
    assert (action(table.ioctl, 3, 0x5401), action(table.ioctl, 3, 0x40086602)) == (ALLOW, EPERM)
    assert (action(table.fcntl, 3, 1), action(table.fcntl, 3, 8)) == (ALLOW, EPERM)
    assert (action(table.prctl, 15), action(table.prctl, 1), action(table.prctl, 4)) == (ALLOW, EPERM, EPERM)
    assert (action(table.prlimit64, 0), action(table.prlimit64, 1)) == (ALLOW, EPERM)
    assert decide(program, 0x40000003, 1) == KILL  # a 32-bit call
    allowed = [n for n in range(462) if action(n) == ALLOW]
    assert len(allowed) > 300
