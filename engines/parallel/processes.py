"""The processes of the other ranks: started, told, watched and ended by the first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from engines.errors import EngineError
from engines.model.key_value_cache import KeyValueCache
from engines.parallel.messages import REPORT, START, STEP, STOP, Channel, LostError
from engines.parallel.settings import RankSettings
from engines.parallel.torchrun import GONE, Guest, Meeting
from engines.parallel.worker import PEER_LOST, PHASES
from engines.techniques.context import ChunkPhase
from results.own_python import own_module
from results.scratch import ScratchFolder

END_S = 5.0
"""Until a process that was told to end is killed."""
LOAD_S = 3600.0


class Loaded(NamedTuple):
    """What a rank has read and holds."""

    read_bytes: dict[str, int]
    held_bytes: int


class Report(NamedTuple):
    sent_bytes: dict[str, int]
    routed_crc: int


class Workers:
    """Ranks 1 to N - 1 of one engine."""

    def __init__(self, settings: Callable[[str], RankSettings], n_ranks: int, meeting: Meeting | None = None) -> None:
        """settings: those of a store file, in a folder that is this user's alone. meeting: of ranks that torchrun
        started; None: they are started here."""
        self._scratch = ScratchFolder("ranks")
        self._folder = self._scratch.path
        self.settings = settings(str(self._folder / "store"))
        self._meeting = meeting
        self._n_ranks = n_ranks
        self.processes: list[subprocess.Popen[bytes] | Guest] = []
        self._channels: list[Channel] = []
        self._logs: list[Path] = []
        try:
            for rank in range(1, n_ranks):
                self._start(rank)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> None:
        if self._meeting is None:
            self._start_process(rank)
        else:
            channel, guest = self._meeting.take(rank)
            self._channels.append(channel)
            self.processes.append(guest)
        try:
            self._channels[-1].send_json({"settings": self.settings.model_dump(mode="json"), "rank": rank})
        except LostError as error:
            raise EngineError(self.why_lost()) from error

    def _start_process(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        log = self._folder / f"rank{rank}.log"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [*own_module("engines.parallel.worker"), str(theirs.fileno())]
        with theirs, log.open("wb") as errors:
            self.processes.append(
                subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    env=environment,
                )
            )  # fmt: skip
        self._channels.append(Channel(ours))
        self._logs.append(log)

    def loaded(self) -> list[Loaded]:
        """Waits until every rank has read its shard. Raises `EngineError`."""
        return [Loaded(told["read_bytes"], told["held_bytes"]) for told in self._told(LOAD_S)]

    def reports(self) -> list[Report]:
        """What each has sent since the last report. Raises `EngineError`."""
        self._tell([REPORT])
        return [Report(told["sent_bytes"], told["routed_crc"]) for told in self._told(END_S)]

    def start_cache(self, number: int, n_positions: int, n_kept: int, turned_for: int) -> None:
        self._tell([START, number, n_positions, n_kept, turned_for])

    def step(self, chunks: Sequence[Tensor], caches: Sequence[int], phase: ChunkPhase) -> None:
        of_chunks = [n for cache, chunk in zip(caches, chunks, strict=True) for n in (cache, len(chunk))]
        tokens = [token for chunk in chunks for token in chunk.tolist()]
        self._tell([STEP, PHASES.index(phase), len(chunks), *of_chunks, *tokens])

    def _tell(self, numbers: Sequence[int]) -> None:
        try:
            for channel in self._channels:
                channel.send_numbers(numbers)
        except LostError as error:
            raise EngineError(self.why_lost()) from error

    def _told(self, timeout_s: float) -> list[dict[str, Any]]:
        found = []
        for rank, channel in enumerate(self._channels, 1):
            try:
                told = channel.receive_json(timeout_s)
            except LostError as error:
                raise EngineError(self.why_lost()) from error
            except TimeoutError as error:
                raise EngineError(f"rank {rank} said nothing for {timeout_s:.0f} s; is its process stopped?") from error
            if "error" in told:
                raise EngineError(f"rank {rank}: {told['error']}")
            found.append(told)
        return found

    def why_lost(self) -> str:
        """Which rank ended first, and how. A rank that lost another ends too, and says so by its status."""
        until_s = time.monotonic() + END_S
        while time.monotonic() < until_s:
            statuses = [process.poll() for process in self.processes]
            if any(status not in (None, PEER_LOST) for status in statuses):
                break
            time.sleep(0.02)
        n_ranks = self._n_ranks
        for rank, (process, status) in enumerate(zip(self.processes, statuses, strict=True), 1):
            if status not in (None, PEER_LOST):
                return f"rank {rank} of {n_ranks} (process {process.pid}) ended {_how(status)}{self._last_words(rank)}"
        for rank, process in enumerate(self.processes, 1):
            if process.poll() is not None:
                return f"rank {rank} of {n_ranks} (process {process.pid}) lost the others{self._last_words(rank)}"
        return f"a rank of {n_ranks} was lost, though all processes are there; are they stopped?"

    def _last_words(self, rank: int) -> str:
        if self._meeting is not None:
            return ""  # torchrun shows what its ranks say
        lines = self._logs[rank - 1].read_text(errors="replace").strip().splitlines()
        return f": {lines[-1][:200]}" if lines else ""

    def close(self) -> None:
        """Ends them. None is left, and no file."""
        for channel in self._channels:
            with suppress(LostError):  # it may be gone already
                channel.send_numbers([STOP])
            channel.close()
        for process in self.processes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._scratch.close()


def _how(status: int | None) -> str:
    if status == GONE:
        return "(torchrun says how)"
    if status is None or status >= 0:
        return f"with status {status}"
    return f"by signal {-status} ({signal.Signals(-status).name})"


class ToldCache(KeyValueCache):
    """The first rank's: the others' follow it."""

    number = 0
    workers: Workers

    def start(self, n_positions: int, n_kept: int = 0, turned_for: int | None = None) -> None:
        super().start(n_positions, n_kept, turned_for)
        self.workers.start_cache(self.number, n_positions, n_kept, self.turned_for)
