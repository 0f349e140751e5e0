"""A coordinator that loses workers and schedulers at awkward moments, on the scale benchmark's devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.fleet.coordinator import Coordinator
from harness.fleet.members import Members
from harness.fleet.messages import Description
from harness.fleet.queue import Finished, TrialQueue
from harness.fleet.road import Came, Down, Event, Lost
from results.runs import SHA256, Input
from results.store import Store
from results.trials import Failure
from tests.benchmarks.fleet_scale import DEVICES, SimulatedWork, SleepingDevices, cells
from tests.run_builders import ENVIRONMENT, failed, run_info

N = 4
OURS = DEVICES[:N]


class LosingDevices(SleepingDevices):
    """Behind the first answer of a trial something is lost, before the coordinator has looked."""

    def __init__(self, lost: Callable[[str], Event]) -> None:
        super().__init__(seed=1)
        self._devices = dict.fromkeys(OURS, 1)
        self._lost = [lost]

    def offer(self, devices: dict[str, int]) -> None:
        self._devices = devices

    def events(self, timeout_s: float) -> Sequence[Event]:
        found = list(super().events(timeout_s))
        answers = [one.key for one in found if isinstance(one, Came) and not one.key.startswith("describe")]
        return [*found, *(self._lost.pop()(key) for key in answers[:1] if self._lost)]


@pytest.mark.parametrize(
    "lost",
    [
        lambda key: Down("the scheduler ended (code -9)"),
        lambda key: Lost(key, "its worker was lost", True),
    ],
    ids=["scheduler", "worker"],
)
def test_what_is_lost_right_behind_an_answer_does_not_end_the_coordinator(
    tmp_path: Path, lost: Callable[[str], Event]
) -> None:
    """The answer was kept, its lease had ended meanwhile, and the coordinator ended with a traceback."""
    info = run_info("lost", environments=dict.fromkeys(OURS, ENVIRONMENT))
    work, devices = SimulatedWork(N), LosingDevices(lost)
    with Store.create(tmp_path / "run", info, cells(N)) as store:
        coordinator = Coordinator(work, Members(OURS, tmp_path, info), devices, lambda line: None, devices.clock_s)
        coordinator.begin(store, TrialQueue(work.orders(), Finished(store.finished())))
        while not coordinator.is_done and devices.now_s < 1000:
            coordinator.step()
        assert coordinator.is_done
        assert (coordinator.n_done, len(store.trials()), coordinator.n_failed) == (N, N, 0)


def test_an_offer_that_leads_to_nothing_is_told_once_and_shown(tmp_path: Path) -> None:
    """A misspelt device, or one that two workers offer, was waited for without a word in the log."""
    info = run_info("offers", environments=dict.fromkeys(OURS, ENVIRONMENT))
    devices, told = LosingDevices(lambda key: Lost(key, "not used", False)), list[str]()
    first = OURS[0]
    devices.offer({first: 2, "hots": 1})
    coordinator = Coordinator(SimulatedWork(N), Members(OURS, tmp_path, info), devices, told.append, devices.clock_s)
    for _ in range(3):
        coordinator.step_before()
    assert told == [
        f"hots: the plan has no such device (it has {', '.join(OURS)}); end this worker",
        f"{first}: 2 workers offer it; end all but one",
    ]
    states = {state.device: state.state for state in coordinator.device_states()}
    assert (states[first], states["hots"]) == ("offered twice", "not in the plan")
    devices.offer({first: 1})
    coordinator.step_before()
    assert {state.device for state in coordinator.device_states()} == set(OURS)


def described(weights: str, threads: str = "2") -> Description:
    """A worker with these weights and this setting."""
    inputs = (Input(name="/models/one", value=f"{SHA256}{weights}"), Input(name="OMP_NUM_THREADS", value=threads))
    return Description(process_id="1", host="lab-1", inputs=inputs)


def test_a_worker_whose_files_are_not_those_of_the_others_is_refused_until_it_has_them(tmp_path: Path) -> None:
    """Settings may differ, and stand in the run with the worker that has them."""
    first, second = OURS[:2]
    members = Members((first, second), tmp_path, None)
    members.described(members[first], described("aa", threads="1"), 0.0)
    members.described(members[second], described("bb"), 0.0)
    assert (members[first].state, members[second].state) == ("idle", "refused")
    assert (members[second].words or "").startswith("its inputs are not those of the other workers (/models/one ")
    members.described(members[second], described("aa"), 20.0)
    assert members[second].state == "idle"
    assert {i.name: i.value for i in members.inputs()} == {
        "/models/one": f"{SHA256}aa",
        f"OMP_NUM_THREADS, worker of {first}": "1",
        f"OMP_NUM_THREADS, worker of {second}": "2",
    }
    # Of a run that goes on, all is as it was.
    info = run_info("goes on", environments={}).model_copy(update={"inputs": members.inputs()})
    members = Members((first, second), tmp_path, info)
    members.described(members[first], described("bb", threads="1"), 0.0)
    members.described(members[second], described("aa", threads="1"), 0.0)
    assert (members[first].words or "").startswith("its inputs are not those of the run (/models/one ")
    assert "OMP_NUM_THREADS" in (members[second].words or "")
    members.described(members[first], described("aa", threads="1"), 20.0)
    assert members[first].state == "idle"


def test_a_phone_that_two_workers_reach_in_two_ways_is_one_device(tmp_path: Path) -> None:
    """By USB and by an address: its figures stood in the tables as those of two phones."""

    def phone(device: str, unit: str | None) -> Description:
        environment = ENVIRONMENT.model_copy(update={"unit": unit})
        return described("aa").model_copy(update={"environments": {device: environment}})

    usb, address = OURS[:2]
    members = Members((usb, address), tmp_path, None)
    members.described(members[usb], phone(usb, "0123"), 0.0)
    members.described(members[address], phone(address, "0123"), 0.0)
    told = f"{usb} and {address} are one phone, reached in two ways; name it once in the plan"
    assert (members[usb].state, members[address].state, members[address].words) == ("idle", "refused", told)
    for n, other in enumerate(("4567", None)):
        members.described(members[address], phone(address, other), 20.0 + n)
        assert members[address].state == "idle"
    members.described(members[usb], phone(usb, None), 30.0)
    assert members[usb].state == "idle", "of units that nobody knows nothing is said"


def test_a_worker_that_alone_had_other_files_before_the_run_began_may_have_new_ones(tmp_path: Path) -> None:
    """It was held against what it had said itself, until the coordinator was started again."""
    members = Members(OURS[:2], tmp_path, None)
    for weights in ("aa", "bb"):
        members.described(members[OURS[0]], described(weights), 0.0)
        assert members[OURS[0]].state == "idle"
        assert members.inputs()[0].value == f"{SHA256}{weights}"


def test_a_fleet_that_goes_on_measures_again_what_a_lost_device_took(tmp_path: Path) -> None:
    """As a phone that was on its charger for longer than it is waited for: all its trials failed, and stayed so."""
    info = run_info("again", environments=dict.fromkeys(OURS, ENVIRONMENT))
    work, devices = SimulatedWork(N), LosingDevices(lambda key: Lost(key, "not used", False))
    devices._lost = []
    first, second, *_ = (c.cell_id for c in cells(N))
    away = Failure(kind="stable", error="the battery is charging", by_device=True, lost=True)
    with Store.create(tmp_path / "run", info, cells(N)) as store:
        store.add_trial(failed(first).model_copy(update={"failure": away}), {})
        store.add_trial(failed(second), {})
        before = store.trials()
        coordinator = Coordinator(work, Members(OURS, tmp_path, info), devices, lambda line: None, devices.clock_s)
        coordinator.begin(store, TrialQueue(work.orders(), Finished(store.finished())))
        assert coordinator.n_done == 1
        while not coordinator.is_done and devices.now_s < 1000:
            coordinator.step()
        assert coordinator.n_done == N
        kept, *new = store.trials()
        assert (kept, store.replaced()) == (before[1], before[:1])
        assert {(t.status, t.sitting) for t in new} == {("ok", 1)}
        assert first in {t.cell_id for t in new}


class AwayFor(SleepingDevices):
    """The first device's second trial loses its worker; nobody offers the device again for `away_s`."""

    def __init__(self, away_s: float) -> None:
        super().__init__(seed=1)
        self._there = dict.fromkeys(OURS[:2], 1)
        self._away_s, self._back_s, self._n_sent = away_s, 0.0, 0

    def devices(self) -> dict[str, int]:
        return {device: n for device, n in self._there.items() if device != OURS[0] or self.now_s >= self._back_s}

    def send(self, key: str, device: str, content: bytes) -> None:
        self._n_sent += device == OURS[0] and not key.startswith("describe")
        if device == OURS[0] and self._n_sent == 2:
            self._n_sent += 1
            self._back_s = self.now_s + self._away_s
            self._at(self.now_s, Lost(key, "its worker was lost", True))
            return
        super().send(key, device, content)


@pytest.mark.parametrize(("away_s", "expected"), [(60.0, [0, 0, 0]), (7200.0, [0, 1, 1])], ids=["minute", "hours"])
def test_a_device_that_was_away_for_long_comes_back_in_another_sitting(
    tmp_path: Path, away_s: float, expected: list[int]
) -> None:
    """Arms of one round that were measured hours apart counted as neighbours, without a word."""
    first, second = OURS[:2]
    info = run_info("away", environments=dict.fromkeys(OURS, ENVIRONMENT))
    n = 2 * len(DEVICES) + 2
    devices, work = AwayFor(away_s), SimulatedWork(n)
    orders = {device: list(items) for device, items in work.orders().items() if device in (first, second)}
    with Store.create(tmp_path / "run", info, cells(n)) as store:
        coordinator = Coordinator(work, Members(OURS[:2], tmp_path, info), devices, lambda line: None, devices.clock_s)
        coordinator.begin(store, TrialQueue(orders, Finished()))
        while not coordinator.is_done and devices.now_s < 20_000:
            coordinator.step()
        sittings = {t.cell_id: t.sitting for t in store.trials()}
        assert [sittings[cell_id] for cell_id, _ in orders[first]] == expected
        assert [sittings[cell_id] for cell_id, _ in orders[second]] == [0, 0, 0]
        # The last trial need not be of the highest one.
        assert store.next_sitting() == max(expected) + 1
