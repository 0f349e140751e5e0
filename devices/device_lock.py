"""One process a device: two that drive one phone ruin each other's figures.

A file in the user's state folder, named after the device, is locked by whoever has the device open. The system lets go
of the lock when its process ends, however it ends; the file stays.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from devices.base import DeviceError

FOLDER = "locks"
LONGEST_NAME = 200


class DeviceLock:
    """Of one device, by its serial. This process may take it several times."""

    _held: dict[Path, tuple[int, int]] = {}  # noqa: RUF012 - of the process: path -> (descriptor, times taken)

    def __init__(self, state_folder: Path, device: str, through: str = "") -> None:
        """through: the server that has the device; others know other devices by the same name."""
        self._path = state_folder / FOLDER / f"{quote(device + through, safe='')[:LONGEST_NAME]}.lock"
        self._device = device
        self._taken = False

    def take(self) -> None:
        """Raises `DeviceError` where another process has the device."""
        if self._taken:
            return
        descriptor, n = self._held.get(self._path, (-1, 0))
        if n == 0:
            descriptor = self._lock()
        self._held[self._path] = descriptor, n + 1
        self._taken = True

    def _lock(self) -> int:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DeviceError(
                f"{self._device}: its lock {self._path} cannot be made ({error}); JOULEBENCH_STATE names another folder"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            said = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            raise DeviceError(
                f"{self._device} is used by {said or 'another process'}; two that drive one device ruin each other's"
                " figures: wait for it, or end it"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode(), 0)
        return descriptor

    def release(self) -> None:
        """May be called again."""
        if not self._taken:
            return
        self._taken = False
        descriptor, n = self._held[self._path]
        if n > 1:
            self._held[self._path] = descriptor, n - 1
            return
        del self._held[self._path]
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)
