"""`joulebench tune` on a fake iPhone: threads cannot be bound there, so that their number is chosen."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

pytest.importorskip("pymobiledevice3", reason="the extra joulebench[ios] is not installed")

from typer.testing import CliRunner

from devices.ios import battery as battery_module
from devices.ios.device import IosDevice
from devices.ios.phone import Phone
from harness.commands import app
from harness.tuning.profile import read_profile
from tests.fakes.ios_phone import UDID, FakeIphone
from tests.fakes.ios_tunneld import FakeTunneld
from tests.test_ios_trial import two_watts

pytestmark = pytest.mark.waits

BEST = 3
"""Threads: two big cores and one more; beyond, they wait for each other."""


def console(arguments: tuple[str, ...]) -> list[tuple[float, str]]:
    """As the app that was asked; each thread above or below the best costs a fifth of the speed."""
    _, backend, n_prompt, n_new, _, threads = arguments[1].split()
    tps = 200.0 * math.pow(0.8, abs(int(threads) - BEST))
    runs_s = (int(n_prompt) + int(n_new)) / tps
    said = f"prompt={n_prompt} decode={n_new} prefill_tok_s={tps:.2f} decode_tok_s={tps:.2f}"
    return [
        (0.0, "1 MNN [MNN_BENCH] model_loaded"),
        (runs_s + 0.01, f"2 MNN [MNN_BENCH] run=1 backend={backend} {said}"),
        (0.0, f"3 MNN [MNN_BENCH] avg backend={backend} threads={threads} {said}"),
        (0.0, "4 MNN [MNN_BENCH_DONE]"),
    ]


@pytest.fixture
def fake() -> FakeIphone:
    return FakeIphone(battery=two_watts, console=console)


def test_the_number_of_threads_is_chosen_for_whole_requests(
    tunneld: FakeTunneld, no_usbmuxd: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(battery_module, "READ_EVERY_S", 0.03)
    monkeypatch.setattr(battery_module, "OBSERVE_S", 0.5)
    for opens in (IosDevice.__init__, Phone.__init__):
        given = opens.__defaults__ or ()
        at_fake = tuple(tunneld.address if type(one) is type(tunneld.address) else one for one in given)
        assert at_fake != given
        monkeypatch.setattr(opens, "__defaults__", at_fake)
    found = CliRunner().invoke(
        app,
        [
            "tune", "--device", f"ios:{UDID}", "--engine", "mnn-app", "--objective", "latency", "--prompt", "16",
            "--decode", "8", "--requests", "1", "--pairs", "0", "--name", "fake", "--out", str(tmp_path / "session"),
            "--set", "engine.app=com.example.mnn", "--set", "engine.threads=4", "--set", "protocol.warmup=0",
            "--set", "protocol.max_foreign_cpu_share=1",
        ],
    )  # fmt: skip
    assert found.exit_code == 0, found.output
    profile = read_profile(tmp_path / "session" / "tuned.json")
    [whole] = profile.evidence
    assert (whole.phase, whole.is_separated) == ("all", True)
    assert profile.settings == {"threads": BEST}
    assert {one.name for one in whole.candidates} == {f"threads {n}" for n in range(1, 7)}
