"""What may have flowed while a source stood still: of one stand under 100 W, and of readings of 0 W, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from results.liveness import Beside, Stand, judged_counter, judged_power
from results.renewal import Renewal
from tests.fakes.waveforms import trace

APART_S, PERIOD_S, WATTS = 0.05, 0.1, 100.0
FROM_S, TO_S = 2.0, 4.0
ENDS_J2 = (WATTS * APART_S) ** 2 / 6
"""Its renewals lie anywhere between two readings, at both ends."""


def stand(step_j: float, beside: Beside | None = None, resolution: float = 1e-6) -> Stand | None:
    """Of a counter that is renewed every 100 ms, and stands still from 2 to 4 s: then it shows so much more."""
    k = np.arange(161)
    behind = 200.0 + step_j + 10.0 * ((k - 80) // 2)
    shown_j = np.where(k < 40, 10.0 * (k // 2), np.where(k < 80, 200.0, behind))
    taken = trace("counter", APART_S * k, shown_j, APART_S, update_period_s=PERIOD_S, resolution=resolution)
    judged = judged_counter(taken, shown_j, Renewal(PERIOD_S, 1.5 * PERIOD_S), beside)
    found = next(iter(judged.stands), None)
    filled_j = step_j if found is None else found.filled_j
    assert judged.values[-1] == pytest.approx(shown_j[-1] + filled_j - step_j)
    if found is not None:
        assert (found.start_s, found.end_s, found.shown_j) == (FROM_S, TO_S, step_j)
    return found


def sensor(from_s: float, to_s: float, shown_w: float = WATTS) -> Beside:
    """It knows the power to 3 %."""
    times_s = np.arange(from_s, to_s + 1e-9, APART_S, dtype=np.float64)
    watts = np.full(len(times_s), shown_w)
    return Beside(times_s, shown_w * (times_s - from_s), times_s, watts, 0.03, gap_s=0.5, late_s=0.1, resolution=0.0)


def test_a_sensor_beside_a_counter_that_lost_all_says_what_flowed_as_well_as_it_knows() -> None:
    found = stand(1.0, sensor(0.0, 8.0))
    assert found is not None
    assert found.basis == "beside"
    assert found.filled_j == pytest.approx(200.0)
    assert found.variance_j2 == pytest.approx(6.0**2 + ENDS_J2)


def test_where_a_counter_brings_more_than_the_sensor_beside_it_saw_either_may_be_right() -> None:
    """400 J in its step, 200 J by the sensor: anywhere between the two, and as far beyond as the sensor may be off."""
    found = stand(400.0, sensor(0.0, 8.0))
    assert found is not None
    assert (found.low_j, found.high_j, found.filled_j) == pytest.approx((200.0, 400.0, 300.0))
    assert found.variance_j2 == pytest.approx(200.0**2 / 12 + 6.0**2 + ENDS_J2)


@pytest.mark.parametrize(("step_j", "filled_j"), [(255.0, 260.0), (275.0, 275.0), (276.0, 268.0)])
def test_a_counter_brings_more_than_the_sensor_beside_it_saw_from_twice_what_that_may_be_off(
    step_j: float, filled_j: float
) -> None:
    """130 W by the sensor, to 7.8 J: up to 275.6 J."""
    found = stand(step_j, sensor(0.0, 8.0, 130.0))
    assert found is not None
    assert found.filled_j == pytest.approx(filled_j)
    if found.basis == "beside":
        assert (found.low_j, found.high_j) == pytest.approx((filled_j - 7.8, filled_j + 7.8))
    assert (found.basis == "around") is (step_j == 276.0)


@pytest.mark.parametrize(("from_s", "to_s"), [(3.0, 8.0), (0.0, 3.0)])
def test_a_sensor_that_was_read_for_half_of_the_stand_says_nothing(from_s: float, to_s: float) -> None:
    """Then it is the power around, 200 J: anywhere from two thirds of that to one and a half times it."""
    found = stand(1.0, sensor(from_s, to_s))
    assert found is not None
    assert found.basis == "around"
    assert found.filled_j == pytest.approx(200.0)
    assert found.variance_j2 == pytest.approx((300.0 - 400.0 / 3) ** 2 / 12 + ENDS_J2)


def test_a_counter_that_brings_more_than_was_late_may_have_lost_the_rest_of_a_burst() -> None:
    """It may have shown its 400 J within one reading, at 8000 W; at that power the two seconds are 16 kJ."""
    found = stand(400.0)
    assert found is not None
    assert (found.low_j, found.high_j, found.filled_j) == pytest.approx((400.0, 16e3, 400.0))
    assert found.variance_j2 == pytest.approx(15.6e3**2 / 3 + ENDS_J2)


def test_the_rest_of_a_burst_is_bounded_by_the_highest_power_that_it_showed() -> None:
    """10 kW for a second long before: of 300 J that came within a reading, at 6 kW, that is the higher."""
    k = np.arange(201)
    early_j = np.where(k < 20, 1000.0 * (k // 2), 1e4 + 10.0 * ((k - 20) // 2))
    shown_j = np.where(k < 80, early_j, np.where(k < 120, 1.03e4, 1.06e4 + 10.0 * ((k - 120) // 2)))
    taken = trace("counter", APART_S * k, shown_j, APART_S, update_period_s=PERIOD_S, resolution=1e-6)
    [found] = judged_counter(taken, shown_j, Renewal(PERIOD_S, 1.5 * PERIOD_S)).stands
    assert (found.start_s, found.end_s, found.filled_j) == (4.0, 6.0, 300.0)
    assert found.high_j == pytest.approx(2e4)


@pytest.mark.parametrize(("step_j", "is_stand"), [(155.0, True), (165.0, False), (245.0, False), (255.0, True)])
def test_what_came_late_and_no_more_is_no_stand(step_j: float, is_stand: bool) -> None:
    """200 J are due: four fifths of them are enough, and more than five quarters are not of that time alone."""
    assert (stand(step_j) is not None) is is_stand


@pytest.mark.parametrize(("resolution", "is_stand"), [(97.0, True), (98.0, False)])
def test_a_value_that_stands_for_less_than_two_of_its_steps_take_is_no_stand(resolution: float, is_stand: bool) -> None:
    """It was seen to stand for 1.95 s: 195 J."""
    assert (stand(1.0, resolution=resolution) is not None) is is_stand


def unread(step_j: float, behind_w: float = WATTS, beside: Beside | None = None) -> tuple[Stand, ...]:
    """Of a counter that nobody reads from 2 to 4 s: then it shows so much more."""
    k = np.concatenate([np.arange(41), np.arange(80, 161)])
    behind_j = 200.0 + step_j + behind_w * PERIOD_S * ((k - 80) // 2)
    shown_j = np.where(k < 80, 10.0 * (k // 2), behind_j)
    taken = trace("counter", APART_S * k, shown_j, APART_S, update_period_s=PERIOD_S, resolution=1e-6)
    return judged_counter(taken, shown_j, Renewal(PERIOD_S, 1.5 * PERIOD_S), beside).stands


@pytest.mark.parametrize(
    ("behind_w", "step_j", "variance_j2"),
    [
        # 50 of 100 W: half may be lost, or none, which is the likelier.
        (100.0, 100.0, 100.0**2 / 3),
        # Between the powers before and behind: the load may have fallen at any time.
        (50.0, 120.0, 80.0**2 / 12),
        # Four fifths of the lower are enough for that.
        (50.0, 81.0, 119.0**2 / 12),
        (50.0, 79.0, 121.0**2 / 3),
    ],
)
def test_what_a_counter_may_have_lost_while_nobody_read_it(behind_w: float, step_j: float, variance_j2: float) -> None:
    [found] = unread(step_j, behind_w)
    assert (found.start_s, found.end_s, found.basis) == (FROM_S, TO_S, "unread")
    assert (found.low_j, found.filled_j, found.high_j) == pytest.approx((step_j, step_j, 200.0))
    assert found.variance_j2 == pytest.approx(variance_j2)


@pytest.mark.parametrize(("step_j", "is_believed"), [(150.0, False), (151.0, True)])
def test_a_sensor_that_was_read_meanwhile_says_whether_a_counter_that_nobody_read_lost_anything(
    step_j: float, is_believed: bool
) -> None:
    """80 W by the sensor, 160 J known to 4.8 J: from twice that less on it may be the sensor that is off."""
    found = unread(step_j, beside=sensor(0.0, 8.0, 80.0))
    if is_believed:
        assert found == ()
    else:
        [one] = found
        assert (one.basis, one.shown_j) == ("beside", step_j)
        assert one.filled_j == pytest.approx(160.0)
        assert (one.low_j, one.high_j, one.variance_j2) == pytest.approx((155.2, 164.8, 4.8**2))


def test_readings_of_0_watts_are_bounded_by_the_lowest_and_the_highest_beside_them() -> None:
    """From the reading before to the reading behind, and to the ends of the trace."""
    t = np.arange(9.0)
    judged = judged_power(trace("power", t, [0, 10, 20, 0, 0, 20, 10, 0, 0], 1.0, resolution=1e-6))
    assert judged.values.tolist() == [10, 10, 20, 20, 20, 20, 10, 10, 10]
    assert [(s.start_s, s.end_s) for s in judged.stands] == [(0, 1), (2, 5), (6, 8)]
    assert [s.filled_j for s in judged.stands] == pytest.approx([10.0, 60.0, 20.0])
    assert [s.variance_j2 for s in judged.stands] == pytest.approx([10.0**2 / 12, 30.0**2 / 12, 20.0**2 / 12])


@pytest.mark.parametrize(("resolution", "filled_w"), [(1.0, 0.0), (0.99, 2.0)])
def test_a_sensor_that_shows_no_more_than_two_of_its_steps_may_show_0_watts(resolution: float, filled_w: float) -> None:
    judged = judged_power(trace("power", np.arange(5.0), [2, 2, 0, 2, 2], 1.0, resolution=resolution))
    assert judged.values.tolist() == [2, 2, filled_w, 2, 2]
