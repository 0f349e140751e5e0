"""Two readings of the same joules: what is said where they cannot both be right, and that nothing adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from rich.console import Console

from devices.base import Channel
from devices.meters.same_counter import shared_counter
from harness.catalog import METERS
from harness.device_building import build_device
from harness.device_specs import HostSpec
from harness.opening import open_run
from harness.plan import build_plan
from harness.progress import PlainProgress
from harness.runner import Runner
from harness.schema import TrialProtocol
from harness.session import run_trial
from results.records import PowerTrace
from results.report.html import html_text
from results.runs import RunData
from results.store import Store
from results.summary import summary
from results.tables import energy
from results.trials import Trial
from tests.fakes.machine import IDLE_W, FakeBench, FakeMachine, FakeMeter
from tests.plans import FAST, raw_plan

BARE = TrialProtocol(warmup=0, repeats=1, idle_s=0)
UNCERTAIN = 0.02
"""Gain error of the meters here, one sigma: two of them may differ by 2 sqrt(2) x 2 % = 5.7 %."""


class Reads(FakeMeter):
    """The machine's counter, times `gain`; with `beside_w` also power samples of its machine, as NVML has them."""

    def __init__(self, machine: FakeMachine, name: str, gain: float = 1.0, beside_w: float | None = None) -> None:
        super().__init__(machine, name)
        self._gain, self._beside_w = gain, beside_w

    def stop(self) -> Sequence[PowerTrace]:
        [counted] = super().stop()
        counted = replace(counted, values=self._gain * counted.values, relative_accuracy=UNCERTAIN)
        if self._beside_w is None:
            return [counted]
        beside = replace(
            counted,
            component="machine power",
            kind="power",
            method="integrated power",
            values=0 * counted.values + self._beside_w,
            sample_interval_s=0.15,
            additive=False,
        )
        return [counted, beside]


def bench_with(*meters: Reads) -> FakeBench:
    bench = FakeBench()
    for meter in meters:
        meter._machine = bench.machine
    bench.fake_device.meters = list(meters)
    return bench


def trial_with(*meters: Reads) -> Trial:
    return run_trial(bench_with(*meters).arm_of("c"), BARE, repeat=0)[0]


def stored(bench: FakeBench, folder: Path, repeats: int) -> RunData:
    plan = build_plan(raw_plan(protocol=FAST | {"repeats": repeats}))
    with open_run(plan, folder, False, bench) as store:
        Runner(plan, store, bench, PlainProgress(Console(quiet=True))).run()
    with Store.view(folder) as store:
        # The fake engine has no experts, and the page is made after the store was closed.
        return replace(store.data(), load_heat=lambda _: None)


@pytest.mark.parametrize(("gain", "disagree"), [(1.05, False), (1.07, True), (0.9, True)])
def test_a_meter_and_its_check_disagree_beyond_two_uncertainties_of_their_difference(
    gain: float, disagree: bool
) -> None:
    trial = trial_with(Reads(FakeMachine(), "rapl"), Reads(FakeMachine(), "perf", gain))
    assert len(trial.disagreements) == int(disagree)
    if disagree:
        [said] = trial.disagreements
        # The two windows of 1.75 s: 2 x 0.5 s at 20 W and 0.75 s at 10 W.
        assert said.startswith(f"cpu: rapl 27.5 J, perf {27.5 * gain:.4g} J in 1.75 s")
        assert "both read RAPL's counters: they DISAGREE" in said


class ReadsGpus(Reads):
    """Each GPU draws 1 W more than the one before, by the last digit of its id; None: it is not told."""

    def __init__(self, name: str, ids: Sequence[str | None]) -> None:
        super().__init__(FakeMachine(), name)
        self.channels = tuple(
            Channel(f"gpu{i}", "counter", computes="gpu", hardware_id=own) for i, own in enumerate(ids)
        )

    def stop(self) -> Sequence[PowerTrace]:
        [counted] = super().stop()
        return [
            replace(counted, component=c.component, values=counted.values * (1 + int((c.hardware_id or "0")[-1])))
            for c in self.channels
        ]


@pytest.mark.parametrize(
    ("theirs", "compared"),
    [
        (["GPU-1"], "gpu1 of nvml"),
        (["GPU-1", "GPU-0"], "gpu0, gpu1 of nvml"),
        (["GPU-7"], "nothing"),
        ([None], "nothing"),
    ],
)
def test_two_meters_of_gpus_are_compared_by_those_that_both_read(theirs: list[str | None], compared: str) -> None:
    """A mask hides GPUs from one of them, and another order gives them other numbers."""
    trial = trial_with(ReadsGpus("nvml", ["GPU-0", "GPU-1"]), ReadsGpus("zeus", theirs))
    assert trial.disagreements == ()
    notes = [note for note in trial.notes if "are compared by" in note]
    is_whole = len(theirs) == 2
    assert len(notes) == (not is_whole)
    assert is_whole or notes[0].startswith(f"nvml and zeus are compared by {compared} of the gpu: gpu0 of nvml")


def test_the_same_gpu_that_is_counted_otherwise_disagrees() -> None:
    one, other = ReadsGpus("nvml", ["GPU-0", "GPU-1"]), ReadsGpus("zeus", ["GPU-1"])
    other._gain = 1.2
    [said] = trial_with(one, other).disagreements
    assert said.startswith("gpu (gpu1 of nvml): nvml 55 J, zeus 66 J")


def test_a_meter_that_sees_more_gpus_is_compared_by_those_of_the_other() -> None:
    assert trial_with(ReadsGpus("nvml", ["GPU-1"]), ReadsGpus("zeus", ["GPU-0", "GPU-1"])).disagreements == ()


def test_meters_that_tell_no_hardware_are_compared_whatever_their_parts_are_called() -> None:
    one, other = ReadsGpus("nvml", [None]), ReadsGpus("zeus", [None])
    other.channels = (Channel("card", "counter", computes="gpu"),)
    assert trial_with(one, other).disagreements == ()
    other._gain = 1.2
    [said] = trial_with(one, other).disagreements
    assert said.startswith("gpu: nvml 27.5 J, zeus 33 J")


def test_meters_of_their_own_counters_may_differ() -> None:
    """A server's input holds more than its CPU."""
    assert trial_with(Reads(FakeMachine(), "rapl"), Reads(FakeMachine(), "hwmon", 2.0)).disagreements == ()


def test_a_counter_that_disagrees_with_the_power_beside_it_is_told_in_the_trial_and_in_the_report(
    tmp_path: Path,
) -> None:
    """15.7 W on average, and samples that say 40 W."""
    bench = bench_with(Reads(FakeMachine(), "nvml", beside_w=10 * IDLE_W))
    data = stored(bench, tmp_path / "run", repeats=3)
    for trial in data.trials:
        [said] = trial.disagreements
        assert said.startswith("machine: counter 27.5 J, power samples 70 J in 1.75 s")
    warning = "in 3 of 3 trials two readings of the same joules disagree: machine: counter 27.5 J"
    assert warning in html_text(data)


def test_no_table_adds_a_meter_and_its_check(tmp_path: Path) -> None:
    bench = bench_with(Reads(FakeMachine(), "rapl"), Reads(FakeMachine(), "perf", 1.01))
    data = stored(bench, tmp_path / "run", repeats=1)
    table = energy(data)
    whole = table[(table["metric"] == "energy") & (table["phase"] == "all")]
    assert dict(zip(whole["meter"], whole["mean"], strict=True)) == pytest.approx({"rapl": 27.5, "perf": 27.5 * 1.01})
    # The wide table shows the first, which is the one that the plan names under meters.
    n_tokens = 5 + 8
    [row] = summary(data).to_dict("records")
    assert row["energy_meter"] == "rapl"
    assert row["all_j_per_token"] == pytest.approx(27.5 / n_tokens)


def test_meters_and_checks_of_a_plan_run_in_this_order() -> None:
    spec = HostSpec(name="host", meters=("perf",), cross_check=("rapl",))
    host = build_device(spec, TrialProtocol(), FakeMachine(), lambda device, reason, left_s: None)
    assert host._meter_names == ("perf", "rapl")  # type: ignore[attr-defined]


def test_every_pair_that_shares_a_counter_is_of_meters_that_there_are() -> None:
    pairs = {frozenset(pair) for pair in combinations(METERS, 2) if shared_counter(*pair)}
    assert frozenset({"rapl", "perf"}) in pairs
    assert frozenset({"nvml", "zeus"}) in pairs
    assert shared_counter("rapl", "nvml") is None
    assert shared_counter("battery", "rapl") is None
