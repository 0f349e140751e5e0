"""Other projects by their wheels: real where one is installed here; else a Python that says what theirs said."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import engines.tiny
from engines.errors import EngineError, OutOfMemoryError
from engines.external import gate
from engines.external.programs.engine import ProgramEngine
from engines.external.programs.program import Lengths, PhaseSetting, ProgramError, ProgramOutput, Question, Settings
from engines.external.programs.target import HostTarget
from engines.external.programs.wheel import EXECUTORCH, LITERT_LM, MNN, SCRIPTS, WheelKind, WheelProgram, wheel_in
from engines.model.tokenizer import Tokenizer
from harness.external.programs import LiteRtSpec, MnnSpec
from results.records import Completion, Request

GOLDEN = Path(__file__).parent / "golden"
BUNDLED = Path(engines.tiny.__file__).parent / "bundled" / "tiny-qwen3-moe"
LENGTHS = Lengths(128, 32)
# Counts and speeds as litert-lm 0.18.1 told them of a random model of 0.6 M parameters; end_s is made up.
LITERT_SAID = (
    'JOULEBENCH {"version": "0.18.1", "n_prompt": 128, "n_new": 32, "prefill_tokens_per_s": 2674.030277543452,'
    ' "decode_tokens_per_s": 947.182443026236, "end_s": 1795548117.0}'
)
# Stamps as ExecuTorch 1.5.1 told them of a shorter request (8 tokens in, 16 out); counts, threads and line are made up.
STAMPED = (
    'JOULEBENCH {"version": "1.5.1", "n_prompt": 128, "n_cached": 159, "n_new": 32, "threads": 2,'
    ' "stamps_s": [1795548266.818, 1795548266.821, 1795548266.835]}'
)


def program(kind: WheelKind) -> WheelProgram:
    return WheelProgram(kind, Settings(PhaseSetting(2), PhaseSetting(2)), Path("/v/bin/python"), "./m", {})


def said(text: str, exit_code: int = 0, stderr: str = "") -> list[ProgramOutput]:
    return [ProgramOutput(text, stderr, exit_code)]


def environment(folder: Path, *packages: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    for package in packages:
        info = folder / "lib" / "python3.11" / "site-packages" / f"{package}.dist-info"
        info.mkdir(parents=True)
        (info / "RECORD").write_text("a.so,sha256=x,1\n")
    return folder


def test_times_of_litert_lm_follow_from_its_speeds() -> None:
    """Its 32 steps give 32 tokens, the first of which comes with the prompt's end here."""
    figures = program(LITERT_LM).figures(LENGTHS, said(f"INFO: loading\n{LITERT_SAID}\n"))
    assert figures.prefill.seconds == pytest.approx(128 / 2674.030277543452 + 1 / 947.182443026236)
    assert figures.decode is not None
    assert figures.decode.seconds == pytest.approx(31 / 947.182443026236)
    assert figures.prefill.is_derived
    assert figures.decode.is_derived
    assert figures.first_token == "derived"
    assert figures.decode.wall_s is not None
    assert figures.decode.wall_s[1] == 1795548117.0
    assert figures.version == "0.18.1"


@pytest.mark.parametrize("kind", [MNN, EXECUTORCH])
def test_stamps_of_a_wheel_are_measured(kind: WheelKind) -> None:
    figures = program(kind).figures(LENGTHS, said(STAMPED))
    assert figures.prefill.seconds == pytest.approx(0.003, abs=1e-6)
    assert figures.decode is not None
    assert figures.decode.seconds == pytest.approx(0.014, abs=1e-6)
    assert figures.first_token == "measured"
    assert not figures.prefill.is_derived


@pytest.mark.parametrize(
    ("kind", "old", "new", "why"),
    [
        (MNN, '"n_cached": 159', '"n_cached": 127', "159 asked, 127 done"),
        (MNN, '"n_new": 32', '"n_new": 9', "32 asked, 9 done"),
        (EXECUTORCH, '"n_prompt": 128', '"n_prompt": 129', "128 asked, 129 done"),
        (EXECUTORCH, '"n_new": 32', '"n_new": 12', "31 asked, 12 done"),
        (EXECUTORCH, '"threads": 2', '"threads": 1', "threads: 2 asked, 1 done"),
        (EXECUTORCH, '"threads": 2, ', "", "threads: 2 asked, None done"),
        (MNN, "1795548266.821", "1795548266.801", "do not rise"),
        (EXECUTORCH, "1795548266.818", "1795548266.821", "over before its clock went on"),
        (MNN, "1795548266.821", "NaN", "is no number"),
        (MNN, '"stamps_s": [1795548266.818, ', '"stamps_s": [', "three stamps"),
        (MNN, "JOULEBENCH", "JOULE", "printed no line"),
        (MNN, "}", "", "cut short"),
    ],
)
def test_what_a_wheel_did_otherwise_than_asked_is_no_figure(kind: WheelKind, old: str, new: str, why: str) -> None:
    assert old in STAMPED
    with pytest.raises(ProgramError, match=why):
        program(kind).figures(LENGTHS, said(STAMPED.replace(old, new)))


def test_a_wheel_out_of_memory_says_so() -> None:
    with pytest.raises(OutOfMemoryError):
        program(MNN).figures(LENGTHS, said("", 137))


def test_a_wheel_is_found_in_its_environment_and_its_list_of_digests_is_of_the_build(tmp_path: Path) -> None:
    folder = environment(tmp_path / "v", "mnn-3.6.1", "litert_lm-0.18.1", "litert_lm_api-0.18.1")
    assert (wheel_in(folder, "MNN").version, wheel_in(folder, "litert-lm").version) == ("3.6.1", "0.18.1")
    asked: dict[str, Any] = {"name": "a", "runs": "litert-lm", "model_file": "m", "threads": 1}
    spec = LiteRtSpec.model_validate({**asked, "environment": str(folder)})
    assert spec.find().files["wheel's RECORD"].parent.name == "litert_lm-0.18.1.dist-info"
    assert spec.find().version == "litert-lm 0.18.1"
    with pytest.raises(EngineError, match="no wheel executorch"):
        wheel_in(folder, "executorch")
    with pytest.raises(EngineError, match="no virtual environment"):
        wheel_in(tmp_path / "none", "MNN")


@pytest.mark.parametrize("more", [{}, {"program": "p", "environment": "e"}])
def test_either_a_program_or_a_wheel_is_named(more: dict[str, str]) -> None:
    spec = MnnSpec.model_validate({"name": "a", "runs": "mnn", "model_file": "m", "threads": 1, **more})
    assert any("one of both" in problem for problem in spec.problems())


def real(kind: WheelKind, python: Path, files: dict[str, Path], model: str, **options: object) -> ProgramEngine:
    """Of one thread, on a random model."""
    settings = Settings(PhaseSetting(1), PhaseSetting(1))
    wheel = WheelProgram(kind, settings, python, model, options)
    tokenizer = Tokenizer(BUNDLED, "tiny", (), 2048)
    placed = {**files, kind.script: SCRIPTS / kind.script}
    return ProgramEngine(wheel, HostTarget(time.monotonic), placed, "host", tokenizer, 512, time.monotonic, 60.0)


def answered(engine: ProgramEngine, n_prompt: int, n_new: int) -> tuple[Completion, tuple[str, ...]]:
    """A completion whose edges lie in its own process, and remarks."""
    ids = engine.tokenizer.encode("The key is in the house. " * n_prompt)[:n_prompt]
    request = Request(
        request_id="a", sample_id="a", kind="generate", prompt_ids=tuple(ids), max_new_tokens=n_new,
        ignore_end_tokens=True,
    )  # fmt: skip
    begin_s, heard = time.monotonic(), []
    try:
        done = engine.run(request, lambda event, at_s: heard.append((event, at_s)))
    finally:
        engine.close()
    assert [event for event, _ in heard] == ["request start", "prefill end", "request end"]
    assert begin_s < done.start_s < done.prefill_end_s < done.end_s < time.monotonic()
    assert (done.n_prompt_tokens, len(done.token_ids)) == (n_prompt, n_new)
    # Starting Python and loading are in no latency.
    assert sum(b - a for a, b in done.set_aside_s) > done.end_s - done.start_s
    return done, engine.take_remarks()


def test_the_wheel_of_mnn_computes_what_it_was_asked() -> None:
    """The real one: prompt and steps in its cache, stamps on our clock."""
    if importlib.util.find_spec("MNN") is None:
        pytest.skip("the wheel MNN is not installed: pip install MNN")
    files = {f"model/{path.name}": path for path in (GOLDEN / "mnn_model").iterdir()}
    engine = real(MNN, Path(sys.executable), files, "model/config.json", precision="high")
    done, remarks = answered(engine, 64, 8)
    assert done.derived == ()
    assert any("threads is what was asked" in remark for remark in remarks)


def test_the_wheel_of_litert_lm_computes_what_it_was_asked() -> None:
    """The real one: its own counts of tokens are those asked, and its times fit into the time that it ran."""
    if importlib.util.find_spec("litert_lm") is None:
        pytest.skip("the wheel litert-lm is not installed: pip install litert-lm")
    files = {"model.litertlm": GOLDEN / "litert_lm_model" / "model.litertlm"}
    done, remarks = answered(real(LITERT_LM, Path(sys.executable), files, "./model.litertlm"), 64, 8)
    assert done.derived == ("first token", "prefill", "decode")
    assert any(remark.startswith("LiteRT-LM 0.") for remark in remarks)
    assert any("threads is what was asked" in remark for remark in remarks)


def executorch(python: Path) -> ProgramEngine:
    files = {"model.pte": GOLDEN / "executorch_model" / "model.pte", "tokenizer.json": BUNDLED / "tokenizer.json"}
    options = {"tokenizer": "./tokenizer.json", "warm_up": True}
    return real(EXECUTORCH, python, files, "./model.pte", **options)


def executorch_python() -> Path:
    """Of the environment that a person names: the wheel is too large for the one of the tests. Skips without."""
    named = os.environ.get("JOULEBENCH_EXECUTORCH")
    if not named:
        pytest.skip("no wheel executorch: set JOULEBENCH_EXECUTORCH to a virtual environment that has it")
    return wheel_in(Path(named), EXECUTORCH.package).python


def test_the_wheel_of_executorch_computes_what_it_was_asked() -> None:
    """The real one: its tokenizer counts the prompt as ours, its pool has the threads asked, its stamps are placed."""
    done, remarks = answered(executorch(executorch_python()), 96, 24)
    assert done.derived == ()
    assert any(remark.startswith("ExecuTorch 1.") for remark in remarks)
    assert not any("threads" in remark for remark in remarks)


def of_transformers(width: int, inner: int, layers: int, reads: Tokenizer) -> list[tuple[int, ...]]:
    """Greedy answers to the gate's questions of the random model that the wheels run (tests/golden/README.md)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=1,
        num_key_value_heads=1, head_dim=width, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    found = []
    for request in gate.requests_of(reads.encode_prompt):
        ids = torch.tensor([request.prompt_ids])
        out = model.generate(ids, max_new_tokens=request.max_new_tokens, do_sample=False, eos_token_id=None)
        found.append(tuple(out[0, ids.shape[1] :].tolist()))
    return found


def check_gate(engine: ProgramEngine, width: int, inner: int, layers: int) -> None:
    """It passes beside transformers' answers of its own weights, and not beside those of others."""
    reads = gate.ReadsText(engine.tokenizer.encode, engine.tokenizer.decode)
    try:
        theirs = gate.answers_of(engine, gate.requests_of(engine.tokenizer.encode_prompt))
    finally:
        engine.close()
    assert gate.faults(of_transformers(width, inner, layers, engine.tokenizer), theirs, reads) == ()
    others = [(5, 6, 7, 8)] * len(theirs)
    assert gate.faults(others, theirs, reads)[0] == "3 of 3 short answers begin with another token than ours"


def test_the_wheel_of_mnn_answers_as_transformers_does() -> None:
    if importlib.util.find_spec("MNN") is None:
        pytest.skip("the wheel MNN is not installed: pip install MNN")
    files = {f"model/{path.name}": path for path in (GOLDEN / "mnn_model").iterdir()}
    check_gate(real(MNN, Path(sys.executable), files, "model/config.json", precision="high"), 64, 128, 1)


def test_the_wheel_of_litert_lm_answers_as_transformers_does() -> None:
    if importlib.util.find_spec("litert_lm") is None:
        pytest.skip("the wheel litert-lm is not installed: pip install litert-lm")
    files = {"model.litertlm": GOLDEN / "litert_lm_model" / "model.litertlm"}
    check_gate(real(LITERT_LM, Path(sys.executable), files, "./model.litertlm"), 64, 128, 1)


def test_the_wheel_of_executorch_answers_as_transformers_does() -> None:
    check_gate(executorch(executorch_python()), 32, 64, 4)


@pytest.mark.parametrize("told", ['"answer": null', '"answer": [1, "2"]', '"n_new": 3'])
def test_an_answer_of_a_wheel_that_is_none_is_no_answer(told: str) -> None:
    with pytest.raises(ProgramError, match="told as an answer"):
        program(MNN).answer(Question("q", (1,), 12), said(f"JOULEBENCH {{{told}}}")[0])
