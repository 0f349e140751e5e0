"""Joules of single requests: those of their own span, and at the cost of that span, however long the trace is."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from results.derivation import RequestEnergies
from results.records import PowerTrace, TraceKind
from tests.fakes.waveforms import StepPower, counter_trace, trace
from tests.run_builders import completion

DT = 0.05
N = 200_000
AT_S = DT * np.arange(N)
EDGES_S = np.arange(0.0, AT_S[-1] + 30.0, 2.5)
LOAD = StepPower(EDGES_S, np.where(np.arange(len(EDGES_S) - 1) % 2, 60.0, 20.0))


def parts(kind: TraceKind) -> list[PowerTrace]:
    """Two parts of a total, one with a sensor beside its counter that others stood still for, and a gap."""
    noise_w = np.random.default_rng(1).normal(0.0, 1.0, N)
    sensor = trace("power", AT_S, LOAD.power_w(AT_S) + noise_w, DT, component="a power", additive=False)
    if kind == "counter":
        own = [counter_trace(LOAD, AT_S, 0.1, step_j=1e-3, component=name) for name in ("a", "b")]
        return [*own, sensor]
    update_s = 0.1 if kind == "held" else 0.0
    watts = LOAD.power_w(AT_S) + noise_w
    return [trace(kind, AT_S, watts, DT, component=name, update_period_s=update_s) for name in ("a", "b")]


@pytest.mark.parametrize("kind", ["power", "held", "counter"])
def test_a_request_takes_the_work_of_its_own_span(kind: TraceKind) -> None:
    """Work is counted as the memory it takes: less than a byte for each reading of the trace."""
    energies = RequestEnergies(parts(kind), "m")
    requests = [completion("s", at_s, token_times_s=(at_s + 1.0, at_s + 7.5)) for at_s in (100.0, 5000.0)]
    first = energies.of(requests[:1])
    tracemalloc.start()
    try:
        second = energies.of(requests[1:])
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < N
    for reading, request in zip((first, second), requests, strict=True):
        assert reading.energy_j is not None, reading.reason
        assert reading.energy_j == pytest.approx(2 * LOAD.energy_j(request.start_s, request.end_s), rel=0.02)
