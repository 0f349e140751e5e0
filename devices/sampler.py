"""Reads a meter at a steady rate on a thread of its own, and records where it could not.

A load may alternate in step with its reader: tokens at 20 a second whose watts are read every 50 or 100 ms look steady,
and no reading can tell. So the distance of two deadlines is drawn evenly from 0.5 to 1.5 intervals where power is read:
whatever the period of a load, its phase is met anew each time, and what is left is scatter that the uncertainty knows.
Counters miss nothing between two readings; they are read on a grid, on which a standstill is seen soonest, and power
that is read to check them is read with them.

Each deadline follows the one before, not the reading (no drift); a reading is stamped in the middle of its call. A
deadline that passed while a reading took long is skipped, and a distance of more than `GAP_FACTOR` intervals is kept as
a gap. Before the first deadline, a meter may be read closely until it was seen often enough to renew its value.

A driver may hang in a call for ever. So every reading but a `mark` is made on the thread, every wait for it has a
limit, and the thread is a daemon: it keeps neither its caller nor the end of the program.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from devices.base import Clock, DeviceError, GoneError, TransientDeviceError
from results.cumulative import GAP_FACTOR

AT_RANDOM = 0.5
"""Of an interval, more or less: one interval wide in all, so that a load of that period is met in any phase."""
LOOK_EVERY_S = 1e-3
"""Between two close readings, beside what they take."""
HUNG_S = 10.0
"""A reading that takes longer does not come back."""
LOST_S = 1.0
"""The same where a reading has failed before: a link that is looked for takes its time."""


class Sampler:
    """One use: `start`, any number of `mark`, `stop`. An error of `read` is raised again by `stop`.

    After a transient one it goes on reading: what was `received` before and behind it can still be had.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[float]],
        interval_s: float,
        clock: Clock,
        is_known: Callable[[Sequence[float]], bool] = lambda row: True,
        spread: float = 0.0,
    ) -> None:
        """is_known: told each reading, until it says that closer readings have nothing more to show.

        spread: by how much of an interval two deadlines may lie closer or further apart (`AT_RANDOM`; 0: a grid).
        """
        self._read = read
        self._is_known = is_known
        self._interval_s = interval_s
        self._clock = clock
        self._spread = spread
        self._times_s: list[float] = []
        self._rows: list[Sequence[float]] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._has_begun = threading.Event()
        """The readings before the first deadline are there, or failed."""
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        """Takes the first readings before it returns, so that a window opened afterwards is covered."""
        self._thread.start()
        if not self._has_begun.wait(HUNG_S):
            self._stop.set()
            raise _hung()
        if self._error is not None:
            raise self._error

    def mark(self) -> None:
        """One more reading now. Raises what `read` raises, and `DeviceError` while another reading hangs."""
        if not self._lock.acquire(timeout=HUNG_S):
            raise _hung()
        try:
            before_s = self._clock.now_s()
            row = self._read()
            at_s = (before_s + self._clock.now_s()) / 2
            if not self._times_s or at_s > self._times_s[-1]:
                self._times_s.append(at_s)
                self._rows.append(row)
        finally:
            self._lock.release()

    def stop(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(times [n], values [n, channels]), with a last reading taken now. Raises what `read` raised first."""
        self._stop.set()
        self._thread.join(HUNG_S if self._error is None else LOST_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise _hung()
        return self.received()

    def received(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(times [n], values [n, channels]) that are there, whatever was raised meanwhile."""
        rows = list(self._rows)
        if not rows:
            return np.zeros(0), np.zeros((0, 0))
        return np.asarray(self._times_s[: len(rows)]), np.asarray(rows, dtype=np.float64).reshape(len(rows), -1)

    def _run(self) -> None:
        try:
            self.mark()
            while not self._is_known(self._rows[-1]) and not self._stop.wait(LOOK_EVERY_S):
                self.mark()
            self._has_begun.set()
            self._read_by_deadlines()
            self._mark_or_miss()
        except Exception as error:  # noqa: BLE001 - raised again where somebody waits for the readings
            self._error = error
        finally:
            self._has_begun.set()

    def _mark_or_miss(self) -> None:
        try:
            self.mark()
        except TransientDeviceError as error:
            self._error = self._error or error

    def _read_by_deadlines(self) -> None:
        draw = random.Random()
        deadline_s = self._times_s[0]
        while True:
            deadline_s = next_deadline_s(deadline_s, self._clock.now_s(), self._interval_s, self._spread, draw)
            if self._stop.wait(deadline_s - self._clock.now_s()):
                return
            self._mark_or_miss()


def _hung() -> DeviceError:
    return GoneError(f"a reading has not come back for {HUNG_S:g} s; is the device's driver hung?")


def next_deadline_s(deadline_s: float, now_s: float, interval_s: float, spread: float, draw: random.Random) -> float:
    """The first one after now: each follows the one before, and those that have passed are skipped."""
    while deadline_s <= now_s:
        deadline_s += interval_s * draw.uniform(1 - spread, 1 + spread)
    return deadline_s


def find_gaps(times_s: NDArray[np.float64], interval_s: float) -> tuple[tuple[float, float], ...]:
    """Stretches of more than `GAP_FACTOR` intervals without a reading."""
    wide = np.flatnonzero(np.diff(times_s) > GAP_FACTOR * interval_s)
    return tuple((float(times_s[i]), float(times_s[i + 1])) for i in wide)
