"""Phones of source 002 whose probes fluctuate: speed and power of their sheets' models, with noise, drift and mishaps.

    speed = model * exp(noise + drift)      power = model * exp(noise' + drift')      of one probe in 100: speed * 0.7,
                                                                                      power * 1.2 (another app woke up)

Noise is normal, of each probe and of each of the two apart. Drift is a normal process with a memory of 50 probes: a
phone that warms up, a battery that empties. Nothing here was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from devices.models.core_clusters import Selection
from harness.tuning.race import Ask, Reading

CHUNK = 2048


@dataclass(frozen=True)
class Weather:
    """Relative standard deviations, and how often a probe is disturbed."""

    noise: float
    drift: float = 0.02
    memory: float = 50.0
    """Probes after which a drift has faded to 1/e."""
    disturbed: float = 0.01
    disturbed_speed: float = 0.7
    disturbed_power: float = 1.2


class SimulatedPhone:
    """Answers one session's probes. The same seed answers the n-th probe with the same luck, whoever asks."""

    def __init__(self, readings: Mapping[Selection, Reading], weather: Weather, seed: int) -> None:
        self._readings, self._weather = readings, weather
        self._rng = np.random.default_rng(seed)
        self._drift = self._rng.standard_normal(2) * weather.drift
        self._luck: list[list[float]] = []

    def __call__(self, ask: Ask[Selection]) -> Reading:
        if not self._luck:
            self._luck = self._drawn().tolist()
        speed_luck, power_luck = self._luck.pop()
        speed, power = self._readings[ask.arm]
        assert power is not None
        return Reading(speed * speed_luck, power * power_luck)

    def _drawn(self) -> NDArray[np.float64]:
        """Factors of the next probes, the last first."""
        weather, rng = self._weather, self._rng
        keeps = np.exp(-1.0 / weather.memory)
        steps = rng.standard_normal((CHUNK, 2)) * weather.drift * np.sqrt(1.0 - keeps**2)
        drift, _ = lfilter([1.0], [1.0, -keeps], steps, axis=0, zi=keeps * self._drift[None, :])
        self._drift = drift[-1]
        factors = np.exp(rng.standard_normal((CHUNK, 2)) * weather.noise + drift)
        factors[rng.random(CHUNK) < weather.disturbed] *= (weather.disturbed_speed, weather.disturbed_power)
        return factors[::-1]
