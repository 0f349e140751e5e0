"""A worker of a fleet whose trials are one command each on a fake phone: `python -m tests.fleet_worker join ADDRESS`.

All but the trial itself is what `joulebench fleet join` runs. A trial notes on the phone that it begins and ends.
"""

from __future__ import annotations

import json
import sys
import uuid

from devices.android.shell import Phone
from devices.base import DeviceError
from harness.fleet.dask_worker import WorkerAsked
from harness.fleet.joining import join
from harness.fleet.messages import Answer, AskedSamples, Description, Task, packed, unpacked
from harness.fleet.worker_side import Say
from results.records import Sample
from results.trials import Failure, Trial
from tests.fleet_phones import SERIALS, phone_environment

LOG = "/data/local/tmp/trials"
HELD = "/data/local/tmp/held"
"""On a phone: trials of the repeat that it names last for as long as it is there."""
TRIAL_S, HELD_S = 0.2, 600.0
"""Of a trial, and of one that is held at most."""
PROCESS_ID = uuid.uuid4().hex


class PhoneSide:
    """In the place of `harness.fleet.worker_side.WorkerSide`."""

    def answer(self, content: object, say: Say) -> bytes:
        task, _ = unpacked(Task, content)
        say("measures")
        phone = Phone(task.device)
        try:
            if task.kind == "describe":
                phone.run("true")
                return packed(self._description(task.device))
            line = f"{task.cell_id} {task.repeat} {task.attempt}"
            held = f'while [ "$(cat {HELD} 2>/dev/null)" = {task.repeat} ]; do sleep 0.05; done'
            done = phone.run(f"echo begin {line} >>{LOG}; sleep {TRIAL_S}; {held}; echo end {line} >>{LOG}", HELD_S)
            assert done.exit_code == 0
        except DeviceError as error:
            if task.kind == "describe":
                return packed(Description(process_id=PROCESS_ID, host="test", refused=(str(error),)))
            failure = Failure(kind="transient", error=str(error), by_device=True)
            return self._packed(task, Trial(**self._trial(task, "failed"), failure=failure), device_lost=True)
        return self._packed(task, Trial(**self._trial(task, "ok"), window_start_s=1.0, window_end_s=1.5))

    def _description(self, device: str) -> Description:
        return Description(process_id=PROCESS_ID, host="test", environments={device: phone_environment(device)})

    def _trial(self, task: Task, status: str) -> dict[str, object]:
        named = {"trial_id": uuid.uuid4().hex, "cell_id": task.cell_id, "repeat": task.repeat}
        return {**named, "attempts": task.attempt, "status": status, "started_at": "2026-11-24T00:00:00Z"}

    def _packed(self, task: Task, trial: Trial, device_lost: bool = False) -> bytes:
        samples = AskedSamples(workload="fixed_lengths", model="tiny", samples=(Sample(sample_id="s", question="q"),))
        asked = (samples,) if task.wants_samples else ()
        return packed(
            Answer(lease_id=task.lease_id, process_id=PROCESS_ID, trial=trial, samples=asked, device_lost=device_lost)
        )

    def close(self, is_over: bool) -> None:
        """Nothing is open."""


def main() -> None:
    if sys.argv[1] == "join":
        asked = [WorkerAsked(address=sys.argv[2], device=f"adb:{serial}", wait_s=60) for serial in SERIALS]
        sys.exit(join(asked, lambda line: sys.stderr.write(f"{line}\n") and None, module="tests.fleet_worker"))
    json.loads(sys.argv[1])  # as `join` starts it
    from harness.fleet import dask_worker

    dask_worker.main(PhoneSide())


if __name__ == "__main__":
    main()
