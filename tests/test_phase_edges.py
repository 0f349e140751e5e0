"""Phases whose edges are where the power changes, as those of requests are, each like the one before: the errors at all
edges have one direction, and where phases are in step with a meter's updates they are alike too.

True joules are watts times seconds. They must lie within two standard uncertainties of those that are told in about
95 of 100 phases, and the uncertainty must not cover everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from results.energy import MeterEnergy
from results.intervals import Interval
from results.records import EnergyReading, Phase, PowerTrace
from tests.fakes.instruments import END_S, INSTRUMENTS, START_S
from tests.fakes.waveforms import StepPower

IDLE_W, PREFILL_W, DECODE_W = 1.0, 6.0, 3.0
N_WINDOWS = 40
SHAPES = {"one after another": (1.0, 2.0, 0.0), "with pauses": (2.6, 2.6, 0.1)}
"""Seconds of prefill, of decoding, and of nothing: whole updates of a tenth and a quarter of a second, or nearly so."""
MOST_STATED = {
    "counter, renewed every 100 ms": 0.05,
    "power, renewed every 100 ms": 0.08,
    "phone's rails, every 100 ms": 0.08,
}
"""Of the joules: an edge that is nowhere within an update is off by a tenth of a second's step at most, twice in each
second."""


class Window(NamedTuple):
    trace: PowerTrace
    prefill: Sequence[Interval]
    decode: Sequence[Interval]


def window(meter: str, shape: str, jitter: float, seed: int) -> Window:
    """Requests from the window's start on, until none fits before its end. jitter: of each length, either way."""
    rng = np.random.default_rng(seed)
    edges_s, watts = [0.0, START_S], [IDLE_W]
    prefill: list[Interval] = []
    decode: list[Interval] = []
    while True:
        lengths_s = np.asarray(SHAPES[shape]) * rng.uniform(1 - jitter, 1 + jitter, 3)
        start_s, first_s, done_s, next_s = (edges_s[-1] + np.concatenate([[0.0], np.cumsum(lengths_s)])).tolist()
        if next_s > END_S:
            break
        prefill.append((start_s, first_s))
        decode.append((first_s, done_s))
        edges_s += [first_s, done_s] + [next_s] * (next_s > done_s)
        watts += [PREFILL_W, DECODE_W] + [IDLE_W] * (next_s > done_s)
    power = StepPower(np.asarray([*edges_s, 100.0]), np.asarray([*watts, IDLE_W]))
    return Window(INSTRUMENTS[meter](power, rng), prefill, decode)


def told(one: Window, intervals: Sequence[Interval], phase: Phase) -> EnergyReading:
    return MeterEnergy([one.trace], one.trace.meter).between(intervals, phase)


@pytest.mark.parametrize("jitter", [0.0, 0.05])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("meter", MOST_STATED)
def test_joules_of_phases_in_step_are_within_the_stated_uncertainty(meter: str, shape: str, jitter: float) -> None:
    inside, stated = [], []
    for seed in range(N_WINDOWS):
        one = window(meter, shape, jitter, seed)
        phases: tuple[tuple[Phase, Sequence[Interval], float], ...] = (
            ("prefill", one.prefill, PREFILL_W),
            ("decode", one.decode, DECODE_W),
        )
        for phase, intervals, watts in phases:
            found = told(one, intervals, phase)
            if found.energy_j is None:
                # Drawn too short.
                assert "unresolved" in (found.reason or "")
                continue
            true_j = watts * sum(end_s - start_s for start_s, end_s in intervals)
            assert found.uncertainty_j is not None
            inside.append(abs(found.energy_j - true_j) <= 2 * found.uncertainty_j)
            stated.append(found.uncertainty_j / true_j)
    assert len(inside) >= N_WINDOWS
    assert np.mean(inside) >= 0.95
    assert np.mean(stated) < MOST_STATED[meter]
