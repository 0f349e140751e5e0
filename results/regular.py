"""Loads that come back in step with the readings: how far off the mean of readings may be that met them alike.

Readings that repeat a pattern, however many of them a period takes, are put in order of the pattern's phase. Then they
are one period that was read very closely where the phase drifted through the readings, and with gaps where it stood.
Two things follow: the mean over the phase, which is the true one if the pattern is an alias of a faster load, and how
far the edges of the load may lie from where they were met, which is the gap in the phase.

The period is the one that leaves the folded readings smoothest (Lafler & Kinman 1965), near the peaks of the spectrum.
"""

from __future__ import annotations

from collections.abc import Callable
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
AT_ONCE = 1 << 11
"""Readings that are folded in one go, of all frequencies together: arrays that stay in a processor's cache."""

# F frequencies, N readings


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
    roughness = _each(_roughness, x, tried)
    # Twice the variance is what neighbours in a random order differ by.
    share = 1.0 - float(roughness.min()) / (2 * total_w2)
    as_smooth = tried[roughness <= AS_SMOOTH * roughness.min() + 1e-12 * total_w2]
    return Pattern(share, float(_each(_off_w2, x, as_smooth).max()))


def pattern_at(watts: Array, phase: Array) -> Pattern | None:
    """Of readings whose places in the pattern are known, 0 to 1; None where they are too few, or all alike."""
    x = watts - watts.mean()
    total_w2 = float(x @ x)
    if len(watts) < FEWEST_READINGS or total_w2 <= 1e-18 * float(watts @ watts):
        return None
    (roughness,), (off_w2,) = (of(x, phase[None, :]) for of in (_roughness, _off_w2))
    return Pattern(1.0 - float(roughness) / (2 * total_w2), float(off_w2))


def _each(of: Callable[[Array, Array], Array], x: Array, tried: Array) -> Array:
    """A figure of the readings in order of their phase, for each frequency.

    Many at once: for a hundred readings numpy takes longer to begin than to compute.
    """
    at, n_at_once = np.arange(len(x)), max(1, AT_ONCE // len(x))
    parts = (tried[begin : begin + n_at_once] for begin in range(0, len(tried), n_at_once))
    return np.concatenate([of(x, np.outer(part, at) % 1.0) for part in parts])


def _off_w2(x: Array, phase_FN: Array) -> Array:
    order_FN = np.argsort(phase_FN, axis=1, kind="stable")
    phase_FN, ordered_FN = np.take_along_axis(phase_FN, order_FN, axis=1), x[order_FN]
    gap_FN = np.diff(phase_FN, append=phase_FN[:, :1] + 1.0)
    change_w_FN = np.diff(ordered_FN, append=ordered_FN[:, :1])
    over_phase_w_F = ((ordered_FN + change_w_FN / 2) * gap_FN).sum(axis=1)
    # The edges of one cycle err together at worst.
    return np.asarray(over_phase_w_F**2 + 2 * ((change_w_FN * gap_FN) ** 2).sum(axis=1) / 12)


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


def _roughness(x: Array, phase_FN: Array) -> Array:
    ordered_FN = x[np.argsort(phase_FN, axis=1, kind="stable")]
    return np.array([change_N @ change_N for change_N in np.diff(ordered_FN, append=ordered_FN[:, :1])])
