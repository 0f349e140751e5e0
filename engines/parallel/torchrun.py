"""Ranks that torchrun started: the first runs the plan, the others wait for it and compute their part.

They meet at a socket in a folder of this user. A waiting rank keeps one connection open there; the first takes it for
an engine of several ranks and tells it what to compute, as it tells the processes that it starts itself
(`engines.parallel.worker`). The rank then opens the next one, so that it serves every arm of the run. When the first
closes the meeting, or is gone, the others end.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from engines.errors import EngineError
from engines.parallel.messages import Channel, LostError

MEET_S = 60.0
"""Until all ranks that torchrun started have come: each imports torch first."""
ASK_AGAIN_S = 0.1
LONGEST_ADDRESS = 100
"""Bytes of a socket's path: Linux takes 107, macOS 103."""
GONE = 255
"""The status of a rank that is no child of ours: how it ended only torchrun knows."""


class Launch(NamedTuple):
    """What torchrun tells a process of itself. folder: where its ranks meet."""

    rank: int
    n_ranks: int
    folder: Path


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """None where torchrun did not start this process. Raises `EngineError` for ranks on several machines."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, n_ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    here = int(environment["LOCAL_WORLD_SIZE"])
    if here != n_ranks:
        raise EngineError(f"torchrun started {n_ranks} ranks, {here} of them on this machine; ranks share one machine")
    told = f"{environment['TORCHELASTIC_RUN_ID']} {environment.get('MASTER_PORT')} {os.getppid()}"
    name = f"joulebench-torchrun-{os.getuid()}-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    is_short = len(os.fsencode(folder / "meeting")) <= LONGEST_ADDRESS
    return Launch(rank, n_ranks, folder if is_short else Path("/tmp") / name)


class Guest:
    """A rank of torchrun, as the first rank watches it: a process that it neither started nor ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        with suppress(OSError):
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return GONE if state in "ZX" else None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return GONE
        return None

    def wait(self, timeout: float | None = None) -> int | None:
        """It serves the next arm, and is not waited for."""
        return self.poll()

    def kill(self) -> None:
        """It is torchrun's to end."""


class Meeting:
    """The first rank's end."""

    def __init__(self, launched: Launch, meet_s: float = MEET_S) -> None:
        """Waits for the others. Raises `EngineError` where one does not come."""
        self.n_ranks = launched.n_ranks
        self._meet_s = meet_s
        self._folder = launched.folder
        self._waiting: dict[int, tuple[Channel, int]] = {}
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _make_own(self._folder)
        try:
            address = self._folder / "meeting"
            address.unlink(missing_ok=True)  # of a run that was killed, with the same process id and port
            self._door.bind(str(address))
            self._door.listen()
            until_s = time.monotonic() + meet_s
            for rank in range(1, self.n_ranks):
                self._await(rank, until_s)
        except BaseException:
            self.close()
            raise

    def take(self, rank: int) -> tuple[Channel, Guest]:
        """A connection to a rank, for one engine. Raises `EngineError` where it does not come."""
        self._await(rank, time.monotonic() + self._meet_s)
        channel, pid = self._waiting.pop(rank)
        return channel, Guest(pid)

    def _await(self, rank: int, until_s: float) -> None:
        while rank not in self._waiting:
            left_s = until_s - time.monotonic()
            self._door.settimeout(max(left_s, 0.001))
            try:
                connection, _ = self._door.accept()
                channel = Channel(connection)
                told = channel.receive_json(max(left_s, 0.001))
            except (TimeoutError, LostError) as error:
                if left_s > 0 and isinstance(error, LostError):
                    continue
                raise EngineError(
                    f"torchrun started {self.n_ranks} processes, and rank {rank} did not come within"
                    f" {self._meet_s:g} s; is it stopped?"
                ) from error
            self._waiting[int(told["rank"])] = channel, int(told["pid"])

    def close(self) -> None:
        """Lets the others go. No file is left."""
        for channel, _ in self._waiting.values():
            channel.close()
        self._waiting.clear()
        self._door.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def serve(launched: Launch, meet_s: float = MEET_S) -> None:
    """A rank other than the first: until that ends. Raises `EngineError` where it does not come."""
    import threading

    from engines.parallel.worker import attend

    serving: list[threading.Thread] = []
    is_met = False
    while (connection := _connected(launched, meet_s, is_met)) is not None:
        channel = Channel(connection)
        is_met = True
        try:
            channel.send_json({"rank": launched.rank, "pid": os.getpid()})
            settled = channel.receive_json()
        except LostError:
            break
        serving.append(threading.Thread(target=attend, args=(channel, settled), daemon=True))
        serving[-1].start()
    # The first rank is gone: whoever still waits for it in a collective waits in vain.
    for thread in serving:
        thread.join(0.5)


def _connected(launched: Launch, meet_s: float, is_met: bool) -> socket.socket | None:
    """None where the first rank was here and is gone."""
    until_s = time.monotonic() + meet_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(launched.folder / "meeting"))
        except OSError:
            connection.close()
            if is_met:
                return None
            if time.monotonic() > until_s:
                raise EngineError(
                    f"rank {launched.rank} of {launched.n_ranks}: rank 0 did not come within {meet_s:g} s; is it"
                    " stopped?"
                ) from None
            time.sleep(ASK_AGAIN_S)
        else:
            return connection


def _make_own(folder: Path) -> None:
    """Raises `EngineError` where somebody else may look into it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EngineError(f"{folder} is not a folder of this user alone; remove it")
