"""Values of a `config.json`, checked as they are read: what is wrong is named with what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from engines.errors import EngineError
from results.printable import n_digits

LARGEST_NUMBER = 1e30
LARGEST_WHOLE = 2**31 - 1
"""No number and no size of a model is beyond these; what is would only overflow, or run out of memory, further on."""


class ConfigError(EngineError):
    """What is wrong with one value, or between some. words: without the file. keys: of those values."""

    def __init__(self, words: str, *keys: str) -> None:
        super().__init__(f"config.json: {words}")
        self.words, self.keys = words, keys


def positive_number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if not is_number(value) or value <= 0:
        raise ConfigError(f"{key} must be a number above 0, found {told(value)}", key)
    return float(value)


def optional_number(raw: Mapping[str, Any], key: str) -> float | None:
    """None where the config says null or nothing: the switch is off."""
    return None if raw.get(key) is None else positive_number(raw, key)


def positive_whole(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 < value <= LARGEST_WHOLE:
        raise ConfigError(f"{key} must be a whole number above 0, found {told(value)}", key)
    return value


def optional_whole(raw: Mapping[str, Any], key: str) -> int | None:
    """None where the config says null or nothing."""
    return None if raw.get(key) is None else positive_whole(raw, key)


def whole(raw: Mapping[str, Any], key: str, default: int) -> int:
    """0 is allowed."""
    value = raw.get(key, default)
    if type(value) is not int or not 0 <= value <= LARGEST_WHOLE:
        raise ConfigError(f"{key} must be a whole number from 0, found {told(value)}", key)
    return value


def numbers(
    raw: Mapping[str, Any], key: str, count: int, whose: str, counted_by: Sequence[str] = ()
) -> tuple[float, ...]:
    """whose: what has one of them each, for the message. counted_by: keys that say how many."""
    value = raw.get(key)
    if not isinstance(value, list) or len(value) != count or not all(map(is_number, value)):
        found = f"{len(value)} values" if isinstance(value, list) else told(value)
        raise ConfigError(f"{key} must be {count} numbers, {whose}, found {found}", key, *counted_by)
    return tuple(float(v) for v in value)


def wholes(raw: Mapping[str, Any], key: str) -> list[int]:
    """A list of numbers from 0 on; nothing is an empty one."""
    value = raw.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(type(v) is int and 0 <= v <= LARGEST_WHOLE for v in value):
        raise ConfigError(f"{key} must be a list of whole numbers from 0, found {told(value)}", key)
    return value


def per_layer(listed: Any, key: str, n_layers: int) -> list[Any]:
    if not isinstance(listed, list) or len(listed) < n_layers:
        words = f"{key} must name {n_layers} layers, found {told(listed)}; num_hidden_layers says how many"
        raise ConfigError(words, key, "num_hidden_layers")
    return listed[:n_layers]


def switch(raw: Mapping[str, Any], key: str, default: bool | None = None) -> bool:
    """Some published configs write 0 and 1, or a number that is not 0. default: where there is no such key; null is an
    error, for families differ in what they take it for."""
    value = raw.get(key, default)
    if not isinstance(value, bool | int):
        raise ConfigError(f"{key} must be true or false, found {told(value)}", key)
    return bool(value)


def table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; null and nothing are an empty one."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be an object, found {told(value)}", key)
    return value


def is_number(value: Any) -> TypeGuard[int | float]:
    """JSON as Python reads it knows NaN, infinities, and whole numbers beyond all floats: none compares as smaller."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST_NUMBER


def told(value: Any) -> str:
    """As much of a value as a message has room for, and why a number is refused that looks like one."""
    if type(value) is int and abs(value) > LARGEST_WHOLE:
        return f"a number of {n_digits(value)} digits, beyond {LARGEST_WHOLE}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
