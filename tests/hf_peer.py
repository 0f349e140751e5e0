"""lm-eval with its own `hf` model, as the peer that our results are compared with."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.dropless import DroplessParameters
from results.records import Completion, Request, Score
from workloads.base import Workload


@dataclass(frozen=True)
class Pair:
    """One checkpoint in fp32: our engine, and transformers' inside lm-eval."""

    engine: ReferenceEngine
    hf: Any


def load_pair(folder: Path) -> Pair:
    pytest.importorskip("accelerate", reason="lm-eval's hf model needs accelerate (pip install joulebench[dev])")
    from lm_eval.models.huggingface import HFLM

    engine = ReferenceEngine(load_checkpoint(str(folder), torch.float32), DroplessParameters())
    with _quiet():
        return Pair(engine, HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1))


def ask_hf(
    hf: Any,
    definition: str,
    files: Mapping[str, Path],
    cache: Path,
    documents: Sequence[int],
    num_fewshot: int | None = None,
    max_new_tokens: int | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(aggregates, samples) of lm-eval's own evaluation of a task over JSON files.

    definition: its YAML below lm-eval's tasks. files: by the task's name of a split. documents: positions asked.
    """
    import lm_eval.tasks
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    task = dict(load_yaml(Path(lm_eval.tasks.__file__).parent / definition))
    task.pop("tag", None)
    paths = {split: str(path) for split, path in files.items()}
    task |= {"dataset_path": "json", "dataset_name": None}
    task |= {"dataset_kwargs": {"data_files": paths, "cache_dir": str(cache)}}
    if num_fewshot is not None:
        task["num_fewshot"] = num_fewshot
    if max_new_tokens is not None:
        task["generation_kwargs"] = (task.get("generation_kwargs") or {}) | {"max_gen_toks": max_new_tokens}
    with _quiet():
        loaded = TaskManager(include_defaults=False).load([task])
        loaded["tasks"][task["task"]].set_fewshot_seed(1234)  # simple_evaluate's default
        found = evaluate(hf, loaded, samples={task["task"]: list(documents)}, bootstrap_iters=0)
    return found["results"][task["task"]], found["samples"][task["task"]]


def texts_of_hf(hf: Any, prompts: Sequence[str], generation: Mapping[str, Any]) -> list[str]:
    """What lm-eval's model writes after each prompt. generation: as lm-eval's YAML has it, `until` and the rest."""
    from lm_eval.api.instance import Instance

    asked = [
        Instance(request_type="generate_until", doc={}, arguments=(prompt, dict(generation)), idx=i)
        for i, prompt in enumerate(prompts)
    ]
    texts: list[str] = hf.generate_until(asked, disable_tqdm=True)
    return texts


def ask_ours(workload: Workload, engine: ReferenceEngine) -> tuple[list[Request], list[Completion], list[Score]]:
    requests = list(workload.requests(engine.tokenizer, engine.max_length))
    completions = [engine.run(request, lambda event, at_s: None) for request in requests]
    return requests, completions, list(workload.score(requests, completions))


def assert_same_answers(samples: Sequence[Mapping[str, Any]], requests: list[Request], ours: list[Completion]) -> None:
    """Log-likelihoods within 1e-3, the same greedy choices, the same texts. samples: lm-eval's, of any filter."""
    by_sample: dict[str, list[Completion]] = {}
    for completion in ours:
        by_sample.setdefault(completion.sample_id, []).append(completion)
    documents = {int(sample_id.rpartition("/")[2]): found for sample_id, found in by_sample.items()}
    assert {sample["doc_id"] for sample in samples} == set(documents)
    for sample in samples:
        theirs, found = [response for (response,) in sample["resps"]], documents[sample["doc_id"]]
        if requests[0].kind == "generate":
            assert [completion.text for completion in found] == theirs
        elif isinstance(theirs[0], float):  # a text whose every token is asked: one number for all of its windows
            # Summed in fp32 over there: of a long text no more than its last digit is known.
            total = sum(c.loglikelihood or 0.0 for c in found)
            assert total == pytest.approx(theirs[0], abs=1e-3 * len(found), rel=2**-23)
        else:
            assert [c.loglikelihood for c in found] == [pytest.approx(value, abs=1e-3) for value, _ in theirs]
            assert [c.is_greedy for c in found] == [greedy for _, greedy in theirs]


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
