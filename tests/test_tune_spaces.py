"""Sessions over keys of an engine by the command: an accuracy floor, Optuna, and a check that renews what expired."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from harness.tuning.profile import read_profile, write_profile
from harness.tuning.space import with_axes
from tests.command import joulebench

QUICK = (
    "--pairs", "0", "--set", "protocol.warmup=0", "--set", "protocol.max_foreign_cpu_share=1",
    "--set", "protocol.sample_interval_s=0.001",
)  # fmt: skip
SCORED = """schema = 1
name = "scored"
[model]
source = "bundled:tiny-qwen3-moe"
[[engine]]
name = "dropping"
technique = { name = "dropping", factor = 8.0 }
[[workload]]
name = "ruler_niah_multikey_1"
length = 400
limit = 12
[[device]]
name = "host"
[protocol]
idle_s = 0.0
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def rows(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "candidates.csv").open() as file:
        return {row["candidate"]: row for row in csv.DictReader(file)}


def test_the_accuracy_floor_keeps_out_what_answers_worse_and_lets_in_what_answers_alike(tmp_path: Path) -> None:
    """Buffers of 8 times the fair share drop nothing, as with 9. At a tenth most of what experts give is lost."""
    plan, folder = tmp_path / "plan.toml", tmp_path / "session"
    plan.write_text(SCORED)
    found = joulebench(
        "tune", str(plan), "--out", str(folder), "--accuracy-floor", "5%", "--objective", "latency", "--probes", "9",
        "--space", "engine.technique.factor=[0.1,8.0,9.0]", *QUICK,
    )  # fmt: skip
    assert found.code == 0, found.stderr
    own = rows(folder)
    assert own["factor 0.1"]["state"] == "failed"
    assert "kept out: " in own["factor 0.1"]["reason"]
    assert "at most -5.00% is allowed" in own["factor 0.1"]["reason"]
    assert {own["factor 8.0"]["reason"], own["factor 9.0"]["reason"]} == {""}


def test_a_large_space_is_searched_by_optuna_and_nothing_is_claimed_of_what_was_not_raced(tmp_path: Path) -> None:
    folder = tmp_path / "session"
    found = joulebench(
        "tune", "--out", str(folder), "--prompt", "32", "--decode", "24", "--requests", "2", "--probes", "24",
        "--space", f"engine.prefill_chunk={list(range(32, 32 * 18, 32))}", "--space", "engine.threads=[1,2]", *QUICK,
    )  # fmt: skip
    assert found.code == 0, found.stderr
    own = rows(folder)
    states = [row["state"] for row in own.values()]
    # Twelve suggestions of 34 candidates, of which at most eight are raced; each that was probed is told.
    with (folder / "probes.csv").open() as file:
        probes = list(csv.DictReader(file))
    assert sum(row["stage"] == "suggested" for row in probes) == 12
    assert {row["candidate"] for row in probes} == own.keys()
    assert 0 < sum(state != "not raced" for state in states) <= 8
    assert "Not certain" in found.stdout or "were not raced" in found.stdout


@pytest.mark.alone
def test_a_check_renews_what_expired_where_it_holds_and_keeps_what_the_search_was_of(
    tmp_path: Path, state: Path
) -> None:
    """Objective latency, one thread against a hundredth of the work: the choice surely holds."""
    folder = tmp_path / "session"
    found = joulebench(
        "tune", "--out", str(folder), "--name", "old", "--objective", "latency", "--prompt", "256", "--decode", "4",
        "--requests", "1", "--probes", "6", "--space", "engine.prefill_chunk=[1,256]",
        "--set", "engine.prefill_chunk=1", *QUICK,
    )  # fmt: skip
    assert found.code == 0, found.stderr
    kept = state / "tuned" / "old.json"
    profile = read_profile(kept)
    assert profile.settings == {"prefill_chunk": 256}
    now = profile.fingerprint.os
    before = profile.fingerprint.model_copy(update={"os": "Linux 4.19"})
    write_profile(profile.model_copy(update={"fingerprint": before}), kept)
    found = joulebench("tune", "--check", "old", "--pairs", "4", "--out", str(tmp_path / "check"))
    assert found.code == 0, found.stderr
    assert f"changed since the profile was made or checked: os Linux 4.19 -> {now}" in found.stdout
    renewed = read_profile(kept)
    assert renewed.fingerprint.os == now
    assert renewed.searched_on == before
    assert renewed.evidence == profile.evidence
    assert renewed.check is not None
    assert renewed.check.verdict == "holds"
    # By its folder it is found too.
    found = joulebench("tune", "--check", str(folder), "--pairs", "2", "--out", str(tmp_path / "check 2"))
    assert "Beside the arm as planned" in found.stdout


def test_an_arm_with_a_dot_in_its_name_can_be_swept() -> None:
    raw = {"engine": [{"name": "llama.cpp", "runs": "llama.cpp"}]}
    for axis in ('engine.weights=["f32"]', 'engine.llama.cpp.weights=["f32"]', 'engine.0.weights=["f32"]'):
        assert with_axes(raw, [axis])["sweep"] == {"engine.0.weights": ["f32"]}
