"""The machine's time without its pauses, for tests that let real seconds pass.

Where others share a machine it stands still for 50 to 300 ms now and then, and with it what reads a meter 20 times a
second. A thread looks at the time every few milliseconds; what passes between two looks beyond `MOST_S` is held back.
Our clock, and those of fake phones (`phone.c`), go by it: all of them stand still together, and a pause is none.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from devices.clock import MonotonicClock
from tests.fakes.phone import CLOCK_FILE

LOOK_EVERY_S, MOST_S = 0.005, 0.025


class HeldClock:
    """Between `__enter__` and `__exit__` it goes, and the file at `path` says how. It begins as the monotonic clock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        ahead_us = [round((time.clock_gettime(which) - time.monotonic()) * 1e6) for which in _OTHERS]
        path.write_bytes(struct.pack("<6q", 0, _monotonic_us(), 0, round(MOST_S * 1e6), *ahead_us))
        with path.open("r+b") as file:
            self._file = mmap.mmap(file.fileno(), 0)
        self._looked_us, self._held_us, self._version = _monotonic_us(), 0, 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="held-clock", daemon=True)

    def __enter__(self) -> HeldClock:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """What a phone left running is not held for ever."""
        self._ended.set()
        self._thread.join()
        self._file[24:32] = struct.pack("<q", 1 << 60)

    def now_s(self) -> float:
        with self._lock:
            return (min(_monotonic_us(), self._looked_us + round(MOST_S * 1e6)) - self._held_us) / 1e6

    def sleep_until_s(self, at_s: float) -> None:
        while (left_s := at_s - self.now_s()) > 0:
            time.sleep(left_s)

    def later(self, after_s: float, what: Callable[..., object], *of: object, **named: object) -> None:
        """What happens so much later, while the caller goes on."""
        at_s = self.now_s() + after_s

        def run() -> None:
            self.sleep_until_s(at_s)
            what(*of, **named)

        threading.Thread(target=run, daemon=True).start()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            with self._lock:
                now_us = _monotonic_us()
                self._held_us += max(0, now_us - self._looked_us - round(MOST_S * 1e6))
                self._looked_us = now_us
                self._write(1)
                self._file[8:24] = struct.pack("<2q", self._looked_us, self._held_us)
                self._write(1)

    def _write(self, versions: int) -> None:
        self._version += versions
        self._file[:8] = struct.pack("<q", self._version)


@contextmanager
def held(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[HeldClock]:
    """All that is measured inside goes by it. Phones are made inside, too."""
    with HeldClock(folder / "clock") as clock:
        patch.setenv(CLOCK_FILE, str(clock.path))
        patch.setattr(MonotonicClock, "now_s", lambda own: clock.now_s())
        patch.setattr(MonotonicClock, "sleep_until_s", lambda own, at_s: clock.sleep_until_s(at_s))
        yield clock


_OTHERS = (time.CLOCK_REALTIME, time.CLOCK_BOOTTIME)


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000
