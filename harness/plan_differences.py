"""What differs between the plan that a run was begun with and the one that is to go on with it, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from harness.inputs import changes, told_changes
from harness.plan import Plan
from harness.plan_values import shown
from results.history.settings import changed_settings, settings_of
from results.records import Cell
from results.runs import OF_PROFILE, OWN_CODE, Input, RunInfo

ABSENT = object()
IN_NO_HASH = ("name", "baseline", "schema", "table")
"""Keys of a plan that no figure depends on."""


def plan_differences(then: RunInfo, cells: Sequence[Cell], now: Plan, inputs: Sequence[Input]) -> str:
    """cells: of then. inputs: those of now."""
    found = list(_differences(_meant(then.plan), _meant(now.raw), ""))
    if found:
        return told_changes(found)
    profiles = changes(*([i for i in own if OF_PROFILE in i.name] for own in (then.inputs, inputs)))
    if profiles:
        return told_changes(profiles)
    if found := list(_of_arms(cells, now)):
        return f"its lines are the same, and {told_changes(found)}"
    before, after = ({i.value for i in own if i.name == OWN_CODE} for own in (then.inputs, inputs))
    if before == after:
        return "its lines are the same, and the data folder (JOULEBENCH_DATA) is another"
    return "its lines are the same, and another version of joulebench began it, whose defaults were others"


def _of_arms(cells: Sequence[Cell], now: Plan) -> Iterator[str]:
    """What an arm is by no line of the plan: a server answers with another build, or a program is another one."""
    own = {plan.cell.label: plan.cell for plan in now.cells}
    yield from dict.fromkeys(
        f"{cell.engine}: {word}"
        for cell in cells
        if cell.label in own
        for word in changed_settings(settings_of(cell), settings_of(own[cell.label]))
    )


def _meant(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in IN_NO_HASH}


def _differences(then: Any, now: Any, path: str) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*then, *now]):
            yield from _differences(then.get(key, ABSENT), now.get(key, ABSENT), f"{path}.{key}" if path else key)
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, (before, after) in enumerate(zip(then, now, strict=True)):
            yield from _differences(before, after, f"{path}[{i}]")
    elif type(then) is not type(now) or then != now:
        yield f"{path} {_told(then)} -> {_told(now)}"


def _told(value: Any) -> str:
    return "absent" if value is ABSENT else shown(value)
