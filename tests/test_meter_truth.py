"""Joules of known waveforms through every kind of meter: a seeded part of the published table, against closed forms."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from devices.sampler import AT_RANDOM
from results.energy import energy_between
from results.records import EnergyReading
from tests.benchmarks import meter_truth
from tests.benchmarks.meter_truth import compared, floor_variance, page
from tests.fakes.instruments import END_S, GAUGE_UPDATE_S, INSTRUMENTS, START_S, WAVEFORMS
from tests.fakes.waveforms import StepPower, trace

N_WINDOWS = 100
MET_BY_CHANCE = ("gauge, 250 ms, instants", "spikes of 2 to 20 ms")
"""A window has 40 instants and meets 3 to 4 of its spikes: in some none, and then nothing tells that there are any."""
simulated = cache(meter_truth.simulated)
"""Several tests ask of the same windows."""
FINE = [m for m in INSTRUMENTS if not m.startswith("charge counter")]


@pytest.mark.parametrize("waveform", WAVEFORMS)
@pytest.mark.parametrize("meter", FINE)
def test_joules_are_within_the_stated_uncertainty_in_95_of_100_windows(meter: str, waveform: str) -> None:
    found = simulated(meter, waveform, N_WINDOWS)
    assert found.n_without_energy == 0
    assert found.within_two is not None
    assert found.within_two >= (0.9 if (meter, waveform) == MET_BY_CHANCE else 0.95) * N_WINDOWS


@pytest.mark.parametrize("waveform", WAVEFORMS)
@pytest.mark.parametrize("meter", [m for m in FINE if m.startswith("counter")])
def test_counters_know_ten_seconds_of_any_waveform_to_1_percent(meter: str, waveform: str) -> None:
    found = simulated(meter, waveform, N_WINDOWS)
    assert found.within_target is not None
    assert found.within_target >= 0.95 * N_WINDOWS


@pytest.mark.slow
def test_uncertainties_are_no_wider_than_the_errors_ask_for() -> None:
    """Stated over rms error: two to six before readings stood for their renewals."""
    # The rms error of n windows is known to 1 / sqrt(2 n).
    n_windows = 3 * N_WINDOWS
    stepping = ("square, 1 to 3 s", "bursts of 0.4 to 1.2 s")
    for meter in ("power, renewed every 100 ms", "power, fresh at each reading", "gauge, 250 ms, instants"):
        for waveform in stepping:
            found = simulated(meter, waveform, n_windows)
            assert found.stated is not None
            assert found.rms_error is not None
            assert 0.9 < found.stated / found.rms_error < 1.5
    for waveform in stepping:
        # The gauge of means is known by the values between two levels.
        found = simulated("gauge, 250 ms, means", waveform, n_windows)
        assert found.stated is not None
        assert found.rms_error is not None
        assert found.stated / found.rms_error < 2.5


@pytest.mark.parametrize("poll_s", [0.037, 0.0401])
def test_a_ripple_in_step_with_the_sampler_is_covered_on_windows_of_a_second(poll_s: float) -> None:
    """20 Hz: three periods in four readings of 37 ms, four in five of 40.1 ms."""
    inside = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        edges_s = -3.0 + rng.uniform(0, 0.05) + np.arange(0.0, 8.0, 0.025)
        power = StepPower(edges_s, np.where(np.arange(len(edges_s) - 1) % 2, 50.0, 10.0))
        at_s = np.arange(-0.2 - poll_s * rng.uniform(), 1.3, poll_s)
        reading = energy_between([trace("power", at_s, power.power_w(at_s), poll_s)], [(0.0, 1.0)], "all", "m")
        assert reading.energy_j is not None
        assert reading.uncertainty_j is not None
        inside += abs(reading.energy_j - power.energy_j(0.0, 1.0)) <= 2 * reading.uncertainty_j
    assert inside >= 190


@pytest.mark.parametrize(
    ("poll_s", "window_s"), [(0.037, 1.0), (0.049, 1.0), (0.05, 1.0), (0.051, 1.0), (0.1, 2.0), (0.1, 10.0)]
)
def test_a_ripple_in_step_with_every_reading_is_covered_as_these_come_at_random(poll_s: float, window_s: float) -> None:
    """20 Hz, 10 and 50 W: on a grid of 50 or 100 ms each reading is the same, and none of the windows was covered."""
    inside, errors = 0, []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        edges_s = -3.0 + rng.uniform(0, 0.05) + np.arange(0.0, 17.0, 0.025)
        power = StepPower(edges_s, np.where(np.arange(len(edges_s) - 1) % 2, 50.0, 10.0))
        waits_s = poll_s * rng.uniform(1 - AT_RANDOM, 1 + AT_RANDOM, int(2 * (window_s + 1) / poll_s))
        at_s = -0.4 + np.cumsum(waits_s)
        at_s = at_s[at_s < window_s + 0.4]
        reading = energy_between([trace("power", at_s, power.power_w(at_s), poll_s)], [(0.0, window_s)], "all", "m")
        assert reading.energy_j is not None
        assert reading.uncertainty_j is not None
        errors.append(reading.energy_j - power.energy_j(0.0, window_s))
        inside += abs(errors[-1]) <= 2 * reading.uncertainty_j
    assert inside >= 190
    assert abs(np.mean(errors)) < 3 * np.std(errors) / 200**0.5


def test_a_gauge_knows_ten_seconds_of_a_constant_load_to_1_percent() -> None:
    for meter in ("gauge, 250 ms, instants", "gauge, 250 ms, means"):
        assert simulated(meter, "constant", N_WINDOWS).within_target == N_WINDOWS


@pytest.mark.parametrize("waveform", [w for w in WAVEFORMS if w != MET_BY_CHANCE[1]])
@pytest.mark.parametrize("meter", [m for m in FINE if m.startswith("gauge")])
def test_a_gauge_reads_no_waveform_high_or_low_on_average(meter: str, waveform: str) -> None:
    """The mean of 100 windows lies within three of its own standard errors of the truth."""
    found = simulated(meter, waveform, N_WINDOWS)
    assert found.mean_error is not None
    assert found.rms_error is not None
    scatter = (found.rms_error**2 - found.mean_error**2) ** 0.5
    assert abs(found.mean_error) < 3 * scatter / N_WINDOWS**0.5 + 1e-4


def test_a_gauge_of_instants_errs_by_what_hides_between_them_and_no_more() -> None:
    """The floor is a closed form: no reader of such a gauge can do better where steps are rarer than its updates."""
    found = simulated("gauge, 250 ms, instants", "square, 1 to 3 s", 200)
    assert found.rms_error is not None
    assert found.floor_rms is not None
    assert 0.8 * found.floor_rms < found.rms_error < 1.5 * found.floor_rms


def test_the_floor_of_one_step_is_its_height_times_the_update_over_root_12() -> None:
    step = StepPower(np.array([0.0, START_S + 4.0, 100.0]), np.array([1.0, 3.0]))
    energy_j = 4 * 1.0 + 6 * 3.0
    assert floor_variance(step, GAUGE_UPDATE_S) == pytest.approx((2.0 * 0.25 / energy_j) ** 2 / 12)


def test_a_charge_counter_has_no_energy_in_ten_seconds_rather_than_a_wrong_one() -> None:
    found = simulated("charge counter, 1 mAh", "square, 1 to 3 s", 20)
    assert found.n_without_energy == 20
    assert found.reason is not None
    assert "unresolved" in found.reason


def reading(energy_j: float | None, uncertainty_j: float | None = None) -> EnergyReading:
    return EnergyReading(
        phase="all",
        meter="m",
        component="total",
        method="counter",
        duration_s=END_S - START_S,
        energy_j=energy_j,
        uncertainty_j=uncertainty_j,
        reason=None if energy_j is not None else "gap",
    )


def test_windows_are_counted_by_hand() -> None:
    pairs = [
        (100.0, reading(100.5, 0.4)),  # 0.5 %, 1.25 sigma
        (100.0, reading(98.0, 0.5)),  # -2 %, 4 sigma
        (200.0, reading(200.0, 1.0)),  # exact
        (100.0, reading(None)),
    ]
    found = compared("m", "w", pairs)
    assert (found.n_windows, found.n_without_energy, found.reason) == (4, 1, "gap")
    assert (found.within_one, found.within_two, found.within_target) == (1, 2, 2)
    assert found.mean_error == pytest.approx((0.005 - 0.02) / 3)
    assert found.rms_error == pytest.approx(((0.005**2 + 0.02**2) / 3) ** 0.5)
    assert found.worst_error == pytest.approx(0.02)
    assert not found.covered


def test_the_page_shows_every_row_and_says_where_there_is_no_energy() -> None:
    rows = [
        compared("a", "constant", [(100.0, reading(100.5, 0.4))]),
        compared("b", "constant", [(1.0, reading(None))]),
    ]
    text = page(rows)
    assert "| a | constant | 1 of 1 | 0 of 1 | 1 of 1 | 0.5 % |" in text
    assert "| b | constant | no energy: gap |" in text
