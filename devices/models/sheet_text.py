"""A sheet as TOML, to be read again by `devices.models.sheet.parse_sheet`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from devices.models.sheet import Sheet


def sheet_text(sheet: Sheet, remarks: tuple[str, ...] = ()) -> str:
    """remarks: lines of comment at the top."""
    content = sheet.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    lines = [f"# {' '.join(remark.split())}" for remark in remarks]
    return "\n".join([*lines, *([""] if lines else []), *_table(content, ())]) + "\n"


def _table(content: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """Its own values, then the tables in it."""
    own = {key: value for key, value in content.items() if not _is_table(value)}
    inner = {key: value for key, value in content.items() if _is_table(value)}
    if path and (own or not inner):
        yield f"[{'.'.join(map(_key, path))}]"
    for key, value in own.items():
        yield f"{_key(key)} = {_value(value)}"
    if (path and (own or not inner)) or own:
        yield ""
    for key, value in inner.items():
        yield from _table(value, (*path, key))


def _is_table(value: object) -> bool:
    """A figure or a span is written on one line."""
    return isinstance(value, dict) and (not value or any(isinstance(one, dict | list) for one in value.values()))


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _value(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A TOML string is a JSON string, but for DEL, which JSON leaves as it is.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_value(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return str(value)
