"""Gauges that show means of longer than they renew, follow the power slowly, or late: a phase's joules in the next.

A fuel gauge may average over a second and show a new value each quarter of one. At a phase's edge its readings then
look like those of a load that changes slowly, and nothing in them tells. But when phases began is known. Each reading
is taken for the mean over a time M before it was renewed, the power of each phase for a constant:

    v(t) = sum over phases p of P_p share_p(t - M, t)

Others filter: what was s ago weighs e to the -2 s / M, which is as late on average. Others show what was at t - D. The
M or D, of the three forms, that leaves the smallest squares is how slowly, or late, the gauge follows. What its joules
differ by from those of the P_p is in their uncertainty: that the power was constant nobody says, so they stay as they
were read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.in_step import renewed
from results.intervals import Interval
from results.records import PowerTrace

Array = NDArray[np.float64]

FEWEST_READINGS, FEWEST_INTERVALS = 20, 4
"""Of the phases together: of fewer nothing can be said."""
MULTIPLES = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)
"""Of a gauge's update: how slowly it may follow."""
DELAYS = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
"""Of a gauge's update: how late it may be."""
CLEARER = 0.7
"""Of the squares that instants, or means of one update, leave: what leaves more is no evidence."""
EXPLAINED = 0.7
"""Of the readings' variance, by the phases: what wanders by itself is no gauge that follows them."""
INSTANT_S = 1e-6

# N readings, P phases and what is in none


class Phase(NamedTuple):
    """Disjoint stretches. Their edges, and how much of them lies before each."""

    edges_s: Array
    before_s: Array

    def within_s(self, stretches: Array) -> Array:
        """How much of them lies in each of the stretches [n, 2]."""
        if not len(self.edges_s):
            return np.zeros(len(stretches))
        return np.asarray(np.diff(np.interp(stretches, self.edges_s, self.before_s), axis=1)[:, 0])

    def weighs(self, at_s: Array, constant_s: float) -> Array:
        """How much they weigh at times [n], where what was s before weighs e to the -s / constant."""
        edges_s = self.edges_s
        if not len(edges_s):
            return np.zeros(len(at_s))
        at_edges = np.zeros(len(edges_s))
        for i, left in enumerate(np.exp(-np.diff(edges_s) / constant_s).tolist()):
            at_edges[i + 1] = at_edges[i] * left + (1 - left) * (i % 2 == 0)
        behind = np.searchsorted(edges_s, at_s, side="right") - 1
        left = np.exp(-np.maximum(at_s - edges_s[behind], 0.0) / constant_s)
        return np.where(behind < 0, 0.0, at_edges[behind] * left + (1 - left) * (behind % 2 == 0))


class SlowGauge(NamedTuple):
    """One that shows means of about `follows_s`, or is as late as those, or shows what was `late_s` before. watts [P]:
    of each phase, and of the rest."""

    trace: PowerTrace
    follows_s: float
    late_s: float
    phases: Sequence[Phase]
    watts: Array

    def energy_j(self, intervals: Sequence[Interval]) -> float:
        """What flowed in them, had each phase had a power that is constant."""
        stretches = np.asarray(intervals, dtype=np.float64).reshape(-1, 2)
        return float((_seconds(self.phases, stretches) @ self.watts).sum())

    def __str__(self) -> str:
        how = f"shows the power about {self.late_s:.2g} s late"
        if self.follows_s > 0:
            how = f"follows the power over about {self.follows_s:.2g} s"
        return (
            f"{self.trace.component} {how}: a part of a phase's joules stands in the next one's, and the uncertainty"
            " holds it (ask longer phases)"
        )


def slow_gauge(trace: PowerTrace, phases: Sequence[Sequence[Interval]]) -> SlowGauge | None:
    """phases: disjoint. None where it follows at once, or where nothing can be said: of few phases, of a computed or a
    played trace, which knows nothing of them, of means of a time that is told."""
    is_gauge = trace.kind in ("held", "power") and trace.method not in ("modelled", "replayed")
    is_told = trace.averaged_s is not None or trace.update_period_s <= 0
    is_new = renewed(trace)
    too_few = np.count_nonzero(is_new) < FEWEST_READINGS or sum(map(len, phases)) < FEWEST_INTERVALS
    if not is_gauge or is_told or too_few or not np.isfinite(trace.values).all():
        return None
    update_s = max(trace.update_period_s, trace.sample_interval_s)
    values = trace.values[is_new]
    renewed_s = trace.times_s[is_new] - min(trace.update_period_s, trace.sample_interval_s or trace.update_period_s) / 2
    curves = [_phase(own) for own in phases]
    at_once = min(_fitted(_means(renewed_s, curves, s), values)[0] for s in (0.0, update_s))
    fits = [
        (*_fitted(shares_of(renewed_s, curves, k * update_s), values), k * update_s, 0.0)
        for shares_of in (_means, _filtered)
        for k in MULTIPLES
    ]
    fits += [(*_fitted(_means(renewed_s - k * update_s, curves, 0.0), values), 0.0, k * update_s) for k in DELAYS]
    squares, watts, follows_s, late_s = min(fits, key=lambda fit: fit[0])
    may_be_left = min(CLEARER * at_once, (1 - EXPLAINED) * float(np.var(values)) * len(values))
    return SlowGauge(trace, follows_s, late_s, curves, watts) if squares < may_be_left else None


def _phase(intervals: Sequence[Interval]) -> Phase:
    edges = np.asarray(intervals, dtype=np.float64).reshape(-1, 2)
    behind_s = np.cumsum(edges[:, 1] - edges[:, 0])
    before_s = np.stack([np.concatenate([[0.0], behind_s[:-1]]), behind_s], axis=1) if len(edges) else edges
    return Phase(edges.reshape(-1), before_s.reshape(-1))


def _seconds(phases: Sequence[Phase], stretches: Array) -> Array:
    """[stretches, P]"""
    own = np.stack([phase.within_s(stretches) for phase in phases], axis=1)
    return np.concatenate([own, np.diff(stretches, axis=1) - own.sum(axis=1, keepdims=True)], axis=1)


def _means(renewed_s: Array, phases: Sequence[Phase], mean_s: float) -> Array:
    """[N, P]: of the time before each reading; 0: of its instant."""
    seen_s = max(mean_s, INSTANT_S)
    return _seconds(phases, np.stack([renewed_s - seen_s, renewed_s], axis=1)) / seen_s


def _filtered(renewed_s: Array, phases: Sequence[Phase], mean_s: float) -> Array:
    """[N, P]: as late on average as means of so long."""
    own = np.stack([phase.weighs(renewed_s, mean_s / 2) for phase in phases], axis=1)
    return np.concatenate([own, 1 - own.sum(axis=1, keepdims=True)], axis=1)


def _fitted(shares_NP: Array, watts: Array) -> tuple[float, Array]:
    """(squares that are left, watts of the phases)"""
    fitted_w = np.linalg.lstsq(shares_NP, watts, rcond=None)[0]
    left_w = watts - shares_NP @ fitted_w
    return float(left_w @ left_w), np.asarray(fitted_w)
