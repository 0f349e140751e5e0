"""`runs = "coreml"` in a plan: what stands in its trials, and what is refused."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path
from typing import Any

import pytest

from engines.coreml.conversion import Asked, Conversion
from engines.coreml.macos import why_no_core_ml
from engines.coreml.manifest import read_manifest
from engines.model.checkpoints import inspect_checkpoint
from engines.techniques.presets import preset_parameters
from harness.coreml_convert import convert_all
from harness.profiles import model_digests
from results.cells import INTERPRETED
from tests.coreml import BUNDLED, NO_DIGEST, bundled_profile
from tests.fakes.random_models import copy_bundled, copy_tokenizer, write_random_model
from tests.profiles import problems, trials

pytest.importorskip("coremltools", reason="reads and writes packages (pip install joulebench[coreml])")

TORCH = {
    "name": "torch",
    "technique": {"name": "npumoe-tg"},
    "profile": BUNDLED,
    "prefill_chunk": 64,
}
ANE = {**TORCH, "name": "ane", "runs": "coreml", "context": 512}
INTERPRETER = {**ANE, "predictor": "interpreter", "arithmetic": "float32"}
BOOLQ = {"name": "boolq", "limit": 2}
QUICK = {"repeats": 1, "warmup": 0, "idle_s": 0, "max_foreign_cpu_share": 1.0}
MODEL = {"source": BUNDLED, "dtype": "float16"}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of its own, in which graphs are kept."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `INTERPRETER` asks."""
    digest = model_digests(inspect_checkpoint(BUNDLED), lambda note: None).model
    assert digest is not None
    folder = tmp_path_factory.mktemp("converted") / "packages"
    asked = Asked(preset_parameters("npumoe-tg")(), 64, 512)
    convert_all(Conversion(BUNDLED, asked, bundled_profile(), digest), folder)
    return folder


def test_an_interpreted_arm_scores_as_torch_and_is_in_no_mean_of_times(tmp_path: Path, state: Path) -> None:
    found = trials(tmp_path / "run", model=MODEL, engine=[TORCH, INTERPRETER], workload=[BOOLQ], protocol=QUICK)
    torch, ane = sorted(found, key=lambda trial: INTERPRETED in trial.marks)
    assert (torch.status, ane.status) == ("ok", "ok")
    assert torch.marks == ()
    assert ane.marks == (INTERPRETED,)
    assert len(torch.scores) > 0
    assert [score.value for score in ane.scores] == [score.value for score in torch.scores]
    assert ane.counters == torch.counters
    assert any("say nothing of a Mac" in note for note in ane.notes)
    assert ane.road is not None
    assert ane.road.arithmetic == "Core ML: interpreter (float32)"
    kept = list(state.rglob("manifest.json"))
    assert len(kept) == 1, "graphs are converted once and kept"


def test_an_arm_that_predicts_nothing_says_so(tmp_path: Path, state: Path) -> None:
    arm = {**INTERPRETER, "technique": {"name": "dropless"}, "profile": None}
    engine = {key: value for key, value in arm.items() if value is not None}
    (trial,) = trials(tmp_path / "run", model=MODEL, engine=[engine], workload=[BOOLQ], protocol=QUICK)
    assert trial.status == "ok"
    assert any("no prediction: nothing lay on the npu" in note for note in trial.notes)


def test_graphs_too_short_for_a_workload_are_told_with_what_helps(tmp_path: Path, state: Path) -> None:
    found = trials(
        tmp_path / "run", model=MODEL, engine=[{**INTERPRETER, "context": 128}], workload=[BOOLQ], protocol=QUICK
    )
    assert found[0].failure is not None
    assert "do not fit the model's 128 tokens" in found[0].failure.error
    assert "ane holds 128 tokens of the model's 8192: a larger context of that arm helps too" in found[0].failure.error


def test_a_plan_that_converts_looks_for_room_first(
    tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.coreml_convert.SPARE_BYTES", 10**18)
    (trial,) = trials(tmp_path / "run", model=MODEL, engine=[INTERPRETER], workload=[BOOLQ], protocol=QUICK)
    assert trial.failure is not None
    assert "1e+06 TB are needed for" in trial.failure.error
    assert "are free; make room" in trial.failure.error
    assert not list(state.rglob("*.mlpackage"))


@pytest.mark.skipif(platform.system() == "Darwin", reason="a Mac has Core ML")
def test_without_a_mac_a_line_says_so_beside_other_problems() -> None:
    found = problems(model=MODEL, engine=[{**ANE, "packages": "/nowhere"}], workload=[BOOLQ])
    assert len(found) == 2
    assert "/nowhere/manifest.json: cannot be read" in found[1]
    assert "engine ane: Core ML is not here: Core ML runs on macOS, and this is Linux" in found[0]
    assert 'predictor = "interpreter"' in found[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"arithmetic": "float32", "predictor": "macos"}, "engine[0].arithmetic: graphs are fp16 on a Mac"),
        ({"compute_units": "all"}, "engine[0].compute_units: the interpreter has none"),
        ({"profile": None}, "engine[0].profile: npumoe-tg freezes the graphs' shapes by one"),
        ({"model_file": "a.gguf"}, "engine[0].model_file: graphs are made of the plan's model"),
        ({"ranks": 2}, "engine[0].ranks: is of joulebench's own engine"),
        ({"packages": "/nowhere"}, "/nowhere/manifest.json: cannot be read"),
        ({"technique": {"name": "lru"}}, "engine[0].technique: lru: move cache (weights are constants of a graph"),
        (
            {"technique": {"name": "expert-parallel"}},
            "engine[0].technique: expert-parallel: experts on ranks: no graph",
        ),
        ({"profile": "/nowhere"}, "engine ane: profile /nowhere: no profile.json there"),
        ({"technique": {"name": "anemll"}}, "engine[0].profile: technique anemll learns nothing offline"),
        ({"technique": {"name": "oracle"}}, "engine[0].technique: oracle makes no plan that graphs could run"),
    ],
)
def test_what_cannot_be_meant_is_told(given: dict[str, Any], said: str) -> None:
    raw = {key: value for key, value in {**INTERPRETER, **given}.items() if value is not None}
    found = problems(model=MODEL, engine=[raw], workload=[BOOLQ])
    assert any(said in problem for problem in found), found


def test_a_model_and_a_profile_that_do_not_fit_are_told_before_anything_runs(tmp_path: Path) -> None:
    """A dense model, and one whose experts were not those that were counted."""
    write_random_model(tmp_path / "dense", "qwen2")
    copy_tokenizer(tmp_path / "dense")
    (said,) = problems(model={**MODEL, "source": str(tmp_path / "dense")}, engine=[INTERPRETER], workload=[BOOLQ])
    assert said.startswith(f"engine ane: {tmp_path}/dense: no experts (a dense model): no graph here computes that")
    model = copy_bundled(tmp_path / "other")
    held = bytearray((model / "model.safetensors").read_bytes())
    held[-1] ^= 1
    (model / "model.safetensors").write_bytes(held)
    (said,) = problems(model={**MODEL, "source": str(model)}, engine=[INTERPRETER], workload=[BOOLQ])
    assert said.startswith(f"engine ane: profile {BUNDLED}: it was counted with another model")


def test_packages_of_another_conversion_are_refused(converted: Path, tmp_path: Path, state: Path) -> None:
    """Before anything runs, what the plan says; what the model says when it is read."""
    packages = shutil.copytree(converted, tmp_path / "packages")
    read_manifest(packages).model_copy(update={"model_sha256": NO_DIGEST}).write(packages)
    engine = {**INTERPRETER, "packages": str(packages)}
    (said,) = problems(model=MODEL, engine=[engine | {"prefill_chunk": 128, "context": 256}], workload=[BOOLQ])
    assert "converted otherwise than this arm asks (prefill_chunk, context differ)" in said
    (said,) = problems(model=MODEL, engine=[engine | {"weights": "int8"}], workload=[BOOLQ])
    assert "(weights differ); convert with the same technique, profile, chunk, context and weights" in said
    (trial,) = trials(tmp_path / "run", model=MODEL, engine=[engine], workload=[BOOLQ], protocol=QUICK)
    assert trial.status == "failed"
    assert "converted otherwise than this arm asks (model_sha256 differ)" in str(trial.failure)


def test_packages_that_changed_in_place_are_refused_by_a_trial(converted: Path, tmp_path: Path, state: Path) -> None:
    """Those of the plan; those that a plan converted are written anew."""
    packages = shutil.copytree(converted, tmp_path / "packages")
    weights = packages / "layer-002/attention.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    held = bytearray(weights.read_bytes())
    held[-1] ^= 1
    weights.write_bytes(held)
    engine = {**INTERPRETER, "packages": str(packages)}
    (trial,) = trials(tmp_path / "run", model=MODEL, engine=[engine], workload=[BOOLQ], protocol=QUICK)
    assert trial.failure is not None
    assert "1 are not as written, first layer-002/attention.mlpackage; give the same" in trial.failure.error


@pytest.mark.skipif(platform.system() == "Darwin", reason="a Mac has Core ML")
def test_elsewhere_the_reason_names_the_way_out() -> None:
    reason = why_no_core_ml()
    assert reason is not None
    assert "interpreter" in reason
