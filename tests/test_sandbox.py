"""Programs that mean harm: what each of them wanted did not happen, and none of them counts as passed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.eventually import eventually
from tests.sandboxed import SHORT, failure
from workloads import sandbox
from workloads.sandbox import (
    Limits,
    SandboxError,
    check_walls,
    run_program,
    run_programs,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Landlock and seccomp of Linux")


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
    sleeper = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{mark}', 0, 0, 0); time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", f"from workloads.sandbox import *; run_program({sleeper!r}, Limits(wall_s=600.0))"],
        cwd=Path(sandbox.__file__).parents[1],
    )

    def running() -> bool:
        return mark in {p.read_text().strip() for p in _readable(Path("/proc").glob("[0-9]*/comm"))}

    try:
        assert eventually(running)
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: not running())


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


def test_names_outside_can_be_asked_about_but_not_watched(tmp_path: Path) -> None:
    """What docs/decisions/0010-sandbox.md says that the walls leave."""
    (tmp_path / "seen").write_text("12345")
    assert run_program(f"import os; assert os.stat({str(tmp_path / 'seen')!r}).st_size == 5").passed
    watch = "import ctypes\nassert ctypes.CDLL(None).inotify_init1(0) >= 0"
    assert failure(watch).reason.startswith("AssertionError")


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
