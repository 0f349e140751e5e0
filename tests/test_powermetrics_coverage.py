"""Loads of known energy as powermetrics would tell them, played back: are the true joules within the stated error?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from devices.meters.replay import ReplayMeter
from results.energy import energy_between
from tests.benchmarks.power_coverage import LOADS
from tests.fakes.waveforms import StepPower
from tests.meter_windows import CLOCK

N_WINDOWS, EVERY_S, WINDOW_S = 300, 0.1, 2.5


def played_j(path: Path, load: StepPower, begins_s: float, rng: np.random.Generator) -> tuple[float, float]:
    """(joules, stated standard uncertainty) of the window from 0; the log begins before. Its samples tell their length
    in hundredths of a millisecond, and whole milliwatts."""
    durations_s = np.round(rng.uniform(0.95, 1.1, int(WINDOW_S / EVERY_S) + 6) * EVERY_S, 5)
    edges_s = begins_s + np.concatenate([[0.0], np.cumsum(durations_s)])
    watts = np.diff(load.since_start_j(edges_s)) / durations_s
    path.write_text(
        "".join(
            f"*** Sampled system activity (now) ({1e3 * lasted_s:.2f}ms elapsed) ***\nCPU Power: {1e3 * one:.0f} mW\n"
            for lasted_s, one in zip(durations_s.tolist(), watts.tolist(), strict=True)
        )
    )
    meter = ReplayMeter(path, CLOCK)
    meter.open()
    found = energy_between(meter.played(begins_s, WINDOW_S), [(0.0, WINDOW_S)], "all", "replay")
    assert found.energy_j is not None, found.reason
    assert found.uncertainty_j is not None
    return found.energy_j, found.uncertainty_j


@pytest.mark.parametrize(
    ("load", "widest"),
    [
        # All changes of the window were counted before: 30 times for bursts, 400 for a ramp, without end for a step.
        ("bursts", 3.0),
        ("one step", 3.0),
        ("square 0.9 Hz, 0.5", 3.0),
        # Of its neighbours the most distant two count, as if all of that was a step.
        ("noise of 1 s", 5.0),
        # A cut stretch of a ramp may hold a step as well: what is stated is less than a thousandth.
        ("ramp", 30.0),
    ],
)
def test_true_joules_are_within_the_error_of_the_stretches_that_were_cut(
    tmp_path: Path, load: str, widest: float
) -> None:
    errors_j, sigmas_j, true_j = np.empty((3, N_WINDOWS))
    for seed in range(N_WINDOWS):
        rng = np.random.default_rng(seed)
        watts = LOADS[load](rng, WINDOW_S)
        true_j[seed] = watts.energy_j(0.0, WINDOW_S)
        energy_j, sigmas_j[seed] = played_j(tmp_path / "mac.txt", watts, -EVERY_S * rng.uniform(0.1, 1.0), rng)
        errors_j[seed] = abs(energy_j - true_j[seed])
    assert (errors_j <= 2 * sigmas_j).mean() >= 0.95
    assert (errors_j <= 3 * sigmas_j).mean() >= 0.99
    assert np.sqrt((sigmas_j**2).mean() / (errors_j**2).mean()) < widest
    if load == "ramp":
        assert (sigmas_j < 1e-3 * true_j).all()
