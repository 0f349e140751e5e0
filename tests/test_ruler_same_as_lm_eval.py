"""RULER on one checkpoint: the same prompts, texts and scores from our engine and from lm-eval's own `hf` model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from results.records import Request
from tests import ruler_answers
from tests.fakes.answers import answer
from tests.fakes.random_models import BUNDLED
from tests.hf_peer import Pair, load_pair
from tests.test_ruler_families import hotpot, squad, write_qa
from workloads import ruler
from workloads.base import Workload
from workloads.ruler import HaystackParameters, NeedleInHaystackParameters, NeedleParameters
from workloads.ruler_qa import qa_hotpot, qa_squad
from workloads.ruler_samples import RulerParameters
from workloads.ruler_tracking import RulerVariableTracking
from workloads.ruler_words import RulerCommonWords, RulerFrequentWords

pytestmark = pytest.mark.numbers

N_NEW_TOKENS = 12
"""Of a generated answer, on both sides: models with random weights never end."""


def asked_for(prompt: str) -> str:
    asked: str = re.findall(r"Question: (.*)", prompt)[-1].split("\nAnswer:")[0].strip()
    return asked.removesuffix(" Answer:")


def hotpot_answers(prompt: str) -> list[str]:
    return [row["answer"] for row in hotpot() if row["question"] == asked_for(prompt)]


def squad_answers(prompt: str) -> list[str]:
    asked = asked_for(prompt)
    questions = [q for article in squad()["data"] for p in article["paragraphs"] for q in p["qas"]]
    return [a["text"] for q in questions if q["question"] == asked for a in q["answers"]]


class Case(NamedTuple):
    definition: str
    """lm-eval's YAML."""
    build: Callable[[Path], Workload]
    outputs: Callable[[str], list[str]]
    """What the prompt asks for."""
    length: int
    answer_start: str
    """Where the start of the answer begins in the prompt."""


def needles(task: str, parameters: type[RulerParameters], length: int) -> Case:
    def build(_root: Path) -> Workload:
        made: Workload = getattr(ruler, task)(parameters(length=length, limit=2), None)
        return made

    return Case(task, build, ruler_answers.needle_values, length, "The special magic")


def family(definition: str, build: Callable[..., Workload], outputs: Callable[[str], list[str]], length: int) -> Case:
    return Case(
        definition, lambda root: build(RulerParameters(length=length, limit=2), root), outputs, length, "Answer:"
    )


CASES = {
    case.definition: case
    for case in (
        needles("niah_single_1", NeedleParameters, 512),
        needles("niah_single_2", NeedleInHaystackParameters, 512),
        needles("niah_single_3", NeedleInHaystackParameters, 512),
        needles("niah_multikey_1", NeedleInHaystackParameters, 512),
        needles("niah_multikey_2", NeedleParameters, 512),
        needles("niah_multikey_3", NeedleParameters, 512),
        needles("niah_multivalue", HaystackParameters, 512),
        needles("niah_multiquery", HaystackParameters, 768),
        family("vt", RulerVariableTracking, ruler_answers.tracked_names, 1024),
        family("cwe", RulerCommonWords, ruler_answers.common_words, 768),
        family("fwe", RulerFrequentWords, ruler_answers.frequent_words, 768),
        family("qa_squad", qa_squad, squad_answers, 512),
        family("qa_hotpot", qa_hotpot, hotpot_answers, 512),
    )
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    return load_pair(BUNDLED)


@pytest.mark.parametrize("name", CASES)
def test_the_same_texts_and_scores_as_lm_evals_hf_model(name: str, pair: Pair, tmp_path: Path) -> None:
    case = CASES[name]
    workload = case.build(write_qa(tmp_path))
    requests = [
        r.model_copy(update={"max_new_tokens": N_NEW_TOKENS}) for r in workload.requests(pair.engine.tokenizer, 8192)
    ]
    assert len(requests) == 2
    prompts = [pair.engine.tokenizer.decode(request.prompt_ids) for request in requests]
    theirs = _ask_hf(pair.hf, case, prompts)
    assert [sample["arguments"][0][0] for sample in theirs] == prompts

    completions = [pair.engine.run(request, lambda event, at_s: None) for request in requests]
    assert [[[c.text]] for c in completions] == [sample["resps"] for sample in theirs]
    scores = workload.score(requests, completions)
    assert [s.value for s in scores if s.sample_id] == [sample["4096"] for sample in theirs]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_right", [0, 1, None])
def test_hand_made_answers_score_as_lm_evals_own_function_scores_them(
    name: str, n_right: int | None, pair: Pair, tmp_path: Path
) -> None:
    """None, the first or all of what is asked, in capitals, with control characters and words around."""
    case = CASES[name]
    workload = case.build(write_qa(tmp_path))
    requests = workload.requests(pair.engine.tokenizer, 8192)

    def outputs(request: Request) -> list[str]:
        return case.outputs(pair.engine.tokenizer.decode(request.prompt_ids))

    def reply(request: Request) -> str:
        return f"\n\t It is\x07 {', '.join(outputs(request)[:n_right]).upper()}\r\n. 11"

    process = _yaml(case.definition)["process_results"]
    theirs = [process({"max_length": 4096, "outputs": outputs(r)}, [reply(r)])["4096"] for r in requests]
    scores = workload.score(requests, answer(requests, reply))
    assert [s.value for s in scores if s.sample_id] == theirs
    n_asked = len(outputs(requests[0]))
    assert theirs == [(n_asked if n_right is None else n_right) / n_asked] * 2


def _ask_hf(hf: Any, case: Case, prompts: list[str]) -> list[dict[str, Any]]:
    """Samples of lm-eval's evaluation of its own task over documents cut out of the prompts."""
    from datasets import Dataset
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    task = _yaml(case.definition)
    rows = []
    for prompt in prompts:
        start = prompt.rindex(case.answer_start)
        # The length only names the metric, and 4096 is a name that the task knows.
        rows.append(
            {
                "input": prompt[:start].removesuffix(task["target_delimiter"]),
                "gen_prefix": prompt[start:],
                "outputs": case.outputs(prompt),
                "max_length": 4096,
            }
        )
    task |= {"custom_dataset": lambda **_: {"test": Dataset.from_list(rows)}}
    task["generation_kwargs"] = task["generation_kwargs"] | {"max_gen_toks": N_NEW_TOKENS}
    found = evaluate(hf, TaskManager(include_defaults=False).load([task]), bootstrap_iters=0)
    return list(found["samples"][task["task"]])


def _yaml(definition: str) -> dict[str, Any]:
    """lm-eval's definition, its functions resolved but for the builder, whose import sorts six million keys."""
    import lm_eval.tasks
    from lm_eval.tasks._yaml_loader import load_yaml
    from lm_eval.tasks.ruler import common_utils

    found = dict(load_yaml(Path(lm_eval.tasks.__file__).parent / f"ruler/{definition}.yaml", resolve_func=False))
    found.pop("tag")
    found["process_results"] = getattr(common_utils, found["process_results"].rpartition(".")[2])
    found["metric_list"] = [m | {"aggregation": common_utils.aggregate_metrics} for m in found["metric_list"]]
    return found
