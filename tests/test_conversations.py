"""Turns that stand on the model's own answers: MT-bench, and ShareGPT replayed so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from results.records import Request
from results.requests import whole_request
from tests.data_folder import data_folder
from tests.fakes.random_models import copy_tokenizer
from tests.fakes.tiny_tokenizer import TinyTokenizer
from tests.test_tokenizer import ask_for_begin_token, change_config, read
from workloads.base import Workload, WorkloadError
from workloads.conversations import NO_TEMPLATE, Turn, conversation_requests
from workloads.datasets import SAMPLES, read_jsonl
from workloads.mt_bench import MTBench, MTBenchParameters
from workloads.rolebench import RoleBench, RoleBenchParameters
from workloads.sharegpt import ShareGPT, ShareGPTParameters

TOKENIZER = TinyTokenizer()
TALK = [("human", "One"), ("gpt", "First"), ("human", "Two"), ("gpt", "Second"), ("human", "Three"), ("gpt", "Third")]
SYSTEM_BETWEEN = [("human", "One"), ("gpt", "First"), ("system", "Be brief"), ("human", "Two"), ("gpt", "Second")]


def asked(requests: Sequence[Request], answer: str) -> list[str]:
    """The prompts as a model is asked that always says `answer` and then ends."""
    before: dict[str, tuple[Request, list[int]]] = {}
    for request in requests:
        whole = whole_request(request, before, TOKENIZER.eos_token_ids)
        before[request.request_id] = whole, [*TOKENIZER.encode(answer), TOKENIZER.eos_token_ids[0]]
    return [TOKENIZER.decode(list(whole.prompt_ids)) for whole, _ in before.values()]


def sharegpt(root: Path, talk: list[tuple[str, str]], **parameters: Any) -> ShareGPT:
    rows = [
        {"id": name, "conversations": [{"from": role, "value": text} for role, text in messages]}
        for name, messages in (("a", talk), ("reserved", TALK))
    ]
    (root / "sharegpt").mkdir()
    (root / "sharegpt" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ShareGPT(ShareGPTParameters(answers="generated", **parameters), root)


def test_each_turn_is_asked_after_what_the_model_said(tmp_path: Path) -> None:
    workload = sharegpt(tmp_path, TALK)
    requests = workload.requests(TOKENIZER, 4096)
    assert [r.follows for r in requests] == [None, "sharegpt/a/turn1", "sharegpt/a/turn2"]
    assert asked(requests, "Yes!") == [
        "<user>One<assistant>",
        "<user>One<assistant>Yes!<user>Two<assistant>",
        "<user>One<assistant>Yes!<user>Two<assistant>Yes!<user>Three<assistant>",
    ]
    assert any("asked other prompts" in note for note in workload.notes)


def test_a_model_that_answers_as_recorded_is_asked_as_recorded(tmp_path: Path) -> None:
    generated = sharegpt(tmp_path, [(role, "Same" if role == "gpt" else text) for role, text in TALK])
    recorded = ShareGPT(ShareGPTParameters(), tmp_path)
    prompts = [TOKENIZER.decode(list(r.prompt_ids)) for r in recorded.requests(TOKENIZER, 4096)]
    assert asked(generated.requests(TOKENIZER, 4096), "Same") == prompts
    limits = [r.max_new_tokens for r in generated.requests(TOKENIZER, 4096)]
    assert limits == [r.max_new_tokens for r in recorded.requests(TOKENIZER, 4096)]


def test_what_stands_between_an_answer_and_the_next_question_is_kept(tmp_path: Path) -> None:
    requests = sharegpt(tmp_path, SYSTEM_BETWEEN).requests(TOKENIZER, 4096)
    assert asked(requests, "Yes") == [
        "<user>One<assistant>",
        "<user>One<assistant>Yes<system>Be brief<user>Two<assistant>",
    ]


def test_a_conversation_ends_where_its_longest_answers_would_fill_the_context(tmp_path: Path) -> None:
    workload = sharegpt(tmp_path, [(role, "x y z " * 20 if role == "gpt" else text) for role, text in TALK])
    requests = workload.requests(TOKENIZER, 4096)
    # Were every answer as long as it may be, the second turn would just fit.
    n_two = sum(len(r.prompt_ids) + r.max_new_tokens for r in requests[:2])
    assert [r.sample_id[-5:] for r in workload.requests(TOKENIZER, n_two)] == ["turn1", "turn2"]
    assert workload.notes[0] == f"1 of 3 turns skipped: longer than {n_two} tokens"
    assert [r.sample_id[-5:] for r in workload.requests(TOKENIZER, n_two - 1)] == ["turn1"]


def test_a_plan_may_have_turns_too_long_fail(tmp_path: Path) -> None:
    workload = sharegpt(tmp_path, TALK, too_long="fail")
    n_all = sum(len(r.prompt_ids) + r.max_new_tokens for r in workload.requests(TOKENIZER, 4096))
    assert len(workload.requests(TOKENIZER, n_all)) == 3
    with pytest.raises(WorkloadError, match=r"1 of 3 turns .* \(sharegpt/a/turn3: .* too_long = \"skip\""):
        workload.requests(TOKENIZER, n_all - 1)


class Forgetful(TinyTokenizer):
    """A template that shows the last message only."""

    def chat(self, messages: list[dict[str, str]]) -> str:
        return super().chat(messages[-1:])


def test_a_template_that_hides_answers_cannot_be_replayed_so() -> None:
    turns = [
        Turn("t/1", [{"role": "user", "content": "One"}], 4),
        Turn("t/2", [{"role": "user", "content": c} for c in ("One", "", "Two")], 4),
    ]
    with pytest.raises(WorkloadError, match="shows an answer of the assistant 0 times"):
        conversation_requests(turns, Forgetful(), "generated")


@pytest.mark.parametrize("name", ["sharegpt", "mt_bench", "rolebench"])
def test_turns_of_a_model_without_a_template_are_told_and_begin_as_its_texts_do(name: str, tmp_path: Path) -> None:
    """A Llama or Gemma that was trained on texts alone answers otherwise without its begin token, and was asked so."""
    from transformers import AutoTokenizer

    copy_tokenizer(tmp_path)
    ask_for_begin_token(tmp_path)
    change_config(tmp_path, chat_template=None)
    tokenizer, theirs = read(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    made: dict[str, Workload] = {
        "sharegpt": ShareGPT(ShareGPTParameters(), None),
        "mt_bench": MTBench(MTBenchParameters(), None),
        "rolebench": RoleBench(RoleBenchParameters(), None),
    }
    first = made[name].requests(tokenizer, 4096)[0]
    text = tokenizer.decode(list(first.prompt_ids))
    assert text.startswith("user: ")
    assert text.endswith("\nassistant:")
    assert list(first.prompt_ids) == theirs(text, truncation=False).input_ids
    assert theirs(text, truncation=False).input_ids[0] == 0
    assert NO_TEMPLATE in made[name].notes
    made[name].requests(TOKENIZER, 4096)
    assert NO_TEMPLATE not in made[name].notes, "of a model that brings one"


# --- MT-bench ---------------------------------------------------------------------------------------------------------


def test_mt_bench_asks_its_second_turn_about_the_models_answer() -> None:
    workload = MTBench(MTBenchParameters(), None)
    requests = workload.requests(TOKENIZER, 4096)
    rows = [row for i, (_, row) in enumerate(read_jsonl(SAMPLES / "mt_bench_test.jsonl"), 1) if i % 5]
    assert asked(requests, "So.") == [
        prompt
        for row in rows
        for prompt in (
            f"<user>{row['turns'][0]}<assistant>",
            f"<user>{row['turns'][0]}<assistant>So.<user>{row['turns'][1]}<assistant>",
        )
    ]
    assert {r.max_new_tokens for r in requests} == {256}
    assert not workload.scored
    assert workload.notes[0] == "2 of 10 questions are for calibration, and never asked"


def test_mt_bench_calibrates_on_questions_that_it_never_asks() -> None:
    workload = MTBench(MTBenchParameters(), None)
    first_turns = {r.prompt_ids for r in workload.requests(TOKENIZER, 4096) if r.follows is None}
    shown = [tuple(p) for p in workload.calibration_prompts(TOKENIZER, 4096, 100)]
    assert len(shown) == 2
    assert not first_turns & set(shown)


def test_mt_bench_keeps_two_questions_of_each_kind_for_calibration() -> None:
    rows = [row for _, row in read_jsonl(data_folder() / "mt_bench" / "test.jsonl.gz")]
    workload = MTBench(MTBenchParameters(), data_folder())
    requests = workload.requests(TOKENIZER, 8192)
    numbers = {r.sample_id.split("/")[1] for r in requests}
    left = [row["category"] for row in rows if str(row["question_id"]) not in numbers]
    assert (len(numbers), len(requests)) == (64, 128)
    assert sorted(left) == sorted(2 * sorted({row["category"] for row in rows}))
    subset = MTBench(MTBenchParameters(limit=8, seed=3), data_folder()).requests(TOKENIZER, 8192)
    assert len(subset) == 16
    assert set(subset) < set(requests)
    assert subset == MTBench(MTBenchParameters(limit=8, seed=3), data_folder()).requests(TOKENIZER, 8192)


@pytest.mark.parametrize("turns", ["[]", '"One"', '["One", ""]', "[1]"])
def test_mt_bench_of_another_schema_is_told_with_its_line(tmp_path: Path, turns: str) -> None:
    (tmp_path / "mt_bench").mkdir()
    row = f'{{"question_id": 1, "category": "math", "turns": {turns}}}\n'
    (tmp_path / "mt_bench" / "test.jsonl").write_text(row)
    with pytest.raises(WorkloadError, match=r"test\.jsonl:1: turns must be a list of questions, none of them empty"):
        MTBench(MTBenchParameters(), tmp_path).requests(TOKENIZER, 4096)


def test_mt_bench_with_a_question_id_twice_is_refused(tmp_path: Path) -> None:
    """The second turn of one question would stand on the answer to the other."""
    (tmp_path / "mt_bench").mkdir()
    rows = [{"question_id": i % 9, "category": "math", "turns": ["One", "Two"]} for i in range(10)]
    (tmp_path / "mt_bench" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(WorkloadError, match="question_id 0 stands 2 times"):
        MTBench(MTBenchParameters(), tmp_path).requests(TOKENIZER, 4096)
