"""Self-tests of devices: where they are kept, which runs take them, and how a report shows them."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from harness.doctor import not_ready
from harness.opening import open_run
from harness.plan import build_plan
from harness.progress import PlainProgress
from harness.runner import Runner
from harness.state import keep_self_test, last_self_test, state_folder
from results.environments import Environment
from results.report.html import html_text
from results.report.self_test import self_test_lines
from results.self_tests import SelfTest
from tests import run_builders as build
from tests.fakes.known_load import Device, Machine, Meter, examined
from tests.fakes.machine import FakeBench
from tests.plans import FAST, raw_plan


def test_the_state_folder_is_where_the_system_keeps_such_things() -> None:
    assert state_folder({"HOME": "/home/a"}, "linux") == Path("/home/a/.local/state/joulebench")
    assert state_folder({"HOME": "/home/a", "XDG_STATE_HOME": "/s"}, "linux") == Path("/s/joulebench")
    assert state_folder({"HOME": "/Users/a"}, "darwin") == Path("/Users/a/Library/Application Support/joulebench")
    assert state_folder({"HOME": "/home/a", "JOULEBENCH_STATE": "/x"}, "darwin") == Path("/x")
    assert state_folder({"HOME": "/home/a", "XDG_STATE_HOME": "s"}, "linux") == Path("/home/a/.local/state/joulebench")


@pytest.mark.parametrize("home", [{"HOME": ""}, {"HOME": "a"}, {}])
def test_without_a_home_in_the_environment_the_state_is_where_the_system_knows_it(home: dict[str, str]) -> None:
    """As a shell finds it: `~name` reads the system's list of users, not HOME."""
    told = subprocess.run(["sh", "-c", "eval echo ~$(id -un)"], env=home | {"PATH": os.environ["PATH"]},
                          capture_output=True, text=True, check=True)  # fmt: skip
    if told.stdout.startswith("~"):
        pytest.skip("this user is in no list of users")
    assert state_folder(home, "linux") == Path(told.stdout.strip()) / ".local/state/joulebench"


def self_test_of(device: str, machine: Environment) -> SelfTest:
    virtual = Machine()
    found = examined(Device(virtual, Meter(virtual)))
    return found.model_copy(update={"device": device, "environment": machine})


def test_a_self_test_is_kept_by_device_and_holds_for_its_machine_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = self_test_of("adb:192.168.1.7:5555", build.ENVIRONMENT)
    kept = keep_self_test(found, tmp_path)
    assert last_self_test(found.device, build.ENVIRONMENT, tmp_path) == found
    assert last_self_test("host", build.ENVIRONMENT, tmp_path) is None
    elsewhere = build.ENVIRONMENT.model_copy(update={"cpu_model": "another"})
    assert last_self_test(found.device, elsewhere, tmp_path) is None
    # Two phones of one model, each of them `adb:` in its turn.
    one, other = (build.ENVIRONMENT.model_copy(update={"unit": unit}) for unit in ("8c2f01d5b7aa", "04d1c3e99b6f"))
    of_one = found.model_copy(update={"environment": one})
    keep_self_test(of_one, tmp_path)
    assert last_self_test(found.device, one, tmp_path) == of_one
    assert last_self_test(found.device, other, tmp_path) is None
    # Another card in the same computer; a run that uses none says nothing of it.
    card, another = (build.ENVIRONMENT.model_copy(update={"gpus": (name,)}) for name in ("RTX 4090", "RTX 5090"))
    keep_self_test(of_card := found.model_copy(update={"environment": card}), tmp_path)
    assert last_self_test(found.device, another, tmp_path) is None
    assert last_self_test(found.device, build.ENVIRONMENT, tmp_path) == of_card
    keep_self_test(found, tmp_path)
    kept.write_text("{", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert last_self_test(found.device, build.ENVIRONMENT, tmp_path) is None
    assert "make it anew: joulebench doctor --device adb:192.168.1.7:5555" in caplog.text


def test_a_device_that_does_not_open_is_not_ready() -> None:
    found = not_ready("adb:X", "adb: no device X attached")
    assert found.verdict == "not ready"
    assert self_test_lines(found)[-1] == "opens: adb: no device X attached"


def test_a_run_keeps_the_last_self_test_of_its_devices_and_its_report_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    bench = FakeBench()
    found = self_test_of("host", bench.fake_device.environment())
    keep_self_test(found, tmp_path / "state")
    plan = build_plan(raw_plan(protocol=FAST))
    with open_run(plan, tmp_path / "run", False, bench) as store:
        Runner(plan, store, bench, PlainProgress(Console(quiet=True))).run()
        data = store.data()
    assert data.info.self_tests == {"host": found}
    page = html_text(data)
    assert "Self-test of host" in page
    assert "host: ready (it measures, and nothing is wrong)" in page
    assert "sees the load; 1 % from 2.31 s; 5 % from 462 ms" in page


def test_a_report_says_where_no_self_test_was_made() -> None:
    page = html_text(build.example_run())
    assert "joulebench doctor --device host" in page
    assert "Self-test of model:m2-ultra" not in page
