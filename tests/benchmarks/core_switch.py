"""What it costs to go from the cores of prefill to those of decoding, in the middle of a request.

python -m tests.benchmarks.core_switch

Each switch is that of a real request: a prompt is read, the threads move, tokens follow. Beside it stands the same
request without cores, whose switch does nothing. With a neighbour a switch waits for the scheduler, for a thread can
only move to a core that takes it: that is told apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from engines.base import unheard
from engines.cores import PhaseCores, PhaseSetting, phase_setting
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.context import ChunkPhase
from engines.techniques.presets import DroplessParameters
from results.core_lists import core_words
from results.records import Request
from tests.benchmarks.measurement import Measurement, beside_other_machines, measured, write_page
from tests.benchmarks.timing import between, instant

N_REQUESTS, N_CALLS = 120, 2000
TARGET_MS = 1.0
Step = Literal["prefill", "decode", "back"]
STEPS: dict[Step, str] = {
    "decode": "prefill to decoding",
    "prefill": "request's start to prefill",
    "back": "decoding to where it was",
}
PROMPT, NEW = 260, 4
REMARKS = """Lower is better; the target is an upper bound. A switch reads back the affinity of the threads of the
phase that ends, sets torch's number of threads, parks or takes workers of the kernels, and binds each thread that goes
on. It is timed inside requests on the bundled model, whose prompt makes torch begin workers of its own. "The queue" is
what the kernel counts of it as waiting for a core that somebody else has (schedstat): a switch cannot be quicker than
the scheduler, so with neighbours the time on the clock is theirs, and the time without the queue is the switch's. A
request is quiet where other processes took less than a tenth of the CPU."""


class TimedCores(PhaseCores):
    """Notes what each switch takes on the clock, and how much of that the caller waited for a core, in seconds."""

    def __init__(self, prefill: PhaseSetting, decode: PhaseSetting) -> None:
        super().__init__(prefill, decode)
        self.taken_s: dict[Step, list[tuple[float, float]]] = {"prefill": [], "decode": [], "back": []}

    def enter(self, phase: ChunkPhase) -> None:
        if phase == self._phase:
            return
        self._timed(phase, lambda: super(TimedCores, self).enter(phase))

    def _give_back(self) -> None:
        self._timed("back", super()._give_back)

    def _timed(self, step: Step, work: Callable[[], object]) -> None:
        queued_s = _queued_s()
        began_s = time.perf_counter()
        work()
        ended_s = time.perf_counter()
        self.taken_s[step].append((ended_s - began_s, _queued_s() - queued_s))


def _queued_s() -> float:
    """How long this thread was ready and had no core, since it began."""
    return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9


def rows(checkpoint: Checkpoint, name: str, cores: TimedCores) -> list[Measurement]:
    """A warm-up of five requests, then each request with the CPU time that others took meanwhile."""
    prompt_ids = tuple(5 + i % 200 for i in range(PROMPT))
    request = Request(
        request_id="r",
        sample_id="s",
        kind="generate",
        prompt_ids=prompt_ids,
        max_new_tokens=NEW,
        ignore_end_tokens=True,
    )
    engine = ReferenceEngine(checkpoint, DroplessParameters(), cores=cores)
    for _ in range(5):
        engine.run(request, unheard)
    for taken in cores.taken_s.values():
        taken.clear()
    is_quiet = []
    for _ in range(N_REQUESTS):
        engine.reset()
        before = instant()
        engine.run(request, unheard)
        is_quiet.append(between(before, instant()).is_quiet)
    conditions = f"{name}, prompt {PROMPT}, {N_REQUESTS} requests"
    note = f"{sum(is_quiet)} of the requests quiet"
    return [row for step in STEPS for row in _quantiles(step, cores.taken_s[step], conditions, note)]


def _quantiles(step: Step, taken_s: Sequence[tuple[float, float]], conditions: str, note: str) -> Iterator[Measurement]:
    clock_ms, queue_ms = np.asarray(taken_s).T * 1e3
    for name, q in (("median", 0.5), ("99th percentile", 0.99)):
        yield measured(
            f"{STEPS[step]}, {name} without the queue",
            float(np.quantile(np.maximum(clock_ms - queue_ms, 0), q)),
            "ms",
            conditions,
            target=TARGET_MS,
            note=note,
        )
        yield measured(
            f"{STEPS[step]}, {name} on the clock", float(np.quantile(clock_ms, q)), "ms", conditions, note=note
        )


def call_rows() -> list[Measurement]:
    """What single calls cost, on a process that is otherwise at rest."""
    both, one = os.sched_getaffinity(0), {min(os.sched_getaffinity(0))}
    calls: dict[str, Callable[[int], object]] = {
        "torch.set_num_threads, another number each time": lambda i: torch.set_num_threads(1 + i % 2),
        "sched_setaffinity of a thread that need not move": lambda i: os.sched_setaffinity(0, one if i % 2 else both),
        "sched_getaffinity": lambda _: os.sched_getaffinity(0),
    }
    found = []
    os.sched_setaffinity(0, one)
    for name, call in calls.items():
        taken_us = []
        for i in range(N_CALLS):
            began_s = time.perf_counter()
            call(i)
            taken_us.append((time.perf_counter() - began_s) * 1e6)
        note = f"99th percentile {np.quantile(taken_us, 0.99):.2g} us"
        found.append(measured(name, float(np.median(taken_us)), "us", f"{N_CALLS} calls", note=note))
    os.sched_setaffinity(0, both)
    return found


def main() -> None:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("needs two cores")
    first, second, both = str(usable[0]), str(usable[1]), core_words(usable[:2])
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    found = []
    for prefill, decode in ((both, first), (first, second), (both, both)):
        cores = TimedCores(phase_setting(prefill, None), phase_setting(decode, None))
        found += rows(checkpoint, f"cores {prefill} then {decode}", cores)
    found += rows(checkpoint, "no cores", TimedCores(PhaseSetting(1), PhaseSetting(1)))
    found = beside_other_machines("core-switch", [*found, *call_rows()])
    write_page("core-switch", "What a switch of cores between two phases costs", found, REMARKS)


if __name__ == "__main__":
    main()
