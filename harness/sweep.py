"""Dotted paths into a plan: `--set` changes what they name, `[sweep]` takes all their values.

engine.prefill_chunk            every engine
engine.tiers.prefill_chunk      the engine named "tiers"
engine.quantise.experts         one component of every engine
workload.limit, device.host.watts_sheet, model.dtype, protocol.repeats
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.plan_values import is_unprintable, shown

Raw = dict[str, Any]
LISTS = ("engine", "workload", "device")
OPTIONAL_TABLES = ("quantise",)
"""Keys of elements that hold a table and may be left out: a path through one names no element."""
MAX_CELLS = 10_000
"""Of a plan that asks for no more: seconds of checking, and weeks of measuring."""
COUNTABLE = 10**18
TOO_MANY = "sweep: makes"
NUMBERED = re.compile(rf"^({'|'.join(LISTS)})\[(\d+)\](?=\.|$)")


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
    swept: Mapping[tuple[str, ...], str] = MappingProxyType({})
    """Keys that the sweep set, and the path by which the plan names them."""

    @property
    def path(self) -> str:
        return self.section if self.position < 0 else f"{self.section}[{self.position}]"


def set_value(raw: Raw, assignment: str) -> None:
    """Applies `a.b=c` in place; c is a TOML value, or else a string. Raises `PathError`."""
    if any(is_unprintable(character) for character in assignment):
        raise PathError("must be one line without control characters; give each value a --set of its own")
    path, equals, text = assignment.partition("=")
    if not equals:
        raise PathError("no '='; write --set protocol.repeats=5")
    if not path.strip():
        raise PathError("names no key; write --set protocol.repeats=5")
    value = parse_value(text.strip())
    # As errors name it: engine[1].threads is engine.1.threads.
    for table, keys in _targets(raw, NUMBERED.sub(r"\1.\2", path.strip())):
        _assign(table, keys, value)


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:
        raise PathError("the value is too large or too deep for a plan") from error


class Axis(NamedTuple):
    """A key of an element, and the values that the sweep gives it. path: as the plan has it."""

    path: str
    keys: list[str]
    values: list[Any]


def expand(raw: Raw, max_cells: int) -> tuple[dict[str, list[Entry]], list[str]]:
    """({"model": [...], "engine": [...], ...}, problems): each element once per combination of its sweep.

    Cells are counted before anything is built; a plan of more than max_cells is left as it is, with a problem.
    """
    entries = {section: _entries(raw, section) for section in ("model", *LISTS)}
    axes: dict[str, list[list[Axis]]] = {section: [[] for _ in found] for section, found in entries.items()}
    problems = []
    sweep = raw.get("sweep", {})
    if not isinstance(sweep, dict):
        problems.append(f"sweep: must be a table of paths to lists, found {shown(sweep)}")
        sweep = {}
    # Later paths see the first value of earlier ones: a swept `technique` has the keys that a later path names.
    first = {section: [e._replace(raw=e.raw) for e in found] for section, found in entries.items()}
    for path, values in flattened(sweep):
        section = path.split(".")[0]
        if section not in entries:
            problems.append(
                f"sweep.{path}: only model, engine, workload and device can be swept; found {shown(section)}"
            )
        elif not isinstance(values, list) or not values:
            problems.append(f"sweep.{path}: must be a list of values to take, found {shown(values)}")
        elif twice := _first_twice(values):
            problems.append(
                f"sweep.{path}: holds {shown(twice[0])} twice; every value makes cells of its own, name it once"
            )
        else:
            try:
                _add_axis(path, [v for v in values if v is not None], first[section], axes[section])
            except PathError as error:
                problems.append(f"sweep.{path}: {error}")
    n_cells = math.prod(
        max(1, sum(math.prod(len(a.values) for a in own) for own in axes[section])) for section in entries
    )
    if n_cells > max_cells:
        told = f"{n_cells:,}" if n_cells < COUNTABLE else "more than 10^18"
        problems.append(
            f"{TOO_MANY} {told} cells, and a plan may have {max_cells:,}; take fewer values, or allow more with"
            " --max-cells"
        )
        return entries, problems
    expanded = {}
    for section, found in entries.items():
        try:
            expanded[section] = [
                e for entry, own in zip(found, axes[section], strict=True) for e in _expanded(entry, own)
            ]
        except PathError as error:
            problems.append(f"sweep.{section}.{error}")
            expanded[section] = found
    return expanded, problems


def _first_twice(values: list[Any]) -> list[Any]:
    """The first value that stands a second time, or nothing. 1 and 1.0 are one value, 1 and true are two."""
    seen = set()
    for value in values:
        key = _hashable(value)
        if value is not None and key in seen:
            return [value]
        seen.add(key)
    return []


def _hashable(value: Any) -> Any:
    if isinstance(value, list):
        return ("list", *map(_hashable, value))
    if isinstance(value, dict):
        return ("table", frozenset((key, _hashable(item)) for key, item in value.items()))
    return (isinstance(value, bool), value)


def _add_axis(path: str, values: list[Any], first: list[Entry], axes: list[list[Axis]]) -> None:
    section, *keys = path.split(".")
    chosen, keys = _choose(first, section, keys)
    if not keys:
        raise PathError(f"names no key; write {path}.KEY")
    if not values:
        return
    positions = {entry.position for entry in chosen}
    if any(
        axis.keys == keys for entry, own in zip(first, axes, strict=True) if entry.position in positions for axis in own
    ):
        raise PathError("another path of the sweep sets the same key of the same element; keep one of them")
    for i, entry in enumerate(first):
        if entry.position in positions:
            first[i] = entry._replace(raw=_with_value(entry.raw, keys, values[0]))
            axes[i].append(Axis(path, keys, values))


def _expanded(entry: Entry, axes: list[Axis]) -> Iterator[Entry]:
    swept = {tuple(axis.keys): axis.path for axis in axes}
    for values in itertools.product(*(axis.values for axis in axes)):
        raw = entry.raw
        for axis, value in zip(axes, values, strict=True):
            raw = _with_value(raw, axis.keys, value)
        suffix = ",".join(f"{axis.keys[-1]}={_short(value)}" for axis, value in zip(axes, values, strict=True))
        yield Entry(entry.section, entry.position, raw, suffix, swept)


def _with_value(table: Raw, keys: list[str], value: Any) -> Raw:
    """The table with another value; what the path does not touch is shared with it."""
    changed = dict(table)
    inner = changed
    for key in keys[:-1]:
        below = inner.get(key, {})
        inner[key] = dict(below) if isinstance(below, dict) else below
        inner = inner[key]
        if not isinstance(inner, dict):
            raise PathError(f"{'.'.join(keys)}: {key} is a value, not a table")
    inner[keys[-1]] = value
    return changed


def flattened(table: Raw, prefix: str = "") -> list[tuple[str, Any]]:
    """A sweep may be written with quoted dotted keys or as nested tables."""
    pairs = []
    for key, value in table.items():
        path = f"{prefix}{key}"
        pairs.extend(flattened(value, f"{path}.") if isinstance(value, dict) else [(path, value)])
    return pairs


def _entries(raw: Raw, section: str) -> list[Entry]:
    found = raw.get(section)
    if isinstance(found, dict):
        return [Entry(section, -1, found, "")]
    if not isinstance(found, list):
        return []
    return [Entry(section, i, item, "") for i, item in enumerate(found) if isinstance(item, dict)]


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
        return " ".join(_short(v) if k == "name" else f"{k}={_short(v)}" for k, v in value.items()) or "{}"
    return str(value)
