"""Training text has the form in which the workloads ask, and none of it is a validation item."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import jinja2
import numpy as np
import pytest

from engines.model.checkpoints import load_checkpoint
from engines.model.tokenizer import Tokenizer
from engines.tiny.training import Stage
from harness import training_text
from workloads.everyday import ACTIVITIES, hellaswag_rows
from workloads.lm_eval_bridge import lm_eval_tasks
from workloads.passages import boolq_rows
from workloads.small_talk import dialogue, sharegpt_rows

SIXTEEN = Stage(n_steps=1, n_rows=16, length=256, lessons="all")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    import torch

    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32).tokenizer


def text_of(document: training_text.Document) -> str:
    return "".join(piece.text for piece in document)


def test_a_step_has_one_batch(tokenizer: Tokenizer) -> None:
    one, again, other = (training_text.batch(step, SIXTEEN, tokenizer, seed=1) for step in (3, 3, 4))
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not np.array_equal(one.ids_NL, other.ids_NL)
    assert one.ids_NL.shape == (16, 256)
    assert one.valid_NL.mean() > 0.9
    assert not one.answer_NL[~one.valid_NL].any()
    assert set(np.unique(one.answer_NL)) == {0.0, 1.0, training_text.DECIDING_WEIGHT}


@pytest.mark.parametrize("kind", sorted({kind for mix in training_text.MIXES.values() for kind in mix}))
def test_pieces_are_encoded_as_the_whole_text_is(kind: str, tokenizer: Tokenizer) -> None:
    for seed in range(8):
        document = next(training_text._documents(kind, SIXTEEN, tokenizer, random.Random(seed)))
        ids = [i for piece in document for i in tokenizer.encode(piece.text)]
        assert ids == tokenizer.encode(text_of(document))


def test_shares_of_a_mix_are_a_whole() -> None:
    for mix in training_text.MIXES.values():
        assert sum(mix.values()) == pytest.approx(1.0)


@pytest.mark.parametrize("length", [256, 1024])
def test_every_needle_asked_for_is_in_the_text_and_the_sequence_is_full(length: int, tokenizer: Tokenizer) -> None:
    for seed in range(12):
        document = training_text.needles_document(length, tokenizer, random.Random(seed))
        text = text_of(document)
        said = dict(re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", text))
        answers = re.findall(r"for (\S+) mentioned in the provided text is (\d{7})\.<\|end\|>", text)
        assert answers
        assert all(said[key] == value for key, value in answers)
        said_again = [text for key, value in answers for text in (f" {key}", f" {value[0]}", f"{value[1:]}.<|end|>")]
        assert [piece.text for piece in document if piece.weight] == said_again
        # What is left is less than the longest unit of text, a line of grass and sky or a long sentence.
        n_lines = text.count("\nThe grass is green.")
        assert length - 60 < len(tokenizer.encode(text)) <= length + n_lines


def test_a_drill_repeats_every_needle_once(tokenizer: Tokenizer) -> None:
    for seed in range(12):
        document = training_text.drill_document(256, tokenizer, random.Random(seed))
        text = text_of(document)
        needles = re.findall(r"One of the special magic numbers for \S+ is: \d{7}\.", text)
        first, second = needles[: len(needles) // 2], needles[len(needles) // 2 :]
        assert len(first) >= 3
        assert sorted(first) == sorted(second)
        assert "".join(piece.text for piece in document if piece.weight) == "".join(f" {n[-8:]}" for n in second)
        assert len(tokenizer.encode(text)) <= 256 + 1


def test_pairs_are_asked_again_with_what_they_stand_for(tokenizer: Tokenizer) -> None:
    for seed in range(12):
        document = training_text.pairs_document(128, tokenizer, random.Random(seed))
        pairs = re.findall(r" (\S+): (\d)\.", text_of(document))
        first, second = pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]
        assert len(dict(first)) == len(first) >= 4
        assert sorted(first) == sorted(second)
        assert [piece.text for piece in document if piece.weight] == [f" {digit}" for _, digit in second]
        assert len(tokenizer.encode(text_of(document))) <= 128


def test_a_passage_is_put_as_lm_eval_puts_boolq() -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    prompt = jinja2.Template(load_yaml(lm_eval_tasks() / "super_glue/boolq/default.yaml")["doc_to_text"])
    for seed in range(10):
        text = text_of(training_text.passages_document(random.Random(seed))).removesuffix("<|end|>")
        for shot in text.split("\n\n"):
            passage, question, answer = re.fullmatch(
                r"(.* -- [^\n]*)\nQuestion: ([^?]*)\?\nAnswer: (yes|no)(?:\n.*)?", shot, re.DOTALL
            ).groups()  # type: ignore[union-attr]
            assert shot.startswith(f"{prompt.render(passage=passage, question=question)} {answer}")


def test_a_situation_is_put_as_lm_eval_puts_hellaswag() -> None:
    from datasets import Dataset
    from lm_eval.tasks.hellaswag.utils import process_docs

    from workloads.everyday import situation

    for seed in range(10):
        text = text_of(training_text.situations_document(random.Random(seed))).removesuffix("<|end|>")
        again = random.Random(seed)
        rows = [situation(again, kept_for_validation=False) for _ in range(again.randint(1, 4))]
        asked = process_docs(Dataset.from_list(rows))
        assert text.split("\n\n") == [f"{row['query']} {row['choices'][row['gold']]}" for row in asked]


def test_a_dialogue_is_put_as_the_chat_template_puts_it(tokenizer: Tokenizer) -> None:
    for seed in range(5):
        turns = dialogue(random.Random(seed))
        messages = [{"role": "user", "content": turns[0][0]}]
        for (_, answer), (said, _) in pairwise(turns):
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
        text = text_of(training_text.dialogue_document(random.Random(seed)))
        assert text == tokenizer.chat(messages) + turns[-1][1] + "<|end|>"


# What a question says, as the passage would affirm or negate it: an independent reading of both.
STATED = {
    r"does (\w+) live in (\w+)": ("{} lives in {}.", "{} does not live in {}."),
    r"does (\w+) like (\w+)": ("{} likes {}.", "{} does not like {}."),
    r"does (\w+) keep (\w+)": ("{} keeps {}.", "{} does not keep {}."),
    r"does (\w+) work as a (\w+)": ("{} works as a {}.", "{} does not work as a {}."),
    r"does the (\w+) belong to (\w+)": ("The {} belongs to {}.", "The {} does not belong to {}."),
    r"is the (\w+) closed on (\w+)": ("The {} is closed on {}.", "The {} is not closed on {}."),
    r"is the (\w+) (\w+)": ("The {} is {}.", "The {} is not {}."),
}


def test_the_answer_to_a_question_is_what_the_passage_states() -> None:
    rows = boolq_rows("validation", 400)
    for row in rows:
        found = (re.fullmatch(question, row["question"]) for question in STATED)
        words, forms = next((m.groups(), f) for m, f in zip(found, STATED.values(), strict=True) if m)
        affirmed, negated = (form.format(*words) for form in forms)
        assert (affirmed[0].upper() + affirmed[1:] in row["passage"]) == bool(row["label"])
        assert (negated[0].upper() + negated[1:] in row["passage"]) == (not row["label"])
    # Five standard deviations of a fair coin.
    assert abs(sum(row["label"] for row in rows) - 200) < 50


def test_one_ending_is_the_next_step() -> None:
    by_label = {activity.label: activity for activity in ACTIVITIES}
    labels = []
    for row in hellaswag_rows("validation", 300):
        activity = by_label[row["activity_label"]]
        n_done = row["ctx_a"].count(".")
        following = re.escape(activity.steps[n_done]).replace(r"\{thing\}", f"(?:{activity.things})")
        fitting = [i for i, ending in enumerate(row["endings"]) if re.fullmatch(f"{following}\\.", ending)]
        assert fitting == [int(row["label"])]
        assert len(set(row["endings"])) == 4
        labels.append(fitting[0])
    assert all(45 < labels.count(position) < 105 for position in range(4))


def test_nothing_of_validation_is_taught() -> None:
    def situations(split: str) -> set[str]:
        return {f"{r['ctx_a']} {r['ctx_b']} {r['endings'][int(r['label'])]}" for r in hellaswag_rows(split, 3000)}

    assert not situations("train") & situations("validation")
    passages = [{row["passage"] for row in boolq_rows(split, 2000)} for split in ("train", "validation")]
    assert not passages[0] & passages[1]
    talks = [{str(row["conversations"]) for row in sharegpt_rows(split, 200)} for split in ("train", "test")]
    assert not talks[0] & talks[1]


def test_rows_do_not_depend_on_how_many_are_asked() -> None:
    assert boolq_rows("validation", 5) == boolq_rows("validation", 50)[:5]
    assert hellaswag_rows("validation", 5) == hellaswag_rows("validation", 50)[:5]
    assert sharegpt_rows("test", 5) == sharegpt_rows("test", 50)[:5]
