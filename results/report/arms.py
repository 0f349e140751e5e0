"""Arms: what is compared. An arm is a cell without its workload and device; a letter names it in tables and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from results.cells import model_name, technique_name
from results.records import Cell


@dataclass(frozen=True)
class Arm:
    """letter: A, B, ... in the order of the run's cells; name: the letter with the name that the plan gave.

    how: technique and placement in short, for below the name.
    """

    letter: str
    name: str
    engine: str
    technique: str
    placement: str
    model: str
    engine_parameters: str
    how: str


def arms_of(cells: Sequence[Cell]) -> dict[str, Arm]:
    """The arm of each cell, by cell id."""
    letters: dict[tuple[str, ...], str] = {}
    found = {}
    for cell in cells:
        parameters = ", ".join(f"{k}={v}" for k, v in sorted(cell.engine_parameters.items()))
        key = (
            cell.engine,
            cell.technique,
            json.dumps(cell.technique_parameters, sort_keys=True, default=str),
            cell.placement,
            model_name(cell),
            parameters,
        )
        letter = letters.setdefault(key, letter_of(len(letters)))
        found[cell.cell_id] = Arm(
            letter,
            f"{letter} {cell.engine}",
            cell.engine,
            technique_name(cell),
            cell.placement,
            model_name(cell),
            parameters,
            cell.technique if cell.placement == "host" else f"{cell.technique}, {cell.placement}",
        )
    return found


def letter_of(index: int) -> str:
    """0 -> A, 25 -> Z, 26 -> AA, as spreadsheets count columns."""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters
