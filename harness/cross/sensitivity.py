"""Which constants of a sheet the conclusions of its rows hang on: one at a time, a fifth less and a fifth more.

A conclusion is which arm of a machine is the fastest to the first token, the fastest per token, or takes the fewest
joules. With one constant changed every arm that can come first is planned and priced again, for a technique that places
by cost may decide otherwise there. An arm that takes 1.25 times the best or more cannot: a constant that is changed by
a fifth changes a time or an energy by a quarter at most, and the best arm's in the same direction. Where the constant
is a memory or a limit, arms that did not fit are priced too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from devices.models.sheet import Sheet
from devices.models.variations import SheetConstant, constants, varied
from engines.pricing.model_shape import ModelShape
from harness.cross.arms import Arm, arms_on
from harness.cross.table import Row

FACTORS: Final = (0.8, 1.2)
REACH: Final = 1.25
"""How many times the best an arm can take that comes first when one constant is changed by a fifth."""
METRICS: Final = {"ttft_s": "time to the first token", "tpot_s": "time per token", "j_per_token": "joules per token"}
NO_ROOM: Final = ("N.S.", "oom")


@dataclass(frozen=True)
class Effect:
    """metric: a key of METRICS. lead: the best other arm's over that of the arm that is first by the sheet; below 1
    the conclusion flips, and `first` is another. None where it stands alone. first: who is first with the constant so
    changed; None where none is left."""

    machine: str
    metric: str
    constant: str
    factor: float
    before: str
    lead_before: float | None
    first: str | None
    lead: float | None

    @property
    def flips(self) -> bool:
        return self.first != self.before


Priced = Callable[[Arm, Sheet], Row]


def effects(
    sheet: Sheet, shape: ModelShape, rows: Sequence[Row], priced: Priced, say: Callable[[str], object]
) -> list[Effect]:
    """rows: of that machine. priced: an arm on a sheet. say: is told each constant before it is changed."""
    contenders = {metric: _contenders(rows, metric) for metric in METRICS}
    contenders = {metric: own for metric, own in contenders.items() if own}
    found: list[Effect] = []
    if not contenders:
        return found
    for constant in constants(sheet):
        say(f"{sheet.name}: {constant.name}")
        asked = {_key(row.arm) for own in contenders.values() for row in own}
        if constant.places[0][0] in ("memories", "graph_bytes_limit"):
            asked |= {_key(row.arm) for row in rows if row.result in NO_ROOM}
        for factor in FACTORS:
            found += _with(sheet, shape, constant, factor, contenders, asked, priced)
    return found


def _with(
    sheet: Sheet,
    shape: ModelShape,
    constant: SheetConstant,
    factor: float,
    contenders: Mapping[str, Sequence[Row]],
    asked: set[tuple[str, object]],
    priced: Priced,
) -> Iterator[Effect]:
    other = varied(sheet, constant, factor)
    techniques = tuple(dict.fromkeys(technique for technique, _ in asked))
    arms = [arm for arm in arms_on(other, shape, techniques) if _key(arm) in asked]
    again = [priced(arm, other) for arm in arms]
    for metric, own in contenders.items():
        before = own[0]
        lead_before = None if len(own) < 2 else _cost(own[1], metric) / _cost(before, metric)
        ranked = sorted((row for row in again if _known(row, metric)), key=lambda row: _cost(row, metric))
        same = next((row for row in ranked if _key(row.arm) == _key(before.arm)), None)
        rest = [row for row in ranked if row is not same]
        lead = None if same is None or not rest else _cost(rest[0], metric) / _cost(same, metric)
        # What is equal to the first stays second: a tie is no other conclusion.
        stays = same is not None and (lead is None or lead >= 1 - 1e-9)
        first = same if stays else (rest[0] if rest else None)
        name = None if first is None else first.arm.name
        yield Effect(
            sheet.name,
            metric,
            constant.name,
            factor,
            before.arm.name,
            lead_before,
            before.arm.name if stays else name,
            lead,
        )


def _contenders(rows: Sequence[Row], metric: str) -> list[Row]:
    """Those that can come first, the first in front; of equal ones in the order of the table."""
    ranked = sorted((row for row in rows if _known(row, metric)), key=lambda row: _cost(row, metric))
    return [row for row in ranked if _cost(row, metric) < REACH * _cost(ranked[0], metric)] or ranked[:1]


def _known(row: Row, metric: str) -> bool:
    return getattr(row, metric) is not None


def _cost(row: Row, metric: str) -> float:
    return float(getattr(row, metric))


def _key(arm: Arm) -> tuple[str, object]:
    """The same arm on a sheet with other memories: how many experts stay follows from them."""
    return arm.technique, dict(arm.changed).get("unit")


EFFECT_COLUMNS = ("machine", "metric", "constant", "factor", "first", "lead", "first_changed", "lead_changed", "flips")


def effect_records(found: Sequence[Effect]) -> Iterator[Mapping[str, Any]]:
    """For the CSV and `--json`."""
    for one in found:
        figures = (
            one.machine, one.metric, one.constant, one.factor, one.before, one.lead_before, one.first, one.lead,
            one.flips,
        )  # fmt: skip
        yield dict(zip(EFFECT_COLUMNS, figures, strict=True))
