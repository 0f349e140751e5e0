"""Engines that are not ours: the gate before any number, the doctor, and a run that holds both side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engines.external.gate import faults
from harness.commands import app
from harness.external.catalog import EXTERNAL
from harness.matrix import CellPlan
from harness.plan import draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.session import run_trial
from results.cells import WRONG_ANSWERS, usable
from tests.plans import DROPLESS, raw_plan
from tests.test_wheels import environment

OURS = [(5, 6, 7, 8, 9, 10, 5, 6), (11, 12, 13, 14, 15, 16, 17, 18), (20, 21, 22, 23, 24, 25, 26, 27)]


def words(tokens: Any) -> str:
    return "".join("\ufffd" if token >= 1000 else f"w{token} " for token in tokens)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (OURS, ()),
        # Narrow weights: one answer begins otherwise, and none ends as ours.
        ([(*OURS[0][:4], 1, 2, 3, 4), OURS[1], (9, *OURS[2][1:])], ()),
        ([(1, *OURS[0][1:]), (2, *OURS[1][1:]), OURS[2]], ("2 of 3 short answers begin with another token than ours",)),
        ([OURS[0], OURS[1][:1] * 8, OURS[2]], ("1 of 3 answers repeat one token, and ours do not",)),
        ([(5, *range(1000, 1040)), OURS[1], OURS[2]], ("1 of 3 answers cannot be read, and ours can",)),
    ],
)
def test_the_gate_tells_other_words_repeats_and_what_cannot_be_read(
    theirs: list[tuple[int, ...]], told: tuple[str, ...]
) -> None:
    assert faults(OURS, theirs, words) == told


def prepared(engine: dict[str, Any], workload: dict[str, Any]) -> tuple[RunParts, CellPlan]:
    draft = draft_plan(raw_plan(engine=[engine], workload=[workload]))
    parts = RunParts(draft.plan.protocol)
    return parts, preflight(draft, parts).cells[0]


LENGTHS = {"name": "fixed_lengths", "prompt_tokens": 40, "new_tokens": 8, "limit": 2}


def test_llama_cpp_and_ours_answer_a_window_alike_and_a_wrong_model_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("xllamacpp")
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path))
    llama = {"name": "other", "runs": "llama.cpp", "threads": 1}
    found = {}
    for engine in (DROPLESS | {"threads": 1}, llama):
        parts, cell = prepared(engine, LENGTHS)
        found[engine["name"]], _ = run_trial(parts.arm(cell), draft_plan(raw_plan()).plan.protocol, 0)
        parts.close()
    own, its = found["dropless"], found["other"]
    assert [c.token_ids for c in its.completions] == [c.token_ids for c in own.completions]
    assert its.requests_sha256 == own.requests_sha256
    assert its.marks == own.marks
    assert its.counters is None, "what its experts did is not told, and 0 would be a figure"
    assert its.road is not None
    assert its.road.arithmetic == "llama.cpp"
    # The same file with the embedding turned around: fast, well-formed, and wrong.
    written = next((tmp_path / "models").glob("*.gguf"))
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(written.read_bytes())
    reader = gguf.GGUFReader(wrong, "r+")
    embedding = next(t for t in reader.tensors if t.name == "token_embd.weight")
    embedding.data[:] = embedding.data[::-1].copy()
    reader.data.flush()
    parts, cell = prepared(llama | {"model_file": str(wrong)}, LENGTHS)
    marked, _ = run_trial(parts.arm(cell), draft_plan(raw_plan()).plan.protocol, 0)
    parts.close()
    assert WRONG_ANSWERS in marked.marks
    assert usable([marked]) == []
    assert any(note.startswith("other: ") for note in marked.notes)


def test_a_program_of_this_host_is_not_on_a_phone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    # Nothing listens there.
    monkeypatch.setenv("ADB_SERVER_SOCKET", "tcp:127.0.0.1:1")

    def row(device: str) -> tuple[dict[str, object], str]:
        done = CliRunner().invoke(app, ["engines", "doctor", "--device", device, "--json"])
        return next(r for r in json.loads(done.stdout) if r["runs"] == "llama-bench"), done.stderr

    on_host, said_of_host = row("host")
    on_phone, said_of_phone = row("adb:X")
    assert (on_host["here"], on_host["remark"], said_of_host) == (True, str(program), "")
    assert on_phone["here"] is None
    assert "not looked for on a phone" in str(on_phone["remark"])
    assert "adb:X: not there or not ready: adb: " in said_of_phone


def test_the_doctor_of_engines_says_what_is_here_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    done = CliRunner().invoke(app, ["engines", "doctor", "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["runs"]: row for row in json.loads(done.stdout)}
    assert rows["llama-bench"]["here"] is False
    assert "no program llama-bench in PATH" in rows["llama-bench"]["remark"]
    assert rows["llama.cpp"]["log_likelihoods"] is True
    assert "llama.cpp" not in {
        row["runs"]
        for row in json.loads(CliRunner().invoke(app, ["engines", "doctor", "--device", "adb:X", "--json"]).stdout)
    }
    assert CliRunner().invoke(app, ["engines", "doctor", "--device", "model:m2-ultra"]).exit_code == 2


def test_the_doctor_of_engines_says_in_a_terminal_what_is_missing_below_its_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("COLUMNS", "80")
    on_host = CliRunner().invoke(app, ["engines", "doctor"]).stdout.splitlines()
    # One line each, in a terminal of 80 columns.
    table = [line.split() for line in on_host if line.startswith("  ") and line.strip()]
    on_hosts = [name for name, spec in EXTERNAL.items() if "host" in spec.abilities.devices]
    assert [row[0] for row in table] == ["runs", *on_hosts]
    assert any(row[:2] == ["llama-bench", "no"] for row in table)
    (line,) = (line for line in on_host if line.startswith("llama-bench: "))
    assert "Missing: no program llama-bench in PATH" in line
    monkeypatch.setenv("ADB_SERVER_SOCKET", "tcp:127.0.0.1:1")
    on_phone = CliRunner().invoke(app, ["engines", "doctor", "--device", "adb:X"]).stdout
    assert on_phone.count("a plan names the program, built for Android arm64") == 1
    assert "Missing" not in on_phone


def test_the_doctor_of_engines_finds_a_wheel_in_an_environment_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.prefix", str(tmp_path / "own"))
    folder = environment(tmp_path / "v", "executorch-1.5.1")

    def row(*more: str) -> dict[str, object]:
        done = CliRunner().invoke(app, ["engines", "doctor", "--json", *more])
        assert done.exit_code == 0, done.output
        return next(r for r in json.loads(done.stdout) if r["runs"] == "executorch")

    found = row("--environment", str(folder))
    assert (found["here"], found["version"]) == (True, "1.5.1")
    assert found["remark"] == f'its wheel: environment = "{folder}"'
    # Without, it says that it looks in one environment alone.
    assert row()["here"] is False
    assert f"in {tmp_path}/own, the environment of joulebench (look in another: --environment)" in str(row()["remark"])
    none = CliRunner().invoke(app, ["engines", "doctor", "--environment", str(tmp_path)])
    assert (none.exit_code, f"no virtual environment (no bin/python in it): {tmp_path}" in none.stderr) == (2, True)
    phone = CliRunner().invoke(app, ["engines", "doctor", "--device", "adb:X", "--environment", str(folder)])
    assert (phone.exit_code, "a wheel runs on the host alone" in phone.stderr) == (2, True)
