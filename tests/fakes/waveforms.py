"""Power over time with a known integral, and the traces that an ideal instrument would take of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from results.records import PowerTrace

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class StepPower:
    """watts[i] from edges_s[i] to edges_s[i + 1]; the energy is the sum of the rectangles."""

    edges_s: Array
    watts: Array

    def power_w(self, at_s: Array) -> Array:
        i = np.searchsorted(self.edges_s, at_s, side="right") - 1
        return self.watts[np.clip(i, 0, len(self.watts) - 1)]

    def energy_j(self, start_s: float, end_s: float) -> float:
        overlaps_s = np.minimum(self.edges_s[1:], end_s) - np.maximum(self.edges_s[:-1], start_s)
        return float(np.maximum(overlaps_s, 0.0) @ self.watts)

    def since_start_j(self, at_s: Array) -> Array:
        so_far_j = np.concatenate([[0.0], np.cumsum(np.diff(self.edges_s) * self.watts)])
        return np.asarray(np.interp(at_s, self.edges_s, so_far_j))


def counter_trace(
    power: StepPower, times_s: Array, update_s: float = 0.0, phase_s: float = 0.0, step_j: float = 0.0, **fields: Any
) -> PowerTrace:
    """Reads of a counter that renews its value at phase_s + k update_s, in steps of step_j."""
    shown_s = np.floor((times_s - phase_s) / update_s) * update_s + phase_s if update_s else times_s
    values_j = power.since_start_j(shown_s)
    if step_j:
        values_j = np.floor(values_j / step_j) * step_j
    interval_s = float(np.median(np.diff(times_s)))
    return trace("counter", times_s, values_j, interval_s, update_period_s=update_s, resolution=step_j, **fields)


def trace(
    kind: str, times_s: Sequence[float] | Array, values: Sequence[float] | Array, interval_s: float, **fields: Any
) -> PowerTrace:
    methods = {"power": "integrated power", "held": "battery gauge", "counter": "counter"}
    everything: dict[str, Any] = {
        "meter": "m",
        "component": "c",
        "kind": kind,
        "method": methods[kind],
        "times_s": np.asarray(times_s, dtype=np.float64),
        "values": np.asarray(values, dtype=np.float64),
        "sample_interval_s": interval_s,
    }
    return PowerTrace(**(everything | fields))
