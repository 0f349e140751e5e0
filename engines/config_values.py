"""Values of a `config.json`, checked as they are read: what is wrong is named with what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engines.errors import EngineError


def positive_number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise EngineError(f"config.json: {key} must be a number above 0, found {value!r}")
    return float(value)


def optional_number(raw: Mapping[str, Any], key: str) -> float | None:
    """None where the config says null or nothing: the switch is off."""
    return None if raw.get(key) is None else positive_number(raw, key)


def positive_whole(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise EngineError(f"config.json: {key} must be a whole number above 0, found {value!r}")
    return value


def optional_whole(raw: Mapping[str, Any], key: str) -> int | None:
    """None where the config says null or nothing."""
    return None if raw.get(key) is None else positive_whole(raw, key)


def whole(raw: Mapping[str, Any], key: str, default: int) -> int:
    """0 is allowed."""
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise EngineError(f"config.json: {key} must be a whole number, found {value!r}")
    return value


def numbers(raw: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    value = raw.get(key)
    if not isinstance(value, list) or len(value) != count or not all(isinstance(v, int | float) for v in value):
        found = f"{len(value)} values" if isinstance(value, list) else repr(value)
        raise EngineError(f"config.json: {key} must be {count} numbers, found {found}")
    return tuple(float(v) for v in value)
