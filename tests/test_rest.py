"""What is taken for stretches in which a source stood still, and how well it is known, against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from results.energy import energy_between
from results.liveness import Stand
from results.records import EnergyReading
from results.rest import Resting, Stood, is_known, moving_of, resting, stood_still
from tests.fakes.waveforms import Array, trace

COUNTER = trace("counter", np.arange(0.0, 10.05, 0.1), np.arange(0.0, 10.05, 0.1), 0.1)


def stand(start_s: float, end_s: float, basis: str, shown_j: float = 0.0) -> Stand:
    """Of 2 to 14 J, of which 8 J are taken: the variance of an even distribution is 12 J2."""
    return Stand(start_s, end_s, shown_j, 2.0, 14.0, 8.0, 12.0, basis)  # type: ignore[arg-type]


def found(*stands: Stand, window_s: tuple[float, float] = (0.0, 10.0), n_alike: int = 1) -> tuple[float, Stood]:
    variance_j2, stood = stood_still(COUNTER, stands, np.array([window_s]), n_alike)
    assert stood is not None
    return variance_j2, stood


def test_what_the_power_around_says_is_taken_and_joins_for_each_stretch() -> None:
    variance_j2, stood = found(stand(2.0, 4.0, "around", shown_j=1.0), stand(6.0, 9.0, "around"))
    assert variance_j2 == pytest.approx(12.0 + 12.0)
    assert stood.sigma_j == pytest.approx(math.sqrt(24.0))
    assert (stood.taken_j, stood.share_s) == pytest.approx((7.0 + 8.0, 0.5))
    assert (stood.rest_sigma_j, stood.hidden_j) == pytest.approx((0.0, 13.0 + 14.0))
    assert "its counter stood still for 5 s; 16 J are taken for it" in stood.remark
    assert "for 5 s of 10 s" in stood.reason
    assert "4 to 28 J flowed meanwhile" in stood.reason


def test_of_a_stretch_that_reaches_beyond_the_window_its_share_is_not_known_either() -> None:
    """A quarter of it is inside, and its joules may lie anywhere in it: (s (1 - s))^2 (high - low)^2 / 3."""
    variance_j2, stood = found(stand(8.0, 16.0, "around"))
    assert variance_j2 == pytest.approx(12.0 * 0.25**2 + (0.25 * 0.75 * 12.0) ** 2 / 3)
    assert (stood.taken_j, stood.share_s, stood.hidden_j) == pytest.approx((2.0, 0.2, 3.5))


def test_what_was_lost_while_nobody_read_errs_each_time_alike() -> None:
    variance_j2, stood = found(stand(2.0, 4.0, "unread"), stand(6.0, 9.0, "unread"))
    assert variance_j2 == pytest.approx((2 * math.sqrt(12.0)) ** 2)
    assert (stood.taken_j, stood.share_s) == (0.0, 0.0)
    assert "it was not read for 5 s" in stood.remark


@pytest.mark.parametrize("n_alike", [1, 3])
def test_of_stretches_of_rest_one_may_be_a_fault_in_all_parts_that_rest_alike(n_alike: int) -> None:
    """The mean of their variances over how many they are. Parts that rest with it err alike: together by n times the
    error of one, so that each has n times its variance in their sum."""
    variance_j2, stood = found(stand(2.0, 4.0, "rest"), stand(6.0, 9.0, "rest"), n_alike=n_alike)
    assert variance_j2 == pytest.approx(n_alike * 24.0 / 2**2)
    assert (stood.sigma_j, stood.rest_sigma_j) == pytest.approx((0.0, n_alike * math.sqrt(6.0)))


def test_what_a_sensor_beside_it_says_is_known_by_that_alone() -> None:
    variance_j2, stood = found(stand(2.0, 4.0, "beside"))
    assert variance_j2 == pytest.approx(12.0)
    assert (stood.sigma_j, stood.rest_sigma_j, stood.taken_j) == (0.0, 0.0, 0.0)


def test_stretches_outside_the_window_are_nothing() -> None:
    assert stood_still(COUNTER, [stand(11.0, 12.0, "around")], np.array([[0.0, 10.0]]), 1) == (0.0, None)


@pytest.mark.parametrize(("of_limit", "known"), [(0.99, True), (1.01, False)])
def test_more_than_a_fifth_taken_or_a_twentieth_not_known_is_no_measurement(of_limit: float, known: bool) -> None:
    sure = Stood("", "", 0.0, 0.0, 0.0, 0.0, 0.0)
    assert is_known(sure._replace(taken_j=20.0 * of_limit), 100.0, 100.0) is known
    assert is_known(sure._replace(sigma_j=5.0 * of_limit), 100.0, 100.0) is known
    # 8 % of the time, of a part that has half of the total's energy 16 %.
    assert is_known(sure._replace(share_s=0.16 * of_limit), 50.0, 100.0) is known
    assert is_known(sure._replace(rest_sigma_j=10.0 * of_limit), 100.0, 100.0) is known


# --- whether a part may rest ------------------------------------------------------------------------------------------


def judged(
    other_w: tuple[float, float],
    other_stops_s: tuple[float, float] = (4.0, 6.0),
    meter: str = "m",
    kind: str = "counter",
) -> Resting:
    """Of a part of 10 W that stands still from 4 to 6 s. other_w: of another part meanwhile, and else."""
    times_s = 100.0 + np.arange(0.0, 10.05, 0.1)

    def counted(within_w: float, else_w: float, stops_s: tuple[float, float]) -> np.ndarray:
        is_within = (times_s[1:] > 100.05 + stops_s[0]) & (times_s[1:] < 100.05 + stops_s[1])
        return np.concatenate([[0.0], np.cumsum(np.where(is_within, within_w, else_w) * 0.1)])

    own = trace("counter", times_s, counted(0.0, 10.0, (4.0, 6.0)), 0.1, component="c", can_rest=True)
    other = counted(*other_w, other_stops_s)
    return resting(own, [own, trace(kind, times_s, other, 0.1, component="other", meter=meter)])


@pytest.mark.parametrize(
    ("other_w", "may_rest"),
    [
        ((5.0, 5.0), True),
        ((9.5, 5.0), True),
        ((10.5, 5.0), False),  # twice as busy, and this part alone rests
        ((0.0, 5.0), False),  # all stand still at once: what reads them has stopped
    ],
)
def test_a_part_rests_where_the_others_are_no_busier_and_count(other_w: tuple[float, float], may_rest: bool) -> None:
    assert judged(other_w).trace.can_rest is may_rest


@pytest.mark.parametrize(("meter", "kind"), [("another", "counter"), ("m", "power")])
def test_what_is_no_counter_of_the_same_meter_does_not_say_that_a_part_rests(meter: str, kind: str) -> None:
    assert judged((5.0, 5.0), meter=meter, kind=kind).trace.can_rest is False


@pytest.mark.parametrize(("stops_s", "n_alike"), [((4.1, 6.1), 2), ((4.3, 6.3), 1), ((4.1, 7.0), 1)])
def test_parts_that_stop_and_go_on_together_err_together(stops_s: tuple[float, float], n_alike: int) -> None:
    """Within one and a half samples."""
    found = judged((0.0, 5.0), stops_s)
    assert (found.trace.can_rest, found.n_alike) == (True, n_alike)


def test_a_dead_counters_power_sensor_is_taken_where_it_shows_something() -> None:
    times_s = np.arange(0.0, 10.05, 0.1)
    dead = trace("counter", times_s, np.full(len(times_s), 7.0), 0.1, component="c")
    lives = trace("counter", times_s, 3.0 * times_s, 0.1, component="other")
    watts = trace("power", times_s, np.where(times_s > 5.0, 20.0, 0.0), 0.1, component="c power", additive=False)
    [taken, other], [remark] = moving_of([dead, lives], [dead, lives, watts])
    assert (taken.component, taken.additive, other.component) == ("c power", True, "other")
    assert remark.startswith("c: its counter stands still at 7 J all the time; its power sensor's joules are taken")
    off = replace(watts, values=np.zeros(len(times_s)))
    assert moving_of([dead, lives], [dead, lives, off])[0] == [lives]


def counters_that_lose(n: int, lost_s: float, can_rest: bool = False) -> EnergyReading:
    """n equal counters of 5 W, and of 1 W before and behind the 7 s of the window. After 2 s of it all of them stand
    still for so long, and go on from the values that they kept."""
    times_s = np.arange(0.037, 13.0, 0.1)

    def flowed_j(at_s: Array) -> Array:
        return np.interp(at_s, [0.0, 3.0, 10.0, 13.0], [0.0, 3.0, 38.0, 41.0])

    kept_j, behind_j = flowed_j(np.minimum(times_s, 5.0)), flowed_j(times_s) - 5.0 * lost_s
    shown_j = np.where(times_s < 5.0 + lost_s, kept_j, behind_j)
    parts = [trace("counter", times_s, shown_j, 0.1, component=f"c{i}", can_rest=can_rest) for i in range(n)]
    return energy_between(parts, [(3.0, 10.0)], "all", "m")


@pytest.mark.parametrize("can_rest", [False, True])
@pytest.mark.parametrize("lost_s", [1.0, 2.0])
def test_parts_that_stop_together_are_not_each_taken_to_have_rested(lost_s: float, can_rest: bool) -> None:
    """Each of twenty could have hidden less than a twentieth of the total, and all of them 14 or 29 % of it: so much
    was missing, with a +- of 2 to 16 %."""
    reading = counters_that_lose(20, lost_s, can_rest)
    assert reading.energy_j is None
    assert f"its counter stood still for {lost_s:g} s of 7 s" in str(reading.reason)


@pytest.mark.parametrize("n", [3, 20])
def test_what_is_taken_for_parts_that_stop_together_errs_by_the_sum_of_their_errors(n: int) -> None:
    """Equal parts are known as well, for their size, as one of them: twenty were 3.8 sigmas off where one is 1.1."""
    alone, together = counters_that_lose(1, 0.5), counters_that_lose(n, 0.5)
    assert alone.uncertainty_j is not None
    assert (together.energy_j, together.uncertainty_j) == pytest.approx(
        (n * alone.energy_j, n * alone.uncertainty_j), rel=1e-3
    )


@pytest.mark.parametrize("n", [3, 20])
def test_counters_that_jump_together_err_by_the_sum_of_their_errors(n: int) -> None:
    times_s = np.arange(0.037, 13.0, 0.1)
    shown_j = 5.0 * times_s + np.where(times_s > 6.0, 3.0, 0.0)
    parts = [trace("counter", times_s, shown_j, 0.1, component=f"c{i}") for i in range(n)]
    alone, together = (energy_between(own, [(3.0, 10.0)], "all", "m") for own in (parts[:1], parts))
    assert alone.uncertainty_j == pytest.approx(3.0 / math.sqrt(3), rel=0.01)
    assert together.uncertainty_j == pytest.approx(n * alone.uncertainty_j, rel=1e-3)
