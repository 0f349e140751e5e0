"""Rounds without a pause: when they end, what a kill leaves of them, and the step in their speed found where it is."""

from __future__ import annotations

import math
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from devices.base import DeviceError
from engines.base import PhaseListener
from harness.interrupts import count_stops
from harness.opening import open_run
from harness.plan import build_plan
from harness.runner import Runner
from harness.schema import EnduranceSpec, TrialProtocol
from results.cells import STOPPED
from results.endurance import NO_STEP, Series, changes_of, endurance_of, round_rows, series_of, step_rows
from results.environments import Conditions
from results.records import Completion, Request
from results.report.endurance_words import sentences_of
from results.store import Store
from results.trials import EnduranceRound
from tests.fakes.machine import DECODE_W, PREFILL_S, PREFILL_W, TOKEN_S, FakeBench, FakeDevice, FakeEngine, FakeMachine
from tests.plans import DROPLESS, FAST, TIERS, problems, raw_plan
from tests.run_builders import cell, run, trial
from tests.test_runner import Heard

ROUND_S = 2 * PREFILL_S + 6 * TOKEN_S
"""Two requests, with four and two steps after their first tokens."""
SLOW_FROM_S = 240.0
SLOWER = 0.6


class HotDevice(FakeDevice):
    """A phone that warms up as it works, and whose battery falls."""

    def __init__(self, machine: FakeMachine, meters: Any) -> None:
        super().__init__(machine, meters)
        self.begun_s = machine.time_s
        self.heats_c_per_min = 0.5
        self.falls_percent_per_min = 1.0

    def conditions(self) -> Conditions:
        minutes = (self._machine.time_s - self.begun_s) / 60
        return super().conditions().model_copy(
            update={
                "temperature_c": 30.0 + self.heats_c_per_min * minutes,
                "battery_percent": 90.0 - self.falls_percent_per_min * minutes,
                "charging": False,
                "throttled": minutes * 60 >= SLOW_FROM_S,
                "frequency_caps": ("cpu 4 limited to 1500 of 2800 MHz",) if minutes * 60 >= SLOW_FROM_S else (),
            }
        )  # fmt: skip


class HeldBackEngine(FakeEngine):
    """From an instant on, each step takes longer, and less power."""

    slow_from_s = math.inf

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        machine = self._machine
        start_s = machine.now_s()
        machine.work(PREFILL_S, PREFILL_W)
        prefill_end_s = machine.now_s()
        slow = prefill_end_s >= self.slow_from_s
        times_s = [prefill_end_s]
        for _ in range(request.max_new_tokens - 1):
            machine.work(TOKEN_S / (SLOWER if slow else 1), DECODE_W * (SLOWER if slow else 1))
            times_s.append(machine.now_s())
        if self.errors and (error := self.errors.pop(0)) is not None:
            raise error
        return Completion(
            request_id=request.request_id, sample_id=request.sample_id, n_prompt_tokens=len(request.prompt_ids),
            start_s=start_s, prefill_end_s=prefill_end_s, end_s=machine.now_s(), token_ids=tuple(range(len(times_s))),
            token_times_s=tuple(times_s), text=request.sample_id,
        )  # fmt: skip


class HotBench(FakeBench):
    def __init__(self) -> None:
        super().__init__()
        self.fake_device = HotDevice(self.machine, self.fake_device.meters)
        self.engine = HeldBackEngine(self.machine, self.fake_device)
        self.engine.slow_from_s = self.machine.time_s + SLOW_FROM_S


def endurance_plan(stop: dict[str, Any], **changes: Any) -> Any:
    return build_plan(raw_plan(protocol=FAST | {"stop": stop, "min_charge_percent": 89}, **changes))


def run_to_end(bench: FakeBench, folder: Path, stop: dict[str, Any], resume: bool = False, **changes: Any) -> Heard:
    plan, heard = endurance_plan(stop, **changes), Heard()
    with open_run(plan, folder, resume, bench) as store:
        Runner(plan, store, bench, heard).run()
    return heard


def found_in(folder: Path) -> list[Series]:
    with Store.view(folder) as store:
        return endurance_of(store.data())


def test_the_step_is_found_where_the_device_holds_back(tmp_path: Path) -> None:
    run_to_end(HotBench(), tmp_path / "run", {"minutes": 10, "until_temperature_c": 90})
    [series] = found_in(tmp_path / "run")
    assert series.ended_by == "time: 10 minutes"
    [step] = series.steps
    # Rounds follow each other without a pause: the first slow one begins at most a round before the instant.
    assert step.at_s == pytest.approx(SLOW_FROM_S, abs=ROUND_S)
    assert step.low_s <= step.at_s <= step.high_s
    assert step.before.mean == pytest.approx(1 / TOKEN_S)
    assert step.after.mean == pytest.approx(SLOWER / TOKEN_S)
    assert step.change == pytest.approx(SLOWER - 1)
    decode_s = 6 * TOKEN_S
    before_w = (2 * PREFILL_S * PREFILL_W + decode_s * DECODE_W) / ROUND_S
    after_w = (2 * PREFILL_S * PREFILL_W + decode_s * DECODE_W) / (2 * PREFILL_S + decode_s / SLOWER)
    assert step.power_before is not None
    assert step.power_after is not None
    assert step.power_before.mean == pytest.approx(before_w)
    assert step.power_after.mean == pytest.approx(after_w)
    n_before = round(SLOW_FROM_S / ROUND_S)
    n_after = math.ceil((600 - n_before * ROUND_S) / (2 * PREFILL_S + decode_s / SLOWER))
    assert len(series.rounds) == pytest.approx(n_before + n_after, abs=1)
    assert not any(r.trial.marks for r in series.rounds), "that it is held back is what is asked"
    assert [r.throttled for r in series.rounds].index(True) == pytest.approx(n_before, abs=1)
    words = list(sentences_of(series))
    assert words[1].startswith("at 4.0")
    assert "decode falls from 8.00 to 4.80 token/s (-40.0 %)" in words[1]
    assert "the level that it sustains" in words[1]
    assert words[1].endswith("; 15.7 to 12.2 W counter"), "watts say how they came to be"


LIMITED = {"frequency_caps": ("cpu 4 limited to 1500 of 2800 MHz",)}
FREE = {"frequency_caps": ()}
LOWER = {"frequency_caps": ("cpu 4 limited to 900 of 2800 MHz",)}
LITTLE_LIMITED = {"frequency_caps": ("cpu 0-3 limited to 800 of 2000 MHz",)}
BOTH_LIMITED = {"frequency_caps": LITTLE_LIMITED["frequency_caps"] + LIMITED["frequency_caps"]}
ALL, LITTLE = {"cores_online": "0-4"}, {"cores_online": "0-3"}
SAVING, FAST_RULE = {"cpu_policy": ("governor powersave",)}, {"cpu_policy": ("governor performance", "turbo on")}


@pytest.mark.parametrize(
    ("states", "told"),
    [
        ([FREE, FREE, {}, FREE], []),
        ([FREE, FREE, LIMITED, LIMITED], ["at 1.00 min: from no limit to cpu 4 limited to 1500 of 2800 MHz"]),
        ([FREE, LIMITED, FREE, FREE], [" 2 times, first at 0.500 min: from no limit to cpu 4 limited to 1500"]),
        ([SAVING, FAST_RULE, {}, FAST_RULE], ["at 0.500 min: from governor powersave to governor performance; turbo"]),
        # Between two rounds, with a state between that does not tell it.
        (
            [SAVING, {}, FAST_RULE, FAST_RULE],
            ["at 1.00 min: from governor powersave to governor performance; turbo on"],
        ),
        ([{}, {}, {}, {}], []),
        # It changed while its core was off line.
        (
            [LIMITED | ALL, FREE | LITTLE, LOWER | ALL, LOWER | ALL],
            ["at 1.00 min: from cpu 4 limited to 1500 of 2800 MHz to cpu 4 limited to 900 of 2800 MHz"],
        ),
        # One was limited meanwhile, and the other is as it was.
        (
            [LIMITED | ALL, LITTLE_LIMITED | LITTLE, {**LITTLE, "frequency_caps": None}, BOTH_LIMITED | ALL],
            [
                "at 0.500 min: from cpu 4 limited to 1500 of 2800 MHz to cpu 0-3 limited to 800 of 2000 MHz; cpu 4"
                " limited to 1500 of 2800 MHz"
            ],
        ),
        ([LIMITED | ALL, FREE | LITTLE, LIMITED | ALL, FREE | LITTLE], []),
    ],
)
def test_other_limits_of_clocks_are_told_of_a_host_as_of_a_phone(states: list[dict[str, Any]], told: list[str]) -> None:
    """Two rounds of a minute, each with a state at its begin and one half a minute later."""
    seen = [Conditions(at_s=100 + 30.0 * i, **state) for i, state in enumerate(states)]
    rounds = [
        trial(repeat=i, conditions=(seen[2 * i], seen[2 * i + 1]), window_start_s=100 + 60.0 * i,
              window_end_s=160 + 60.0 * i, endurance=EnduranceRound(series=0, ended_by="time" if i else None))
        for i in range(2)
    ]  # fmt: skip
    series = series_of(cell(), 0, rounds)
    assert series is not None
    words = [line for line in sentences_of(series) if line.startswith("clock limits changed")]
    assert len(words) == len(told)
    assert [part for part, line in zip(told, words, strict=True) if part not in line] == [], words
    one = run([cell()], rounds)
    [last] = round_rows(one, [series]).tail(1).to_dict("records")
    limits = [words for name, own in states[3].items() if name != "cores_online" for words in own]
    assert last["clock_limits"] == ("; ".join(limits) or "no limit" if states[3] else None)


@pytest.mark.parametrize(
    ("stop", "ended_by", "after_s"),
    [
        ({"minutes": 60, "until_temperature_c": 32}, "heat: 32.0 degC, 32 is the limit", 240),
        ({"minutes": 60, "until_charge_percent": 86}, "battery: 86 %, 86 % is the limit", 240),
        ({"minutes": 0.01}, "time: 0.01 minutes", 0),
    ],
)
def test_heat_battery_or_time_says_stop(tmp_path: Path, stop: dict[str, Any], ended_by: str, after_s: float) -> None:
    run_to_end(HotBench(), tmp_path / "run", stop)
    [series] = found_in(tmp_path / "run")
    assert series.ended_by == ended_by
    assert series.rounds[-1].to_s == pytest.approx(after_s, abs=2 * ROUND_S)
    assert all(r.trial.endurance and r.trial.endurance.ended_by is None for r in series.rounds[:-1])


def test_a_charging_battery_says_no_stop(tmp_path: Path) -> None:
    """A laptop on its charger at a low level."""
    bench = FakeBench()
    bench.fake_device.conditions = lambda: Conditions(at_s=0.0, battery_percent=5.0, charging=True)  # type: ignore[method-assign]
    run_to_end(bench, tmp_path / "run", {"minutes": 1})
    [series] = found_in(tmp_path / "run")
    assert series.ended_by == "time: 1 minutes"


def test_a_host_has_no_limit_of_its_own_and_a_phone_has(tmp_path: Path) -> None:
    from harness.stopping import Endurance
    from tests.run_builders import trial

    rule = Endurance(EnduranceSpec(minutes=30))
    hot = trial(conditions=(Conditions(at_s=1.0, temperature_c=46.0),))
    assert rule.why_ended(hot, 0.0, is_phone=False) is None
    assert rule.why_ended(hot, 0.0, is_phone=True) == "heat: 46.0 degC, 45 is the limit"
    warmer = Endurance(EnduranceSpec(minutes=30, until_temperature_c=46.5))
    assert warmer.why_ended(hot, 0.0, is_phone=True) is None
    critical = trial(conditions=(Conditions(at_s=1.0, thermal_status=4),))
    assert rule.why_ended(critical, 0.0, is_phone=True) == (
        "heat: the phone calls its state critical (thermal status 4)"
    )


def test_a_series_that_is_broken_off_is_kept_and_another_begins(tmp_path: Path) -> None:
    """Interrupted in the 101st round; a finished arm is not run again."""
    bench = HotBench()
    bench.engine.slow_from_s = math.inf
    arms = [DROPLESS, TIERS]
    n_first = math.ceil(240 / ROUND_S)
    bench.engine.errors = [None] * (2 * (n_first + 100)) + [KeyboardInterrupt()]
    stop = {"minutes": 4, "until_temperature_c": 90}
    with pytest.raises(KeyboardInterrupt):
        run_to_end(bench, tmp_path / "run", stop, engine=arms)
    first, broken_off = found_in(tmp_path / "run")
    assert (first.ended_by, broken_off.ended_by) == ("time: 4 minutes", None)
    assert len(broken_off.rounds) == 100
    heard = run_to_end(bench, tmp_path / "run", stop, resume=True, engine=arms)
    assert heard.expected == (n_first + 100, n_first + 100), "no more than all are there"
    again = found_in(tmp_path / "run")
    assert [(one.cell.engine, one.number, one.ended_by) for one in again] == [
        ("dropless", 0, "time: 4 minutes"), ("tiers", 0, None), ("tiers", 1, "time: 4 minutes")
    ]  # fmt: skip
    assert [r.trial for r in again[0].rounds] == [r.trial for r in first.rounds]
    assert [r.trial for r in again[1].rounds] == [r.trial for r in broken_off.rounds]
    assert len(heard.finished) == len(again[2].rounds) == n_first
    assert again[2].rounds[0].from_s == 0.0, "time counts anew"
    assert "its rounds are kept, and joined to none after them" in list(sentences_of(again[1]))[-1]
    assert not run_to_end(bench, tmp_path / "run", stop, resume=True, engine=arms).finished


def test_a_failure_ends_a_series(tmp_path: Path) -> None:
    bench = HotBench()
    bench.engine.errors = [None] * 40 + [DeviceError("gone")]
    run_to_end(bench, tmp_path / "run", {"minutes": 5})
    [series] = found_in(tmp_path / "run")
    assert series.ended_by == "a trial failed"
    assert len(series.rounds) == 20


def test_only_the_first_round_waits_and_warms_up(tmp_path: Path) -> None:
    bench = HotBench()
    waits: list[float] = []
    bench.fake_device.why_not_ready = lambda: None  # type: ignore[attr-defined]
    bench.fake_device.wait_until_ready = lambda: waits.append(bench.machine.time_s)  # type: ignore[attr-defined]
    plan = build_plan(raw_plan(protocol=FAST | {"warmup": 2, "idle_s": 30, "stop": {"minutes": 1}}))
    with open_run(plan, tmp_path / "run", False, bench) as store:
        Runner(plan, store, bench, Heard()).run()
    [series] = found_in(tmp_path / "run")
    assert waits == [100.0]
    edges = [(a.to_s, b.from_s) for a, b in zip(series.rounds, series.rounds[1:], strict=False)]
    assert all(ended == begun for ended, begun in edges), "no pause between rounds"


def test_tables_have_a_row_a_round_and_a_row_a_step(tmp_path: Path) -> None:
    run_to_end(HotBench(), tmp_path / "run", {"minutes": 10, "until_temperature_c": 90})
    with Store.view(tmp_path / "run") as store:
        run = store.data()
        found = endurance_of(run)
        rounds, steps = round_rows(run, found), step_rows(run, found)
    assert len(rounds) == len(found[0].rounds)
    assert rounds["decode_token_per_s"].iloc[[0, -1]].tolist() == pytest.approx([1 / TOKEN_S, SLOWER / TOKEN_S])
    assert rounds["throttled"].iloc[[0, -1]].tolist() == ["no", "yes"]
    [row] = steps.to_dict("records")
    assert row["change_percent"] == pytest.approx(100 * (SLOWER - 1))
    assert row["ended_by"] == "time: 10 minutes"
    assert pd.isna(row["reason"])


def test_a_neighbour_on_one_side_of_a_step_is_told_beside_it(tmp_path: Path) -> None:
    run_to_end(HotBench(), tmp_path / "run", {"minutes": 10, "until_temperature_c": 90})
    [series] = found_in(tmp_path / "run")
    [step] = series.steps
    n_after = sum(r.middle_s > step.at_s for r in series.rounds)

    def told(before: float, after: float) -> list[str]:
        shares = [before if r.middle_s < step.at_s else after for r in series.rounds]
        rounds = [
            r._replace(trial=r.trial.model_copy(update={"foreign_cpu_share": share}))
            for r, share in zip(series.rounds, shares, strict=True)
        ]
        return [words for words in sentences_of(replace(series, rounds=tuple(rounds))) if "shared the CPU" in words]

    assert told(0.02, 0.02) == told(0.6, 0.6) == []
    [words] = told(0.02, 0.53)
    assert words.startswith(f"{n_after} of {n_after} rounds after that step shared the CPU")
    assert "up to 53 % of it, and may be its cause" in words
    [words] = told(0.53, 0.02)
    assert words.startswith(f"{len(series.rounds) - n_after} of {len(series.rounds) - n_after} rounds before that step")


class StoppedEngine(HeldBackEngine):
    """Once, ten minutes pass in a request, and the process goes on after them."""

    stops_in: int | None = 20

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        if self.stops_in is not None:
            self.stops_in -= 1
            if self.stops_in == 0:
                self.stops_in = None
                signal.raise_signal(signal.SIGCONT)
                self._machine.work(600.0, 0.0)
        return super().run(request, on_phase)


def test_a_round_in_which_joulebench_was_stopped_has_no_speed(tmp_path: Path) -> None:
    """It would be a step down and up again, at 1 % of the speed."""
    bench = HotBench()
    bench.engine = StoppedEngine(bench.machine, bench.fake_device)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    count_stops()
    try:
        run_to_end(bench, tmp_path / "run", {"minutes": 12, "until_temperature_c": 90})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    [series] = found_in(tmp_path / "run")
    [held] = [r for r in series.rounds if r.trial.marks]
    assert held.trial.marks == (STOPPED,)
    assert held.to_s - held.from_s > 600
    assert (held.decode_per_s, held.prefill_per_s, held.power_w, held.power_method) == (None, None, None, "missing")
    assert held.power_reason == "joulebench was stopped meanwhile"
    assert [speed for _, speed in series.speeds] == pytest.approx([1 / TOKEN_S] * (len(series.rounds) - 1))
    assert (series.steps, series.why_no_step) == ((), NO_STEP)


def test_too_few_rounds_and_an_even_speed_have_no_step(tmp_path: Path) -> None:
    bench = HotBench()
    bench.engine.slow_from_s = math.inf
    run_to_end(bench, tmp_path / "few", {"minutes": 5 * ROUND_S / 60})
    [few] = found_in(tmp_path / "few")
    assert few.steps == ()
    assert few.why_no_step == "5 rounds are too few to tell a step (10 at least): make them shorter, or run longer"
    bench = HotBench()
    bench.engine.slow_from_s = math.inf
    run_to_end(bench, tmp_path / "even", {"minutes": 2})
    [even] = found_in(tmp_path / "even")
    assert (even.steps, even.why_no_step) == ((), NO_STEP)
    assert even.level is not None
    assert even.level.mean == pytest.approx(1 / TOKEN_S)


# --- the step under noise --------------------------------------------------------------------------------------------


def test_a_step_under_noise_is_found_and_chance_makes_few() -> None:
    """60 rounds, noise of 3 %, a step of 10 %, 100 seeds; the same without the step."""
    found = alarms = 0
    for seed in range(100):
        noise = np.random.default_rng(seed).normal(0.0, 0.03, 60)
        level = np.where(np.arange(60) < 25, 1.0, 0.9)
        found += any(abs(at - 25) <= 3 for at in changes_of(level + noise))
        alarms += bool(changes_of(1.0 + noise))
    assert found >= 99
    # The test's size is 0.1 %: three and more of a hundred are rarer than 1 in 5000.
    assert alarms <= 2


def test_the_interval_of_when_holds_the_instant() -> None:
    """As often as it says, within what 100 draws leave open: a step of three standard deviations after 25 rounds."""
    from results.endurance import _place

    held = 0
    for seed in range(100):
        values = np.where(np.arange(60) < 25, 1.0, 0.94) + np.random.default_rng(1000 + seed).normal(0.0, 0.02, 60)
        [at] = [*changes_of(values)][:1] or [0]
        low, high = _place(values, at) if at else (0, 0)
        held += low <= 25 <= high
    assert held >= 88


# --- plans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ({"minutes": 0}, "protocol.stop.minutes: must be greater than 0, found 0"),
        ({"minutes": "30"}, "protocol.stop.minutes: must be a number, found '30'"),
        ({"until_temperature_c": 45}, "protocol.stop.minutes: missing; add minutes = ..."),
        ({"minutes": 30, "metric": "e2e_s"}, "protocol.stop.metric: unknown key, found 'e2e_s'; known: minutes"),
        (
            {"minutes": 30, "until_charge_percent": 50},
            "protocol: stop.until_charge_percent 50 is not below min_charge_percent 50, from which a run may begin",
        ),
        ({"minute": 30}, "protocol.stop.minute: unknown key; `stop = { minutes = 60 }` ends by time, without metric"),
    ],
)
def test_a_wrong_stop_is_told(stop: dict[str, Any], expected: str) -> None:
    [problem] = problems(raw_plan(protocol=FAST | {"stop": stop}))
    assert problem.startswith(expected)


def test_a_modelled_device_does_not_heat() -> None:
    assert TrialProtocol(stop=EnduranceSpec(minutes=30)).for_modelled().stop is None
