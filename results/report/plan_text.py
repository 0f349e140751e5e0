"""A plan as TOML text, for reading and for running it again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def toml_text(table: Mapping[str, Any]) -> str:
    """TOML of nested mappings, lists and scalars. TOML has no null: a None becomes a comment."""
    return "\n".join(_lines(table, ())).strip() + "\n"


def _lines(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    nested = {k: v for k, v in table.items() if isinstance(v, Mapping) or _is_table_array(v)}
    for key, value in table.items():
        if key not in nested:
            yield f"# {_key(key)} is not set" if value is None else f"{_key(key)} = {value_text(value)}"
    for key, value in nested.items():
        name = ".".join(_key(part) for part in (*path, key))
        for entry in [value] if isinstance(value, Mapping) else value:
            yield ""
            yield f"[{name}]" if isinstance(value, Mapping) else f"[[{name}]]"
            yield from _lines(entry, (*path, key))


def _is_table_array(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else value_text(key)


def value_text(value: Any) -> str:
    """JSON's strings, numbers and booleans are TOML's too, but for lists with None and tables in lists."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {value_text(v)}" for k, v in value.items() if v is not None) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(v) for v in value if v is not None) + "]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, bool | int | str):
        # TOML forbids a raw DEL; JSON leaves it alone.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(str(value))
