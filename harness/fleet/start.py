"""One run by a fleet, from the workers' joining to the last trial."""

from __future__ import annotations

import os
import shlex
import time
from datetime import UTC, datetime
from pathlib import Path

from harness.fleet.coordinator import Coordinator
from harness.fleet.members import Members
from harness.fleet.messages import PlanSent
from harness.fleet.queue import Finished, TrialQueue
from harness.fleet.road import DaskRoad, FleetError
from harness.fleet.state import WRITE_EVERY_S, FleetState, write_state
from harness.fleet.view import FleetView
from harness.fleet.work import PlanWork
from harness.opening import check_folder, check_is_begun_so, check_same_plan, new_info
from harness.plan import Plan
from harness.stopping import standing
from harness.tuning.tuned_plans import why_another_phone
from results.database import UnwrittenError
from results.disk_errors import remedy_of
from results.runs import RunInfo
from results.store import Store, StoreError
from results.trials import Trial
from results.units import number_of

MOST_TOLD = 3
SHOW_EVERY_S = 0.5


class FleetRun:
    """A plan, a folder and a road. `run` returns when every trial is in the store."""

    def __init__(
        self, plan: Plan, sent: PlanSent, directory: Path, road: DaskRoad, view: FleetView, most_losses: int
    ) -> None:
        self._plan = plan
        self._sent = sent
        self._directory = directory
        self._road = road
        self._view = view
        self._most_losses = most_losses
        self._shown_s = self._written_s = float("-inf")
        self._begun_s = time.monotonic()
        self._n_before = 0

    def run(self, resume: bool, wait_s: float) -> None:
        """Raises `StoreError`, `FleetError`."""
        check_folder(self._directory, resume)
        if not resume:
            self._work(None, wait_s)
            return
        with Store.open(self._directory, migrates=False) as store:
            check_is_begun_so(store.info(), "fleet start", self._directory)
            check_same_plan(store, self._plan, (), self._directory)
            store.migrate()
            self._work(store, wait_s)

    def _work(self, store: Store | None, wait_s: float) -> None:
        info = None if store is None else store.info()
        before = standing(store.trials()) if store is not None and self._plan.protocol.stop is not None else ()
        work = PlanWork(self._plan, self._sent, before)
        members = Members(work.devices, self._directory, info)
        coordinator = Coordinator(work, members, self._road, self._view.say, on_trial=self._told)
        self._coordinator = coordinator
        self._road.open()
        is_over = False
        try:
            if store is None:
                with self._create(coordinator, members, wait_s) as made:
                    self._loop(made, work, coordinator)
            else:
                self._loop(store, work, coordinator)
            is_over = True
        finally:
            self._road.close(is_over)

    def _create(self, coordinator: Coordinator, members: Members, wait_s: float) -> Store:
        """The run is begun when every device is described: its machines belong to it."""
        self._view.say(f"waiting for {', '.join(m.device for m in members.all())}; on their machines:")
        where = self._road.address.for_workers
        options = " --tls-ca ... --tls-cert ... --tls-key ..." if where.is_tls else ""
        for member in members.all()[:MOST_TOLD]:
            self._view.say(f"  joulebench fleet join {where} --device {shlex.quote(member.device)}{options}")
        if (n_more := len(members.all()) - MOST_TOLD) > 0:
            self._view.say(f"  and so for {number_of(n_more, 'more device')}")
        until_s = time.monotonic() + wait_s
        while not coordinator.all_described():
            coordinator.step_before()
            self._show(coordinator)
            if time.monotonic() > until_s:
                missing = [f"{m.device} ({m.words or m.state})" for m in members.all() if m.description is None]
                raise FleetError(f"after {wait_s:.0f} s not there: {', '.join(missing)}; --wait-s waits longer")
        descriptions = [m.description for m in members.all() if m.description is not None]
        environments = {label: e for d in descriptions for label, e in d.environments.items()}
        if self._plan.tuned_for and (other := why_another_phone(self._plan.tuned_for, *environments.values())):
            raise StoreError("; ".join(other))
        self_tests = {label: test for d in descriptions for label, test in d.self_tests.items()}
        info: RunInfo = new_info(self._plan, environments, self_tests, members.inputs())
        members.begin(info)
        return Store.create(self._directory, info, [c.cell for c in self._plan.cells])

    def _loop(self, store: Store, work: PlanWork, coordinator: Coordinator) -> None:
        queue = TrialQueue(work.orders(), Finished(store.finished()), work.enough, most_losses=self._most_losses)
        work.run_id = store.info().run_id
        coordinator.begin(store, queue)
        store.note_unfinished(coordinator.n_trials)
        self._n_before, self._begun_s = coordinator.n_done, time.monotonic()
        if coordinator.n_done:
            self._view.say(f"resuming: {coordinator.n_done} of {coordinator.n_trials} trials are there")
        while not coordinator.is_done:
            coordinator.step()
            self._show(coordinator)
        store.note_unfinished(None)
        self._write(coordinator, is_over=True)

    def _told(self, label: str, trial: Trial) -> None:
        self._view.trial(self._coordinator.n_done, self._coordinator.n_trials, label, trial)

    def _show(self, coordinator: Coordinator) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= SHOW_EVERY_S:
            self._shown_s = now_s
            n_new = coordinator.n_done - self._n_before
            rate = n_new / (now_s - self._begun_s) if n_new else None
            self._view.show(self._state(coordinator, False), rate)
        if now_s - self._written_s >= WRITE_EVERY_S:
            self._written_s = now_s
            self._write(coordinator, is_over=False)

    def _write(self, coordinator: Coordinator, is_over: bool) -> None:
        state = self._state(coordinator, is_over)
        self._road.publish(state.model_dump_json())
        if Store.holds_run(self._directory):
            try:
                write_state(self._directory, state)
            except OSError as error:
                raise UnwrittenError(
                    f"{self._directory}: cannot be written ({error.strerror}); {remedy_of(error)} and go on"
                    " with --resume"
                ) from error

    def _state(self, coordinator: Coordinator, is_over: bool) -> FleetState:
        return FleetState(
            name=self._plan.name,
            address=str(self._road.address),
            pid=os.getpid(),
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            n_trials=coordinator.n_trials,
            n_done=coordinator.n_done,
            n_failed=coordinator.n_failed,
            is_over=is_over,
            devices=coordinator.device_states(),
        )


def sent_plan(plan: Plan, path: Path, data_root: Path | None, allow_code: bool, max_cells: int) -> PlanSent:
    return PlanSent(
        raw=plan.raw,
        plan_hash=plan.plan_hash,
        folder=str(path.parent.absolute()),
        data_root=None if data_root is None else str(data_root),
        allow_code=allow_code,
        max_cells=max_cells,
    )
