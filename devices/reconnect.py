"""The wait for a device that went away: a GPU in a reset, a driver that is loaded again, come back after seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable

from devices.base import Clock, DeviceError

RECONNECT_S = 30.0
"""How long a window's start waits for it, as for a phone."""
LOOK_EVERY_S = 1.0

log = logging.getLogger(__name__)


class Reconnection:
    """Opens a lost device again. One that was waited for in vain is looked at once from then on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._was_given_up = False

    def reopen(self, open_again: Callable[[], None], what: str) -> None:
        """Returns when `open_again` did. Raises what it raised last."""
        deadline_s = self._clock.now_s() + (0.0 if self._was_given_up else RECONNECT_S)
        while True:
            try:
                open_again()
            except DeviceError as error:
                if self._clock.now_s() + LOOK_EVERY_S > deadline_s:
                    self._was_given_up = True
                    raise
                log.info("%s; looking for %s again", error, what)
                self._clock.sleep_until_s(self._clock.now_s() + LOOK_EVERY_S)
            else:
                self._was_given_up = False
                return
