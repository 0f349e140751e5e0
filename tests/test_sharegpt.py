"""The replay of recorded conversations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from results.records import Request
from tests.data_folder import data_folder
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads.base import WorkloadError
from workloads.datasets import SAMPLES, read_jsonl
from workloads.sharegpt import ShareGPT, ShareGPTParameters

TOKENIZER = TinyTokenizer()
LAST = ("reserved", [("human", "For calibration"), ("gpt", "Yes")])


def replay(root: Path, *conversations: tuple[str | int | None, list[tuple[str, str]]], **parameters: Any) -> ShareGPT:
    """A workload over the given conversations, and a last one that is reserved."""
    rows = [
        {"id": name, "conversations": [{"from": role, "value": text} for role, text in messages]}
        for name, messages in (*conversations, LAST)
    ]
    (root / "sharegpt").mkdir()
    (root / "sharegpt" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ShareGPT(ShareGPTParameters(**parameters), root)


def prompts(requests: Sequence[Request]) -> dict[str, str]:
    return {r.sample_id: TOKENIZER.decode(list(r.prompt_ids)) for r in requests}


THREE_TURNS = [
    ("human", "One"),
    ("gpt", "First"),
    ("human", "Two"),
    ("gpt", "Second"),
    ("human", "Three"),
    ("gpt", "3"),
]


def test_each_turn_is_asked_after_the_recorded_answers(tmp_path: Path) -> None:
    workload = replay(tmp_path, ("a", THREE_TURNS))
    assert prompts(workload.requests(TOKENIZER, 4096)) == {
        "sharegpt/a/turn1": "<user>One<assistant>",
        "sharegpt/a/turn2": "<user>One<assistant>First<user>Two<assistant>",
        "sharegpt/a/turn3": "<user>One<assistant>First<user>Two<assistant>Second<user>Three<assistant>",
    }
    assert workload.notes == ()


def test_new_tokens_are_bounded_by_the_recorded_answer_and_by_the_plan(tmp_path: Path) -> None:
    long, short = "a long answer " * 20, "No."
    talk = [("human", "x"), ("gpt", long), ("human", "y"), ("gpt", short)]
    requests = replay(tmp_path, ("a", talk), max_new_tokens=10).requests(TOKENIZER, 4096)
    assert len(TOKENIZER.encode(long)) > 10
    assert [r.max_new_tokens for r in requests] == [10, len(TOKENIZER.encode(short))]
    assert {r.kind for r in requests} == {"generate"}
    assert {r.sampling.temperature for r in requests} == {0.0}


def test_an_answer_without_its_question_is_left_out_and_counted(tmp_path: Path) -> None:
    workload = replay(tmp_path, ("chunk_1", [("gpt", "as I said"), ("human", "Go on"), ("gpt", "More")]))
    assert prompts(workload.requests(TOKENIZER, 4096)) == {"sharegpt/chunk_1/turn1": "<user>Go on<assistant>"}
    assert workload.notes == ("1 of 1 conversations begin with an answer, which was left out",)


@pytest.mark.parametrize("answers", ["recorded", "generated"])
@pytest.mark.parametrize("blank", ["", " \n"])
def test_a_turn_with_a_blank_question_or_answer_is_left_out_and_counted(
    blank: str, answers: str, tmp_path: Path
) -> None:
    """Its texts stay where later turns stand on them."""
    talk = [("human", blank), ("gpt", "First"), ("human", "Two"), ("gpt", blank), ("human", "Three"), ("gpt", "3")]
    other = [("human", "One"), ("gpt", "1")]
    workload = replay(tmp_path, ("a", talk), ("b", other), answers=answers)
    assert prompts(workload.requests(TOKENIZER, 4096)) == {
        "sharegpt/a/turn3": f"<user>{blank}<assistant>First<user>Two<assistant>{blank}<user>Three<assistant>",
        "sharegpt/b/turn1": "<user>One<assistant>",
    }
    assert "2 turns have a blank question or answer, and were left out" in workload.notes


def test_a_system_message_stays_before_the_first_turn(tmp_path: Path) -> None:
    talk = [("system", "Be kind"), ("gpt", "Hello"), ("human", "Hi"), ("gpt", "Hello again")]
    requests = replay(tmp_path, ("a", talk)).requests(TOKENIZER, 4096)
    assert prompts(requests) == {"sharegpt/a/turn1": "<system>Be kind<user>Hi<assistant>"}


def test_neighbouring_messages_of_one_role_are_one_turn(tmp_path: Path) -> None:
    talk = [("human", "Hi"), ("user", "there"), ("gpt", "Yes"), ("bard", "?"), ("human", "Bye"), ("chatgpt", "Bye")]
    assert prompts(replay(tmp_path, ("a", talk)).requests(TOKENIZER, 4096)) == {
        "sharegpt/a/turn1": "<user>Hi\n\nthere<assistant>",
        "sharegpt/a/turn2": "<user>Hi\n\nthere<assistant>Yes\n\n?<user>Bye<assistant>",
    }


def test_a_last_question_without_recorded_answer_is_not_asked(tmp_path: Path) -> None:
    workload = replay(tmp_path, ("a", [*THREE_TURNS, ("human", "Four")]))
    assert len(workload.requests(TOKENIZER, 4096)) == 3


def test_turns_too_long_for_the_model_are_skipped_whole_and_counted(tmp_path: Path) -> None:
    talk = [("human", "One"), ("gpt", "word " * 50), ("human", "Two"), ("gpt", "Second")]
    workload = replay(tmp_path, ("a", talk), max_new_tokens=8)
    n_first = len(TOKENIZER.encode("<user>One<assistant>")) + 8
    assert list(prompts(workload.requests(TOKENIZER, n_first))) == ["sharegpt/a/turn1"]
    assert workload.notes == (f"1 of 2 turns skipped: longer than {n_first} tokens",)
    with pytest.raises(WorkloadError, match="none of 2 turns of 1 conversations fits"):
        workload.requests(TOKENIZER, n_first - 1)
    workload.requests(TOKENIZER, 4096)
    assert not workload.notes
    workload.requests(TOKENIZER, n_first)
    assert len(workload.notes) == 1


def test_max_turns_keeps_the_first_turns(tmp_path: Path) -> None:
    requests = replay(tmp_path, ("a", THREE_TURNS), max_turns=2).requests(TOKENIZER, 4096)
    assert [r.sample_id for r in requests] == ["sharegpt/a/turn1", "sharegpt/a/turn2"]


def test_a_conversation_that_is_there_twice_is_asked_once(tmp_path: Path) -> None:
    workload = replay(tmp_path, ("a", THREE_TURNS), ("a", THREE_TURNS[:2]))
    requests = workload.requests(TOKENIZER, 4096)
    assert [r.sample_id for r in requests] == [f"sharegpt/a/turn{i}" for i in (1, 2, 3)]
    assert workload.notes == ("1 of 3 conversations have the id of one before, and were left out",)


def test_conversations_without_an_id_are_asked_each(tmp_path: Path) -> None:
    workload = replay(tmp_path, (None, THREE_TURNS[:2]), ("a", THREE_TURNS[2:4]), (None, THREE_TURNS[4:]))
    requests = workload.requests(TOKENIZER, 4096)
    assert [r.sample_id for r in requests] == [f"sharegpt/{name}/turn1" for name in ("row1", "a", "row3")]
    assert workload.notes == ("2 of 4 conversations have no id and are named after their row",)


def test_a_conversation_without_an_id_takes_no_name_that_another_has_as_its_id(tmp_path: Path) -> None:
    """Named after its row, it was taken for a repeat of the one with that id, and left out."""
    talks = [THREE_TURNS[:2], THREE_TURNS[2:4], THREE_TURNS[4:], THREE_TURNS]
    workload = replay(tmp_path, *zip(("row2", None, "row5", "row2_"), talks, strict=True))
    requests = prompts(workload.requests(TOKENIZER, 4096))
    assert requests["sharegpt/row2/turn1"] == "<user>One<assistant>"
    assert requests["sharegpt/row2__/turn1"] == "<user>Two<assistant>"
    assert {name.split("/")[1] for name in requests} == {"row2", "row2__", "row5", "row2_"}
    assert workload.notes == ("1 of 5 conversations have no id and are named after their row",)


def test_a_number_and_the_same_number_as_text_are_one_id(tmp_path: Path) -> None:
    requests = replay(tmp_path, (5, THREE_TURNS[:2]), ("5", THREE_TURNS[2:4])).requests(TOKENIZER, 4096)
    assert [r.sample_id for r in requests] == ["sharegpt/5/turn1"]


@pytest.mark.parametrize("messages", [[("human", "One")], [("gpt", "First")]])
def test_conversations_without_an_answered_turn_are_told_so(tmp_path: Path, messages: list[tuple[str, str]]) -> None:
    """It told that none of 0 turns fits the model."""
    with pytest.raises(WorkloadError, match="no human turn of 2 conversations has an answer behind it"):
        replay(tmp_path, ("a", messages), ("b", messages)).requests(TOKENIZER, 4096)


def test_a_limit_above_the_conversations_that_may_be_asked_is_noted(tmp_path: Path) -> None:
    workload = replay(tmp_path, ("a", THREE_TURNS), limit=5)
    workload.requests(TOKENIZER, 4096)
    assert workload.notes == ("5 items asked for, the data has 1 beside the 1 for calibration",)


def test_one_conversation_leaves_none_for_calibration(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="add another"):
        replay(tmp_path).requests(TOKENIZER, 4096)


def test_the_last_fifth_is_for_calibration_only() -> None:
    ids = [row["id"] for _, row in read_jsonl(SAMPLES / "sharegpt_test.jsonl")]
    workload = ShareGPT(ShareGPTParameters(), None)
    asked = {r.sample_id.split("/")[1] for r in workload.requests(TOKENIZER, 4096)}
    assert asked == set(ids[: len(ids) * 4 // 5])
    shown = workload.calibration_prompts(TOKENIZER, 4096, 100)
    assert len(shown) == 5
    assert not {tuple(p) for p in shown} & {r.prompt_ids for r in workload.requests(TOKENIZER, 4096)}
    assert list(workload.calibration_prompts(TOKENIZER, 4096, 2)) == list(shown)[:2]
    assert all(len(p) < 60 for p in workload.calibration_prompts(TOKENIZER, 60, 100))


def test_a_limit_is_a_subset_by_seed_and_nothing_is_scored() -> None:
    first, again, other = (
        ShareGPT(ShareGPTParameters(limit=3, seed=seed), None).requests(TOKENIZER, 4096) for seed in (0, 0, 1)
    )
    assert first == again != other
    assert len({r.sample_id.split("/")[1] for r in first}) == 3
    workload = ShareGPT(ShareGPTParameters(limit=3), None)
    assert not workload.scored
    assert list(workload.score(first, [])) == []


def test_the_real_file_replays_and_no_request_is_too_long() -> None:
    workload = ShareGPT(ShareGPTParameters(limit=40, max_turns=3), data_folder())
    requests = workload.requests(TOKENIZER, 2048)
    assert len({r.request_id for r in requests}) == len(requests) > 40
    assert all(len(r.prompt_ids) + r.max_new_tokens <= 2048 for r in requests)
    assert all(TOKENIZER.decode(list(r.prompt_ids)).startswith(("<user>", "<system>")) for r in requests)
    assert any("turns skipped" in note for note in workload.notes)
    assert any("begin with an answer" in note for note in workload.notes)
