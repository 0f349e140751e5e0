"""Charge counters that stood still while requests ran: what a tick may have lost that came much later than others.

A phone's charge counter ticks by a fixed charge, often 1 mAh. At rest it shows one value for half a minute, so that its
readings alone believe such a value at any time (`results.renewal`). But nothing that computes draws as little as a
phone at rest, and when requests ran is known. Of ticks between which a request ran nearly all of the time, one that
took several times as long as the others may have lost what flows at the power beside it, or a part of that.
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
IDLE_SHARE = 0.1
"""Of a tick's time, without a request: of more it may be at rest."""
BESIDE_TICKS = 5
"""On either side, that tell the power."""


class LongTick(NamedTuple):
    """From one tick to the next, and what may have flowed beyond what that brought."""

    start_s: float
    end_s: float
    hidden_j: float

    def within(self, spans: Sequence[Interval]) -> float:
        """Share of it that lies in these disjoint ones."""
        inside_s = sum(max(0.0, min(self.end_s, end_s) - max(self.start_s, start_s)) for start_s, end_s in spans)
        return inside_s / (self.end_s - self.start_s)


def long_ticks(trace: PowerTrace, busy: Sequence[Interval]) -> list[LongTick]:
    """busy: when requests ran. Of another trace than that of a charge counter, or of one whose readings are not usable,
    none."""
    t, joules = trace.times_s, trace.values
    if trace.kind != "counter" or trace.method != "battery gauge" or not np.isfinite(joules).all():
        return []
    ticks = np.flatnonzero(np.diff(joules) > 0) + 1
    if len(ticks) < FEWEST_TICKS or np.any(np.diff(joules) < 0):
        return []
    at_s, steps_j = t[ticks], np.diff(joules[ticks])
    lasted_s = np.diff(at_s)
    per_tick_s = lasted_s / np.maximum(1.0, np.rint(steps_j / steps_j.min()))
    is_busy = lasted_s - _within_s(at_s, busy) <= IDLE_SHARE * lasted_s
    if np.count_nonzero(is_busy) < FEWEST_TICKS:
        return []
    usual_s = float(np.quantile(per_tick_s[is_busy], MOSTLY, method="lower"))
    is_long = is_busy & (per_tick_s > MANY_TIMES * usual_s)
    return [_long_tick(at_s, joules[ticks], k) for k in np.flatnonzero(is_long).tolist()]


def told(trace: PowerTrace, found: Sequence[LongTick]) -> str:
    longest_s = max(tick.end_s - tick.start_s for tick in found)
    return (
        f"{trace.meter} {trace.component}: it showed one value for up to {format_duration(longest_s)} while requests"
        f" ran, several times as long as usual; up to {sum(tick.hidden_j for tick in found):.3g} J may be lost"
    )


def _long_tick(at_s: Array, joules: Array, k: int) -> LongTick:
    """The k-th. Of the power before and behind the higher tells what may have flowed."""
    first, last = max(k - BESIDE_TICKS, 0), min(k + 1 + BESIDE_TICKS, len(at_s) - 1)
    watts = [(joules[j] - joules[i]) / (at_s[j] - at_s[i]) for i, j in ((first, k), (k + 1, last)) if j > i]
    due_j = max(watts, default=0.0) * (at_s[k + 1] - at_s[k])
    return LongTick(float(at_s[k]), float(at_s[k + 1]), max(0.0, float(due_j - (joules[k + 1] - joules[k]))))


def _within_s(at_s: Array, busy: Sequence[Interval]) -> Array:
    """How long requests ran between each two of these times."""
    edges = np.asarray(joined(busy), dtype=np.float64).reshape(-1, 2)
    so_far_s = np.concatenate([[0.0], np.cumsum(edges[:, 1] - edges[:, 0])])
    before_s = np.stack([so_far_s[:-1], so_far_s[1:]], axis=1).reshape(-1)
    return np.diff(np.interp(at_s, edges.reshape(-1), before_s)) if len(edges) else np.zeros(len(at_s) - 1)
