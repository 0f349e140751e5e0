"""A coordinator that loses workers and schedulers at awkward moments, on the scale benchmark's devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.fleet.coordinator import Coordinator
from harness.fleet.members import Members
from harness.fleet.queue import Finished, TrialQueue
from harness.fleet.road import Came, Down, Event, Lost
from results.store import Store
from tests.benchmarks.fleet_scale import DEVICES, SimulatedWork, SleepingDevices, cells
from tests.run_builders import ENVIRONMENT, run_info

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
