"""Meters of devices that go away and come back: a GPU in a reset, a driver that is loaded again.

Their old handles do not come back to life. The start of a window waits for them; in a recording they are looked for
while it goes on, and read again from then on: the readings before and behind the gap are one trace.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Sequence

from devices.base import Clock, DeviceError, TransientDeviceError
from devices.meters.polled import PolledMeter
from devices.reconnect import Reconnection

IN_READING_S = 1.0
"""So long a reading is waited for before new handles take the place of those that it uses."""

log = logging.getLogger(__name__)


class LosableMeter(PolledMeter):
    """Subclasses read in `read_now`, and open again in `reopen`."""

    def __init__(self, interval_s: float, clock: Clock) -> None:
        super().__init__(interval_s, clock)
        self._is_lost = False
        self._are_handles_old = False
        """Of a library that was opened again since, and may mean another device by them."""
        self._reconnection = Reconnection(clock)
        self._handles = threading.Lock()
        """Held while they are used, or replaced: the sampler reads on a thread of its own."""

    @abstractmethod
    def read_now(self) -> Sequence[float]:
        """As `read`. Raises `TransientDeviceError` where the device is lost."""

    @abstractmethod
    def reopen(self) -> None:
        """New handles of the same devices in the place of the old ones, which stay where this fails.

        Raises `DeviceError`.
        """

    def read(self) -> Sequence[float]:
        if not self._handles.acquire(blocking=False):
            raise TransientDeviceError(f"{self.name}: it is being opened again, or another reading hangs")
        try:
            if self._are_handles_old:
                raise TransientDeviceError(f"{self.name}: what was lost is not there again")
            return self.read_now()
        except TransientDeviceError:
            self._is_lost = True
            raise
        finally:
            self._handles.release()

    def start(self) -> None:
        """What was lost in the window before is waited for."""
        if self._is_lost:
            self._reconnection.reopen(self._open_again, f"the devices of {self.name}")
        super().start()

    def tend(self) -> str | None:
        """Looks once for what was lost. The sampler goes on meanwhile, and reads it from then on."""
        if self._sampler is None or not self._is_lost:
            return None
        try:
            self._open_again()
        except DeviceError as error:
            return str(error)
        log.warning("%s: what was lost is there again; what was read until then is kept", self.name)
        return None

    def _open_again(self) -> None:
        if not self._handles.acquire(timeout=IN_READING_S):
            raise TransientDeviceError(f"{self.name}: a reading has not come back; is the driver hung?")
        try:
            self._are_handles_old = True
            self.reopen()
            self._is_lost = self._are_handles_old = False
        finally:
            self._handles.release()
