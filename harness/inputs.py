"""What decides a run's numbers besides its plan, by what it holds: files by their SHA-256, settings by their value.

Repeats of one cell come from the same inputs, or one cell would hold two things. A resume compares them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import devices
import engines
import harness
import results
import workloads
from devices.cpu_seconds import usable_cpus
from devices.meters.modelled import watts_sheet_path
from devices.models.sheet import sheet_path
from engines.errors import EngineError
from engines.model.checkpoints import decisive_files
from engines.profile_files import profile_files, profile_folder
from harness.device_specs import HostSpec, ModelledSpec
from harness.external.base import ExternalSpec
from harness.external_parts import files_of
from harness.file_digests import file_digests
from harness.model_specs import ModelSpec, PlayedModelSpec
from harness.plan import Plan
from harness.played_parts import played_files
from harness.run_parts import RunParts
from harness.schema import EngineSpec
from harness.sheets import sheet_input
from harness.state import state_folder
from harness.variables import is_setting
from results.file_state import file_state
from results.runs import OF_MODEL, OF_PROFILE, OWN_CODE, SHA256, Input, shown_value
from workloads.datasets import SAMPLES

SCHEDULERS = {
    getattr(os, name): name for name in ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
    if hasattr(os, name)
}  # fmt: skip
MOST_TOLD = 4


def inputs_of(plan: Plan, run_parts: RunParts) -> tuple[Input, ...]:
    """Everything, as it is now; `run_parts` watches the files from now on. Raises `OSError` for one not readable."""
    files = list(_files(plan, run_parts))
    states = {path: run_parts.data_files.get(path) or file_state(path) for _, path in files}
    digests = file_digests([path for _, path in files], state_folder(), run_parts.on_note)
    for name, path in files:
        run_parts.watch.add(name, path, states[path], digests[path])
    found = [Input(name=name, value=f"{SHA256}{digests[path]}") for name, path in files]
    found.append(Input(name=OWN_CODE, value=f"{SHA256}{_own_code()}"))
    return (*found, *_settings())


def changes(then: Sequence[Input], now: Sequence[Input]) -> list[str]:
    """What differs, in words; empty where all is the same."""
    before, after = ({i.name: i.value for i in own} for own in (then, now))
    names = dict.fromkeys([*before, *after])
    return [
        f"{name} {shown_value(before.get(name, 'absent'))} -> {shown_value(after.get(name, 'absent'))}"
        for name in names
        if before.get(name) != after.get(name)
    ]


def told_changes(found: Sequence[str]) -> str:
    more = f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
    return "; ".join(found[:MOST_TOLD]) + more


def _files(plan: Plan, run_parts: RunParts) -> Iterator[tuple[str, Path]]:
    """(what it is, where it is) of each file, once."""
    seen: dict[str, Path] = {}
    for model in dict.fromkeys(c.model for c in plan.cells):
        if isinstance(model, PlayedModelSpec):
            seen |= played_files(model)
    for source in dict.fromkeys(c.model.source for c in plan.cells if isinstance(c.model, ModelSpec)):
        try:
            own = decisive_files(source)
        except EngineError:
            continue  # its trials fail, and say why
        seen |= {f"{path.name}{OF_MODEL}{source}": path for path in own}
    for device in {c.device.name: c.device for c in plan.cells}.values():
        if isinstance(device, ModelledSpec):
            seen[sheet_input(device)] = sheet_path(device.sheet_ref)
        if not isinstance(device, HostSpec):
            continue
        if {"auto", "modelled"} & {*device.meters}:
            seen[f"watts sheet {device.watts_sheet}"] = watts_sheet_path(device.watts_sheet)
        if device.recording is not None:
            seen[f"recording {device.recording}"] = Path(device.recording)
    engines = dict.fromkeys(c.engine for c in plan.cells)
    profiles = [engine.profile for engine in engines if isinstance(engine, EngineSpec)]
    for folder in dict.fromkeys(profile for profile in profiles if profile is not None):
        seen |= {f"{path.name}{OF_PROFILE}{folder}": path for path in profile_files(profile_folder(folder))}
    for engine in engines:
        if isinstance(engine, ExternalSpec):
            seen |= files_of(engine)
    seen |= {f"data file {_shown(path)}": path for path in sorted(run_parts.data_files)}
    yield from seen.items()


def _shown(data_file: Path) -> str:
    """Without the folder of the installation: it is no part of the run, and names its user."""
    return f"{data_file.name} of joulebench" if data_file.parent == SAMPLES else str(data_file)


def _settings() -> Iterator[Input]:
    names = sorted(filter(is_setting, os.environ))
    yield from (Input(name=name, value=os.environ[name]) for name in names)
    cpus = usable_cpus()
    if cpus is not None:
        yield Input(name="CPUs that may be used", value=ranges(cpus))
    if hasattr(os, "getpriority"):
        yield Input(name="nice value", value=str(os.getpriority(os.PRIO_PROCESS, 0)))
    if hasattr(os, "sched_getscheduler"):
        yield Input(name="scheduling policy", value=SCHEDULERS.get(os.sched_getscheduler(0), "unknown"))


def ranges(numbers: Collection[int]) -> str:
    """As Linux writes a list of CPUs: "0-3,8"."""
    told: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if told and told[-1][1] == n - 1:
            told[-1] = (told[-1][0], n)
        else:
            told.append((n, n))
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in told)


def _own_code() -> str:
    """Of all that computes figures; what draws a page of them decides none."""
    whole = hashlib.sha256()
    for package in (harness, engines, workloads, devices, results):
        folder = Path(str(package.__file__)).parent
        for parts in sorted(_own_files(str(folder))):
            with open(os.path.join(folder, *parts), "rb") as file:
                held = file.read()
            whole.update(f"{'/'.join((folder.name, *parts))}\n{len(held)}\n".encode())
            whole.update(held)
    return whole.hexdigest()


def _own_files(folder: str) -> Iterator[tuple[str, ...]]:
    """Parts of their paths. As texts: hundreds of `Path` take longer than to read what they name."""
    for where, folders, names in os.walk(folder):
        above = () if where == folder else tuple(os.path.relpath(where, folder).split(os.sep))
        if not above and "report" in folders:
            folders.remove("report")
        yield from ((*above, name) for name in names if name.endswith((".py", ".cpp", ".h")))
