"""Reads a meter at a fixed rate on a thread of its own, and records where it could not.

Deadlines lie on a grid from the first reading (no drift); a reading is stamped in the middle of its call. A deadline
that passed while a reading took long is skipped, and a distance of more than `GAP_FACTOR` intervals is kept as a gap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from devices.base import Clock, DeviceError
from results.energy import GAP_FACTOR

STOP_TIMEOUT_S = 10.0


class Sampler:
    """One use: `start`, any number of `mark`, `stop`. An error of `read` is raised again by `stop`."""

    def __init__(self, read: Callable[[], Sequence[float]], interval_s: float, clock: Clock) -> None:
        self._read = read
        self._interval_s = interval_s
        self._clock = clock
        self._times_s: list[float] = []
        self._rows: list[Sequence[float]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self._loop: Future[None] | None = None

    def start(self) -> None:
        """Takes the first reading before it returns, so that a window opened afterwards is covered."""
        self.mark()
        self._loop = self._pool.submit(self._run, self._times_s[0])

    def mark(self) -> None:
        """One more reading now."""
        with self._lock:
            before_s = self._clock.now_s()
            row = self._read()
            at_s = (before_s + self._clock.now_s()) / 2
            if not self._times_s or at_s > self._times_s[-1]:
                self._times_s.append(at_s)
                self._rows.append(row)

    def stop(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(times [n], values [n, channels]), with a last reading taken now. Raises what `read` raised."""
        self._stop.set()
        try:
            if self._loop is not None:
                self._loop.result(timeout=STOP_TIMEOUT_S)
            self.mark()
        except TimeoutError as error:
            raise DeviceError(
                f"a reading has not come back for {STOP_TIMEOUT_S:g} s; is the device's driver hung?"
            ) from error
        finally:
            self._pool.shutdown(wait=False)
        return np.asarray(self._times_s), np.asarray(self._rows, dtype=np.float64).reshape(len(self._rows), -1)

    def _run(self, first_s: float) -> None:
        k = 1
        while not self._stop.wait(max(0.0, first_s + k * self._interval_s - self._clock.now_s())):
            self.mark()
            k = max(k + 1, int((self._clock.now_s() - first_s) / self._interval_s) + 1)


def find_gaps(times_s: NDArray[np.float64], interval_s: float) -> tuple[tuple[float, float], ...]:
    """Stretches of more than `GAP_FACTOR` intervals without a reading."""
    wide = np.flatnonzero(np.diff(times_s) > GAP_FACTOR * interval_s)
    return tuple((float(times_s[i]), float(times_s[i + 1])) for i in wide)
