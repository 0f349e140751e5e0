"""`joulebench tune` on this machine, end to end: killed in mid-search and resumed, checked, and used by a plan."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import signal
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engines.model.checkpoints import decisive_files
from harness.commands import app
from harness.external_parts import found_build
from harness.plan import build_plan
from harness.terminal import EXIT_BAD_PLAN
from harness.tuning.engine_marks import engine_mark
from harness.tuning.profile import TunedProfile, find_profile, read_profile, why_expired, write_profile
from harness.tuning.tuned_plans import fingerprint_of_plan
from results.store import Store, StoreError
from results.trials import Trial
from tests.command import joulebench, start
from tests.eventually import eventually
from tests.plans import DROPLESS, MODEL, problems, raw_plan

SMALL = (
    "--prompt", "256", "--decode", "80", "--requests", "2", "--probes", "12", "--pairs", "2", "--name", "here",
    "--set", "protocol.max_foreign_cpu_share=1", "--set", "protocol.warmup=0",
    "--set", "protocol.sample_interval_s=0.01",
)  # fmt: skip
"""A phase edge within a gap of five intervals has no joules, and a loaded machine lets a reading wait for 10 ms or
more: an interval of 1 ms broke sessions off there."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def session(state: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed once some probes are there, then resumed to its end."""
    folder = tmp_path_factory.mktemp("tune") / "session"
    command = ("tune", "--out", str(folder), *SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOULEBENCH_STATE", str(state))
        with (folder.parent / "out.txt").open("w") as output:
            process = start(*command, output=output)
            assert eventually(lambda: n_probes(folder) >= 3)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with Store.view(folder) as store:
            before = {trial.trial_id for trial in store.trials()}
        found = joulebench(*command, "--resume")
        # 6: its choice does not hold, which two pairs on a busy machine may find.
        assert found.code in (0, 6), found.stderr
        with Store.view(folder) as store:
            after = {trial.trial_id: trial for trial in store.trials()}
        assert len(before) >= 3
        assert before <= after.keys()
        # Each probe that the searches asked for is a trial, none twice.
        assert len({(trial.cell_id, trial.repeat) for trial in after.values()}) == len(after)
        assert "chosen" in found.stdout
    return folder


def n_probes(folder: Path) -> int:
    if not (folder / "run.sqlite").exists():
        return 0
    try:
        with Store.view(folder) as store:
            return len(store.trials())
    except (StoreError, sqlite3.Error):  # it is being made
        return 0


def test_the_probes_that_a_session_tells_are_the_trials_of_its_store(session: Path) -> None:
    with (session / "probes.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["phase"] == "decode"]
    with Store.view(session) as store:
        run = store.data()
    names = {cell.cell_id: cell.engine for cell in run.cells}
    kept: dict[str, list[Trial]] = {name: [] for name in names.values()}
    for trial in sorted(run.trials, key=lambda one: one.repeat):
        # A probe whose phases have no joules is made again, and so is one that is marked.
        if not trial.marks and all(reading.energy_j is not None for reading in trial.energy if reading.phase != "all"):
            kept[names[trial.cell_id]].append(trial)
    assert len(rows) >= 4
    for row in rows:
        trial = kept[row["candidate"]][int(row["probe"]) - 1]
        assert float(row["seconds"]) == pytest.approx(
            sum(c.token_times_s[-1] - c.prefill_end_s for c in trial.completions)
        )
        assert row["energy_method"] == "modelled"
        assert int(row["tokens"]) == 2 * 80


def test_the_page_escapes_and_tells_the_choice(session: Path) -> None:
    page = (session / "tune.html").read_text()
    profile = read_profile(session / "tuned.json")
    assert profile.check is not None
    assert profile.check.words in page.replace("&#39;", "'")
    assert {one.method for one in profile.check.ratios if one.ratio and one.quantity == "energy"} == {"modelled"}
    assert "engine = &#34;tuned:here&#34;" in page or 'engine = "tuned:here"' in page


def test_a_resume_with_other_options_is_refused(session: Path) -> None:
    found = joulebench("tune", "--out", str(session), *SMALL, "--resume", "--slowdown", "20%")
    assert found.code == 2
    assert "slowdown 0.08 -> 0.2" in found.stderr


@pytest.fixture
def profile(session: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> TunedProfile:
    monkeypatch.setenv("JOULEBENCH_STATE", str(state))
    return read_profile(session / "tuned.json")


@pytest.fixture
def unchecked(profile: TunedProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TunedProfile:
    """In a state of its own. The session's check may find that its choice does not hold: plans refuse it then."""
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    found = profile.model_copy(update={"check": None})
    write_profile(found, tmp_path / "state" / "tuned" / "here.json")
    return found


def test_a_plan_that_names_a_profile_has_the_cells_of_one_that_writes_its_cores(unchecked: TunedProfile) -> None:
    plain = build_plan(raw_plan(engine=[DROPLESS | {"cores": unchecked.settings["cores"]}]))
    for cores in ("tuned", "tuned:here"):
        named = build_plan(raw_plan(engine=[DROPLESS | {"cores": cores}]))
        assert [c.cell.cell_id for c in named.cells] == [c.cell.cell_id for c in plain.cells]
        assert named.plan_hash == plain.plan_hash
    whole = build_plan(raw_plan(engine="tuned:here"))
    assert whole.cells[0].engine.cores == plain.cells[0].engine.cores
    both = build_plan(raw_plan(engine=[DROPLESS, "tuned:here"]))
    assert [c.engine.name for c in both.cells] == [DROPLESS["name"], "here"], "the same arm, planned and tuned"


def test_an_expired_changed_or_unknown_profile_is_one_problem_of_the_plan(
    unchecked: TunedProfile, tmp_path: Path
) -> None:
    older = unchecked.fingerprint.model_copy(update={"os": "Linux 4.19"})
    write_profile(
        unchecked.model_copy(update={"fingerprint": older, "name": "old"}), tmp_path / "state" / "tuned" / "old.json"
    )
    (told,) = problems(raw_plan(engine=[DROPLESS | {"cores": "tuned:old"}]))
    assert "os Linux 4.19 -> " in told
    assert "`joulebench tune --check old`" in told
    (told,) = problems(raw_plan(engine="tuned:nobody"))
    assert "there are here, old" in told
    changed = json.loads((tmp_path / "state" / "tuned" / "here.json").read_text())
    changed["settings"]["cores"] = {"prefill": "7", "decode": "7"}
    (tmp_path / "changed.json").write_text(json.dumps(changed))
    (told,) = problems(raw_plan(engine=[DROPLESS | {"cores": f"tuned:{tmp_path}/changed.json"}]))
    assert "was changed after it was written" in told
    # Other files than the profile's are another model; where they lie is nothing.
    bundled = decisive_files(unchecked.fingerprint.model)[0].parent
    moved = shutil.copytree(bundled, tmp_path / "moved")
    build_plan(raw_plan(engine=[DROPLESS | {"cores": "tuned:here"}], model={"source": str(moved)}))
    (told,) = problems(raw_plan(engine=[DROPLESS | {"cores": "tuned:here"}], model={"source": "/nowhere/else"}))
    assert "model bundled:tiny-qwen3-moe -> /nowhere/else" in told


def test_changed_files_of_the_checkpoint_and_other_versions_expire_a_profile_and_it_says_which(
    profile: TunedProfile, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = shutil.copytree(decisive_files(profile.fingerprint.model)[0].parent, tmp_path / "checkpoint")
    raw = raw_plan(engine=[DROPLESS | {"cores": "tuned:copy"}], model={"source": str(checkpoint)})
    own = fingerprint_of_plan(raw, profile.engine)
    assert own.model_sha256 == profile.fingerprint.model_sha256
    plan = profile.plan | {"model": raw["model"]}
    copied = profile.model_copy(update={"name": "copy", "fingerprint": own, "plan": plan, "check": None})
    write_profile(copied, state / "tuned" / "copy.json")
    build_plan(raw)
    # One byte of the weights, and neither size nor the time of the last change.
    weights = checkpoint / "model.safetensors"
    before, times = weights.read_bytes(), weights.stat()
    weights.write_bytes(before[:-100] + bytes([before[-100] ^ 1]) + before[-99:])
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    (told,) = problems(raw)
    assert f"model files, SHA-256 {str(own.model_sha256)[:12]} -> " in told
    assert "`joulebench tune` makes one for this" in told
    checked = CliRunner().invoke(app, ["tune", "--check", "copy", "--out", str(tmp_path / "check")])
    assert checked.exit_code == EXIT_BAD_PLAN
    assert "the tuned profile copy is of something else (model files, SHA-256" in checked.output
    assert not (tmp_path / "check").exists()
    weights.write_bytes(before)
    build_plan(raw)
    version = importlib.metadata.version
    for package, key in (("joulebench", "joulebench"), ("torch", "torch")):
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda n, own=package: "9.9" if n == own else version(n))
            (told,) = problems(raw)
        assert f"({key} {getattr(own, key)} -> 9.9)" in told
        assert "`joulebench tune --check copy` measures again and renews it" in told
    with monkeypatch.context() as patch:
        patch.setattr(platform, "release", lambda: "9.9")
        (told,) = problems(raw)
    assert "-> Linux 9.9)" in told
    (state / "tuned" / "copy.json").unlink()


def test_another_version_of_the_wheel_expires_a_profile_of_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp", reason="the extra joulebench[llama-cpp] is not installed")
    arm = {"name": "l", "runs": "llama.cpp", "threads": 1}
    before = fingerprint_of_plan(raw_plan(engine=[arm]), arm)
    assert why_expired(before, fingerprint_of_plan(raw_plan(engine=[arm]), arm)) == []
    version, xllamacpp = importlib.metadata.version, importlib.metadata.version("xllamacpp")
    monkeypatch.setattr(importlib.metadata, "version", lambda n: "9.9" if n == "xllamacpp" else version(n))
    found_build.cache_clear()
    program, told = why_expired(before, fingerprint_of_plan(raw_plan(engine=[arm]), arm))
    found_build.cache_clear()
    assert program.startswith("program, its version and files, SHA-256 ")
    assert (
        told == f"program version {before.program_version} -> {str(before.program_version).replace(xllamacpp, '9.9')}"
    )


def test_a_model_file_that_moved_unchanged_expires_no_profile(tmp_path: Path) -> None:
    program, marks = tmp_path / "llama-bench", []
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for folder, content in (("a", b"GGUF 1"), ("b", b"GGUF 1"), ("c", b"GGUF 2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.gguf").write_bytes(content)
        arm = {"name": "l", "runs": "llama-bench", "program": str(program), "threads": 1}
        marks.append(engine_mark(arm | {"model_file": str(tmp_path / folder / "m.gguf")}, {"source": MODEL}))
    assert marks[0] == marks[1]
    assert marks[0].program_sha256 != marks[2].program_sha256


def test_a_profile_of_another_engine_or_other_weights_is_no_profile_of_this_one(profile: TunedProfile) -> None:
    (told,) = problems(raw_plan(engine=[{"name": "x", "technique": {"name": "blockwise"}, "cores": "tuned:here"}]))
    assert "engine dropless -> blockwise" in told
    (told,) = problems(raw_plan(engine=[DROPLESS | {"quantise": {"experts": "int8"}, "cores": "tuned"}]))
    assert "weights float32 -> float32, experts int8" in told


def test_a_profile_that_its_check_refutes_is_refused_and_an_uncertain_one_is_noted(
    profile: TunedProfile, state: Path
) -> None:
    from harness.tuning.profile import write_profile
    from harness.tuning.tuned_plans import resolved

    assert profile.check is not None
    for verdict in ("does not hold", "not certain"):
        check = profile.check.model_copy(update={"verdict": verdict, "words": f"It {verdict}."})
        write_profile(profile.model_copy(update={"check": check, "name": "shaky"}), state / "tuned" / "shaky.json")
        found = resolved(raw_plan(engine=[DROPLESS | {"cores": "tuned:shaky"}]), Path())
        if verdict == "not certain":
            assert not found.problems
            assert "not certain: its check is not certain" in found.notes[0]
        else:
            assert "It does not hold." in found.problems[0]
    (state / "tuned" / "shaky.json").unlink()


def test_a_name_that_is_kept_for_another_engine_or_objective_is_refused(profile: TunedProfile) -> None:
    found = joulebench("tune", *SMALL, "--objective", "latency", "--engine", "blockwise")
    assert found.code == 2
    assert "engine dropless, and here blockwise; objective energy, and here latency" in found.stderr


def test_a_name_that_is_kept_for_other_weights_is_refused(profile: TunedProfile) -> None:
    """Plans that take it would be refused from then on: a profile holds for the weights that it was searched with."""
    narrow = ("--set", 'engine.quantise={experts="int8"}')
    found = joulebench("tune", *SMALL, *narrow)
    told = "error: --name here: is kept for another (weights float32, and here float32, experts int8); give this one a"
    assert (found.code, found.problems) == (2, [f"{told} name of its own"])


def test_a_profile_of_cores_is_not_replaced_by_one_of_other_keys(
    profile: TunedProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans with cores = "tuned:here" would be refused from then on."""
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path))
    chosen = profile.model_copy(update={"settings": {"cores": "0"}})
    before = write_profile(chosen, tmp_path / "tuned" / "here.json").read_bytes()
    found = joulebench("tune", *SMALL, "--space", "engine.prefill_chunk=[64,128]", "--out", str(tmp_path / "out"))
    why = "it chose cores, and here that is not searched"
    told = f"error: --name here: is kept for another ({why}); give this one a name of its own"
    assert (found.code, found.problems) == (2, [told])
    assert (tmp_path / "tuned" / "here.json").read_bytes() == before


def test_two_sessions_do_not_share_a_device(state: Path, profile: TunedProfile) -> None:
    from devices.device_lock import DeviceLock

    lock = DeviceLock(state, "host")
    lock.take()
    try:
        for command in (("tune", *SMALL), ("tune", "--check", "here")):
            found = joulebench(*command)
            assert found.code == 4, found.stderr
            assert f"host is used by process {os.getpid()}" in found.stderr
    finally:
        lock.release()


def test_a_check_measures_again_and_reads_no_old_one(session: Path, profile: TunedProfile) -> None:
    found = joulebench("tune", "--check", "here", "--out", str(session / "check"))
    assert found.code == 2
    assert "holds a check that is over" in found.stderr
    assert read_profile(session / "tuned.json").check == profile.check


def test_a_check_of_an_older_search_leaves_what_plans_find_by_its_name(
    session: Path, profile: TunedProfile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path))
    older = tmp_path / "older.json"
    write_profile(profile, older)
    kept = tmp_path / "tuned" / "here.json"
    later = write_profile(profile.model_copy(update={"created_at": "2099-01-01T00:00:00+00:00"}), kept).read_bytes()
    found = joulebench("tune", "--check", str(older), "--pairs", "2", "--out", str(tmp_path / "one"))
    assert f"{shlex.quote(str(kept))}: left as it is, for it is of another search of this name" in found.stdout
    assert kept.read_bytes() == later
    checked = read_profile(older)
    assert checked.check is not None
    assert checked.check != profile.check
    # Its own is renewed with it.
    write_profile(profile, kept)
    joulebench("tune", "--check", str(older), "--pairs", "2", "--out", str(tmp_path / "two"))
    assert read_profile(kept) == read_profile(older)


def test_a_choice_is_not_lost_behind_a_check_that_was_disturbed_throughout(
    session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    folder = tmp_path / "session"
    shutil.copytree(session, folder)
    shutil.rmtree(folder / "check")
    with Store.view(session / "check") as store:
        run = store.data()
        with Store.create(folder / "check", store.info(), run.cells) as disturbed:
            for trial in run.trials:
                disturbed.add_trial(trial.model_copy(update={"marks": ("contended",)}), {})
    command = ("tune", "--out", str(folder), *SMALL, "--resume")
    found = joulebench(*command)
    assert found.code == 6
    assert "`--resume --pairs 0` keeps the choice" in found.stderr
    # SMALL allows others the whole CPU.
    assert "took more than protocol.max_foreign_cpu_share = 1 of the CPU; end them; `--resume" in found.stderr
    assert f"and {folder / 'check' / 'report.html'} says by what" in found.stderr
    found = joulebench(*command, "--pairs", "0")
    assert found.code == 0, found.stderr
    kept = read_profile(folder / "tuned.json")
    assert kept.settings == read_profile(session / "tuned.json").settings
    (folder / "check" / "report.html").unlink()
    found = joulebench("tune", "--check", str(folder), "--pairs", "2", "--out", str(folder / "check"))
    assert found.code == 6
    assert "of the CPU; end them; the profile stays as it was, check it again then" in found.stderr
    assert read_profile(folder / "tuned.json") == kept


def test_a_session_whose_choice_does_not_hold_ends_with_6_and_is_found_by_its_folder(
    session: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with 0, and what is scheduled went on with it."""
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(session, "mine")
    shutil.rmtree("mine/check")
    with Store.view(session / "check") as store:
        run = store.data()
        with Store.create(Path("mine/check"), store.info(), run.cells) as refuted:
            engines = {cell.cell_id: cell.engine for cell in run.cells}
            like = next(trial for trial in run.trials if engines[trial.cell_id] != "tuned")
            for trial in run.trials:
                # Pairs that are all but alike, and the tuned arm at twice the joules.
                times = (2.0 if engines[trial.cell_id] == "tuned" else 1.0) + trial.repeat / 1000
                energy = tuple(
                    reading.model_copy(update={"energy_j": reading.energy_j and times * reading.energy_j})
                    for reading in like.energy
                )
                own = {"trial_id": trial.trial_id, "cell_id": trial.cell_id, "repeat": trial.repeat}
                refuted.add_trial(like.model_copy(update={**own, "energy": energy}), {})
    found = joulebench("tune", "--out", "mine", *SMALL, "--resume")
    assert found.code == 6, found.stderr
    assert 'error: no plan takes the profile "here", for its check does not hold' in found.stderr
    assert read_profile(Path("mine/tuned.json")) == read_profile(tmp_path / "state" / "tuned" / "here.json")
    # A kept name goes before a folder of the same name.
    assert find_profile("mine")[1] == Path("mine/tuned.json")
    Path("mine").rename("here")
    assert find_profile("here")[1] == tmp_path / "state" / "tuned" / "here.json"


def test_a_folder_that_cannot_be_gone_on_with_is_told_before_the_device_is_taken(
    session: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took ten seconds, for the model was looked at first."""
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path))
    monkeypatch.setattr("harness.tuning.asked.device_lock", None)
    for options, told in (
        (("--out", str(tmp_path / "none"), "--resume"), "leave --resume out to begin a run"),
        (("--out", str(session)), "already holds a run; go on with --resume"),
    ):
        found = CliRunner().invoke(app, ["tune", *SMALL, *options])
        assert (found.exit_code, told in found.stderr) == (2, True), found.output
    assert not (tmp_path / "none").exists()


def test_a_limit_that_nothing_meets_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path))
    out = str(tmp_path / "out")
    found = joulebench("tune", "--out", out, *SMALL, "--objective", "latency", "--weights-limit", "1KB")
    assert found.code == 6
    assert "every candidate failed: cores 0" in found.stderr


def test_an_accuracy_floor_of_a_workload_that_is_not_scored_is_refused_before_anything_runs(tmp_path: Path) -> None:
    found = joulebench("tune", "--out", str(tmp_path / "out"), *SMALL, "--accuracy-floor", "1%")
    assert found.code == EXIT_BAD_PLAN
    assert "--accuracy-floor: no sample of the workload is right or wrong" in found.stderr
    assert not (tmp_path / "out").exists()


def test_pairs_of_a_check_that_was_begun_stay_so_many(session: Path) -> None:
    """It was told to take another --out, and every probe would have been made again."""
    many = [{"2": "4"}.get(one, one) if SMALL[i - 1] == "--pairs" else one for i, one in enumerate(SMALL)]
    found = joulebench("tune", "--out", str(session), *many, "--resume")
    told = f"error: --pairs 4: {session / 'check'} was begun with 2; give --pairs 2, or --pairs 0 and then"
    assert (found.code, found.problems) == (2, [f"{told} `joulebench tune --check here --pairs 4`"])
