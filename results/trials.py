"""One repeat of one cell, whole: what was asked, answered, read and seen."""

from __future__ import annotations

from itertools import chain
from typing import Literal

from pydantic import Field

from results.copies import DecodeStep
from results.counters import EngineCounters
from results.cpu_time import CpuSeconds
from results.environments import Conditions, Road
from results.expert_heat import ExpertHeat
from results.graph_placement import GraphPlacement
from results.records import ActiveWeights, Completion, EnergyReading, IdleBaseline, Record, Score

CellText = Literal["N.S.", "oom", "not supported", "out of memory"]
"""What stands in tables in the place of figures. N.S., oom: experts fit nowhere by the machine's sheet, as sources
write it. The others: an engine that cannot do what it is asked, or that ran out of the machine's memory."""


class Failure(Record):
    """Why a trial failed. Transient failures were retried; stable ones were not."""

    kind: Literal["transient", "stable"]
    error: str
    traceback: str = ""
    result: CellText | None = None
    """Of what is no fault of the run. None of others."""
    by_device: bool = False
    """The device was not ready, or was lost, or a program on it failed: nothing that the arm did."""
    lost: bool = False
    """The device, a meter or a server was gone, or not in its state. Another day it may be there; other failures come
    again. False in runs from before it was kept."""


class EnduranceRound(Record):
    """The place of a trial in rounds that follow each other without a pause."""

    series: int
    """A run that was broken off and resumed has cooled meanwhile: its rounds are of another series."""
    ended_by: str | None = None
    """Of the last one: what said stop. None of the others, and of the last one of a series that was broken off."""


class Trial(Record):
    """One repeat of one cell: the same requests give latency, energy and accuracy. Failure is data."""

    trial_id: str
    cell_id: str
    repeat: int
    attempts: int = 1
    sitting: int = 0
    """Of the run: another one begins each time that it is gone on with (`--resume`), or that a device of a fleet comes
    back after it was away for long. The device may have changed between two sittings."""
    status: Literal["ok", "failed"]
    started_at: str
    """UTC wall clock, ISO 8601; for people, never for arithmetic."""
    time_method: Literal["measured", "modelled"] = "measured"
    data_source: str | None = None
    """Where the items came from, as `Workload.data_source` says: "sample", "generated", a folder, a hub id."""
    requests_sha256: str | None = None
    """Of what was asked in the window (`results.requests`): equal where two trials were asked the same."""
    window_start_s: float | None = None
    window_end_s: float | None = None
    prefill_tokens: int = 0
    """Prompt tokens that were computed; those kept from a request before are not among them."""
    decode_tokens: int = 0
    """Generated tokens later than the first, which prefill emits, and those that came with it."""
    completions: tuple[Completion, ...] = ()
    energy: tuple[EnergyReading, ...] = ()
    idle: tuple[IdleBaseline, ...] = ()
    derived_by: str | None = None
    """Digests of the code that derived `energy` and `idle` from the traces, and of the sheet that priced a modelled
    trial (`results.derivation`); None before it was kept."""
    counters: EngineCounters | None = None
    heat: ExpertHeat | None = Field(None, exclude=True)
    """On its way to the store, which keeps it apart (`RunData.load_heat`): a matrix of thousands that few readers ask
    for. None in a trial that was read."""
    decode_steps: tuple[DecodeStep, ...] = ()
    """The first of the window, of an engine that copies experts: when it computed, copied and waited."""
    road: Road | None = None
    """None where the engine does not tell."""
    placement: tuple[GraphPlacement, ...] = ()
    """Of the graphs that Core ML ran in the window, each once. Empty of other engines, and of the interpreter, which
    has no units."""
    scores: tuple[Score, ...] = ()
    conditions: tuple[Conditions, ...] = ()
    """Before the first of the trial's windows (idle ones too), at each change that was seen, and after the last."""
    foreign_cpu_share: float | None = None
    """Busy CPU time of others in the window over all there was, on the CPUs that we may use, or on all where a meter
    sees all and their share is larger; None where unreadable."""
    cpu_before: CpuSeconds | None = None
    cpu_after: CpuSeconds | None = None
    """CPU time at the window's edges, from which that share follows. None where unreadable, or from before it was
    kept."""
    cpu_cycles: int | None = None
    """CPU cycles of the window, of the process that ran it and of those that it started."""
    cpu_cycles_remark: str | None = None
    """Why there are none, or what they leave out (the kernel's, for a user who may not see them)."""
    n_parameters: int | None = None
    weight_bytes: int | None = None
    """Of the model as the engine holds it; None where its weights are elsewhere."""
    active_weights: ActiveWeights | None = None
    """None of engines that do not tell, and in runs from before it was kept."""
    peak_memory_bytes: int | None = None
    """The most that the process had resident in the window."""
    peak_memory_remark: str | None = None
    """Why it is not known."""
    contention_shares: tuple[float, ...] = ()
    """That share in each window that was thrown away before this one, because it was above the plan's limit."""
    notes: tuple[str, ...] = ()
    """What the workload says of its items: skipped turns, fewer than asked."""
    disagreements: tuple[str, ...] = ()
    """Two readings of the same joules that cannot both be right: a counter and the power beside it, or two meters."""
    endurance: EnduranceRound | None = None
    """None where repeats stand for themselves."""
    marks: tuple[str, ...] = ()
    """What taints the trial (throttled, charging, ...): it stays in the tables, out of the means."""
    failure: Failure | None = None

    @property
    def no_room(self) -> CellText | None:
        """What the trial came to where that is no figure, and no fault of the run; None elsewhere."""
        return None if self.failure is None else self.failure.result

    @property
    def has_failed(self) -> bool:
        """Without having come to a result."""
        return self.status == "failed" and self.no_room is None

    @property
    def is_lost(self) -> bool:
        """Whether a resume measures it again. Not a round of endurance: the heat of the rounds before it is gone."""
        return self.failure is not None and self.failure.lost and self.endurance is None


_NO_FIELDS: set[str] = set()


def without_fields_set(trial: Trial) -> Trial:
    """The same trial without pydantic's note of which fields were given, in the records inside it too.

    Nothing here asks for it, and over 20,000 trials it takes as much memory as what they say. For a trial that was just
    read, and that nobody else holds.
    """
    mark = object.__setattr__
    inner = (trial.completions, trial.energy, trial.idle, trial.scores, trial.conditions)
    for record in (trial, *chain.from_iterable(inner)):
        mark(record, "__pydantic_fields_set__", _NO_FIELDS)
    return trial
