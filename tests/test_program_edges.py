"""When the phases of a program ended, and what is not known of it in their joules: a fake whose end is seen late.

Its power is a few steps, so that the true joules of a phase are watts times seconds. The Monte-Carlo asks how often
they lie within two standard uncertainties of those that are told.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from engines.external.programs.edges import Edge, last_edge
from results.derivation import energies_of, moved_edges, phase_intervals
from results.energy import MeterEnergy
from results.records import PHASES, Completion, EnergyReading, PowerTrace
from results.trace_files import WINDOW

IDLE_W, LOAD_W, PREFILL_W, DECODE_W = 1.0, 8.0, 6.0, 3.0
LOADED_S, PREFILL_S, DECODE_S = 10.0, 1.6, 1.8
FIRST_S = LOADED_S + PREFILL_S
DONE_S = FIRST_S + DECODE_S
WINDOW_S = (9.0, 15.0)
PREFILL_J, DECODE_J = PREFILL_W * PREFILL_S, DECODE_W * DECODE_S
TRIP_S = 0.02
ENDED_U_S = 0.005


def trace() -> PowerTrace:
    """Exact readings every 5 ms; each step of the power lies in the middle between two, as one does on average."""
    at_s = np.arange(8.0025, 16.0, 0.005)
    edges = [9.2, LOADED_S, FIRST_S, DONE_S]
    watts = np.asarray([IDLE_W, LOAD_W, PREFILL_W, DECODE_W, IDLE_W])[np.searchsorted(edges, at_s, side="right")]
    return PowerTrace("fake", "all", "power", "integrated power", at_s, watts, 0.005)


TRACE = trace()
ENERGY = MeterEnergy([TRACE], "fake")


def completion(done: Edge) -> Completion:
    """As an engine places it: backwards from the end of decoding."""
    first_s = done.at_s - DECODE_S
    return Completion(
        request_id="r", sample_id="s", n_prompt_tokens=8, start_s=first_s - PREFILL_S, prefill_end_s=first_s,
        end_s=done.at_s, token_ids=(0, 0), token_times_s=(first_s, done.at_s),
        set_aside_s=((9.2, first_s - PREFILL_S), (done.at_s, 14.8)), edges_uncertainty_s=done.uncertainty_s,
    )  # fmt: skip


def readings(done: Edge) -> dict[str, EnergyReading]:
    found = energies_of([completion(done)], {WINDOW: [TRACE]}, WINDOW_S)
    return {reading.phase: reading for reading in found.readings}


def seen(chance: np.random.Generator, shell_s: float, link_s: float) -> Edge:
    """As a phone shows it: the shell that waits for the program is late by the one, its words by the other."""
    ended_s = DONE_S + shell_s + chance.uniform(-math.sqrt(3), math.sqrt(3)) * ENDED_U_S
    return last_edge(Edge(ended_s, ENDED_U_S), DONE_S + chance.uniform(0, TRIP_S) + link_s, TRIP_S)


@pytest.mark.parametrize(
    ("late_s", "by"),
    [(0.0, "nothing"), *((late_s, by) for late_s in (0.05, 0.2, 0.5) for by in ("shell", "link"))],
)
def test_the_true_joules_lie_within_two_uncertainties_however_late_the_end_is_seen(late_s: float, by: str) -> None:
    chance = np.random.default_rng(7)
    n, inside = 60, {"prefill": 0, "decode": 0}
    true_j = {"prefill": PREFILL_J, "decode": DECODE_J}
    for _ in range(n):
        one = [completion(seen(chance, late_s * (by == "shell"), late_s * (by == "link")))]
        intervals, moved = phase_intervals(one, WINDOW_S), [phase_intervals(m, WINDOW_S) for m in moved_edges(one)]
        for phase in PHASES[:2]:
            found = ENERGY.between(intervals[phase], phase, moved=[m[phase] for m in moved])
            assert found.energy_j is not None
            assert found.uncertainty_j is not None
            inside[phase] += abs(found.energy_j - true_j[phase]) <= 2 * found.uncertainty_j
    assert min(inside.values()) >= 0.94 * n, inside


def test_what_is_late_by_itself_does_not_widen_the_bar() -> None:
    chance = np.random.default_rng(3)
    for late_s in (0.0, 0.2, 0.5):
        found = [readings(seen(chance, late_s, 0.0))["prefill"] for _ in range(20)]
        # Half a trip, and the 3 W by which prefill and decode differ, and the 2 W to loading.
        assert max(reading.uncertainty_j or math.inf for reading in found) < 0.02 * PREFILL_J


def test_words_that_were_held_up_leave_the_end_and_tell_how_disturbed_it_was() -> None:
    done = last_edge(Edge(10.0, 0.003), 10.0 + TRIP_S + 0.6, TRIP_S)
    assert done.at_s == 10.0
    assert done.uncertainty_s == pytest.approx(math.hypot(0.003, 0.6 / math.sqrt(12)))


def test_edges_that_may_be_late_add_the_step_of_power_across_them() -> None:
    """A window that moves by d gains what is behind its end and loses what is before its start."""
    exact, moved = (readings(Edge(DONE_S, u_s)) for u_s in (0.0, 0.05))
    for phase, (before_w, own_w, after_w) in {
        "prefill": (LOAD_W, PREFILL_W, DECODE_W),
        "decode": (PREFILL_W, DECODE_W, IDLE_W),
    }.items():
        reach_s = math.sqrt(3) * 0.05
        early_j, late_j = reach_s * (before_w - own_w), reach_s * (after_w - own_w)
        bar, plain = moved[phase].uncertainty_j, exact[phase].uncertainty_j
        assert bar is not None
        assert plain is not None
        assert bar == pytest.approx(math.sqrt(plain**2 + (early_j**2 + late_j**2) / 6), rel=0.02)


@pytest.mark.parametrize(
    ("shares", "of_one"), [((1.0,), 1.0), ((0.5, 0.5), 1.0), ((1.5, -0.5), 1.0), ((1.0, -1.0), 0.0)]
)
def test_edges_of_parts_of_a_total_come_late_together(shares: tuple[float, ...], of_one: float) -> None:
    """Each part rises by its share of 8 W where the window begins; one that falls as much as another rises leaves the
    total as it is. A window that comes 0.1 s early has that of the lower power for that of the higher: 0.8 J less. One
    that comes late has the higher one all the time: 0.8^2 / 6."""
    at_s = np.arange(0.0025, 4.0, 0.005)
    parts = [
        PowerTrace("fake", f"p{i}", "power", "integrated power", at_s, 20.0 + 8.0 * share * (at_s > 1.5), 0.005,
                   relative_accuracy=0.0)
        for i, share in enumerate(shares)
    ]  # fmt: skip
    window, moved = (1.5, 3.0), [[(1.5 + by_s, 3.0 + by_s)] for by_s in (-0.1, 0.1)]
    meter = MeterEnergy(parts, "fake")
    plain, late = (meter.between([window], "decode", moved=m).uncertainty_j for m in ([], moved))
    assert plain is not None
    assert late is not None
    assert late**2 - plain**2 == pytest.approx((0.1 * 8.0 * of_one) ** 2 / 6, rel=0.02, abs=1e-6)


def test_edges_that_are_known_move_nothing_and_those_of_the_question_stay() -> None:
    unknown = completion(Edge(DONE_S, 0.0)).model_copy(update={"edges_uncertainty_s": None})
    assert moved_edges([completion(Edge(DONE_S, 0.0)), unknown]) == []
    assert moved_edges([completion(Edge(DONE_S, 0.1)), unknown])[0][1] == unknown
    early, late = moved_edges([completion(Edge(DONE_S, 0.1))])
    reach_s = math.sqrt(3) * 0.1
    for (one,), by_s in ((early, -reach_s), (late, reach_s)):
        intervals = phase_intervals([one], WINDOW_S)
        assert intervals["decode"] == [pytest.approx((FIRST_S + by_s, DONE_S + by_s))]
        assert intervals["all"][0] == (9.0, 9.2)
        assert intervals["all"][-1] == (14.8, 15.0)
