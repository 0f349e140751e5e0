"""Charge counters that stood still while requests ran: what a tick may have lost that came much later than others.

A phone's charge counter ticks by a fixed charge, often 1 mAh. At rest it shows one value for half a minute, so that its
readings alone believe such a value at any time (`results.renewal`). But nothing that computes draws as little as a
phone at rest, and when requests ran is known. A tick during which requests ran for several times as long as they
usually do may have lost what flows at the power beside it, or a part of that: what flowed while it rested is more. So
too the first one, which has stood since before it was read. What is usual while answers are written may be much longer
than while prompts are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.intervals import Interval, joined
from results.records import PowerTrace
from results.renewal import MANY_TIMES, MOSTLY
from results.units import format_duration

Array = NDArray[np.float64]

FEWEST_TICKS = 10
"""While requests ran: of fewer nothing is usual."""
FEWEST_OF_PHASE = 5
"""While prompts were read, or answers written, for most of the time: of fewer nothing else is usual."""
IDLE_SHARE = 0.1
"""Of a tick's time, without a request: more of them do not tell how long a tick usually takes."""
BESIDE_TICKS = 5
"""On either side, that tell the power."""


class Busy:
    """When requests ran."""

    def __init__(self, requests: Sequence[Interval]) -> None:
        edges = np.asarray(joined(requests), dtype=np.float64).reshape(-1, 2)
        so_far_s = np.concatenate([[0.0], np.cumsum(edges[:, 1] - edges[:, 0])])
        self._edges_s = edges.reshape(-1)
        self._before_s = np.stack([so_far_s[:-1], so_far_s[1:]], axis=1).reshape(-1)

    def within_s(self, at_s: Array) -> Array:
        """For how long between each two of these times [n]."""
        if not len(self._edges_s):
            return np.zeros(len(at_s) - 1)
        return np.diff(np.interp(at_s, self._edges_s, self._before_s))


class LongTick(NamedTuple):
    """From one tick to the next, and what may have flowed beyond what that brought, while requests ran."""

    start_s: float
    end_s: float
    busy_s: float
    hidden_j: float
    busy: Busy

    def within(self, spans: Sequence[Interval]) -> float:
        """Share of what is hidden that lies in these disjoint ones."""
        inside_s = np.asarray(spans, dtype=np.float64).reshape(-1).clip(self.start_s, self.end_s)
        return float(self.busy.within_s(inside_s)[::2].sum()) / self.busy_s


def long_ticks(trace: PowerTrace, requests: Sequence[Interval], prompts: Sequence[Interval] = ()) -> list[LongTick]:
    """requests: when they ran; prompts: of this, when prompts were read. Of another trace than that of a charge
    counter, or of one whose readings are not usable, none."""
    t, joules = trace.times_s, trace.values
    if trace.kind != "counter" or trace.method != "battery gauge" or not np.isfinite(joules).all():
        return []
    ticks = np.flatnonzero(np.diff(joules) > 0) + 1
    if len(ticks) < FEWEST_TICKS or np.any(np.diff(joules) < 0):
        return []
    begins = np.append(0, ticks)
    at_s, steps_j = t[begins], np.diff(joules[begins])
    busy = Busy(requests)
    busy_s, lasted_s = busy.within_s(at_s), np.diff(at_s)
    per_tick_s = busy_s / np.maximum(1.0, np.rint(steps_j / steps_j.min()))
    is_busy = lasted_s - busy_s <= IDLE_SHARE * lasted_s
    is_busy[0] = False  # what it was read for is no tick's time
    if np.count_nonzero(is_busy) < FEWEST_TICKS:
        return []
    of_all_s = _usual_s(per_tick_s[is_busy])
    usual_s = np.full(len(per_tick_s), of_all_s)
    is_prompt = 2 * Busy(prompts).within_s(at_s) > busy_s
    for own in (is_prompt, ~is_prompt):
        if np.count_nonzero(is_busy & own) >= FEWEST_OF_PHASE:
            usual_s[own] = max(of_all_s, _usual_s(per_tick_s[is_busy & own]))
    return [
        LongTick(float(at_s[k]), float(at_s[k + 1]), float(busy_s[k]), _hidden_j(at_s, joules[begins], busy_s, k), busy)
        for k in np.flatnonzero(per_tick_s > MANY_TIMES * usual_s).tolist()
    ]


def _usual_s(per_tick_s: Array) -> float:
    return float(np.quantile(per_tick_s, MOSTLY, method="lower"))


def told(trace: PowerTrace, found: Sequence[LongTick], spans: Sequence[Interval]) -> str:
    """Of what they may have lost in these spans."""
    longest_s = max(tick.busy_s for tick in found)
    lost_j = sum(tick.hidden_j * tick.within(spans) for tick in found)
    return (
        f"{trace.meter} {trace.component}: it showed one value for up to {format_duration(longest_s)} while requests"
        f" ran, several times as long as usual; up to {lost_j:.3g} J may be lost"
    )


def _hidden_j(at_s: Array, joules: Array, busy_s: Array, k: int) -> float:
    """By the k-th. Of the power before and behind the higher tells what may have flowed while requests ran."""
    first, last = max(k - BESIDE_TICKS, min(k, 1)), min(k + 1 + BESIDE_TICKS, len(at_s) - 1)
    watts = [(joules[j] - joules[i]) / (at_s[j] - at_s[i]) for i, j in ((first, k), (k + 1, last)) if j > i]
    return max(0.0, float(max(watts, default=0.0) * busy_s[k] - (joules[k + 1] - joules[k])))
