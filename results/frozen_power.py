"""Sensors of power that stood still while a window was measured, as what they showed at rest beside it tells.

A window whose sensor shows one value all the time looks like one of a constant load. Two things tell more. At rest
before and after it the same sensor may show noise: then it would in the window too. Or it shows the same there, to the
last digit. Where its steps are fine, that is no load but a sensor that has stopped: noise alone changes its last digit.
Where they are coarse, a load that costs less than a step looks the same: then both are told, as nothing decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.intervals import Interval
from results.liveness import STUCK_UPDATES, is_fine, stuck_runs
from results.records import PowerTrace
from results.units import format_duration

Array = NDArray[np.float64]

SURE_UPDATES = 60
"""A sensor that lives does not show one value for so many, even if it repeats itself four times of five."""


class FrozenPower(NamedTuple):
    """A trace whose sensor stood still, or may have, in these stretches of its time."""

    trace: PowerTrace
    stretches_s: tuple[Interval, ...]
    told: str
    is_sure: bool
    """False where a load that costs less than a step of the sensor would look the same."""

    def within_s(self, spans: Sequence[Interval]) -> float:
        """For how long it stood still in these disjoint ones."""
        edges = np.asarray(spans, dtype=np.float64).reshape(-1, 2)
        return sum(
            float(np.maximum(np.minimum(edges[:, 1], end_s) - np.maximum(edges[:, 0], start_s), 0.0).sum())
            for start_s, end_s in self.stretches_s
        )


def may_stand(trace: PowerTrace) -> bool:
    """Whether it shows a value for so long that what the sensor shows at rest has something to say."""
    if not _is_sensor(trace):
        return False
    begins = np.concatenate([[0], np.flatnonzero(np.diff(trace.values) != 0) + 1, [len(trace.values)]])
    first, last = begins[:-1], begins[1:] - 1
    return bool((trace.times_s[last] - trace.times_s[first]).max() >= STUCK_UPDATES * _period_s(trace))


def frozen_power(trace: PowerTrace, before: Sequence[PowerTrace], after: Sequence[PowerTrace]) -> FrozenPower | None:
    """before, after: the traces of the idle times around the window's; may be empty. None where it lived, as far as
    they tell."""
    if not may_stand(trace):
        return None
    sides = [_same(trace, own) for own in (before, after)]
    recordings = [*sides[0], trace, *sides[1]]
    watts = np.concatenate([one.values for one in recordings])
    if not np.isfinite(watts).all() or trace.values[0] == 0:
        return None
    name, period_s = f"{trace.meter} {trace.component}", _period_s(trace)
    if np.ptp(watts) == 0:
        whole = ((float(trace.times_s[0]), float(trace.times_s[-1])),)
        n_updates = sum(float(one.times_s[-1] - one.times_s[0]) for one in recordings) / period_s
        at_rest = ", at rest too," if len(recordings) > 1 else ""
        same = f"{name}: all of its {len(watts)} readings{at_rest} show {watts[0]:.6g} W to the last digit"
        if n_updates >= SURE_UPDATES and is_fine(float(watts[0]), trace.resolution):
            what = f"{same}, and a load has noise: the sensor stood still, which is no measurement"
            return FrozenPower(trace, whole, f"{what} (measure again; look at the driver)", is_sure=True)
        if not all(sides):
            return None
        what = "the load used less than a step of the sensor, or the sensor stood still"
        return FrozenPower(trace, whole, f"{same}: {what}", is_sure=False)
    if len(recordings) == 1:
        return None
    stretches_s = _stuck_s(trace, sides)
    if not stretches_s:
        return None
    stuck_s = sum(end_s - start_s for start_s, end_s in stretches_s)
    what = f"{name}: its reading was stuck at one value for {format_duration(stuck_s)}, and it moves in the idle time"
    return FrozenPower(
        trace,
        stretches_s,
        f"{what} around the window, which is no measurement (measure again; look at the driver)",
        is_sure=True,
    )


def _is_sensor(trace: PowerTrace) -> bool:
    is_power = trace.kind == "power" and trace.method == "integrated power"
    return is_power and len(trace.values) > 1 and _period_s(trace) > 0


def _period_s(trace: PowerTrace) -> float:
    return max(trace.update_period_s, trace.sample_interval_s)


def _same(trace: PowerTrace, traces: Sequence[PowerTrace]) -> list[PowerTrace]:
    found = [t for t in traces if (t.meter, t.component, t.kind) == (trace.meter, trace.component, trace.kind)]
    return [t for t in found if len(t.values) > 1]


def _stuck_s(trace: PowerTrace, sides: Sequence[Sequence[PowerTrace]]) -> tuple[Interval, ...]:
    """Stretches of the window's readings that are stuck beside those at rest, and that the window's own do not tell.

    The recordings are put end to end, so that no time counts in which nothing was read.
    """
    t, period_s = trace.times_s, _period_s(trace)
    times_s: list[Array] = [t]
    for one in reversed(sides[0]):
        times_s.insert(0, one.times_s + (times_s[0][0] - period_s - one.times_s[-1]))
    for one in sides[1]:
        times_s.append(one.times_s + (times_s[-1][-1] + period_s - one.times_s[0]))
    values = np.concatenate([one.values for one in [*sides[0], trace, *sides[1]]])
    known = {(float(t[i]), float(t[j])) for i, j in stuck_runs(trace)}
    at_s = np.concatenate(times_s)
    found = []
    for i, j in stuck_runs(replace(trace, times_s=at_s, values=values)):
        start_s, end_s = max(float(at_s[i]), float(t[0])), min(float(at_s[j]), float(t[-1]))
        if end_s > start_s and (start_s, end_s) not in known:
            found.append((start_s, end_s))
    return tuple(found)
