"""`joulebench calibrate`, and profiles in plans: what was counted decides, and one of another model is refused."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import EngineError
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.transformer import Transformer
from engines.profile import Profile, ProfiledData, ProfileOrigin
from engines.profile_files import read_profile, write_profile
from engines.profiling import profile_of
from harness.calibration import calibrate
from harness.plan import Plan, PlanError, draft_plan
from harness.preflight import preflight
from harness.profiles import model_digests
from harness.run_parts import RunParts
from harness.runner import Runner, open_run
from harness.schema import ModelSpec
from results.heat import heat_of_cells, layers_of
from results.report.arms import arms_of
from results.report.foretold import foretold_of
from results.store import Store, StoreError
from results.trials import Trial
from tests.command import joulebench, start
from tests.fakes.random_models import copy_bundled, write_random_model
from tests.plans import BOOLQ, DROPLESS, FAST, HERE, HOST, M2_ULTRA, MODEL, NPUMOE, TIERS, raw_plan, write_plan
from tests.test_runner import Heard

NARROW = {"name": "npumoe-t", "multiples": [1.0, 0.5]}


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))


def bench_and_plan(**changes: Any) -> tuple[RunParts, Plan]:
    draft = draft_plan(raw_plan(**changes))
    bench = RunParts(draft.plan.protocol)
    return bench, preflight(draft, bench)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(PlanError) as caught:
        bench_and_plan(**changes)
    return list(caught.value.problems)


def trials(folder: Path, resume: bool = False, **changes: Any) -> tuple[Trial, ...]:
    bench, plan = bench_and_plan(**changes)
    with open_run(plan, folder, resume, bench) as store:
        Runner(plan, store, bench, Heard()).run()
        return store.trials()


def origin_of(source: str) -> ProfileOrigin:
    digests = model_digests(inspect_checkpoint(source), str)
    assert digests.model is not None
    return ProfileOrigin(
        model=source,
        model_sha256=digests.model,
        tokenizer_sha256=digests.tokenizer,
        data_sha256="00" * 32,
        data=(ProfiledData(workload="boolq", source="sample", n_prompts=1),),
        dtype="float32",
    )


def skewed(source: str = MODEL, busiest: int = 0) -> Profile:
    """As if every token had chosen the same two experts in each layer."""
    moe = inspect_checkpoint(source).config.moe
    assert moe is not None
    own = [100 if e in (busiest, busiest + 1) else 0 for e in range(moe.n_experts)]
    return Profile(
        {layer: tuple(own) for layer in moe.sparse_layers},
        moe.top_k,
        1,
        {layer: tuple(map(float, own)) for layer in moe.sparse_layers},
        origin=origin_of(source),
    )


@pytest.fixture
def profile(tmp_path: Path) -> str:
    write_profile(skewed(), tmp_path / "profile")
    return str(tmp_path / "profile")


class ReplacesWeights:
    """A `CalibrationProgress` that puts other weights in the model's place once they are loaded."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights
        self._is_done = False

    def note(self, what: str) -> None:
        """Not looked at."""

    def begin(self, n: int, of: str) -> None:
        """Once: a second file may get the number of the one that was there at first."""
        if self._is_done:
            return
        self._is_done = True
        other = self._weights.with_name("next")
        other.write_bytes(self._weights.read_bytes())
        other.replace(self._weights)

    def advance(self) -> None:
        """Not looked at."""


def test_a_model_that_changes_while_it_is_counted_gives_no_profile(tmp_path: Path) -> None:
    """Its digest would say that the counts are of the other weights."""
    weights = copy_bundled(tmp_path / "model") / "model.safetensors"
    spec = ModelSpec(source=str(weights.parent))
    with pytest.raises(EngineError, match=rf"{weights} was replaced by another file while it was counted"):
        calibrate(spec, ["boolq"], 1, 64, ReplacesWeights(weights))


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_writes_what_the_model_chooses_over_the_workloads_own_prompts(tmp_path: Path) -> None:
    """The table, the folder, and a count of the same prompts in another chunk."""
    arguments = ("calibrate", MODEL, "--data", "boolq,hellaswag", "--prompts", "2", "--json")
    first, second = (joulebench(*arguments, "--out", str(tmp_path / name)) for name in ("a", "b"))
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"profile.json", "profile.safetensors"}
    for name in ("profile.json", "profile.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    found = read_profile(tmp_path / "a")
    assert found.origin is not None
    assert [(d.workload, d.n_prompts) for d in found.origin.data] == [("boolq", 2), ("hellaswag", 2)]
    assert found.origin.model_sha256 == origin_of(MODEL).model_sha256

    checkpoint = load_checkpoint(MODEL, torch.float32)
    bench, plan = bench_and_plan(workload=[{"name": "boolq"}, {"name": "hellaswag"}])
    prompts = [
        prompt
        for cell in plan.cells
        for prompt in bench.workload(cell).calibration_prompts(checkpoint.tokenizer, checkpoint.config.max_length, 2)
    ]
    model = Transformer(checkpoint)
    again = profile_of(model, model.new_cache(), prompts, 7)
    assert found.n_tokens == sum(map(len, prompts))
    assert found.tokens_per_expert == again.tokens_per_expert
    rows = json.loads(first.stdout)
    assert [row["layer"] for row in rows] == list(again.tokens_per_expert)
    for row, counts in zip(rows, again.tokens_per_expert.values(), strict=True):
        assert row["imbalance"] == pytest.approx(max(counts) * len(counts) / sum(counts), rel=1e-3)
        assert row["never chosen"] == sum(n == 0 for n in counts)


@pytest.fixture(scope="module")
def foreseeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """Profile, rows and messages of a calibration that trains a short-lived estimator."""
    folder = tmp_path_factory.mktemp("foreseeing")
    arguments = ("--data", "ruler_niah_single_2", "--prompts", "2", "--estimator", "--seed", "3", "--steps", "150")
    made = joulebench("calibrate", MODEL, *arguments, "--width", "32", "--json", "--out", str(folder / "p"))
    assert made.code == 0, made.stderr
    return folder / "p", json.loads(made.stdout), made.stderr


def test_the_command_says_how_well_experts_are_told_by_the_layer_before(
    foreseeing: tuple[Path, list[dict[str, Any]], str],
) -> None:
    """The rows are those of the profile. Trained, an estimator recalls more than the eighth of chance."""
    folder, rows, messages = foreseeing
    found = read_profile(folder)
    assert found.predictions is not None
    assert [row["predictions"] for row in rows[:1]] == [[]]
    told = [one for row in rows for one in row["predictions"]]
    assert {(t["layer"], t["predictor"], t["data"]): t["recall"] for t in told} == {
        (a.layer, a.predictor, a.data): a.recall for a in found.predictions.accuracies
    }
    assert len(told) == 3 * 4 * 3
    assert [data.n_prompts for data in found.predictions.held_out] == [1]
    estimator = found.predictions.estimator
    assert estimator is not None
    assert (estimator.recipe.seed, estimator.recipe.n_steps, estimator.width) == (3, 150, 32)
    n_back = {a.n_tokens for a in found.predictions.accuracies if a.data == "held back"}
    assert estimator.n_tokens == found.n_tokens - sum(n_back)
    assert found.n_tokens / 9 < sum(n_back) < found.n_tokens / 7
    assert min(a.recall for a in found.predictions.accuracies if a.predictor == "estimator") > 0.25
    assert "150 of 150 steps of the estimator" in messages


def test_an_estimator_of_the_same_seed_is_the_same_file(
    foreseeing: tuple[Path, list[dict[str, Any]], str], tmp_path: Path
) -> None:
    folder, _, _ = foreseeing
    arguments = ("--data", "ruler_niah_single_2", "--prompts", "2", "--estimator", "--steps", "150", "--width", "32")
    again, other = (
        joulebench("calibrate", MODEL, *arguments, "--seed", seed, "--out", str(tmp_path / seed)) for seed in "34"
    )
    assert (again.code, other.code) == (0, 0), again.stderr + other.stderr
    assert "estimator of " in again.stdout
    own, same, another = (
        (path / "profile.safetensors").read_bytes() for path in (folder, tmp_path / "3", tmp_path / "4")
    )
    assert own == same
    assert own != another


def test_what_an_estimator_is_told_needs_one(tmp_path: Path) -> None:
    found = joulebench("calibrate", MODEL, "--data", "boolq", "--steps", "5", "--out", str(tmp_path / "p"))
    assert (found.code, found.problems) == (
        2,
        ["error: --steps is of an estimator, and none is trained; add --estimator"],
    )


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("bolq", "did you mean boolq?"),
        (" , ", "names no workload"),
        ("gsm8k", "JOULEBENCH_DATA"),
    ],
)
def test_what_cannot_be_counted_is_told_and_nothing_is_written(data: str, expected: str, tmp_path: Path) -> None:
    found = joulebench("calibrate", MODEL, "--data", data, "--out", str(tmp_path / "p"))
    assert found.code == 2
    assert expected in found.problems[-1]
    assert not (tmp_path / "p").exists()


def test_the_workloads_of_a_plan_are_counted_as_they_stand_there(tmp_path: Path) -> None:
    """All of a length that the plan says; the profile that the plan names is not there yet."""
    needles = {"name": "ruler_niah_single_2", "label": "needles", "length": 512, "limit": 1}
    arm = TIERS | {"profile": str(tmp_path / "p")}
    path = write_plan(tmp_path / "plan.toml", raw_plan(engine=[arm], workload=[needles, BOOLQ]))
    found = joulebench("calibrate", MODEL, "--data", str(path), "--prompts", "3", "--out", str(tmp_path / "p"))
    assert found.code == 0, found.stderr
    origin = read_profile(tmp_path / "p").origin
    assert origin is not None
    assert [(d.workload, d.n_prompts) for d in origin.data] == [("needles", 3), ("boolq", 3)]
    bench, plan = bench_and_plan(engine=[arm], workload=[needles, BOOLQ])
    tokenizer = bench.facts(MODEL).tokenizer
    prompts = [p for cell in plan.cells for p in bench.workload(cell).calibration_prompts(tokenizer, 8192, 3)]
    assert all(len(prompt) <= 512 for prompt in prompts[:3])
    assert read_profile(tmp_path / "p").n_tokens == sum(map(len, prompts))


def test_a_plan_that_is_wrong_is_told_by_its_own_problems(tmp_path: Path) -> None:
    path = write_plan(tmp_path / "plan.toml", raw_plan(workload=[BOOLQ | {"limit": 0}]))
    for given, expected in ((path, "workload[0].limit"), (tmp_path / "no.toml", "no such file")):
        found = joulebench("calibrate", MODEL, "--data", str(given), "--out", str(tmp_path / "p"))
        assert found.code == 2
        assert found.problems[-1].startswith(f"error: --data {given}")
        assert expected in found.problems[-1]


def test_a_dense_model_has_nothing_to_count(tmp_path: Path) -> None:
    write_random_model(tmp_path / "dense", "llama")
    found = joulebench("calibrate", str(tmp_path / "dense"), "--data", "boolq", "--out", str(tmp_path / "p"))
    assert found.code == 2
    assert "is dense" in found.problems[-1]


def test_a_profile_that_is_there_stays(profile: str) -> None:
    found = joulebench("calibrate", MODEL, "--data", "boolq", "--out", profile)
    assert found.code == 2
    assert "exists already and is left as it is" in found.problems[-1]
    assert read_profile(Path(profile)).n_tokens == 100


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_an_end_from_outside_leaves_no_profile(number: signal.Signals, code: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = ("calibrate", MODEL, "--data", "boolq", "--prompts", "600", "--chunk", "16")
    with log.open("w", encoding="utf-8") as output:
        process = start(*arguments, "--out", str(tmp_path / "p"), output=output)
        started_s = time.monotonic()
        while "building prompts" not in log.read_text("utf-8"):
            assert time.monotonic() - started_s < 120
            time.sleep(0.02)
        time.sleep(0.3)
        process.send_signal(number)
        assert process.wait(60) == code
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith((".", "p"))] == []
    if number != signal.SIGKILL:
        assert "no profile was written" in log.read_text("utf-8")


# --- in a plan -------------------------------------------------------------------------------------------------------


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
            "engine x: a profile takes the place of calibration_prompts; remove one of them",
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


def test_an_arm_that_predicts_runs_on_a_profile_with_an_estimator(
    foreseeing: tuple[Path, list[dict[str, Any]], str], tmp_path: Path
) -> None:
    """Needles are generated, so that tokens are decoded on predictions, and the trial counts their recall."""
    needles = {"name": "ruler_niah_single_2", "length": 512, "limit": 1}
    arms = [{"name": n, "technique": {"name": n}, "profile": str(foreseeing[0])} for n in ("est-pf", "prefetch-hint")]
    told, hinted = trials(tmp_path / "run", engine=arms, workload=[needles])
    for trial in (told, hinted):
        assert trial.counters is not None
        assert trial.counters.predicted is not None
        assert trial.counters.recalled is not None
        assert 0 < trial.counters.recalled < trial.counters.predicted
    with Store.view(tmp_path / "run") as store:
        run = store.data()
        heats = heat_of_cells(run)
        table, pages = layers_of(run, heats), foretold_of(run.cells, heats, arms_of(run.cells))
    for name, trial, page in zip(("est-pf", "prefetch-hint"), (told, hinted), pages, strict=True):
        own = table[table["engine"] == name]
        assert own["predicted_tokens"].isna().tolist() == [True, False, False, False]
        shown = own[own["predicted_tokens"].notna()]
        assert trial.counters is not None
        assert (shown["predicted_tokens"] * 2).sum() == trial.counters.predicted
        assert (shown["recall"] * shown["predicted_tokens"] * 2).sum() == pytest.approx(trial.counters.recalled)
        predictions = read_profile(foreseeing[0]).predictions
        assert predictions is not None
        cosines = {(a.predictor, a.layer): a.cosine for a in predictions.accuracies if a.data == "held out"}
        assert shown["profiled_cosine_q"].tolist() == [cosines["router q", layer] for layer in (1, 2, 3)]
        assert shown["profiled_cosine_s"].tolist() == [cosines["router s", layer] for layer in (1, 2, 3)]
        assert page.header == ("layer", "tokens", "recall %", "rank 1 %", "rank 2 %", "cosine of q", "cosine of s")
        assert [row[0] for row in page.rows] == ["1", "2", "3"]
        assert [row[2] for row in page.rows] == [f"{100 * recall:.1f}" for recall in shown["recall"]]
        assert [row[5] for row in page.rows] == [f"{cosine:.3f}" for cosine in shown["profiled_cosine_q"]]
