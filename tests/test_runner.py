"""Order, repeats, retries and what becomes of failures, over a fake machine and a real store."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from devices.base import DeviceError, MeterUnavailableError, TransientDeviceError
from devices.gates import Gates, wait_until_ready
from engines.errors import EngineError
from harness.device_specs import AndroidSpec
from harness.matrix import CellPlan
from harness.opening import DeviceNotReadyError, open_run
from harness.plan import Plan, build_plan
from harness.plan_differences import plan_differences
from harness.runner import Runner, RunOutcome, trial_order
from results.environments import Environment
from results.ratios import ratio_of_means
from results.runs import OWN_CODE, Input
from results.store import Store, StoreError
from results.trials import Trial
from tests.fakes.machine import IDLE_W, FakeBench, FakeDevice
from tests.plans import DROPLESS, FAST, HERE, HOST, M2_ULTRA, NPUMOE, TIERS, raw_plan


class Heard:
    """A `Progress` that remembers."""

    def __init__(self) -> None:
        self.expected: tuple[int, int] = (0, 0)
        self.finished: list[Trial] = []
        self.left_out: list[int] = []
        self.waited_for: list[str] = []
        self.repeated: list[str] = []
        self.warnings: list[str] = []

    def begin(self, n_trials: int, n_done: int) -> None:
        self.expected = (n_trials, n_done)

    def preparing(self, cell: str) -> None:
        """Not looked at."""

    def waiting(self, device: str, reason: str, left_s: float) -> None:
        self.waited_for.append(reason)

    def trial_started(self, cell: str, repeat: int) -> None:
        """Not looked at."""

    def trial_repeated(self, cell: str, repeat: int, reason: str) -> None:
        self.repeated.append(reason)

    def trial_finished(self, cell: str, trial: Trial) -> None:
        self.finished.append(trial)

    def cell_finished(self, cell: str, n_trials_left_out: int) -> None:
        self.left_out.append(n_trials_left_out)

    def trials_added(self, n: int) -> None:
        """Not looked at."""

    def warned(self, line: str) -> None:
        self.warnings.append(line)


def planned(protocol: dict[str, Any] | None = None, **changes: Any) -> Plan:
    return build_plan(raw_plan(engine=[DROPLESS, TIERS], protocol=FAST | (protocol or {}), **changes))


def run(plan: Plan, bench: FakeBench, folder: Path, resume: bool = False) -> tuple[RunOutcome, Heard, list[Trial]]:
    heard = Heard()
    with open_run(plan, folder, resume, bench) as store:
        outcome = Runner(plan, store, bench, heard).run()
        return outcome, heard, list(store.trials())


def order(plan: Plan) -> list[tuple[str, int]]:
    return [(c.cell.engine, repeat) for c, repeat in trial_order(plan)]


# --- order -----------------------------------------------------------------------------------------------------------


def test_interleaved_takes_every_cell_once_and_then_again_backwards(tmp_path: Path) -> None:
    plan = planned({"repeats": 3})
    rounds = (("dropless", "tiers"), ("tiers", "dropless"), ("dropless", "tiers"))
    expected = [(engine, repeat) for repeat, engines in enumerate(rounds) for engine in engines]
    assert order(plan) == expected
    bench = FakeBench()
    _, _, trials = run(plan, bench, tmp_path / "run")
    assert bench.order == [engine for engine, _ in expected]
    assert [t.repeat for t in trials] == [repeat for _, repeat in expected]


def test_a_machine_that_gets_slower_with_each_trial_does_so_for_all_arms_alike() -> None:
    engines = [DROPLESS | {"name": f"e{i}"} for i in range(5)]
    found = order(build_plan(raw_plan(engine=engines, protocol=FAST | {"repeats": 4})))
    places = {name: [i for i, (engine, _) in enumerate(found) if engine == name] for name in ("e0", "e2", "e4")}
    assert {sum(own) for own in places.values()} == {4 * sum(range(20)) / 20}
    assert [repeat for _, repeat in found] == [repeat for repeat in range(4) for _ in range(5)]


@pytest.mark.parametrize("kind", ["interleaved", "shuffled", "sequential"])
def test_the_page_says_how_often_drift_tells_arms_apart_that_are_alike(kind: str) -> None:
    """Of 1200 ratios a share is known to 1 %; those of one run share their baseline."""
    page = (Path(__file__).parents[1] / "docs" / "figures.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{kind}`")]
    rng, told = np.random.default_rng(20261201), [int(cell) / 100 for cell in row.strip("| ").split("|")[1:]]
    engines, apart = [DROPLESS | {"name": f"e{i}"} for i in range(5)], [0, 0]
    orders = [
        order(build_plan(raw_plan(engine=engines, protocol=FAST | {"repeats": 5, "order": kind, "seed": seed})))
        for seed in range(20 if kind == "shuffled" else 1)
    ]
    for n in range(300):
        wandering = rng.normal(0.0, 0.03, 25)
        for i in range(1, 25):
            wandering[i] = 0.9 * wandering[i - 1] + (1 - 0.9**2) ** 0.5 * wandering[i]
        for column, drift in enumerate((np.linspace(0.0, 0.1, 25), wandering)):
            took_s: dict[str, list[float]] = {f"e{i}": [0.0] * 5 for i in range(5)}
            for (name, repeat), own in zip(orders[n % len(orders)], drift + rng.normal(0.0, 0.005, 25), strict=True):
                took_s[name][repeat] = math.exp(own)
            apart[column] += sum(ratio_of_means([(took_s[f"e{i}"], took_s["e0"])]).is_clear for i in range(1, 5))
    assert [n / 1200 for n in apart] == pytest.approx(told, abs=0.04)


def test_sequential_finishes_one_cell_before_the_next() -> None:
    plan = planned({"repeats": 3, "order": "sequential"})
    assert order(plan) == [(engine, repeat) for engine in ("dropless", "tiers") for repeat in range(3)]


def test_shuffled_permutes_every_round_by_the_seed() -> None:
    engines = [DROPLESS | {"name": f"e{i}"} for i in range(5)]
    plan = build_plan(raw_plan(engine=engines, protocol=FAST | {"repeats": 6, "order": "shuffled", "seed": 1}))
    found = order(plan)
    assert [repeat for _, repeat in found] == [r for r in range(6) for _ in range(5)]
    rounds = [[e for e, r in found if r == repeat] for repeat in range(6)]
    assert all(sorted(own) == [f"e{i}" for i in range(5)] for own in rounds)
    assert len({tuple(own) for own in rounds}) > 1
    assert order(plan) == found
    other = build_plan(raw_plan(engine=engines, protocol=FAST | {"repeats": 6, "order": "shuffled", "seed": 2}))
    assert order(other) != found


@pytest.mark.parametrize("protocol", [{"repeats": 4}, {"stop": {"min_repeats": 2, "max_repeats": 9}}])
@pytest.mark.parametrize("kind", ["interleaved", "sequential", "shuffled"])
def test_a_modelled_device_runs_one_trial_a_cell(kind: str, protocol: dict[str, Any]) -> None:
    plan = build_plan(
        raw_plan(engine=[DROPLESS | HERE, NPUMOE], device=[HOST, M2_ULTRA], protocol=FAST | {"order": kind} | protocol)
    )
    most = plan.protocol.stop.max_repeats if plan.protocol.stop else plan.protocol.repeats
    assert Counter(engine for engine, _ in order(plan)) == {"dropless": most, "npumoe": 1}


# --- repeats ---------------------------------------------------------------------------------------------------------


def test_a_cell_stops_when_its_interval_is_narrow_enough(tmp_path: Path) -> None:
    # The fake machine takes the same time for ever: the least number of repeats is enough.
    plan = planned({"stop": {"min_repeats": 3, "max_repeats": 10}})
    outcome, heard, trials = run(plan, FakeBench(), tmp_path / "run")
    assert outcome == RunOutcome(n_ok=6, n_failed=0)
    assert heard.expected == (20, 0)
    assert heard.left_out == [7, 7]
    assert Counter(t.cell_id for t in trials) == {c.cell.cell_id: 3 for c in plan.cells}


def test_a_cell_that_never_narrows_stops_at_the_most(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.engine.drift_s = 1.0
    plan = planned({"stop": {"min_repeats": 2, "max_repeats": 4, "relative_width": 0.01}})
    outcome, heard, _ = run(plan, bench, tmp_path / "run")
    assert outcome.n_ok == 8
    assert heard.left_out == []


def test_what_is_enough_when_resuming_is_not_waited_for(tmp_path: Path) -> None:
    plan = planned({"stop": {"min_repeats": 3, "max_repeats": 10}})
    run(plan, FakeBench(), tmp_path / "run")
    outcome, heard, _ = run(plan, FakeBench(), tmp_path / "run", resume=True)
    assert heard.expected == (6, 6)
    assert heard.finished == []
    assert outcome.n_ok == 6


def test_cooldown_passes_on_the_clock_between_trials(tmp_path: Path) -> None:
    bench = FakeBench()
    _, _, trials = run(planned({"cooldown_s": 7.0}), bench, tmp_path / "run")
    first, second = trials
    assert first.window_end_s is not None
    assert second.window_start_s == first.window_end_s + 7.0
    assert bench.machine.energy_j > 7 * IDLE_W


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_transient_failure_that_passes_is_retried_and_counted(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.engine.errors = [TransientDeviceError("link"), TransientDeviceError("link")]
    outcome, heard, trials = run(planned({"retries": 2}), bench, tmp_path / "run")
    assert outcome == RunOutcome(n_ok=2, n_failed=0)
    assert [t.attempts for t in trials] == [3, 1]
    assert heard.repeated == ["link", "link"]


def test_a_transient_failure_that_stays_stands_as_failed(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.engine.errors = [TransientDeviceError("link dropped")] * 3
    outcome, _, trials = run(planned({"retries": 2}), bench, tmp_path / "run")
    assert outcome == RunOutcome(n_ok=1, n_failed=1, n_lost=1)
    failed, ok = trials
    assert failed.failure is not None
    assert (failed.failure.kind, failed.failure.error) == ("transient", "link dropped")
    assert failed.attempts == 3
    assert (ok.status, ok.attempts) == ("ok", 1)


def test_without_retries_a_transient_failure_stands_at_once(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.engine.errors = [TransientDeviceError("link")]
    _, _, trials = run(planned({"retries": 0}), bench, tmp_path / "run")
    assert [(t.status, t.attempts) for t in trials] == [("failed", 1), ("ok", 1)]


@pytest.mark.parametrize("error", [EngineError("too long"), DeviceError("gone"), MeterUnavailableError("no meter")])
def test_a_stable_failure_is_not_retried(tmp_path: Path, error: Exception) -> None:
    bench = FakeBench()
    bench.engine.errors = [error]
    _, _, trials = run(planned({"retries": 5}), bench, tmp_path / "run")
    assert [(t.status, t.attempts) for t in trials] == [("failed", 1), ("ok", 1)]
    assert trials[0].failure is not None
    assert (trials[0].failure.kind, trials[0].failure.error) == ("stable", str(error))


def test_an_unexpected_exception_becomes_a_failed_trial_with_its_traceback(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.fake_workload.score_error = ZeroDivisionError("in the metric")
    outcome, _, trials = run(planned({"repeats": 2}), bench, tmp_path / "run")
    assert outcome == RunOutcome(n_ok=0, n_failed=4)
    for trial in trials:
        assert trial.failure is not None
        assert trial.failure.error == "ZeroDivisionError: in the metric"
        assert "in score" in trial.failure.traceback
        assert trial.completions == ()
    assert not bench.meter.running


def test_a_failed_trial_of_a_modelled_device_says_modelled(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.engine.errors = [EngineError("no")]
    plan = build_plan(raw_plan(engine=[NPUMOE], device=[M2_ULTRA]))
    _, _, trials = run(plan, bench, tmp_path / "run")
    assert [t.time_method for t in trials] == ["modelled"]


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    plan = planned({"repeats": 2})
    bench = FakeBench()
    bench.engine.errors = [None] * 4 + [KeyboardInterrupt()]  # two trials of two requests, then Ctrl-C
    with pytest.raises(KeyboardInterrupt):
        run(plan, bench, tmp_path / "run")
    with Store.view(tmp_path / "run") as store:
        before = store.trials()
        (told,) = store.data().remarks
    assert len(before) == 2
    assert told.startswith("the run has not come to its end: 2 of at most 4 trials are there.")
    outcome, heard, after = run(plan, FakeBench(), tmp_path / "run", resume=True)
    with Store.view(tmp_path / "run") as store:
        assert store.data().remarks == ()
    assert heard.expected == (4, 2)
    assert outcome.n_ok == 4
    assert tuple(after[:2]) == before
    assert sorted((t.cell_id, t.repeat) for t in after) == sorted(
        (c.cell.cell_id, r) for c in plan.cells for r in (0, 1)
    )


# --- a device that is waited for -------------------------------------------------------------------------------------


class GatedDevice(FakeDevice):
    """Waits 600 s on the machine's clock for what is not there. not_ready: the looks that find it not ready, from 1."""

    REASON = "the battery is charging"
    WAIT_S = 600.0

    def __init__(self, bench: FakeBench, not_ready: set[int]) -> None:
        super().__init__(bench.machine, bench.fake_device.meters)
        self.looks: list[int] = []
        """How many requests had been answered at each look."""
        self._bench = bench
        self._not_ready = not_ready

    def why_not_ready(self) -> str | None:
        self.looks.append(len(self._bench.engine.answered))
        return self.REASON if len(self.looks) in self._not_ready else None

    def wait_until_ready(self) -> None:
        wait_until_ready("adb:X", self.why_not_ready, Gates(wait_s=self.WAIT_S, look_every_s=600.0), self._machine)


def gated(not_ready: set[int]) -> tuple[FakeBench, GatedDevice]:
    bench = FakeBench()
    device = GatedDevice(bench, not_ready)
    bench.fake_device = device
    return bench, device


def test_a_gated_device_is_waited_for_before_every_trial(tmp_path: Path) -> None:
    bench, device = gated(not_ready=set())
    outcome, _, _ = run(planned({"repeats": 2}), bench, tmp_path / "run")
    assert outcome.n_ok == 4
    assert device.looks == [0, 2, 4, 6]


def test_a_device_that_gets_ready_in_time_is_measured(tmp_path: Path) -> None:
    bench, device = gated(not_ready={1})
    outcome, _, _ = run(planned(), bench, tmp_path / "run")
    assert outcome == RunOutcome(n_ok=2, n_failed=0)
    assert device.looks == [0, 0, 2]


def test_a_device_that_never_gets_ready_is_waited_for_once_and_fails_every_trial_with_the_reason(
    tmp_path: Path,
) -> None:
    bench, _ = gated(not_ready=set(range(1, 100)))
    begun_s = bench.machine.time_s
    outcome, _, trials = run(planned({"repeats": 5}), bench, tmp_path / "run")
    assert outcome == RunOutcome(n_ok=0, n_failed=10, n_lost=10)
    assert bench.machine.time_s - begun_s == GatedDevice.WAIT_S
    reason = "adb:X is not ready, and was not after 600 s of waiting: the battery is charging"
    assert {(t.attempts, t.failure and (t.failure.kind, t.failure.error)) for t in trials} == {(1, ("stable", reason))}


def test_a_device_that_was_given_up_is_measured_again_once_a_look_finds_it_ready(tmp_path: Path) -> None:
    """Trial 1 waits (two looks) and gives up, trial 2 looks once, trial 3 finds it ready, trial 4 may wait again."""
    bench, device = gated(not_ready={1, 2, 3, 5})
    outcome, _, trials = run(planned({"repeats": 2}), bench, tmp_path / "run")
    assert outcome == RunOutcome(n_ok=2, n_failed=2, n_lost=2)
    assert [t.status for t in trials] == ["failed", "failed", "ok", "ok"]
    assert device.looks == [0, 0, 0, 0, 2, 2]


# --- the folder ------------------------------------------------------------------------------------------------------


class Unready(FakeBench):
    def device(self, plan: CellPlan) -> FakeDevice:
        raise MeterUnavailableError("no counter here")


def test_a_device_that_is_not_ready_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DeviceNotReadyError, match="no counter here"):
        run(planned(), Unready(), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_ready_at_a_resume_adds_no_failed_trials(tmp_path: Path) -> None:
    plan = planned()
    bench = FakeBench()
    bench.engine.errors = [None, None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        run(plan, bench, tmp_path / "run")
    with pytest.raises(DeviceNotReadyError):
        run(plan, Unready(), tmp_path / "run", resume=True)
    with Store.view(tmp_path / "run") as store:
        assert [t.status for t in store.trials()] == ["ok"]


class Elsewhere(FakeDevice):
    def environment(self) -> Environment:
        return super().environment().model_copy(update={"cpu_model": "another", "os": "a newer kernel"})


def test_a_run_is_not_continued_on_another_machine(tmp_path: Path) -> None:
    run(planned(), FakeBench(), tmp_path / "run")
    bench = FakeBench()
    bench.fake_device = Elsewhere(bench.machine, bench.fake_device.meters)
    with pytest.raises(StoreError, match=r"another machine or software \(cpu_model fake -> another\)"):
        run(planned(), bench, tmp_path / "run", resume=True)
    run(planned(), FakeBench(), tmp_path / "run", resume=True)  # the lock was given back


class WithGpu(FakeDevice):
    gpus: tuple[str, ...] | None = ("RTX 4090",)
    gpu_driver = "550.54"

    def environment(self) -> Environment:
        return super().environment().model_copy(update={"gpus": self.gpus, "gpu_driver": self.gpu_driver})


def test_a_run_is_not_continued_on_another_gpu_or_with_another_driver_of_it(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.fake_device = device = WithGpu(bench.machine, bench.fake_device.meters)
    run(planned(), bench, tmp_path / "run")
    device.gpus = ("RTX 5090",)
    with pytest.raises(StoreError, match=r"another machine or software \(GPU RTX 4090 -> RTX 5090\)"):
        run(planned(), bench, tmp_path / "run", resume=True)
    device.gpus, device.gpu_driver = ("RTX 4090",), "580.65"
    with pytest.raises(StoreError, match=r"another machine or software \(GPU driver 550.54 -> 580.65\)"):
        run(planned(), bench, tmp_path / "run", resume=True)
    device.gpu_driver = "550.54"
    run(planned(), bench, tmp_path / "run", resume=True)


class OfOneModel(FakeDevice):
    unit: str | None = "8c2f01d5b7aa"

    def environment(self) -> Environment:
        return super().environment().model_copy(update={"unit": self.unit})


def test_one_phone_is_not_measured_under_two_names(tmp_path: Path) -> None:
    """By USB and by its address: the tables had two devices, and one phone was both."""
    plan, bench = planned(), FakeBench()
    bench.fake_device = phone = OfOneModel(bench.machine, bench.fake_device.meters)
    names = ("adb:R58M42ABCDE", "adb:192.168.1.7:5555")
    cells = tuple(
        replace(c, device=AndroidSpec(name=name), cell=c.cell.model_copy(update={"device": name}))
        for c, name in zip(plan.cells, names, strict=True)
    )
    twice = replace(plan, cells=cells)
    with pytest.raises(DeviceNotReadyError, match=re.escape(f"{names[0]} and {names[1]} are one phone")):
        run(twice, bench, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    phone.unit = None
    open_run(twice, tmp_path / "run", False, bench).close()


def test_a_run_is_not_continued_on_another_phone_of_the_same_model(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.fake_device = phone = OfOneModel(bench.machine, bench.fake_device.meters)
    run(planned(), bench, tmp_path / "run")
    phone.unit = "04d1c3e99b6f"
    with pytest.raises(StoreError, match=r"begun on another phone .*was 8c2f01d5b7aa, and is 04d1c3e99b6f now"):
        run(planned(), bench, tmp_path / "run", resume=True)
    phone.unit = None  # runs of before, and phones that do not tell it
    run(planned(), bench, tmp_path / "run", resume=True)


def test_a_run_of_another_plan_is_not_continued(tmp_path: Path) -> None:
    run(planned(), FakeBench(), tmp_path / "run")
    other = planned({"repeats": 2})
    with pytest.raises(StoreError, match=f"run of another plan .*this plan {other.plan_hash}"):
        run(other, FakeBench(), tmp_path / "run", resume=True)
    with pytest.raises(StoreError, match=r"protocol\.repeats .* -> 2"):
        run(other, FakeBench(), tmp_path / "run", resume=True)


def test_another_plan_is_told_before_a_device_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels were compiled first, for 46 s on a busy machine, to go on with a run that could not be gone on with."""
    run(planned(), FakeBench(), tmp_path / "run")
    monkeypatch.setattr(FakeBench, "environment", lambda *_: pytest.fail("a device was opened"))
    with pytest.raises(StoreError, match="run of another plan"):
        run(planned({"repeats": 2}), FakeBench(), tmp_path / "run", resume=True)


def test_a_run_of_older_defaults_is_told_from_another_plan(tmp_path: Path) -> None:
    plan = planned()
    run(plan, FakeBench(), tmp_path / "run")
    other = replace(plan, protocol=plan.protocol.model_copy(update={"cooldown_s": 0.25}))
    with pytest.raises(StoreError, match="its lines are the same, and the data folder"):
        run(other, FakeBench(), tmp_path / "run", resume=True)
    now = [Input(name=OWN_CODE, value="sha256:other")]
    with Store.view(tmp_path / "run") as store:
        found = plan_differences(store.info(), store.cells(), other, now)
    assert "another version of joulebench began it" in found


def test_another_build_of_a_server_is_told_and_not_another_data_folder(tmp_path: Path) -> None:
    """Weights behind a server were replaced, and the refusal named the data folder, which was the same."""

    def served(weights: str) -> Plan:
        plan = planned()
        build = {"build": f"server 1.0, model sha256 {weights}; model m"}
        arm = plan.cells[0].cell.model_copy(update={"cell_id": weights, "engine_parameters": build})
        return replace(plan, cells=(replace(plan.cells[0], cell=arm), *plan.cells[1:]))

    run(served("1f0e"), FakeBench(), tmp_path / "run")
    told = "its lines are the same, and dropless: build model sha256 1f0e → model sha256 77ab; name another folder"
    with pytest.raises(StoreError, match=told):
        run(served("77ab"), FakeBench(), tmp_path / "run", resume=True)


def test_resume_without_a_run_says_so_before_a_device_is_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"--resume: .*run holds no run .*leave --resume out to begin a run"):
        run(planned(), Unready(), tmp_path / "run", resume=True)
    assert list(tmp_path.iterdir()) == []
