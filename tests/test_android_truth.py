"""Joules of known waveforms through the phone's gauge, its clock and the harness' arithmetic: 100 seeded windows each.

The gauge is simulated (a value every 250 ms, sampled every 50 ms, with a random phase and a flickering last digit), so
is the link (delays of up to 20 ms either way) and the phone's clock (1.7e9 s ahead, fast by 40 ppm). What is tested is
what turns a log into joules.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from devices.android.battery import GaugeSource, power_trace
from devices.android.calibration import Calibration
from devices.android.device_clock import Marker
from devices.android.gauge_loop import GaugeLog
from devices.base import Channel
from results.energy import energy_between
from tests.fakes.waveforms import StepPower

Array = NDArray[np.float64]
UPDATE_S, INTERVAL_S, WINDOW_S = 0.25, 0.05, 10.0
START_S = 2.0
VOLTS = 4.0
UA_RESOLUTION = 244
"""Steps of a 16-bit converter over a sense resistor of 10 mOhm, in microampere."""


def constant(rng: np.random.Generator) -> StepPower:
    return StepPower(np.array([0.0, 100.0]), np.array([rng.uniform(0.5, 8.0)]))


def bursts(
    rng: np.random.Generator, low_s: tuple[float, float], high_s: tuple[float, float], low_w: float, high_w: float
) -> StepPower:
    """Low and high power in turns, of lengths drawn evenly from the two ranges."""
    is_high = np.arange(400) % 2 == 1
    lengths_s = np.where(is_high, rng.uniform(*high_s, 400), rng.uniform(*low_s, 400))
    watts = np.where(is_high, high_w, low_w) * rng.uniform(0.9, 1.1, 400)
    return StepPower(np.concatenate([[0.0], np.cumsum(lengths_s)]), watts)


def ramps(rng: np.random.Generator) -> StepPower:
    """Up and down between 1 and 6 W in 2 to 5 s, in steps of 10 ms."""
    edges_s = np.arange(0.0, 100.0, 0.01)
    period_s = rng.uniform(4.0, 10.0)
    phase = (edges_s[:-1] / period_s + rng.uniform()) % 1.0
    return StepPower(edges_s, 1.0 + 5.0 * np.abs(2.0 * phase - 1.0))


WAVEFORMS: dict[str, Callable[[np.random.Generator], StepPower]] = {
    "constant": constant,
    "square, 1 to 3 s": lambda rng: bursts(rng, (1.0, 3.0), (1.0, 3.0), 1.0, 6.0),
    "ramps": ramps,
    "requests of 0.4 to 1.2 s": lambda rng: bursts(rng, (0.4, 1.2), (0.4, 1.2), 1.5, 5.0),
    "spikes shorter than an update": lambda rng: bursts(rng, (0.2, 0.9), (0.03, 0.2), 1.0, 4.0),
}


def gauge_log(power: StepPower, rng: np.random.Generator) -> GaugeLog:
    """What a phone would send from time 0 to a second after the window."""
    end_s = START_S + WINDOW_S + 1.0
    at_s = np.cumsum(rng.uniform(INTERVAL_S, INTERVAL_S + 2e-3, int(end_s / INTERVAL_S)))
    phase_s = rng.uniform(0.0, UPDATE_S)
    update = np.floor((at_s - phase_s) / UPDATE_S)
    watts = power.power_w(np.maximum(update * UPDATE_S + phase_s, 0.0))
    flicker = rng.integers(-2, 3, 10_000)[update.astype(int) + 1]
    current = -(np.round(watts / VOLTS * 1e6 / UA_RESOLUTION) + flicker) * UA_RESOLUTION
    bursts = tuple(
        tuple(
            Marker(t, phone_clock(np.array([t + out_s]))[0], np.nan, t + out_s + back_s)
            for t, out_s, back_s in zip(begun_s + 0.05 * np.arange(12), *rng.uniform(0.0, 0.02, (2, 12)), strict=True)
        )
        for begun_s in (0.0, end_s - 0.6)
    )
    return GaugeLog(phone_clock(at_s), np.full(len(at_s), np.nan), current, np.full(len(at_s), VOLTS * 1e6), bursts)


def phone_clock(host_s: Array) -> Array:
    return 1.7e9 + host_s * (1 + 40e-6)


def errors(waveform: str, n_runs: int = 100) -> tuple[Array, Array]:
    """(relative error, error in stated standard uncertainties) of each window."""
    relative, standard = [], []
    for seed in range(n_runs):
        rng = np.random.default_rng(seed)
        power = WAVEFORMS[waveform](rng)
        # The simulated gauge has no gain error, so none is granted.
        trace = power_trace(
            gauge_log(power, rng),
            GaugeSource("simulated", "current", "", INTERVAL_S),
            Calibration(-1, 1e-6, 1e-6),
            Channel("battery", "held"),
        )
        reading = energy_between([trace], [(START_S, START_S + WINDOW_S)], "all", "battery")
        assert reading.energy_j is not None, reading.reason
        assert reading.uncertainty_j is not None
        truth_j = power.energy_j(START_S, START_S + WINDOW_S)
        relative.append((reading.energy_j - truth_j) / truth_j)
        standard.append((reading.energy_j - truth_j) / reading.uncertainty_j)
    return np.asarray(relative), np.asarray(standard)


@pytest.mark.parametrize("waveform", WAVEFORMS)
def test_joules_are_within_the_stated_uncertainty_in_95_of_100_windows(waveform: str) -> None:
    """Stated is one standard uncertainty; 95 % lie within two."""
    _, standard = errors(waveform)
    assert (np.abs(standard) <= 2.0).sum() >= 95


def test_a_constant_load_is_known_to_1_percent_in_10_s() -> None:
    relative, _ = errors("constant")
    assert np.abs(relative).max() < 0.01


def test_no_waveform_is_read_high_or_low_on_average() -> None:
    """The mean of 100 windows lies within three of its own standard errors of the truth."""
    for waveform in WAVEFORMS:
        relative, _ = errors(waveform)
        assert abs(relative.mean()) < 3 * relative.std() / np.sqrt(len(relative)) + 1e-4, waveform
