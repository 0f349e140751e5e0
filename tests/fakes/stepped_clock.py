"""Time that passes only where the test's own thread waits, for meters that are read by samplers on theirs.

No second is waited for, and a busy machine is late for nothing: a sampler's deadline comes at its time, and the test
goes on when all samplers wait for their next. Readings take no time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import devices.meters.polled
from devices.sampler import Sampler

BEGUN_S = 1000.013
"""Between two ticks of any counter."""


class SteppedClock:
    def __init__(self) -> None:
        self._now_s = 0.0
        self._stepping = threading.current_thread()
        self._changed = threading.Condition()
        self._parked: dict[threading.Thread, float] = {}
        """Threads that wait, each with the time until when."""
        self._later: list[tuple[float, Callable[[], object]]] = []
        self.samplers: list[threading.Thread] = []
        self.each_step: list[Callable[[], object]] = []
        """What shows the new time: files of counters, what a library is told."""
        self._set(BEGUN_S)

    def now_s(self) -> float:
        return self._now_s

    def now_ns(self) -> int:
        return round(self._now_s * 1e9)

    def sleep(self, seconds: float) -> None:
        self.wait(seconds, lambda: False)

    def later(self, after_s: float, what: Callable[..., object], *of: object, **named: object) -> None:
        """What happens so much later, between two readings."""
        self._later.append((self._now_s + after_s, lambda: what(*of, **named)))

    def wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        until_s = self._now_s + max(0.0, seconds)
        if threading.current_thread() is self._stepping:
            self._step(until_s, is_over)
        else:
            self._park(until_s, is_over)

    def tell(self) -> None:
        """Those that wait look again whether it is over."""
        with self._changed:
            self._changed.notify_all()

    def _step(self, until_s: float, is_over: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                # One that ends by an error tells nobody: it is looked for.
                while not all(thread in self._parked or not thread.is_alive() for thread in self.samplers):
                    self._changed.wait(0.01)
            if is_over():
                return
            next_s = min((*self._parked.values(), *(at_s for at_s, _ in self._later)), default=math.inf)
            self._set(max(self._now_s, min(next_s, until_s)))
            if next_s > until_s:
                return
            due = [what for at_s, what in self._later if at_s <= self._now_s]
            self._later = [(at_s, what) for at_s, what in self._later if at_s > self._now_s]
            for what in due:
                what()
            with self._changed:
                self._parked = {thread: at_s for thread, at_s in self._parked.items() if at_s > self._now_s}
                self._changed.notify_all()

    def _park(self, until_s: float, is_over: Callable[[], bool]) -> None:
        own = threading.current_thread()
        with self._changed:
            self._parked[own] = until_s
            self._changed.notify_all()
            self._changed.wait_for(lambda: is_over() or own not in self._parked)
            self._parked.pop(own, None)

    def _set(self, now_s: float) -> None:
        # Whole nanoseconds, as clocks count, and none too early for whoever waits.
        self._now_s = math.ceil(now_s * 1e9) / 1e9
        for show in self.each_step:
            show()


class _SteppedEvent(threading.Event):
    def __init__(self, clock: SteppedClock) -> None:
        super().__init__()
        self._clock = clock

    def set(self) -> None:
        super().set()
        self._clock.tell()

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.wait(math.inf if timeout is None else timeout, self.is_set)
        return self.is_set()


def stepped(put: Callable[[Any, str, Any], None] = setattr) -> SteppedClock:
    """From now on time is that of this clock for all of this process that asks `time` for it.

    put: `MonkeyPatch.setattr`, where time shall be real again after a test.
    """
    clock = SteppedClock()

    class SteppedSampler(Sampler):
        """The sampler with its thread, its waits by the clock."""

        def __init__(self, *of: Any) -> None:
            super().__init__(*of)
            self._stop, self._has_begun = _SteppedEvent(clock), _SteppedEvent(clock)

        def start(self) -> None:
            clock.samplers.append(self._thread)
            super().start()

    for name, own in (("monotonic", clock.now_s), ("monotonic_ns", clock.now_ns), ("sleep", clock.sleep)):
        put(time, name, own)
    put(devices.meters.polled, "Sampler", SteppedSampler)
    return clock
