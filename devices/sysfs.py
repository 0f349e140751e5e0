"""Single values from files of sysfs: what they hold, or why they cannot be had."""

from __future__ import annotations

from pathlib import Path

from devices.base import DeviceError, MeterUnavailableError


def read_word(path: Path) -> str | None:
    """A file's text without its end of line; None where it is not there or not for us."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def read_number(path: Path) -> float:
    """A number that a sensor shows now. Raises `DeviceError`; `MeterUnavailableError` where permission is missing."""
    try:
        return float(path.read_text())
    except PermissionError as error:
        raise MeterUnavailableError(
            f"{path} is readable by root only; run as root, or once: sudo chmod a+r {path}"
        ) from error
    except (OSError, ValueError) as error:
        raise DeviceError(f"{path} vanished or is unreadable ({error}); was the sensor unplugged?") from error
