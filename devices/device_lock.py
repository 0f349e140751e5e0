"""One process a device: two that drive one phone ruin each other's figures.

A file in the user's state folder, named after the device, is locked by whoever has the device open. The system lets go
of the lock when its process ends, however it ends; the file stays. A process may hand its locks to one that it starts
(`handed_over`): the lock is free once both have ended.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from devices.base import DeviceError

FOLDER = "locks"
LONGEST_NAME = 200
HELD_VARIABLE = "JOULEBENCH_HELD_LOCKS"
"""In the environment of a process that was handed locks: as JSON, the descriptor of each path."""


class BusyError(Exception):
    """Another process has the lock. holder: it, in words."""

    def __init__(self, holder: str) -> None:
        super().__init__(holder)
        self.holder = holder


class DeviceBusyError(DeviceError):
    """Another process has the device."""


def lock_file(path: Path) -> int:
    """The descriptor of a file that this process alone has from now on. Raises `BusyError`, `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        said = os.read(descriptor, 200).decode(errors="replace").strip()
        os.close(descriptor)
        raise BusyError(said or "another process") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} since {datetime.now():%Y-%m-%d %H:%M:%S}\n".encode(), 0)
    return descriptor


class DeviceLock:
    """Of one device. This process may take it several times."""

    _held: dict[Path, tuple[int, int]] = {}  # noqa: RUF012 - of the process: path -> (descriptor, times taken)

    def __init__(self, state_folder: Path, device: str, known_as: str | None = None) -> None:
        """known_as: to all who lock it, where one device has several names, or several have one."""
        self._path = state_folder / FOLDER / f"{quote(known_as or device, safe='')[:LONGEST_NAME]}.lock"
        self._device = device
        self._taken = False

    def take(self) -> None:
        """Raises `DeviceBusyError` where another process has the device, `DeviceError` where no lock can be made."""
        if self._taken:
            return
        descriptor, n = self._held.get(self._path, (-1, 0))
        if n == 0:
            descriptor = self._lock()
        self._held[self._path] = descriptor, n + 1
        self._taken = True

    def _lock(self) -> int:
        inherited = _inherited(self._path)
        if inherited is not None:
            return inherited
        try:
            return lock_file(self._path)
        except BusyError as error:
            raise DeviceBusyError(
                f"{self._device} is used by {error.holder}; two that drive one device ruin each other's"
                " figures: wait for it, or end it"
            ) from error
        except OSError as error:
            raise DeviceError(
                f"{self._device}: its lock {self._path} cannot be made ({error}); JOULEBENCH_STATE names another folder"
            ) from error

    def held(self) -> tuple[Path, int]:
        """The file and its descriptor, while it is taken."""
        return self._path, self._held[self._path][0]

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
        if _inherited(self._path) == descriptor:
            return  # it is still the one's that handed it over
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)


def handed_over(locks: Iterable[DeviceLock]) -> tuple[list[int], dict[str, str]]:
    """(descriptors that a new process must inherit, what its environment must say), so that it has these locks too."""
    held = dict(lock.held() for lock in locks)
    return list(held.values()), {HELD_VARIABLE: json.dumps({str(path): number for path, number in held.items()})}


def _inherited(path: Path) -> int | None:
    """The descriptor by which whoever started this process handed the lock over; None where it did not."""
    try:
        number = json.loads(os.environ.get(HELD_VARIABLE, "{}")).get(str(path))
        same = isinstance(number, int) and os.path.samestat(os.fstat(number), os.stat(path))
    except (OSError, ValueError, AttributeError):
        return None
    return number if same else None
