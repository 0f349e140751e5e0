"""The command line as a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, NamedTuple

EXECUTABLE = Path(sys.executable).with_name("joulebench")
TIMEOUT_S = 240


class Finished(NamedTuple):
    code: int
    stdout: str
    stderr: str

    @property
    def problems(self) -> list[str]:
        return self.stderr.splitlines()


def environment(data: Path | None = None) -> dict[str, str]:
    """One thread, no data folder but the one given, and no terminal's width: the same wherever the tests run."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("JOULEBENCH_DATA", "COLUMNS")}
    return inherited | {"OMP_NUM_THREADS": "1"} | ({"JOULEBENCH_DATA": str(data)} if data else {})


def joulebench(*arguments: str, data: Path | None = None, cwd: Path | None = None) -> Finished:
    """Runs it to its end."""
    process = subprocess.run(
        [str(EXECUTABLE), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=environment(data),
        cwd=cwd,
        check=False,
    )
    return Finished(process.returncode, process.stdout, process.stderr)


def start(*arguments: str, output: IO[str]) -> subprocess.Popen[str]:
    """Starts it, with both streams into one file, in a process group of its own."""
    return subprocess.Popen(
        [str(EXECUTABLE), *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
        # A test run in the background of a shell ignores SIGINT, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
