"""The power of a machine that does nothing for us: what net energy leaves out, and how well it is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from results.energy import MeterEnergy
from results.intervals import Interval
from results.liveness import at_rest
from results.records import IdleBaseline, PowerTrace

PIECES = 5
"""Of each idle time: their powers tell how it strays."""


def idle_baseline(
    meter: str, before: Sequence[PowerTrace], after: Sequence[PowerTrace], component: str = "total"
) -> IdleBaseline:
    """Idle power from the whole of the traces taken before and after a window.

    One side alone is no baseline: nothing says how far the idle power drifted. A part that stands still on one side and
    lives on the other has stopped, unless it may rest. The uncertainty leaves out the meter's gain error, which the
    window has as well: it is counted once, with the window's. It holds how the idle power strays by itself, where the
    meter tells the power of the pieces of an idle time.
    """
    sides = [
        [replace(t, relative_accuracy=0.0) for t in traces if t.meter == meter and len(t.times_s) >= 2]
        for traces in (before, after)
    ]
    lived = {t.component for own in sides for t in own if not at_rest(t)}
    sides = [[replace(t, has_lived=t.has_lived or t.component in lived) for t in own] for own in sides]
    added = {t.component for t in (*before, *after) if t.meter == meter and t.additive}
    watts: list[float | None] = []
    uncertainties: list[float] = []
    strays: list[float] = []
    lengths_s: list[float] = []
    reasons: list[str] = []
    remarks: list[str] = []
    for when, own in zip(("before", "after"), sides, strict=True):
        lacking = sorted(added - {t.component for t in own}) if component == "total" else []
        if not own or lacking:
            watts.append(None)
            reasons.append(f"no idle trace {when} the window{f' of {lacking[0]}' if own else ''}")
            continue
        # The last mean stands in the middle of its time.
        whole = (
            max(float(t.times_s[0]) for t in own),
            min(float(t.times_s[-1]) - (t.averaged_s or 0.0) / 2 for t in own),
        )
        energy = MeterEnergy(own, meter, component)
        reading = energy.between([whole], "all")
        watts.append(reading.average_power_w)
        if reading.average_power_w is None:
            reasons.append(f"idle {when} the window: {reading.reason}")
        elif reading.uncertainty_j is not None:
            uncertainties.append(reading.uncertainty_j / reading.duration_s)
            lengths_s.append(reading.duration_s)
            if (strays_j2_per_s := _strays_j2_per_s(energy, whole)) is not None:
                strays.append(strays_j2_per_s)
        if reading.remark is not None:
            remarks.append(f"idle {when} the window: {reading.remark}")
    mean_strays = statistics.fmean(strays) if strays else None
    variances_w2 = [u * u + (mean_strays or 0.0) / s for u, s in zip(uncertainties, lengths_s, strict=True)]
    return IdleBaseline(
        meter=meter,
        component=component,
        before_w=watts[0],
        after_w=watts[1],
        uncertainty_w=math.sqrt(sum(variances_w2)) / len(uncertainties) if uncertainties else None,
        strays_j2_per_s=mean_strays,
        parts=tuple(sorted(added & lived)) if component == "total" else None,
        reason="; ".join(reasons) or None,
        remark="; ".join(remarks) or None,
    )


def _strays_j2_per_s(energy: MeterEnergy, whole: Interval) -> float | None:
    """Variance of the energy of an idle time, per second of it, beyond what its readings leave open.

    From the pieces of one, which the power's slower ways part as they part idle time and window. None where a piece is
    too short for the meter.
    """
    edges_s = np.linspace(*whole, PIECES + 1).tolist()
    pieces = [energy.between([piece], "all") for piece in pairwise(edges_s)]
    energies_j = [p.energy_j for p in pieces if p.energy_j is not None]
    if len(energies_j) < PIECES:
        return None
    readings_j2 = math.fsum((p.uncertainty_j or 0.0) ** 2 for p in pieces) / PIECES
    return max(statistics.variance(energies_j) - readings_j2, 0.0) * PIECES / (whole[1] - whole[0])
