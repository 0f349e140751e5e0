"""Time that passes only where the test's own thread waits, for meters that are read by samplers on theirs.

No second is waited for, and a busy machine is late for nothing: a sampler's deadline comes at its time, and the test
goes on when all samplers wait for their next. Readings take no time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import devices.meters.polled
import devices.sampler
from devices.sampler import Sampler

BEGUN_S = 1000.013
"""Between two ticks of any counter."""


class _Parked(NamedTuple):
    until_ns: int
    is_over: Callable[[], bool]


class SteppedClock:
    def __init__(self) -> None:
        self._now_ns = round(BEGUN_S * 1e9)
        self._stepping = threading.current_thread()
        self._changed = threading.Condition()
        self._parked: dict[threading.Thread, _Parked] = {}
        """Threads that wait."""
        self._later: list[tuple[int, Callable[[], object]]] = []
        self.samplers: list[threading.Thread] = []
        self.each_step: list[Callable[[], object]] = []
        """What shows the new time: files of counters, what a library is told."""

    def now_s(self) -> float:
        return self._now_ns / 1e9

    def now_ns(self) -> int:
        return self._now_ns

    def sleep(self, seconds: float) -> None:
        self.wait(seconds, lambda: False)

    def later(self, after_s: float, what: Callable[..., object], *of: object, **named: object) -> None:
        """What happens so much later, between two readings."""
        self._later.append((self._after_ns(after_s), lambda: what(*of, **named)))

    def wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        if threading.current_thread() is self._stepping:
            self._step(self._after_ns(seconds), is_over)
        else:
            self._park(_Parked(self._after_ns(seconds), is_over))

    def tell(self) -> None:
        """Those for whom it is over go on."""
        self._release(lambda one: one.is_over())

    def _after_ns(self, seconds: float) -> int:
        """Never too early."""
        return self._now_ns + math.ceil(max(0.0, seconds) * 1e9)

    def _step(self, until_ns: int, is_over: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                # One that ends by an error tells nobody: it is looked for.
                while not all(thread in self._parked or not thread.is_alive() for thread in self.samplers):
                    self._changed.wait(0.01)
                next_ns = min(
                    (*(one.until_ns for one in self._parked.values()), *(at for at, _ in self._later), until_ns)
                )
            if is_over():
                return
            self._now_ns = max(self._now_ns, next_ns)
            for show in self.each_step:
                show()
            due = [what for at_ns, what in self._later if at_ns <= self._now_ns]
            self._later = [(at_ns, what) for at_ns, what in self._later if at_ns > self._now_ns]
            for what in due:
                what()
            if self._now_ns >= until_ns:
                return
            self._release(lambda one: one.until_ns <= self._now_ns)

    def _park(self, own: _Parked) -> None:
        thread = threading.current_thread()
        with self._changed:
            if not own.is_over():
                self._parked[thread] = own
                self._changed.notify_all()
                self._changed.wait_for(lambda: thread not in self._parked)

    def _release(self, whom: Callable[[_Parked], bool]) -> None:
        with self._changed:
            self._parked = {thread: one for thread, one in self._parked.items() if not whom(one)}
            self._changed.notify_all()


class _SteppedEvent(threading.Event):
    def __init__(self, clock: SteppedClock) -> None:
        super().__init__()
        self._clock = clock

    def set(self) -> None:
        super().set()
        self._clock.tell()

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.wait(1e6 if timeout is None else timeout, self.is_set)
        return self.is_set()


class SteppedSampler(Sampler):
    """The sampler with its thread, its waits by the clock."""

    def __init__(self, stepped: SteppedClock, *of: Any) -> None:
        super().__init__(*of)
        self._stepped = stepped
        self._stop, self._has_begun = _SteppedEvent(stepped), _SteppedEvent(stepped)

    def start(self) -> None:
        self._stepped.samplers.append(self._thread)
        super().start()

    def stop(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Its last reading may take time."""
        self._stop.set()
        self._stepped.wait(devices.sampler.HUNG_S, lambda: not self._thread.is_alive())
        return super().stop()


def stepped(put: Callable[[Any, str, Any], None] = setattr) -> SteppedClock:
    """From now on time is that of this clock for all of this process that asks `time` for it.

    put: `MonkeyPatch.setattr`, where time shall be real again after a test.
    """
    clock = SteppedClock()
    for name, own in (("monotonic", clock.now_s), ("monotonic_ns", clock.now_ns), ("sleep", clock.sleep)):
        put(time, name, own)
    put(devices.meters.polled, "Sampler", partial(SteppedSampler, clock))
    return clock
