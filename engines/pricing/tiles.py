"""How many rows a unit computes for the rows of a call: arithmetic takes rows in tiles, and the last one may be empty.

A sheet says it of a unit (`row_tile`). Where it prices few rows apart, another code computes those, which has no tiles:
all calls of a layer whose experts have few rows in the mean, and else each expert that has few (`compute_experts` in
`kernels/experts.h`). Its line prices them, an expert of such a layer with many rows too.

Legend: C calls of a unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from devices.base import Unit
from devices.models.sheet import Sheet
from engines.calls import ExpertCall


class Computed(NamedTuple):
    """Rows that are computed for a call. as_few: by the code of few rows, for its layer has few in the mean."""

    rows: int
    as_few: bool = False


@dataclass(frozen=True)
class RowTile:
    """rows: of one tile. few: experts with no more rows than that have none, and none that a layer calls has where
    these have no more in the mean."""

    rows: int
    few: int = 0

    def of_calls(self, calls: Sequence[ExpertCall]) -> list[Computed]:
        """Of each."""
        rows = [n for call in calls for n in call.rows_per_expert if n]
        if sum(rows) <= self.few * len(rows):
            return [Computed(call.n_rows, True) for call in calls]
        return [Computed(sum(map(self._of_expert, call.rows_per_expert))) for call in calls]

    def _of_expert(self, n_rows: int) -> int:
        return n_rows if n_rows <= self.few else -(-n_rows // self.rows) * self.rows


def row_tiles(sheet: Sheet, bytes_per_value: float) -> dict[Unit, RowTile]:
    """Of the units that have some. bytes_per_value: of the experts' weights."""
    found = {}
    for name, unit in sheet.units.items():
        if unit.row_tile is None:
            continue
        own = unit.kernels.get("expert_ffn")
        few = own.few_rows if own is not None else None
        # Two FLOP of each value in each row. Rows are whole; a limit that is a number of rows is not rounded below it.
        most = 0.0 if few is None else few.most_flops_per_weight_byte * bytes_per_value / 2
        found[name] = RowTile(int(unit.row_tile.value), int(most * (1 + 1e-9)))
    return found


def computed_rows(calls: Sequence[ExpertCall], tiles: Mapping[Unit, RowTile]) -> list[Computed]:
    """Of each call, on its unit."""
    rows: dict[int, Computed] = {}
    for unit in {call.unit for call in calls}:
        of_unit = [i for i, call in enumerate(calls) if call.unit == unit]
        own = [calls[i] for i in of_unit]
        tile = tiles.get(unit)
        found = [Computed(call.n_rows) for call in own] if tile is None else tile.of_calls(own)
        rows.update(zip(of_unit, found, strict=True))
    return [rows[i] for i in range(len(calls))]
