"""All that is wrong with a `config.json`, told at once.

A reader stops at the first wrong value. Here the value is noted and taken out, and the rest is read again: the family's
own value stands in its place then. What is wrong with that value is no fault of the file, and is not told. A table of
rope parameters that lacks one that it cannot do without is taken out whole: what follows in it is not told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from engines.errors import EngineError, ProblemsError
from engines.model.config_values import ConfigError
from engines.model.rope_config import KEYS_OF_ROPE, TABLES

MOST_TOLD = 20
MOST_DEEP = 3
"""Tables in tables, as text_config.rope_parameters.factor is."""
Read = TypeVar("Read")


def read_whole(
    raw: Mapping[str, Any],
    read: Callable[[Mapping[str, Any], Collection[str]], Read],
    aliases: Mapping[str, str],
    where: str,
) -> Read:
    """What `read` makes of a config, and of the keys that were taken out of it. aliases: other names of keys. where:
    the file, for the message. Raises `EngineError`, `ProblemsError` for more than one fault."""
    told: list[str] = []
    taken: set[str] = set()
    left: Mapping[str, Any] | None = raw
    while left is not None and len(told) < MOST_TOLD:
        try:
            found = read(left, taken)
        except ConfigError as error:
            keys = {*error.keys}
            if not keys & taken:
                told.append(error.words)
            shorter = _without(left, keys, aliases)
            if shorter is None and keys & KEYS_OF_ROPE:
                # A parameter that is lacking: without all of them it is a rope of the family's own.
                keys |= {*TABLES}
                shorter = _without(left, keys, aliases)
            left, taken = shorter, taken | keys
        else:
            if not told:
                return found
            break
    if len(told) == MOST_TOLD:
        told.append(f"more may be wrong than these {MOST_TOLD}")
    if len(told) == 1:
        raise EngineError(f"{where}: {told[0]}")
    raise ProblemsError(told, f"{where}: ")


def _without(
    raw: Mapping[str, Any], keys: Collection[str], aliases: Mapping[str, str], depth: int = 0
) -> dict[str, Any] | None:
    """The same without these keys, in its tables too; None where it has none of them."""
    left = {name: value for name, value in raw.items() if aliases.get(name, name) not in keys}
    is_shorter = len(left) < len(raw)
    for name, value in left.items() if depth < MOST_DEEP else ():
        if isinstance(value, Mapping) and (inner := _without(value, keys, aliases, depth + 1)) is not None:
            left[name], is_shorter = inner, True
    return left if is_shorter else None
