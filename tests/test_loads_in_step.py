"""A load in step with its counter's updates looks steady: how wrong its joules are then, as docs/figures.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from results.energy import energy_between
from results.records import PowerTrace

PAGE = Path(__file__).parent.parent / "docs" / "figures.md"
READ_S, HIGH_W = 0.05, 100.0


class Square(NamedTuple):
    """100 W for a share of each period, else nothing."""

    hertz: float
    share: float
    phase: float

    def joules(self, at_s: np.ndarray | float) -> np.ndarray:
        """Since long ago."""
        periods, part = np.divmod(np.asarray(at_s) * self.hertz + 1000.0 + self.phase, 1.0)
        return HIGH_W * (periods * self.share + np.minimum(part, self.share)) / self.hertz


def error_in_updates(load: Square, update_s: float, counter_phase: float, start_s: float, n_updates: float) -> float:
    """Joules less the true ones, over what flows in one update."""
    end_s = start_s + n_updates * update_s
    at_s = np.arange(0.0, end_s + 3 * update_s, READ_S)
    shown_s = (np.floor(at_s / update_s - counter_phase) + counter_phase) * update_s
    counter = PowerTrace(
        meter="m", component="gpu", kind="counter", method="counter", times_s=at_s, values=load.joules(shown_s),
        sample_interval_s=READ_S, update_period_s=update_s,
    )  # fmt: skip
    found = energy_between([counter], [(start_s, end_s)], "all", "m")
    assert found.energy_j is not None, found.reason
    true_j = float(load.joules(end_s) - load.joules(start_s))
    return (found.energy_j - true_j) / (HIGH_W * load.share * update_s)


@given(
    off=st.floats(0.98, 1.02), share=st.floats(0.05, 0.95), phase=st.floats(0, 1), counter_phase=st.floats(0, 1),
    start=st.floats(2, 3), n_updates=st.floats(10.5, 40), update_s=st.sampled_from([0.1, 0.5]),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_the_error_is_no_more_than_what_flows_in_two_updates(
    off: float, share: float, phase: float, counter_phase: float, start: float, n_updates: float, update_s: float
) -> None:
    load = Square(off / update_s, share, phase)
    error = error_in_updates(load, update_s, counter_phase, start * update_s * 2, n_updates)
    # A load may be on for a little more than its share within one update.
    assert abs(error) <= 2 * 1.05


@pytest.mark.parametrize(("share", "words"), [(0.5, "for half of it"), (0.1, "for a tenth of it")])
def test_the_page_says_how_large_it_is(share: float, words: str) -> None:
    told = re.search(words + r",(?: the error is)? (\d+) %", " ".join(PAGE.read_text().split()))
    assert told is not None
    rng = np.random.default_rng(20261127)
    errors = []
    for _ in range(1500):
        load = Square(1.01 / 0.5, share, rng.random())
        errors.append(error_in_updates(load, 0.5, rng.random(), 1.0 + rng.random(), 20.0 + rng.random()))
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(int(told[1]) / 100, abs=0.025)
