"""One unit for a figure wherever it stands of a device: its columns can be compared down the page, by eye.

The prefix is that of the geometric mean of all means of that device; another device, thousands of times slower, has its
own tables with their own units. Joules a token and joules a response have each their own: nobody reads 1100 mJ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import geometric_mean

import pandas as pd

from results.report.arm_figures import Quantity
from results.report.standings import Group
from results.units import si_scale


class PageUnits:
    def __init__(self, frame: pd.DataFrame, groups: Sequence[tuple[Group, Sequence[Group]]] = ()) -> None:
        known = frame[frame["mean"].notna() & (frame["mean"] != 0)]
        own = {whole.device: (whole, *single) for whole, single in groups}
        self._devices = {
            device: DeviceUnits(known[known["device"] == device], own.get(device, ()))
            for device in frame["device"].unique()
        }

    def on(self, device: str) -> DeviceUnits:
        return self._devices[device]


class DeviceUnits:
    def __init__(self, known: pd.DataFrame, groups: Iterable[Group]) -> None:
        """known: rows of the tidy table that have a mean other than 0."""
        means: dict[tuple[str, str | None, str], list[float]] = {}
        for metric, phase, unit, mean in zip(*(known[c] for c in ("metric", "phase", "unit", "mean")), strict=True):
            means.setdefault((metric, phase or None, unit), []).append(mean)
        self._typical = {key: _typical(own) for key, own in means.items()}
        values: dict[tuple[Quantity, str], list[float]] = {}
        for group in groups:
            for quantity, standing in (item for row in group.rows for item in row.items()):
                if standing.value:
                    values.setdefault((quantity, standing.unit), []).append(standing.value)
        self._standings = {key: _typical(own) for key, own in values.items()}

    def of(self, metric: str, phase: str | None, unit: str) -> tuple[float, str]:
        """(what to divide by, the unit then)."""
        return si_scale(self._typical.get((metric, phase, unit), 1.0), unit)

    def of_standing(self, quantity: Quantity, unit: str) -> tuple[float, str]:
        return si_scale(self._standings.get((quantity, unit), 1.0), unit)


def _typical(values: Sequence[float]) -> float:
    return geometric_mean([abs(v) for v in values])
