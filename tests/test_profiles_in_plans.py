"""Profiles in plans: what was counted decides, and one of another model is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import Transformer
from engines.profile_files import profile_folder, read_profile, write_profile
from engines.profiling import profile_of
from harness.plan import draft_plan
from harness.run_parts import RunParts
from results.store import Store, StoreError
from tests.fakes.random_models import copy_bundled
from tests.plans import BOOLQ, DROPLESS, FAST, HERE, HOST, M2_ULTRA, MODEL, NPUMOE, TIERS, raw_plan
from tests.profiles import bench_and_plan, origin_of, problems, skewed, trials
from tests.test_preflight import checked

NARROW = {"name": "npumoe-t", "multiples": [1.0, 0.5]}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))


@pytest.fixture
def profile(tmp_path: Path) -> str:
    write_profile(skewed(), tmp_path / "p")
    return str(tmp_path / "p")


def test_an_arm_with_a_profile_of_the_same_prompts_does_what_it_does_without(tmp_path: Path) -> None:
    """The same eight prompts, counted beforehand; and the profile of other prompts makes another arm of it."""
    checkpoint = load_checkpoint(MODEL, torch.float32)
    bench, plan = bench_and_plan()
    prompts = bench.workload(plan.cells[0]).calibration_prompts(checkpoint.tokenizer, checkpoint.config.max_length, 8)
    model = Transformer(checkpoint)
    counted = profile_of(model, model.new_cache(), prompts, 512)
    write_profile(replace(counted, origin=origin_of(MODEL)), tmp_path / "same")
    write_profile(skewed(), tmp_path / "skewed")
    arms = [
        {"name": "own prompts", "technique": NARROW},
        {"name": "same prompts", "technique": NARROW, "profile": str(tmp_path / "same")},
        {"name": "others", "technique": NARROW, "profile": str(tmp_path / "skewed")},
    ]
    own, same, others = trials(tmp_path / "run", engine=arms)
    assert own.counters is not None
    assert own.counters == same.counters
    assert [s.value for s in own.scores] == [s.value for s in same.scores]
    assert others.counters is not None
    assert others.counters.dropped_pairs != own.counters.dropped_pairs


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((0, 1, 2), ("every layer", "estimator", "est-pf")),
        ((1,), None),
        ((), ("no layer", "router", "router-pf")),
    ],
)
def test_a_hybrid_of_one_predictor_is_told(
    tmp_path: Path, layers: tuple[int, ...], told: tuple[str, str, str] | None
) -> None:
    """The bundled model has four layers of experts, of which the last guesses nothing."""
    bundled = read_profile(profile_folder(MODEL))
    assert bundled.predictions is not None
    predictions = bundled.predictions.model_copy(update={"estimated_layers": layers})
    write_profile(replace(bundled, predictions=predictions), tmp_path / "p")
    arms = [
        {"name": name, "technique": technique, "profile": str(tmp_path / "p")}
        for name, technique in {
            "hybrid": {"name": "hybrid-pf"},
            "hint": {"name": "prefetch-hint", "predictor": "hybrid"},
            "est": {"name": "est-pf"},
            "router": {"name": "router-pf"},
        }.items()
    ]
    found = checked(engine=arms).warnings
    if told is None:
        assert found == ()
        return
    where, other, preset = told
    words = f"more experts than the router in {where}, so that a hybrid asks the {other} alone, as"
    for line, name, like in zip(found, ("hybrid", "hint"), (preset, f'predictor = "{other}"'), strict=True):
        assert line.startswith(f"engine {name}: by profile ")
        assert line.endswith(f"{words} {like} does")


def test_one_profile_serves_all_arms_and_devices(profile: str) -> None:
    arms = [TIERS | HERE | {"profile": profile}, NPUMOE | {"profile": profile}]
    bench, plan = bench_and_plan(
        engine=arms, device=[HOST, M2_ULTRA], workload=[BOOLQ, {"name": "hellaswag", "limit": 1}]
    )
    engines = [bench.arm(cell).engine for cell in plan.cells]
    assert [engine.needs_calibration for engine in engines] == [False] * 4
    assert {cell.cell.engine_parameters["profile"][: len(profile)] for cell in plan.cells} == {profile}
    bench.close()


def test_what_a_profile_counted_makes_another_cell(profile: str, tmp_path: Path) -> None:
    def ids() -> list[str]:
        _, plan = bench_and_plan(engine=[DROPLESS, TIERS | {"profile": profile}])
        assert {cell.cell.reference_id for cell in plan.cells} == {plan.cells[0].cell.cell_id}
        return [cell.cell.cell_id for cell in plan.cells]

    before = ids()
    assert ids() == before
    Path(profile).rename(tmp_path / "aside")
    write_profile(skewed(busiest=4), Path(profile))
    after = ids()
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_run_goes_on_with_the_profile_that_it_was_begun_with(profile: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"engine": [TIERS | {"profile": profile}], "protocol": FAST}
    trials(tmp_path / "run", **changes)
    assert len(trials(tmp_path / "run", resume=True, **changes)) == 1
    Path(profile).rename(tmp_path / "aside")
    write_profile(skewed(busiest=4), Path(profile))
    with pytest.raises(StoreError, match=r"profile\.json of profile .* sha256 [0-9a-f]{12} -> sha256 [0-9a-f]{12}"):
        trials(tmp_path / "run", resume=True, **changes)
    with Store.view(tmp_path / "run") as store:
        names = [one.name for one in store.info().inputs]
    assert f"profile.json of profile {profile}" in names
    assert f"profile.safetensors of profile {profile}" in names


def test_a_profile_of_another_model_is_refused_when_the_plan_is_checked(profile: str, tmp_path: Path) -> None:
    """One line, with the first digits of both."""
    model = copy_bundled(tmp_path / "model")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    (found,) = problems(model={"source": str(model)}, engine=[TIERS | {"profile": profile}])
    assert found.startswith(f"engine tiers: profile {profile}: it was counted with another model")
    assert origin_of(MODEL).model_sha256[:12] in found
    assert origin_of(str(model)).model_sha256[:12] in found


def test_a_copy_of_the_model_is_the_same_model(profile: str, tmp_path: Path) -> None:
    model = copy_bundled(tmp_path / "elsewhere")
    _, plan = bench_and_plan(model={"source": str(model)}, engine=[TIERS | {"profile": profile}])
    assert len(plan.cells) == 1


def test_a_profile_with_another_tokenizer_is_refused(profile: str, tmp_path: Path) -> None:
    model = copy_bundled(tmp_path / "model")
    path = model / "tokenizer_config.json"
    path.write_text(path.read_text("utf-8") + "\n", encoding="utf-8")
    (found,) = problems(model={"source": str(model)}, engine=[TIERS | {"profile": profile}])
    assert "counted with another tokenizer" in found
    assert origin_of(MODEL).tokenizer_sha256[:12] in found
    assert origin_of(str(model)).tokenizer_sha256[:12] in found


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        (DROPLESS, "engine dropless: technique dropless learns nothing offline; remove profile"),
        (
            {"name": "x", "technique": {"name": "npumoe-t", "calibration_prompts": 4}},
            "engine x: a profile replaces calibration_prompts; remove one of them",
        ),
    ],
)
def test_a_profile_without_an_effect_is_refused(engine: dict[str, Any], expected: str, profile: str) -> None:
    assert problems(engine=[engine | {"profile": profile}]) == [expected]


def test_a_profile_that_is_not_there_or_damaged_is_one_problem(profile: str, tmp_path: Path) -> None:
    (absent,) = problems(engine=[TIERS | {"profile": str(tmp_path / "no")}])
    assert "`joulebench calibrate` writes one" in absent
    (Path(profile) / "profile.safetensors").write_bytes(b"x")
    (damaged,) = problems(engine=[TIERS | {"profile": profile}])
    assert "damaged" in damaged
    (empty,) = problems(engine=[TIERS | {"profile": ""}])
    assert "engine[0].profile" in empty


def test_a_damaged_profile_is_read_once_however_many_arms_name_it(profile: str) -> None:
    path = Path(profile) / "profile.safetensors"
    whole = path.read_bytes()
    path.write_bytes(b"x")
    bench = RunParts(draft_plan(raw_plan()).plan.protocol)
    for _ in range(2):
        with pytest.raises(EngineError, match="damaged"):
            bench.profile(profile)
        path.write_bytes(whole)


def test_an_arm_that_needs_an_estimator_says_so_when_the_plan_is_checked(profile: str) -> None:
    """No profile; one without default vectors and estimator; a model whose experts cannot be told."""
    arms: list[dict[str, Any]] = [
        {"name": "guessing", "technique": {"name": "est-pf"}},
        {"name": "routing", "technique": {"name": "router-pf"}, "profile": profile},
        {"name": "both", "technique": {"name": "hybrid-pf"}, "profile": profile},
    ]
    found = problems(engine=arms)
    assert found == [
        "engine guessing: technique est-pf needs a profile with an estimator; make one with"
        " `joulebench calibrate --estimator` and name it as profile",
        f"engine routing: profile {profile}: it has no default vectors",
        f"engine both: profile {profile}: it has no default vectors",
    ]
