"""Requests about as long as a meter's renewals: it meets them at moments that are not spread over their time.

What a meter shows at an instant then says little of the rest of a request, and its readings cannot tell: they look like
those of a slower load, or of a steady one. The requests' own times can. In order of their place in a request, from its
start to the next one's, the readings are one request that was read at places with gaps between: how far the mean over
that is off the mean of the readings joins the uncertainty (`results.regular`). Where no renewal fell into half of a
request, readings bound nothing, and it is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from results.records import Completion, EnergyReading, PowerTrace
from results.regular import pattern_at

Array = NDArray[np.float64]

FEWEST = 10
"""Renewals, and requests: of fewer nothing can be said."""
UNMET_SHARE = 0.5
"""Of a request's time, in one piece."""
BY_CHANCE = 0.003
"""Renewals at any time leave so large a piece unmet in so few windows."""
IN_STEP = " nearly in step"
NOT_BY_CHANCE = 1.5
"""Standard deviations of the share of the readings' variance that places in a request explain by chance. It is 1 over
the root of their number (von Neumann 1941): of readings with noise requests explain the less, and are seen unevenly
all the same. One window of 15 whose load follows no request is less certain for it."""
ENOUGH = 0.5
"""Of the readings' variance: requests that explain so much of it are what they show, of however few."""


def uneven_w2(traces: Iterable[PowerTrace], completions: Sequence[Completion]) -> float:
    """Variance of the mean power of a window, for the places in its requests where these traces together met them."""
    seen = [found for found in map(_renewals, traces) if len(found[0]) >= FEWEST]
    starts_s = _starts_s(completions) if seen else np.array([])
    off_w = 0.0
    for renewed_s, watts in seen:
        phase, is_within = _places(renewed_s, starts_s)
        # Several of them in a request follow its power.
        if len(phase) < FEWEST or len(phase) > 2 * len(starts_s):
            continue
        found = pattern_at(watts[is_within], phase)
        if found is not None and found.share >= min(ENOUGH, NOT_BY_CHANCE / len(phase) ** 0.5):
            off_w += found.off_w2**0.5
    return off_w**2


def met_alike(
    traces: Iterable[PowerTrace], completions: Sequence[Completion], readings: Iterable[EnergyReading]
) -> tuple[str, ...]:
    """Of each meter whose renewals came at the same moment of each request: what is to be said of its joules. readings:
    where a meter has none, nothing is said."""
    told = {reading.meter for reading in readings if reading.phase == "all" and reading.energy_j is not None}
    starts_s = _starts_s(completions)
    found = {}
    for trace in traces:
        share = unmet_share(_renewals(trace)[0], starts_s)
        if share is not None and trace.meter in told:
            found[trace.meter] = (
                f"energy of {trace.meter}: it renews its value every {trace.update_period_s:.3g} s, and met requests"
                f"{IN_STEP}: {100 * share:.0f} % of a request's time was never seen. If it shows instants, its"
                " figures may be wrong by far more than their ±; ask requests of several lengths, or take a faster"
                " meter"
            )
    return tuple(found.values())


def is_met_alike(note: str) -> bool:
    """Whether a trial's note is one of `met_alike`."""
    return note.startswith("energy of ") and IN_STEP in note


def _starts_s(completions: Sequence[Completion]) -> Array:
    return np.unique(np.asarray([c.start_s for c in completions], dtype=np.float64))


def _renewals(trace: PowerTrace) -> tuple[Array, Array]:
    """When it had a new value, and which; none of a meter that has one at each reading, tells no power, or averages
    over all of its update."""
    is_gauge = trace.kind in ("held", "power") and trace.method not in ("modelled", "replayed")
    misses = trace.update_period_s > (trace.averaged_s or 0.0)  # a mean over each update has seen all of it
    if not is_gauge or not misses or len(trace.times_s) < 2:
        return np.array([]), np.array([])
    is_new = renewed(trace)
    return trace.times_s[is_new], trace.values[is_new]


def renewed(trace: PowerTrace) -> NDArray[np.bool_]:
    """Which readings are of a new value: a gauge that is read more often than it renews shows one again."""
    is_new = np.ones(len(trace.times_s), dtype=np.bool_)
    if trace.kind == "power":
        is_new[1:] = np.diff(trace.values) != 0
    return is_new


def _places(at_s: Array, starts_s: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Of the times from the first request's start to the last one's: where in a request each lies, and which they
    are."""
    if len(starts_s) <= FEWEST:
        return np.array([]), np.zeros(len(at_s), dtype=np.bool_)
    is_within = (at_s >= starts_s[0]) & (at_s < starts_s[-1])
    i = np.searchsorted(starts_s, at_s[is_within], side="right") - 1
    return (at_s[is_within] - starts_s[i]) / (starts_s[i + 1] - starts_s[i]), is_within


def unmet_share(renewed_s: Array, starts_s: Array) -> float | None:
    """The longest piece of the time from one request's start to the next one's in which no renewal fell. None where it
    may be chance.

    Of n points on a circle, some two neighbours are further apart than g with a chance of n (1 - g)^(n - 1) (Stevens
    1939, for g of a half or more).
    """
    phase = np.sort(_places(renewed_s, starts_s)[0])
    n = len(phase)
    if n < FEWEST:
        return None
    unmet = float(np.diff(phase, append=phase[0] + 1).max())
    return unmet if unmet >= UNMET_SHARE and n * (1 - unmet) ** (n - 1) < BY_CHANCE else None
