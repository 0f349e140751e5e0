"""Busy, waiting, idle and overlap: a closed form of three operations, and a count second by second."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.models.operation import TRANSFER, Operation
from devices.models.timeline import Timeline
from results.resource_use import Again, MachineUse, Ran, ResourceUse, joules_by_state, machine_use
from tests.test_links import linked_sheet

COMPONENTS = ["cpu", "gpu", "link"]


def three_operations() -> MachineUse:
    """A copy of 100 bytes at 20 bytes/s and 0.25 s latency aside (5.25 s), a GPU call of 0.5 + 10 000 / 10 000 = 1.5 s
    meanwhile, then 2 s on the CPU at 100 FLOP/s that wait for the copy; and 2.75 s in which nothing happens."""
    timeline = Timeline(linked_sheet())
    timeline.run(
        [
            Operation("copy", "pcie", TRANSFER, moved_bytes=100.0, aside=True),
            Operation("attention", "gpu", "attention", flops=10_000.0),
            Operation("scatter", "cpu", "scatter", flops=200.0, after=(2,)),
        ]
    )
    timeline.sleep_until_s(10.0)
    return timeline.use(0.0)


def test_three_operations_are_busy_waiting_and_idle_as_worked_out_by_hand() -> None:
    use = three_operations()
    assert (use.window_s, use.overlap_s, use.idle_s) == pytest.approx((10.0, 1.5, 2.75))
    assert use.of("pcie") == pytest.approx(ResourceUse(alone_s=3.75, overlap_s=1.5, waiting_s=2.0, idle_s=2.75))
    assert use.of("gpu") == pytest.approx(ResourceUse(alone_s=0.0, overlap_s=1.5, waiting_s=5.75, idle_s=2.75))
    assert use.of("cpu") == pytest.approx(ResourceUse(alone_s=2.0, overlap_s=0.0, waiting_s=5.25, idle_s=2.75))
    assert use.of("ndp:0") == pytest.approx(ResourceUse(waiting_s=7.25, idle_s=2.75))
    assert [use.of(name).busy_s for name in ("pcie", "gpu", "cpu")] == pytest.approx([5.25, 1.5, 2.0])


def test_windows_that_repeat_and_follow_each_other_add_up() -> None:
    use = three_operations()
    cpu = machine_use(Ran(["npu"], np.zeros(1, dtype=np.int64), np.zeros(1), np.array([4.0])), 0.0, 5.0)
    both = use.repeated(3) + cpu
    assert (both.window_s, both.overlap_s, both.idle_s) == pytest.approx((35.0, 4.5, 9.25))
    assert both.of("gpu") == pytest.approx(ResourceUse(0.0, 4.5, 3 * 5.75 + 4.0, 9.25))
    assert both.of("npu") == pytest.approx(ResourceUse(4.0, 0.0, 3 * 7.25, 9.25))


SPANS = st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 20), st.integers(0, 6)), max_size=12)


def ran_of(spans: list[tuple[int, int, int]]) -> Ran:
    place_P, start_P, length_P = (np.array([span[i] for span in spans], dtype=np.int64) for i in range(3))
    return Ran(COMPONENTS, place_P, start_P.astype(np.float64), (start_P + length_P).astype(np.float64))


@given(SPANS, st.integers(-4, 12), st.integers(1, 18), st.booleans())
def test_states_are_those_of_a_count_second_by_second_and_fill_the_window(
    spans: list[tuple[int, int, int]], begin: int, lasting: int, in_order: bool
) -> None:
    """In the order of their starts, as trials keep them, only those near a window are looked at."""
    if in_order:
        spans = sorted(spans, key=lambda span: span[1])
    use = machine_use(ran_of(spans), float(begin), float(begin + lasting))
    counted = {name: [0, 0, 0, 0] for name in COMPONENTS}
    for second in range(begin, begin + lasting):
        working = {COMPONENTS[at] for at, start, length in spans if start <= second < start + length}
        for name in COMPONENTS:
            counted[name][(1 if len(working) > 1 else 0) if name in working else 2 if working else 3] += 1
    for name in COMPONENTS:
        assert list(use.of(name)) == pytest.approx(counted[name])
        assert sum(use.of(name)) == pytest.approx(lasting)


@given(SPANS, st.lists(st.tuples(st.integers(-4, 9), st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=3))
def test_windows_that_count_again_are_those_windows_by_themselves(
    spans: list[tuple[int, int, int]], windows: list[tuple[int, int, int]]
) -> None:
    """Inside or before the one from 0 to 18."""
    ran = ran_of(spans)
    again = [Again(float(begin), float(begin + lasting), n) for begin, lasting, n in windows]
    found = machine_use(ran, 0.0, 18.0, again)
    apart = machine_use(ran, 0.0, 18.0)
    for one in again:
        apart = apart + machine_use(ran, one.begin_s, one.end_s).repeated(one.n)
    assert (found.window_s, found.overlap_s, found.idle_s) == pytest.approx(
        (apart.window_s, apart.overlap_s, apart.idle_s)
    )
    for name in COMPONENTS:
        assert list(found.of(name)) == pytest.approx(list(apart.of(name)))


@given(SPANS)
def test_joules_of_the_states_add_up_to_the_counter(spans: list[tuple[int, int, int]]) -> None:
    """A counter of 3 W whatever happens: its joules are 3 W times the seconds of each state."""
    ran = ran_of(spans)
    use = machine_use(ran, 0.0, 18.0)
    steady = (np.array([0.0, 18.0]), np.array([100.0, 154.0]))
    joules = joules_by_state(ran, 0.0, 18.0, dict.fromkeys([*COMPONENTS, "comm"], steady))
    for name in COMPONENTS:
        own = use.of(name)
        assert list(joules[name]) == pytest.approx([3 * own.busy_s, 3 * own.waiting_s, 3 * own.idle_s])
    assert list(joules["comm"]) == pytest.approx([3 * (18.0 - use.idle_s), 0.0, 3 * use.idle_s])


def test_a_counter_that_knows_nothing_makes_joules_missing() -> None:
    missing = (np.array([0.0, 18.0]), np.full(2, np.nan))
    joules = joules_by_state(ran_of([(0, 0, 5), (1, 5, 2)]), 0.0, 18.0, {"cpu": missing})
    assert np.isnan(joules["cpu"]).all()
