"""The queue of a fleet: who gets which trial, what ends a lease, and that no trial is finished twice."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.fleet.queue import Finished, StaleLeaseError, TrialQueue

ITEMS = [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def queue_of(*devices: str, **changes: object) -> TrialQueue:
    orders = {device: [(f"{device}-{c}", r) for c, r in ITEMS] for device in devices}
    return TrialQueue(orders, Finished(), **changes)  # type: ignore[arg-type]


def test_a_device_gets_its_own_trials_in_their_order_one_at_a_time() -> None:
    queue = queue_of("x", "y")
    given_out = []
    while (lease := queue.take("x", 0.0)) is not None:
        assert queue.take("x", 0.0) is None
        given_out.append((lease.cell_id, lease.repeat, lease.attempt))
        queue.finish(lease.lease_id)
    assert given_out == [("x-a", 0, 1), ("x-b", 0, 1), ("x-a", 1, 1), ("x-b", 1, 1)]
    assert queue.working == {"y"}
    assert not queue.is_done


def test_what_the_store_has_is_not_given_out_again() -> None:
    queue = TrialQueue({"x": ITEMS}, Finished([("a", 0), ("b", 1)]))
    found = []
    while (lease := queue.take("x", 0.0)) is not None:
        found.append((lease.cell_id, lease.repeat))
        queue.finish(lease.lease_id)
    assert found == [("b", 0), ("a", 1)]
    assert queue.is_done
    assert len(queue.finished) == 4


def test_a_cell_that_has_enough_is_left_out() -> None:
    enough: set[str] = set()
    queue = TrialQueue({"x": ITEMS}, Finished(), enough.__contains__)
    first = queue.take("x", 0.0)
    assert first is not None
    queue.finish(first.lease_id)
    enough.add("a")
    rest = []
    while (lease := queue.take("x", 0.0)) is not None:
        rest.append((lease.cell_id, lease.repeat))
        queue.finish(lease.lease_id)
    assert rest == [("b", 0), ("b", 1)]


def test_a_lost_trial_comes_first_with_the_next_attempt_and_its_old_lease_is_void() -> None:
    queue = queue_of("x")
    lost = queue.take("x", 0.0)
    assert lost is not None
    assert queue.lose(lost.lease_id, "killed")
    again = queue.take("x", 0.0)
    assert again is not None
    assert (again.cell_id, again.repeat, again.attempt) == (lost.cell_id, lost.repeat, 2)
    with pytest.raises(StaleLeaseError):
        queue.finish(lost.lease_id)
    queue.finish(again.lease_id)
    assert len(queue.finished) == 1


def test_a_trial_that_loses_three_workers_is_given_up_and_other_losses_do_not_count() -> None:
    queue = queue_of("x", most_losses=3)
    for own, kept in ((True, True), (False, True), (True, True), (True, False)):
        lease = queue.take("x", 0.0)
        assert lease is not None
        assert queue.lose(lease.lease_id, "killed" if own else "the scheduler was lost", own) is kept
    assert queue.losses(lease) == ("killed",) * 3
    assert queue.lease_of("x") == lease
    queue.finish(lease.lease_id)
    following = queue.take("x", 0.0)
    assert following is not None
    assert (following.cell_id, following.attempt) == ("x-b", 1)


def test_a_lease_ends_when_nothing_is_heard_and_is_told_once() -> None:
    queue = queue_of("x", "y", lease_s=60.0)
    silent, heard = queue.take("x", 0.0), queue.take("y", 0.0)
    assert silent is not None
    assert heard is not None
    queue.renew(heard.lease_id, 50.0)
    assert queue.silent(59.9) == []
    assert queue.silent(60.0) == [silent]
    assert queue.silent(61.0) == []
    queue.lose(silent.lease_id, "silent")
    queue.renew(silent.lease_id, 70.0)  # it is heard too late
    assert queue.silent(109.9) == []
    assert queue.silent(110.0) == [heard]


def test_leases_of_another_queue_are_void() -> None:
    """After the coordinator's death, what was given out before it comes back under a lease that nobody has."""
    before, after = queue_of("x"), queue_of("x")
    lease = before.take("x", 0.0)
    assert after.take("x", 0.0) is not None
    assert lease is not None
    with pytest.raises(StaleLeaseError):
        after.finish(lease.lease_id)


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(["take", "finish", "lose", "shared", "late"]))))
def test_whatever_happens_each_trial_is_finished_once(steps: list[tuple[str, str]]) -> None:
    queue = queue_of("x", "y", "z", most_losses=10**6)
    finished: Counter[tuple[str, int]] = Counter()
    old: list[str] = []

    def finish(device: str) -> None:
        lease = queue.lease_of(device)
        if lease is not None:
            queue.finish(lease.lease_id)
            finished[lease.cell_id, lease.repeat] += 1
            old.append(lease.lease_id)

    for device, step in steps:
        lease = queue.lease_of(device)
        if step == "take":
            queue.take(device, 0.0)
        elif step == "finish":
            finish(device)
        elif step in ("lose", "shared") and lease is not None:
            queue.lose(lease.lease_id, "gone", step == "lose")
            old.append(lease.lease_id)
        elif step == "late" and old:
            with pytest.raises(StaleLeaseError):
                queue.finish(old[-1])
    for device in "xyz":
        finish(device)
        while queue.take(device, 0.0) is not None:
            finish(device)
    assert queue.is_done
    assert finished == Counter({(f"{device}-{cell}", repeat): 1 for device in "xyz" for cell, repeat in ITEMS})
