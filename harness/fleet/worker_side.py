"""What a worker does with a message: it describes its machine, or runs one trial, which it keeps until it is asked for
the next."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from harness.fleet.kept import KeptTrial
from harness.fleet.messages import Answer, AskedSamples, Description, MessageError, PlanSent, Task, packed, unpacked
from harness.state import state_folder

if TYPE_CHECKING:
    from harness.attempts import Attempts
    from harness.matrix import CellPlan
    from harness.plan import Plan
    from harness.run_parts import RunParts
    from harness.session import Traces

SAY_EVERY_S = 5.0
PROCESS_ID = uuid.uuid4().hex
"""Of this process: a trial goes to the one whose machine was described."""

Say = Callable[[str], None]
"""Told what a worker is doing; also every few seconds that it is still doing it."""

log = logging.getLogger(__name__)


class RefusedError(Exception):
    """This worker cannot run the plan. `reasons`: one line each."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


class WorkerSide:
    """One worker's plan and its parts, kept from message to message. One message at a time."""

    def __init__(self) -> None:
        self._own: OwnRun | None = None
        self._kept: KeptTrial | None = None
        """Of the run that asked last."""
        self._one_at_a_time = threading.Lock()
        """A worker that has lost its coordinator may still run a trial when the next one asks."""

    def answer(self, content: object, say: Say) -> bytes:
        """Raises `MessageError`."""
        task, _ = unpacked(Task, content)
        with self._one_at_a_time, _saying(say) as now_doing:
            try:
                own = self._run_of(task)
                kept = self._kept = KeptTrial(state_folder(), task.run_id, task.device) if task.run_id else None
                if task.kind == "describe":
                    return own.description()
                if kept is not None and (again := kept.again(task, PROCESS_ID)) is not None:
                    return again
                answer, traces = own.trial(task, now_doing)
                content = packed(answer, traces)
                if answer.device_lost:
                    self._close_run()  # it is described again, and opened for that, before it is given another trial
                    return content
                if kept is not None:
                    kept.keep(task, content)
                own.cool_down(answer, now_doing)
                return content
            except RefusedError as error:
                if task.kind == "describe":
                    return packed(Description(process_id=PROCESS_ID, host=platform.node(), refused=error.reasons))
                return packed(Answer(lease_id=task.lease_id, process_id=PROCESS_ID, refused=error.reasons))

    def _run_of(self, task: Task) -> OwnRun:
        here = importlib.metadata.version("joulebench")
        if task.joulebench != here:
            raise RefusedError((f"the coordinator is joulebench {task.joulebench}, this worker {here}; update one",))
        if task.kind == "trial" and task.process_id != PROCESS_ID:
            raise RefusedError(("another worker of this device was described; two offer it, end one",))
        if self._own is None or self._own.sent != task.plan or self._own.device != task.device:
            self._close_run()
            self._own = OwnRun(task.plan, task.device)
        return self._own

    def _close_run(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def close(self, is_over: bool) -> None:
        """A trial that runs is finished and kept, unless the run has all of its trials."""
        if is_over:
            self._close_run()
            if self._kept is not None:
                self._kept.forget()
            return
        with self._one_at_a_time:
            self._close_run()
            path = None if self._kept is None else self._kept.path()
        if path is not None:
            log.warning(
                "%s keeps the last trial, which the fleet may not have: go on with `joulebench fleet start --resume`,"
                " and join it from here",
                path,
            )


class OwnRun:
    """A plan as far as one device has to do with it."""

    def __init__(self, sent: PlanSent, device: str) -> None:
        """Raises `RefusedError`."""
        from devices.device_lock import DeviceBusyError
        from engines.errors import EngineError
        from harness.host_lock import host_lock
        from harness.matrix import own_engines
        from harness.plan import PlanError, draft_plan
        from harness.preflight import preflight
        from harness.run_parts import RunParts

        self.sent = sent
        self.device = device
        data_root = None if sent.data_root is None else Path(sent.data_root)
        try:
            draft = draft_plan(sent.raw, data_root, sent.max_cells, (), Path(sent.folder))
            self._parts: RunParts = RunParts(draft.plan.protocol, sent.allow_code)
            try:
                whole = preflight(draft, self._parts)
            except BaseException:
                self._parts.close()
                raise
        except PlanError as error:
            raise RefusedError(error.problems) from error
        except EngineError as error:
            raise RefusedError((str(error),)) from error
        if whole.plan_hash != sent.plan_hash:
            self._parts.close()
            here = f" (left out here: {'; '.join(whole.not_run)})" if whole.not_run else ""
            asked = [one.spec.quantise for one in own_engines(draft.named.engines)]
            by_bf16 = any(quantise.multiplying_bf16 for quantise in asked)
            by_bytes = any(quantise.attending_by_bytes for quantise in asked)
            raise RefusedError(
                (
                    f"the plan makes other cells here (hash {whole.plan_hash}) than at the coordinator"
                    f" ({sent.plan_hash}){here}; give both the same models, data and profiles"
                    + ("; an arm by bf16 needs AVX-512 BF16 on both" if by_bf16 else "")
                    + ("; attention by bytes needs AVX-512 VNNI on both" if by_bytes else ""),
                )
            )
        self._locked = ExitStack()
        try:
            self._locked.enter_context(host_lock([device]))
        except DeviceBusyError as error:
            self._parts.close()
            raise RefusedError((str(error),)) from error
        self._plan: Plan = replace(whole, cells=tuple(c for c in whole.cells if c.device.name == device))
        self._cells: dict[str, CellPlan] = {c.cell.cell_id: c for c in self._plan.cells}
        self._attempts: Attempts | None = None
        self._told = _Told()

    def description(self) -> bytes:
        """Raises `RefusedError`."""
        from devices.base import DeviceError
        from harness.inputs import inputs_of
        from harness.opening import self_tests_of

        try:
            one_of_each = {c.cell.device: c for c in self._plan.cells}
            environments = {label: self._parts.environment(c) for label, c in one_of_each.items()}
            inputs = inputs_of(self._plan, self._parts)
        except DeviceError as error:
            raise RefusedError((str(error),)) from error
        except OSError as error:
            raise RefusedError((f"{error.filename}: {error.strerror}; make it readable",)) from error
        return packed(
            Description(
                process_id=PROCESS_ID,
                host=platform.node(),
                environments=environments,
                self_tests=self_tests_of(self._plan, environments),
                inputs=inputs,
            )
        )

    def trial(self, task: Task, now_doing: Say) -> tuple[Answer, Traces]:
        """Raises `MessageError`, `RefusedError`."""
        from harness.attempts import Attempts
        from results.store import StoreError

        cell_plan = self._cells.get(task.cell_id)
        if cell_plan is None:
            raise MessageError(f"{self.device} has no cell {task.cell_id}")
        if self._attempts is None:
            self._attempts = Attempts(self._plan.protocol, self._parts, self._told, {})
        self._told.say = now_doing
        self._parts.on_wait = lambda device, reason, left_s: now_doing(f"waits at most {left_s:.0f} s: {reason}")
        try:
            self._refuse_changed_inputs()
            trial, traces = self._attempts.trial(cell_plan, task.repeat)
            self._refuse_changed_inputs()
        except StoreError as error:
            raise RefusedError((str(error),)) from error
        trial = trial.model_copy(update={"attempts": trial.attempts + task.attempt - 1})
        asked = (cell_plan.cell.workload, cell_plan.cell.model)
        samples = self._attempts.samples.get(asked) if task.wants_samples else None
        is_lost = trial.is_lost and trial.failure is not None and trial.failure.by_device
        answer = Answer(
            lease_id=task.lease_id,
            process_id=PROCESS_ID,
            trial=trial,
            # One that was waited for in vain is there: on its charger, or warm.
            device_lost=is_lost and self.device not in self._attempts.given_up,
            heat=trial.heat,
            samples=() if samples is None else (AskedSamples(workload=asked[0], model=asked[1], samples=samples),),
        )
        return answer, traces

    def cool_down(self, answer: Answer, now_doing: Say) -> None:
        """After a trial that ran."""
        if answer.trial is None or answer.trial.status != "ok" or self._attempts is None:
            return
        if self._plan.protocol.cooldown_s:
            now_doing("cools down")
        self._attempts.cool_down(self._cells[answer.trial.cell_id])

    def _refuse_changed_inputs(self) -> None:
        self._parts.watch.add_read_later(self._parts.data_files)
        self._parts.watch.refuse_changes(Path("worker"))

    def close(self) -> None:
        self._parts.close()
        self._locked.close()


class _Told:
    """`harness.attempts.TrialProgress`, in words. `say` is of the trial that runs: it speaks under its own lease."""

    say: Say

    def preparing(self, cell: str) -> None:
        self.say("prepares")

    def waiting(self, device: str, reason: str, left_s: float) -> None:
        self.say(f"waits at most {left_s:.0f} s: {reason}")

    def trial_started(self, cell: str, repeat: int) -> None:
        self.say("measures")

    def trial_repeated(self, cell: str, repeat: int, reason: str) -> None:
        self.say(f"again: {reason}")


@contextmanager
def _saying(say: Say) -> Iterator[Say]:
    """Says what is being done when it changes, and every few seconds: a coordinator that hears nothing gives it up."""
    doing = ["begins"]
    ended = threading.Event()

    def now_doing(words: str) -> None:
        doing[0] = words
        say(words)

    def repeat() -> None:
        while not ended.wait(SAY_EVERY_S):
            say(doing[0])

    say(doing[0])
    thread = threading.Thread(target=repeat, name="fleet says", daemon=True)
    thread.start()
    try:
        yield now_doing
    finally:
        ended.set()
        thread.join()
