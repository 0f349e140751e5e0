"""What phones of every kind share as devices: gates before each trial, meters, and facts once they are open."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from devices.base import Clock, DeviceError, Meter, TransientDeviceError
from devices.gates import CountdownListener, Gates, wait_until_ready

FactsT = TypeVar("FactsT")

WATCH_EVERY_S = 5.0
"""Between two looks at a phone's state in a window: each costs it some 0.1 s of one core."""

PATIENCE_S, LOOK_EVERY_S = 30.0, 1.0
"""A phone whose link is there, and that says nothing of use, is asked again for so long: it is locked, or restarts."""

UNIT_DIGITS = 12

log = logging.getLogger(__name__)


def unit_of(serial: str | None) -> str | None:
    """What tells two phones of one model apart in a run's records, which may be given to others: a digest."""
    return hashlib.sha256(serial.encode()).hexdigest()[:UNIT_DIGITS] if serial else None


class GatedPhone(ABC, Generic[FactsT]):
    """A phone that is measured only while nothing keeps it from being so. `open` sets its facts and its meters.

    One that has `watched_state` too is a `WatchesState`; or its meter sees the state itself (`SeesState`).
    """

    watch_every_s: float | None = WATCH_EVERY_S

    def __init__(
        self, name: str, interval_s: float, clock: Clock, gates: Gates | None, on_wait: CountdownListener | None
    ) -> None:
        """interval_s: between readings. on_wait: hears the countdown while the gates are shut."""
        self.name = name
        self.meters: list[Meter] = []
        self._interval_s = interval_s
        self._clock = clock
        self._gates = gates or Gates()
        self._on_wait = on_wait
        self._facts: FactsT | None = None

    @abstractmethod
    def why_not_ready(self) -> str | None:
        """What keeps the phone from being measured now, with the remedy; None where nothing does.

        Raises `DeviceError`.
        """

    @abstractmethod
    def await_link(self) -> None:
        """Looks for a phone that went away, up to a limit. Raises `DeviceError`."""

    def wait_until_ready(self) -> None:
        """Before every trial, so that all start alike. Also for a phone that restarts, or whose link is gone for a
        moment. Raises `NotReadyError`, `DeviceError`."""
        end_s = None
        while True:
            self.await_link()
            try:
                return self._wait_at_gates()
            except TransientDeviceError as error:
                end_s = end_s or self._clock.now_s() + PATIENCE_S
                if self._clock.now_s() + LOOK_EVERY_S > end_s:
                    raise
                log.info("%s; looking for it", error)
            self._clock.sleep_until_s(self._clock.now_s() + LOOK_EVERY_S)

    def _wait_at_gates(self) -> None:
        wait_until_ready(self.name, self.why_not_ready, self._gates, self._clock, self._on_wait)

    @property
    def facts(self) -> FactsT:
        """What the phone is. Raises `DeviceError` before it is open."""
        if self._facts is None:
            raise DeviceError(f"{self.name} is not open; open it first")
        return self._facts

    def close(self) -> None:
        for meter in self.meters:
            meter.close()
        self.meters.clear()
