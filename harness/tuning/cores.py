"""Selections of cores of a device as candidates of a session, and the searches over them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from devices.base import DeviceError
from devices.cpu_seconds import usable_cpus
from devices.models.core_clusters import CoreCluster, Selection
from harness.device_specs import ANDROID_PREFIX, IOS_PREFIX
from harness.external.catalog import EXTERNAL
from harness.opening import DeviceNotReadyError
from harness.plan import PlanError
from harness.problems import nearest
from harness.tuning.aecs import PRESETS, AecsParameters
from harness.tuning.core_places import CorePlaces, host_places, phone_places, read_host_files, thread_places
from harness.tuning.core_race import core_race, judged_by
from harness.tuning.presets import probed_once
from harness.tuning.probing import Search
from harness.tuning.race import Judge, RaceResult, Rules, measured_j, race
from harness.tuning.selections import all_selections
from harness.tuning.session import TuneOptions
from harness.tuning.tuned_plans import HOST
from results.core_lists import core_words
from results.printable import with_colon
from results.records import Phase

TREE, WHOLE = "tree", "exhaustive"
SEARCHES = (TREE, WHOLE, *PRESETS)
SMALL = 6
"""So few selections are raced whole: the tree of stage 2 has as many."""

CoreSearch = Search[Selection, RaceResult[Selection]]


@dataclass(frozen=True)
class CoreCandidates:
    """All selections of a device's clusters. keys: the engine's keys that put an arm onto one."""

    clusters: tuple[CoreCluster, ...]
    names: Mapping[Selection, str]
    keys: Mapping[Selection, dict[str, Any]]


class Choosable(NamedTuple):
    """What of an engine's cores or threads can be chosen, and whether for each phase."""

    key: Literal["cores", "threads"]
    is_by_phase: bool


def choosable(engine: Mapping[str, Any]) -> Choosable:
    """Of an engine as a plan writes it. Raises `PlanError` where it can be told neither its cores nor its threads."""
    runs = engine.get("runs")
    spec = EXTERNAL.get(runs) if isinstance(runs, str) else None
    if spec is None:
        return Choosable("cores", True)  # ours, or one that the plan's check refuses by its name
    if spec.abilities.cores != "no":
        return Choosable("cores", spec.abilities.cores == "each phase")
    if spec.abilities.threads != "no":
        return Choosable("threads", spec.abilities.threads == "each phase")
    raise PlanError([f"engine {runs}: cannot be told its cores or threads; tune other keys of it with --space"])


def core_candidates(device: str, key: Literal["cores", "threads"] = "cores") -> CoreCandidates:
    """Of this host, or of a phone, which is looked at for it. key: threads are chosen where the engine cannot be told
    its cores.

    Raises `PlanError` where its cores cannot be chosen, `DeviceNotReadyError` where the phone cannot be reached.
    """
    places = _places(device)
    if key == "threads":
        places = thread_places(sum(cluster.n_cores for cluster in places.clusters))
    names, keys = {}, {}
    for one in all_selections(places.clusters):
        cores = places.cores_of(one)
        names[one] = f"threads {sum(one)}" if cores is None else f"cores {core_words(cores)}"
        keys[one] = {"threads": sum(one)} if cores is None else {"cores": core_words(cores)}
    return CoreCandidates(places.clusters, names, keys)


def _places(device: str) -> CorePlaces:
    if device == HOST:
        usable = usable_cpus()
        if usable is None:
            return thread_places(os.cpu_count() or 1)
        try:
            return host_places(read_host_files(), usable)
        except ValueError as error:
            raise PlanError([f"device {device}: {error}; tune keys of the plan with --space"]) from error
    if device.startswith(IOS_PREFIX):
        return thread_places(_n_cores_of_iphone(device))
    if not device.startswith(ANDROID_PREFIX):
        raise PlanError([f"device {device}: its cores cannot be chosen here; tune keys of the plan with --space"])
    return _places_of_phone(device)


def _places_of_phone(name: str) -> CorePlaces:
    """Its state does not matter yet: gates are passed, and its lock is taken, when it is opened to be measured."""
    from devices.android.shell import Phone
    from devices.android.topology import read_topology

    phone = Phone(name)
    try:
        phone.reach()
        return phone_places(read_topology(phone))
    except DeviceError as error:
        raise DeviceNotReadyError(str(error)) from error
    except ValueError as error:
        raise DeviceNotReadyError(f"{with_colon(name)} {error}; is this an Android phone?") from error


def _n_cores_of_iphone(name: str) -> int:
    from devices.ios.phone import Phone

    phone = Phone(name)
    try:
        phone.reach()
        found = phone.facts().n_cores
    except DeviceError as error:
        raise DeviceNotReadyError(str(error)) from error
    finally:
        phone.close()
    if found is None:
        raise DeviceNotReadyError(
            f"{with_colon(name)} does not tell how many cores it has; switch its Developer Mode on, or name the threads"
            ' to try, as --space "engine.threads=[1,2,3,4]"'
        )
    return found


def check_search(search: str) -> None:
    """Raises `PlanError`."""
    if search not in SEARCHES:
        raise PlanError([f"--search {search[:40]}: no such search of cores; {nearest(search, SEARCHES)}"])


def races_all(search: str, n_candidates: int) -> bool:
    """Whether every selection is raced, and no tree is walked."""
    return search == WHOLE or (search == TREE and n_candidates <= SMALL)


def core_searches(
    candidates: CoreCandidates, options: TuneOptions, rules: Rules, parameters: AecsParameters
) -> Mapping[Phase, CoreSearch]:
    """The tree of source 002 with probes that are repeated, its searches that probe once, or every selection. Of
    latency speed alone is raced."""
    clusters = candidates.clusters
    if options.search in PRESETS:
        return {phase: probed_once(clusters, parameters) for phase in options.phases}
    judge: Judge[Selection] | None = None
    if options.objective != "latency":
        judge = judged_by(clusters, parameters) if options.alpha else measured_j
    if races_all(options.search, len(candidates.names)):
        return {phase: race(tuple(candidates.names), rules, judge, options.seed) for phase in options.phases}
    tree, gain = parameters.tree, parameters.least_gain
    return {phase: core_race(clusters, rules, judge, tree, gain, seed=options.seed) for phase in options.phases}
