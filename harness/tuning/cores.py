"""Selections of cores of a device as candidates of a session, and the searches over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from devices.cpu_seconds import usable_cpus
from devices.models.core_clusters import CoreCluster, Selection
from harness.plan import PlanError
from harness.tuning.probing import Search
from harness.tuning.race import RaceResult, Rules, measured_j, race
from harness.tuning.selections import all_selections
from harness.tuning.session import TuneOptions
from harness.tuning.space import Space
from results.core_lists import core_words
from results.records import Phase


@dataclass(frozen=True)
class CoreCandidates:
    """All selections of a device's clusters. keys: the engine's keys that put an arm onto one."""

    clusters: tuple[CoreCluster, ...]
    names: Mapping[Selection, str]
    keys: Mapping[Selection, dict[str, Any]]


def core_candidates(device: str) -> CoreCandidates:
    """Raises `PlanError` where this device's cores cannot be chosen."""
    if device != "host":
        raise PlanError([f"device {device}: its cores cannot be chosen here; tune keys of the plan with --space"])
    usable = sorted(usable_cpus() or ())
    clusters = (CoreCluster("CPU", len(usable), "prime"),)
    found = {one: core_words(usable[: one[0]]) for one in all_selections(clusters)}
    return CoreCandidates(
        clusters,
        {one: f"cores {cores}" for one, cores in found.items()},
        {one: {"cores": cores} for one, cores in found.items()},
    )


def core_searches(
    candidates: CoreCandidates, options: TuneOptions, rules: Rules
) -> Callable[[Space[Selection], Mapping[Selection, str]], Mapping[Phase, Search[Selection, RaceResult[Selection]]]]:
    def searches(
        space: Space[Selection], excluded: Mapping[Selection, str]
    ) -> Mapping[Phase, Search[Selection, RaceResult[Selection]]]:
        arms = [arm for arm in candidates.names if arm not in excluded]
        judge = None if options.objective == "latency" else measured_j
        return {phase: race(arms, rules, judge, options.seed) for phase in options.phases}

    return searches
