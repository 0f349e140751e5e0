"""What the bridge must get right for any task of lm-eval, shown on small tasks of our own."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import datasets
import pytest

from tests.fakes.answers import answer
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads.base import WorkloadError
from workloads.lm_eval_bridge import AskedTask, load_task, record_requests, sample_texts, score_completions

TOKENIZER = TinyTokenizer()
ROWS = [{"question": "What is red?", "answer": "a rose"}, {"question": "What is wet?", "answer": "rain"}]
IDS = ["toy/10", "toy/20"]
GENERATE: dict[str, Any] = {
    "task": "toy",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n", "Q:"], "max_gen_toks": 7},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


def toy(**changes: Any) -> Any:
    return load_task(GENERATE | changes, {"test": ROWS}, seed=0)


def test_a_generate_request_carries_the_tasks_own_stop_strings_and_limit() -> None:
    requests = record_requests(toy(), TOKENIZER, IDS)
    assert [TOKENIZER.decode(list(r.prompt_ids)) for r in requests] == ["What is red?", "What is wet?"]
    assert [(r.request_id, r.sample_id) for r in requests] == [("toy/10", "toy/10"), ("toy/20", "toy/20")]
    assert {(r.kind, r.stop, r.max_new_tokens) for r in requests} == {("generate", ("\n", "Q:"), 7)}


def test_prompts_begin_as_the_model_expects_texts_to() -> None:
    class Begins(TinyTokenizer):
        def encode_prompt(self, text: str) -> list[int]:
            return [7, *self.encode(text)]

    begun, bare = (record_requests(toy(), tokenizer, IDS) for tokenizer in (Begins(), TOKENIZER))
    assert [r.prompt_ids for r in begun] == [(7, *r.prompt_ids) for r in bare]


def test_a_single_stop_string_is_not_taken_for_its_letters() -> None:
    requests = record_requests(toy(generation_kwargs={"until": "END", "max_gen_toks": 7}), TOKENIZER, IDS)
    assert {r.stop for r in requests} == {("END",)}


@pytest.mark.parametrize(
    ("reply", "value"), [("a rose", 1.0), ("a rose\nrain", 1.0), ("a roseQ: x\n", 1.0), ("rose", 0)]
)
def test_text_from_the_first_stop_string_on_is_not_scored(reply: str, value: float) -> None:
    requests = record_requests(toy(), TOKENIZER, IDS)
    scores = score_completions(toy(), requests, answer(requests, lambda _: reply), IDS, {"exact_match": "exact_match"})
    by_sample = {score.sample_id: score.value for score in scores}
    assert by_sample == {"toy/10": value, "toy/20": 0.0, None: value / 2}


def test_a_choice_that_melts_into_its_context_is_an_error() -> None:
    class Blocks(TinyTokenizer):
        """One token for every 16 characters begun."""

        def encode(self, text: str) -> list[int]:
            return [1] * -(-len(text) // 16)

    choice = {
        "output_type": "multiple_choice",
        "doc_to_choice": ["a", "b"],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    }
    with pytest.raises(WorkloadError, match=r"toy/10: choice 0 \(' a'\) has no token of its own"):
        record_requests(toy(**choice), Blocks(), IDS)


def test_a_row_that_lm_eval_cannot_ask_is_told_with_the_task() -> None:
    rows: list[dict[str, Any]] = [ROWS[0], {"question": None, "answer": "rain"}]
    task = load_task(GENERATE | {"doc_to_text": "question"}, {"test": rows}, seed=0)
    with pytest.raises(WorkloadError, match=r"^toy: lm-eval cannot ask .* \(AssertionError: Context is") as caught:
        record_requests(task, TOKENIZER, IDS)
    assert isinstance(caught.value.__cause__, AssertionError)
    assert caught.value.__cause__.__traceback__ is not None


def test_a_row_whose_answer_lm_eval_cannot_tell_is_told_by_its_name() -> None:
    rows = [row | {"place": place} for row, place in zip(ROWS, ("0", "7"), strict=True)]
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["a rose", "rain"], "doc_to_target": "{{place}}"}
    task = load_task(GENERATE | choice | {"metric_list": [{"metric": "acc"}]}, {"test": rows}, seed=0)
    with pytest.raises(WorkloadError, match=r"^toy/20: lm-eval cannot tell .* \(IndexError: "):
        sample_texts(AskedTask(task, IDS))


def test_what_lm_eval_raises_when_it_scores_is_told_with_the_task() -> None:
    def process_results(document: dict[str, Any], results: list[str]) -> dict[str, float]:
        raise LookupError(f"\n{'*' * 70}\n  Resource punkt_tab not found.\n  Searched in: nowhere\n{'*' * 70}")

    requests = record_requests(toy(), TOKENIZER, IDS)
    with pytest.raises(WorkloadError) as caught:
        score_completions(
            toy(process_results=process_results), requests, answer(requests, lambda _: "x"), IDS, {"exact_match": "em"}
        )
    told = "toy: lm-eval cannot score the answers (LookupError: *"
    assert str(caught.value).startswith(told)
    assert "* Resource punkt_tab not found. Searched in: nowhere *" in str(caught.value)
    assert isinstance(caught.value.__cause__, LookupError)


def test_a_completion_that_is_no_number_is_told_in_our_own_words() -> None:
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["a rose", "rain"], "metric_list": [{"metric": "acc"}]}
    requests = record_requests(toy(**choice), TOKENIZER, IDS)
    with pytest.raises(WorkloadError, match=r"^toy/10#0: log-likelihood nan; the engine must return a number"):
        score_completions(toy(**choice), requests, answer(requests, lambda _: math.nan), IDS, {"acc": "acc"})


def test_loggers_and_progress_bars_are_left_as_they_were(request: pytest.FixtureRequest) -> None:
    logger, were_off = logging.getLogger("lm_eval"), datasets.are_progress_bars_disabled()
    request.addfinalizer(partial(logger.setLevel, logger.level))
    request.addfinalizer(datasets.disable_progress_bars if were_off else datasets.enable_progress_bars)
    logger.setLevel(logging.INFO)
    datasets.enable_progress_bars()
    record_requests(toy(), TOKENIZER, IDS)
    assert logging.getLogger("lm_eval").level == logging.INFO
    assert not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    record_requests(toy(), TOKENIZER, IDS)
    assert datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
