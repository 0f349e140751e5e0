"""Tasks of lm-eval that are served: our results equal those of lm-eval's own `hf` model on the same checkpoint.

RULER has its own file, and code tasks are in theirs: lm-eval's metric for programs fetches itself from the network.
Per-sample log-likelihoods within 1e-3 in fp32, the same greedy choices and texts, the same metric to the last digit
where it counts right answers. Both read the same files, lm-eval by itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cases import marked
from tests.data_folder import data_folder
from tests.fakes.random_models import BUNDLED, write_random_model
from tests.hf_peer import Pair, ask_hf, ask_ours, assert_same_answers, load_pair
from workloads import aime, gsm8k, mathqa, strategyqa, truthfulqa
from workloads.any_task import AnyTask, AnyTaskParameters
from workloads.base import Workload
from workloads.benchmark import BenchmarkParameters, GeneratingParameters
from workloads.boolq import BoolQ, BoolQParameters
from workloads.hellaswag import HellaSwag, HellaSwagParameters
from workloads.mmlu import MMLU, MMLUParameters
from workloads.single_task import SingleTask, TaskBenchmark

pytestmark = pytest.mark.numbers

N_NEW_TOKENS = 12
"""Of a generated answer: models with random weights never end."""
CONTEXT = 2048
"""Of the random model: longer than every prompt here, shorter than the longest text of `items.texts`."""


@dataclass(frozen=True)
class Case:
    """One task: our workload over a data folder, and lm-eval's definition with the files of its splits in there."""

    build: Callable[[Path], Workload]
    definition: str
    files: dict[str, str]
    num_fewshot: int | None = None
    is_generated: bool = False
    is_share: bool = True
    """The metric counts right answers; else it follows the log-likelihoods' last digits."""


def asked(task: SingleTask, root: Path) -> Workload:
    return TaskBenchmark(task, BenchmarkParameters(limit=2), root)


def generated(task: SingleTask, root: Path) -> Workload:
    return TaskBenchmark(task, GeneratingParameters(limit=2, max_new_tokens=N_NEW_TOKENS), root)


def by_name(root: Path, **parameters: Any) -> Workload:
    return AnyTask(AnyTaskParameters(**parameters), root)


CASES = {
    "hellaswag": Case(
        lambda root: HellaSwag(HellaSwagParameters(limit=2), root),
        "hellaswag/hellaswag.yaml",
        {"train": "hellaswag/train", "validation": "hellaswag/validation"},
        num_fewshot=10,
    ),
    "boolq": Case(
        lambda root: BoolQ(BoolQParameters(limit=3), root),
        "super_glue/boolq/default.yaml",
        {"train": "boolq/train", "validation": "boolq/validation"},
        num_fewshot=2,
    ),
    "truthfulqa_mc1": Case(
        partial(asked, truthfulqa.MC1),
        "truthfulqa/truthfulqa_mc1.yaml",
        {"validation": "truthful_qa/multiple_choice/validation"},
    ),
    "truthfulqa_mc2": Case(
        partial(asked, truthfulqa.MC2),
        "truthfulqa/truthfulqa_mc2.yaml",
        {"validation": "truthful_qa/multiple_choice/validation"},
        is_share=False,
    ),
    "truthfulqa_gen": Case(
        partial(generated, truthfulqa.GEN),
        "truthfulqa/truthfulqa_gen.yaml",
        {"validation": "truthful_qa/generation/validation"},
        is_generated=True,
    ),
    "mathqa": Case(
        partial(asked, mathqa.TASK),
        "mathqa/mathqa.yaml",
        {"train": "math_qa/train", "validation": "math_qa/train", "test": "math_qa/test"},
    ),
    "gsm8k": Case(
        partial(generated, gsm8k.GSM8K),
        "gsm8k/gsm8k.yaml",
        {"train": "gsm8k/train", "test": "gsm8k/test"},
        is_generated=True,
    ),
    "gsm8k_cot": Case(
        partial(generated, gsm8k.GSM8K_COT), "gsm8k/gsm8k-cot.yaml", {"test": "gsm8k/test"}, is_generated=True
    ),
    "gsm8k_cot_zeroshot": Case(
        partial(generated, gsm8k.GSM8K_COT_ZEROSHOT),
        "gsm8k/gsm8k-cot-zeroshot.yaml",
        {"train": "gsm8k/train", "test": "gsm8k/test"},
        is_generated=True,
    ),
    "aime24": Case(partial(generated, aime.AIME24), "aime/aime24.yaml", {"train": "aime24/train"}, is_generated=True),
    "aime25": Case(partial(generated, aime.AIME25), "aime/aime25.yaml", {"test": "aime25/test"}, is_generated=True),
    "strategyqa": Case(
        partial(asked, strategyqa.TASK),
        "bigbench/multiple_choice/strategyqa.yaml",
        {"default": "bigbench/strategyqa/default"},
    ),
    "lm_eval:wikitext": Case(
        partial(by_name, task="wikitext", data_files={"test": "texts/pages.jsonl"}),
        "wikitext/wikitext.yaml",
        {"train": "texts/pages", "validation": "texts/pages", "test": "texts/pages"},
        is_share=False,
    ),
    "lm_eval:lambada_openai": Case(
        partial(by_name, task="lambada_openai", data_files={"test": "texts/last_words.jsonl"}),
        "lambada/lambada_openai.yaml",
        {"test": "texts/last_words"},
        is_share=False,
    ),
}
REAL = [name for name in CASES if not name.startswith("lm_eval:") and name != "strategyqa"]
"""Those whose real files lm-eval can read by itself."""


@pytest.fixture(scope="module")
def random_moe(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("random-moe")
    write_random_model(folder, "qwen3-moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return load_pair(folder)


@pytest.fixture(scope="module")
def bundled() -> Pair:
    return load_pair(BUNDLED)


def assert_same(case: Case, pair: Pair, root: Path, cache: Path) -> None:
    files = {split: first_file(root, name) for split, name in case.files.items()}
    requests, completions, scores = ask_ours(case.build(root), pair.engine)
    documents = sorted({int(request.sample_id.rpartition("/")[2]) for request in requests})
    n_new = N_NEW_TOKENS if case.is_generated else None
    theirs, samples = ask_hf(pair.hf, case.definition, files, cache, documents, case.num_fewshot, n_new)
    assert_same_answers(pair, samples, requests, completions)
    expected = {
        key.removesuffix(",none"): value for key, value in theirs.items() if "," in key and "_stderr" not in key
    }
    aggregates = {score.metric: score.value for score in scores if score.sample_id is None}
    assert aggregates == (expected if case.is_share else pytest.approx(expected, rel=1e-3))
    of_samples = {(s.metric, int(s.sample_id.rpartition("/")[2])): s.value for s in scores if s.sample_id is not None}
    logged = {
        (metric if sample["filter"] == "none" else f"{metric},{sample['filter']}", sample["doc_id"]): sample[metric]
        for sample in samples
        for metric in sample["metrics"]
        if not isinstance(sample[metric], tuple)  # of which a perplexity is made
    }
    assert of_samples == (logged if case.is_share else pytest.approx(logged, rel=1e-3))


def first_file(root: Path, name: str) -> Path:
    return next(path for suffix in ("jsonl", "jsonl.gz") if (path := root / f"{name}.{suffix}").is_file())


@pytest.mark.parametrize("name", marked(CASES, pytest.mark.slow, but=["hellaswag", "gsm8k", "truthfulqa_mc2"]))
def test_a_random_moe_answers_and_scores_as_in_lm_eval(
    name: str, random_moe: Pair, items: Path, tmp_path: Path
) -> None:
    assert_same(CASES[name], random_moe, items, tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_the_bundled_model_answers_and_scores_as_in_lm_eval(
    name: str, bundled: Pair, items: Path, tmp_path: Path
) -> None:
    assert_same(CASES[name], bundled, items, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_real_items_are_answered_and_scored_as_in_lm_eval(name: str, bundled: Pair, tmp_path: Path) -> None:
    assert_same(CASES[name], bundled, data_folder(), tmp_path)


def test_mmlu_equals_lm_eval_by_subject_and_as_its_weighted_mean(random_moe: Pair, items: Path, tmp_path: Path) -> None:
    requests, completions, scores = ask_ours(MMLU(MMLUParameters(), items), random_moe.engine)
    found = {score.metric: score for score in scores if score.sample_id is None}
    rows = [json.loads(line) for line in (items / "mmlu" / "test.jsonl").read_text().splitlines()]
    examples = [json.loads(line) for line in (items / "mmlu" / "dev.jsonl").read_text().splitlines()]
    accuracy, sizes = {}, {}
    for subject in ("anatomy", "college_physics", "virology"):
        files = {}
        for split, all_rows in (("test", rows), ("dev", examples)):
            files[split] = tmp_path / f"{subject}_{split}.jsonl"
            files[split].write_text("".join(json.dumps(r) + "\n" for r in all_rows if r["subject"] == subject))
        sizes[subject] = sum(row["subject"] == subject for row in rows)
        theirs, samples = ask_hf(
            random_moe.hf, f"mmlu/default/mmlu_{subject}.yaml", files, tmp_path, range(sizes[subject]), num_fewshot=5
        )
        own = [i for i, request in enumerate(requests) if request.sample_id.startswith(f"mmlu/{subject}/")]
        assert_same_answers(random_moe, samples, [requests[i] for i in own], [completions[i] for i in own])
        accuracy[subject] = theirs["acc,none"]
        assert found[f"acc/{subject}"].value == theirs["acc,none"]
        assert found[f"acc/{subject}"].n == sizes[subject]
    mean = sum(accuracy[s] * sizes[s] for s in sizes) / sum(sizes.values())
    assert found["acc"].value == pytest.approx(mean, rel=1e-12)
    assert found["acc"].n == sum(sizes.values())
    # lm-eval counts anatomy among stem.
    stem = (3 * accuracy["anatomy"] + 2 * accuracy["college_physics"]) / 5
    assert found["acc/stem"].value == pytest.approx(stem, rel=1e-12)
    assert found["acc/other"].value == accuracy["virology"]
    # Pooled over the subjects, as lm-eval does: sqrt(sum (n-1) n se^2 / (sum n - subjects) / sum n).
    variance = sum(sizes[s] * accuracy[s] * (1 - accuracy[s]) for s in sizes)
    assert found["acc"].stderr == pytest.approx(math.sqrt(variance / (9 - 3) / 9))
