"""A process that has imported what the commands import, and forks one for each command: a real process without the
three seconds of imports and the third of a second in which all that was imported is taken apart again.
`python -m tests.warm_command FD` is the server; `run` in another process asks it."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

HEAVY = (
    "altair",
    "jinja2",
    "lm_eval.tasks",
    "lm_eval.tasks.ruler.common_utils",
    "pandas",
    "pyarrow.parquet",
    "scipy.stats",
    "torch",
    "transformers",
)
ARROWS_THREAD = "jemalloc_bg_thd"
"""pyarrow's allocator starts it anew in a forked process."""
MOST_PASSED = 1
"""Files of a command, beside its output and errors."""


def attended() -> None:
    """As from a terminal. Tests that a shell runs in its background, or nohup, ignore Ctrl-C or a hang-up, and so would
    all that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def run(
    command: Sequence[str | Path],
    output: IO[bytes],
    errors: IO[bytes],
    environment: Mapping[str, str],
    cwd: Path,
    limit_s: float,
    code: str | None = None,
    pass_fds: Sequence[int] = (),
) -> int:
    """Exit code of a command of ours, as `subprocess` tells it. At the limit it is killed: `TimeoutExpired`.

    code: Python that is run in its place, as by `python -c`; the command's arguments are its own. pass_fds: files that
    it has too; their numbers there are its last arguments.
    """
    link = started()
    link.settimeout(None)  # the limit is this command's own, not that of what it waits for
    wanted = {
        "command": [os.fspath(part) for part in command],
        "environment": dict(environment),
        "cwd": str(cwd),
        "code": code,
    }
    asked = json.dumps(wanted).encode()
    socket.send_fds(link, [len(asked).to_bytes(4)], [output.fileno(), errors.fileno(), *pass_fds])
    link.sendall(asked)
    pid = int.from_bytes(_exactly(link, 4))
    link.settimeout(limit_s)
    try:
        return int.from_bytes(_exactly(link, 4), signed=True)
    except TimeoutError:
        os.kill(pid, signal.SIGKILL)
        link.settimeout(None)
        _exactly(link, 4)
        raise subprocess.TimeoutExpired(wanted["command"], limit_s) from None


@cache
def started() -> socket.socket:
    """Started once in each process that runs tests. It ends when that one does: its link ends."""
    ours, theirs = socket.socketpair()
    with theirs:
        # What a test has put into the environment is told with each command.
        subprocess.Popen(
            [sys.executable, "-m", "tests.warm_command", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[1],
        )
    return ours


def _exactly(link: socket.socket, n_bytes: int) -> bytes:
    received = b""
    while len(received) < n_bytes:
        piece = link.recv(n_bytes - len(received))
        if not piece:
            raise EOFError
        received += piece
    return received


def _serve(link: socket.socket) -> None:
    import harness
    from engines.coreml.toolkit import load_coremltools
    from engines.errors import EngineError
    from results.report.html import template

    # The forked process has the default again; the server goes with its link.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for module in pkgutil.walk_packages(harness.__path__, "harness."):
        importlib.import_module(module.name)
    for name in HEAVY:
        importlib.import_module(name)
    template()
    threads = {Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in os.listdir("/proc/self/task")}
    own = Path("/proc/self/comm").read_text().strip()
    assert threads <= {own, ARROWS_THREAD}, f"{threads}: threads do not come along into a forked process"
    gc.collect()
    gc.freeze()
    with suppress(EOFError):
        while True:
            head, files, _, _ = socket.recv_fds(link, 4, 2 + MOST_PASSED)
            if not head:
                return
            asked = json.loads(_exactly(link, int.from_bytes(head)))
            if asked["command"][1:2] == ["coreml"]:
                with suppress(EngineError):
                    load_coremltools()
            pid = os.fork()
            if pid == 0:
                link.close()
                _become_and_end(asked, *files)
                return
            for file in files:
                os.close(file)
            link.sendall(pid.to_bytes(4))
            _, status = os.waitpid(pid, 0)
            link.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, signed=True))


def _become(asked: dict[str, Any], output: int, errors: int, *passed: int) -> None:
    """The command, in this process."""
    from harness.cli import main

    attended()
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv[:] = [*asked["command"], *map(str, passed)]
    if asked["code"] is None:
        main()
    else:
        exec(compile(asked["code"], "<string>", "exec"), {"__name__": "__main__"})


def _become_and_end(asked: dict[str, Any], *files: int) -> None:
    """Ends as Python does, and ends the processes that `multiprocessing` forks: without taking modules apart.

    Any other end than a code is left to Python itself.
    """
    code: object = None
    try:
        _become(asked, *files)
    except SystemExit as ended:
        code = ended.code
        if not isinstance(code, int | None):
            raise
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):  # a full disk, a closed stream: Python has a code for it
        raise SystemExit(code) from None
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
