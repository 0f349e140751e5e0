"""One trial: one window, the same requests for latency, energy and accuracy, and meters that are never left running."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from devices.base import DeviceError, TransientDeviceError
from devices.cpu_cycles import CpuCycles
from devices.meters.replay import ReplayMeter
from engines.errors import EngineError
from harness.schema import TrialProtocol
from harness.session import PreparedCell, run_trial
from results.cells import answering, usable
from results.derivation import energies_of
from results.environments import PhaseThreads, Road
from results.metrics import AT_ONCE, energy_observations, latency_observations
from results.records import EnergyReading, Method
from results.store import Store
from results.trace_files import IDLE_AFTER, IDLE_BEFORE, WINDOW, raw_part
from results.trials import Trial
from tests.conftest import FinishedRun
from tests.fakes.machine import (
    DECODE_W,
    IDLE_W,
    PREFILL_S,
    PREFILL_W,
    TOKEN_S,
    FakeBench,
    FakeDevice,
    FakeEngine,
    FakeMachine,
    FakeWorkload,
    fake_requests,
)
from workloads.base import WorkloadError

BARE = TrialProtocol(warmup=0, repeats=1, idle_s=0)
N_DECODED = (5 - 1) + (3 - 1)
"""Tokens after the first, over both requests."""
WINDOW_S = 2 * PREFILL_S + N_DECODED * TOKEN_S


def energy(trial: Trial, phase: str, component: str = "total") -> EnergyReading:
    (found,) = [r for r in trial.energy if (r.phase, r.component) == (phase, component)]
    return found


# --- the window ------------------------------------------------------------------------------------------------------


def test_latency_energy_and_scores_are_of_the_same_requests() -> None:
    bench = FakeBench()
    trial, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    asked = [r.request_id for r in fake_requests()]
    assert [c.request_id for c in trial.completions] == asked
    assert [r for r, _ in bench.engine.answered] == asked
    assert [s.sample_id for s in trial.scores] == [r.sample_id for r in fake_requests()]
    assert [s.value for s in trial.scores] == [1.0, 1.0]
    assert trial.data_source == "sample"
    assert trial.notes == ("two items",)
    assert (trial.prefill_tokens, trial.decode_tokens) == (5, N_DECODED)


def test_tokens_that_come_with_the_first_one_are_none_of_decoding() -> None:
    """A server's first chunk may bring several: 2 of 5 and of 3 here, so that 3 + 1 tokens are decoded behind them."""
    bench = FakeBench()
    bench.engine.n_first = 2
    trial, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert trial.decode_tokens == 3 + 1
    assert [c.tpot_s for c in trial.completions] == pytest.approx([TOKEN_S] * 2)
    assert [c.itl_s for c in trial.completions] == [pytest.approx([TOKEN_S] * 3), pytest.approx([TOKEN_S])]
    rates = {(o.metric, o.phase): o.value for o in latency_observations(trial)}
    assert rates["throughput", "decode"] == pytest.approx(1 / TOKEN_S)
    joules = {(o.metric, o.phase): o.value for o in energy_observations(trial)}
    assert joules["energy_per_token", "decode"] == pytest.approx(TOKEN_S * DECODE_W)


def test_an_answer_in_one_piece_has_no_time_per_token_and_says_why() -> None:
    bench = FakeBench()
    bench.engine.n_first = 5
    trial, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    found = {o.metric: o for o in latency_observations(trial) if o.phase == "decode"}
    assert {(o.value, o.reason) for name, o in found.items() if name != "throughput"} == {(None, AT_ONCE)}
    assert (found["throughput"].value, found["throughput"].reason) == (None, "no decode tokens in this trial")
    decoding = [o for o in energy_observations(trial) if o.phase == "decode"]
    assert [o.value for o in decoding if "per_token" in o.metric] == [None, None]


def test_the_energy_of_each_phase_has_its_closed_form() -> None:
    trial, _ = run_trial(FakeBench().arm_of("c"), BARE, repeat=0)
    prefill_j, decode_j = 2 * PREFILL_S * PREFILL_W, N_DECODED * TOKEN_S * DECODE_W
    assert energy(trial, "prefill").energy_j == pytest.approx(prefill_j, rel=1e-12)
    assert energy(trial, "decode").energy_j == pytest.approx(decode_j, rel=1e-12)
    assert energy(trial, "all").energy_j == pytest.approx(prefill_j + decode_j, rel=1e-12)
    assert energy(trial, "all").duration_s == WINDOW_S
    assert trial.window_end_s is not None
    assert trial.window_start_s is not None
    assert trial.window_end_s - trial.window_start_s == WINDOW_S


def test_warm_up_is_outside_of_the_window() -> None:
    bench = FakeBench()
    trial, traces = run_trial(bench.arm_of("c"), BARE.model_copy(update={"warmup": 2}), repeat=0)
    assert bench.engine.answered == [("a#0", False), ("b#0", False), ("a#0", True), ("b#0", True)]
    assert trial.counters is not None
    assert trial.counters.routed_pairs == 20  # ten a call, of two calls
    (trace,) = traces[WINDOW]
    assert trace.times_s[0] == trial.window_start_s
    assert trace.times_s[-1] == trial.window_end_s
    assert trace.values[-1] - trace.values[0] == energy(trial, "all").energy_j


def test_the_engine_forgets_between_warm_up_and_window() -> None:
    bench = FakeBench()
    for repeat in range(2):
        run_trial(bench.arm_of("c"), BARE.model_copy(update={"warmup": 1}), repeat)
    # One request of warm-up and two in the window, twice.
    assert bench.engine.resets == [1, 4]


def test_warm_up_asks_no_more_than_there_is() -> None:
    bench = FakeBench()
    run_trial(bench.arm_of("c"), BARE.model_copy(update={"warmup": 9}), repeat=0)
    assert len(bench.engine.answered) == 4


def test_counters_of_a_trial_that_failed_do_not_enter_the_next() -> None:
    bench = FakeBench()
    bench.engine.errors = [None, EngineError("no")]
    with pytest.raises(EngineError):
        run_trial(bench.arm_of("c"), BARE, repeat=0)
    trial, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert trial.counters is not None
    assert trial.counters.routed_pairs == 20


def test_an_unscored_workload_has_no_scores() -> None:
    trial, _ = run_trial(FakeBench(scored=False).arm_of("c"), BARE, repeat=0)
    assert trial.scores == ()


def test_what_was_measured_stands_where_it_cannot_be_scored() -> None:
    bench = FakeBench()
    scored, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    bench.fake_workload.score_error = WorkloadError("a#0: log-likelihood nan; try wider weights")
    trial, traces = run_trial(bench.arm_of("c"), BARE, repeat=1)
    assert (trial.status, trial.failure, trial.scores) == ("ok", None, ())
    assert trial.notes == ("two items", "not scored: a#0: log-likelihood nan; try wider weights")
    assert [c.e2e_s for c in trial.completions] == [c.e2e_s for c in scored.completions]
    assert energy(trial, "all").energy_j == pytest.approx(2 * PREFILL_S * PREFILL_W + N_DECODED * TOKEN_S * DECODE_W)
    assert len(traces[WINDOW]) == 1


def test_the_engine_must_run_on_the_device_that_is_measured() -> None:
    bench = FakeBench()
    bench.engine.device = "model:m2-ultra"
    with pytest.raises(DeviceError, match="meters of host cannot measure an engine on model:m2-ultra"):
        run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert bench.engine.answered == []


# --- idle and net ----------------------------------------------------------------------------------------------------


def test_net_energy_is_above_the_idle_before_and_after() -> None:
    trial, traces = run_trial(FakeBench().arm_of("c"), BARE.model_copy(update={"idle_s": 2.0}), repeat=0)
    (idle,) = trial.idle
    assert [idle.before_w, idle.after_w] == pytest.approx([IDLE_W, IDLE_W])
    expected_j = 2 * PREFILL_S * (PREFILL_W - IDLE_W) + N_DECODED * TOKEN_S * (DECODE_W - IDLE_W)
    assert energy(trial, "all").net_energy_j == pytest.approx(expected_j, rel=1e-12)
    assert traces[IDLE_BEFORE][0].times_s[-1] <= trial.window_start_s
    assert traces[IDLE_AFTER][0].times_s[0] >= trial.window_end_s
    for part in (IDLE_BEFORE, IDLE_AFTER):
        assert traces[part][0].times_s[-1] - traces[part][0].times_s[0] == 2.0


def test_without_an_idle_baseline_there_is_no_net_energy() -> None:
    trial, traces = run_trial(FakeBench().arm_of("c"), BARE, repeat=0)
    assert trial.idle == ()
    assert traces[IDLE_BEFORE] == traces[IDLE_AFTER] == []
    assert all(r.net_energy_j is None for r in trial.energy)


# --- meters ----------------------------------------------------------------------------------------------------------


def test_meters_are_stopped_when_the_engine_raises() -> None:
    bench = FakeBench(meters=2)
    bench.engine.errors = [None, EngineError("request too long")]
    with pytest.raises(EngineError, match="request too long"):
        run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert [m.running for m in bench.fake_device.meters] == [False, False]
    run_trial(bench.arm_of("c"), BARE, repeat=0)


def test_meters_are_stopped_when_somebody_interrupts() -> None:
    bench = FakeBench()
    bench.engine.errors = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert not bench.meter.running


@pytest.mark.parametrize("idle_s", [0.0, 1.0])
def test_a_meter_that_does_not_start_leaves_none_running(idle_s: float) -> None:
    bench = FakeBench(meters=3)
    bench.fake_device.meters[1].start_error = TransientDeviceError("busy")
    with pytest.raises(TransientDeviceError, match="busy"):
        run_trial(bench.arm_of("c"), BARE.model_copy(update={"idle_s": idle_s}), repeat=0)
    assert not any(m.running for m in bench.fake_device.meters)


@pytest.mark.parametrize("idle_s", [0.0, 1.0])
def test_a_meter_that_fails_at_its_stop_leaves_none_running(idle_s: float) -> None:
    bench = FakeBench(meters=3)
    bench.fake_device.meters[0].stop_error = TransientDeviceError("link dropped")
    with pytest.raises(TransientDeviceError, match="link dropped"):
        run_trial(bench.arm_of("c"), BARE.model_copy(update={"idle_s": idle_s}), repeat=0)
    assert not any(m.running for m in bench.fake_device.meters)


def test_several_meters_are_read_apart() -> None:
    trial, _ = run_trial(FakeBench(meters=2).arm_of("c"), BARE, repeat=0)
    totals = {r.meter: r.energy_j for r in trial.energy if r.phase == "all" and r.component == "total"}
    expected_j = 2 * PREFILL_S * PREFILL_W + N_DECODED * TOKEN_S * DECODE_W
    assert totals == {"fake0": pytest.approx(expected_j), "fake1": pytest.approx(expected_j)}


def test_a_device_without_meters_has_latency_and_no_energy() -> None:
    trial, _ = run_trial(FakeBench(meters=0).arm_of("c"), BARE, repeat=0)
    assert trial.energy == ()
    assert [c.e2e_s for c in trial.completions] == [PREFILL_S + 4 * TOKEN_S, PREFILL_S + 2 * TOKEN_S]


def test_a_replayed_constant_power_gives_power_times_duration(tmp_path: Path) -> None:
    recording = tmp_path / "power.csv"
    recording.write_text("time_s,gpu_w\n" + "".join(f"{i / 8},10\n" for i in range(80)), encoding="utf-8")
    machine = FakeMachine()
    meter = ReplayMeter(recording, machine)
    meter.open()
    device = FakeDevice(machine, [meter])  # type: ignore[list-item]
    engine = FakeEngine(machine, FakeDevice(machine, []))
    trial, _ = run_trial(PreparedCell("c", engine, FakeWorkload(), device, machine, fake_requests()), BARE, repeat=0)
    reading = energy(trial, "all")
    assert reading.energy_j == pytest.approx(10 * WINDOW_S, rel=1e-9)
    assert reading.method == "replayed"
    assert {r.method for r in trial.energy} == {"replayed"}


# --- what taints a trial ---------------------------------------------------------------------------------------------


def test_a_throttled_trial_is_marked() -> None:
    bench = FakeBench()
    bench.fake_device.throttled = True
    assert run_trial(bench.arm_of("c"), BARE, repeat=0)[0].marks == ("throttled",)


class RoadEngine(FakeEngine):
    """Tells what computed, as the reference engine does."""

    def take_road(self) -> Road:
        kept = PhaseThreads(n_threads=2, cores="0-1", found=("0-1",))
        lost = PhaseThreads(n_threads=1, cores="1", found=("1", "0-3"))
        return Road(arithmetic="kernels", n_threads=2, prefill_threads=kept, decoding_threads=lost)


def test_a_trial_that_lost_its_cores_is_marked_and_says_where_it_was() -> None:
    bench = FakeBench()
    arm = replace(bench.arm_of("c"), engine=RoadEngine(bench.machine, bench.fake_device))
    trial = run_trial(arm, BARE, repeat=0)[0]
    assert trial.marks == ("cores not kept",)
    assert trial.notes[-1] == "cores: decoding asked for 1, and its threads were found on 1 and 0-3"
    assert (usable([trial]), answering([trial])) == ([], [trial]), "other cores change times and joules, not answers"
    assert Trial.model_validate_json(trial.model_dump_json()).road == trial.road


@pytest.mark.parametrize(
    ("method", "marks"),
    [("counter", ()), ("integrated power", ()), ("relative gauge", ()), ("battery gauge", ("charging",))],
)
def test_charging_taints_a_battery_gauge_and_no_other_meter(method: Method, marks: tuple[str, ...]) -> None:
    """Nor an app's energy gauge, which does not mind the cable that it needs."""
    bench = FakeBench()
    bench.fake_device.charging = True
    bench.meter.method = method
    assert run_trial(bench.arm_of("c"), BARE, repeat=0)[0].marks == marks


def test_cpu_time_of_others_is_a_share_of_the_machines() -> None:
    bench = FakeBench()
    bench.fake_device.foreign_cores = 0.5
    trial, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert trial.foreign_cpu_share == pytest.approx(0.25)  # half a core of two


class CountingDevice(FakeDevice):
    """2 GHz, while time passes; from a given reading on the counter is lost."""

    def __init__(self, bench: FakeBench, lost_from: int = 9) -> None:
        super().__init__(bench.machine, bench.fake_device.meters)
        self._readings_left = lost_from

    def cpu_cycles(self) -> CpuCycles:
        self._readings_left -= 1
        if self._readings_left < 0:
            return CpuCycles(None, "CPU cycles: a counter could not be read")
        return CpuCycles(int(2e9 * self._machine.time_s), "user mode only")


def test_cpu_cycles_are_those_of_the_window() -> None:
    bench = FakeBench()
    bench.fake_device = CountingDevice(bench)
    trial, _ = run_trial(bench.arm_of("c"), BARE.model_copy(update={"idle_s": 1.0, "warmup": 1}), repeat=0)
    assert trial.cpu_cycles == pytest.approx(2e9 * WINDOW_S)
    assert trial.cpu_cycles_remark == "user mode only"


@pytest.mark.parametrize("lost_from", [0, 1])
def test_cycles_that_could_not_be_read_are_none_with_the_reason(lost_from: int) -> None:
    bench = FakeBench()
    bench.fake_device = CountingDevice(bench, lost_from)
    trial, _ = run_trial(bench.arm_of("c"), BARE, repeat=0)
    assert (trial.cpu_cycles, trial.cpu_cycles_remark) == (None, "CPU cycles: a counter could not be read")


def test_a_device_without_such_a_counter_has_no_cycles_and_says_so() -> None:
    trial, _ = run_trial(FakeBench().arm_of("c"), BARE, repeat=0)
    assert trial.cpu_cycles is None
    assert "does not count them" in str(trial.cpu_cycles_remark)


# --- derivation again ------------------------------------------------------------------------------------------------


def test_every_joule_of_a_stored_run_can_be_derived_again(finished_run: FinishedRun) -> None:
    with Store.view(finished_run.directory) as store:
        trials = store.trials()
        assert len(trials) == 10
        for trial in trials:
            traces = {part: store.traces(trial.trial_id, part) for part in (IDLE_BEFORE, WINDOW, IDLE_AFTER)}
            assert all(traces.values())
            assert trial.window_start_s is not None
            assert trial.window_end_s is not None
            window = (trial.window_start_s, trial.window_end_s)
            readings, baselines = energies_of(trial.completions, traces, window)
            assert tuple(readings) == trial.energy
            assert tuple(baselines) == trial.idle
            before, after = trial.cpu_before, trial.cpu_after
            if trial.time_method == "measured":
                assert before is not None
                assert after is not None
                foreign_s = (after.busy_s - before.busy_s) - (after.ours_s - before.ours_s)
                available_s = after.available_s - before.available_s
                # None within one tick of the kernel's counts.
                share = min(1.0, max(0.0, foreign_s / available_s)) if available_s else None
                assert trial.foreign_cpu_share == (None if share is None else pytest.approx(share))
                (raw,) = store.traces(trial.trial_id, raw_part(WINDOW))
                assert "active_w_per_core" in (raw.basis or "")
            assert energy(trial, "all").energy_j is not None
