"""Whether a part of a total rests or has stopped, and what is taken for the stretches in which it stood still.

The readings of the part alone cannot tell (`results.liveness` bounds what may have flowed). What the others of the
meter did meanwhile says more: a part that never moved beside others that did is switched off, parts that stop together
have one source, and none rests while the others are much busier than when it moved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from results.cumulative import GAP_FACTOR, UnresolvedError, cumulative
from results.liveness import Beside, Stand, at_rest
from results.records import PowerTrace
from results.uncertainty import PowerErrors
from results.units import format_duration

Array = NDArray[np.float64]

ALIKE_INTERVALS = 1.5
"""Two parts that stop, and go on, within so many samples have one source."""
BUSIER = 2.0
"""Times the power of the others while it moved: a part does not rest from when they are so much busier."""
POWER_BESIDE = " power"
"""Ends the name of a component that is the power reading beside the counter of the same thing."""
MAX_STILL_SHARE = 0.2
"""Of a window's energy: so much may be taken from the power elsewhere."""
MAX_STILL_TIME = 0.08
"""Of a window's time, or its energy where that is of a smaller part: no more is filled in by the power elsewhere."""
MAX_REST_SIGMA = 0.1
"""Of a window's energy: a rest that may have hidden more is not believed."""
MAX_STILL_SIGMA = 0.05
"""Of a window's energy: what is known worse than this is no measurement."""


class Stood(NamedTuple):
    """What was taken for the stretches of a part that stood still, and how well it is known."""

    remark: str
    reason: str
    """Why there is no energy, where it is not known well enough."""
    taken_j: float
    """By the power elsewhere; so too the next three."""
    share_s: float
    """Of the window's time."""
    sigma_j: float
    rest_sigma_j: float
    """Of those that are taken for rest."""
    hidden_j: float
    """At most, over all: or shown too much, where a reading was stuck."""


def moving_parts(traces: Sequence[PowerTrace], meter: str) -> tuple[list[PowerTrace], list[str]]:
    """The parts of a meter's total that show anything, and remarks on the others. Raises UnresolvedError."""
    return moving_of([t for t in traces if t.meter == meter and t.additive], traces)


def moving_of(additive: Sequence[PowerTrace], traces: Sequence[PowerTrace]) -> tuple[list[PowerTrace], list[str]]:
    """The parts of a total that show anything, and remarks on the others. Raises UnresolvedError.

    A part that never moved, while others did, is switched off or was never there: 0 J. One that is known to have moved
    before, and that cannot be switched off, has stopped. Where no part moves, each is looked at by itself. A counter
    that stands still while the power sensor of the same part shows watts is dead: the sensor's joules are taken.
    """
    remarks, replaced = [], []
    for trace in additive:
        power = taken_instead(trace, traces)
        if power is not None:
            remarks.append(f"{trace.component}: {showing(trace)} all the time; its power sensor's joules are taken")
            trace = replace(power, additive=True)
        replaced.append(trace)
    still = [t for t in replaced if at_rest(t)]
    if len(still) == len(replaced):
        return replaced, remarks
    for trace in still:
        if trace.has_lived and not trace.can_rest:
            raise UnresolvedError(
                f"{trace.meter} {trace.component}: {showing(trace)} all the time, and it moved before: it has stopped,"
                " and the total would lack it"
            )
    off = "all the time, as a part that is switched off"
    remarks += [f"{t.component} counts as 0 J: {showing(t)} {off}" for t in still]
    return [t for t in replaced if not at_rest(t)], remarks


def is_known(stood: Stood | None, energy_j: float, total_j: float) -> bool:
    """Whether what was taken for the stands of a part of energy_j is known well enough for total_j."""
    return stood is None or (
        stood.taken_j <= MAX_STILL_SHARE * total_j
        and stood.share_s * energy_j <= MAX_STILL_TIME * total_j
        and stood.sigma_j <= MAX_STILL_SIGMA * total_j
        and stood.rest_sigma_j <= MAX_REST_SIGMA * total_j
    )


class Resting(NamedTuple):
    """A part, without leave to rest where what is beside it says otherwise."""

    trace: PowerTrace
    n_alike: int = 1
    """Parts that stop with it: what hides in one hides in all of them, or in none."""


def resting(trace: PowerTrace, traces: Sequence[PowerTrace]) -> Resting:
    """Where all parts stand still at once it is no part that rests: then their source has stopped.

    So too where the others are much busier then than when it moved. Parts that stop and go on together, while others
    count, may rest by one cause, or have one source that stopped: they err together.
    """
    if not trace.can_rest or trace.kind != "counter" or len(trace.values) < 2:
        return Resting(trace)
    siblings = [t for t in traces if t.meter == trace.meter and t.component != trace.component and t.kind == "counter"]
    start_s, end_s = _longest_still_s(trace)
    if end_s == start_s:
        return Resting(trace)
    outside_s = float(trace.times_s[-1] - trace.times_s[0]) - (end_s - start_s)
    within_j = outside_j = 0.0
    n_alike = 1
    for other in siblings:
        inside = (other.times_s >= start_s) & (other.times_s <= end_s)
        steps_j = np.maximum(np.diff(other.values), 0.0)
        stands = np.subtract(_longest_still_s(other), (start_s, end_s))
        n_alike += bool(np.all(np.abs(stands) <= ALIKE_INTERVALS * trace.sample_interval_s))
        both = inside[1:] & inside[:-1]
        within_j += float(steps_j[both].sum())
        outside_j += float(steps_j[~both].sum())
    is_contradicted = outside_s > 0 and within_j / (end_s - start_s) > BUSIER * outside_j / outside_s
    return Resting(replace(trace, can_rest=False) if within_j == 0 or is_contradicted else trace, n_alike)


def _longest_still_s(trace: PowerTrace) -> tuple[float, float]:
    begins = np.concatenate([[0], np.flatnonzero(np.diff(trace.values) != 0) + 1, [len(trace.values) - 1]])
    i = int(np.argmax(np.diff(trace.times_s[begins])))
    return float(trace.times_s[begins[i]]), float(trace.times_s[max(begins[i + 1] - 1, begins[i])])


def showing(trace: PowerTrace) -> str:
    return f"its counter stands still at {trace.values[0]:.6g} J" if trace.kind == "counter" else "it shows 0 W"


def lowest_w(trace: PowerTrace) -> str:
    return f"{float(trace.values.min()):.3g} W"


def taken_instead(trace: PowerTrace, traces: Sequence[PowerTrace]) -> PowerTrace | None:
    """The power samples whose joules stand for those of a counter that never moved; None where its own do."""
    power = _power_beside(trace, traces)
    return power if at_rest(trace) and power is not None and np.any(power.values) else None


def _power_beside(trace: PowerTrace, traces: Sequence[PowerTrace]) -> PowerTrace | None:
    """The power samples of what this counter counts."""
    found = [t for t in traces if (t.meter, t.component) == (trace.meter, trace.component + POWER_BESIDE)]
    return found[0] if trace.kind == "counter" and found else None


def beside_of(trace: PowerTrace, traces: Sequence[PowerTrace]) -> Beside | None:
    power = _power_beside(trace, traces)
    if power is None:
        return None
    try:
        curve = cumulative(power)
    except UnresolvedError:
        return None
    within_s = GAP_FACTOR * max(power.sample_interval_s, power.update_period_s)
    late_s = power.update_period_s + (power.averaged_s or 0.0) + power.sample_interval_s
    seen = power.times_s, power.values
    left_open = None
    if curve.watts is not None and not curve.is_flat and power.averaged_s is None:
        left_open = PowerErrors(replace(power, times_s=curve.times_s, values=curve.watts)).variance_j2
    gain = power.relative_accuracy or 0.0
    return Beside(curve.times_s, curve.energy_j, *seen, gain, within_s, late_s, power.resolution, left_open)


def stood_still(trace: PowerTrace, stands: Sequence[Stand], edges: Array, n_alike: int) -> tuple[float, Stood | None]:
    """(variance, what was taken) of the stretches that stood still."""
    inside = [(stand, stand.within(edges)) for stand in stands]
    inside = [(stand, share) for stand, share in inside if share > 0]
    if not inside:
        return 0.0, None
    still_s = sum(share * (stand.end_s - stand.start_s) for stand, share in inside)
    low_j, high_j, filled_j = (
        sum(share * getattr(stand, bound) for stand, share in inside) for bound in ("low_j", "high_j", "filled_j")
    )
    # Of a stretch that reaches beyond the window, the share within is not known either.
    variances_j2 = [
        share**2 * stand.variance_j2 + (share * (1 - share)) ** 2 * (stand.high_j - stand.low_j) ** 2 / 3
        for stand, share in inside
    ]
    bases = ("around", "rest", "unread")
    by = {basis: [i for i, (stand, _) in enumerate(inside) if stand.basis == basis] for basis in bases}
    # What made a counter lose something while nobody read it did so each time: these err together.
    unread_j2 = sum(math.sqrt(variances_j2[i]) for i in by["unread"]) ** 2
    around_j2 = sum(variances_j2[i] for i in by["around"]) + unread_j2
    # A source that stops does so seldom: of n stretches of rest one may be a fault, and the less likely the more.
    rests_j2 = sum(variances_j2[i] for i in by["rest"])
    beside_j2 = sum(x for (stand, _), x in zip(inside, variances_j2, strict=True) if stand.basis == "beside")
    # So much of a sum of squares makes parts that are alike err by their sum.
    rest_j2 = n_alike * rests_j2 / max(len(by["rest"]), 1) ** 2
    window_s = float((edges[:, 1] - edges[:, 0]).sum())
    around = [(inside[i][1], inside[i][0].end_s - inside[i][0].start_s) for i in by["around"]]
    # What is no gap between samples of power is none where they show 0 W.
    unseen_s = GAP_FACTOR * trace.sample_interval_s if trace.kind != "counter" else 0.0
    name = f"{trace.meter} {trace.component}"
    what = "its counter stood still" if trace.kind == "counter" else f"it showed {lowest_w(trace)}"
    if len(by["unread"]) == len(inside):
        what = "it was not read"
    if trace.kind == "power" and any(stand.shown_j > 0 for stand, _ in inside):
        what = "its reading was stuck at one value"
    what = next((stand.told for stand, _ in inside if stand.told is not None), what)
    bounds = f"at least {low_j:.4g} J" if math.isinf(high_j) else f"{low_j:.4g} to {high_j:.4g} J"
    stood = Stood(
        f"{name}: {what} for {format_duration(still_s)}; {filled_j:.4g} J are taken for it",
        f"{name}: {what} for {format_duration(still_s)} of {format_duration(window_s)}, and"
        f" {'counted less than elsewhere' if len(by['unread']) == len(inside) else 'it moves elsewhere'};"
        f" by the power around it {bounds} flowed meanwhile, which is no measurement"
        " (measure again; look at the driver)",
        sum(inside[i][1] * (inside[i][0].filled_j - inside[i][0].shown_j) for i in by["around"]),
        sum(share * lasts_s for share, lasts_s in around if lasts_s > unseen_s) / window_s,
        math.sqrt(around_j2),
        math.sqrt(n_alike * rest_j2),
        sum(share * max(stand.high_j - stand.shown_j, stand.shown_j - stand.low_j) for stand, share in inside),
    )
    return around_j2 + rest_j2 + beside_j2, stood
