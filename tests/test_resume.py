"""kill -9 at any moment costs at most the trial that was running: what is finished stays, and a resume completes it."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from harness.opening import open_run
from harness.plan import Plan, build_plan
from harness.progress import PlainProgress
from harness.runner import Runner, RunOutcome
from results.store import DATABASE, Store
from results.trace_files import WINDOW
from tests.command import start
from tests.fakes.machine import FakeBench
from tests.plans import BOOLQ, DROPLESS, FAST, SHAREGPT, TIERS, raw_plan, write_plan
from tests.run_builders import TABLES

N_KILLS = 20
SEED = 20261121
STARTUP_S = (0.05, 4.0)
"""Kills during start-up fall into this stretch: imports, checks, the creation of the folder."""
PHASES = ("start-up",) * 5 + ("trials",) * 11 + ("report",) * 4
PATIENCE_S = 60.0

WRITTEN = {
    DATABASE,
    "traces",
    "report.html",
    *(f"{t}.csv" for t in TABLES),
}
SIDE_FILES = {"run.lock", f"{DATABASE}-wal", f"{DATABASE}-shm"}

Records = dict[str, str]


def plan_of(tmp_path: Path) -> tuple[Path, Plan]:
    raw: dict[str, Any] = raw_plan(engine=[DROPLESS, TIERS], workload=[BOOLQ, SHAREGPT], protocol=FAST | {"repeats": 3})
    return write_plan(tmp_path / "plan.toml", raw), build_plan(raw)


def stored(run: Path) -> Records:
    """What is committed, read without this project's store: trial id -> record."""
    if not (run / DATABASE).is_file():
        return {}
    connection = sqlite3.connect(run / DATABASE)
    try:
        return dict(connection.execute("SELECT trial_id, record FROM trial"))
    except sqlite3.OperationalError:
        return {}  # killed before the tables were made
    finally:
        connection.close()


def kill_somewhere(process: subprocess.Popen[str], phase: str, run: Path, log: Path, chance: random.Random) -> bool:
    """Waits for a moment of the phase and kills. False where the process was through before."""
    if phase == "start-up":
        _sleep(process, chance.uniform(*STARTUP_S))
    elif phase == "trials":
        # A trace file appears before its trial is committed: the wait after it falls on either side.
        n = _n_traces(run) + chance.randint(1, 2)
        _wait(process, lambda: _n_traces(run) >= n)
        _sleep(process, chance.uniform(0.0, 0.08))
    else:
        _wait(process, lambda: "12/12]" in log.read_text("utf-8") or "12 of 12" in log.read_text("utf-8"))
        _sleep(process, chance.uniform(0.0, 1.2))
    if process.poll() is not None:
        return False
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=PATIENCE_S)
    return True


def _n_traces(run: Path) -> int:
    return len(list((run / "traces").glob("*")))


def _wait(process: subprocess.Popen[str], happened: Any) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while process.poll() is None and not happened():
        assert time.monotonic() < until_s, "it hangs"
        time.sleep(0.003)


def _sleep(process: subprocess.Popen[str], seconds: float) -> None:
    until_s = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < until_s:
        time.sleep(0.003)


def assert_kept(before: Records, run: Path) -> Records:
    """Nothing that was finished is lost or changed."""
    after = stored(run)
    assert {trial_id: after.get(trial_id) for trial_id in before} == before
    return after


def assert_complete(run: Path, plan: Plan) -> None:
    expected = {(c.cell.cell_id, repeat): 1 for c in plan.cells for repeat in range(3)}
    with Store.view(run) as store:
        data = store.data()
        assert Counter((t.cell_id, t.repeat) for t in data.trials) == expected
        assert all(t.status == "ok" for t in data.trials)
        files = {p.name for p in (run / "traces").iterdir()}
        assert files == {f"{t.trial_id}.parquet" for t in data.trials}
        for trial in data.trials:
            (trace,) = store.traces(trial.trial_id, WINDOW)
            assert trial.window_start_s is not None
            assert trial.window_end_s is not None
            assert trace.times_s[0] <= trial.window_start_s < trial.window_end_s <= trace.times_s[-1]
    assert {p.name for p in run.iterdir()} - SIDE_FILES == WRITTEN
    table = pd.read_csv(run / "trials.csv")
    assert set(table["trial"]) == {t.trial_id for t in data.trials}
    assert (run / "report.html").read_text("utf-8").rstrip().endswith("</html>")


def resumed(plan: Plan, run: Path) -> RunOutcome:
    """Begins a run where none was begun."""
    bench = FakeBench()
    with open_run(plan, run, Store.holds_run(run), bench) as store:
        return Runner(plan, store, bench, PlainProgress(Console(quiet=True))).run()


def test_after_a_kill_while_the_database_is_made_a_run_can_begin(tmp_path: Path) -> None:
    _, plan = plan_of(tmp_path)
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    for name in (DATABASE, f"{DATABASE}-journal", "run.lock"):
        (run / name).touch()
    assert resumed(plan, run) == RunOutcome(n_ok=12, n_failed=0)


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    _, plan = plan_of(tmp_path)
    run = tmp_path / "run"
    resumed(plan, run)
    half_written = [run / ".trials.csv.k2j3", run / "traces" / "ab12.tmp", run / "traces" / "ab12.parquet"]
    for path in half_written:
        path.write_text("half", encoding="utf-8")
    assert resumed(plan, run) == RunOutcome(n_ok=12, n_failed=0)
    assert not any(p.exists() for p in half_written)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    plan_path, plan = plan_of(tmp_path)
    chance = random.Random(SEED)
    phases = list(PHASES)
    chance.shuffle(phases)
    killed: Counter[str] = Counter()
    n_runs = 0
    while phases:
        run, log = tmp_path / f"run{n_runs}", tmp_path / f"log{n_runs}"
        seen: Records = {}
        n_runs += 1
        code = None
        while code is None:
            # Trials are still to come until all twelve are there; then only start-up and report are left to hit.
            possible = [p for p in phases if p != ("trials" if len(seen) == 12 else "")]
            phase = possible[0] if possible else None
            with log.open("w", encoding="utf-8") as output:
                # A kill during start-up may have come before there was a run to go on with.
                resume = ["--resume"] if Store.holds_run(run) else []
                process = start("run", str(plan_path), "--out", str(run), *resume, output=output)
                if phase is not None and kill_somewhere(process, phase, run, log, chance):
                    phases.remove(phase)
                    killed[phase] += 1
                else:
                    code = process.wait(timeout=PATIENCE_S)
            assert "Traceback" not in log.read_text("utf-8")
            seen = assert_kept(seen, run)
        assert code == 0, log.read_text("utf-8")
        assert_complete(run, plan)
    assert killed == Counter(PHASES)
    assert sum(killed.values()) == N_KILLS
