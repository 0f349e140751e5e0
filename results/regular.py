"""Loads that come back in step with the readings: how far off the mean of readings may be that met them alike.

Readings that repeat a pattern, however many of them a period takes, are put in order of the pattern's phase. Then they
are one period that was read very closely where the phase drifted through the readings, and with gaps where it stood.
Two things follow: the mean over the phase, which is the true one if the pattern is an alias of a faster load, and how
far the edges of the load may lie from where they were met, which is the gap in the phase.

The period is the one that leaves the folded readings smoothest (Lafler & Kinman 1965), near the peaks of the spectrum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEWEST_READINGS = 12
FEWEST_CYCLES = 1.5
"""A pattern that is not seen again is no pattern."""
N_PEAKS = 5
N_REFINED = 41
"""Frequencies that are tried within one resolution of the spectrum around each peak."""
AS_SMOOTH = 1.25
"""Periods that leave the readings nearly as smooth may be the true one: the one that errs most is taken."""
LONGEST = 4096
"""Readings that are looked at for the peaks, and at most so many are folded: the middle of longer stretches."""


class Pattern(NamedTuple):
    """A pattern that readings repeat."""

    share: float
    """Of the readings' variance that it explains."""
    off_w2: float
    """Variance of the readings' mean: what it is off the mean over the phase, and where the edges hide in its gaps."""


def pattern(watts: Array) -> Pattern | None:
    """Of readings at about equal distances; None where they repeat none."""
    if len(watts) > LONGEST:
        begin = (len(watts) - LONGEST) // 2
        watts = watts[begin : begin + LONGEST]
    n = len(watts)
    x = watts - watts.mean()
    total_w2 = float(x @ x)
    if n < FEWEST_READINGS or total_w2 <= 1e-18 * float(watts @ watts):
        return None
    tried = _near_peaks(x)
    if not len(tried):
        return None
    at = np.arange(n)
    roughness = np.array([_roughness(x, at * f % 1.0) for f in tried.tolist()])
    # Twice the variance is what neighbours in a random order differ by.
    share = 1.0 - float(roughness.min()) / (2 * total_w2)
    as_smooth = tried[roughness <= AS_SMOOTH * roughness.min() + 1e-12 * total_w2]
    off_w2 = max(_off_w2(x, at * f % 1.0) for f in as_smooth.tolist())
    return Pattern(share, off_w2)


def pattern_at(watts: Array, phase: Array) -> Pattern | None:
    """Of readings whose places in the pattern are known, 0 to 1; None where they are too few, or all alike."""
    x = watts - watts.mean()
    total_w2 = float(x @ x)
    if len(watts) < FEWEST_READINGS or total_w2 <= 1e-18 * float(watts @ watts):
        return None
    return Pattern(1.0 - _roughness(x, phase) / (2 * total_w2), _off_w2(x, phase))


def _off_w2(x: Array, phase: Array) -> float:
    order = np.argsort(phase, kind="stable")
    phase, ordered = phase[order], x[order]
    gap = np.diff(phase, append=phase[0] + 1.0)
    change_w = np.diff(ordered, append=ordered[0])
    over_phase_w = float(((ordered + change_w / 2) * gap).sum())
    # The edges of one cycle err together at worst.
    return over_phase_w**2 + 2 * float(((change_w * gap) ** 2).sum()) / 12


def _near_peaks(x: Array) -> Array:
    """Frequencies, in cycles a reading, close to the highest peaks of the spectrum, and to half of these."""
    n = len(x)
    size = 8 * n
    power = np.abs(np.fft.rfft(x * np.hanning(n), size)) ** 2
    inner = power[1:-1]
    peaks = 1 + np.flatnonzero((inner >= power[:-2]) & (inner >= power[2:]))
    if power[-1] > power[-2]:
        peaks = np.append(peaks, len(power) - 1)
    highest = peaks[np.argsort(power[peaks])[::-1][:N_PEAKS]] / size
    around = np.linspace(-1.0, 1.0, N_REFINED) / n
    tried = (np.concatenate([highest, highest[:2] / 2])[:, None] + around).reshape(-1)
    return np.asarray(tried[(tried * n >= FEWEST_CYCLES) & (tried <= 0.5 + 1.0 / n)])


def _roughness(x: Array, phase: Array) -> float:
    ordered = x[np.argsort(phase, kind="stable")]
    change = np.diff(ordered, append=ordered[0])
    return float(change @ change)
