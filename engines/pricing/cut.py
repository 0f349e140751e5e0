"""Slices of experts of a model that is priced as another: the same cut of the other's columns.

Slices over N units are as even as columns allow. 128 columns over 6 units are 21 or 22, and the widest, which all wait
for, is 3 % wider than a sixth. Of a priced model with 6400 columns that would be 1100, where its own cut has 1067. So
even slices are made anew; any other slice keeps its share, as near as columns allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from engines.calls import CallKind, Width
from engines.techniques.place.units import slices

Axis = Literal["width", "hidden"]
MOST_KEPT = 1 << 12


@lru_cache(MOST_KEPT)
def cut_anew(kinds: tuple[CallKind, ...], axis: Axis, columns: int, priced: int) -> tuple[CallKind, ...]:
    """axis: of which slices are cut. columns: what the model that computed has of them; priced: the other."""
    if columns == priced:
        return kinds
    found = list(kinds)
    for places in _alike(kinds, axis):
        parts = [_part(kinds[place], axis) for place in places]
        first, end = (round(one * priced / columns) for one in (parts[0].first, parts[-1].end))
        if _is_even(parts):
            made = [Width(first + part.first, first + part.end) for part in slices(end - first, len(parts))]
        else:
            made = [Width(*(round(one * priced / columns) for one in part)) for part in parts]
        for place, part in zip(places, made, strict=True):
            found[place] = _with(found[place], axis, part)
    return tuple(found)


def _alike(kinds: Sequence[CallKind], axis: Axis) -> list[list[int]]:
    """Places of slices that units of one kind may share, in the order of their columns."""
    groups: dict[CallKind, list[int]] = {}
    for place, kind in enumerate(kinds):
        if getattr(kind, axis) is not None:
            groups.setdefault(_with(replace(kind, unit=kind.unit.partition(":")[0]), axis, None), []).append(place)
    return [sorted(places, key=lambda place: _part(kinds[place], axis)) for places in groups.values()]


def _with(kind: CallKind, axis: Axis, part: Width | None) -> CallKind:
    return replace(kind, width=part) if axis == "width" else replace(kind, hidden=part)


def _part(kind: CallKind, axis: Axis) -> Width:
    found: Width = getattr(kind, axis)
    return found


def _is_even(parts: Sequence[Width]) -> bool:
    """Whether they follow one another, and differ by one column at most."""
    sizes = [part.end - part.first for part in parts]
    return max(sizes) - min(sizes) <= 1 and all(one.end == other.first for one, other in pairwise(parts))
