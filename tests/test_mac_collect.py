"""What a Mac's owner runs: every step is kept, whatever became of it, and the next one follows."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.command import joulebench
from tests.mac.collect import PLAN, REPOSITORY, Step, collect, pack, steps_of


def step(name: str, code: str, needs_mac: bool = False) -> Step:
    return Step(name, f"why {name}", ("-c", code), needs_mac)


def test_a_step_that_fails_is_kept_and_the_next_follows(tmp_path: Path) -> None:
    steps = [
        step("first", "import sys; print('told'); print('to stderr', file=sys.stderr); sys.exit(3)"),
        step("mac", "raise SystemExit('ran')", needs_mac=True),
        step("slow", "import time; print('begun', flush=True); time.sleep(60)"),
        step("last", "print('last')"),
    ]
    ended = collect(tmp_path, steps, on_mac=False, limit_s=2.0)
    assert [one.code for one in ended] == [3, None, None, 0]
    assert (tmp_path / "01-first.txt").read_text().splitlines() == ["told", "to stderr"]
    assert str(ended[1].remark).startswith("needs a Mac")
    assert not (tmp_path / "02-mac.txt").exists()
    assert (ended[2].remark, (tmp_path / "03-slow.txt").read_text()) == ("ended after 2 s", "begun\n")
    told = json.loads((tmp_path / "steps.json").read_text())
    assert [one["name"] for one in told["steps"]] == ["first", "mac", "slow", "last"]
    assert told["on_mac"] is False


def test_on_a_mac_all_steps_run(tmp_path: Path) -> None:
    (ended,) = collect(tmp_path, [step("mac", "print('ran')", needs_mac=True)], on_mac=True)
    assert (ended.code, (tmp_path / "01-mac.txt").read_text()) == (0, "ran\n")


def test_the_zip_holds_the_report_and_no_weights(tmp_path: Path) -> None:
    out = tmp_path / "report"
    weights = out / "packages" / "layer-000" / "experts-0.mlpackage"
    weights.mkdir(parents=True)
    (weights / "weight.bin").write_bytes(b"w")
    (out / "packages" / "manifest.json").write_text("{}")
    (out / "steps.json").write_text("{}")
    with zipfile.ZipFile(pack(out)) as packed:
        files = {name for name in packed.namelist() if not name.endswith("/")}
    assert files == {"report/steps.json", "report/manifest.json"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report", "report.zip"]


@pytest.mark.skipif(platform.system() == "Darwin", reason="there it runs")
def test_another_system_is_told_that_only_a_mac_tries_this(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.mac.collect", "--out", str(tmp_path / "r")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert done.returncode == 2
    assert "--rehearse" in done.stderr
    assert not (tmp_path / "r").exists()


@pytest.mark.skipif(platform.system() == "Darwin", reason="there nothing is in the way")
def test_nothing_but_the_system_is_in_the_way_of_the_plan() -> None:
    pytest.importorskip("coremltools", reason="the extra coreml is not installed")
    done = joulebench("plan", "check", str(PLAN))
    assert done.code == 2
    problems = [line for line in done.problems if line.startswith("error: ")]
    assert len(problems) == 1
    assert "Core ML" in problems[0]
    assert "macOS" in problems[0]


def test_what_is_run_exists(tmp_path: Path) -> None:
    for one in steps_of(tmp_path):
        assert one.command[0] == "-m"
        if one.command[1].startswith("tests."):
            assert (REPOSITORY / f"{one.command[1].replace('.', '/')}.py").is_file()
