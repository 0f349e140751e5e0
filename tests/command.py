"""The command line as a real process: of each command one is new, the others are forked from a warm one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import IO, NamedTuple

from tests import warm_command

EXECUTABLE = Path(sys.executable).with_name("joulebench")
TIMEOUT_S = 240

STARTED = "JOULEBENCH_TESTS_STARTED"
"""Names the folder in which a file stands for each command that these tests have started, by whichever worker."""
NEW_ANYWAY = {"calibrate", "compare", "doctor", "history", "plan", "report", "run", "tune"}
"""Commands that some test of `make check` starts as a process of its own, to end it or to see what it writes where."""


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


def names_of_modules(folder: Path) -> Path:
    """The folder, with files of a user whose names modules have too: one of ours, one of Python's own."""
    for name in ("results.py", "queue.py"):
        (folder / name).write_text("raise SystemExit('a file of the user was run')\n")
    return folder


def joulebench(*arguments: str, data: Path | None = None, cwd: Path | None = None, fresh: bool = False) -> Finished:
    """Runs it to its end. fresh: in a new process, as the first of most commands is anyway, not in a forked one."""
    is_first = arguments[0] not in NEW_ANYWAY and _is_first(arguments[0])
    command, own = [str(EXECUTABLE), *arguments], environment(data)
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        if fresh or is_first:
            process = subprocess.run(
                command, stdout=output, stderr=errors, timeout=TIMEOUT_S, env=own, cwd=cwd, check=False
            )
            code = process.returncode
        else:
            code = warm_command.run(command, output, errors, own, cwd or Path.cwd(), TIMEOUT_S)
        return Finished(code, _text(output), _text(errors))


def _is_first(command: str) -> bool:
    """Of all workers, which start one after another."""
    try:
        (Path(os.environ[STARTED]) / command.encode().hex()).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run_python(
    code: str, *arguments: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None
) -> Finished:
    """Runs code around a command, in a forked process that has imported what commands import."""
    command, own = ["-c", *arguments], environment() | dict(variables or {})
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        returned = warm_command.run(command, output, errors, own, cwd or Path.cwd(), TIMEOUT_S, textwrap.dedent(code))
        return Finished(returned, _text(output), _text(errors))


def _text(written: IO[bytes]) -> str:
    written.seek(0)
    return written.read().decode().replace("\r\n", "\n")


def start(*arguments: str, output: IO[str]) -> subprocess.Popen[str]:
    """Starts it, with both streams into one file, in a process group of its own."""
    return subprocess.Popen(
        [str(EXECUTABLE), *arguments],
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
        start_new_session=True,
        preexec_fn=warm_command.attended,
    )
