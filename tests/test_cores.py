"""Prefill and decoding compute on cores of their own: read from the system while they do, and given back afterwards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from devices.clock import MonotonicClock
from devices.host import Host
from engines import cores
from engines.base import PhaseEvent, unheard
from engines.cores import PhaseCores, PhaseSetting, own_threads, phase_setting, why_not_bound
from engines.errors import EngineError
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.observers import SparseLayerStep
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.core_lists import core_words, parse_cores
from results.records import Request
from results.roads import lost_cores, road_words

USABLE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(len(USABLE) < 2, reason="needs two cores to tell one from the other"),
]
FIRST, SECOND = map(str, [*USABLE, 0, 0][:2])
BOTH = core_words(USABLE[:2])
HOME = core_words(USABLE)
needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: no kernels, no pool")
TASKS = Path("/proc/self/task")
LONG = Request(
    request_id="long", sample_id="s", kind="generate", prompt_ids=tuple(5 + i % 200 for i in range(700)),
    max_new_tokens=100, ignore_end_tokens=True,
)  # fmt: skip
SHORT = LONG.model_copy(update={"request_id": "short", "prompt_ids": LONG.prompt_ids[:40], "max_new_tokens": 6})
ASKED = Request(
    request_id="asked", sample_id="s", kind="loglikelihood", prompt_ids=LONG.prompt_ids[:30],
    continuation_ids=(8, 9),
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


def engine_on(
    checkpoint: Checkpoint,
    prefill: str | None,
    decode: str | None,
    threads: tuple[int | None, int | None] = (None, None),
    compute_dtype: torch.dtype | None = None,
) -> ReferenceEngine:
    cores = PhaseCores(phase_setting(prefill, threads[0]), phase_setting(decode, threads[1]))
    return ReferenceEngine(checkpoint, DroplessParameters(), cores=cores, compute_dtype=compute_dtype)


def masks() -> dict[int, str]:
    """Of every thread of this process, as the kernel prints it."""
    found = {}
    for task in TASKS.iterdir():
        status = (task / "status").read_text(encoding="utf-8")
        found[int(task.name)] = status.partition("Cpus_allowed_list:")[2].split()[0]
    return found


def cpu_ns() -> dict[int, int]:
    """CPU time of every thread of this process."""
    return {int(task.name): int((task / "schedstat").read_text().split()[0]) for task in TASKS.iterdir()}


def native_ids() -> set[int]:
    """Threads that Python did not begin, and the main one."""
    here = threading.get_native_id()
    python = {thread.native_id for thread in threading.enumerate()} - {here}
    return {int(task.name) for task in TASKS.iterdir()} - python


class Watch:
    """A listener that notes at each edge the masks of the threads that computed since the edge before.

    Those with a third of the busiest one's time: the kernel books the time of a running thread at its ticks only, so
    that up to 10 ms of an idle worker's spinning behind a phase may be found in the next.
    """

    def __init__(self) -> None:
        self.computed: dict[PhaseEvent, set[str]] = {}
        self._before: dict[int, int] = {}

    def __call__(self, event: PhaseEvent, at_s: float) -> None:
        now, mine = cpu_ns(), native_ids()
        spent_ns = {i: now.get(i, 0) - self._before.get(i, 0) for i in mine}
        worked = {i for i, ns in spent_ns.items() if ns > max(spent_ns.values()) / 3}
        self.computed[event] = {mask for i, mask in masks().items() if i in worked}
        self._before = now


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["kernels", "torch"])
@pytest.mark.parametrize(("prefill", "decode"), [(BOTH, FIRST), (FIRST, SECOND), (FIRST, BOTH)])
def test_threads_that_compute_are_on_the_cores_of_their_phase(
    prefill: str, decode: str, dtype: torch.dtype | None, checkpoint: Checkpoint
) -> None:
    # A team of OpenMP from before, which no engine knows of.
    torch.set_num_threads(2)
    torch.zeros(1 << 20).add_(1)
    engine = engine_on(checkpoint, prefill, decode, compute_dtype=dtype)
    engine.run(LONG, unheard)
    # Three times: a thread of another library, that works once while the process is young, is none of the engine's.
    watches = [Watch() for _ in range(3)]
    for watch in watches:
        time.sleep(0.05)  # OpenMP's workers spin for milliseconds behind their last work
        engine.run(LONG, watch)
        assert {prefill} <= watch.computed["prefill end"]
        assert {decode} <= watch.computed["request end"]
    assert set.intersection(*(watch.computed["prefill end"] for watch in watches)) == {prefill}
    # As those of prefill do here, which decoding has no use for: on other cores than its own.
    elsewhere = {core_words(set(USABLE) - parse_cores(decode))} if decode != HOME else set()
    assert set.intersection(*(watch.computed["request end"] for watch in watches)) <= {decode} | elsewhere
    road = engine.take_road()
    assert road.prefill_threads is not None
    assert road.decoding_threads is not None
    assert (road.prefill_threads.cores, road.prefill_threads.found) == (prefill, (prefill,))
    assert (road.decoding_threads.cores, road.decoding_threads.found) == (decode, (decode,))
    assert road.prefill_threads.n_threads == (2 if prefill == BOTH else 1)
    assert lost_cores(road) == ()


class CoreTimes:
    """Another thread that notes, every millisecond, on which core the main thread's CPU time was spent."""

    def __init__(self) -> None:
        self.ns: dict[str, dict[int, int]] = {"prefill": defaultdict(int), "decode": defaultdict(int)}
        self._phase = ""
        self._main = TASKS / str(threading.get_native_id())
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> CoreTimes:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def hear(self, event: PhaseEvent, at_s: float) -> None:
        self._phase = {"request start": "prefill", "prefill end": "decode", "request end": ""}[event]

    def _watch(self) -> None:
        before: tuple[str, int, int] | None = None
        while not self._ended.wait(0.001):
            core = int((self._main / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[36])
            now = (self._phase, core, int((self._main / "schedstat").read_text().split()[0]))
            if before is not None and before[:2] == now[:2] and now[0]:
                self.ns[now[0]][core] += now[2] - before[2]
            before = now


def test_cpu_time_of_each_phase_is_spent_on_its_core(checkpoint: Checkpoint) -> None:
    engine = engine_on(checkpoint, FIRST, SECOND)
    with CoreTimes() as times:
        for _ in range(4):
            engine.run(LONG, times.hear)
    spent = {phase: {core for core, ns in by_core.items() if ns > 2_000_000} for phase, by_core in times.ns.items()}
    # The first sample after an edge may be of the instants before the switch, so a core needs two milliseconds.
    assert spent == {"prefill": {int(FIRST)}, "decode": {int(SECOND)}}


@pytest.mark.parametrize(("prefill", "decode"), [(FIRST, SECOND), (BOTH, FIRST)])
def test_answers_are_those_without_cores(prefill: str, decode: str, checkpoint: Checkpoint) -> None:
    plain, bound = ReferenceEngine(checkpoint, DroplessParameters(), threads=1), engine_on(checkpoint, prefill, decode)
    for request in (LONG, SHORT):
        assert bound.run(request, unheard).token_ids == plain.run(request, unheard).token_ids
    ours, theirs = bound.run(ASKED, unheard).loglikelihood, plain.run(ASKED, unheard).loglikelihood
    assert ours == pytest.approx(theirs, rel=1e-5)
    batch = [c.token_ids for c in bound.run_batch([SHORT, LONG], unheard)]
    assert batch == [c.token_ids for c in plain.run_batch([SHORT, LONG], unheard)]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["kernels", "torch"])
def test_every_thread_is_given_back_after_a_request(dtype: torch.dtype | None, checkpoint: Checkpoint) -> None:
    engine = engine_on(checkpoint, BOTH if BOTH != HOME else FIRST, SECOND, compute_dtype=dtype)
    for ask in (engine.run, lambda request, listener: engine.run_batch([request, SHORT], listener)):
        ask(LONG, unheard)
        assert set(masks().values()) == {HOME}

    def breaks(event: PhaseEvent, at_s: float) -> None:
        if event == "prefill end":
            raise RuntimeError("a meter was lost")

    with pytest.raises(RuntimeError, match="a meter was lost"):
        engine.run(LONG, breaks)
    assert set(masks().values()) == {HOME}


def test_the_next_arm_computes_where_it_may(checkpoint: Checkpoint) -> None:
    bound, plain = engine_on(checkpoint, FIRST, FIRST), ReferenceEngine(checkpoint, DroplessParameters(), threads=2)
    watch = Watch()
    for engine, listener in ((bound, unheard), (plain, watch), (bound, unheard)):
        engine.run(LONG, listener)
    assert watch.computed["prefill end"] == watch.computed["request end"] == {HOME}
    road = plain.take_road()
    assert (road.prefill_threads, road.decoding_threads, road.n_threads) == (None, None, 2)


def test_only_threads_that_compute_are_bound(checkpoint: Checkpoint) -> None:
    """A sampler that waits, and one that begins between two requests."""
    engine, ended, seen = engine_on(checkpoint, FIRST, FIRST), threading.Event(), []
    with_before = threading.Thread(target=ended.wait)
    with_before.start()
    engine.run(SHORT, unheard)
    with_after = threading.Thread(target=ended.wait)
    with_after.start()
    samplers = (with_before.native_id, with_after.native_id)

    def look(event: PhaseEvent, at_s: float) -> None:
        seen.append([masks()[i] for i in samplers if i is not None])

    engine.run(SHORT, look)
    ended.set()
    with_before.join()
    with_after.join()
    assert seen == [[HOME, HOME]] * 3


def test_the_cpu_time_of_the_machine_is_counted_as_without_cores(checkpoint: Checkpoint) -> None:
    """What others take of a window is a share of the same cores, whichever an arm uses."""
    host = Host("host", (), {}, MonotonicClock())
    engine, found = engine_on(checkpoint, FIRST, SECOND), []

    def look(event: PhaseEvent, at_s: float) -> None:
        before_s = time.perf_counter()
        found.append((before_s, host.cpu_seconds(), time.perf_counter()))

    for _ in range(3):
        engine.run(LONG, look)
    (outer_from_s, first, inner_from_s), (inner_to_s, last, outer_to_s) = found[0], found[-1]
    assert first is not None
    assert last is not None
    available_s = (last.available_s - first.available_s) / len(USABLE)
    # Between two looks, which others may delay. Ticks of 10 ms on each core, before and after.
    assert inner_to_s - inner_from_s - 0.03 <= available_s <= outer_to_s - outer_from_s + 0.03


def test_cores_that_were_not_kept_are_told(checkpoint: Checkpoint) -> None:
    engine = engine_on(checkpoint, FIRST, FIRST)

    class Moves:
        """What taskset or a container's manager does from outside, in the middle of decoding."""

        def layer(self, seen: SparseLayerStep) -> None:
            if seen.phase == "decode":
                os.sched_setaffinity(0, {int(SECOND)})

    engine.layer_observer = Moves()
    engine.run(SHORT, unheard)
    road = engine.take_road()
    assert lost_cores(road) == (f"cores: decoding asked for {FIRST}, and its threads were found on {SECOND}",)
    assert set(masks().values()) == {HOME}
    engine.layer_observer = None
    engine.run(SHORT, unheard)
    assert lost_cores(engine.take_road()) == (), "of the next window alone"


def test_thread_counts_follow_the_sets_or_the_plan(checkpoint: Checkpoint) -> None:
    seen: list[int] = []

    def count(event: PhaseEvent, at_s: float) -> None:
        seen.append(torch.get_num_threads())

    engine_on(checkpoint, BOTH, FIRST).run(SHORT, count)
    engine_on(checkpoint, BOTH, BOTH, threads=(None, 1)).run(SHORT, count)
    engine = engine_on(checkpoint, None, None, threads=(2, 1))
    engine.run(SHORT, count)
    # At the request's start the number is the larger one.
    assert seen == [2, 2, 1] * 3
    assert "prefill with 2 threads, decoding with 1 thread" in road_words(engine.take_road())


def test_one_phase_alone_may_be_bound(checkpoint: Checkpoint) -> None:
    engine, watch = engine_on(checkpoint, None, SECOND, threads=(1, None)), Watch()
    engine.run(LONG, watch)
    assert (watch.computed["prefill end"], watch.computed["request end"]) == ({HOME}, {SECOND})


def test_calibration_gives_the_threads_back(checkpoint: Checkpoint) -> None:
    from engines.techniques.presets import preset_parameters

    cores = PhaseCores(phase_setting(FIRST, None), phase_setting(SECOND, None))
    engine = ReferenceEngine(checkpoint, preset_parameters("npumoe-t")(), cores=cores)
    engine.calibrate([LONG.prompt_ids])
    assert set(masks().values()) == {HOME}
    road = engine.take_road()
    assert (road.prefill_threads, road.decoding_threads) == (None, None), "nothing was asked yet"


WORKERS_AT_REST = """
import os, pathlib, time, torch
from engines.kernels import native
tasks = pathlib.Path("/proc/self/task")
cpu_ns = lambda: {int(t.name): int((t / "schedstat").read_text().split()[0]) for t in tasks.iterdir()}
weight, x = torch.randn(4000, 256), torch.randn(1, 256)
torch.set_num_threads(4)
before = cpu_ns()
for _ in range(20):
    native.linear(x, weight)
workers = cpu_ns().keys() - before.keys()
torch.set_num_threads(2)
native.linear(x, weight)
time.sleep(0.02)
start = cpu_ns()
for _ in range(100):
    native.linear(x, weight)
    time.sleep(0.002)
print(*sorted(ns - start[i] for i, ns in cpu_ns().items() if i in workers))
"""


@needs_compiler
def test_workers_that_are_not_used_sleep() -> None:
    """Jobs for two threads leave the third and the fourth asleep: neither woken nor spinning."""
    done = subprocess.run([sys.executable, "-c", WORKERS_AT_REST], capture_output=True, text=True, check=True)
    spent_ns = [int(ns) for ns in done.stdout.split()]
    assert len(spent_ns) == 3
    # Each of 100 wakings would spin for a millisecond.
    assert max(spent_ns[:2]) < 1_000_000


def test_workers_are_told_to_sleep_before_the_caller_goes_where_one_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """From two cores to one of them: a worker of the kernels that still spins there would keep it for a slice."""
    done: list[str] = []
    bind, chosen = cores._bind, cores._chosen
    monkeypatch.setattr(cores, "_bind", lambda thread, to: done.append(f"bind {thread}") or bind(thread, to))  # type: ignore[func-returns-value]
    monkeypatch.setattr(cores, "_chosen", lambda n: done.append(f"choose {n}") or chosen(n))  # type: ignore[func-returns-value]
    both = PhaseCores(phase_setting(BOTH, 2), phase_setting(FIRST, 1))
    both.make_ready()
    with both.given_back():
        both.enter("prefill")
        done.clear()
        both.enter("decode")
        assert done.index("choose 1") < done.index("bind 0")


def test_cores_that_cannot_be_had_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_bound(frozenset({USABLE[0]})) is None
    n = os.cpu_count() or 0
    assert why_not_bound(frozenset({USABLE[0], n})) == (f"this machine has no core {n}; this process may use {HOME}")
    os.sched_setaffinity(0, {USABLE[0]})
    try:
        reason = why_not_bound(frozenset({USABLE[1]}))
    finally:
        os.sched_setaffinity(0, USABLE)
    assert reason == f"this process may not use core {SECOND}; it may use {FIRST}"
    with pytest.raises(EngineError, match=f'2 threads on cores "{FIRST}": at most one on each core'):
        phase_setting(FIRST, 2)
    with pytest.raises(EngineError, match='cores "3-1" runs backwards'):
        phase_setting("3-1", None)
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert why_not_bound(frozenset({USABLE[0]})) == (
        "OMP_PROC_BIND='close' has OpenMP bind torch's threads otherwise; unset it"
    )


def test_an_arm_without_threads_has_torchs_own_number_whatever_an_arm_before_it_set() -> None:
    own = torch.get_num_threads()
    wide = PhaseSetting(own + 2)
    PhaseCores(wide, PhaseSetting(own + 3)).make_ready()
    assert torch.get_num_threads() == own + 3
    PhaseCores(wide, wide).make_ready()
    assert phase_setting(None, None).n_threads == own_threads() == own
    torch.set_num_threads(own + 5)  # by no engine: the program's own from now on
    assert own_threads() == own + 5
