"""Where a program runs: this host, or an Android phone. Its files are put there once, and nothing is left running."""

from __future__ import annotations

import math
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from devices.android.processes import affinity_mask
from devices.base import UnendedProgramError
from devices.cpu_seconds import program_of_ours
from devices.timed_text import TimedText, last_arrival_s
from engines import environment_for_others
from engines.errors import EngineError
from engines.external.programs.edges import Edge, last_edge
from engines.external.programs.program import ProgramCall, ProgramOutput
from results.file_state import sha256_of_file
from results.scratch import ScratchFolder

MAX_FILE_BYTES = 1 << 20
"""Of what a program writes and we read."""
PIPE_BYTES = 1 << 16
CLOCK_STEP_S = 0.03
"""More is a clock that was set; one that gained less may have done so at once, and its stamps are off by that."""
KILL_WAIT_S = 5.0
WATCH = 'read -r group && { read -r _; kill -s KILL -- "-$group"; }'
"""A shell that waits until we are gone, whatever ended us (`kill -9`), and then ends the program's process group."""


class ProgramRun(NamedTuple):
    """begun_s, ended_s: of the program, on the run's clock. of_wall_s: of the machine's wall clock onto it; None where
    that clock was set meanwhile. remark: how well these times are known. done: the end of its last phase; None: not
    seen, for its last words are not known or did not come. stamp_uncertainty_s: standard, of `of_wall_s`."""

    output: ProgramOutput
    begun_s: float
    ended_s: float
    of_wall_s: Callable[[float], float | None]
    remark: str
    done: Edge | None = None
    stamp_uncertainty_s: float = 0.0


class Target(Protocol):
    def prepare(self, files: Mapping[str, Path]) -> None:
        """Puts files there, by their names in the program's folder. Raises `DeviceError`, `EngineError`."""
        ...

    def run(self, call: ProgramCall, texts: Mapping[str, str], timeout_s: float) -> ProgramRun:
        """Runs a program to its end. texts: small files that it reads, by name.

        Raises `TransientDeviceError` where it does not end in time, or the link breaks; nothing is left running.
        """
        ...

    def close(self) -> None:
        """Ends what still runs, and takes away what was put there for single runs."""
        ...


def file_sha256(path: Path) -> str:
    """Raises `EngineError` where it cannot be read."""
    try:
        return sha256_of_file(path)
    except OSError as error:
        raise EngineError(f"{path} cannot be read ({error.strerror or error})") from error


class HostTarget:
    """This machine. Files are linked into a folder of their own, which goes with `close`."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._folder: ScratchFolder | None = None
        self._running: subprocess.Popen[bytes] | None = None

    def prepare(self, files: Mapping[str, Path]) -> None:
        self.close()
        self._folder = ScratchFolder("program")
        for name, path in files.items():
            if not path.exists():
                raise EngineError(f"{path} is not there")
            link = self._folder.path / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.absolute())

    def run(self, call: ProgramCall, texts: Mapping[str, str], timeout_s: float) -> ProgramRun:
        assert self._folder is not None  # `prepare` was called
        folder = self._folder.path
        for name in call.reads:
            (folder / name).unlink(missing_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
        words = [*call.arguments]
        if call.cores is not None:
            words = ["taskset", f"{affinity_mask(call.cores):x}", *words]
        libraries = os.pathsep.join(filter(None, (".", os.environ.get("LD_LIBRARY_PATH"))))
        environment = {**environment_for_others(), "LD_LIBRARY_PATH": libraries, **call.environment}
        ahead_s, begun_s = time.time() - self._now_s(), self._now_s()
        with _ends_with_us() as tell_group:
            try:
                self._running = subprocess.Popen(
                    words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise EngineError(f"{words[0]} could not be started: {error.strerror or error}") from error
            tell_group(self._running.pid)
            with program_of_ours(self._running.pid):
                try:
                    stdout, stderr, arrived_s = self._listen(self._running, call.last_words, timeout_s)
                except subprocess.TimeoutExpired as error:
                    raise UnendedProgramError(
                        f"{call.arguments[0]} has not ended after {timeout_s:g} s; it was killed"
                    ) from error
                finally:
                    code = self._end()
        ended_s = self._now_s()
        gained_s = time.time() - ended_s - ahead_s

        def of_wall_s(wall_s: float) -> float | None:
            """A clock that is put right little by little runs evenly meanwhile."""
            if abs(gained_s) >= CLOCK_STEP_S:
                return None
            passed = (wall_s - ahead_s - begun_s) / (ended_s - begun_s + gained_s)
            return begun_s + passed * (ended_s - begun_s)

        output = ProgramOutput(stdout, stderr, code if code >= 0 else 128 - code, _texts_of(folder, call.reads))
        return ProgramRun(
            output, begun_s, ended_s, of_wall_s, "this host's clock",
            None if arrived_s is None else last_edge(Edge(ended_s, 0.0), arrived_s, 0.0), abs(gained_s) / math.sqrt(12),
        )  # fmt: skip

    def _listen(
        self, running: subprocess.Popen[bytes], last_words: str | None, timeout_s: float
    ) -> tuple[str, str, float | None]:
        """Its output and its errors until it ends, and when the last words came. Raises `subprocess.TimeoutExpired`."""
        deadline_s = time.monotonic() + timeout_s
        assert running.stdout is not None
        assert running.stderr is not None
        written = {stream.fileno(): TimedText() for stream in (running.stdout, running.stderr)}
        with selectors.DefaultSelector() as selector:
            for fd in written:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline_s - time.monotonic())):
                    piece = os.read(key.fd, PIPE_BYTES)
                    if not piece:
                        selector.unregister(key.fd)
                    written[key.fd].add(piece, self._now_s())
                if time.monotonic() >= deadline_s:
                    raise subprocess.TimeoutExpired(running.args, timeout_s)
        running.wait(max(0.0, deadline_s - time.monotonic()))
        stdout, stderr = (
            re.sub("\r\n?", "\n", one.text.decode(errors="replace")) for one in written.values()
        )  # a line that is written anew is a line
        return stdout, stderr, last_arrival_s(written.values(), last_words) if last_words else None

    def _end(self) -> int:
        """Of what runs, its children too: its exit code."""
        running, self._running = self._running, None
        if running is None:
            return 0
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        code = running.wait(KILL_WAIT_S)
        for stream in (running.stdout, running.stderr):
            if stream is not None:
                stream.close()
        return code

    def close(self) -> None:
        self._end()
        if self._folder is not None:
            self._folder.close()
            self._folder = None


@contextmanager
def _ends_with_us() -> Iterator[Callable[[int], None]]:
    """Yields what is told the id of a process group, that of a program: the group is killed should we be killed
    meanwhile, by a shell at the other end of a pipe that closes when we are gone."""
    watcher = subprocess.Popen(
        ["/bin/sh", "-c", WATCH], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert watcher.stdin is not None

    def tell(group: int) -> None:
        assert watcher.stdin is not None
        with suppress(BrokenPipeError):
            watcher.stdin.write(f"{group}\n".encode())
            watcher.stdin.flush()

    try:
        yield tell
    finally:
        # Before the pipe closes: the group's number may be another's by now.
        watcher.kill()
        watcher.wait()
        with suppress(BrokenPipeError):
            watcher.stdin.close()


def _texts_of(folder: Path, names: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(OSError), (folder / name).open("rb") as opened:
            found[name] = opened.read(MAX_FILE_BYTES).decode(errors="replace")
    return found


def program_path(named: str) -> Path:
    """A program by its path, or by its name in PATH. Raises `EngineError`."""
    found = shutil.which(named) if os.sep not in named else str(Path(named).expanduser())
    if found is None or not Path(found).is_file():
        raise EngineError(f"{named} is not there; give the path of the program")
    return Path(found).absolute()
