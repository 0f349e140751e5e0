"""What all meters share that are read by polling: a sampler between `start` and `stop`, traces out of its rows."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from devices.base import Channel, Clock, DeviceError, InterruptedWindowError, TransientDeviceError
from devices.boundary import library_errors
from devices.sampler import Sampler, find_gaps
from results.records import Method, PowerTrace, TraceKind

Array = NDArray[np.float64]

log = logging.getLogger(__name__)

SETTLE_UPDATES = 5
"""Updates of a fresh counter between its first two readings: enough to know the power before the window."""
METHODS: Final[dict[TraceKind, Method]] = {
    "counter": "counter",
    "power": "integrated power",
    "held": "battery gauge",
}
"""How a measured channel becomes joules."""


class PolledMeter(ABC):
    """A meter whose `read` gives one value per channel. Subclasses set `name`, `method`, and `channels` in `open`.

    A counter with an update period is also read around the window: `results.energy` knows the age of a value from the
    power before it. A slow one must have been seen to tick on both sides; a fresh one needs two readings before.
    """

    name: str
    method: Method
    fresh_on_read: bool = False
    """True where a reading is up to date at any time, so that `mark` at a phase edge is worth its cost."""

    def __init__(self, interval_s: float, clock: Clock) -> None:
        self.channels: tuple[Channel, ...] = ()
        self._interval_s = interval_s
        self._clock = clock
        self._sampler: Sampler | None = None

    @abstractmethod
    def open(self) -> None: ...

    @abstractmethod
    def read(self) -> Sequence[float]:
        """One value per channel, in W or J; a subclass may append what its `traces` reads besides.

        Raises `DeviceError` when the instrument is lost.
        """

    def close(self) -> None:
        if self._sampler is not None:
            sampler, self._sampler = self._sampler, None
            # A lost device was told by `stop`, or is not asked for any more; the other meters still want closing.
            with suppress(DeviceError):
                sampler.stop()

    def start(self) -> None:
        if self._sampler is not None:
            raise DeviceError(f"meter {self.name} is already running; stop it before another window starts")
        sampler = Sampler(self.read, self._interval_s, self._clock)
        with library_errors(self.name, "its reader"):
            sampler.start()
        self._sampler = sampler
        if self.fresh_on_read:
            self._wait(SETTLE_UPDATES * self._update_period_s)
            self.mark()
        else:
            self._wait_for_tick()

    @property
    def _update_period_s(self) -> float:
        return max((c.update_period_s for c in self.channels), default=0.0)

    def _wait_for_tick(self) -> None:
        if self._update_period_s > 0:
            self._wait(self._update_period_s + self._interval_s)

    def _wait(self, duration_s: float) -> None:
        self._clock.sleep_until_s(self._clock.now_s() + duration_s)

    def mark(self) -> None:
        if self.fresh_on_read and self._sampler is not None:
            self._sampler.mark()

    def stop(self) -> Sequence[PowerTrace]:
        if self._sampler is None:
            raise DeviceError(f"meter {self.name} is not running; start it first")
        if not self.fresh_on_read:
            self._wait_for_tick()
        sampler, self._sampler = self._sampler, None
        try:
            # Whatever stands in a sensor's file, or its library makes of it.
            with library_errors(self.name, "its reader"):
                return self.traces(*sampler.stop())
        except InterruptedWindowError:
            raise
        except TransientDeviceError as error:
            raise InterruptedWindowError(str(error), self._kept(sampler)) from error

    def _kept(self, sampler: Sampler) -> Sequence[PowerTrace]:
        """Traces of what was received."""
        times_s, values = sampler.received()
        try:
            return self.traces(times_s, values) if len(times_s) else ()
        except InterruptedWindowError as error:
            return error.traces
        except DeviceError as error:
            log.info("%s: nothing to keep: %s", self.name, error)
            return ()

    def traces(self, times_s: Array, values: Array) -> Sequence[PowerTrace]:
        """The window's traces. values: [readings, what `read` gives]."""
        gaps_s = find_gaps(times_s, self._interval_s)
        return [
            channel.trace(self.name, self.method_of(channel), times_s, values[:, i], self._interval_s, gaps_s)
            for i, channel in enumerate(self.channels)
        ]

    def method_of(self, channel: Channel) -> Method:
        """The meter's, where it has one kind of channel only."""
        return self.method
