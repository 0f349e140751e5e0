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
from torch import Tensor

from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
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


def assert_same_text(pair: Pair, requests: list[Request], ours: list[Completion], total: float) -> None:
    """Every token of a text as transformers has it: within 1e-3, and 2e-5 on average; and their sum is lm-eval's.

    total: lm-eval's, whose tokens are added in fp32 in an order that depends on the processor. Any order is off by at
    most (n - 1) units of rounding [Higham, Accuracy and Stability of Numerical Algorithms, eq. 4.4].
    """
    n_tokens, sum_of_tokens = 0, 0.0
    for request, completion in zip(requests, ours, strict=True):
        theirs_C, ours_C = tokens_of_hf(pair.hf, request), tokens_of_ours(pair.engine, request)
        error_C = (ours_C - theirs_C).abs()
        assert float(error_C.max()) < 1e-3
        assert float(error_C.mean()) < 2e-5
        assert completion.loglikelihood == pytest.approx(float(ours_C.double().sum()), rel=1e-9)
        n_tokens += len(theirs_C)
        sum_of_tokens += float(theirs_C.double().sum())
    assert sum_of_tokens == pytest.approx(total, rel=(n_tokens - 1) * 2**-24)


def tokens_of_hf(hf: Any, request: Request) -> Tensor:
    """The log-probability of each token of the continuation, as lm-eval takes it from its model's logits."""
    ids = torch.tensor([[*request.prompt_ids, *request.continuation_ids]])
    with torch.inference_mode():
        rows_CL = torch.log_softmax(hf.model(ids[:, :-1]).logits[0, len(request.prompt_ids) - 1 :], dim=-1)
    return rows_CL.gather(1, torch.tensor(request.continuation_ids)[:, None])[:, 0]


def tokens_of_ours(engine: ReferenceEngine, request: Request) -> Tensor:
    parts: list[Tensor] = []
    engine.show_log_probabilities(request, parts.append)
    return torch.cat(parts).gather(1, torch.tensor(request.continuation_ids)[:, None])[:, 0]


def assert_same_answers(
    pair: Pair, samples: Sequence[Mapping[str, Any]], requests: list[Request], ours: list[Completion]
) -> None:
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
            of_sample = [r for r, c in zip(requests, ours, strict=True) if c.sample_id == found[0].sample_id]
            assert_same_text(pair, of_sample, found, theirs[0])
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
