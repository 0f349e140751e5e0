"""`joulebench tune` on a fake phone, over adb: its cores, its battery, what happens to it on the way, and its profile.

The phone runs as the sheet's model says, so that the right choice is a minimum over all selections.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from devices import gates
from devices.android import battery as battery_module
from devices.models.core_clusters import decode_model
from devices.models.sheet import load_sheet
from harness.commands import app
from harness.tuning.profile import read_profile
from harness.tuning.selections import all_selections
from results.core_lists import core_words
from results.records import Phase
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.battery import FakeBattery
from tests.fakes.sheet_phone import LLAMA_BENCH, SheetPhone

pytestmark = pytest.mark.waits

SLOWDOWN = 0.08
PLANNED = "0-2"


def small_phone(root: Path, serial: str = "FAKE0001") -> SheetPhone:
    """The big and two of the middle cores of source 002's Mate 40 Pro: five selections."""
    sheet = load_sheet("mate-40-pro")
    assert sheet.decode is not None
    clusters = dict(list(sheet.clusters.items())[:2])
    clusters["middle"] = clusters["middle"].model_copy(update={"n_cores": 2})
    return SheetPhone(root, decode_model(clusters, sheet.decode), serial, faster=5.0, noise=0.01)


def cheapest(phone: SheetPhone, phase: Phase) -> str:
    """Its cores: of all selections that are fast enough the one with the least joules of a token."""
    known = {one: phone.readings(one)[phase] for one in all_selections(phone.model.clusters)}
    floor = (1 - SLOWDOWN) * max(reading.speed_tokens_per_s for reading in known.values())
    fast = {one: r for one, r in known.items() if r.speed_tokens_per_s >= floor}
    best = min(fast, key=lambda one: fast[one].power_w / fast[one].speed_tokens_per_s)  # type: ignore[operator]
    return core_words([core for own, n in zip(phone.cores, best, strict=True) for core in own[:n]])


@pytest.fixture
def fake(tmp_path: Path) -> SheetPhone:
    return small_phone(tmp_path / "phone")


@pytest.fixture
def server(fake: SheetPhone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAdbServer]:
    monkeypatch.setattr(battery_module, "CALIBRATION_S", 0.4)
    monkeypatch.setattr(gates, "Gates", partial(gates.Gates, look_every_s=0.1))
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    with FakeBattery(fake, fake.power_w, update_s=0.02), FakeAdbServer(fake) as running:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(running.port))
        yield running


def tune(tmp_path: Path, *more: str, device: str = "adb:FAKE0001") -> Result:
    (tmp_path / "llama-bench").write_text(LLAMA_BENCH)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    return CliRunner().invoke(
        app,
        [
            "tune", "--device", device, "--engine", "llama-bench", "--prompt", "200", "--decode", "30",
            "--requests", "1", "--pairs", "0", "--name", "fake", "--out", str(tmp_path / "session"),
            "--set", f"engine.program={tmp_path}/llama-bench", "--set", f"engine.model_file={tmp_path}/model.gguf",
            "--set", f'engine.cores="{PLANNED}"', "--set", "protocol.warmup=0",
            "--set", "protocol.sample_interval_s=0.01", "--set", "protocol.max_foreign_cpu_share=1",
            *more,
        ],
    )  # fmt: skip


def test_a_session_finds_what_costs_least_of_each_phase(
    server: FakeAdbServer, fake: SheetPhone, tmp_path: Path
) -> None:
    found = tune(tmp_path)
    assert found.exit_code == 0, found.output
    profile = read_profile(tmp_path / "session" / "tuned.json")
    assert {one.phase: one.is_separated for one in profile.evidence} == {"prefill": True, "decode": True}
    assert profile.settings == {"cores": {"prefill": cheapest(fake, "prefill"), "decode": cheapest(fake, "decode")}}
    assert profile.settings["cores"] == {"prefill": "0-2", "decode": "0-1"}
