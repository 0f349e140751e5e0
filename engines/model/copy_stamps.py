"""When experts were copied and waited for, step by step; added up at the end of a request, in no token's time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engines.model.copier import CopyJob, CopyQueue, Mark
from results.copies import CopySpan, DecodeStep, LayerEnd, StepTimes, WaitSpan, step_times

MOST_STEPS = 8
"""Decode steps of a window that are kept span by span; all are added up."""
GAP_S = 5e-5
"""Copies of one layer that follow each other faster are told as one."""


class _Copy(NamedTuple):
    layer: int
    job: CopyJob
    is_ahead: bool


@dataclass
class _Noted:
    """What happened within a step."""

    layers: list[tuple[int, Mark]] = field(default_factory=list)
    waits: list[tuple[int, Mark, Mark]] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)


_Marked = tuple[Mark, Mark, _Noted | None]
"""A step as it is noted, from its begin to its end: seconds are asked for when there is time. Most find all in a cache,
and noting them is to cost no time."""


def _step(marked: _Marked, queue: CopyQueue) -> _Step:
    """Copies of it are done."""
    begin, end, noted = marked
    noted = noted or _Noted()
    return _Step(
        queue.at_s(begin),
        queue.at_s(end),
        [(layer, queue.at_s(end)) for layer, end in noted.layers],
        [(layer, queue.at_s(begin), queue.at_s(end)) for layer, begin, end in noted.waits],
        noted.copies,
    )


@dataclass
class _Step:
    begin_s: float
    end_s: float
    layers: list[tuple[int, float]]
    waits: list[tuple[int, float, float]]
    copies: list[_Copy]


class Timed(NamedTuple):
    """times: of decode steps. copying_s: of all copies, prefill too."""

    times: StepTimes | None
    copying_s: float


class CopyStamps:
    """Of one engine."""

    def __init__(self, queue: CopyQueue) -> None:
        """queue: whose marks of what computes are taken."""
        self._queue, self._mark = queue, queue.mark
        self._decodes = self.tell_layers = False
        self._begin: Mark = None
        self._noted: _Noted | None = None
        self._done: list[_Marked] = []
        self._apart: list[CopyJob] = []
        self._kept: list[DecodeStep] = []

    def start_step(self, decodes: bool) -> None:
        self._decodes, self._noted = decodes, None
        if decodes:
            self.tell_layers = len(self._kept) + len(self._done) < MOST_STEPS
            self._begin = self._mark()

    def end_step(self) -> None:
        """Of one that decodes: its token is known."""
        if self._decodes:
            self._done.append((self._begin, self._mark(), self._noted))
            self._decodes = False

    def _noting(self) -> _Noted:
        if self._noted is None:
            self._noted = _Noted()
        return self._noted

    def copies(self, layer: int, job: CopyJob, is_ahead: bool) -> None:
        if self._decodes:
            self._noting().copies.append(_Copy(layer, job, is_ahead))
        else:
            self._apart.append(job)

    def wait(self, layer: int, jobs: Sequence[CopyJob]) -> None:
        """What computes goes on when all of them are done."""
        if all(job.is_done for job in jobs):
            for job in jobs:
                job.wait()  # raises where it failed
            return
        begin = self._mark()
        for job in jobs:
            job.wait()
        if self._decodes:
            self._noting().waits.append((layer, begin, self._mark()))

    def end_layer(self, layer: int) -> None:
        """Only steps that are kept span by span tell of layers."""
        if self._decodes and self.tell_layers:
            self._noting().layers.append((layer, self._mark()))

    def take_times(self) -> Timed:
        """Since it was asked last; waits for copies that are still made. None where no step decoded."""
        times: StepTimes | None = None
        jobs = self._apart + [copy.job for *_, noted in self._done if noted is not None for copy in noted.copies]
        for job in jobs:
            job.join()
        steps = [_step(marked, self._queue) for marked in self._done]
        for step in steps:
            own = step_times(
                step.end_s - step.begin_s,
                [(begin - step.begin_s, end - step.begin_s) for _, begin, end in step.waits],
                [(copy.job.begin_s - step.begin_s, copy.job.end_s - step.begin_s) for copy in step.copies],
            )
            times = own if times is None else times + own
        self._kept += map(_told, steps[: MOST_STEPS - len(self._kept)])
        self._apart, self._done = [], []
        return Timed(times, sum(job.end_s - job.begin_s for job in jobs))

    def take_steps(self) -> tuple[DecodeStep, ...]:
        """The first ones since it was asked last, of requests that ended."""
        kept, self._kept = tuple(self._kept), []
        return kept


def _told(step: _Step) -> DecodeStep:
    zero = step.begin_s
    return DecodeStep(
        duration_s=step.end_s - zero,
        layers=tuple(LayerEnd(layer=layer, end_s=end - zero) for layer, end in step.layers),
        waits=tuple(WaitSpan(layer=layer, begin_s=begin - zero, end_s=end - zero) for layer, begin, end in step.waits),
        copies=tuple(_joined(step.copies, zero)),
    )


def _joined(copies: Sequence[_Copy], zero: float) -> Iterator[CopySpan]:
    """Those of one layer that follow each other, as one."""
    open_span: CopySpan | None = None
    for layer, job, is_ahead in copies:
        begin_s, end_s = job.begin_s - zero, job.end_s - zero
        own = CopySpan(layer=layer, begin_s=begin_s, end_s=end_s, n_experts=1, n_bytes=job.n_bytes, is_ahead=is_ahead)
        if open_span is None:
            open_span = own
        elif (open_span.layer, open_span.is_ahead) == (layer, is_ahead) and begin_s - open_span.end_s < GAP_S:
            n_experts, n_bytes = open_span.n_experts + 1, open_span.n_bytes + job.n_bytes
            open_span = open_span.model_copy(update={"end_s": end_s, "n_experts": n_experts, "n_bytes": n_bytes})
        else:
            yield open_span
            open_span = own
    if open_span is not None:
        yield open_span
