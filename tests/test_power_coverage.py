"""Regular loads through power sensors and gauges: a seeded part of `tests.benchmarks.power_coverage`."""

from __future__ import annotations

import numpy as np
import pytest

from results.uncertainty import PowerErrors
from tests.benchmarks.power_coverage import COVERED, READERS, Cell, cell, page
from tests.fakes.waveforms import trace

N_WINDOWS = 200


@pytest.mark.parametrize(
    ("kind", "load", "window_s", "widest"),
    [
        # Read at random: 2.3 times the rms error, or more, while readings on a grid were thought of.
        ("power, 50 ms", "square 2.1 Hz, 0.5", 10.0, 1.3),
        ("power, 50 ms", "square 3.3 Hz, 0.5", 10.0, 1.3),
        ("power, 50 ms", "square 5 Hz, 0.5", 10.0, 1.8),
        ("power, 50 ms", "square 20 Hz, 0.5", 1.0, 2.0),
        ("power, 50 ms", "ramp", 10.0, 40.0),
        # As fast as it is read: close readings differ more than distant ones, 89 %.
        ("power, 37 ms", "square 20 Hz, 0.5", 10.0, 1.3),
        ("power, 100 ms", "square 9 Hz, 0.5", 10.0, 1.3),
        # On a grid, and nearly in step with a gauge's renewals: 80 and 90 %.
        ("power, grid of 50 ms", "square 7.3 Hz, 0.5", 10.0, 5.0),
        ("instants, 250 ms", "square 3.7 Hz, 0.5", 10.0, 1.5),
        ("instants, 1 s", "square 0.1 Hz, 0.5", 10.5, 2.5),
        ("means, 250 ms", "square 3.3 Hz, 0.5", 10.0, 2.0),
    ],
)
def test_true_joules_of_a_regular_load_are_within_two_sigma_and_not_far_within(
    kind: str, load: str, window_s: float, widest: float
) -> None:
    found = cell(kind, load, window_s, N_WINDOWS)
    assert found.within >= COVERED
    assert found.width < widest


def test_readings_that_a_grid_missed_do_not_come_at_random() -> None:
    """Up for two of five readings on a grid: as many errors together although each tenth reading is not there."""
    at_s = np.arange(0.0, 20.0, 0.05)
    watts = np.where(np.arange(len(at_s)) % 5 < 2, 50.0, 10.0)
    kept = np.arange(len(at_s)) % 10 != 9
    window = np.array([[2.0, 18.0]])
    whole_j2 = PowerErrors(trace("power", at_s, watts, 0.05)).variance_j2(window)
    missed_j2 = PowerErrors(trace("power", at_s[kept], watts[kept], 0.05)).variance_j2(window)
    assert missed_j2 > 0.25 * whole_j2


def test_the_page_counts_cells_and_names_those_that_are_not_covered() -> None:
    kind = next(iter(READERS))
    rows = [
        Cell(kind, "ramp", 1.0, 0.99, 1.2, 2.1, 0.01, 0),
        Cell(kind, "bursts", 1.0, 0.95, 3.0, 2.4, 0.02, 3),
        Cell(kind, "one step", 1.0, 0.90, 0.8, 4.4, 0.03, 1),
    ]
    text = page(rows, 50)
    assert f"| {kind} | 1 s | 2 of 3 | 90 % | 1.2 | 3 | 4.4 | 4 |" in text
    assert "one step (90 %)" in text
