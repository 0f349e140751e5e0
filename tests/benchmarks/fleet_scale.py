"""What the coordinator of a fleet holds: 1000 devices, 10^6 cells of one trial, and its own death in the middle.

Devices are simulated: they sleep on a virtual clock. Queue, leases, messages and store are the real ones; Dask's
network is left out, and so are trace files (a million small ones would measure the file system). Of the trials, 1 in
100 loses its worker, 1 in 1000 is never heard of again, and 1 in 1000 answers after its lease has ended. After half of
the trials the coordinator's process is killed with SIGKILL, and another one goes on with the folder.

python -m tests.benchmarks.fleet_scale [N_CELLS]     default: 1000000
python -m tests.benchmarks.fleet_scale part FOLDER N_CELLS STOP_AT     one of its processes
"""

from __future__ import annotations

import heapq
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.fleet.coordinator import Coordinator
from harness.fleet.members import Members
from harness.fleet.messages import HEAD_BYTES, Answer, Description, PlanSent, Task, packed, sealed
from harness.fleet.queue import Finished, Item, Lease, TrialQueue
from harness.fleet.road import Came, Event, Lost, Said
from harness.fleet.worker_side import SAY_EVERY_S
from results.records import Cell
from results.store import Store
from results.trials import Failure, Trial
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.run_builders import ENVIRONMENT, cell, completion, reading, run_info, trial

N_CELLS, N_DEVICES = 1_000_000, 1000
TRIAL_S = 20.0
"""Mean of a trial's virtual seconds; each lasts between half and one and a half of it."""
TOGETHER_S = 1.0
"""What comes within so many virtual seconds is taken in together."""
LOST, SILENT, LATE = 0.01, 0.001, 0.001
LATE_S = 100.0
DEVICES = [f"adb:SIM{i:04d}" for i in range(N_DEVICES)]
PLAN = PlanSent(raw={"name": "scale"}, plan_hash="0", folder="/", data_root=None, max_cells=N_CELLS)


def cells(n: int) -> Iterator[Cell]:
    whole = cell("0" * 12)
    return (
        whole.model_copy(
            update={"cell_id": f"{i:012x}", "label": f"arm {i // N_DEVICES}", "device": DEVICES[i % N_DEVICES]}
        )
        for i in range(n)
    )


class SimulatedWork:
    """In the place of a plan: cell i runs on device i modulo 1000, once."""

    def __init__(self, n: int) -> None:
        self.n_trials = n

    def orders(self) -> Mapping[str, Iterator[Item]]:
        return {
            device: ((f"{i:012x}", 0) for i in range(first, self.n_trials, N_DEVICES))
            for first, device in enumerate(DEVICES)
        }

    def enough(self, cell_id: str) -> bool:
        return False

    def seen(self, one: Trial) -> int:
        return 0

    def label(self, cell_id: str) -> str:
        return cell_id

    def asks(self, cell_id: str) -> tuple[str, str]:
        return "gsm8k", "tiny-moe"

    def description_asked(self, device: str) -> bytes:
        return packed(Task(kind="describe", joulebench="0", plan=PLAN, device=device))

    def task(self, lease: Lease, process_id: str, wants_samples: bool) -> bytes:
        named = {"lease_id": lease.lease_id, "cell_id": lease.cell_id, "repeat": lease.repeat, "attempt": lease.attempt}
        return packed(
            Task(kind="trial", joulebench="0", plan=PLAN, device=lease.device, process_id=process_id, **named)
        )

    def failed(self, lease: Lease, losses: tuple[str, ...]) -> Trial:
        failure = Failure(kind="stable", error="; ".join(losses))
        return trial(lease.cell_id, lease.repeat, completions=(), status="failed", failure=failure)


class SleepingDevices:
    """`harness.fleet.road.Road`: each device sleeps through its trial, and answers. It has the clock, too."""

    def __init__(self, seed: int) -> None:
        self.now_s = 0.0
        self.busy_s = 0.0
        """Real seconds that the simulation itself took."""
        self._rng = random.Random(seed)
        self._events: list[tuple[float, int, Event]] = []
        self._n = 0
        self._devices = dict.fromkeys(DEVICES, 1)
        given = [reading(phase, 2.0) for phase in ("prefill", "decode", "all")]
        one = trial("CELL_ID", 0, completions=[completion()], energy=tuple(given), started_at="2026-11-24T00:00:00Z")
        self._answer = Answer(lease_id="LEASE_ID", process_id="p", trial=one).model_dump_json()

    def clock_s(self) -> float:
        return self.now_s

    def devices(self) -> Mapping[str, int]:
        return self._devices

    def forget(self, key: str) -> None:
        """Nothing is kept for it."""

    def _at(self, at_s: float, event: Event) -> None:
        self._n += 1
        heapq.heappush(self._events, (at_s, self._n, event))

    def send(self, key: str, device: str, content: bytes) -> None:
        began_s = time.perf_counter()
        task = json.loads(content[HEAD_BYTES:])
        if task["kind"] == "describe":
            self._at(
                self.now_s,
                Came(key, packed(Description(process_id="p", host="sim", environments={device: ENVIRONMENT}))),
            )
            self.busy_s += time.perf_counter() - began_s
            return
        lasts_s = self._rng.uniform(0.5, 1.5) * TRIAL_S
        luck = self._rng.random()
        end_s = self.now_s + lasts_s
        if luck < LOST:
            self._at(self.now_s + lasts_s / 2, Lost(key, "its worker was lost", True))
        elif luck > LOST + SILENT:
            late_s = LATE_S if luck < LOST + SILENT + LATE else 0.0
            text = self._answer.replace("LEASE_ID", key).replace("CELL_ID", task["cell_id"]).encode()
            self._at(end_s + late_s, Came(key, sealed(text)))
            for k in range(int(lasts_s / SAY_EVERY_S)):
                self._at(self.now_s + k * SAY_EVERY_S, Said(key, "measures"))
        self.busy_s += time.perf_counter() - began_s

    def events(self, timeout_s: float) -> Sequence[Event]:
        """The clock goes on to what comes next; where nothing comes, so that the coordinator sees who is silent."""
        if not timeout_s:
            return ()
        began_s = time.perf_counter()
        until_s = self.now_s + TOGETHER_S
        if self._events and self._events[0][0] > until_s:
            until_s = min(self._events[0][0], self.now_s + 10.0) + TOGETHER_S
        found = []
        while self._events and self._events[0][0] <= until_s:
            found.append(heapq.heappop(self._events)[2])
        self.now_s = until_s
        self.busy_s += time.perf_counter() - began_s
        return found


def part(folder: Path, n: int, stop_at: int) -> dict[str, Any]:
    """Begins the run or goes on with it, until so many trials are there."""
    began_s = time.perf_counter()
    work, devices = SimulatedWork(n), SleepingDevices(seed=stop_at)
    info = run_info("scale", run_id="scale-1", environments=dict.fromkeys(DEVICES, ENVIRONMENT))
    is_new = not Store.holds_run(folder)
    with Store.create(folder, info, cells(n)) if is_new else Store.open(folder) as store:
        opened_s = time.perf_counter() - began_s
        coordinator = Coordinator(
            work, Members(DEVICES, folder, store.info()), devices, lambda line: None, devices.clock_s
        )
        queue = TrialQueue(work.orders(), Finished(store.finished()))
        coordinator.begin(store, queue)
        ready_s = time.perf_counter() - began_s
        n_before, began_s, cpu_s, devices.busy_s = coordinator.n_done, time.perf_counter(), time.process_time(), 0.0
        while not coordinator.is_done and coordinator.n_done < stop_at:
            coordinator.step()
        lasted_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        found = {
            "opened_s": opened_s,
            "ready_s": ready_s,
            "n": coordinator.n_done - n_before,
            "n_failed": coordinator.n_failed,
            "n_late": coordinator.n_late,
            "n_lost": sum(d.n_lost for d in coordinator.device_states()),
            "lasted_s": lasted_s,
            "cpu_s": cpu_s,
            "simulation_s": devices.busy_s,
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "file_bytes": (folder / "run.sqlite").stat().st_size,
        }
        if coordinator.n_done < n:
            print(json.dumps(found), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        kept = store.finished()
        found["n_kept"] = len(kept)
        found["is_whole"] = kept == {(f"{i:012x}", 0) for i in range(n)}
        return found


def in_a_process(folder: Path, n: int, stop_at: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.fleet_scale", "part", str(folder), str(n), str(stop_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(done.returncode)
    return dict(json.loads(done.stdout))


def measure(n: int) -> list[Measurement]:
    with tempfile.TemporaryDirectory() as folder:
        first = in_a_process(Path(folder) / "run", n, n // 2)
        second = in_a_process(Path(folder) / "run", n, n)
    if not second["is_whole"] or second["n_kept"] != n:
        raise SystemExit(f"{second['n_kept']} of {n} trials are there")
    size = f"{n:,} cells on {N_DEVICES:,} devices"
    own_s = sum(p["lasted_s"] - p["simulation_s"] for p in (first, second))
    rates = [p["n"] / (p["lasted_s"] - p["simulation_s"]) for p in (first, second)]
    lost = f"{first['n_lost'] + second['n_lost']} workers lost, {first['n_late'] + second['n_late']} answers too late"
    failed = first["n_failed"] + second["n_failed"]
    note = f"{lost}, {failed} trials failed with 3 lost workers; each of the {n:,} is in the store once"
    return [
        measured("trials given out, checked and committed", n / own_s, "1/s", size, note=note),
        measured("the same, first half", rates[0], "1/s", size),
        measured("the same, second half", rates[1], "1/s", size),
        measured(
            "CPU time of one trial",
            1e6 * (first["cpu_s"] + second["cpu_s"] - first["simulation_s"] - second["simulation_s"]) / n,
            "µs",
            size,
        ),
        measured("to begin the run: all cells are written", first["ready_s"], "s", size),
        measured(
            "recovery after kill -9: until trials are given out again",
            second["ready_s"],
            "s",
            size,
            note=f"half of the trials are there; {second['opened_s']:.1f} s of it check the database",
        ),
        measured("peak memory, until it was killed", first["peak_bytes"] / 1e9, "GB", size),
        measured("peak memory, of the one that went on", second["peak_bytes"] / 1e9, "GB", size),
        measured("run.sqlite at the end", second["file_bytes"] / 1e9, "GB", size),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == ["part"]:
        print(json.dumps(part(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))), flush=True)
    else:
        write_page(
            "fleet-scale",
            "How large may a fleet be?",
            measure(int(sys.argv[1]) if len(sys.argv) > 1 else N_CELLS),
            "Devices sleep on a virtual clock. Queue, leases, messages and store are the real ones. Dask's network is"
            " left out, and so are trace files. 1 trial in 100 loses its worker, 1 in 1000 is never heard of again, and"
            " 1 in 1000 answers after its lease has ended. After half of the trials the coordinator is killed with"
            " SIGKILL. Seconds that the simulation itself took are taken out of the rates. No peer: nothing else does"
            " this job.",
        )
