"""What is wrong between the tables of a sheet: units and clusters, ends of links, units of memories, watts of one unit.

It reads the sheet as its TOML has it, before the tables themselves are looked at, so that a wrong figure in one of them
hides none of this. What has not the form of a sheet is left out here: it is told where its own table is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from devices.models.links import FILE, NUMBERED, TAKEN, direction_between, is_end_of, is_unit
from devices.toml_records import Fault

MOST_ALIKE = 64
"""Units that one table may stand for."""
MOST_UNITS, MOST_LINKS = 256, 32
"""Tables of a sheet."""


def faults(raw: Mapping[str, Any]) -> Iterator[Fault]:
    """In the order in which a sheet has its tables."""
    units = _table(raw.get("units"))
    known = set(_names(units))
    if isinstance(raw.get("units"), Mapping):
        yield from (Fault("units", words) for words in _units(units))
    for name, unit in units.items():
        yield from (Fault(f"units.{name}", words) for words in _watts(_table(unit)))
    yield from (Fault("stands_in", words) for words in _stand_ins(_table(raw.get("stands_in")), known))
    for end in _table(raw.get("memories")):
        if not is_end_of(end, known):
            yield Fault("memories", f"{end}: the sheet has no such unit; name one of its units")
    joined = known | set(_table(raw.get("stands_in")))
    yield from (Fault("links", words) for words in _links(_table(raw.get("links")), joined))
    clusters = _table(raw.get("clusters"))
    yield from (Fault("clusters", words) for words in _clusters(clusters, units))
    yield from (Fault("states", words) for words in _states(_table(raw.get("states")), clusters))


def _names(units: Mapping[str, Any]) -> Iterator[str]:
    """Each unit by its own name."""
    for name, unit in list(units.items())[:MOST_UNITS]:
        if name in NUMBERED:
            # A count that is none is told of the unit itself; here one unit stands for them.
            yield from (f"{name}:{i}" for i in range(_count(unit, "count") or 1))
        else:
            yield name


def _units(units: Mapping[str, Any]) -> Iterator[str]:
    seen: set[str] = set()
    for name, unit in list(units.items())[:MOST_UNITS]:
        has_count = "count" in _table(unit)
        if name in NUMBERED and not has_count:
            yield f"{name}: such units are numbered; say how many with count, or name it {name}:0"
        elif name not in NUMBERED and has_count:
            yield f"{name}: count is of tables of units alike, ndp, rank or core; remove the line"
        names = set(_names({name: unit}))
        yield from (f"{one}: two tables are of this unit; leave one" for one in sorted(names & seen))
        seen |= names
    if "cpu" not in units:
        yield f"units are {sorted(units)[:MOST_ALIKE]}; a sheet needs `cpu`, where everything can fall back to"


def _clusters(clusters: Mapping[str, Any], units: Mapping[str, Any]) -> Iterator[str]:
    """Nothing where a number of cores is none: that is told at its own place."""
    counts = [_count(cluster, "n_cores") for cluster in clusters.values()]
    if not clusters or None in counts or ("core" in units and _count(units["core"], "count") is None):
        return
    n_cores = sum(n for n in counts if n is not None)
    n_units = sum(name.startswith("core:") for name in _names(units))
    if n_units != n_cores:
        yield f"has {n_cores} cores, and units {n_units}; give [units.core] the count of all clusters"


def _states(states: Mapping[str, Any], clusters: Mapping[str, Any]) -> Iterator[str]:
    for name, state in states.items():
        cores, clocks = _table(_table(state).get("cores")), _table(_table(state).get("frequency_hz"))
        for cluster in (*cores, *clocks):
            if cluster not in clusters:
                yield f"{name}: the sheet has no cluster {cluster}; name one of its clusters"
        for cluster, n in cores.items():
            most = _count(clusters.get(cluster), "n_cores")
            if most is not None and isinstance(n, int) and not 0 <= n <= most:
                yield f"{name}: {cluster} has {most} cores, not {n}"


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
        if one in NUMBERED:
            yield f"{one}: such units are numbered; name each, such as {one}:0"
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


def _count(table: object, key: str) -> int | None:
    """None of what is no number of units."""
    n = _table(table).get(key)
    return n if isinstance(n, int) and not isinstance(n, bool) and 1 <= n <= MOST_ALIKE else None


def _value(figure: object) -> float | None:
    """None of what is no figure."""
    value = _table(figure).get("value")
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
