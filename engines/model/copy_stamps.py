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
class _Marked:
    """A step as it is noted: seconds are asked for when there is time."""

    begin: Mark
    end: Mark = None
    layers: list[tuple[int, Mark]] = field(default_factory=list)
    waits: list[tuple[int, Mark, Mark]] = field(default_factory=list)
    copies: list[_Copy] = field(default_factory=list)

    def step(self, queue: CopyQueue) -> _Step:
        """Copies of it are done."""
        return _Step(
            queue.at_s(self.begin),
            queue.at_s(self.end),
            [(layer, queue.at_s(end)) for layer, end in self.layers],
            [(layer, queue.at_s(begin), queue.at_s(end)) for layer, begin, end in self.waits],
            self.copies,
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
        self._queue = queue
        self._now: _Marked | None = None
        self._done: list[_Marked] = []
        self._apart: list[CopyJob] = []
        self._kept: list[DecodeStep] = []

    def start_step(self, decodes: bool) -> None:
        self._now = _Marked(self._queue.mark()) if decodes else None

    def end_step(self) -> None:
        """Of one that decodes: its token is known."""
        if self._now is not None:
            self._now.end = self._queue.mark()
            self._done.append(self._now)
            self._now = None

    def copies(self, layer: int, job: CopyJob, is_ahead: bool) -> None:
        if self._now is None:
            self._apart.append(job)
        else:
            self._now.copies.append(_Copy(layer, job, is_ahead))

    def wait(self, layer: int, jobs: Sequence[CopyJob]) -> None:
        """What computes goes on when all of them are done."""
        if all(job.is_done for job in jobs):
            for job in jobs:
                job.wait()  # raises where it failed
            return
        begin = self._queue.mark()
        for job in jobs:
            job.wait()
        if self._now is not None:
            self._now.waits.append((layer, begin, self._queue.mark()))

    def end_layer(self, layer: int) -> None:
        if self._now is not None:
            self._now.layers.append((layer, self._queue.mark()))

    def take_times(self) -> Timed:
        """Since it was asked last; waits for copies that are still made. None where no step decoded."""
        times: StepTimes | None = None
        jobs = self._apart + [copy.job for step in self._done for copy in step.copies]
        for job in jobs:
            job.join()
        steps = [step.step(self._queue) for step in self._done]
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
