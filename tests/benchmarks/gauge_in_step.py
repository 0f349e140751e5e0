"""Requests about as long as a slow gauge's renewals: are the true joules of a window within two sigma?

python -m tests.benchmarks.gauge_in_step [--windows 60]

Seeded, without waiting: a gauge that shows the power of an instant every 20 s, and requests whose first half draws more
than their second.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from results.derivation import energies_of
from results.energy import MeterEnergy
from results.in_step import met_alike
from results.records import Completion, EnergyReading, PowerTrace
from results.trace_files import WINDOW
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.fakes.waveforms import StepPower, trace

NAME = "gauge-in-step"
HIGH_W, LOW_W = 5.0, 2.0
N_REQUESTS = 30
UPDATE_S = 20.0
BEGUN_S = 100.0
LENGTHS_S = ((5.0, 15.0), (10.0, 30.0), (15.0, 25.0), (18.0, 22.0))
REMARKS = f"""\
{N_REQUESTS} requests, {HIGH_W:g} W in the first half of each and {LOW_W:g} W in the second, and a gauge that shows the
power of an instant every {UPDATE_S:g} s. Lengths of requests and the gauge's phase are drawn anew for each window.
*Within two σ*: windows whose true joules lie within two of the stated standard uncertainties; ours, and by the readings
alone, without the places in the requests at which they were taken. A note tells trials that met requests nearly in
step. σ and error: root mean squares over windows, as a share of the joules. In the last row all requests last as long
as the gauge's update, and the worst of its phases counts.
[What this is about](../figures.md#loads-in-step-with-a-gauge)."""


class Window(NamedTuple):
    """One that the gauge saw, with what is true."""

    read: PowerTrace
    requests: Sequence[Completion]
    end_s: float
    true_j: float

    @property
    def energy(self) -> EnergyReading:
        """As a trial has it."""
        found = energies_of(self.requests, {WINDOW: [self.read]}, (BEGUN_S, self.end_s)).readings
        return next(reading for reading in found if reading.phase == "all")

    @property
    def notes(self) -> tuple[str, ...]:
        return met_alike([self.read], self.requests, [self.energy])


class Coverage(NamedTuple):
    """Of windows: how many hold the truth, ours and by readings alone, how many of the others have no note; and root
    mean squares."""

    n_within: int
    n_within_alone: int
    n_untold: int
    stated: float
    error: float


def answered(starts_s: Sequence[float], last_s: float) -> list[Completion]:
    ends_s = [*starts_s[1:], last_s]
    return [
        Completion(
            request_id=f"r{i}", sample_id="s", n_prompt_tokens=1, start_s=start_s, prefill_end_s=start_s, end_s=end_s,
            token_ids=(0,), token_times_s=(end_s,),
        )
        for i, (start_s, end_s) in enumerate(zip(starts_s, ends_s, strict=True))
    ]  # fmt: skip


def gauge(power: StepPower, phase_s: float, end_s: float) -> PowerTrace:
    """An instant each update, with a little noise."""
    at_s = np.arange(phase_s, end_s, UPDATE_S)
    noise = np.random.default_rng(3).normal(0, 0.01, len(at_s))
    watts = power.power_w(at_s) + noise
    return trace("held", at_s, watts, 1.0, update_period_s=UPDATE_S, meter="battery", relative_accuracy=0.0)


def window(lengths_s: np.ndarray, phase_s: float) -> Window:
    """Requests one after another, each of high power in its first half."""
    starts_s = BEGUN_S + np.concatenate([[0.0], np.cumsum(lengths_s)])
    edges_s = np.stack([starts_s[:-1], starts_s[:-1] + lengths_s / 2], axis=1).reshape(-1)
    watts = np.tile([HIGH_W, LOW_W], len(lengths_s))
    end_s = float(starts_s[-1])
    power = StepPower(np.concatenate([[0.0], edges_s, [end_s, 1e5]]), np.concatenate([[1.0], watts, [1.0]]))
    read = gauge(power, phase_s, end_s + 3 * UPDATE_S)
    return Window(read, answered(starts_s[:-1].tolist(), end_s), end_s, power.energy_j(BEGUN_S, end_s))


def coverage(least_s: float, most_s: float, n_windows: int) -> Coverage:
    """Windows of seeds 0 to n - 1."""
    off, stated, alone, noted = [], [], [], []
    for seed in range(n_windows):
        rng = np.random.default_rng(seed)
        one = window(rng.uniform(least_s, most_s, N_REQUESTS), rng.uniform(0, UPDATE_S))
        found = one.energy
        plain = MeterEnergy([one.read], "battery", of_load=True).between([(BEGUN_S, one.end_s)], "all")
        assert found.energy_j is not None
        assert found.energy_j == plain.energy_j
        assert found.uncertainty_j is not None
        assert plain.uncertainty_j is not None
        off.append((found.energy_j - one.true_j) / one.true_j)
        stated.append(found.uncertainty_j / one.true_j)
        alone.append(plain.uncertainty_j / one.true_j)
        noted.append(bool(one.notes))
    error = np.abs(off)
    within, within_alone = (error <= 2 * np.array(sigma) for sigma in (stated, alone))
    n_untold = int((~within & ~np.array(noted)).sum())
    stated_rms, error_rms = (float(np.sqrt(np.square(shares).mean())) for shares in (stated, off))
    return Coverage(int(within.sum()), int(within_alone.sum()), n_untold, stated_rms, error_rms)


def worst_in_step() -> float:
    """Of requests exactly as long as the update, at each second of the gauge's phase: the largest error, a share."""
    windows = [window(np.full(N_REQUESTS, UPDATE_S), phase_s + 0.5) for phase_s in range(int(UPDATE_S))]
    return max(abs((one.energy.energy_j or 0.0) - one.true_j) / one.true_j for one in windows)


def rows(n_windows: int) -> list[Measurement]:
    found = []
    for least_s, most_s in LENGTHS_S:
        own = coverage(least_s, most_s, n_windows)
        told = f"σ {100 * own.stated:.2g} %, error {100 * own.error:.2g} % rms; {own.n_untold} others without the note"
        found.append(
            measured(
                f"windows within two σ, of {n_windows}", own.n_within, "windows",
                f"requests of {least_s:g} to {most_s:g} s", own.n_within_alone, "readings alone", note=told,
            )
        )  # fmt: skip
    worst_percent = 100 * worst_in_step()
    return [*found, measured("largest error in step", worst_percent, "%", f"requests of exactly {UPDATE_S:g} s")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=60)
    asked = parser.parse_args()
    write_page(NAME, "A slow gauge and requests in step with it", rows(asked.windows), REMARKS)


if __name__ == "__main__":
    main()
