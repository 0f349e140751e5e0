"""A sheet with one of its figures changed: what conclusions are tested with.

A figure is named by where it stands in the sheet's TOML: `units.gpu.roofline.bytes_per_s`. What is one constant changes
at once: the points of a table of shares (which stay at most 1), numbered units that one table stands for, and a figure
that a unit gives for several kinds of work with the same value, such as a line that was fitted on all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from devices.models.efficiency import Efficiency
from devices.models.figures import SheetFigure
from devices.models.sheet import Sheet
from results.records import Record

Place = tuple[str, ...]
NO_PRICE: Final = ("relative_accuracy", "missed_by", "fit_misses", "queue_depth")
"""Figures that price nothing, and a count."""
OF_JOULES: Final = ("j_per_flop", "pj_per_bit")
"""Figures of energy, beside all watts."""


class SheetConstant(NamedTuple):
    """places: where it stands. value: None of a table of shares."""

    places: tuple[Place, ...]
    value: float | None

    @property
    def name(self) -> str:
        """Where several places differ in one part, that part lists them."""
        first = self.places[0]
        parts = [dict.fromkeys(place[i] for place in self.places) for i in range(len(first))]
        return ".".join("+".join(part) for part in parts)

    @property
    def is_of_joules(self) -> bool:
        """Whether no time hangs on it."""
        return self.places[0][-1].endswith("_w") or self.places[0][-1] in OF_JOULES


def constants(sheet: Sheet) -> list[SheetConstant]:
    """All that prices follow from, in the sheet's order. A figure of 0 stays 0 whatever it is multiplied with, and is
    left out."""
    found: dict[object, SheetConstant] = {}
    for place, figure in _figures(sheet, ()):
        if isinstance(figure, Efficiency):
            found[place] = SheetConstant((place,), None)
        elif figure.value > 0:
            of_unit = (place[:2], place[-1], figure.value) if "kernels" in place else place
            known = found.get(of_unit)
            found[of_unit] = SheetConstant((*(known.places if known else ()), place), figure.value)
    return list(found.values())


def varied(sheet: Sheet, constant: SheetConstant, factor: float) -> Sheet:
    """The sheet with that constant times `factor`."""
    changed: Any = sheet
    for place in constant.places:
        changed = _changed(changed, place, factor)
    assert isinstance(changed, Sheet)
    return changed


def _figures(value: object, place: Place) -> Iterator[tuple[Place, SheetFigure | Efficiency]]:
    if isinstance(value, SheetFigure | Efficiency):
        yield place, value
    elif isinstance(value, Record):
        for name in type(value).model_fields:
            if name not in NO_PRICE:
                yield from _figures(getattr(value, name), (*place, name))
    elif isinstance(value, Mapping):
        tables: dict[str, object] = {}
        for name, one in value.items():
            tables.setdefault(_table(name, value), one)
        for name, one in tables.items():
            yield from _figures(one, (*place, name))


def _table(name: str, of: Mapping[str, object]) -> str:
    """That a unit was read from: numbered units of one kind that are one and the same stand in one table."""
    kind = name.partition(":")[0]
    alike = [other for other, one in of.items() if other.partition(":")[0] == kind and one is of[name]]
    return kind if len(alike) > 1 else name


def _changed(value: object, place: Place, factor: float) -> object:
    if isinstance(value, SheetFigure):
        return value.model_copy(update={"value": value.value * factor})
    if isinstance(value, Efficiency):
        shares = [min(point.share * factor, 1.0) for point in value.points]
        points = (p.model_copy(update={"share": share}) for p, share in zip(value.points, shares, strict=True))
        return Efficiency(by=value.by, points=tuple(points))
    name, rest = place[0], place[1:]
    if isinstance(value, Mapping):
        made: dict[int, object] = {}
        for key, one in value.items():
            if name in (key, _table(key, value)) and id(one) not in made:
                made[id(one)] = _changed(one, rest, factor)
        return {key: made.get(id(one), one) for key, one in value.items()}
    assert isinstance(value, Record)
    return value.model_copy(update={name: _changed(getattr(value, name), rest, factor)})
