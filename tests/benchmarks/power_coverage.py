"""Regular and irregular loads through power sensors and fuel gauges: are the true joules within two sigma?

python -m tests.benchmarks.power_coverage [--windows 100] [--only TEXT]

Seeded, without waiting: readings at random times as `devices.sampler` takes them (or on a grid, as in recordings of
other tools), gauges that renew an instant or a mean on a grid of their own. `--only` prints the cells whose name holds
the text, and writes no page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from devices.sampler import AT_RANDOM
from results.energy import energy_between
from results.records import PowerTrace
from tests.benchmarks.measurement import FOLDER, command_line
from tests.fakes.waveforms import StepPower, trace

NAME = "power-coverage"
COVERED = 0.94
LOW_W, HIGH_W = 50.0, 250.0
AROUND_S = 3.0
DRAWN = 0.03
"""Of a frequency, more or less, for each window: one in step with all readings looks constant, and nothing can tell."""
SQUARES_HZ = (0.1, 0.3, 0.9, 1.3, 2.1, 3.3, 3.7, 5.0, 7.3, 9.0, 13.0, 20.0)
DUTIES = (0.2, 0.5, 0.8)
SINES_HZ = (0.3, 3.0, 7.0)

Load = Callable[[np.random.Generator, float], StepPower]
Reader = Callable[[StepPower, float, np.random.Generator], PowerTrace]


class Cell(NamedTuple):
    kind: str
    load: str
    window_s: float
    within: float
    """Share of the windows within two standard uncertainties."""
    width: float
    """Root mean square of the stated standard uncertainties, over that of the errors."""
    worst: float
    """Of the errors over their stated standard uncertainty."""
    stated: float
    """Relative to the joules."""
    n_refused: int
    """Windows without joules: their readings looked like those of a stuck sensor."""


# --- loads -----------------------------------------------------------------------------------------------------------


def square(about_hz: float, duty: float) -> Load:
    def load(rng: np.random.Generator, window_s: float) -> StepPower:
        hz = about_hz * rng.uniform(1 - DRAWN, 1 + DRAWN)
        n = int((window_s + 4 * AROUND_S) * hz) + 3
        begins_s = -2 * AROUND_S - rng.uniform() / hz + np.arange(n) / hz
        edges_s = np.sort(np.concatenate([begins_s, begins_s + duty / hz]))
        return StepPower(np.append(edges_s, begins_s[-1] + 1 / hz), np.tile([HIGH_W, LOW_W], n))

    return load


def _fine(watts_of: Callable[[np.ndarray, np.random.Generator], np.ndarray], step_s: float) -> Load:
    def load(rng: np.random.Generator, window_s: float) -> StepPower:
        edges_s = np.arange(-2 * AROUND_S, window_s + 2 * AROUND_S, step_s)
        return StepPower(edges_s, watts_of(edges_s[:-1], rng))

    return load


def sine(about_hz: float) -> Load:
    def watts(at_s: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        hz = about_hz * rng.uniform(1 - DRAWN, 1 + DRAWN)
        return np.asarray(150 + 100 * np.sin(2 * np.pi * (hz * at_s + rng.uniform())))

    return _fine(watts, 0.002 / max(about_hz, 1.0))


def slow_noise(t: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Of 10 %, correlated for a second."""
    steps = rng.standard_normal(len(t))
    kept = float(np.exp(-(t[1] - t[0])))
    found = np.empty(len(t))
    found[0] = steps[0]
    for i in range(1, len(t)):
        found[i] = kept * found[i - 1] + np.sqrt(1 - kept**2) * steps[i]
    return np.asarray(150 + 15 * found)


def bursts(rng: np.random.Generator, window_s: float) -> StepPower:
    """In turns, of 0.1 to 1.2 s."""
    lengths_s = rng.uniform(0.1, 1.2, int((window_s + 4 * AROUND_S) / 0.1))
    edges_s = -2 * AROUND_S + np.concatenate([[0.0], np.cumsum(lengths_s)])
    return StepPower(edges_s, np.where(np.arange(len(lengths_s)) % 2, HIGH_W, LOW_W))


def one_step(rng: np.random.Generator, window_s: float) -> StepPower:
    return StepPower(np.array([-9.0, rng.uniform(0, window_s), window_s + 9.0]), np.array([LOW_W, HIGH_W]))


LOADS: dict[str, Load] = {
    "constant": lambda rng, window_s: StepPower(np.array([-9.0, window_s + 9.0]), np.array([rng.uniform(50, 250)])),
    "noise of 5 ms": _fine(lambda t, rng: 150 + 15 * rng.standard_normal(len(t)), 0.005),
    "noise of 1 s": _fine(slow_noise, 0.005),
    "ramp": _fine(lambda t, rng: 50 + 200 * (t + 9) / (t[-1] + 9), 0.5e-3),
    "one step": one_step,
    "bursts": bursts,
    **{f"sine {hz:g} Hz": sine(hz) for hz in SINES_HZ},
    **{f"square {hz:g} Hz, {duty:g}": square(hz, duty) for hz in SQUARES_HZ for duty in DUTIES},
}


# --- readers ---------------------------------------------------------------------------------------------------------


def power(every_s: float, spread: float = AT_RANDOM) -> Reader:
    def read(load: StepPower, window_s: float, rng: np.random.Generator) -> PowerTrace:
        n = int((window_s + 8 * every_s) / every_s / (1 - spread)) + 4
        waits_s = every_s * rng.uniform(1 - spread, 1 + spread, n)
        at_s = -every_s * (2 + rng.uniform()) + np.cumsum(waits_s)
        at_s = at_s + rng.uniform(0, 1e-3, n)
        at_s = at_s[: int(np.searchsorted(at_s, window_s + 2 * every_s)) + 1]
        return trace("power", at_s, np.round(load.power_w(at_s), 3), every_s, resolution=1e-3)

    return read


def gauge(update_s: float, means: bool, every_s: float = 0.05) -> Reader:
    def read(load: StepPower, window_s: float, rng: np.random.Generator) -> PowerTrace:
        n = int((window_s + 5 * update_s) / every_s / (1 - AT_RANDOM)) + 4
        at_s = -2 * update_s + np.cumsum(every_s * rng.uniform(1 - AT_RANDOM, 1 + AT_RANDOM, n))
        at_s = at_s[: int(np.searchsorted(at_s, window_s + 2 * update_s)) + 1]
        phase_s = rng.uniform(0, update_s)
        shown_s = np.floor((at_s - phase_s) / update_s) * update_s + phase_s
        if means:
            watts = (load.since_start_j(shown_s) - load.since_start_j(shown_s - update_s)) / update_s
        else:
            watts = load.power_w(shown_s)
        return trace("held", at_s, np.round(watts, 3), every_s, update_period_s=update_s, resolution=1e-3)

    return read


def told_means(averaged_s: float, every_s: float, update_s: float = 0.0, spread: float = 0.0) -> Reader:
    """Of the time before each renewal, as a recording tells them: nvidia-smi's log, say."""

    def read(load: StepPower, window_s: float, rng: np.random.Generator) -> PowerTrace:
        before_s, behind_s = 2 * averaged_s + 2 * update_s + every_s, averaged_s + 2 * update_s + 3 * every_s
        n = int((window_s + before_s + behind_s) / every_s / (1 - spread)) + 4
        at_s = -before_s + np.cumsum(every_s * rng.uniform(1 - spread, 1 + spread, n)) - every_s * rng.uniform()
        at_s = at_s[: int(np.searchsorted(at_s, window_s + behind_s)) + 1]
        phase_s = rng.uniform(0, update_s) if update_s else 0.0
        shown_s = np.floor((at_s - phase_s) / update_s) * update_s + phase_s if update_s else at_s
        watts = (load.since_start_j(shown_s) - load.since_start_j(shown_s - averaged_s)) / averaged_s
        told = {"averaged_s": averaged_s, "update_period_s": update_s, "resolution": 1e-3}
        return trace("power", at_s, np.round(watts, 3), every_s, method="replayed", **told)

    return read


def stretch_means(every_s: float) -> Reader:
    """From the end of the one before to the end of its own, whose time is known: powermetrics, turbostat."""

    def read(load: StepPower, window_s: float, rng: np.random.Generator) -> PowerTrace:
        lasted_s = every_s * rng.uniform(0.95, 1.1, int(window_s / every_s / 0.95) + 6)
        at_s = -every_s * (1 + rng.uniform()) + np.concatenate([[0.0], np.cumsum(lasted_s)])
        watts = np.diff(load.since_start_j(at_s)) / lasted_s
        shown = np.round(np.append(watts, watts[-1]), 3)
        return trace("held", at_s, shown, every_s, method="replayed", resolution=1e-3)

    return read


READERS: dict[str, tuple[Reader, tuple[float, ...]]] = {
    "power, 20 ms": (power(0.02), (0.5, 1.0, 2.5, 10.0)),
    "power, 37 ms": (power(0.037), (0.5, 1.0, 2.5, 10.0)),
    "power, 50 ms": (power(0.05), (0.6, 1.0, 2.5, 10.0, 60.0)),
    "power, 100 ms": (power(0.1), (1.1, 2.5, 10.0)),
    "power, 250 ms": (power(0.25), (2.6, 10.0, 60.0)),
    "power, grid of 50 ms": (power(0.05, 0.0), (1.0, 10.0)),
    "instants, 250 ms": (gauge(0.25, False), (2.6, 10.0, 60.0)),
    "instants, 1 s": (gauge(1.0, False), (10.5, 60.0)),
    "means, 250 ms": (gauge(0.25, True), (2.6, 10.0, 60.0)),
    "means, 1 s": (gauge(1.0, True), (10.5, 60.0)),
    "stretch means, 100 ms": (stretch_means(0.1), (1.1, 2.5, 10.0)),
    "stretch means, 1 s": (stretch_means(1.0), (11.0, 60.0)),
    "told means of 1 s, read each 100 ms": (told_means(1.0, 0.1), (10.5, 60.0)),
    "told means of 1 s, renewed each 100 ms, read each 100 ms": (told_means(1.0, 0.1, 0.1), (10.5, 60.0)),
    "told means of 1 s, renewed each 100 ms, read each 20 ms": (told_means(1.0, 0.02, 0.1), (10.5, 60.0)),
    "told means of 1 s, renewed each 1 s, read each 100 ms": (told_means(1.0, 0.1, 1.0), (10.5, 60.0)),
    "told means of 1 s, read each 1 s": (told_means(1.0, 1.0), (10.5, 60.0)),
    "told means of 25 ms, renewed each 100 ms, read each 50 ms": (told_means(0.025, 0.05, 0.1, AT_RANDOM), (2.5, 10.0)),
}


def cell(kind: str, load: str, window_s: float, n_windows: int) -> Cell:
    """Windows of seeds 0 to n - 1."""
    read = READERS[kind][0]
    errors_j, sigmas_j, true_j = [], [], []
    n_refused = 0
    for seed in range(n_windows):
        rng = np.random.default_rng(seed)
        watts = LOADS[load](rng, window_s)
        found = energy_between([read(watts, window_s, rng)], [(0.0, window_s)], "all", "m")
        if found.energy_j is None or found.uncertainty_j is None:
            assert "stuck at one value" in str(found.reason), found.reason
            n_refused += 1
            continue
        true_j.append(watts.energy_j(0.0, window_s))
        errors_j.append(found.energy_j - true_j[-1])
        sigmas_j.append(found.uncertainty_j)
    if not errors_j:
        raise SystemExit(f"{kind}, {load}, {window_s:g} s: none of {n_windows} windows has joules")
    error, sigma = np.abs(errors_j), np.array(sigmas_j) + 1e-9 * np.array(true_j)
    width = float(np.sqrt((sigma**2).mean() / max(float((error**2).mean()), 1e-18)))
    within = float((error <= 2 * sigma).mean())
    worst, stated = float((error / sigma).max()), float((sigma / true_j).mean())
    return Cell(kind, load, window_s, within, width, worst, stated, n_refused)


def cells(n_windows: int, only: str = "") -> Iterator[Cell]:
    for kind, (_, windows_s) in READERS.items():
        for window_s in windows_s:
            for load in LOADS:
                if only in f"{kind} {load} {window_s:g}":
                    yield cell(kind, load, window_s, n_windows)


# --- the page --------------------------------------------------------------------------------------------------------

REMARKS = """\
Loads of 50 to 250 W: constant, noise, a ramp, one step, bursts of 0.1 to 1.2 s, sines, and squares of 0.1 to 20 Hz
that are high for 0.2, 0.5 or 0.8 of their period, each frequency drawn within 3 % for each window. {n_loads} loads, {n}
seeded windows each, no gain error. A load is *covered* where at least {covered:.0f} of 100 windows have their true
joules within two of the stated standard uncertainties. *Width*: the stated one over the error, both root mean square:
the median of the loads, and the widest. *Worst*: error over stated uncertainty in any window; "unseen" where readings
were all alike and the load was not. *Refused*: windows without joules, of all loads, for their readings looked like
those of a stuck sensor: one exact value for most of the window, and others beside it. Real sensors show noise.

Power is read 0.5 to 1.5 intervals apart, as all meters of power are here; the grid is that of recordings of other
tools. Stretch means are those of a log whose samples meet (powermetrics, turbostat). Told means are those of a power
CSV that says what they are of and how often they renew ([page](../devices/linux.md)), read on a grid but for those of
25 ms. What a steady ramp puts off at one edge of a window it puts back at the other: that makes their widest.
"""
HEADER = ["meter", "window", "covered", "least", "width", "widest", "worst", "refused"]
UNSEEN = 1e3


def page(rows: Sequence[Cell], n_windows: int) -> str:
    lines = ["# Power and gauges against regular loads", ""]
    lines += [REMARKS.format(n_loads=len(LOADS), n=n_windows, covered=100 * COVERED), *_table(rows)]
    lines += ["", "Not covered:", ""]
    for kind, window_s in dict.fromkeys((row.kind, row.window_s) for row in rows):
        missed = [r for r in rows if (r.kind, r.window_s) == (kind, window_s) and r.within < COVERED]
        if missed:
            named = "; ".join(f"{r.load} ({100 * r.within:.3g} %)" for r in missed)
            lines.append(f"- {kind}, {window_s:g} s: {named}")
    return "\n".join(lines)


def _table(rows: Sequence[Cell]) -> Iterator[str]:
    yield f"| {' | '.join(HEADER)} |"
    yield "|" + "---|" * len(HEADER)
    for kind, window_s in dict.fromkeys((row.kind, row.window_s) for row in rows):
        of = [r for r in rows if (r.kind, r.window_s) == (kind, window_s)]
        n_covered = sum(r.within >= COVERED for r in of)
        # What is exact has no error to compare with.
        widths = sorted(r.width for r in of if r.load != "constant")
        worst = max(r.worst for r in of)
        yield (
            f"| {kind} | {window_s:g} s | {n_covered} of {len(of)} | {100 * min(r.within for r in of):.3g} %"
            f" | {widths[len(widths) // 2]:.2g} | {widths[-1]:.2g} | {'unseen' if worst > UNSEEN else f'{worst:.2g}'}"
            f" | {sum(r.n_refused for r in of) or ''} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    rows = []
    for found in cells(asked.windows, asked.only):
        rows.append(found)
        if asked.only:
            print(
                f"{found.kind:22s} {found.window_s:5g} s {found.load:22s} within {100 * found.within:5.1f} %"
                f" width {found.width:7.2f} worst {found.worst:5.2f} stated {100 * found.stated:6.2f} %"
            )
    if not asked.only:
        made_by = f"\n\nMade by `{command_line(sys.argv)}`.\n"
        (FOLDER / f"{NAME}.md").write_text(page(rows, asked.windows) + made_by, encoding="utf-8")


if __name__ == "__main__":
    main()
