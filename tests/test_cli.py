"""The command line as a user meets it: real processes, exit codes, one line a problem, nothing written in vain."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.catalog import METERS
from harness.commands import app
from harness.fleet.state import DeviceState, FleetState
from harness.fleet.view import fleet_table
from harness.terminal import console_of
from results.run_folders import FREE_BYTES_NEEDED
from results.store import Store
from tests.command import EXECUTABLE, environment, joulebench, run_python, start
from tests.conftest import FinishedRun
from tests.fakes.adb_server import FakeAdbServer
from tests.fakes.phone import DISCHARGING, FakePhone
from tests.fakes.random_models import copy_bundled
from tests.plans import BOOLQ, DROPLESS, FAST, HOST, MODEL, raw_plan, write_plan
from tests.small_disk import small_disk


def assert_refused(code: int, stderr: str, expected: list[str], expected_code: int = 2) -> None:
    """One line for each expected problem, and nothing else."""
    assert "Traceback" not in stderr
    lines = stderr.splitlines()
    assert code == expected_code, stderr
    assert len(lines) == len(expected), stderr
    for line, part in zip(lines, expected, strict=True):
        assert line.startswith("error: ")
        assert part in line


# --- start-up --------------------------------------------------------------------------------------------------------


def test_help_imports_little() -> None:
    """How long it takes is measured by `tests.benchmarks.harness_overhead`, where nothing else runs."""
    code = """
        import sys
        before = set(sys.modules)
        from harness.cli import main
        sys.argv = ["joulebench", "--help"]
        try:
            main()
        finally:
            packages = {name.partition(".")[0] for name in set(sys.modules) - before}
            print(*packages - set(sys.stdlib_module_names), file=sys.stderr)
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True, env=environment()
    )
    assert "Usage: joulebench" in shown.stdout
    assert set(shown.stderr.split()) == {"annotated_doc", "harness", "results", "shellingham", "typer"}


@pytest.mark.parametrize("command", ["report", "sheets"])
def test_commands_that_compute_with_no_model_start_without_torch(
    command: str, finished_run: FinishedRun, tmp_path: Path
) -> None:
    """It takes two seconds to import."""
    words = (
        [command, str(finished_run.directory), "--out", str(tmp_path / "again")] if command == "report" else [command]
    )
    code = f"""
        import sys
        from harness.cli import main
        sys.argv = ["joulebench", *{words!r}]
        try:
            main()
        finally:
            print("torch" in sys.modules, file=sys.stderr)
    """
    shown = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=False, capture_output=True, text=True, env=environment()
    )
    assert (shown.returncode, shown.stderr) == (0, "False\n")


def test_the_program_that_is_installed_shows_its_help() -> None:
    shown = subprocess.run([EXECUTABLE, "--help"], check=True, capture_output=True, text=True, env=environment())
    assert "Usage: joulebench" in shown.stdout


# --- rejections ------------------------------------------------------------------------------------------------------


def test_a_bad_plan_is_refused_with_a_line_a_problem(tmp_path: Path) -> None:
    plan = write_plan(
        tmp_path / "plan.toml",
        raw_plan(
            engine=[{"name": "a", "technique": {"name": "droples"}}],
            workload=[BOOLQ | {"limt": 1}],
            protocol=FAST | {"repeats": -1},
        ),
    )
    done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert_refused(
        done.code,
        done.stderr,
        [
            "engine[0].technique.name: unknown name 'droples'; did you mean dropless?",
            "workload[0].limt: unknown key, found 1; did you mean limit?",
            "protocol.repeats: must be greater than or equal to 1, found -1",
        ],
    )
    assert done.stdout == ""
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]


def test_what_is_not_toml_is_refused(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[model\n", encoding="utf-8")
    done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert_refused(done.code, done.stderr, [f"{plan}: not TOML"])
    assert [p.name for p in tmp_path.iterdir()] == ["plan.toml"]


def test_checkpoints_that_cannot_be_trusted_are_refused_before_anything_runs(tmp_path: Path) -> None:
    pickled = copy_bundled(tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    mismatched = copy_bundled(tmp_path / "mismatched")
    tokenizer = json.loads((mismatched / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary |= {f"more{i}": len(vocabulary) + i for i in range(3000)}
    (mismatched / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    folders = [str(tmp_path / "absent"), str(pickled), str(mismatched)]
    plan = write_plan(tmp_path / "plan.toml", raw_plan(sweep={"model.source": folders}))
    before = sorted(tmp_path.rglob("*"))
    done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert_refused(
        done.code,
        done.stderr,
        [
            # A long path is told by its two ends, and folders for temporary files may have one.
            "/absent: no folder",
            "/pickled: only pytorch_model.bin; pickle checkpoints are never loaded",
            "/mismatched/tokenizer.json: tokenizer does not match the model",
        ],
    )
    assert all(line.startswith("error: model.source: ") for line in done.stderr.splitlines()[:2])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["run", "fleet start"])
def test_a_folder_that_holds_no_run_is_told_before_models_are_looked_at(tmp_path: Path, command: str) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan(sweep={"model.source": [str(tmp_path / "absent")]}))
    done = joulebench(*command.split(), str(plan), "--out", str(tmp_path / "run"), "--resume")
    assert_refused(done.code, done.stderr, [f"--resume: {tmp_path / 'run'} holds no run"])


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
from harness.cli import main
main()
"""


def test_the_folder_of_another_plan_is_refused(finished_run: FinishedRun) -> None:
    arguments = ("run", str(finished_run.plan), "--out", str(finished_run.directory))
    before = _contents(finished_run.directory)
    again = joulebench(*arguments)
    assert_refused(again.code, again.stderr, ["already holds a run; go on with --resume or name another folder"])
    other = joulebench(*arguments, "--resume", "--set", "protocol.repeats=9")
    assert_refused(other.code, other.stderr, ["protocol.repeats 2 -> 9"])
    assert _contents(finished_run.directory) == before


def test_a_disk_that_is_full_while_tables_are_written_costs_no_trial(finished_run: FinishedRun, tmp_path: Path) -> None:
    """A limit of file size stands for the disk: the system refuses the write in the same place."""
    out = tmp_path / "tables"
    done = run_python(LIMITED, "report", str(finished_run.directory), "--out", str(out))
    assert done.code == 7
    path, _, said = done.stderr.removeprefix("error: ").partition(": cannot be written (File too large)")
    assert Path(path).parent == out
    assert "every finished trial is kept" in said
    assert f"joulebench report {shlex.quote(str(finished_run.directory))}" in done.stderr
    assert not Path(path).exists()
    assert not list(out.glob(".*"))


def test_a_trace_that_cannot_be_written_whole_leaves_the_file_that_was_there(
    finished_run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "trace.json"
    with Store.view(finished_run.directory) as store:
        trial_id = next(one.trial_id for one in store.trials() if one.status == "ok")
    asked = ["trace", str(finished_run.directory), "--out", str(out), "--trial", trial_id]
    assert CliRunner().invoke(app, asked).exit_code == 0
    before = out.read_bytes()
    assert json.loads(before)["traceEvents"]
    monkeypatch.setattr("results.trace_events.trace_document", lambda *_: {"begin": "x" * 100_000, "end": float("nan")})
    done = CliRunner().invoke(app, asked)
    assert (done.exit_code, "trace.json: cannot be written" in done.output) == (7, True)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def _contents(run: Path) -> dict[Path, int]:
    """When each file was written; SQLite's own side files come and go as it is read."""
    return {p: p.stat().st_mtime_ns for p in run.rglob("*.*") if p.suffix not in (".sqlite-wal", ".sqlite-shm")}


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("precious", encoding="utf-8")
    done = joulebench("run", str(plan), "--out", str(out))
    assert_refused(done.code, done.stderr, ["holds other files (thesis.tex); name an empty or new folder"])
    assert [p.name for p in out.iterdir()] == ["thesis.tex"]


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan())
    with small_disk(tmp_path / "disk", FREE_BYTES_NEEDED // 2) as disk:
        done = joulebench("run", str(plan), "--out", str(disk / "run"))
        assert_refused(done.code, done.stderr, ["MB are free on the disk of"], expected_code=7)
        assert list(disk.iterdir()) == []


@pytest.mark.skipif(Path("/sys/class/powercap/intel-rapl:0").exists(), reason="this machine has RAPL")
def test_a_meter_that_is_not_there_is_device_not_ready(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan(device=[{"name": "host", "meters": ["rapl"]}]))
    done = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert_refused(done.code, done.stderr, ["RAPL: no intel-rapl zone"], expected_code=4)
    assert not (tmp_path / "run").exists()


# --- failing and interrupted runs ------------------------------------------------------------------------------------


def test_failed_trials_are_told_by_the_exit_code_and_stand_in_the_tables(tmp_path: Path) -> None:
    # An embedding that claims to be the head's and is not: only loading the weights tells.
    damaged = copy_bundled(tmp_path / "damaged")
    _give_a_head_of_its_own(damaged)
    write_plan(tmp_path / "plan.toml", raw_plan(sweep={"model.source": [MODEL, str(damaged)]}))
    done = joulebench("run", "plan.toml", cwd=tmp_path)
    assert_refused(done.code, done.stderr, ["1 of 2 trials failed"], expected_code=5)
    run = tmp_path / "runs" / "small"  # the plan's name, where no --out is given
    trials = pd.read_csv(run / "trials.csv")
    assert set(trials["status"]) == {"ok", "failed"}
    (failed,) = trials[trials["status"] == "failed"].to_dict("records")
    assert "lm_head" in failed["failure"]
    assert failed["model"].startswith(f"{damaged}[source=")
    assert (run / "report.html").is_file()


def _give_a_head_of_its_own(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_ctrl_c_keeps_finished_trials_and_resume_completes(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan(protocol=FAST | {"repeats": 40, "idle_s": 0.02}))
    arguments = ("run", str(plan), "--out", str(tmp_path / "run"))
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as output:
        process = start(*arguments, output=output)
        _wait_for_trials(process, tmp_path / "run", 4)  # the trial of the last trace may not be stored yet
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    text = log.read_text(encoding="utf-8")
    assert "Traceback" not in text
    assert text.splitlines()[-1] == "error: interrupted; finished trials are kept, go on with --resume"
    with Store.view(tmp_path / "run") as store:
        kept = store.trials()
    assert 3 <= len(kept) < 40
    done = joulebench(*arguments, "--resume")
    assert done.code == 0, done.stderr
    assert f"resuming: {len(kept)} of 40 trials are there" in done.stdout
    with Store.view(tmp_path / "run") as store:
        trials = store.trials()
    assert trials[: len(kept)] == kept
    assert [t.repeat for t in trials] == list(range(40))


def _wait_for_trials(process: subprocess.Popen[str], run: Path, n: int) -> None:
    while len(list((run / "traces").glob("*.parquet"))) < n:
        assert process.poll() is None, "it ended before the signal"
        time.sleep(0.005)


# --- the other commands ----------------------------------------------------------------------------------------------


def test_dry_run_counts_exactly_and_writes_nothing(tmp_path: Path, finished_run: FinishedRun) -> None:
    done = joulebench("run", str(finished_run.plan), "--dry-run", "--json", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
    rows = {(r["engine"], r["workload"]): r for r in json.loads(done.stdout)}
    with Store.view(finished_run.directory) as store:
        data = store.data()
    cells = {c.cell_id: c for c in data.cells}
    assert len(rows) == len(cells) == 6
    for trial in data.trials:
        row = rows[cells[trial.cell_id].engine, cells[trial.cell_id].workload]
        assert row["requests"] == len(trial.completions)
        assert row["prefill_tokens"] == trial.prefill_tokens
        assert row["trials"] == (1 if trial.time_method == "modelled" else 2)
        assert trial.decode_tokens <= row["decode_tokens"]


def test_a_single_cell_is_no_plural(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.toml", raw_plan(engine=[DROPLESS], workload=[BOOLQ], device=[HOST]))
    assert joulebench("plan", "check", str(plan)).stdout.startswith(f"{plan}: ok, 1 cell\n")


def test_a_good_plan_is_told_so(finished_run: FinishedRun) -> None:
    check = joulebench("plan", "check", str(finished_run.plan))
    assert (check.code, check.stdout, check.stderr) == (
        0,
        f"{finished_run.plan}: ok, 6 cells\nnot looked at: devices and meters; `joulebench doctor` tests them\n",
        "",
    )


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("techniques", {"oracle", "dropless", "npumoe-t"}),
        ("workloads", {"hellaswag", "boolq", "ruler_niah_single_2", "ruler_niah_multikey_1", "sharegpt"}),
        ("devices", {"host", "model:m2-ultra"}),
        ("meters", {"nvml", "rapl", "zeus", "modelled", "replay"}),
    ],
)
def test_list_names_what_a_plan_can_name(what: str, names: set[str]) -> None:
    from harness.inventory import catalog_rows

    assert {row["name"] for row in catalog_rows(what)} >= names


def test_an_unknown_list_is_refused() -> None:
    done = CliRunner().invoke(app, ["list", "nope"])
    assert_refused(done.exit_code, done.stderr, ["list nope: no such list; take one of engines, techniques"])


def test_report_of_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    done = joulebench("report", str(tmp_path))
    assert_refused(done.code, done.stderr, ["holds no run"])
    assert list(tmp_path.iterdir()) == []


def test_devices_says_of_every_meter_whether_it_is_ready() -> None:
    done = joulebench("devices", "--json")
    rows = {(r["device"], r["meter"]): r for r in json.loads(done.stdout)}
    assert rows["host", "modelled"]["ready"] is True
    assert {m for d, m in rows if d == "host"} == {*METERS} - {"replay"}
    assert all(r["remark"] for r in rows.values() if not r["ready"])
    modelled = rows["model:m2-ultra", "timeline"]
    assert modelled["components"] == "cpu, npu, gpu, comm"
    assert "Apple M2 Ultra" in modelled["remark"]
    assert "for that table alone" in rows["model:m2-ultra-table4", "timeline"]["remark"]
    # Source 002 tells of phones the speed of whole models on choices of cores: no plan goes onto them.
    phones = [rows[f"model:{name}", "timeline"] for name in ("iphone-15", "mate-40-pro")]
    assert [(row["ready"], "prices no technique" in row["remark"]) for row in phones] == [(False, True)] * 2
    assert (modelled["ready"], "prices no" in modelled["remark"]) == (True, False)
    assert done.stderr == ""


def test_devices_lists_attached_phones_and_why_one_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, charging = FakePhone(tmp_path / "a", "READY001"), FakePhone(tmp_path / "b", "CHARGING2")
    charging.answer("dumpsys battery", DISCHARGING.replace("status: 3", "status: 2"))
    with FakeAdbServer(ready, charging) as server:
        monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", str(server.port))
        done = joulebench("devices", "--json")
    rows = {r["device"]: r for r in json.loads(done.stdout) if r["meter"] == "battery"}
    assert rows["adb:READY001"]["ready"] is True
    assert rows["adb:READY001"]["method"] == "battery gauge"
    assert rows["adb:READY001"]["components"] == "battery"
    assert "Phone One" in rows["adb:READY001"]["remark"]
    assert rows["adb:CHARGING2"]["ready"] is False
    assert "unplug it" in rows["adb:CHARGING2"]["remark"]


def test_without_an_adb_server_devices_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANDROID_ADB_SERVER_PORT", "1")
    rows = {r["device"]: r for r in json.loads(joulebench("devices", "--json").stdout) if r["meter"] == "battery"}
    assert rows["adb:"]["ready"] is False
    assert "adb start-server" in rows["adb:"]["remark"]


def test_the_environment_of_these_tests_has_no_data_folder() -> None:
    assert "JOULEBENCH_DATA" not in environment()
    assert environment()["PATH"] == os.environ["PATH"]


def test_the_list_of_techniques_for_programs_says_what_each_is_made_of() -> None:
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["list", "techniques", "--json"]).stdout)}
    npumoe = rows["npumoe"]
    assert (npumoe["source"], npumoe["lossless"], npumoe["backbone"]) == ("000 NPUMoE, §4.3", False, "npu")
    kinds = [npumoe[decision]["kind"] for decision in ("route", "place", "layout", "move")]
    assert kinds == ["router", "by_cost", "tiers", "nothing"]
    assert (npumoe["layout"]["kind"], npumoe["layout"]["grouped"]) == ("tiers", True)
    assert rows["blockwise"]["decode_layout"] == {"kind": "selective", "switch_alpha": 1.0}
    assert {name for name, row in rows.items() if row["lossless"]} == {
        "oracle", "dropless", "coreml-cpu", "coreml-naive", "anemll", "gpu", "blockwise", "selective", "all-experts",
        "on-demand", "prefetch-hint", "tensor-parallel", "expert-parallel", "tp-ep", "eplb",
        "moe-ondemand", "ndp-tp", "ndp-tp-lb", "ndp-tp-pre", "ndp", "fiddler", "monde", "duplex",
        "lru", "lfu", "static",
    }  # fmt: skip
    assert rows["custom"]["lossless"] is None
    plain = CliRunner().invoke(app, ["list", "techniques"]).stdout
    assert "static capacity tiers" in plain
    assert "switch_alpha" not in plain


def test_names_that_rich_has_a_picture_for_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """`compare run:a run:b` said "to B, run🅱 5 worse", and a phone of adb:key:5555 was shown as a picture."""
    told = "From A, run:a, to B, run:b: 5 worse"
    console_of().print(told, markup=False, highlight=False, soft_wrap=True)
    device = DeviceState(device="adb:key:5555", state="refused", host="lab[red]")
    asked = {"name": "x", "address": "", "pid": 1, "written_at": "", "n_trials": 1, "n_done": 0, "n_failed": 0}
    console_of().print(fleet_table(FleetState(**asked, is_over=True, devices=(device,))))
    out = capsys.readouterr().out
    assert told in out
    assert "adb:key:5555" in out
    assert "lab[red]" in out
