"""`joulebench calibrate`: what the command writes and says, and an arm on what it wrote."""

from __future__ import annotations

import json
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import Transformer
from engines.profile_files import read_profile, write_profile
from engines.profiling import profile_of
from harness.calibration import calibrate
from harness.model_specs import ModelSpec
from results.heat import heat_of_cells, layers_of
from results.report.arms import arms_of
from results.report.foretold import foretold_of
from results.store import Store
from tests.cases import marked
from tests.command import joulebench, start
from tests.eventually import eventually
from tests.fakes.random_models import copy_bundled, write_random_model
from tests.plans import BOOLQ, MODEL, TIERS, raw_plan, write_plan
from tests.profiles import bench_and_plan, origin_of, skewed, trials

ENDS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULEBENCH_STATE", str(tmp_path / "state"))


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


@pytest.mark.slow
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


def needles(folder: Path) -> str:
    """A plan of prompts of 2048 tokens: enough to learn from."""
    workload = {"name": "ruler_niah_single_2", "label": "needles", "length": 2048, "limit": 1}
    return str(write_plan(folder / "needles.toml", raw_plan(workload=[workload])))


@pytest.fixture(scope="module")
def foreseeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]], str]:
    """Profile, rows and messages of a calibration that trains a short-lived estimator."""
    folder = tmp_path_factory.mktemp("foreseeing")
    arguments = ("--data", needles(folder), "--prompts", "2", "--estimator", "--seed", "3", "--steps", "150")
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
    arguments = ("--data", needles(tmp_path), "--prompts", "2", "--estimator", "--steps", "150", "--width", "32")
    again, other = (
        joulebench("calibrate", MODEL, *arguments, "--seed", seed, "--out", str(tmp_path / seed)) for seed in "34"
    )
    assert (again.code, other.code) == (0, 0), again.stderr + other.stderr
    assert "estimator of " in " ".join(again.stdout.split()), "a title folds at the width of its table"
    own, same, another = (
        (path / "profile.safetensors").read_bytes() for path in (folder, tmp_path / "3", tmp_path / "4")
    )
    assert own == same
    assert own != another


def test_what_an_estimator_is_told_needs_one(tmp_path: Path) -> None:
    found = joulebench("calibrate", MODEL, "--data", "boolq", "--steps", "5", "--out", str(tmp_path / "p"))
    assert (found.code, found.problems) == (
        2,
        ["error: --steps belongs to an estimator, and none is trained; add --estimator"],
    )


def test_a_seed_that_no_generator_takes_is_told_by_its_option(tmp_path: Path) -> None:
    """The words of a library stood there, in four lines with a link."""
    given = ("--data", "boolq", "--estimator", "--seed", str(1 << 63), "--out", str(tmp_path / "p"))
    found = joulebench("calibrate", MODEL, *given)
    assert found.code == 2
    assert "'--seed': " in found.problems[-1]
    assert "pydantic" not in found.stderr


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("bolq", "did you mean boolq?"),
        (" , ", "names no workload"),
        ("gsm8k", "JOULEBENCH_DATA"),
        ("lm_eval", "needs task, which a [[workload]] of a plan gives; name that plan's file"),
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


def test_a_plan_with_commas_in_its_name_is_one_plan(tmp_path: Path) -> None:
    """It was cut at them."""
    path = write_plan(tmp_path / "long,short.toml", raw_plan(workload=[BOOLQ | {"limit": 0}]))
    found = joulebench("calibrate", MODEL, "--data", str(path), "--out", str(tmp_path / "p"))
    (problem,) = found.problems
    assert problem.startswith(f"error: --data {path}: workload[0].limit")


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


def test_what_a_plan_writes_to_name_the_profile_is_told(tmp_path: Path) -> None:
    out = tmp_path / 'my "own" p'
    told = joulebench("calibrate", MODEL, "--data", "boolq", "--prompts", "2", "--out", str(out)).stdout.splitlines()[
        -1
    ]
    written = told.partition("a plan names it as ")[2].removesuffix(" in [[engine]]")
    assert tomllib.loads(written) == {"profile": str(out)}


def test_a_profile_that_is_there_stays(profile: str) -> None:
    found = joulebench("calibrate", MODEL, "--data", "boolq", "--out", profile)
    assert found.code == 2
    assert "exists already and is left as it is" in found.problems[-1]
    assert read_profile(Path(profile)).n_tokens == 100


def test_what_was_counted_is_written_elsewhere_where_it_was_asked_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody takes the name meanwhile. Hours of counting were lost."""
    log, cwd = tmp_path / "log", tmp_path / "here"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    with log.open("w", encoding="utf-8") as output:
        arguments = ("calibrate", MODEL, "--data", "boolq", "--prompts", "60", "--chunk", "16")
        process = start(*arguments, "--out", str(tmp_path / "taken"), output=output)
        assert eventually(lambda: "building prompts" in log.read_text("utf-8"))
        (tmp_path / "taken").mkdir()
        (tmp_path / "taken" / "mine").touch()
        assert process.wait(120) == 7
    (kept,) = cwd.iterdir()
    assert read_profile(kept).n_prompts > 0
    told = log.read_text("utf-8")
    assert f"error: --out {tmp_path / 'taken'}: cannot be written (" in told
    assert told.endswith(f"; the profile is in {kept}\n")
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["mine"]


@pytest.mark.parametrize(("number", "code"), marked(ENDS, pytest.mark.slow, but=ENDS[:1]))
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
        assert page.header[:5] == ("layer", "tokens", "recall %", "rank 1 %", "rank 2 %")
        assert page.header[6:] == ("profile: cosine of q", "profile: cosine of s")
        # The first tokens of each request: of this small model all of them.
        assert page.header[5] == f"cosine, of {shown['predicted_tokens'].iloc[0]:,} tokens"
        assert shown["cosine_tokens"].tolist() == shown["predicted_tokens"].tolist()
        assert shown["cosine"].between(0.3, 1).all()
        assert [row[0] for row in page.rows] == ["1", "2", "3"]
        assert [row[2] for row in page.rows] == [f"{100 * recall:.1f}" for recall in shown["recall"]]
        assert [row[5] for row in page.rows] == [f"{cosine:.3f}" for cosine in shown["cosine"]]
        assert [row[6] for row in page.rows] == [f"{cosine:.3f}" for cosine in shown["profiled_cosine_q"]]
