"""Choices of experts by hand, and runs that kept them."""

from __future__ import annotations

from typing import Any

from results.expert_heat import ExpertHeat
from results.runs import RunData
from tests.run_builders import trial
from tests.store_checks import INFO


def run_of(heats: dict[str, list[tuple[ExpertHeat | None, dict[str, Any]]]], cells: list[Any]) -> RunData:
    """heats: for each cell, of its trials."""
    trials, kept = [], {}
    for cell_id, own in heats.items():
        for repeat, (heat, changes) in enumerate(own):
            one = trial(trial_id=f"{cell_id}-{repeat}", cell_id=cell_id, repeat=repeat, **changes)
            trials.append(one)
            kept[one.trial_id] = heat
    return RunData(INFO, tuple(cells), tuple(trials), lambda _: (), load_heat=kept.__getitem__)


def heat_of(
    *chosen: tuple[int, ...],
    profiled: tuple[tuple[int, ...], ...] | None = None,
    decoded: tuple[tuple[int, ...], ...] | None = None,
) -> ExpertHeat:
    return ExpertHeat(layers=tuple(range(len(chosen))), chosen=chosen, profiled=profiled, decoded=decoded)
