"""The curve of a counter that renews its value now and then, to both ends of its readings, against closed forms."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest

from results.records import EnergyReading
from tests.energy_readings import energy, steps
from tests.fakes.waveforms import counter_trace

UPDATE_S, WATTS = 0.1, 40.0
PHASES_S = (0.003, 0.023, 0.056, 0.087)
"""Of the first reading; no reading comes as the counter renews itself."""


class Read(NamedTuple):
    reading: EnergyReading
    lasted_s: float
    window_s: tuple[float, float]


def whole(apart_s: float, phase_s: float, first_s: float = 0.0) -> Read:
    """All readings of a counter under a steady load, from so long behind the first."""
    times_s = 1.0 + phase_s + apart_s * np.arange(round(6.0 / apart_s))
    one = counter_trace(steps((0, WATTS)), times_s, UPDATE_S)
    window_s = float(times_s[0]) + first_s, float(times_s[-1])
    return Read(energy(one, window_s), window_s[1] - window_s[0], window_s)


@pytest.mark.parametrize("phase_s", PHASES_S)
@pytest.mark.parametrize("apart_s", [0.01, 0.03])
def test_a_counter_that_is_read_often_is_known_to_its_ends(apart_s: float, phase_s: float) -> None:
    """To the distance of two readings at each end, and not to its update, which is 3 and 10 times as long."""
    reading, lasted_s, _ = whole(apart_s, phase_s)
    assert reading.energy_j == pytest.approx(WATTS * lasted_s, abs=2 * WATTS * apart_s * (apart_s != 0.01) + 1e-9)


def test_a_counter_that_is_read_seldom_is_right_on_average_and_within_an_update_each_time() -> None:
    found = [whole(0.23, phase_s) for phase_s in np.arange(0.0, 0.1, 0.005).tolist()]
    off_j = [read.reading.energy_j - WATTS * read.lasted_s for read in found if read.reading.energy_j is not None]
    assert len(off_j) == len(found)
    assert max(map(abs, off_j)) <= WATTS * UPDATE_S + 1e-9
    assert np.mean(off_j) == pytest.approx(0.0, abs=0.05 * WATTS * UPDATE_S)


@pytest.mark.parametrize("phase_s", PHASES_S)
def test_what_the_end_of_a_counter_leaves_open(phase_s: float) -> None:
    """The power of the time since its last renewal was seen, on one side: 2 t P / sqrt(12). Where the window begins,
    1 s behind the first reading, the age of a reading's distance: w P / sqrt(12)."""
    inside, lasted_s, (start_s, _) = whole(0.01, phase_s, first_s=1.0)
    end_s = start_s + lasted_s
    seen_s = math.floor(end_s / UPDATE_S) * UPDATE_S + phase_s % 0.01
    assert end_s - seen_s > 0.009
    expected_j = WATTS * math.hypot(0.01, 2 * (end_s - seen_s)) / math.sqrt(12)
    assert inside.uncertainty_j == pytest.approx(expected_j, rel=1e-6)
