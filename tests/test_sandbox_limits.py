"""Time, memory, files and threads of a program, and how many programs run at once: what is over a limit ends."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest

from tests.sandboxed import failure
from workloads import sandbox
from workloads.sandbox import (
    MIB,
    Limits,
    Outcome,
    run_programs,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the walls are Landlock and seccomp of Linux")


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
for fd in range(3, 1024):
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


HELD = {
    "by descriptors": """
kept = []
for i in range(20):
    kept.append(open("x", "wb")); kept[-1].write(b"x" * 2**22); kept[-1].flush(); os.unlink("x")
""",
    "without a name from the start": """
for i in range(20):
    os.write(os.open(".", os.O_TMPFILE | os.O_WRONLY), b"x" * 2**22)
""",
    "by a page of each that is mapped": """
kept = []
for i in range(64):
    with open("x", "w+b") as file:
        file.write(b"x" * 2**22); file.flush()
        kept.append(mmap.mmap(file.fileno(), 4096))
    os.unlink("x")
    time.sleep(0.02)
""",
    "by descriptors of a thread of its own": """
import threading
def hold():
    libc = ctypes.CDLL(None)
    for i in range(20):
        os.write(os.open("x", os.O_CREAT | os.O_RDWR), b"x" * 2**22); os.unlink("x")
    time.sleep(20)
threading.Thread(target=hold).start()
""",
}


@pytest.mark.parametrize("way", HELD)
def test_deleted_files_that_are_still_held_count(way: str) -> None:
    """A gigabyte could be held by files that no folder shows."""
    program = f"import ctypes, mmap, os, time\n{HELD[way]}\ntime.sleep(20)"
    outcome = failure(program, Limits(cpu_s=10, wall_s=60.0))
    assert outcome.reason == "wrote more than 32 MiB of files"


def test_files_that_are_gone_do_not_count() -> None:
    program = """
import mmap, os, tempfile, time
for i in range(100):
    with tempfile.TemporaryFile() as file:
        file.write(b"x" * 2**20); file.flush()
        mmap.mmap(file.fileno(), 2**20).close()
    time.sleep(0.002)
with tempfile.TemporaryFile() as kept, tempfile.NamedTemporaryFile() as named:
    kept.write(b"x" * 2**22); named.write(b"x" * 2**22); time.sleep(0.2)
shared = mmap.mmap(-1, 2**26); shared[:] = b"x" * 2**26; time.sleep(0.2)
"""
    outcome = run_programs([program], Limits(cpu_s=10, wall_s=60.0))[0]
    assert outcome.passed, outcome


def test_a_program_cannot_hide_what_it_holds() -> None:
    program = "import ctypes\nassert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0"
    assert failure(program).reason.startswith("AssertionError")


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
