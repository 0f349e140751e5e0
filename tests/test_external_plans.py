"""Engines of a plan that are not joulebench's own: what is read, what is refused, and what a cell says of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from engines.external.base import Abilities, Found, why_not_asked
from harness import external_parts
from harness.external.base import ExternalSpec
from harness.external.llama_cpp import LlamaCppSpec
from harness.plan import PlanError, build_plan, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from results.records import Request, Sampling
from tests.fleet_phones import PROGRAM
from tests.plans import DROPLESS, M2_ULTRA, PHONE, raw_plan

LLAMA: dict[str, Any] = {"name": "other", "runs": "llama.cpp"}


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library that stands for the engine's build; what it holds is its identity."""
    library = tmp_path / "engine.so"
    library.write_bytes(b"build 1")
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(LlamaCppSpec, "find", lambda spec: Found(str(library), "build 1", {"library": library}))
    monkeypatch.setattr(external_parts, "found_build", lambda spec: spec.find())
    return library


def cell_of(raw: dict[str, Any]) -> Any:
    draft = draft_plan(raw_plan(engine=[raw]))
    return preflight(draft, RunParts(draft.plan.protocol)).cells[0].cell


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (LLAMA | {"runs": "lama.cpp"}, "engine[0].runs: unknown engine 'lama.cpp'; did you mean llama.cpp?"),
        (
            LLAMA | {"runs": "vLLM"},
            "engine[0].runs: unknown engine 'vLLM'; it is a server: write runs = \"openai\", fla",
        ),
        (LLAMA | {"runs": 3}, "engine[0].runs: unknown engine 3; known: "),
        (LLAMA | {"technique": {"name": "dropless"}}, "engine[0].technique: is of joulebench's own engine"),
        (LLAMA | {"weihgts": "f32"}, "engine[0].weihgts: unknown key, found 'f32'; did you mean weights?"),
        (
            DROPLESS | {"weights": "f16"},
            'engine[0].weights: is of engines that are not ours (llama.cpp, coreml): give runs = "llama.cpp", or remove'
            " the line; of joulebench's own, quantise has them by component",
        ),
        (DROPLESS | {"arithmetic": "int8"}, "engine[0].arithmetic: is a key of quantise: write it there"),
        (DROPLESS | {"cache": "fp16"}, "engine[0].cache: is a key of quantise: write it there"),
        (DROPLESS | {"experts": "int8"}, "engine[0].experts: is a key of quantise: write it there"),
        (LLAMA | {"threads": 3, "cores": "0-1"}, 'engine[0].threads: 3 for prefill on cores "0-1"'),
    ],
)
def test_a_key_of_the_other_kind_is_refused_with_its_reason(raw: dict[str, Any], problem: str) -> None:
    assert [p for p in draft_plan(raw_plan(engine=[raw])).problems if p.startswith(problem)]


def test_an_engine_that_is_not_ours_makes_cells_on_its_devices_alone(build: Path) -> None:
    plan = draft_plan(raw_plan(engine=[DROPLESS, LLAMA], device=[{"name": "host"}, M2_ULTRA])).sound()
    assert [(c.cell.engine, c.cell.technique, c.cell.device) for c in plan.cells] == [
        ("dropless", "dropless", "host"),
        ("other", "llama.cpp", "host"),
        ("dropless", "dropless", "model:m2-ultra"),
    ]
    assert any("other: a sheet prices joulebench's own plans" in line for line in plan.skipped)
    # Ours is what its answers are compared with, and it is nobody's reference.
    assert plan.cells[1].cell.reference_id == plan.cells[0].cell.cell_id
    on_phone = draft_plan(raw_plan(engine=[LLAMA], device=[PHONE]))
    assert on_phone.plan.skipped == ("adb:R58M42ABCDE: other: llama.cpp goes onto host only",)


def test_the_build_belongs_to_the_identity_of_a_cell(build: Path) -> None:
    """So a run that was begun with one build is not resumed with another."""
    first, again = cell_of(LLAMA), cell_of(LLAMA)
    assert first == again
    assert first.engine_parameters["build"] == "build 1"
    build.write_bytes(b"build 2")
    assert cell_of(LLAMA).cell_id != first.cell_id


def test_what_is_not_here_is_told_before_anything_runs(build: Path) -> None:
    build.unlink()
    with pytest.raises(PlanError, match=r"engine other: library of llama\.cpp: no file .*engine\.so"):
        cell_of(LLAMA | {"model_file": "nowhere.gguf"})


def test_all_files_of_a_program_that_are_missing_are_told_at_once(tmp_path: Path) -> None:
    keys = {"program": "bench", "model_file": "a.mllm", "config_file": "c.json"}
    arm = {"name": "m", "runs": "mllm", "threads": 1, "libraries": [f"{tmp_path}/b.so"]}
    raw = arm | {key: f"{tmp_path}/{name}" for key, name in keys.items()}
    draft = draft_plan(raw_plan(engine=[raw], workload=[{"name": "fixed_lengths"}]))
    with pytest.raises(PlanError) as caught:
        preflight(draft, RunParts(draft.plan.protocol))
    told = caught.value.problems
    assert len(told) == 4
    for name in ("bench is not there", "no file .*b.so", "no file .*a.mllm", "no file .*c.json"):
        assert any(re.search(name, line) for line in told), told


@pytest.mark.parametrize("named", ["./llama-bench", "llama-bench"])
def test_a_program_that_the_check_finds_is_found_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """In the current folder the check found it, and each trial failed because it was not there."""
    program, model = tmp_path / "llama-bench", tmp_path / "model.gguf"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    model.write_bytes(b"GGUF")
    arm = {"name": "p", "runs": "llama-bench", "program": named, "model_file": "model.gguf", "threads": 1}
    lengths = {"name": "fixed_lengths", "prompt_tokens": 8, "new_tokens": 2, "limit": 1}
    draft = draft_plan(raw_plan(engine=[arm], workload=[lengths]))
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    if os.sep not in named:
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    parts = RunParts(draft.plan.protocol)
    try:
        (cell_plan,) = preflight(draft, parts).cells
        assert parts.arm(cell_plan).engine.device == "host"
    finally:
        parts.close()


def test_a_model_file_that_is_no_model_is_told_before_anything_runs(build: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("# A page")
    with pytest.raises(
        PlanError, match=r"README\.md: begins with b'# A ', and a model that llama\.cpp reads with b'GGUF'"
    ):
        cell_of(LLAMA | {"model_file": str(page)})


class OneChoice(ExternalSpec):
    tag: ClassVar[str] = "one"
    abilities: ClassVar[Abilities] = Abilities(
        token_ids=False, loglikelihoods=False, stamps="phase", only_fixed_lengths=True, stop_texts=False,
        threads="both phases",
    )  # fmt: skip

    runs: Literal["one"]


def test_threads_and_cores_that_an_engine_cannot_take_are_refused() -> None:
    asked = OneChoice.model_validate(
        {"name": "a", "runs": "one", "threads": {"prefill": 4, "decode": 2}, "cores": "0-7"}
    )
    threads, cores = asked.problems()
    assert threads.startswith("threads: one takes one value for both phases, found 4 for prefill and 2 for decode")
    assert cores == "cores: one cannot be told its cores; remove the line"


def test_requests_beyond_an_engine_are_not_supported_with_the_reason() -> None:
    def request(**changes: Any) -> Request:
        return Request(**{"request_id": "r", "sample_id": "s", "kind": "generate", "prompt_ids": (1,)} | changes)

    fixed, full = OneChoice.abilities, LlamaCppSpec.abilities
    assert why_not_asked(fixed, "one", [request()], made_up=True) is None
    assert "takes no tokens" in str(why_not_asked(fixed, "one", [request()], made_up=False))
    scored = request(kind="loglikelihood", continuation_ids=(2,))
    assert "no log-likelihoods" in str(why_not_asked(fixed, "one", [scored], made_up=True))
    assert why_not_asked(full, "llama.cpp", [scored, request(stop=("\n",))], made_up=False) is None
    drawn = request(sampling=Sampling(temperature=0.7))
    assert "temperature = 0" in str(why_not_asked(full, "llama.cpp", [drawn], made_up=False))


@pytest.mark.parametrize("key", ["key", "api_key", "key_variable"])
def test_a_key_that_is_written_into_a_plan_is_refused_and_not_repeated(key: str) -> None:
    """It went into the terminal, and into a schedule's log."""
    server = {"name": "s", "runs": "openai", "url": "http://127.0.0.1:9/v1", key: "sk-very-secret"}
    with pytest.raises(PlanError) as caught:
        build_plan(raw_plan(engine=[server]))
    told = "\n".join(caught.value.problems)
    assert f"engine[0].{key}: " in told
    assert "secret" not in told
    remedy = (
        "must be the name of an environment variable"
        if key == "key_variable"
        else "known: cache_is_off, cores, devices, flavour, key_variable"
    )
    assert remedy in told
