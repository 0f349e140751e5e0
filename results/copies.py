"""When a decode step computed, copied experts and waited for copies; and what that comes to.

Two threads: one computes or waits, one copies or has nothing to copy. Seconds from the beginning of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from results.records import Record


class CopySpan(Record):
    """Experts that were copied without a pause between them, all for one layer. is_ahead: before that layer began."""

    layer: int
    begin_s: float
    end_s: float
    n_experts: int
    n_bytes: int
    is_ahead: bool


class WaitSpan(Record):
    """While the calls of a layer waited for its experts."""

    layer: int
    begin_s: float
    end_s: float


class LayerEnd(Record):
    """When a layer's experts were computed. It began when the layer before ended, or with the step."""

    layer: int
    end_s: float


class DecodeStep(Record):
    """One. duration_s: until its token was known."""

    duration_s: float
    layers: tuple[LayerEnd, ...]
    waits: tuple[WaitSpan, ...]
    copies: tuple[CopySpan, ...]


class StepTimes(NamedTuple):
    """Seconds of a step, or of several together.

    hidden_s: of copied_s, while the other thread computed. hideable_s: the most that can be, min(compute, copy) of each
    step.
    """

    timed_s: float = 0.0
    waited_s: float = 0.0
    copied_s: float = 0.0
    hidden_s: float = 0.0
    hideable_s: float = 0.0

    def __add__(self, other: object) -> StepTimes:
        if not isinstance(other, StepTimes):
            return NotImplemented
        return StepTimes(*(a + b for a, b in zip(self, other, strict=True)))


def step_times(
    duration_s: float, waits: Sequence[tuple[float, float]], copies: Sequence[tuple[float, float]]
) -> StepTimes:
    """waits, copies: begin and end, each in order and apart. What lies outside of the step does not count."""
    waits, copies = _inside(waits, duration_s), _inside(copies, duration_s)
    waited_s, copied_s = (sum(end - begin for begin, end in spans) for spans in (waits, copies))
    hidden_s = copied_s - _shared(waits, copies)
    return StepTimes(duration_s, waited_s, copied_s, hidden_s, min(duration_s - waited_s, copied_s))


def _inside(spans: Sequence[tuple[float, float]], end_s: float) -> list[tuple[float, float]]:
    cut = [(max(begin, 0.0), min(end, end_s)) for begin, end in spans]
    return [(begin, end) for begin, end in cut if end > begin]


def _shared(some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    i = j = 0
    shared_s = 0.0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        shared_s += max(0.0, end - begin)
        if some[i][1] <= others[j][1]:
            i += 1
        else:
            j += 1
    return shared_s


class LayerTimes(NamedTuple):
    compute_s: float
    copy_s: float


def layer_times(step: DecodeStep) -> list[LayerTimes]:
    """Of each layer with experts: what it and what lies before it computed, and copying its experts, whenever."""
    begins = [0.0, *(layer.end_s for layer in step.layers)]
    found = []
    for layer, (begin_s, end_s) in zip(step.layers, pairwise(begins), strict=True):
        waited_s = sum(wait.end_s - wait.begin_s for wait in step.waits if wait.layer == layer.layer)
        copied_s = sum(copy.end_s - copy.begin_s for copy in step.copies if copy.layer == layer.layer)
        found.append(LayerTimes(end_s - begin_s - waited_s, copied_s))
    return found


def on_demand_s(layers: Sequence[LayerTimes]) -> float:
    """003 §5.1: every layer computes and copies in turn."""
    return sum(layer.compute_s + layer.copy_s for layer in layers)


def prefetching_s(layers: Sequence[LayerTimes]) -> float:
    """003 §5.1: the first layer's experts are copied, then each layer computes while the next one's are."""
    if not layers:
        return 0.0
    following = [*(layer.copy_s for layer in layers[1:]), 0.0]
    return layers[0].copy_s + sum(max(layer.compute_s, copy_s) for layer, copy_s in zip(layers, following, strict=True))
