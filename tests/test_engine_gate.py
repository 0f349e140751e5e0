"""Engines that are not ours: the gate before any number, the doctor, and a run that holds both side by side."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from engines.external.base import Answer
from engines.external.gate import QUESTIONS, ReadsText, faults, faults_alone, requests_of, run_answers
from engines.external.programs.engine import ProgramEngine
from engines.model.checkpoints import BUNDLED_FOLDER, Checkpoint, inspect_checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from harness.answers_gate import AnswersGate
from harness.commands import app
from harness.core_sets import ThreadCounts
from harness.external.catalog import EXTERNAL
from harness.matrix import CellPlan
from harness.plan import draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from harness.session import run_trial
from results.cells import WRONG_ANSWERS, usable
from results.environments import Road
from results.records import Request
from results.roads import road_words
from tests.plans import DROPLESS, MODEL, raw_plan
from tests.protocol_server import dropless, engine, served
from tests.test_wheels import environment

OURS = [(5, 6, 7, 8, 9, 10, 5, 6), (11, 12, 13, 14, 15, 16, 17, 18), (20, 21, 22, 23, 24, 25, 26, 27)]


def words(tokens: Any) -> str:
    return "".join("\ufffd" if token >= 1000 else f"w{token} " for token in tokens)


def numbers(text: str) -> list[int]:
    return [1000 if "\ufffd" in word else int(word[1:]) for word in text.split()]


WORDS = ReadsText(numbers, words)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (OURS, ()),
        # Narrow weights: one answer begins otherwise, and none ends as ours.
        ([(*OURS[0][:4], 1, 2, 3, 4), OURS[1], (9, *OURS[2][1:])], ()),
        ([(1, *OURS[0][1:]), (2, *OURS[1][1:]), OURS[2]], ("2 of 3 short answers begin with another token than ours",)),
        ([OURS[0], OURS[1][:1] * 8, OURS[2]], ("1 of 3 answers repeat one token, and ours do not",)),
        ([(5, *range(1000, 1040)), OURS[1], OURS[2]], ("1 of 3 answers cannot be read, and ours can",)),
        # Texts: blanks in front are anybody's.
        ([f" {words(OURS[0])}", "w11", words(OURS[2])[:4]], ()),
        (["w5 w6", "w1", "w2"], ("2 of 3 short answers begin with another token than ours",)),
        (["", "", words(OURS[2])], ("2 of 3 short answers begin with another token than ours",)),
        (["w5 w5 w5 w5 w5", "w11", "w20"], ("1 of 3 answers repeat one token, and ours do not",)),
        (["w5" + 9 * "\ufffd", "w11", "w20"], ("1 of 3 answers cannot be read, and ours can",)),
    ],
)
def test_the_gate_tells_other_words_repeats_and_what_cannot_be_read(
    theirs: list[Answer], told: tuple[str, ...]
) -> None:
    assert faults(OURS, theirs, WORDS) == told


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ([" Paris.", " 5 x y", " w1 w2"], ()),
        ([" Rome.", " four", ""], ()),
        ([" Rome.", " 5", " w1"], ("none of 2 short answers has a word that is known (Paris, 4)",)),
        ([" Paris", " 4", "w7 w7 w7 w7"], ("1 of 3 answers repeat one token",)),
        ([" Paris", " 4", "\ufffd\ufffd\ufffd w7"], ("1 of 3 answers cannot be read",)),
    ],
)
def test_without_our_weights_the_gate_asks_what_every_model_knows(theirs: list[str], told: tuple[str, ...]) -> None:
    assert faults_alone(theirs, ReadsText(lambda text: [len(word) for word in text.split()], words)) == told


def test_a_model_that_repeats_itself_is_not_marked_for_a_little_more() -> None:
    """A random model, its weights narrowed by LiteRT-LM's exporter: 10 of 12 tokens were one, and 9 of 12 of ours."""
    own, its = (289,) * 3 + (1662,) * 9, (289,) * 2 + (1662,) * 10
    assert faults([own] * 3, [its] * 3, ReadsText(numbers, lambda tokens: "is")) == ()
    assert faults([tuple(range(12))] * 3, [(0, *its[1:])] * 3, ReadsText(numbers, lambda tokens: "is")) == (
        "3 of 3 answers repeat one token, and ours do not",
    )


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
    for arm in (DROPLESS | {"threads": 1}, llama):
        parts, cell = prepared(arm, LENGTHS)
        found[arm["name"]], _ = run_trial(parts.arm(cell), draft_plan(raw_plan()).plan.protocol, 0)
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


def other_weights(folder: Path) -> ReferenceEngine:
    """Of the bundled model with its embedding turned around."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(BUNDLED_FOLDER / "tiny-qwen3-moe", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return ReferenceEngine(load_checkpoint(str(folder), torch.float32), dropless(), threads=1)


@pytest.mark.parametrize("flavour", ["joulebench", "openai"])
def test_a_server_is_asked_before_any_number_and_one_with_other_weights_is_marked(flavour: str, tmp_path: Path) -> None:
    """The plain protocol cannot be asked for exact lengths, and tells no ids."""
    asks = {"name": "sharegpt", "limit": 1, "max_turns": 1, "max_new_tokens": 8}
    found = []
    for own in (None, other_weights(tmp_path / "other")):
        with served(own) as server:
            parts, cell = prepared({"name": "s", "runs": "openai", "url": server.url, "flavour": flavour}, asks)
            found.append(parts.arm(cell).gate)
            parts.close()
    right, wrong = found
    assert right == ((), ())
    assert any("short answers begin with another token than ours" in fault for fault in wrong.faults)


ANSWERS = """#!/bin/sh
# As llama_main: the prompt, each piece of its answer as it comes, and a line of figures.
[ -z "$ASKED" ] || echo "$@" >>"$ASKED"
cat prompt.txt
case "$(cat prompt.txt)" in {cases} esac
printf '\\nPyTorchObserver {{"prompt_tokens":5}}\\n'
"""


def llama_main(folder: Path, answers: Sequence[str]) -> dict[str, Any]:
    """An arm whose program says this to the questions of the gate."""
    folder.mkdir()
    cases = "".join(
        f"{shlex.quote(q.text)}) printf %s {shlex.quote(a)};; " for q, a in zip(QUESTIONS, answers, strict=True)
    )
    for name, text in (("llama_main", ANSWERS.format(cases=cases)), ("m.pte", "m"), ("tokenizer.json", "{}")):
        (folder / name).write_text(text)
    (folder / "llama_main").chmod(0o755)
    files = {"program": "llama_main", "model_file": "m.pte", "tokenizer_file": "tokenizer.json"}
    return {"name": "et", "runs": "executorch", "threads": 1} | {key: str(folder / name) for key, name in files.items()}


def test_a_program_that_shows_answers_is_asked_once_for_all_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = engine()
    ours = [own.tokenizer.decode(ids) for ids in run_answers(own, requests_of(own.tokenizer.encode_prompt))]
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    arm = llama_main(tmp_path / "right", ours)
    parts, cell = prepared(arm, LENGTHS)
    assert parts.arm(cell).gate == ((), ())
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 3
    assert all("--temperature=0" in line and "--max_new_tokens=12" in line for line in asked)
    assert not any("--ignore_eos" in line or "--warmup" in line for line in asked)
    # Another arm of the same files.
    more = replace(cell, engine=cell.engine.model_copy(update={"threads": ThreadCounts(prefill=2, decode=2)}))
    more = replace(more, cell=more.cell.model_copy(update={"cell_id": "other", "engine": "more"}))
    assert parts.arm(more).gate == ((), ())
    parts.close()
    assert len((tmp_path / "asked").read_text().splitlines()) == 3
    parts, cell = prepared(llama_main(tmp_path / "wrong", ["!" * 40, "?", ours[2]]), LENGTHS)
    assert parts.arm(cell).gate.faults[0] == "et: 2 of 3 short answers begin with another token than ours"
    parts.close()


def test_an_engine_that_shows_no_answer_is_told_in_the_words_of_its_road(tmp_path: Path) -> None:
    for name in ("llama-bench", "m.gguf"):
        (tmp_path / name).write_text("GGUF")
    arm = {"name": "lb", "runs": "llama-bench", "program": str(tmp_path / "llama-bench"), "threads": 1}
    parts, cell = prepared(arm | {"model_file": str(tmp_path / "m.gguf")}, LENGTHS)
    found = parts.arm(cell)
    parts.close()
    told = (
        "whether it answers right is not seen, nor that m.gguf is bundled:tiny-qwen3-moe: it makes up its prompts, and"
        " shows no answer"
    )
    assert found.gate == ((), (told,))
    assert isinstance(found.engine, ProgramEngine)
    road = road_words(Road(arithmetic="llama-bench", dtype=None, n_threads=1, answers_are_seen=False))
    assert road == "llama-bench, 1 thread, answers not seen"


class SaysParis:
    why_silent = None
    tokenizer = engine().tokenizer

    def answer_aside(self, request: Request) -> str:
        return " Paris, of course"


@pytest.mark.parametrize("why", ["not on this machine", "of memory are free here"])
def test_where_our_weights_are_not_here_or_do_not_fit_what_is_known_stands_in(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, cell = prepared(llama_main(tmp_path / "et", ["", "", ""]), LENGTHS)
    parts.close()
    facts = inspect_checkpoint(MODEL)
    if why.startswith("not"):
        facts = replace(facts, folder=tmp_path / "et")
    else:
        monkeypatch.setattr("harness.answers_gate.available_bytes", lambda: 1 << 20)

    def load(plan: CellPlan) -> Checkpoint:
        raise AssertionError("weights that are not here, or too large, are not read")

    passed = AnswersGate(load).passed(cell, SaysParis(), facts)  # type: ignore[arg-type]
    assert passed.faults == ()
    assert len(passed.notes) == 1
    assert passed.notes[0].startswith("its answers were held against what is known, and not against ours: ")
    assert why in passed.notes[0]


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
    assert on_phone.count("a plan names the program, as program = PATH, built for Android arm64") == 1
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
    assert str(row()["remark"]).endswith("; `pip install executorch` installs it")
    listed = CliRunner().invoke(app, ["engines", "doctor"]).stdout
    assert listed.count("; `pip install 'joulebench[mnn]'` installs it") == 1
    assert listed.count("; `pip install 'joulebench[litert-lm]'` installs it") == 1
    none = CliRunner().invoke(app, ["engines", "doctor", "--environment", str(tmp_path)])
    assert (none.exit_code, f"no virtual environment (no bin/python in it): {tmp_path}" in none.stderr) == (2, True)
    phone = CliRunner().invoke(app, ["engines", "doctor", "--device", "adb:X", "--environment", str(folder)])
    assert (phone.exit_code, "a wheel runs on the host alone" in phone.stderr) == (2, True)
