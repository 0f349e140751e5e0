"""HellaSwag and BoolQ against lm-eval itself, run in one call on a model that is not ours."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results.records import Completion, Request, Score
from tests.data_folder import data_folder
from tests.fakes.answers import answer
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads.base import WorkloadError
from workloads.boolq import BoolQ, BoolQParameters
from workloads.datasets import SAMPLES, read_jsonl
from workloads.hellaswag import HellaSwag, HellaSwagParameters
from workloads.single_task import TaskBenchmark

TOKENIZER = TinyTokenizer()
YAML = {"hellaswag": "hellaswag/hellaswag.yaml", "boolq": "super_glue/boolq/default.yaml"}


def lm_eval_directly(
    name: str, num_fewshot: int, tmp_path: Path, reply: Callable[[str, str, int], float]
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    """(texts asked, results) of lm-eval's own evaluation of its task over the sample files, read as JSON."""
    import lm_eval.tasks
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    class Minimal(LM):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.asked: list[tuple[str, str]] = []

        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            self.asked = [request.args for request in requests]
            return [(reply(request.args[0], request.args[1], request.idx), False) for request in requests]

        def generate_until(self, requests: list[Any]) -> list[str]:
            raise NotImplementedError

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            raise NotImplementedError

    task = load_yaml(Path(lm_eval.tasks.__file__).parent / YAML[name])
    files = {split: str(SAMPLES / f"{name}_{split}.jsonl") for split in ("train", "validation")}
    task |= {"dataset_path": "json", "dataset_name": None}
    task |= {"dataset_kwargs": {"data_files": files, "cache_dir": str(tmp_path)}}
    task.pop("tag")
    model = Minimal()
    results = simple_evaluate(
        model,
        tasks=[task],
        num_fewshot=num_fewshot,
        fewshot_random_seed=1234,
        bootstrap_iters=10,
        task_manager=TaskManager(include_defaults=False),
    )
    return model.asked, results["results"][name]


def workload(name: str, num_fewshot: int, **parameters: Any) -> TaskBenchmark:
    if name == "hellaswag":
        return HellaSwag(HellaSwagParameters(num_fewshot=num_fewshot, **parameters), None)
    return BoolQ(BoolQParameters(num_fewshot=num_fewshot, **parameters), None)


def pseudo_loglikelihood(text: str) -> float:
    """Some number that depends on all of the text, as a model's would."""
    return -(zlib.crc32(text.encode()) % 10_000) / 100


def asked_text(request: Request) -> str:
    return TOKENIZER.decode([*request.prompt_ids, *request.continuation_ids])


def labels(name: str) -> dict[str, int]:
    rows = read_jsonl(SAMPLES / f"{name}_validation.jsonl")
    return {f"{name}/{i}": int(row["label"]) for i, (_, row) in enumerate(rows)}


def choice(request: Request) -> int:
    return int(request.request_id.rpartition("#")[2])


def aggregate(scores: list[Score], metric: str) -> Score:
    (score,) = [s for s in scores if s.metric == metric and s.sample_id is None]
    return score


@pytest.mark.parametrize(("name", "num_fewshot"), [("hellaswag", 10), ("hellaswag", 0), ("boolq", 2), ("boolq", 0)])
def test_requests_and_scores_are_those_of_lm_eval(name: str, num_fewshot: int, tmp_path: Path) -> None:
    asked, expected = lm_eval_directly(name, num_fewshot, tmp_path, lambda c, a, _: pseudo_loglikelihood(c + a))
    ours = workload(name, num_fewshot)
    requests = ours.requests(TOKENIZER, 4096)
    assert [asked_text(r) for r in requests] == [context + continuation for context, continuation in asked]
    assert [TOKENIZER.decode(list(r.continuation_ids)) for r in requests] == [text for _, text in asked]

    scores = list(ours.score(requests, answer(requests, lambda r: pseudo_loglikelihood(asked_text(r)))))
    for metric in ("acc", "acc_norm") if name == "hellaswag" else ("acc",):
        assert aggregate(scores, metric).value == expected[f"{metric},none"]
        assert aggregate(scores, metric).stderr == pytest.approx(expected[f"{metric}_stderr,none"], rel=1e-12)


@pytest.mark.parametrize("name", ["hellaswag", "boolq"])
def test_always_the_first_choice_scores_the_share_of_first_labels(name: str, tmp_path: Path) -> None:
    gold = list(labels(name).values())
    _, expected = lm_eval_directly(name, 0, tmp_path, lambda *args: -1000.0 * args[2])
    ours = workload(name, 0)
    requests = ours.requests(TOKENIZER, 4096)
    scores = list(ours.score(requests, answer(requests, lambda r: -1000.0 * choice(r))))
    share = gold.count(0) / len(gold)
    acc = aggregate(scores, "acc")
    assert acc.value == share == expected["acc,none"]
    assert acc.stderr == pytest.approx(math.sqrt(share * (1 - share) / (len(gold) - 1)))
    assert acc.n == len(gold)


@pytest.mark.parametrize(("name", "metrics"), [("hellaswag", {"acc", "acc_norm"}), ("boolq", {"acc"})])
def test_a_perfect_answerer_scores_one_in_every_sample(name: str, metrics: set[str]) -> None:
    gold = labels(name)
    ours = workload(name, 2)
    requests = ours.requests(TOKENIZER, 4096)
    scores = ours.score(requests, answer(requests, lambda r: 0.0 if choice(r) == gold[r.sample_id] else -1e6))
    assert {s.metric for s in scores} == metrics
    assert all(s.value == 1.0 for s in scores)
    assert {s.sample_id for s in scores} == {*gold, None}


def test_sample_ids_name_the_row_so_that_arms_and_subsets_join() -> None:
    few = workload("hellaswag", 0, limit=5, seed=3).requests(TOKENIZER, 4096)
    many = workload("hellaswag", 0).requests(TinyTokenizer(700), 4096)
    few_ids, many_ids = ({r.request_id for r in requests} for requests in (few, many))
    assert len(few_ids) == 20
    assert few_ids < many_ids
    rows = [row for _, row in read_jsonl(SAMPLES / "hellaswag_validation.jsonl")]
    for request in few:
        row = rows[int(request.sample_id.removeprefix("hellaswag/"))]
        assert asked_text(request).endswith(row["endings"][choice(request)])


def test_same_parameters_give_same_requests_and_another_seed_other_examples() -> None:
    first, again, other = (workload("boolq", 2, seed=seed).requests(TOKENIZER, 4096) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert [r.request_id for r in first] == [r.request_id for r in other]


def test_requests_are_built_once_per_tokenizer() -> None:
    ours = workload("boolq", 0)
    assert ours.requests(TOKENIZER, 4096) is ours.requests(TinyTokenizer(), 4096)
    assert ours.requests(TinyTokenizer(700), 4096) != ours.requests(TOKENIZER, 4096)


def test_calibration_shows_train_items_and_never_one_that_is_asked() -> None:
    ours = workload("hellaswag", 3)
    rows = {
        split: [row for _, row in read_jsonl(SAMPLES / f"hellaswag_{split}.jsonl")] for split in ("train", "validation")
    }
    prompts = [TOKENIZER.decode(list(ids)) for ids in ours.calibration_prompts(TOKENIZER, 4096, 6)]
    last_items = [prompt.split("\n\n")[-1] for prompt in prompts]
    assert len(set(last_items)) == 6
    assert all(any(row["ctx_a"] in item for row in rows["train"]) for item in last_items)
    assert not any(row["ctx_a"] in prompt for row in rows["validation"] for prompt in prompts)
    assert len(ours.calibration_prompts(TOKENIZER, 4096, 1000)) == len(rows["train"])


def test_an_item_too_long_for_the_model_is_an_error_and_not_a_shorter_prompt() -> None:
    with pytest.raises(WorkloadError, match=r"14 of 14 items .* 128 tokens .*lower num_fewshot \(now 10\)"):
        workload("hellaswag", 10).requests(TOKENIZER, 128)


def test_more_examples_than_train_items_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="num_fewshot 14 needs 15 train items, there are 14"):
        workload("hellaswag", 14).requests(TOKENIZER, 8192)


def test_fewer_items_than_asked_for_are_noted() -> None:
    ours = workload("boolq", 0, limit=500)
    assert len({r.sample_id for r in ours.requests(TOKENIZER, 4096)}) == 12
    assert ours.notes == ("500 items asked for, the data has 12",)


def test_items_that_stand_twice_are_noted(tmp_path: Path) -> None:
    """Three questions four times over were told as twelve, with the interval of twelve."""
    lines = (SAMPLES / "boolq_validation.jsonl").read_text().splitlines()[:3] * 4
    (tmp_path / "boolq").mkdir()
    (tmp_path / "boolq" / "validation.jsonl").write_text("\n".join(lines))
    ours = BoolQ(BoolQParameters(num_fewshot=0), tmp_path)
    assert len({r.sample_id for r in ours.requests(TOKENIZER, 4096)}) == 12
    assert ours.notes == ("9 of 12 items in the data are the same as one before; each counts, as in lm-eval",)


@pytest.mark.parametrize("value", [None, math.nan])
def test_a_log_likelihood_that_is_no_number_is_not_scored(value: float | None) -> None:
    ours = workload("boolq", 0)
    requests = ours.requests(TOKENIZER, 4096)
    completions = answer(requests, lambda _: -1.0)
    completions[3] = completions[3].model_copy(update={"loglikelihood": value})
    with pytest.raises(WorkloadError, match="boolq/1#1: log-likelihood"):
        ours.score(requests, completions)


@pytest.mark.parametrize("spoil", [lambda c: c[:-1], lambda c: c[::-1]])
def test_missing_or_shuffled_completions_are_refused(spoil: Callable[[list[Completion]], list[Completion]]) -> None:
    ours = workload("boolq", 0)
    requests = ours.requests(TOKENIZER, 4096)
    with pytest.raises(WorkloadError, match="one completion for each request"):
        ours.score(requests, spoil(answer(requests, lambda _: -1.0)))


@pytest.mark.parametrize("name", ["hellaswag", "boolq"])
def test_real_files_are_asked_and_scored(name: str) -> None:
    root = data_folder()
    ours = (
        HellaSwag(HellaSwagParameters(limit=6), root) if name == "hellaswag" else BoolQ(BoolQParameters(limit=6), root)
    )
    rows = [row for _, row in read_jsonl(root / name / "validation.jsonl.gz")]
    requests = ours.requests(TOKENIZER, 16384)
    gold = {r.sample_id: int(rows[int(r.sample_id.split("/")[1])]["label"]) for r in requests}
    assert len(gold) == 6
    scores = list(ours.score(requests, answer(requests, lambda r: -1e6 * (choice(r) != gold[r.sample_id]))))
    assert aggregate(scores, "acc").value == 1.0
    assert ours.data_source == str(root)
    train = [row for _, row in read_jsonl(root / name / "train.jsonl.gz")]
    prompts = [TOKENIZER.decode(list(ids)) for ids in ours.calibration_prompts(TOKENIZER, 16384, 3)]
    field = "ctx_a" if name == "hellaswag" else "passage"
    assert all(any(row[field].strip() in prompt.split("\n\n")[-1] for row in train) for prompt in prompts)
