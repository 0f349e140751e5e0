"""What is wrong between the tables of a sheet: ends of links, units of memories, watts of one unit.

It reads the sheet as its TOML has it, before the tables themselves are looked at, so that a wrong figure in one of them
hides none of this. What has not the form of a sheet is left out here: it is told where its own table is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from devices.models.links import FILE, NUMBERED, TAKEN, direction_between, is_end_of, is_unit

MOST_ALIKE = 64
"""Units that one table may stand for."""
MOST_UNITS, MOST_LINKS = 256, 32
"""Tables of a sheet."""


class Fault(NamedTuple):
    """key: of the table."""

    key: str
    words: str


def faults(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """In the order in which a sheet has its tables."""
    units = _table(raw.get("units"))
    known = set(_names(units))
    for name, unit in units.items():
        yield from (Fault(f"units.{name}", words) for words in _watts(_table(unit)))
    yield from (Fault("stands_in", words) for words in _stand_ins(_table(raw.get("stands_in")), known))
    for end in _table(raw.get("memories")):
        if not is_end_of(end, known):
            yield Fault("memories", f"{end}: the sheet has no such unit; name one of its units")
    joined = known | set(_table(raw.get("stands_in")))
    yield from (Fault("links", words) for words in _links(_table(raw.get("links")), joined))


def _names(units: Mapping[str, Any]) -> Iterator[str]:
    """Each unit by its own name."""
    for name, unit in list(units.items())[:MOST_UNITS]:
        if name in NUMBERED:
            count = _table(unit).get("count")
            # A count that is none is told of the unit itself; here one unit stands for them.
            n = count if isinstance(count, int) and 1 <= count <= MOST_ALIKE else 1
            yield from (f"{name}:{i}" for i in range(n))
        else:
            yield name


def _watts(unit: Mapping[str, Any]) -> Iterator[str]:
    busy_w = _value(unit.get("busy_w"))
    for key, when in (("waiting_w", "waits"), ("idle_w", "is idle")):
        rest_w = _value(unit.get(key))
        if busy_w is not None and rest_w is not None and rest_w > busy_w >= 0:
            yield f"{key} {rest_w:g} is above busy_w {busy_w:g}: it draws no more while it {when}; correct one"


def _stand_ins(stands_in: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    for one, other in stands_in.items():
        if one in known:
            yield f"{one}: the sheet has that unit; remove the line"
        if isinstance(other, str) and other not in known:
            yield f"{one}: {other} is none of the sheet's units; name one of {', '.join(sorted(known))}"


def _links(links: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    ends = {
        name: (_ends(_table(link).get("source")), _ends(_table(link).get("target")))
        for name, link in list(links.items())[:MOST_LINKS]
    }
    for name, (source, target) in ends.items():
        for end in dict.fromkeys((*source, *target)):
            if end != FILE and not is_unit(end):
                continue
            if not is_end_of(end, known):
                yield f"{name}: ends at {end}, and the sheet has no such unit; name one of its units"
            elif end in source and end in target and not _are_several(end, known):
                yield f"{name}: joins {end} with itself; name another unit as source or target"
        if name in TAKEN:
            yield f"{name}: no link can be called so; give it another name"
    for one, two in combinations(sorted(known), 2):
        joining = [name for name, sides in ends.items() if direction_between(one, two, *sides) is not None]
        if len(joining) > 1:
            yield f"{' and '.join(joining)} both join {one} and {two}; leave one"


def _are_several(end: str, known: set[str]) -> bool:
    """Whether units of that kind may be joined with each other."""
    return sum(unit.startswith(f"{end}:") for unit in known) > 1


def _ends(side: object) -> tuple[str, ...]:
    listed = [side] if isinstance(side, str) else side if isinstance(side, list | tuple) else []
    return tuple(one for one in listed[:MOST_ALIKE] if isinstance(one, str))


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _value(figure: object) -> float | None:
    """None of what is no figure."""
    value = _table(figure).get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
