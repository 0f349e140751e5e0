"""What a fleet works at: the cells of a plan, by the device that they run on."""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol

from harness.attempts import failed_trial
from harness.fleet.messages import PlanSent, Task, packed
from harness.fleet.queue import Item, Lease
from harness.matrix import CellPlan
from harness.plan import Plan
from harness.runner import rule_of, trial_order
from results.trials import Failure, Trial


class Work(Protocol):
    """All that the coordinator must know of what it hands out."""

    n_trials: int
    """At most."""

    def orders(self) -> Mapping[str, Iterable[Item]]:
        """By device, what it may be asked, in the order of the plan."""
        ...

    def enough(self, cell_id: str) -> bool: ...
    def seen(self, trial: Trial) -> int:
        """Told of each finished trial. Returns how many of its cell are not needed any more."""
        ...

    def label(self, cell_id: str) -> str: ...
    def asks(self, cell_id: str) -> tuple[str, str]:
        """Workload and model, by which samples are kept."""
        ...

    def description_asked(self, device: str) -> bytes: ...
    def task(self, lease: Lease, process_id: str, wants_samples: bool) -> bytes: ...
    def failed(self, lease: Lease, losses: tuple[str, ...]) -> Trial:
        """The trial of a lease in which a worker or its device was lost too often."""
        ...


class PlanWork:
    """Of a plan. A device is where a cell runs, whatever a sweep calls it."""

    def __init__(self, plan: Plan, sent: PlanSent, before: Iterable[Trial] = ()) -> None:
        """before: trials that a run which goes on has, without lost ones; those of a plan without a stopping rule need
        not be given."""
        self._plan = plan
        self._sent = sent
        self.run_id = ""
        """Once the run is begun."""
        self._cells = {c.cell.cell_id: c for c in plan.cells}
        self._version = importlib.metadata.version("joulebench")
        self.n_trials = sum(rule_of(plan, c).max_repeats for c in plan.cells)
        self._trials: dict[str, list[Trial]] = defaultdict(list)
        self._enough: set[str] = set()
        for trial in before:
            self.n_trials -= self.seen(trial)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(c.device.name for c in self._plan.cells))

    def orders(self) -> Mapping[str, Iterable[Item]]:
        by_device: dict[str, list[CellPlan]] = defaultdict(list)
        for cell_plan in self._plan.cells:
            by_device[cell_plan.device.name].append(cell_plan)
        return {name: _order(replace(self._plan, cells=tuple(own))) for name, own in by_device.items()}

    def enough(self, cell_id: str) -> bool:
        return cell_id in self._enough

    def seen(self, trial: Trial) -> int:
        if self._plan.protocol.stop is None or trial.cell_id in self._enough:
            return 0
        have = self._trials[trial.cell_id]
        have.append(trial)
        rule = rule_of(self._plan, self._cells[trial.cell_id])
        if not rule.enough(have):
            return 0
        self._enough.add(trial.cell_id)
        del self._trials[trial.cell_id]
        return rule.max_repeats - len(have)

    def label(self, cell_id: str) -> str:
        return self._cells[cell_id].cell.label

    def asks(self, cell_id: str) -> tuple[str, str]:
        cell = self._cells[cell_id].cell
        return cell.workload, cell.model

    def description_asked(self, device: str) -> bytes:
        asked = Task(kind="describe", joulebench=self._version, plan=self._sent, device=device, run_id=self.run_id)
        return packed(asked)

    def task(self, lease: Lease, process_id: str, wants_samples: bool) -> bytes:
        return packed(
            Task(
                kind="trial",
                joulebench=self._version,
                plan=self._sent,
                device=lease.device,
                run_id=self.run_id,
                lease_id=lease.lease_id,
                cell_id=lease.cell_id,
                repeat=lease.repeat,
                attempt=lease.attempt,
                wants_samples=wants_samples,
                process_id=process_id,
            )
        )

    def failed(self, lease: Lease, losses: tuple[str, ...]) -> Trial:
        told = "; ".join(dict.fromkeys(losses))
        given_up = f"given up, since its worker or its device was lost {len(losses)} times in it ({told})"
        failure = Failure(kind="transient", error=given_up, by_device=True)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return failed_trial(self._cells[lease.cell_id], lease.repeat, len(losses), now, failure)


def _order(plan: Plan) -> Iterator[Item]:
    return ((cell_plan.cell.cell_id, repeat) for cell_plan, repeat in trial_order(plan))
