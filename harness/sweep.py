"""Dotted paths into a plan: `--set` changes what they name, `[sweep]` takes all their values.

engine.prefill_chunk            every engine
engine.tiers.prefill_chunk      the engine named "tiers"
engine.quantise.experts         one component of every engine
workload.limit, device.host.watts_sheet, model.dtype, protocol.repeats
"""

from __future__ import annotations

import copy
import itertools
import tomllib
from typing import Any, NamedTuple

Raw = dict[str, Any]
LISTS = ("engine", "workload", "device")
OPTIONAL_TABLES = ("quantise",)
"""Keys of elements that hold a table and may be left out: a path through one names no element."""


class PathError(Exception):
    """A path that names nothing: what, and what there is."""


class Entry(NamedTuple):
    """One element of a plan's list after the sweep, with its place in the file."""

    section: str
    position: int
    """-1 for a table that stands once, such as [model]."""
    raw: Raw
    suffix: str
    """What the sweep set here, for its name: "prefill_chunk=256"."""

    @property
    def path(self) -> str:
        return self.section if self.position < 0 else f"{self.section}[{self.position}]"


def set_value(raw: Raw, assignment: str) -> None:
    """Applies `a.b=c` in place; c is a TOML value, or else a string. Raises `PathError`."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise PathError("no '='; write --set protocol.repeats=5")
    for table, keys in _targets(raw, path.strip()):
        _assign(table, keys, parse_value(text.strip()))


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def expand(raw: Raw) -> tuple[dict[str, list[Entry]], list[str]]:
    """({"model": [...], "engine": [...], ...}, problems): each element once per combination of its sweep."""
    entries = {section: _entries(raw, section) for section in ("model", *LISTS)}
    problems = []
    sweep = raw.get("sweep", {})
    if not isinstance(sweep, dict):
        return entries, [f"sweep: must be a table of paths to lists, found {sweep!r}"]
    for path, values in _flatten(sweep):
        section = path.split(".")[0]
        if section not in entries:
            problems.append(f"sweep.{path}: only model, engine, workload and device can be swept; found {section!r}")
        elif not isinstance(values, list) or not values:
            problems.append(f"sweep.{path}: must be a list of values to take, found {values!r}")
        elif twice := [v for i, v in enumerate(values) if v in values[:i]]:
            problems.append(f"sweep.{path}: holds {twice[0]!r} twice; every value makes cells of its own, name it once")
        else:
            try:
                entries[section] = _expand_one(entries[section], section, path, values)
            except PathError as error:
                problems.append(f"sweep.{path}: {error}")
    return entries, problems


def _flatten(table: Raw, prefix: str = "") -> list[tuple[str, Any]]:
    """A sweep may be written with quoted dotted keys or as nested tables."""
    pairs = []
    for key, value in table.items():
        path = f"{prefix}{key}"
        pairs.extend(_flatten(value, f"{path}.") if isinstance(value, dict) else [(path, value)])
    return pairs


def _entries(raw: Raw, section: str) -> list[Entry]:
    found = raw.get(section)
    if isinstance(found, dict):
        return [Entry(section, -1, found, "")]
    if not isinstance(found, list):
        return []
    return [Entry(section, i, item, "") for i, item in enumerate(found) if isinstance(item, dict)]


def _expand_one(entries: list[Entry], section: str, path: str, values: list[Any]) -> list[Entry]:
    keys = path.split(".")[1:]
    chosen, keys = _choose(entries, section, keys)
    if not keys:
        raise PathError(f"names no key; write {path}.KEY")
    expanded = []
    for entry in entries:
        if entry not in chosen:
            expanded.append(entry)
            continue
        for value in values:
            changed = copy.deepcopy(entry.raw)
            _assign(changed, keys, value)
            told = f"{keys[-1]}={_short(value)}"
            suffix = f"{entry.suffix},{told}" if entry.suffix else told
            expanded.append(Entry(section, entry.position, changed, suffix))
    return expanded


def _targets(raw: Raw, path: str) -> list[tuple[Raw, list[str]]]:
    """Tables that a path reaches, with the keys left to follow in each."""
    section, *keys = path.split(".")
    if section not in LISTS:
        return [(raw, [section, *keys])]
    chosen, keys = _choose(_entries(raw, section), section, keys)
    if not keys:
        raise PathError(f"names no key; write {path}.KEY=VALUE")
    return [(entry.raw, keys) for entry in chosen]


def _choose(entries: list[Entry], section: str, keys: list[str]) -> tuple[list[Entry], list[str]]:
    """The elements a path means: one by its name or number, else all. Device names hold no dot but may hold a colon."""
    if not entries:
        raise PathError(f"the plan has no [[{section}]]")
    if section in LISTS and keys:
        named = [e for e in entries if keys[0] in (e.raw.get("name"), e.raw.get("label"), str(e.position))]
        if named:
            return named, keys[1:]
        if len(keys) > 1 and keys[0] not in OPTIONAL_TABLES and not any(keys[0] in e.raw for e in entries):
            known = ", ".join(str(e.raw.get("name", e.position)) for e in entries)
            raise PathError(f"no {section} is named {keys[0]!r} and none has such a key; there are {known}")
    return entries, keys


def _assign(table: Raw, keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise PathError(f"{'.'.join(keys)}: {key} is a value, not a table")
    table[keys[-1]] = value


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(map(_short, value))
    if isinstance(value, dict):
        return " ".join(_short(v) if k == "name" else f"{k}={_short(v)}" for k, v in value.items())
    return str(value)


def product(*sections: list[Any]) -> list[tuple[Any, ...]]:
    """The matrix in the order of the file, the last section fastest."""
    return list(itertools.product(*sections))
