"""Arms: what is compared. An arm is a cell without its workload and device. It goes by the name that the plan gave."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from results.cells import model_name, technique_name
from results.records import Cell
from results.swept import parts_of, swept_values


@dataclass(frozen=True)
class Arm:
    """index: in the order of the run's cells; it chooses the arm's symbol. name: the plan's, with the model behind it
    where a run has several.

    how: technique and placement in short, for below the name, and what of the engine sets apart arms that are alike in
    both, but for what the name says already; often nothing.
    """

    index: int
    name: str
    engine: str
    technique: str
    placement: str
    model: str
    engine_parameters: str
    how: str
    line: str = ""
    """What the technique does; empty where that was not recorded."""

    @property
    def base_name(self) -> Markup:
        """Without the values of a sweep, in pieces that a narrow column may break between, and not within."""
        return breakable(parts_of(self.engine).name + self.name.removeprefix(self.engine))

    @property
    def swept(self) -> Markup:
        """The values of a sweep that this arm has: "prefill_chunk=64"."""
        return breakable(parts_of(self.engine).values)


LONGEST_PIECE = 16
"""Characters. A longer word may break anywhere: it would push the figures off a phone."""
_BREAKS = re.compile(r"(?<=[_\-./=,:\]])|(\s+)")


def breakable(text: str) -> Markup:
    """Breaks behind punctuation and blanks, and within no word of up to `LONGEST_PIECE` characters."""
    pieces = [p for p in _BREAKS.split(text) if p]
    shown = (
        Markup('<span class="piece">{}</span><wbr>').format(p) if p.strip() and len(p) <= LONGEST_PIECE else escape(p)
        for p in pieces
    )
    return Markup("").join(shown)


def arms_of(cells: Sequence[Cell]) -> dict[str, Arm]:
    """The arm of each cell, by cell id."""
    indices: dict[tuple[str, ...], int] = {}
    keys = {cell.cell_id: _key(cell) for cell in cells}
    # An arm that stands on two devices has one name: no table compares these.
    by_engine: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for cell in cells:
        indices.setdefault(keys[cell.cell_id], len(indices))
        by_engine.setdefault((cell.device, cell.engine), set()).add(keys[cell.cell_id])
    found = {}
    for cell in cells:
        key = keys[cell.cell_id]
        alike = by_engine[cell.device, cell.engine]
        name = cell.engine if len(alike) == 1 else f"{cell.engine}, {_told_apart(cell, len({k[4] for k in alike}) > 1)}"
        found[cell.cell_id] = Arm(
            indices[key],
            name,
            cell.engine,
            technique_name(cell),
            cell.placement,
            model_name(cell),
            key[5],
            _how(cell, cells),
            cell.technique_line or "",
        )
    return found


def _how(cell: Cell, cells: Sequence[Cell]) -> str:
    alike = [_settings(c) for c in cells if (c.technique, c.placement) == (cell.technique, cell.placement)]
    swept = swept_values(parts_of(cell.engine).values)
    own = {
        k: v
        for k, v in _settings(cell).items()
        if any(other.get(k) != v for other in alike) and k.rpartition(".")[2] not in swept
    }
    # An arm that is called as its technique says it once.
    technique = [] if parts_of(cell.engine).name == cell.technique else [cell.technique]
    parts = [*technique, *([] if cell.placement == "host" else [cell.placement])]
    return ", ".join([*parts, *(f"{k}={v}" for k, v in own.items())])


def _settings(cell: Cell) -> dict[str, str]:
    """Of technique and engine, a record's values each by its own name; without what is not set. What an engine does not
    do is not said of it; what a technique does not do sets it apart."""
    found: dict[str, str] = {}
    for key, value in sorted((cell.technique_parameters | cell.engine_parameters).items()):
        inner = value if isinstance(value, dict) else {"": value}
        is_off = (None,) if key in cell.technique_parameters else (None, False)
        found |= {
            f"{key}.{name}".rstrip("."): str(v) for name, v in inner.items() if not any(v is off for off in is_off)
        }
    return found


def _key(cell: Cell) -> tuple[str, ...]:
    return (
        cell.engine,
        cell.technique,
        json.dumps(cell.technique_parameters, sort_keys=True, default=str),
        cell.placement,
        model_name(cell),
        ", ".join(f"{k}={v}" for k, v in sorted(cell.engine_parameters.items())),
    )


def _told_apart(cell: Cell, by_model: bool) -> str:
    """What sets apart arms of one name: their models, else how they work."""
    return model_name(cell) if by_model else f"{technique_name(cell)}, {cell.placement}"
