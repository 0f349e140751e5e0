"""What a plan sets an arm to (weights, arithmetic, technique), and what of it changed from one run to another.

An arm of one name stays one line of a history when it is set otherwise, as it does with a new version of a package.
So whoever judges the line or draws it says where that was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import Field

from results.cells import model_name
from results.records import Cell, Record

ABSENT: Final = "not set"
TECHNIQUE: Final = "technique"
PARTS: Final = re.compile("[,;] ")


class Settings(Record):
    """engine: weights, arithmetic, threads, ... changes: of the technique, what is not its own; None where a run of
    before did not keep it."""

    technique: str
    engine: dict[str, Any] = Field(default_factory=dict)
    changes: dict[str, Any] | None = None


def settings_of(cell: Cell) -> Settings:
    return Settings(technique=cell.technique, engine=cell.engine_parameters, changes=cell.technique_changes)


def changed_settings(first: Settings, second: Settings) -> list[str]:
    """ "arithmetic not set → int8", each."""
    found = engine_changes(first, second)
    if first.technique != second.technique:
        # Parameters of two techniques are no settings of one thing.
        return [f"{TECHNIQUE} {first.technique} → {second.technique}", *found]
    if first.changes is not None and second.changes is not None:
        found += _changed(first.changes, second.changes)
    return found


def engine_changes(first: Settings, second: Settings) -> list[str]:
    """Without the technique."""
    return _changed(first.engine, second.engine)


def _changed(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found = {key: (str(one.get(key, ABSENT)), str(other.get(key, ABSENT))) for key in one.keys() | other.keys()}
    return [
        # As they are shown: runs of before kept some numbers that are texts now.
        f"{key} {' → '.join(_unlike_parts(*found[key]))}"
        for key in sorted(found)
        if one.get(key) != other.get(key) and len(set(found[key])) > 1
    ]


def _unlike_parts(one: str, other: str) -> tuple[str, str]:
    """Of two lists of words, as the build of a server is one, what is not the same; of all else the whole."""
    parts, others = PARTS.split(one), PARTS.split(other)
    unlike = [pair for pair in zip(parts, others, strict=False) if pair[0] != pair[1]]
    if len(parts) != len(others) or not unlike:
        return one, other
    return ", ".join(a for a, _ in unlike), ", ".join(b for _, b in unlike)


class ArmSettings(Record):
    """Of one arm of a run, whatever its workload."""

    arm: str
    model: str
    device: str
    settings: Settings


def arm_settings(cells: Sequence[Cell]) -> tuple[ArmSettings, ...]:
    found = (
        ArmSettings(arm=cell.engine, model=model_name(cell), device=cell.device, settings=settings_of(cell))
        for cell in cells
    )
    return tuple({(one.arm, one.model, one.device): one for one in found}.values())
