"""Other processes on the machine: their share of the CPU is injected, and what the harness makes of it is counted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from devices.base import Channel, TransientDeviceError
from harness.opening import open_run
from harness.plan import build_plan
from harness.progress import PlainProgress, outcome
from harness.runner import Runner
from harness.schema import StopSpec
from harness.stopping import IntervalWidth
from harness.tuning.display import ProbeLines
from harness.tuning.probing import SessionBrokenOffError, TrialProber
from results.accuracy_energy import accuracy_energy
from results.cells import CONTENDED
from results.cpu_time import CpuSeconds
from results.environments import Conditions
from results.records import Score
from results.report.html import html_text
from results.report.standings import device_groups
from results.runs import RunData
from results.store import Store
from results.summary import summary
from results.tables import tidy
from results.trial_tables import trials as trials_table
from results.trials import Trial
from tests import run_builders as build
from tests.fakes.machine import FakeBench, FakeDevice
from tests.plans import FAST, raw_plan

N_CORES = 2


class SharedDevice(FakeDevice):
    """Others take shares[k] of the CPU in the k-th window, and the last of them in all windows behind it."""

    def __init__(self, bench: FakeBench, shares: Sequence[float]) -> None:
        super().__init__(bench.machine, bench.fake_device.meters)
        self.n_read = 0
        """How often the CPU time was asked for."""
        self._shares = shares
        self._n_windows = 0
        self._opened_s: float | None = None
        self._foreign_s = 0.0

    def conditions(self) -> Conditions:
        """Read at both ends of a window, whether its CPU time is read or not."""
        if self._opened_s is None:
            self._opened_s = self._machine.time_s
        else:
            self._foreign_s = self._foreign_by_now_s()
            self._n_windows += 1
            self._opened_s = None
        return super().conditions()

    def cpu_seconds(self) -> CpuSeconds | None:
        self.n_read += 1
        now_s = self._machine.time_s
        return CpuSeconds(busy_s=now_s + self._foreign_by_now_s(), ours_s=now_s, available_s=N_CORES * now_s)

    def _foreign_by_now_s(self) -> float:
        if self._opened_s is None:
            return self._foreign_s
        share = self._shares[min(self._n_windows, len(self._shares) - 1)]
        return self._foreign_s + share * N_CORES * (self._machine.time_s - self._opened_s)


def shared(*shares: float) -> FakeBench:
    bench = FakeBench()
    bench.fake_device = SharedDevice(bench, shares)
    return bench


def run(bench: FakeBench, folder: Path, **protocol: Any) -> tuple[RunData, list[Trial], str]:
    """(the stored run, its trials, what a log says of it)."""
    plan = build_plan(raw_plan(protocol=FAST | {"max_foreign_cpu_share": 0.2, "contention_retries": 2} | protocol))
    text = io.StringIO()
    progress = PlainProgress(Console(file=text, width=200))
    with open_run(plan, folder, False, bench) as store:
        Runner(plan, store, bench, progress).run()
    with Store.view(folder) as store:
        data = store.data()
    return data, list(data.trials), text.getvalue()


def test_a_disturbed_window_is_thrown_away_counted_and_taken_again(tmp_path: Path) -> None:
    data, (trial,), log = run(shared(0.5, 0.05), tmp_path / "run")
    assert trial.marks == ()
    assert trial.foreign_cpu_share == pytest.approx(0.05)
    assert trial.contention_shares == (pytest.approx(0.5),)
    assert trial.attempts == 2
    assert "dropless · boolq · host · trial 1 · again: other processes took 50 % of the CPU" in log
    table = trials_table(data)
    assert set(table["contention_repeats"]) == {1}
    assert list(table["foreign_cpu_share"]) == pytest.approx([0.05] * len(table))
    assert "1 window was thrown away and taken again: other processes took up to 50 % of the CPU." in html_text(data)


def test_a_trial_that_is_disturbed_every_time_stands_marked_and_in_no_mean(tmp_path: Path) -> None:
    bench = shared(0.5, 0.6, 0.7, 0.0)
    data, trials, log = run(bench, tmp_path / "run", repeats=2)
    disturbed, quiet = trials
    assert disturbed.marks == ("contended",)
    assert disturbed.foreign_cpu_share == pytest.approx(0.7)
    assert disturbed.contention_shares == (pytest.approx(0.5), pytest.approx(0.6))
    assert disturbed.attempts == 3
    assert (quiet.marks, quiet.attempts) == ((), 1)
    # Three windows of two requests, then one.
    assert len(bench.engine.answered) == 8
    words = "contended: other processes took 70 % of the CPU, as in 2 windows before that were thrown away"
    assert f"left out: {words}" in log
    assert words in html_text(data)
    table = trials_table(data)
    assert set(table.loc[table["repeat"] == 0, "marks"]) == {"contended"}
    assert set(table.loc[table["repeat"] == 0, "contention_repeats"]) == {2}
    e2e = tidy(data).query("metric == 'e2e'").to_dict("records")[0]
    assert (e2e["n"], e2e["reason"]) == (1, "n = 1: no interval from one value; 1 of 2 trials left out (contended)")
    assert "(contended)" in summary(data)["reason"][0]


def test_a_neighbour_in_the_idle_time_is_told_where_a_meter_feels_it(tmp_path: Path) -> None:
    """Idle, window, idle: the net joules of the first trial are of a machine that was not idle."""
    words = "idle power has theirs in it, and net joules are too low"
    found = {}
    for name, shares, method, computes in (
        ("before", (0.5, 0.0, 0.0), "counter", "cpu"), ("after", (0.0, 0.0, 0.5), "counter", "cpu"),
        ("window", (0.0, 0.1, 0.0), "counter", "cpu"), ("model", (0.5, 0.0, 0.5), "modelled", "cpu"),
        ("gpu", (0.5, 0.0, 0.5), "counter", "gpu"),
    ):  # fmt: skip
        bench = FakeBench()
        bench.fake_device = device = SharedDevice(bench, shares)
        for meter in device.meters:
            meter.method = method
            meter.channels = (Channel("machine", "counter", computes=computes),)
        data, (trial,), _ = run(bench, tmp_path / name, idle_s=1.0)
        assert trial.marks == ()
        is_told = any(words in note for note in trial.notes) and words in html_text(data)
        found[name] = (is_told, device.n_read)
    # CPU time is read at both ends: of each of the three, or of the window alone.
    assert found == {
        "before": (True, 6), "after": (True, 6), "window": (False, 6), "model": (False, 2), "gpu": (False, 2),
    }  # fmt: skip


def test_a_run_of_which_nothing_can_be_used_says_so_early_and_once(tmp_path: Path) -> None:
    _, trials, log = run(shared(0.5, 0.7, 0.6, 0.5), tmp_path / "run", repeats=4, contention_retries=0)
    assert [t.marks for t in trials] == [("contended",)] * 4
    lines = log.splitlines()
    (at,) = (k for k, line in enumerate(lines) if "no figure can be used so far" in line)
    assert [line[:5] for line in (lines[at - 1], lines[at + 1])] == ["[2/4]", "[3/4]"]
    key = "protocol.max_foreign_cpu_share = 0.2"
    assert f"in all 2 trials other processes took more than {key} of the CPU (up to 70 %)" in lines[at]
    assert "End them now; or stop this run (Ctrl-C), raise that key" in lines[at]


def test_a_session_of_probes_says_early_and_once_that_others_disturb_it(tmp_path: Path) -> None:
    bench = shared(0.5, 0.7, 0.6, 0.5)
    plan = build_plan(raw_plan(protocol=FAST | {"max_foreign_cpu_share": 0.2, "contention_retries": 0}))
    text = io.StringIO()
    with open_run(plan, tmp_path / "run", False, bench) as store:
        runner = Runner(plan, store, bench, ProbeLines(Console(file=text, width=400)))
        prober = TrialProber(runner, {"a": plan.cells}, ("decode",), False, 0.2)
        with pytest.raises(SessionBrokenOffError, match="3 probes in a row cannot be used"):
            prober.probe("a", 1)
    said = ["left out" if "left out" in line else line for line in text.getvalue().splitlines()]
    assert [line[:40] for line in said if line] == [
        "left out", "left out", "warning: no figure can be used so far: i", "left out"
    ]  # fmt: skip
    assert "protocol.max_foreign_cpu_share = 0.2" in text.getvalue()


@pytest.mark.parametrize(("shares", "repeats"), [((0.5, 0.0, 0.5, 0.5), 4), ((0.0, 0.5, 0.5, 0.5), 4), ((0.5, 0.5), 2)])
def test_a_run_with_a_usable_trial_or_at_its_end_warns_of_nothing(
    tmp_path: Path, shares: tuple[float, ...], repeats: int
) -> None:
    _, _, log = run(shared(*shares), tmp_path / "run", repeats=repeats, contention_retries=0)
    assert "so far" not in log


@pytest.mark.parametrize(("share", "limit"), [(0.2, 0.2), (1.0, 1.0), (0.0, 0.0)])
def test_a_share_at_the_limit_is_allowed(tmp_path: Path, share: float, limit: float) -> None:
    _, (trial,), _ = run(shared(share), tmp_path / "run", max_foreign_cpu_share=limit)
    assert (trial.marks, trial.attempts) == ((), 1)


def test_without_retries_a_disturbed_trial_stands_at_once(tmp_path: Path) -> None:
    _, (trial,), _ = run(shared(0.5), tmp_path / "run", contention_retries=0)
    assert (trial.marks, trial.attempts, trial.contention_shares) == (("contended",), 1, ())


def test_a_tick_of_the_cpu_accounting_disturbs_no_short_window(tmp_path: Path) -> None:
    # The window is 1.75 s of two cores: two ticks of 10 ms are 0.57 % of it.
    ticks = 2 * 0.01 / (N_CORES * 1.75)
    _, (trial,), _ = run(shared(0.99 * ticks), tmp_path / "one", max_foreign_cpu_share=0.0)
    assert trial.marks == ()
    _, (trial,), _ = run(shared(1.01 * ticks), tmp_path / "two", max_foreign_cpu_share=0.0)
    assert trial.marks == ("contended",)


def test_lost_links_and_busy_neighbours_are_counted_apart(tmp_path: Path) -> None:
    bench = shared(0.5, 0.0)
    bench.engine.errors = [None, None, TransientDeviceError("link"), None, None, None]
    _, (trial,), log = run(bench, tmp_path / "run", retries=1, contention_retries=1)
    assert (trial.status, trial.attempts) == ("ok", 3)
    assert len(trial.contention_shares) == 1
    assert [line.split("again: ")[1] for line in log.splitlines() if "again: " in line] == [
        "other processes took 50 % of the CPU",
        "link",
    ]


class Unreadable(SharedDevice):
    def cpu_seconds(self) -> CpuSeconds | None:
        return None


def test_where_the_share_cannot_be_read_nothing_is_repeated_or_claimed(tmp_path: Path) -> None:
    bench = FakeBench()
    bench.fake_device = Unreadable(bench, [0.9])
    data, (trial,), _ = run(bench, tmp_path / "run")
    assert (trial.foreign_cpu_share, trial.marks, trial.attempts) == (None, (), 1)
    assert trials_table(data)["foreign_cpu_share"].isna().all()


def test_disturbed_trials_do_not_make_an_interval_narrow(tmp_path: Path) -> None:
    rule = IntervalWidth(StopSpec(min_repeats=2, max_repeats=6))
    _, trials, _ = run(shared(0.5), tmp_path / "run", repeats=3)
    assert not rule.enough(trials)
    assert rule.enough([t.model_copy(update={"marks": ()}) for t in trials])


def test_progress_says_nothing_of_a_quiet_trial(tmp_path: Path) -> None:
    _, (trial,), log = run(shared(0.0), tmp_path / "run")
    assert "left out" not in outcome(trial)
    assert "again" not in log


def test_answers_of_contended_trials_count_and_their_times_and_joules_do_not() -> None:
    """4 of 4 and 3 of 4 right: accuracy 7/8 whatever took the CPU; a charger is no neighbour, so its 0 of 4 is out."""

    def one(cell_id: str, repeat: int, right: Sequence[float], marks: tuple[str, ...]) -> Trial:
        samples = [Score(metric="acc", value=v, sample_id=f"s{i}") for i, v in enumerate(right)]
        whole = Score(metric="acc", value=sum(right) / len(right), n=len(right), stderr=0.1)
        return build.trial(cell_id, repeat, energy=(build.reading(),), scores=(*samples, whole), marks=marks)

    cells = [build.cell(name, engine=name, reference_id="quiet") for name in ("quiet", "busy")]
    marked = [
        one("busy", 0, [1, 1, 1, 1], (CONTENDED,)),
        one("busy", 1, [1, 1, 0, 1], (CONTENDED,)),
        one("busy", 2, [0, 0, 0, 0], (CONTENDED, "charging")),
    ]
    data = build.run(cells, [*(one("quiet", i, [1, 0, 1, 0], ()) for i in range(2)), *marked])
    frame = tidy(data)
    rows = {r["metric"]: r for r in frame[frame["cell"] == "busy"].to_dict("records") if r["phase"] in (None, "all")}
    assert rows["acc"]["mean"] == 7 / 8
    assert rows["acc"]["reason"] == "1 of 3 trials left out (contended, charging)"
    for metric in ("e2e", "energy"):
        assert rows[metric]["method"] == "missing"
        assert rows[metric]["reason"] == "3 of 3 trials left out (contended, charging)"
    ((group, _),) = device_groups(data, frame)
    busy = group.rows[1]
    assert (busy["accuracy"].value, busy["time"].value, busy["energy"].value) == (7 / 8, None, None)
    ratio = busy["accuracy"].ratio
    assert ratio is not None
    assert ratio.value == pytest.approx((7 / 8) / (2 / 4))
    compared = accuracy_energy(data, frame)
    (change,) = compared[(compared["cell"] == "busy") & (compared["quantity"] == "acc")]["change"]
    assert change == pytest.approx(7 / 8 - 2 / 4)
    page = html_text(data)
    assert "3 marked, whose times and joules are in no mean" in page


def test_a_program_that_has_the_gpu_open_is_told_with_the_trial(tmp_path: Path) -> None:
    class SharedGpu(FakeDevice):
        n_looks = 0

        def conditions(self) -> Conditions:
            """There in the middle of three looks."""
            self.n_looks += 1
            others = ("gpu0: python (pid 123)",) if self.n_looks == 2 else ()
            return super().conditions().model_copy(update={"gpu_others": others})

    bench = FakeBench()
    bench.fake_device = SharedGpu(bench.machine, bench.fake_device.meters)
    data, (trial,), _ = run(bench, tmp_path / "run")
    words = "other programs have the GPU open: where they computed, their joules are in these"
    assert [note for note in trial.notes if words in note and note.endswith("gpu0: python (pid 123)")]
    assert words in html_text(data)
    alone = FakeBench()
    _, (trial,), _ = run(alone, tmp_path / "alone")
    assert not [note for note in trial.notes if words in note]
