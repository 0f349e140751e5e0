"""Programs that mean harm: what each of them wanted did not happen, and none of them counts as passed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from workloads import sandbox
from workloads.sandbox import (
    MIB,
    Limits,
    Outcome,
    SandboxError,
    available_bytes,
    check_walls,
    run_program,
    run_programs,
)
from workloads.sandbox_filter import CALL_TABLES, COMMON_REFUSED, filter_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Landlock and seccomp of Linux")

SHORT = Limits(cpu_s=2, wall_s=20.0)
"""A busy machine gives a process a fraction of its time: the CPU limit is what ends a loop."""


def failure(program: str, limits: Limits = SHORT) -> Outcome:
    outcome = run_program(program, limits)
    assert not outcome.passed, outcome
    return outcome


# --- honest programs --------------------------------------------------------------------------------------------------


def test_the_walls_stand_here() -> None:
    check_walls()


def test_a_program_that_reaches_its_end_passes() -> None:
    assert run_program("def f(x):\n    return x + 1\nassert f(1) == 2").passed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2, 'one is not two'", "AssertionError: one is not two"),
        ("f(", "SyntaxError"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("x = '\\x00'; raise ValueError('ä' * 10_000)", "ValueError: ää"),
        ("input()", "EOFError"),
        ("import sys; assert sys.stdin.read() == 'something'", "AssertionError"),
    ],
)
def test_what_a_program_raises_is_told(program: str, reason: str) -> None:
    outcome = failure(program)
    assert (outcome.end, outcome.reason[: len(reason)]) == ("raised", reason)


def test_what_honest_programs_need_is_there() -> None:
    program = """
import collections, datetime, decimal, functools, hashlib, heapq, itertools, json, math, random, re, string, sys
import tempfile, threading, typing, zoneinfo
import numpy as np
assert np.allclose(np.linalg.inv([[2.0, 0.0], [0.0, 4.0]]), [[0.5, 0.0], [0.0, 0.25]])
found = []
thread = threading.Thread(target=lambda: found.append(1))
thread.start(); thread.join()
with tempfile.NamedTemporaryFile("w+") as kept:
    kept.write("text"); kept.seek(0); assert kept.read() == "text"
assert found == [1] and random.random() < 1 and zoneinfo.ZoneInfo("UTC") and hashlib.sha256(b"x").hexdigest()
print("to nobody", file=sys.stderr)
"""
    outcome = run_program(program)
    assert outcome.passed, outcome


def test_sets_have_the_same_order_in_every_run() -> None:
    ask = "raise ValueError(list({'alpha', 'beta', 'gamma', 'delta', 'epsilon'}))"
    assert len({failure(ask).reason for _ in range(3)}) == 1


def test_verdicts_come_in_the_order_of_the_programs() -> None:
    outcomes = run_programs(["assert False", "pass", "import time; time.sleep(0.3)", "assert False"])
    assert [o.passed for o in outcomes] == [False, True, True, False]


@pytest.mark.parametrize(("free_mib", "together"), [(2 * 4096 + 100, 2), (100, 1), (100 * 4096, 6)])
def test_no_more_programs_run_at_once_than_memory_holds(
    free_mib: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six programs of up to 4 GiB each, on sixteen CPUs."""
    lock, running, most = threading.Lock(), 0, 0

    def program(_source: str, _limits: Limits) -> Outcome:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.1)
        with lock:
            running -= 1
        return Outcome("passed", "", 0.1)

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))
    monkeypatch.setattr(sandbox, "available_bytes", lambda: free_mib * MIB)
    monkeypatch.setattr(sandbox, "run_program", program)
    run_programs(["pass"] * 6, Limits(memory_bytes=4096 * MIB))
    assert most == together


def test_memory_is_what_the_narrowest_control_group_leaves(tmp_path: Path) -> None:
    """A job of 3 MiB has taken 2 MiB, of which half is cached files; the slice above it has no limit."""
    membership = tmp_path / "cgroup"
    membership.write_text("0::/slice/job\n")
    for group, limit in (("slice", "max"), ("slice/job", str(3 * MIB))):
        folder = tmp_path / "fs" / group
        folder.mkdir(parents=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{2 * MIB}\n")
        (folder / "memory.stat").write_text(f"anon {MIB}\ninactive_file {MIB}\n")
    assert available_bytes(tmp_path / "fs", membership) == 2 * MIB
    assert available_bytes(tmp_path / "fs", tmp_path / "none") > 2 * MIB


def test_the_programs_see_nothing_of_our_environment_and_own_an_empty_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_TESTS", "xyzzy")
    program = """
import os
assert "xyzzy" not in str(os.environ), os.environ
assert os.path.samefile(os.environ["HOME"], ".") and os.listdir() == [] and os.path.expanduser("~") == os.getcwd()
"""
    assert run_program(program).passed


# --- ends that are not passes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "early",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "raise KeyboardInterrupt",
        "import os; os.closerange(0, 1000); os._exit(0)",
        "import ctypes; ctypes.CDLL(None).exit(0)",
        "import ctypes; ctypes.string_at(0)",
        "import os; os.abort()",
        "import threading, os; threading.Thread(target=os._exit, args=(0,)).start(); import time; time.sleep(9)",
    ],
)
def test_leaving_before_the_tests_is_no_pass(early: str) -> None:
    failure(f"{early}\nassert False")


@pytest.mark.parametrize(
    "dodge",
    [
        "import builtins; builtins.AssertionError = Warning",
        "AssertionError = None",
        "class AssertionError(Exception): pass",
        "import sys; sys.excepthook = lambda *a: None",
        "import builtins; builtins.BaseException = (); builtins.type = str",
        "import builtins; builtins.compile = builtins.exec = lambda *a: None",
        "import os; os._exit = lambda n: None; os.write = lambda *a: None",
        "import atexit; atexit.register(lambda: print('passed'))",
        "import os\nfor fd in range(3, 32):\n    try: os.write(fd, b'passed')\n    except OSError: pass",
        "def check(candidate): pass\nf = object",
    ],
)
def test_redefining_what_tests_stand_on_is_no_pass(dodge: str) -> None:
    failure(f"{dodge}\ndef check(candidate):\n    assert candidate() == 1\ncheck(lambda: 2)")


# --- limits -----------------------------------------------------------------------------------------------------------


def test_an_endless_loop_ends_at_the_cpu_limit() -> None:
    outcome = failure("while True: pass", Limits(cpu_s=1, wall_s=30.0))
    assert (outcome.end, "1 s of CPU time" in outcome.reason) == ("met a limit", True)


def test_a_loop_that_catches_everything_ends_too() -> None:
    program = """
import signal
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    assert failure(program, Limits(cpu_s=1, wall_s=30.0)).end == "met a limit"


def test_a_sleeper_ends_at_the_wall_limit() -> None:
    outcome = failure("import time; time.sleep(60)", Limits(wall_s=0.5))
    assert (outcome.end, outcome.reason) == ("met a limit", "ran longer than 0.5 s")
    assert outcome.wall_s < 10


@pytest.mark.parametrize("hog", ["x = bytearray(2**31)", "x = []\nwhile True: x.append(bytearray(2**24))"])
def test_a_memory_hog_gets_an_error_not_the_machine(hog: str) -> None:
    assert failure(hog, Limits(cpu_s=4, wall_s=30.0, memory_bytes=512 * MIB)).reason.startswith("MemoryError")


def test_memory_beside_the_address_space_is_refused() -> None:
    program = "import os; os.memfd_create('x')"
    assert failure(program).reason.startswith("PermissionError")


def test_output_without_end_reaches_nobody() -> None:
    assert failure("while True: print('x' * 100_000)", Limits(cpu_s=1, wall_s=30.0)).end == "met a limit"


def test_a_pipe_filled_by_the_program_is_not_read_without_end() -> None:
    program = """
import os
for fd in range(3, 32):
    try:
        while True: os.write(fd, b"x" * 65536)
    except OSError: pass
"""
    outcome = failure(program, Limits(cpu_s=4, wall_s=30.0))
    assert outcome.reason == "wrote into the pipe of its verdict"


def test_a_huge_file_is_refused() -> None:
    assert failure("open('huge', 'wb').write(b'x' * 2**26)").reason.startswith("OSError: [Errno 27] File too large")


def test_many_large_files_end_the_program() -> None:
    program = "import itertools\nfor i in itertools.count(): open(str(i), 'wb').write(b'x' * 2**21)"
    assert "MiB of files" in failure(program, Limits(cpu_s=10, wall_s=60.0)).reason


def test_many_small_files_end_the_program() -> None:
    program = "import itertools\nfor i in itertools.count(): open(str(i), 'w')"
    assert "256 files" in failure(program, Limits(cpu_s=10, wall_s=60.0)).reason


def test_folders_cannot_be_made_so_none_can_be_too_deep_to_remove() -> None:
    assert failure("import os; os.mkdir('deep')").reason.startswith("PermissionError")


def test_too_many_open_files_are_refused() -> None:
    assert "Too many open files" in failure("kept = [open('x', 'w') for _ in range(100)]").reason


def test_too_many_threads_end_the_program() -> None:
    program = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,)).start()"
    outcome = failure(program, Limits(cpu_s=10, wall_s=60.0))
    assert "64 threads" in outcome.reason or "can't start new thread" in outcome.reason


def test_a_limit_cannot_be_raised() -> None:
    program = "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1000, 1000))"
    assert failure(program).end == "raised"


# --- walls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start",
    [
        "import os\nwhile True: os.fork()",
        "import os; os.forkpty()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import os; assert os.system('true') == 0",
        "import multiprocessing as m; p = m.Process(target=print); p.start()",
    ],
)
def test_no_process_is_started(start: str) -> None:
    assert failure(start).end == "raised"


def test_nothing_outlives_its_program() -> None:
    name = f"outlives-{os.getpid()}"
    program = f"""
import os, time, threading
threading.Thread(target=time.sleep, args=(300,)).start()
import ctypes
ctypes.CDLL(None).prctl(15, b"{name[:15]}", 0, 0, 0)
try:
    os.fork()
except OSError:
    pass
try:
    os.setsid()
except OSError:
    pass
"""
    assert run_program(program, SHORT).passed
    assert failure(program + "time.sleep(300)", Limits(wall_s=0.5)).end == "met a limit"
    names = [path.read_text().strip() for path in _readable(Path("/proc").glob("[0-9]*/task/*/comm"))]
    assert name[:15] not in names


def _readable(paths: Iterator[Path]) -> Iterator[Path]:
    for path in paths:
        with contextlib.suppress(OSError):
            path.read_text()
            yield path


def test_the_program_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    mark = f"orphan{os.getpid()}"[:15]
    sleeper = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0); time.sleep(60)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"from workloads.sandbox import *; run_program({sleeper!r}, Limits(wall_s=60.0))"],
        cwd=Path(sandbox.__file__).parents[1],
    )

    def running() -> bool:
        return mark in {p.read_text().strip() for p in _readable(Path("/proc").glob("[0-9]*/comm"))}

    try:
        assert _within(30.0, running)
    finally:
        parent.kill()
        parent.wait()
    assert _within(10.0, lambda: not running())


def _within(seconds: float, condition: object) -> bool:
    assert callable(condition)
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize(
    "aim",
    [
        "import os, signal; os.kill({pid}, signal.SIGUSR1)",
        "import os, signal; os.killpg({group}, signal.SIGUSR1)",
        "import os, signal; os.kill(-1, signal.SIGUSR1)",
        "import os, signal; signal.pidfd_send_signal(os.pidfd_open({pid}), signal.SIGUSR1)",
        # A file's owner is told by signal when there is something to read.
        "import fcntl, os, signal\nr, w = os.pipe()\nfcntl.fcntl(r, 8, {pid})\nfcntl.fcntl(r, 10, signal.SIGUSR1)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, fcntl.fcntl(r, fcntl.F_GETFL) | os.O_ASYNC)\nos.write(w, b'x')",
        "import resource; resource.prlimit({pid}, resource.RLIMIT_NOFILE, (3, 3))",
        "import os; os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        "import os; os.sched_setaffinity({pid}, [0])",
    ],
)
def test_the_parent_is_out_of_reach(aim: str) -> None:
    arrived: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _frame: arrived.append(number))
    state = (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0))
    try:
        outcome = failure(aim.format(pid=os.getpid(), group=os.getpgrp()))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert outcome.reason.startswith("PermissionError"), outcome
    assert arrived == []
    assert (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0)) == state


@pytest.mark.parametrize(
    "act",
    [
        "open({path!r}, 'a').write('x')",
        "open({path!r}, 'w')",
        "open({path!r} + '.new', 'w')",
        "os.remove({path!r})",
        "os.rename({path!r}, 'mine')",
        "os.link({path!r}, 'mine'); open('mine', 'a').write('x')",
        "os.symlink({path!r}, 'mine'); open('mine', 'a').write('x')",
        "os.chmod({path!r}, 0)",
        "os.utime({path!r}, (0, 0))",
        "os.truncate({path!r}, 0)",
        "os.setxattr({path!r}, 'user.x', b'x')",
        "os.chown({path!r}, 1, 1)",
        "os.mkdir({path!r} + '.folder')",
        "os.chdir('..'); open('beside', 'w')",
        "open('/dev/shm/joulebench-escape', 'w')",
        "open({path!r}).read()",
        "os.listdir(os.path.dirname({path!r}))",
        "open('/etc/passwd').read()",
        "open('/proc/{pid}/environ').read()",
        "open('/proc/{pid}/mem', 'r+b')",
    ],
)
def test_files_outside_are_out_of_reach(act: str, tmp_path: Path) -> None:
    path = tmp_path / "outside"
    path.write_text("kept")
    before = path.stat()
    outcome = failure("import os\n" + act.format(path=str(path), pid=os.getpid()))
    assert outcome.end == "raised"
    assert outcome.reason.startswith(("PermissionError", "OSError: [Errno 18]")), outcome
    assert [p.name for p in tmp_path.iterdir()] == ["outside"]
    after = path.stat()
    assert (path.read_text(), after.st_mode, after.st_mtime_ns, after.st_uid) == (
        "kept",
        before.st_mode,
        before.st_mtime_ns,
        before.st_uid,
    )


def test_there_is_no_network() -> None:
    program = """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        try:
            socket.socket(family, kind)
        except PermissionError:
            continue
        raise ValueError(f"{family} {kind}")
"""
    assert run_program(program).passed


def test_a_server_of_this_machine_hears_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        failure(f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/')")
        with pytest.raises(TimeoutError):
            server.accept()


def test_folders_of_programs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_program("open('mine', 'w').write('x')").passed
    failure("open('mine', 'w').write('x'); assert False")
    assert list(tmp_path.iterdir()) == []


def test_capabilities_are_gone() -> None:
    """Each is a bit of the effective set, as capget(2) tells it."""
    program = """
import ctypes, struct
header, sets = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0)), ctypes.create_string_buffer(24)
assert ctypes.CDLL(None).capget(header, sets) == 0
assert struct.unpack("6I", sets.raw[:24])[:2] == (0, 0)
"""
    assert run_program(program).passed


# --- the filter -------------------------------------------------------------------------------------------------------

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
    assert (action(table.prctl, 15), action(table.prctl, 1)) == (ALLOW, EPERM)
    assert (action(table.prlimit64, 0), action(table.prlimit64, 1)) == (ALLOW, EPERM)
    assert decide(program, 0x40000003, 1) == KILL  # a 32-bit call
    allowed = [n for n in range(462) if action(n) == ALLOW]
    assert len(allowed) > 300


# --- where it cannot stand --------------------------------------------------------------------------------------------


def test_other_systems_are_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=r"on darwin .*run such workloads on a Linux machine"):
        check_walls.__wrapped__()


def test_a_wall_with_a_hole_is_found_by_trying_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a kernel whose seccomp lets everything through: a filter that is one `return ALLOW`."""
    monkeypatch.setattr(sandbox, "_call_filter", lambda: struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000))
    with pytest.raises(SandboxError, match=r"it could change a file's mode outside, .*start a process"):
        check_walls.__wrapped__()


def test_without_a_wall_the_program_does_not_begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on a kernel without Landlock: its filter is refused by the kernel before a line is run."""
    monkeypatch.setattr(sandbox, "_call_filter", lambda: struct.pack("<HBBI", 0xFF, 0, 0, 0))
    assert "prctl(22)" in failure("raise ValueError('it ran')").reason
