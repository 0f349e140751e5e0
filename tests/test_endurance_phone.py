"""Rounds without a pause on a fake phone that throttles, from the command to the tables and the page."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from devices.android import battery as battery_module
from harness.commands import app
from results.endurance import Series
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.held_clock import HeldClock
from tests.fakes.phone import DISCHARGING, THERMAL
from tests.fakes.sheet_phone import IDLE_W, LLAMA_BENCH, SheetPhone
from tests.plans import FAST, raw_plan, write_plan
from tests.test_endurance import found_in
from tests.test_tune_phone import small_phone


def bench_plan(folder: Path, stop: dict[str, float]) -> Path:
    (folder / "llama-bench").write_text(LLAMA_BENCH)
    (folder / "model.gguf").write_bytes(b"GGUF")
    arm = {
        "name": "bench", "runs": "llama-bench", "program": str(folder / "llama-bench"), "cores": "0-2",
        "model_file": str(folder / "model.gguf"), "timeout_s": 5,
    }  # fmt: skip
    return write_plan(
        folder / "plan.toml",
        raw_plan(
            engine=[arm],
            workload=[{"name": "fixed_lengths", "prompt_tokens": 250, "new_tokens": 41, "limit": 1}],
            device=[{"name": "adb:FAKE0001"}],
            protocol=FAST | {"stop": stop},
        ),
    )


def series_beside(
    happens: Callable[[], None],
    ended: threading.Event,
    fake: SheetPhone,
    plan: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Series:
    """Of a plan that runs to its end while something happens to its phone."""
    with FakeBattery(fake, IDLE_W, update_s=0.015), FakeAdbServer(fake) as server:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
        thread = threading.Thread(target=happens)
        thread.start()
        try:
            done = CliRunner().invoke(app, ["run", str(plan), "--out", str(out)])
        finally:
            ended.set()
            thread.join()
    assert done.exit_code == 0, done.output
    [series] = found_in(out)
    return series


@pytest.mark.waits
def test_a_phone_that_throttles_is_seen_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: HeldClock) -> None:
    """llama-bench on a fake phone, whose battery falls and warms up; from its 16th run on it is held back."""
    fake = small_phone(tmp_path / "phone")
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.4)
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    plan = bench_plan(tmp_path, {"minutes": 5, "until_temperature_c": 44})
    ended = threading.Event()
    throttled_at: list[float] = []

    def warm_up() -> None:
        """0.35 degC a run of its program, until 44 degC is reached; throttled before half of that.

        Runs are counted, and not seconds: on a busy machine fewer rounds had room, and too few tell no step.
        """
        while not ended.wait(0.1):
            n_runs = len(fake.runs())
            text = DISCHARGING.replace("temperature: 312", f"temperature: {min(450, 312 + 7 * n_runs // 2)}")
            fake.answer("dumpsys battery", text.replace("level: 82", f"level: {82 - n_runs / 4:.0f}"))
            if n_runs >= 16 and not throttled_at:
                throttle(fake.root / "figures")
                fake.answer("dumpsys thermalservice", THERMAL.replace("Thermal Status: 0", "Thermal Status: 2"))
                throttled_at.append(clock.now_s())

    series = series_beside(warm_up, ended, fake, plan, tmp_path / "run", monkeypatch)
    assert series.ended_by is not None
    assert series.ended_by.startswith("heat: 4")
    [step] = series.steps
    begun_s = series.rounds[0].trial.window_start_s
    assert begun_s is not None
    throttled_s = throttled_at[0] - begun_s
    longest_s = max(r.to_s - r.from_s for r in series.rounds)
    assert step.low_s - longest_s <= throttled_s <= step.high_s + longest_s
    assert step.change == pytest.approx(-0.5, abs=0.05)
    assert step.power_before is not None
    assert step.power_after is not None
    assert step.power_after.mean < 0.8 * step.power_before.mean
    assert series.rounds[-1].temperature_c is not None
    assert 44.0 <= series.rounds[-1].temperature_c <= 45.0
    assert series.rounds[-1].battery_percent is not None
    assert series.rounds[-1].battery_percent < 80
    page = (tmp_path / "run" / "report.html").read_text()
    assert "the level that it sustains" in page
    assert 'class="picture endurance"' in page
    steps = pd.read_csv(tmp_path / "run" / "endurance_steps.csv")
    rounds = pd.read_csv(tmp_path / "run" / "endurance.csv")
    assert set(steps["power_method"]) == set(rounds["power_method"].dropna()) - {"missing"} != set()


@pytest.mark.waits
def test_a_link_that_is_gone_for_a_moment_ends_no_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round in which it went is repeated, without a wait for a cooler phone; an empty battery ends the series."""
    fake = small_phone(tmp_path / "phone")
    fake.answer("dumpsys battery", DISCHARGING.replace("temperature: 312", "temperature: 399"))
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.4)
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    plan = bench_plan(tmp_path, {"minutes": 5, "until_charge_percent": 40})
    ended = threading.Event()

    def after(n_runs: int) -> None:
        while len(fake.runs()) < n_runs and not ended.wait(0.02):
            pass

    def mishaps() -> None:
        after(8)
        # Above the limit of the gates, as a phone is within a series.
        fake.answer("dumpsys battery", DISCHARGING.replace("temperature: 312", "temperature: 420"))
        fake.pull_cable()
        ended.wait(2.0)
        fake.plug_in()
        after(14)
        fake.answer("dumpsys battery", DISCHARGING.replace("level: 82", "level: 35"))

    series = series_beside(mishaps, ended, fake, plan, tmp_path / "run", monkeypatch)
    assert series.ended_by == "battery: 35 %, 40 % is the limit"
    assert sum(r.trial.attempts > 1 for r in series.rounds) == 1


def throttle(figures: Path) -> None:
    """Every program takes twice as long."""
    for path in figures.iterdir():
        ns, watts, cores = path.read_text().split()
        beside = path.with_name(f".{path.name}")
        beside.write_text(f"{2 * int(ns)} {float(watts) / 2} {cores}\n")
        beside.replace(path)
