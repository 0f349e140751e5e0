"""Attempts at one trial: retries of what may pass, and a failed trial of what does not. Nothing is stored here."""

from __future__ import annotations

import traceback
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Literal, runtime_checkable
from typing import Protocol as TypingProtocol

from devices.base import Device, DeviceError, NotReadyError, TransientDeviceError
from engines.errors import EngineError, ResultError
from harness.matrix import CellPlan
from harness.run_parts import RunParts
from harness.samples import samples_of
from harness.schema import TrialProtocol
from harness.session import PreparedCell, Traces, run_trial
from results.cells import CONTENDED
from results.records import Sample
from results.trials import Failure, Trial
from results.units import format_share
from workloads.base import WorkloadError


class TrialProgress(TypingProtocol):
    """Told what happens on the way to a trial."""

    def preparing(self, cell: str) -> None: ...
    def waiting(self, device: str, reason: str, left_s: float) -> None: ...
    def trial_started(self, cell: str, repeat: int) -> None: ...
    def trial_repeated(self, cell: str, repeat: int, reason: str) -> None: ...


@runtime_checkable
class Gated(TypingProtocol):
    """A device that may be measured only in a certain state (on battery, cool), so that all trials start alike."""

    def why_not_ready(self) -> str | None:
        """One look, without waiting."""
        ...

    def wait_until_ready(self) -> None:
        """Raises `NotReadyError` when it still is not ready after its limit."""
        ...


@runtime_checkable
class Linked(TypingProtocol):
    """A device that may go away and come back."""

    def await_link(self) -> None:
        """Looks for it, up to a limit. Raises `DeviceError`."""
        ...


class Attempts:
    """Runs trials of one plan with one set of parts."""

    def __init__(
        self,
        protocol: TrialProtocol,
        run_parts: RunParts,
        progress: TrialProgress,
        samples: Mapping[tuple[str, str], tuple[Sample, ...]],
    ) -> None:
        self._protocol = protocol
        self._parts = run_parts
        self._progress = progress
        self.given_up: dict[str, str] = {}
        """Devices that were waited for in vain, and why. A phone on a charger would cost every trial the whole wait."""
        self.samples = dict(samples)
        """What is asked, in words, by workload and model."""

    def trial(
        self, cell_plan: CellPlan, repeat: int, protocol: TrialProtocol | None = None, gated: bool = True
    ) -> tuple[Trial, Traces]:
        """A trial, after the retries that transient failures and busy neighbours are worth.

        A stable failure becomes a failed trial. A trial whose last window was disturbed too stands, marked. protocol:
        another than the plan's. gated: it waits until its device is as all trials shall find it.
        """
        protocol, label = protocol or self._protocol, cell_plan.cell.label
        n_transient = 0
        contention_shares: list[float] = []
        while True:
            attempts = 1 + n_transient + len(contention_shares)
            started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
            try:
                arm = self._arm(cell_plan)
                asked = (cell_plan.cell.workload, cell_plan.cell.model)
                if asked not in self.samples:
                    self.samples[asked] = samples_of(arm.workload, arm.requests, arm.engine.tokenizer)
                if gated:
                    self._await_ready(arm.device)
                elif n_transient and isinstance(arm.device, Linked):
                    # It may be warm by now, as it should be, and gone.
                    arm.device.await_link()
                self._progress.trial_started(label, repeat)
                trial, traces = run_trial(arm, protocol, repeat)
                share = trial.foreign_cpu_share
                if (
                    share is not None
                    and CONTENDED in trial.marks
                    and len(contention_shares) < protocol.contention_retries
                ):
                    contention_shares.append(share)
                    self._progress.trial_repeated(
                        label, repeat, f"other processes took {format_share(share)} of the CPU"
                    )
                    continue
                counted = {"attempts": attempts, "contention_shares": tuple(contention_shares)}
                return trial.model_copy(update=counted), traces
            except TransientDeviceError as error:
                if n_transient < protocol.retries:
                    n_transient += 1
                    self._progress.trial_repeated(label, repeat, str(error))
                    continue
                failure = _failure(error, "transient", by_device=True)
            except ResultError as error:
                failure = Failure(kind="stable", error=str(error), result=error.result)
            except (DeviceError, EngineError, WorkloadError) as error:
                failure = _failure(error, "stable", by_device=isinstance(error, DeviceError))
            except Exception as error:  # noqa: BLE001 - the one place where whatever escaped becomes a failed trial
                failure = Failure(
                    kind="stable", error=f"{type(error).__name__}: {error}", traceback=traceback.format_exc()
                )
            failed = failed_trial(cell_plan, repeat, attempts, started_at, failure)
            return failed.model_copy(update={"contention_shares": tuple(contention_shares)}), {}

    def _await_ready(self, device: Device) -> None:
        """Waits for a device with gates. One that was given up is looked at once, until it is found ready."""
        if not isinstance(device, Gated):
            return
        if device.name in self.given_up:
            if device.why_not_ready() is not None:
                raise NotReadyError(self.given_up[device.name])
            del self.given_up[device.name]
            return
        try:
            device.wait_until_ready()
        except NotReadyError as error:
            self.given_up[device.name] = str(error)
            raise

    def _arm(self, cell_plan: CellPlan) -> PreparedCell:
        self._progress.preparing(cell_plan.cell.label)
        return self._parts.arm(cell_plan)

    def cool_down(self, cell_plan: CellPlan) -> None:
        """What the protocol asks for after a trial that came to figures."""
        if self._protocol.cooldown_s:
            clock = self._parts.arm(cell_plan).clock
            clock.sleep_until_s(clock.now_s() + self._protocol.cooldown_s)


def _failure(
    error: DeviceError | EngineError | WorkloadError, kind: Literal["transient", "stable"], by_device: bool
) -> Failure:
    """Of an error that is being handled."""
    is_lost = not isinstance(error, WorkloadError) and error.is_lost
    return Failure(kind=kind, error=str(error), traceback=traceback.format_exc(), by_device=by_device, lost=is_lost)


def failed_trial(cell_plan: CellPlan, repeat: int, attempts: int, started_at: str, failure: Failure) -> Trial:
    return Trial(
        trial_id=uuid.uuid4().hex,
        cell_id=cell_plan.cell.cell_id,
        repeat=repeat,
        attempts=attempts,
        status="failed",
        started_at=started_at,
        time_method="modelled" if cell_plan.is_modelled else "measured",
        failure=failure,
    )
