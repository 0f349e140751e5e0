"""One trial: idle baseline, warm-up, one window over the requests, scores, idle baseline again.

Latency, energy and accuracy of a trial come from the same requests in the same window. Building prompts, scoring, and
loading lie outside it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, runtime_checkable
from typing import Protocol as TypingProtocol

from devices.base import Clock, Device, DeviceError, Meter
from devices.cpu_cycles import CpuCycles, cycles_between
from devices.cpu_seconds import counted_as_ours
from devices.peak_memory import PeakMemory, peak_memory, reset_peak_memory
from devices.state_watch import changes, switched_cores, watched
from engines.base import (
    AsksServer,
    Engine,
    HoldsWeights,
    PhaseEvent,
    SpansProcesses,
    StartsPrograms,
    TellsActiveWeights,
    TellsHeat,
    TellsMarks,
    TellsPlacement,
    TellsRemarks,
    TellsRoad,
    TellsSteps,
    unheard,
)
from harness.agreement import disagreements, not_compared
from harness.interrupts import n_stops
from harness.schema import TrialProtocol
from harness.serving import at_once, serve
from harness.windows import idle, is_contended, raw_traces, running_meters, window_marks
from results.cells import CONTENDED, CORES_NOT_KEPT, STOPPED, WRONG_ANSWERS
from results.copies import DecodeStep
from results.cpu_time import CpuSeconds, foreign_share
from results.derivation import PricedBy, derived_by, energies_of, remarks_on
from results.environments import Conditions, Road
from results.expert_heat import ExpertHeat
from results.graph_placement import GraphPlacement, placement_marks
from results.in_step import met_alike
from results.latencies import n_behind_first
from results.records import Completion, PowerTrace, Request, Score
from results.requests import requests_sha256
from results.roads import lost_cores
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW, raw_part
from results.trials import Trial
from workloads.base import Workload, WorkloadError

Traces = dict[str, Sequence[PowerTrace]]
NO_CYCLES = CpuCycles(None, "CPU cycles: this device does not count them")
NO_CYCLES_OF_SERVER = CpuCycles(None, "CPU cycles: a server computed, and those of its processes are not counted")
NO_MEMORY_OF_SERVER = PeakMemory(None, "peak memory: a server computed, and its processes are not known here")
NO_MEMORY_OF_PROGRAM = PeakMemory(None, "peak memory: a program computed that was started for each request")
NO_MEMORY = PeakMemory(None, "peak memory: this device does not tell it")
PROC = Path("/proc")
BUSY_IDLE = (
    "idle before or after a window: other processes took more of the CPU than protocol.max_foreign_cpu_share; idle"
    " power has theirs in it, and net joules are too low"
)

OTHERS_ON_GPU = (
    "other programs have the GPU open: where they computed, their joules are in these, and they made ours slower"
)

log = logging.getLogger(__name__)


@runtime_checkable
class CountsCycles(TypingProtocol):
    """A device that counts the CPU cycles of what we run on it."""

    def cpu_cycles(self) -> CpuCycles: ...


@runtime_checkable
class CountsMemory(TypingProtocol):
    """A device that tells the peak memory of what we run on it."""

    def reset_peak_memory(self) -> PeakMemory | None: ...
    def peak_memory(self) -> PeakMemory: ...


@runtime_checkable
class IsPriced(TypingProtocol):
    """A modelled device, whose sheet decides times and joules."""

    priced_by: PricedBy | None


class ArmScores(NamedTuple):
    """Scores of an arm that no window gives, and what a reader must know of them."""

    scores: tuple[Score, ...] = ()
    notes: tuple[str, ...] = ()

    def with_notes(self, notes: Iterable[str]) -> ArmScores:
        return self._replace(notes=(*self.notes, *notes))


class Passed(NamedTuple):
    """An engine's way through the gate of answers. faults: what is wrong with them. notes: what a reader must know of
    how it was asked."""

    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PreparedCell:
    """Everything that one cell needs, built and opened."""

    cell_id: str
    engine: Engine
    workload: Workload
    device: Device
    clock: Clock
    requests: Sequence[Request]
    max_batch: int = 1
    """How many of the requests that wait the engine takes together."""
    unmeasured: ArmScores = field(default_factory=ArmScores)
    """The same for every repeat."""
    gate: Passed = field(default_factory=Passed)
    """Of an engine that is not ours, by its answers to short questions; with a fault it is marked."""


@dataclass
class _Window:
    """What was collected while the requests ran."""

    start_s: float = 0.0
    end_s: float = 0.0
    completions: list[Completion] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    """The requests as the engine took them."""
    traces: list[PowerTrace] = field(default_factory=list)
    raw: list[PowerTrace] = field(default_factory=list)
    """What the traces were derived from, where a meter keeps that."""
    cpu_before: CpuSeconds | None = None
    cpu_after: CpuSeconds | None = None
    cycles: CpuCycles = NO_CYCLES
    memory: PeakMemory | None = None


def run_trial(arm: PreparedCell, protocol: TrialProtocol, repeat: int) -> tuple[Trial, Traces]:
    """Runs one trial. Raises `DeviceError`, `EngineError`, `WorkloadError`; the runner decides what follows."""
    if arm.engine.device != arm.device.name:
        raise DeviceError(
            f"the meters of {arm.device.name} cannot measure an engine on {arm.engine.device};"
            " put both on one device in the plan"
        )
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    n_stops_before = n_stops()
    before, raw_before, states_before, was_busy = idle(arm.device, arm.clock, protocol)
    warmup = at_once(arm.requests[: protocol.warmup])
    serve(arm.engine, arm.clock, warmup, arm.clock.now_s(), unheard, arm.max_batch)
    arm.engine.take_counters()
    _road(arm.engine)
    _heat(arm.engine)
    _steps(arm.engine)
    _placement(arm.engine)
    _remarks(arm.engine)
    _own_marks(arm.engine)
    # The window's first request may gain neither from the warm-up nor from the trial before.
    arm.engine.reset()
    with watched(arm.device) as states:
        window = _measure(arm)
    counters, heat, road = arm.engine.take_counters(), _heat(arm.engine), _road(arm.engine)
    placement = _placement(arm.engine)
    after, raw_after, states_after, is_busy = idle(arm.device, arm.clock, protocol)
    lost = lost_cores(road) if road is not None else ()
    conditions = [*states_before, *states, *states_after]
    scores, not_scored = _scores(arm, window.completions)
    traces: Traces = {IDLE_BEFORE: before, WINDOW: window.traces, IDLE_AFTER: after}
    raw = {IDLE_BEFORE: raw_before, WINDOW: window.raw, IDLE_AFTER: raw_after}
    traces |= {raw_part(part): own for part, own in raw.items() if own}
    energies = energies_of(window.completions, traces, (window.start_s, window.end_s))
    active = arm.engine.active_weights() if isinstance(arm.engine, TellsActiveWeights) else None
    weights = arm.engine.held_weights() if isinstance(arm.engine, HoldsWeights) else None
    memory = window.memory or NO_MEMORY
    trial = Trial(
        trial_id=uuid.uuid4().hex,
        cell_id=arm.cell_id,
        repeat=repeat,
        status="ok",
        started_at=started_at,
        time_method=arm.engine.time_method,
        data_source=arm.workload.data_source,
        requests_sha256=requests_sha256(window.asked),
        window_start_s=window.start_s,
        window_end_s=window.end_s,
        prefill_tokens=sum(c.n_computed_tokens for c in window.completions),
        decode_tokens=sum(n_behind_first(c.token_times_s) for c in window.completions),
        completions=tuple(window.completions),
        energy=energies.readings,
        idle=energies.idle,
        derived_by=derived_by(arm.device.priced_by if isinstance(arm.device, IsPriced) else None),
        counters=counters,
        heat=heat,
        decode_steps=_steps(arm.engine),
        road=road,
        placement=placement,
        scores=(*scores, *arm.unmeasured.scores),
        conditions=changes(conditions),
        foreign_cpu_share=foreign_share(window.cpu_before, window.cpu_after),
        cpu_before=window.cpu_before,
        cpu_after=window.cpu_after,
        cpu_cycles=window.cycles.cycles,
        cpu_cycles_remark=window.cycles.remark,
        n_parameters=weights.n_parameters if weights is not None else None,
        weight_bytes=weights.n_bytes if weights is not None else None,
        active_weights=active,
        peak_memory_bytes=memory.n_bytes,
        peak_memory_remark=memory.remark,
        notes=(
            *arm.workload.notes,
            *not_scored,
            *arm.unmeasured.notes,
            *remarks_on(energies.readings),
            *met_alike(window.traces, window.completions, energies.readings),
            *lost,
            *((BUSY_IDLE,) if was_busy or is_busy else ()),
            *_others_on_gpus(arm.engine, conditions),
            *switched_cores(conditions),
            *not_compared(arm.device.meters),
            *arm.gate.faults,
            *arm.gate.notes,
            *_remarks(arm.engine),
        ),
        disagreements=tuple(disagreements(arm.device.meters, window.traces, (window.start_s, window.end_s))),
        marks=(
            *_marks(conditions, arm.device.meters, window, protocol.max_foreign_cpu_share),
            *((STOPPED,) if n_stops() > n_stops_before else ()),
            *((CORES_NOT_KEPT,) if lost else ()),
            *((WRONG_ANSWERS,) if arm.gate.faults else ()),
            *_own_marks(arm.engine),
            *placement_marks(placement),
        ),
    )
    return trial, traces


def _others_on_gpus(engine: Engine, conditions: Sequence[Conditions]) -> tuple[str, ...]:
    """Nothing of a server that we did not start: it is one of the others, and computes for us."""
    if isinstance(engine, AsksServer):
        return ()
    ours = tuple(f"(pid {process.name})" for process in other_processes(engine))
    seen = dict.fromkeys(words for state in conditions for words in state.gpu_others or ())
    others = [words for words in seen if not words.endswith(ours)]
    return (f"{OTHERS_ON_GPU}: {', '.join(others)}",) if others else ()


def _measure(arm: PreparedCell) -> _Window:
    """The window: meters start before it, and stop after it, whatever happens."""
    window = _Window()
    others = other_processes(arm.engine)
    with counted_as_ours([int(process.name) for process in others]):
        _measure_window(arm, window, others)
    return window


def _measure_window(arm: PreparedCell, window: _Window, others: Sequence[Path]) -> None:
    meters = arm.device.meters

    def on_phase(event: PhaseEvent, at_s: float) -> None:
        for meter in meters:
            meter.mark()

    asks_server = isinstance(arm.engine, AsksServer)
    if asks_server and not others:
        window.memory = NO_MEMORY_OF_SERVER
    elif isinstance(arm.engine, StartsPrograms):
        window.memory = NO_MEMORY_OF_PROGRAM
    elif isinstance(arm.device, CountsMemory):
        window.memory = arm.device.reset_peak_memory() or next(filter(None, map(reset_peak_memory, others)), None)
    with running_meters(meters) as window.traces:
        window.cpu_before, cycles_before = arm.device.cpu_seconds(), _cycles(arm.device)
        window.start_s = arm.clock.now_s()
        window.asked, window.completions = serve(
            arm.engine, arm.clock, arm.requests, window.start_s, on_phase, arm.max_batch
        )
        window.end_s = arm.clock.now_s()
        window.cpu_after, cycles_after = arm.device.cpu_seconds(), _cycles(arm.device)
    if isinstance(arm.device, CountsMemory) and window.memory is None:
        own = [] if asks_server else [arm.device.peak_memory()]
        window.memory = memory_together([*own, *map(peak_memory, others)])
    window.raw = raw_traces(meters)
    if asks_server:
        window.cycles = NO_CYCLES_OF_SERVER
    elif cycles_before is not None and cycles_after is not None:
        window.cycles = cycles_between(cycles_before, cycles_after)


def other_processes(engine: Engine) -> list[Path]:
    """Of an engine that has some beside this one, in /proc."""
    return [PROC / str(pid) for pid in engine.process_ids()[1:]] if isinstance(engine, SpansProcesses) else []


def memory_together(peaks: Sequence[PeakMemory]) -> PeakMemory:
    """The sum of several processes' peaks, which need not be of one moment; None where one is not told."""
    if len(peaks) == 1:
        return peaks[0]
    known = [peak.n_bytes for peak in peaks if peak.n_bytes is not None]
    if len(known) < len(peaks):
        return next(peak for peak in peaks if peak.n_bytes is None)
    remark = f"peak memory: the peaks of {len(peaks)} processes added; pages that they share count in each"
    return PeakMemory(sum(known), remark)


def _scores(arm: PreparedCell, completions: Sequence[Completion]) -> tuple[Sequence[Score], tuple[str, ...]]:
    """(scores, the note on why there are none). What was measured stands, also where it cannot be scored."""
    if not arm.workload.scored:
        return (), ()
    try:
        return arm.workload.score(arm.requests, completions), ()
    except WorkloadError as error:
        log.info("%s: not scored", arm.workload.name, exc_info=error)
        return (), (f"not scored: {error}",)


def _road(engine: Engine) -> Road | None:
    return engine.take_road() if isinstance(engine, TellsRoad) else None


def _heat(engine: Engine) -> ExpertHeat | None:
    return engine.take_heat() if isinstance(engine, TellsHeat) else None


def _placement(engine: Engine) -> tuple[GraphPlacement, ...]:
    return engine.take_placement() if isinstance(engine, TellsPlacement) else ()


def _own_marks(engine: Engine) -> tuple[str, ...]:
    return engine.take_marks() if isinstance(engine, TellsMarks) else ()


def _remarks(engine: Engine) -> tuple[str, ...]:
    return engine.take_remarks() if isinstance(engine, TellsRemarks) else ()


def _steps(engine: Engine) -> tuple[DecodeStep, ...]:
    return engine.take_decode_steps() if isinstance(engine, TellsSteps) else ()


def _cycles(device: Device) -> CpuCycles | None:
    return device.cpu_cycles() if isinstance(device, CountsCycles) else None


def _marks(
    conditions: Sequence[Conditions], meters: Sequence[Meter], window: _Window, max_foreign_cpu_share: float
) -> tuple[str, ...]:
    contended = is_contended(window.cpu_before, window.cpu_after, max_foreign_cpu_share)
    return (*((CONTENDED,) if contended else ()), *window_marks(conditions, meters))
