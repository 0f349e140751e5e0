"""Idle power that strays by itself: how often are the true net joules of a window within their ±?

python -m tests.benchmarks.idle_strays [--windows 100]

Seeded, without waiting: a counter, and power that wanders about its level in the idle times and in the window.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from results.energy import energy_between
from results.idle import idle_baseline
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.fakes.waveforms import StepPower, counter_trace

NAME = "idle-strays"
IDLE_W, MORE_W, STRAYS_W = 20.0, 50.0, 2.0
IDLE_S, WINDOW_S, STEP_S = 7.5, 20.0, 0.05
EDGE_S = 1.0
KEEPS_S = (0.5, 2.0)
"""After so long it is at its level again but for a share of 1/e, and by new chance."""
REMARKS = f"""\
{IDLE_W:g} W idle, {MORE_W:g} W more for {WINDOW_S:g} s, and idle times of {IDLE_S:g} s before and after. Power strays
by {STRAYS_W:g} W (standard deviation) about its level, for as long as the row says: a first-order autoregression in
steps of {1000 * STEP_S:g} ms. A counter is read at each step. Within: windows whose true net joules lie within so many
times the ±. What is true is what was drawn above the idle level, without what the window itself strayed by.
[What this is about](../figures.md)."""


def straying(rng: np.random.Generator, watts: float, until_s: float, keeps_s: float) -> StepPower:
    """Its own value again after each step, as far as it keeps it, and new chance."""
    keeps, edges_s = math.exp(-STEP_S / keeps_s), np.arange(0.0, until_s + STEP_S, STEP_S)
    off_w = [STRAYS_W * rng.standard_normal()]
    for _ in edges_s[2:]:
        off_w.append(keeps * off_w[-1] + STRAYS_W * math.sqrt(1 - keeps**2) * rng.standard_normal())
    return StepPower(edges_s, watts + np.array(off_w))


def errors_in_sigma(keeps_s: float, idle_s: float, n_windows: int) -> list[float]:
    """Of seeds 0 to n - 1: net joules less the true ones, over the stated standard uncertainty."""
    found = []
    for seed in range(n_windows):
        rng = np.random.default_rng(seed)
        before, window, after = (
            counter_trace(
                straying(rng, watts, lasts_s + 2 * EDGE_S, keeps_s),
                np.arange(EDGE_S - margin_s, EDGE_S + lasts_s + margin_s, STEP_S),
                1e-3,
            )
            for watts, lasts_s, margin_s in (
                (IDLE_W, idle_s, 0.0), (IDLE_W + MORE_W, WINDOW_S, EDGE_S / 2), (IDLE_W, idle_s, 0.0),
            )
        )  # fmt: skip
        idle = idle_baseline(before.meter, [before], [after])
        reading = energy_between([window], [(EDGE_S, EDGE_S + WINDOW_S)], "all", window.meter, idle=idle)
        assert reading.net_energy_j is not None, reading.reason
        assert reading.net_uncertainty_j is not None
        found.append((reading.net_energy_j - MORE_W * WINDOW_S) / reading.net_uncertainty_j)
    return found


def rows(n_windows: int) -> list[Measurement]:
    found = []
    for keeps_s in KEEPS_S:
        off = errors_in_sigma(keeps_s, IDLE_S, n_windows)
        conditions = f"strays for {keeps_s:g} s, idle times of {IDLE_S:g} s"
        for sigmas in (2, 3):
            n_within = sum(abs(one) <= sigmas for one in off)
            found.append(measured(f"windows within {sigmas} σ, of {n_windows}", n_within, "windows", conditions))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=100)
    asked = parser.parse_args()
    write_page(NAME, "Net joules where idle power strays by itself", rows(asked.windows), REMARKS)


if __name__ == "__main__":
    main()
