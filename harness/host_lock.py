"""One process measures this machine at a time: two runs on `host` would slow each other, and mark or spoil both.

Phones are locked where they are opened (`devices`); the host is locked for the whole of a run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from devices.base import DeviceError
from devices.device_lock import DeviceBusyError, DeviceLock
from harness.state import state_folder

HOST = "host"
LOOK_EVERY_S = 0.5

log = logging.getLogger(__name__)


@contextmanager
def host_lock(devices: Iterable[str], on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Held while the block runs, where one of the devices is this machine.

    on_wait: told once that, and for whom, it waits; None: it does not wait. Raises `DeviceBusyError`. A state folder
    that cannot be written is a warning: what is measured is right without a lock, if nobody else measures.
    """
    if HOST not in set(devices):
        yield
        return
    lock = DeviceLock(state_folder(), HOST)
    told = False
    while True:
        try:
            lock.take()
            break
        except DeviceBusyError as error:
            if on_wait is None:
                raise
            if not told:
                on_wait(str(error))
                told = True
            time.sleep(LOOK_EVERY_S)
        except DeviceError as error:
            log.warning("%s; without it nothing keeps a second run from this machine", error)
            break
    try:
        yield
    finally:
        lock.release()
