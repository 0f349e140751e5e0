"""What it costs to go from the cores of prefill to those of decoding, in the middle of a request.

python -m tests.benchmarks.core_switch

Each switch is that of a real request: a prompt is read, the threads move, tokens follow. The peer is the same request
without cores, whose step from prefill to decoding does nothing. A switch that a neighbour disturbed waits for a
scheduler's time slice, for a thread can only move to a core that takes it: those are told apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch

from engines.base import unheard
from engines.cores import PhaseCores, PhaseSetting, phase_setting
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.base import ChunkPhase
from engines.techniques.presets import DroplessParameters
from results.core_lists import core_words
from results.records import Request
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.benchmarks.timing import between, instant

N_REQUESTS, N_CALLS = 200, 2000
TARGET_MS = 1.0
PROMPT, NEW = 300, 4
REMARKS = """Lower is better; the target is an upper bound. A switch reads back the affinity of the threads of the
phase that ends, sets torch's number of threads, parks or takes workers of the kernels, and binds each thread that goes
on. It is timed inside requests on the bundled model, whose prompt makes torch begin workers of its own. A request is
quiet where other processes took less than a tenth of the CPU; the figures are of the quiet ones, where there are
twenty, and the row below them is of all. A thread can only move to a core that takes it, so beside a busy neighbour a
switch waits for the scheduler, as everything else does."""


class TimedCores(PhaseCores):
    """Notes what each switch takes."""

    def __init__(self, prefill: PhaseSetting, decode: PhaseSetting) -> None:
        super().__init__(prefill, decode)
        self.switches_s: dict[ChunkPhase, list[float]] = {"prefill": [], "decode": []}
        self.give_backs_s: list[float] = []

    def enter(self, phase: ChunkPhase) -> None:
        if phase == self._phase:
            return
        began_s = time.perf_counter()
        super().enter(phase)
        self.switches_s[phase].append(time.perf_counter() - began_s)

    def _give_back(self) -> None:
        began_s = time.perf_counter()
        super()._give_back()
        self.give_backs_s.append(time.perf_counter() - began_s)


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
    cores.switches_s = {"prefill": [], "decode": []}
    cores.give_backs_s = []
    is_quiet = []
    for _ in range(N_REQUESTS):
        engine.reset()
        before = instant()
        engine.run(request, unheard)
        is_quiet.append(between(before, instant()).is_quiet)
    steps = {
        "prefill to decoding": cores.switches_s["decode"],
        "request's start to prefill": cores.switches_s["prefill"],
        "decoding to where it was": cores.give_backs_s,
    }
    conditions = f"{name}, prompt {PROMPT}, {N_REQUESTS} requests"
    return [row for step, taken_s in steps.items() for row in _quantiles(step, taken_s, is_quiet, conditions)]


def _quantiles(step: str, taken_s: list[float], is_quiet: list[bool], conditions: str) -> list[Measurement]:
    taken_ms = np.asarray(taken_s) * 1e3
    quiet_ms = taken_ms[np.asarray(is_quiet)]
    enough = len(quiet_ms) >= 20
    used = quiet_ms if enough else taken_ms
    note = f"{len(quiet_ms)} of them quiet" if enough else f"DISTURBED: {len(quiet_ms)} of them quiet"
    target = TARGET_MS if enough else None
    return [
        *(
            measured(f"{step}, {name}", float(np.quantile(used, q)), "ms", conditions, target=target, note=note)
            for name, q in (("median", 0.5), ("99th percentile", 0.99))
        ),
        measured(f"{step}, 99th percentile of all", float(np.quantile(taken_ms, 0.99)), "ms", conditions),
    ]


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
    write_page("core-switch", "What a switch of cores between two phases costs", [*found, *call_rows()], REMARKS)


if __name__ == "__main__":
    main()
