"""Single values from files of sysfs: what they hold, or why they cannot be had."""

from __future__ import annotations

import os
from pathlib import Path

from devices.base import GoneError, MeterUnavailableError

LONGEST_VALUE_BYTES = 64


def read_value(path: Path) -> bytes:
    """A short value in one read, as sysfs gives it: a fifth of the time of `Path.read_text`. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, LONGEST_VALUE_BYTES)
    finally:
        os.close(descriptor)


def read_word(path: Path) -> str | None:
    """A file's text without its end of line; None where it is not there or not for us."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_number(path: Path) -> float:
    """A number that a sensor shows now. Raises `DeviceError`; `MeterUnavailableError` where permission is missing."""
    try:
        return float(read_value(path))
    except PermissionError as error:
        raise MeterUnavailableError(
            f"{path} is readable by root only; run as root, or once: sudo chmod a+r {path}"
        ) from error
    except (OSError, ValueError) as error:
        raise GoneError(f"{path} vanished or is unreadable ({error}); was the sensor unplugged?") from error
