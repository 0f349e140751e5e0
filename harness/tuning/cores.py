"""Selections of cores of a device as candidates of a session, and the searches over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from devices.cpu_seconds import usable_cpus
from devices.models.core_clusters import CoreCluster, Selection
from harness.plan import PlanError
from harness.problems import nearest
from harness.tuning.core_race import core_race
from harness.tuning.probing import Search
from harness.tuning.race import RaceResult, Rules, measured_j, race
from harness.tuning.selections import all_selections
from harness.tuning.session import TuneOptions
from results.core_lists import core_words
from results.records import Phase

TREE, WHOLE = "tree", "exhaustive"
SEARCHES = (TREE, WHOLE)
SMALL = 6
"""So few selections are raced whole: the tree of stage 2 has as many."""

CoreSearch = Search[Selection, RaceResult[Selection]]


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


def check_search(search: str) -> None:
    """Raises `PlanError`."""
    if search not in SEARCHES:
        raise PlanError([f"--search {search[:40]}: no such search of cores; {nearest(search, SEARCHES)}"])


def core_searches(candidates: CoreCandidates, options: TuneOptions, rules: Rules) -> Mapping[Phase, CoreSearch]:
    """The tree of source 002 with probes that are repeated, or every selection. Of latency speed alone is raced."""
    judge = None if options.objective == "latency" else measured_j
    if options.search == WHOLE or len(candidates.names) <= SMALL:
        return {phase: race(tuple(candidates.names), rules, judge, options.seed) for phase in options.phases}
    return {phase: core_race(candidates.clusters, rules, judge, seed=options.seed) for phase in options.phases}
