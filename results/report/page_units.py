"""One unit for a figure, wherever it stands on a page: its columns can be compared down the page, by eye.

The prefix is that of the geometric mean of all its means, so that a slow device does not turn another's into 0.0002.
Joules a token and joules a response share one, so that no table has mJ beside J.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from results.report.arm_figures import Quantity
from results.report.standings import Group
from results.units import si_scale

JOULES_PER = ("J/token", "J/response")


class PageUnits:
    def __init__(self, frame: pd.DataFrame, groups: Sequence[tuple[Group, Sequence[Group]]] = ()) -> None:
        known = frame[frame["mean"].notna() & (frame["mean"] != 0)]
        means: dict[tuple[str, str | None, str], list[float]] = {}
        for metric, phase, unit, mean in zip(*(known[c] for c in ("metric", "phase", "unit", "mean")), strict=True):
            means.setdefault((metric, phase or None, unit), []).append(mean)
        self._typical = {key: _typical(own) for key, own in means.items()}
        per = [[v for key, v in self._typical.items() if key[2] == unit] for unit in JOULES_PER]
        self._joules = _typical([_typical(own) for own in per if own]) if any(per) else None
        values: dict[tuple[Quantity, str], list[float]] = {}
        for whole, single in groups:
            for group in (whole, *single):
                for quantity, standing in (item for row in group.rows for item in row.items()):
                    if standing.value:
                        values.setdefault((quantity, standing.unit), []).append(standing.value)
        self._standings = {key: _typical(own) for key, own in values.items()}

    def of(self, metric: str, phase: str | None, unit: str) -> tuple[float, str]:
        """(what to divide by, the unit then)."""
        if unit in JOULES_PER and self._joules is not None:
            return si_scale(self._joules, unit)
        return si_scale(self._typical.get((metric, phase, unit), 1.0), unit)

    def of_standing(self, quantity: Quantity, unit: str) -> tuple[float, str]:
        if unit == "J" and self._joules is not None:
            return si_scale(self._joules, unit)
        return si_scale(self._standings.get((quantity, unit), 1.0), unit)


def _typical(values: Sequence[float]) -> float:
    return math.exp(math.fsum(math.log(abs(v)) for v in values) / len(values))
