"""Sessions over keys of an engine by the command: an accuracy floor, Optuna, and a check that renews what expired."""

from __future__ import annotations

import csv
import re
import tomllib
from pathlib import Path

import pytest

from devices.models.sheet import sheet_path
from harness.plan import draft_plan
from harness.terminal import EXIT_BAD_PLAN, EXIT_NONE_USABLE
from harness.tuning.checking import ITSELF_WORDS, check_plan, is_beside_itself
from harness.tuning.profile import read_profile, write_profile
from harness.tuning.space import core_space, quick_plan, with_axes
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
SHEETED = """schema = 1
name = "sheeted"
[model]
source = "bundled:tiny-qwen3-moe"
[[engine]]
name = "dropless"
technique = { name = "dropless" }
[[workload]]
name = "fixed_lengths"
prompt_tokens = 16
new_tokens = 8
limit = 1
[[device]]
sheet = "mine.toml"
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
    assert "at most -5.00 % is allowed" in own["factor 0.1"]["reason"]
    assert {own["factor 8.0"]["reason"], own["factor 9.0"]["reason"]} == {""}


def test_an_accuracy_floor_of_answers_that_are_right_in_part_is_refused_once_they_are_seen(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    questions = SCORED.replace("ruler_niah_multikey_1", "rolebench")
    plan.write_text(questions.replace("length = 400", 'max_new_tokens = 16\ndata = "sample"'))
    found = joulebench(
        "tune", str(plan), "--out", str(tmp_path / "session"), "--accuracy-floor", "5%", "--objective", "latency",
        "--probes", "2", "--space", "engine.technique.factor=[8.0,9.0]", *QUICK,
    )  # fmt: skip
    assert found.code == EXIT_NONE_USABLE
    assert "--accuracy-floor: no sample of the workload is right or wrong" in found.stderr


def test_cores_are_not_searched_over_requests_that_decode_nothing(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(SCORED.replace("ruler_niah_multikey_1", "boolq").replace("length = 400", 'data = "generated"'))
    found = joulebench("tune", str(plan), "--out", str(tmp_path / "session"), *QUICK)
    assert found.code == EXIT_BAD_PLAN
    assert "no request of the plan decodes a token" in found.stderr
    assert not (tmp_path / "session").exists()


def test_a_sheet_in_the_plans_folder_is_found_by_the_check_and_by_a_check_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    home.mkdir()
    away.mkdir()
    sheet = sheet_path("m2-ultra").read_text()
    (home / "mine.toml").write_text(sheet.replace('name = "m2-ultra"', 'name = "mine"'))
    plan = home / "plan.toml"
    plan.write_text(SHEETED)
    monkeypatch.chdir(tmp_path)
    found = joulebench(
        "tune", "home/plan.toml", "--out", "session", "--name", "priced", "--probes", "4", "--pairs", "2",
        "--space", "engine.prefill_chunk=[8,16]",
    )  # fmt: skip
    assert found.code == 0, found.stderr
    monkeypatch.chdir(away)
    found = joulebench("tune", "--check", "priced", "--pairs", "2", "--out", "check")
    assert found.code == 0, found.stderr
    user = {**tomllib.loads(SHEETED), "engine": "tuned:priced"}
    assert draft_plan(user, None, folder=home).problems == ()
    # Another figure on the sheet may make another candidate the best.
    (home / "mine.toml").write_text((home / "mine.toml").read_text() + "\n# changed\n")
    (problem,) = draft_plan(user, None, folder=home).problems
    assert "the tuned profile priced does not hold here (sheet, SHA-256 " in problem


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


def test_a_chosen_arm_has_the_cores_that_were_probed_and_no_threads_of_the_planned_arm() -> None:
    space = core_space((), {(1,): "cores 0", (2,): "cores 0-1"}, {(1,): {"cores": "0"}, (2,): {"cores": "0-1"}})
    keys = space.chosen_keys({"prefill": (2,), "decode": (1,)})
    planned = {"name": "own", "technique": {"name": "dropless"}, "threads": 2, "prefill_chunk": 64}
    tuned = space.chosen_arm(planned, keys)
    assert tuned == {
        "name": "own", "technique": {"name": "dropless"}, "prefill_chunk": 64,
        "cores": {"prefill": "0-1", "decode": "0"},
    }  # fmt: skip
    asked = quick_plan("host", planned, "bundled:tiny-qwen3-moe", 16, 8, 1)
    assert draft_plan(check_plan(asked, planned, tuned, 2), None).problems == ()
    assert not is_beside_itself(check_plan(asked, planned, tuned, 2))
    assert is_beside_itself(check_plan(asked, planned, dict(planned), 2))


@pytest.mark.parametrize(
    ("planned", "chosen", "is_one"),
    [
        ({"cores": "0,1"}, {"cores": "0-1"}, True),
        ({"cores": "0-1"}, {"cores": {"prefill": "0-1", "decode": "1,0"}}, True),
        ({"cores": "0-1", "threads": 2}, {"cores": "0-1"}, True),
        ({"prefill_chunk": 512}, {}, True),
        ({"cores": "0-1", "threads": 1}, {"cores": "0-1"}, False),
        ({"threads": {"decode": 1}, "cores": "0-1"}, {"cores": "0-1"}, False),
        ({"cores": "0-1"}, {"cores": {"prefill": "0-1"}}, False),
        ({"threads": 2}, {"cores": "0-1"}, False),
    ],
)
def test_arms_are_one_however_they_are_written(
    planned: dict[str, object], chosen: dict[str, object], is_one: bool
) -> None:
    """Pairs of one arm beside itself stood there as what a choice saves."""
    arm = {"name": "own", "technique": {"name": "dropless"}}
    asked = quick_plan("host", arm, "bundled:tiny-qwen3-moe", 16, 8, 1)
    plan = check_plan(asked, arm | planned, arm | chosen, 2)
    assert draft_plan(plan, None).problems == ()
    assert is_beside_itself(plan) == is_one


def test_the_page_of_a_priced_session_says_measured_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It told the processor that priced, as if that were the device's, and that pairs were measured."""
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    found = joulebench(
        "tune", "--device", "model:m2-ultra", "--requests", "1", "--prompt", "32", "--decode", "4", "--pairs", "1",
        "--probes", "9", "--name", "priced", "--out", str(tmp_path / "session"),
        "--space", 'engine.technique=[{name="dropless"},{name="blockwise",block_size=64}]',
    )  # fmt: skip
    assert found.code == 0, found.stderr
    page = (tmp_path / "session" / "tune.html").read_text("utf-8")
    shown = page[page.index("<main>") : page.index("</main>")]
    assert "Nothing here was measured" in shown
    # Of an arm beside itself the page told what it saves.
    assert "Nothing: the arm as planned is the one that was chosen" in shown
    assert ITSELF_WORDS.strip() in shown
    assert "easured" not in shown.replace("Nothing here was measured", "")
    assert "on model:m2-ultra, with" in shown
    # Each probe is the first one again: an interval of no width would say that a sheet has no error.
    columns = ("speed_tokens_per_s", "energy_per_token", "energy_over_chosen", "speed_over_fastest")
    for row in rows(tmp_path / "session").values():
        assert all(row[key] and not row[f"{key}_low"] and not row[f"{key}_high"] for key in columns)
    assert not re.search(r"\d \[\d", shown)
