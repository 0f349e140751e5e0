"""Sources that fail and sources that look as if they did: how often each is believed wrongly, or refused wrongly.

A seeded window of nine seconds a case. *Wrong*: an energy further from the truth than two of its own standard
uncertainties. *None*: no energy, which is right for a source that failed, and a loss for one that lives. *Wide*: the
uncertainty is above 5 % of the energy. Run: `python -m tests.benchmarks.doubtful_sources`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from results.energy import energy_between
from results.records import PowerTrace
from tests.fakes.stopped import INTERVAL_S, WINDOW_S, frozen, read, request, steady, unread
from tests.fakes.waveforms import StepPower, trace

Window = tuple[Sequence[PowerTrace], float]
"""Traces, and the true joules."""
N_WINDOWS = 200
WIDE = 0.05


def sensor(power: StepPower, rng: np.random.Generator, noise: float = 0.01) -> PowerTrace:
    """Power of instants, in milliwatts, each 50 ms."""
    t = np.arange(-0.5, WINDOW_S + 0.5, INTERVAL_S) + rng.uniform(0, 0.01)
    watts = power.power_w(t) * (1 + noise * rng.standard_normal(len(t)))
    return trace("power", t, np.round(watts, 3), INTERVAL_S, resolution=1e-3)


def glitches(shown_w: float, share: float, is_run: bool) -> Callable[[np.random.Generator], Window]:
    """A share of the readings is shown_w in the place of what flows."""

    def window(rng: np.random.Generator) -> Window:
        power = request(rng)
        taken = sensor(power, rng)
        n = len(taken.values)
        n_bad = max(1, round(share * n))
        begin = rng.integers(20, n - n_bad - 20)
        bad = np.arange(begin, begin + n_bad) if is_run else rng.choice(np.arange(20, n - 20), n_bad, replace=False)
        values = taken.values.copy()
        values[bad] = shown_w
        return [replace(taken, values=values)], power.energy_j(0, WINDOW_S)

    return window


def pulses(low_w: float, high_w: float, low_s: float, high_s: float) -> Callable[[np.random.Generator], StepPower]:
    def power(rng: np.random.Generator) -> StepPower:
        lasts_s = np.stack([rng.exponential(low_s, 2000), rng.exponential(high_s, 2000)], axis=1).reshape(-1)
        edges_s = -5.0 + np.concatenate([[0.0], np.cumsum(lasts_s)])
        watts = np.tile([low_w, high_w], 2000)
        return StepPower(edges_s, watts * rng.uniform(0.8, 1.2))

    return power


def low_idle(low_w: float, high_w: float, low_s: float, high_s: float) -> Callable[[np.random.Generator], Window]:
    def window(rng: np.random.Generator) -> Window:
        power = pulses(low_w, high_w, low_s, high_s)(rng)
        return [sensor(power, rng)], power.energy_j(0, WINDOW_S)

    return window


def jumps(times_peak: float, update_s: float, n_jumps: int = 1) -> Callable[[np.random.Generator], Window]:
    """A step holds so many times what the highest power brings in one."""

    def window(rng: np.random.Generator) -> Window:
        power = request(rng)
        taken = read(power, update_s, rng)
        values = taken.values
        for at_s in rng.uniform(0.2, WINDOW_S - 0.2, n_jumps):
            jump_j = (times_peak - 1) * float(power.watts.max()) * max(INTERVAL_S, update_s)
            values = values + np.where(taken.times_s > at_s, jump_j, 0.0)
        return [replace(taken, values=values)], power.energy_j(0, WINDOW_S)

    return window


def burst(factor: float, lasts_s: float, update_s: float) -> Callable[[np.random.Generator], Window]:
    """One true burst."""

    def window(rng: np.random.Generator) -> Window:
        start_s = rng.uniform(0.5, WINDOW_S - 0.5)
        level = rng.uniform(20, 60)
        edges_s = np.array([-5.0, start_s, start_s + lasts_s, 40.0])
        power = StepPower(edges_s, np.array([level, level * factor, level]))
        return [read(power, update_s, rng)], power.energy_j(0, WINDOW_S)

    return window


def irregular(
    mean_s: float, load: Callable[[np.random.Generator], StepPower], freeze_s: float = 0.0
) -> Callable[[np.random.Generator], Window]:
    """Renewals at exponential distances; it may lose what flows in freeze_s."""

    def window(rng: np.random.Generator) -> Window:
        power = load(rng)
        renewed_s = -6 + np.cumsum(rng.exponential(mean_s, int(20 / mean_s)))
        grid_s = np.arange(-0.05, WINDOW_S + 0.4, INTERVAL_S)
        close_s = np.arange(-0.35, -0.05, 0.002)
        t = np.unique(np.concatenate([close_s, grid_s + rng.uniform(0, 0.2 * INTERVAL_S, len(grid_s))]))
        shown_s = renewed_s[np.searchsorted(renewed_s, t, side="right") - 1]
        values = np.floor(power.since_start_j(shown_s) / 1e-3) * 1e-3
        taken = trace("counter", t, values, INTERVAL_S, update_period_s=0.001, resolution=1e-3)
        if freeze_s:
            start_s = rng.uniform(0.2, WINDOW_S - freeze_s - 0.2)
            taken = frozen(taken, start_s, start_s + freeze_s)
        return [taken], power.energy_j(0, WINDOW_S)

    return window


def rails(pause_s: float, fails: bool) -> Callable[[np.random.Generator], Window]:
    """Three of a phone. Two pause together, truly or because they stop; the third counts on."""

    def window(rng: np.random.Generator) -> Window:
        t = np.arange(-0.3, WINDOW_S + 0.4, 0.1)
        start_s = rng.uniform(0.5, WINDOW_S - pause_s - 0.5)
        found, true_j = [], 0.0
        for name, watts in (("big", 3.0), ("small", 1.0), ("rest", 0.6)):
            edges_s = np.array([-5.0, start_s, start_s + pause_s, 40.0])
            pauses = name != "rest" and not fails
            power = StepPower(edges_s, watts * rng.uniform(0.7, 1.3) * np.array([1.0, 0.0 if pauses else 1.0, 1.0]))
            values = power.since_start_j(t + rng.uniform(0, 0.005, len(t)))
            fields = {"update_period_s": 1e-3, "resolution": 1e-6, "component": name, "can_rest": True}
            taken = trace("counter", t, np.floor(values * 1e6) / 1e6, 0.1, **fields)
            if fails and name != "rest":
                taken = frozen(taken, start_s, start_s + pause_s)
            found.append(taken)
            true_j += power.energy_j(0, WINDOW_S)
        return found, true_j

    return window


def stops(update_s: float, load: Callable[[np.random.Generator], StepPower], lasts_s: float) -> Callable[..., Window]:
    def window(rng: np.random.Generator) -> Window:
        power = load(rng)
        start_s = rng.uniform(0.2, WINDOW_S - lasts_s)
        return [frozen(read(power, update_s, rng), start_s, start_s + lasts_s)], power.energy_j(0, WINDOW_S)

    return window


def hangs(
    update_s: float, load: Callable[[np.random.Generator], StepPower], lasts_s: float, loses: bool
) -> Callable[..., Window]:
    """Nobody reads it for a while, in which it counts on or loses what flows."""

    def window(rng: np.random.Generator) -> Window:
        power = load(rng)
        start_s = rng.uniform(0.2, WINDOW_S - lasts_s - 0.2)
        taken = read(power, update_s, rng)
        if loses:
            taken = frozen(taken, start_s, start_s + lasts_s)
        return [unread(taken, start_s, start_s + lasts_s)], power.energy_j(0, WINDOW_S)

    return window


bursty = pulses(10.0, 120.0, 0.4, 0.4)
FAILED: dict[str, Callable[[np.random.Generator], Window]] = {
    "power, 1 reading of 1 mW": glitches(1e-3, 0.0, False),
    "power, 5 % of readings 1 mW": glitches(1e-3, 0.05, False),
    "power, 30 % of readings 1 mW": glitches(1e-3, 0.3, False),
    "power, 1 mW for 30 % of the time": glitches(1e-3, 0.3, True),
    "power, 50 mW for 30 % of the time": glitches(0.05, 0.3, True),
    "power, 5 % of readings 150 mW": glitches(0.15, 0.05, False),
    "power, 30 % of readings 150 mW": glitches(0.15, 0.3, False),
    "jump of 2.5 peaks, 1 ms": jumps(2.5, 0.001),
    "jump of 4.5 peaks, 1 ms": jumps(4.5, 0.001),
    "jump of 2.5 peaks, 100 ms": jumps(2.5, 0.1),
    "jump of 4.5 peaks, 100 ms": jumps(4.5, 0.1),
    "jump of 3.5 peaks, 1 ms": jumps(3.5, 0.001),
    "jump of 3.5 peaks, 100 ms": jumps(3.5, 0.1),
    "two jumps of 4.5 peaks, 100 ms": jumps(4.5, 0.1, 2),
    "irregular 60 ms, bursts, loses 0.4 s": irregular(0.06, bursty, 0.4),
    "irregular 60 ms, bursts, loses 1 s": irregular(0.06, bursty, 1.0),
    "irregular 60 ms, request, loses 0.6 s": irregular(0.06, request, 0.6),
    "irregular 60 ms, steady, loses 0.6 s": irregular(0.06, steady, 0.6),
    "1 ms, request, unread for 0.3 s and loses it": hangs(0.001, request, 0.3, True),
    "1 ms, request, unread for 1 s and loses it": hangs(0.001, request, 1.0, True),
    "100 ms, request, unread for 0.3 s and loses it": hangs(0.1, request, 0.3, True),
    "100 ms, request, unread for 1 s and loses it": hangs(0.1, request, 1.0, True),
    "1 ms, bursts, unread for 0.6 s and loses it": hangs(0.001, bursty, 0.6, True),
    "1 ms, bursts, loses 0.6 s": stops(0.001, bursty, 0.6),
    "100 ms, bursts, loses 0.6 s": stops(0.1, bursty, 0.6),
    "two rails of three stop for 0.5 s": rails(0.5, True),
    "two rails of three stop for 1 s": rails(1.0, True),
    "two rails of three stop for 3 s": rails(3.0, True),
}
LIVES: dict[str, Callable[[np.random.Generator], Window]] = {
    "GPU, 8 W and 300 W, pauses of 0.4 s": low_idle(8, 300, 0.4, 0.4),
    "GPU, 8 W and 300 W, pauses of 60 ms": low_idle(8, 300, 0.06, 0.4),
    "phone, 60 mW and 5 W, pauses of 1 s": low_idle(0.06, 5, 1.0, 1.0),
    "phone, 60 mW and 5 W, pauses of 60 ms": low_idle(0.06, 5, 0.06, 0.5),
    "rail, 4 mW and 2 W, pauses of 1 s": low_idle(0.004, 2, 1.0, 1.0),
    "rail, 4 mW and 2 W, bursts of 60 ms": low_idle(0.004, 2, 1.0, 0.06),
    "burst of 3, 40 ms, 1 ms": burst(3, 0.04, 0.001),
    "burst of 10, 40 ms, 1 ms": burst(10, 0.04, 0.001),
    "burst of 3, 130 ms, 1 ms": burst(3, 0.13, 0.001),
    "burst of 3, 80 ms, 100 ms": burst(3, 0.08, 0.1),
    "burst of 10, 250 ms, 100 ms": burst(10, 0.25, 0.1),
    "1 ms, request, unread for 0.3 s": hangs(0.001, request, 0.3, False),
    "1 ms, request, unread for 1 s": hangs(0.001, request, 1.0, False),
    "100 ms, request, unread for 1 s": hangs(0.1, request, 1.0, False),
    "100 ms, steady, unread for 1 s": hangs(0.1, steady, 1.0, False),
    "1 ms, bursts, unread for 0.3 s": hangs(0.001, bursty, 0.3, False),
    "1 ms, bursts, unread for 1 s": hangs(0.001, bursty, 1.0, False),
    "irregular 60 ms, bursts": irregular(0.06, bursty),
    "irregular 60 ms, request": irregular(0.06, request),
    "irregular 60 ms, steady": irregular(0.06, steady),
    "irregular 20 ms, bursts": irregular(0.02, bursty),
    "two rails of three rest for 0.5 s": rails(0.5, False),
    "two rails of three rest for 1 s": rails(1.0, False),
    "two rails of three rest for 3 s": rails(3.0, False),
}


def judged(case: Callable[[np.random.Generator], Window], n_windows: int = N_WINDOWS) -> tuple[int, int, int]:
    """(wrong, None, wide) of the windows."""
    wrong = nothing = wide = 0
    for seed in range(n_windows):
        traces, true_j = case(np.random.default_rng(seed))
        reading = energy_between(traces, [(0.0, WINDOW_S)], "all", "m")
        if reading.energy_j is None or reading.uncertainty_j is None:
            nothing += 1
            continue
        wrong += abs(reading.energy_j - true_j) > 2 * reading.uncertainty_j + 1e-9
        wide += reading.uncertainty_j > WIDE * reading.energy_j
    return wrong, nothing, wide


def main() -> None:
    for title, cases in (("failed", FAILED), ("lives", LIVES)):
        print(f"| {title} | wrong | None | wide |\n|---|---|---|---|")
        for name, case in cases.items():
            wrong, nothing, wide = judged(case)
            print(f"| {name} | {wrong} | {nothing} | {wide} |", flush=True)


if __name__ == "__main__":
    main()
