"""Begins a run in a new folder, or goes on with the one that is there: the same plan, machine, software and inputs."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from devices.base import DeviceError
from harness.inputs import changes, inputs_of, told_changes
from harness.plan import Plan
from harness.plan_differences import plan_differences
from harness.run_parts import RunParts
from harness.sheets import own_sheets, sheet_purposes
from harness.state import last_self_test, state_folder
from harness.tuning.tuned_plans import why_another_phone
from results.database import UnwrittenError
from results.environments import Build, Environment
from results.run_folders import check_can_be_made, check_free_space, check_holds_run, check_is_folder
from results.runs import Input, RunInfo
from results.self_tests import SelfTest
from results.store import Store, StoreError

SAME_ON_RESUME = ("machine", "cpu_model", "n_cores", "n_threads", "python", "joulebench", "packages")
"""What must not change within a run. The kernel's version and the memory's size may, as after a crash and a reboot."""


class DeviceNotReadyError(Exception):
    """A device of the plan cannot be opened: nothing was run on it."""


def open_run(plan: Plan, directory: Path, resume: bool, run_parts: RunParts) -> Store:
    """A new run folder, or with `resume` the one that is there. Raises `StoreError`, `DeviceNotReadyError`."""
    check_folder(directory, resume)
    with contextlib.ExitStack() as undo:
        store = Store.open(directory, migrates=False) if resume else None
        if store is not None:
            undo.callback(store.close)
            check_is_begun_so(store.info(), "run", directory)
            if store.info().plan_hash != plan.plan_hash:
                # Before devices are opened and kernels compiled, which takes up to a minute.
                check_same_plan(store, plan, _inputs_now(plan, run_parts), directory)
        environments = _environments(plan, run_parts)
        if plan.tuned_for and (other := why_another_phone(plan.tuned_for, *environments.values())):
            raise StoreError("; ".join(other))
        inputs = _inputs_now(plan, run_parts)
        run_parts.watch.refuse_changes(directory)
        if store is not None:
            _check_same(store, plan, environments, inputs, directory)
            store.migrate()  # not before: what may not be gone on with here shall be read by the joulebench of then
        else:
            info = new_info(plan, environments, self_tests_of(plan, environments), inputs)
            store = Store.create(directory, info, [c.cell for c in plan.cells])
        undo.pop_all()
        return store


def _inputs_now(plan: Plan, run_parts: RunParts) -> tuple[Input, ...]:
    """Raises `StoreError` for a file that cannot be read."""
    try:
        return inputs_of(plan, run_parts)
    except OSError as error:
        raise StoreError(
            f"{error.filename}: {error.strerror}; make it readable, its digest belongs to the run"
        ) from error


def new_info(
    plan: Plan,
    environments: Mapping[str, Environment],
    self_tests: Mapping[str, SelfTest],
    inputs: tuple[Input, ...],
) -> RunInfo:
    """Of a run that begins now. environments, self_tests: by the label of the device."""
    return RunInfo(
        run_id=f"{plan.name}-{uuid.uuid4().hex[:8]}",
        name=plan.name,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        plan=plan.raw,
        plan_hash=plan.plan_hash,
        environments=dict(environments),
        self_tests=dict(self_tests),
        inputs=inputs,
        left_out=plan.not_run,
        own_sheets=own_sheets(plan, inputs),
        only_for=dict(sheet_purposes(plan)),
    )


def check_folder(directory: Path, resume: bool) -> None:
    """A run is begun where there is none, and gone on with where there is one: before a device is waited for,
    and before kernels are compiled."""
    check_is_folder(directory)
    try:
        there = Store.holds_run(directory)
        if resume:
            check_holds_run(directory)
    except UnwrittenError:
        raise  # to begin another run there would help nobody
    except StoreError as error:
        raise StoreError(
            f"--resume: {error}, or leave --resume out to begin a run" if resume else str(error)
        ) from error
    if there and not resume:
        raise StoreError(f"{directory} already holds a run; go on with --resume or name another folder with --out")
    if not resume:
        check_can_be_made(directory)
        check_free_space(directory)


def check_is_begun_so(then: RunInfo, command: str, directory: Path) -> None:
    """That a run goes on as it was begun: one of a fleet has the settings of each worker. Raises `StoreError`."""
    its_own = "fleet start" if then.is_of_fleet else "run"
    if then.inputs and its_own != command:
        raise StoreError(
            f"{directory} was begun by `joulebench {its_own}`; go on with `joulebench {its_own} PLAN --out {directory}"
            " --resume`, or name another folder with --out"
        )


def _environments(plan: Plan, run_parts: RunParts) -> dict[str, Environment]:
    """Opens every device, so that one that is not ready is told before anything is written."""
    found: dict[str, Environment] = {}
    names: dict[str, str] = {}
    for cell_plan in {c.cell.device: c for c in plan.cells}.values():
        try:
            found[cell_plan.cell.device] = run_parts.environment(cell_plan)
        except DeviceError as error:
            raise DeviceNotReadyError(str(error)) from error
        unit, name = found[cell_plan.cell.device].unit, cell_plan.device.name
        if unit is not None and names.setdefault(unit, name) != name:
            raise DeviceNotReadyError(f"{names[unit]} and {name} are one phone, reached in two ways; name it once")
    return found


def self_tests_of(plan: Plan, environments: Mapping[str, Environment]) -> dict[str, SelfTest]:
    """The last self-test of each device that has one. A modelled device is not tested."""
    folder = state_folder()
    measured = {c.cell.device: c.device.name for c in plan.cells if not c.is_modelled}
    found = {label: last_self_test(name, environments[label], folder) for label, name in measured.items()}
    return {label: test for label, test in found.items() if test is not None}


def _check_same(
    store: Store, plan: Plan, now: Mapping[str, Environment], inputs: Sequence[Input], directory: Path
) -> None:
    """Repeats of one cell come from one plan, one machine, one software and the same inputs. Raises `StoreError`."""
    then = store.info()
    check_same_plan(store, plan, inputs, directory)
    check_same_machine(then, now, directory)
    unlike = changes(then.inputs, inputs) if then.inputs else []
    if unlike:
        raise StoreError(
            f"{directory} was begun with other inputs ({told_changes(unlike)}); put back those of then, or start anew"
            " with another --out"
        )


def check_same_plan(store: Store, plan: Plan, inputs: Sequence[Input], directory: Path) -> None:
    """Raises `StoreError`."""
    then = store.info()
    if then.plan_hash != plan.plan_hash:
        differences = plan_differences(then, store.cells(), plan, inputs)
        raise StoreError(
            f"{directory} holds a run of another plan (hash {then.plan_hash}, this plan {plan.plan_hash}):"
            f" {differences}; name another folder with --out, or resume with the plan, settings, data folder and"
            " joulebench of then"
        )


def check_same_machine(then: RunInfo, now: Mapping[str, Environment], directory: Path) -> None:
    """now: of some of the run's devices, or all. Raises `StoreError`."""
    for device, environment in now.items():
        before, after = then.environments[device].model_dump(), environment.model_dump()
        changed = [f"{key} {before[key]} -> {after[key]}" for key in SAME_ON_RESUME if before[key] != after[key]]
        if gpus := then.environments[device].other_gpus(environment):
            changed.append(f"GPU {' -> '.join(gpus)}")
        if drivers := then.environments[device].other_gpu_driver(environment):
            changed.append(f"GPU driver {' -> '.join(drivers)}")
        if changed:
            raise StoreError(
                f"{directory} was begun on another machine or software ({'; '.join(changed)}); go on there, or start"
                " anew with another --out"
            )
        if environment.is_another_unit(then.environments[device]):
            raise StoreError(
                f"{directory} was begun on another phone of this model ({device}: the digest of its serial number was"
                f" {then.environments[device].unit}, and is {environment.unit} now); connect that one, or start anew"
                " with another --out"
            )
        road = _other_road(then.environments[device].build, environment.build)
        if road:
            raise StoreError(
                f"{directory} was begun with other kernels ({'; '.join(road)}); go on with those of then, or start anew"
                " with another --out"
            )


def _other_road(then: Build | None, now: Build | None) -> list[str]:
    """How what computes differs, where both are known."""
    if then is None or now is None:
        return []
    before, after = then.model_dump(exclude={"reason"}), now.model_dump(exclude={"reason"})
    return [f"{key.replace('_', ' ')} {before[key]} -> {after[key]}" for key in before if before[key] != after[key]]
