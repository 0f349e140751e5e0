"""A counter against the power samples beside it, on traces with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from devices.meters.cross_check import compare, comparisons
from results.records import PowerTrace

TIMES_S = np.arange(0.0, 5.0, 0.05)


def counter(watts: float, **fields: object) -> PowerTrace:
    return trace("counter", TIMES_S * watts, **fields)


def power(watts: float, **fields: object) -> PowerTrace:
    return trace("power", np.full(len(TIMES_S), watts), **({"component": "gpu0 power"} | fields))


def trace(kind: str, values: np.ndarray, **fields: object) -> PowerTrace:
    everything: dict[str, object] = {
        "meter": "nvml",
        "component": "gpu0",
        "kind": kind,
        "method": "counter" if kind == "counter" else "integrated power",
        "times_s": TIMES_S,
        "values": values,
        "sample_interval_s": 0.05,
        "relative_accuracy": 0.03,
    }
    return PowerTrace(**(everything | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(("power_w", "disagrees"), [(100.0, False), (108.0, False), (109.5, True), (91.0, True)])
def test_disagreement_is_what_two_gains_of_3_percent_leave_in_5_percent_of_windows(
    power_w: float, disagrees: bool
) -> None:
    # 2 sqrt(3^2 + 3^2) = 8.5 % of 100 W, and 8.9 % or 8.1 % with the other's own gain on its own watts.
    assert compare(counter(100.0), power(power_w)).disagrees is disagrees


def test_comparison_tells_both_energies_over_the_same_time() -> None:
    # 4.95 s of trace: 495 and 594 J.
    assert str(compare(counter(100.0), power(120.0))) == (
        "gpu0: counter 495 J, power samples 594 J in 4.95 s (46 J apart is allowed): they DISAGREE; trust"
        " neither before a third meter decides"
    )
    assert "they agree" in str(compare(counter(100.0), power(101.0)))


def test_what_one_of_them_does_not_resolve_is_not_compared() -> None:
    slow = compare(counter(100.0), power(100.0, update_period_s=1.0))
    assert not slow.disagrees
    assert str(slow).startswith("counter and power samples not compared: nvml gpu0 power: unresolved")
    reset = TIMES_S * 100.0
    reset[50:] -= reset[50]
    assert "stepped back" in str(compare(trace("counter", reset), power(100.0)))


@pytest.mark.parametrize("watts", [60.0, 100.0])
@pytest.mark.parametrize("lost", ["no reading", "nan"])
def test_a_gap_in_the_power_is_left_out_and_the_rest_compared(watts: float, lost: str) -> None:
    """0.3 s without samples, in 5 s."""
    in_gap = (TIMES_S > 2.0) & (TIMES_S < 2.3)
    values = np.full(len(TIMES_S), 100.0)
    if lost == "nan":
        values[in_gap] = np.nan
        sampled = trace("power", values, component="gpu0 power")
    else:
        sampled = trace("power", values[~in_gap], component="gpu0 power", times_s=TIMES_S[~in_gap])
    found = compare(counter(watts), sampled)
    assert found.counter.energy_j == pytest.approx(watts * 4.65)
    assert found.power.energy_j == pytest.approx(100.0 * 4.65)
    assert found.disagrees is (watts == 60.0)
    assert "in 4.65 s" in str(found)
    assert "without 0.3 s in which one of them was not read: they" in str(found)


def test_pairs_are_found_by_name_within_a_meter() -> None:
    traces = [counter(100.0), power(150.0), power(100.0, meter="zeus"), counter(10.0, component="gpu1")]
    [only] = comparisons(traces)
    assert (only.component, only.disagrees) == ("gpu0", True)
