"""Runs a program that nobody has read, and says whether it reached its end.

One process per program, without rights: no further process, no socket, no signal to others, no file outside a fresh
folder but what Python itself reads. Limits on CPU time, wall time, memory, files and threads. Linux only: Landlock and
seccomp need neither root nor namespaces, and neither can be taken back. `check_walls` tries them before anything else
is run; where one does not stand, nothing runs. What the walls leave open: docs/decisions/0010-sandbox.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import platform
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Literal

from devices.memory import available_bytes
from results.scratch import ScratchFolder
from results.units import MIB
from workloads.sandbox_files import FileKey, deleted_files, visible_files
from workloads.sandbox_filter import CALL_TABLES, filter_program

WATCH_INTERVAL_S = 0.05
"""How often the parent looks at what no kernel limit counts: all files together, and threads of root's processes."""
MESSAGE_LIMIT_BYTES = 4096
START = "import sys; sys.path.insert(0, {root!r}); from workloads.sandbox_child import run_job; run_job({verdict_fd})"
SYSTEM_READABLE = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/dev/urandom",
)


class SandboxError(Exception):
    """This machine cannot wall a program in: which wall, why, the remedy."""


@dataclass(frozen=True)
class Limits:
    """Of one program. The defaults are for a few assertions about small inputs."""

    cpu_s: int = 4
    """Of all its threads, the start of Python included. lm-eval's metric gives 3 s of wall time, which is less of a
    busy machine than of an idle one."""
    wall_s: float = 30.0
    memory_bytes: int = 1024 * MIB
    """Of address space."""
    file_bytes: int = 4 * MIB
    open_files: int = 32
    folder_bytes: int = 32 * MIB
    folder_files: int = 256
    threads: int = 64

    def by_kernel(self) -> dict[str, int]:
        """Those that the kernel watches, by their names in `resource`."""
        return {
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
            "RLIMIT_MEMLOCK": 0,
        }


DEFAULT_LIMITS = Limits()


@dataclass(frozen=True)
class Outcome:
    """How a program ended. passed: its last statement was executed, and nothing was raised."""

    end: Literal["passed", "raised", "met a limit", "died"]
    reason: str
    """The exception, the limit, or how the process ended."""
    wall_s: float

    @property
    def passed(self) -> bool:
        return self.end == "passed"


def run_programs(programs: Sequence[str], limits: Limits = DEFAULT_LIMITS) -> list[Outcome]:
    """Each in a sandbox of its own, as many at once as there are CPUs for us, and memory for what each may take."""
    at_once = min(len(os.sched_getaffinity(0)), available_bytes() // limits.memory_bytes)
    with ThreadPoolExecutor(max_workers=max(at_once, 1)) as pool:
        return list(pool.map(lambda program: run_program(program, limits), programs))


def run_program(program: str, limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Runs Python source. It finds the standard library and what is installed beside numpy."""
    token = secrets.token_hex(16)
    with ScratchFolder("program") as own, tempfile.TemporaryFile() as job_file:
        folder = str(own)
        job_file.write(_job(program, token, folder, limits))
        job_file.seek(0)
        verdict_fd, written_fd = os.pipe()
        started_s = time.monotonic()
        with open(verdict_fd, "rb", buffering=0) as verdict:
            start = START.format(root=str(_root()), verdict_fd=written_fd)
            try:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-s", "-S", "-B", "-c", start],
                    stdin=job_file,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(written_fd,),
                    cwd=folder,
                    env=_environment(folder),
                    start_new_session=True,
                )
            finally:
                os.close(written_fd)
            job = os.fstat(job_file.fileno())
            message, broken = _watch(process, verdict.fileno(), own, (job.st_dev, job.st_ino), limits)
        wall_s = time.monotonic() - started_s
    if broken:
        return Outcome("met a limit", broken, wall_s)
    if message == token and process.returncode == 0:
        return Outcome("passed", "its last statement was executed", wall_s)
    if message:
        return Outcome("raised", message, wall_s)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome("met a limit", f"used more than {limits.cpu_s} s of CPU time, or the system's memory", wall_s)
    how = signal.Signals(-process.returncode).name if process.returncode < 0 else f"status {process.returncode}"
    return Outcome("died", f"ended with {how} before its last statement", wall_s)


def _job(program: str, token: str, folder: str, limits: Limits) -> bytes:
    """What `workloads.sandbox_child` reads; in the interpreter's own format, as it imports nothing for it."""
    beside_numpy = _beside_numpy()
    python = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), sysconfig.get_config_var("LIBDIR")]
    readable = [p for p in dict.fromkeys([*python, *beside_numpy, *SYSTEM_READABLE]) if p and os.path.exists(p)]
    return marshal.dumps(
        (program, token.encode(), beside_numpy, readable, folder, limits.by_kernel(), _call_filter()),
    )


@cache
def _call_filter() -> bytes:
    return filter_program(CALL_TABLES[platform.machine()])


def _environment(folder: str) -> dict[str, str]:
    """All that the program inherits. A fixed hash seed: sets are in the same order, and so verdicts, in every run."""
    return {
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


def _root() -> Path:
    return Path(__file__).resolve().parents[1]


@cache
def _beside_numpy() -> list[str]:
    """MBPP+'s tests import numpy. Read where it lies, without importing it here."""
    spec = importlib.util.find_spec("numpy")
    return [str(Path(spec.origin).parents[1])] if spec and spec.origin else []


# --- watching -------------------------------------------------------------------------------------------------------


def _watch(
    process: subprocess.Popen[bytes], verdict_fd: int, folder: Path, job: FileKey, limits: Limits
) -> tuple[str, str | None]:
    """Waits for the end, or makes one: (what the process wrote, which limit of ours it broke).

    job: the file on its standard input.
    """
    deadline_s = time.monotonic() + limits.wall_s
    written, broken = b"", None
    with contextlib.ExitStack() as closing:
        closing.callback(_end, process)
        ended_fd = os.pidfd_open(process.pid)
        closing.callback(os.close, ended_fd)
        ready = closing.enter_context(selectors.DefaultSelector())
        ready.register(verdict_fd, selectors.EVENT_READ)
        ready.register(ended_fd, selectors.EVENT_READ)
        while broken is None:
            events = {key.fd for key, _ in ready.select(WATCH_INTERVAL_S)}
            if verdict_fd in events:
                piece = os.read(verdict_fd, MESSAGE_LIMIT_BYTES)
                written += piece
                if not piece:
                    ready.unregister(verdict_fd)
            elif ended_fd in events:
                break
            broken = _broken_limit(process.pid, folder, job, len(written), deadline_s, limits)
    return written.decode(errors="replace"), broken


def _end(process: subprocess.Popen[bytes]) -> None:
    """It leads a session of its own and cannot leave it: the group is all that it is."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _broken_limit(
    pid: int, folder: Path, job: FileKey, n_written: int, deadline_s: float, limits: Limits
) -> str | None:
    if time.monotonic() > deadline_s:
        return f"ran longer than {limits.wall_s:g} s"
    if n_written > MESSAGE_LIMIT_BYTES:
        return "wrote into the pipe of its verdict"
    # No limit of the kernel counts root's threads; those of other users are counted with all that they run.
    if _n_threads(pid) > limits.threads:
        return f"started more than {limits.threads} threads"
    files = chain(visible_files(folder), deleted_files(pid, folder, job, limits.file_bytes))
    n_bytes = 0
    for n_files, of_file in enumerate(files, start=1):
        n_bytes += of_file
        if n_files > limits.folder_files:
            return f"made more than {limits.folder_files} files"
        if n_bytes > limits.folder_bytes:
            return f"wrote more than {limits.folder_bytes // MIB} MiB of files"
    return None


def _n_threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return 0


# --- the walls -------------------------------------------------------------------------------------------------------

TRIAL_OF_WALLS = """
import ctypes, os, socket, tempfile

standing = []

def attempt(name, action):
    try:
        action()
    except OSError:
        return
    standing.append(name)

attempt("write a file outside", lambda: open({outside!r}, "a"))
attempt("change a file's mode outside", lambda: os.chmod({outside!r}, 0o600))
attempt("make a file outside", lambda: open({outside!r} + ".new", "w"))
attempt("read a file outside", lambda: open({outside!r}).read())
attempt("connect to a server", lambda: socket.create_connection(("127.0.0.1", {port}), 1))
attempt("start a process", os.fork)
attempt("signal another process", lambda: os.kill({parent}, 0))
attempt("execute a file", lambda: os.execv("/bin/true", ["true"]))
with tempfile.NamedTemporaryFile("w", dir=".") as own:
    own.write("its own folder is writable")
assert not standing, "it could " + ", ".join(standing)
"""


@cache
def check_walls() -> None:
    """Tries to break out of a sandbox in every way that it should forbid. Raises `SandboxError` where one succeeds."""
    if sys.platform != "linux" or platform.machine() not in CALL_TABLES:
        raise SandboxError(
            f"generated code cannot be walled in on {sys.platform} ({platform.machine()}): the walls are Landlock and "
            f"seccomp of Linux, on {' or '.join(CALL_TABLES)}; run such workloads on a Linux machine or in a container"
        )
    with _targets() as (outside, port):
        trial = TRIAL_OF_WALLS.format(outside=str(outside), port=port, parent=os.getpid())
        outcome = run_program(trial)
    if not outcome.passed:
        raise SandboxError(
            f"generated code cannot be walled in on this machine (a trial of the walls: {outcome.reason}); Landlock "
            "(Linux 5.13, in the kernel's list of security modules) and seccomp filters are needed"
        )


@contextlib.contextmanager
def _targets() -> Iterator[tuple[Path, int]]:
    """A file and a server that we could reach: a refusal is then the walls' doing."""
    with ScratchFolder("walls") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        outside = folder / "outside"
        outside.write_text("not for the program")
        yield outside, server.getsockname()[1]
