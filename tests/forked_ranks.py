"""Ranks that are forked from the warm process of commands: a new one imports for three seconds and more.

A process between the two forks and ends, so that a rank becomes a child of the process that asks for it, as one that it
had started itself: that one waits for it, and the rank ends with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from engines.parallel import processes
from tests import warm_command

START_S = 60.0
PR_SET_CHILD_SUBREAPER = 36

RANK = """
import os, sys, time
wanted, descriptor = map(int, sys.argv[1:])
pid = os.fork()
if pid:
    print(pid, flush=True)
    os._exit(0)
os.dup2(2, 1)
until_s = time.monotonic() + 30
while os.getppid() != wanted:
    if time.monotonic() > until_s:
        sys.exit("nobody took this rank over")
    time.sleep(0.001)
from engines.parallel.worker import main
sys.exit(main(descriptor))
"""


class ForkedRank:
    """A rank as `subprocess.Popen` starts, watches and ends it."""

    def __init__(
        self, command: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str], stdout: IO[bytes], **_: object
    ) -> None:
        assert command[-3:] == ["-m", "engines.parallel.worker", str(*pass_fds)]
        self._lock = threading.Lock()  # two threads may ask how it ended
        self._status: int | None = None
        with tempfile.TemporaryFile() as told, _adopting():
            code = warm_command.run(
                ["-c", str(os.getpid())], told, stdout, env, Path.cwd(), START_S, RANK, pass_fds
            )  # fmt: skip
            assert code == 0
            told.seek(0)
            self.pid = int(told.read())

    def poll(self) -> int | None:
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self._status = os.waitstatus_to_exitcode(status)
            return self._status

    def wait(self, timeout: float = START_S) -> int:
        until_s = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.002)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def _adopting() -> Iterator[None]:
    """Processes below this one whose parent ends become its children, and not those of the machine's first."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextmanager
def ranks_forked() -> Iterator[None]:
    """Engines that start inside it have such ranks."""
    warm_command.started()  # its link is none of what an engine leaves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedRank}))
        yield
