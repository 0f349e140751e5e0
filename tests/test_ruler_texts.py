"""The prompts of RULER's tasks are lm-eval's, character by character: its own builders run on our draws."""

from __future__ import annotations

import inspect
import random
import re
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data_folder import data_folder
from tests.fakes.tiny_tokenizer import TinyTokenizer
from tests.ruler_answers import NEEDLE
from tests.ruler_of_lm_eval import needle_builder, scripted
from workloads import ruler
from workloads.haystack import generated_text, haystack, sentence_starts
from workloads.ruler import NeedleSample, NeedleTask
from workloads.ruler_qa import Asked, Corpus, QASample
from workloads.ruler_samples import Prompt
from workloads.ruler_tracking import N_EXAMPLE_LINES, TrackingSample, tracking_prompt
from workloads.ruler_words import CommonWordsSample, FrequentWordsSample

NEEDLE_TASKS: dict[str, NeedleTask] = {
    name: getattr(ruler, name).args[0]
    for name in (
        "niah_single_1",
        "niah_single_2",
        "niah_single_3",
        "niah_multikey_1",
        "niah_multikey_2",
        "niah_multikey_3",
        "niah_multivalue",
        "niah_multiquery",
    )
}
every_needle_task = pytest.mark.parametrize("name", NEEDLE_TASKS)
THEIR_TEXT = {"prose": "essay", "lines": "repeat", "needles": "needle"}
TOKENIZER = TinyTokenizer()


# --- needles ----------------------------------------------------------------------------------------------------------


PROSE = [name for name, task in NEEDLE_TASKS.items() if task.text == "prose"]
PLACES = [
    *((name, text, depth) for name in PROSE for text in ("generated", "essays") for depth in (0, 26, 51, 100)),
    # lm-eval puts nothing below the last line.
    *((name, "lines", depth) for name in NEEDLE_TASKS if name not in PROSE for depth in (0, 51, 97)),
]


@pytest.mark.parametrize(("name", "text", "depth_percent"), PLACES)
def test_needles_between_the_same_words_at_the_same_depths_make_lm_evals_prompt(
    name: str, text: str, depth_percent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prose, size = (None, 12) if text == "lines" else (haystack(text, data_folder())[0], 200)
    samples = (NeedleSample(NEEDLE_TASKS[name], f"sample {i}", depth_percent, prose, 1024) for i in range(20))
    sample = next(s for s in samples if _lm_eval_could_draw(s, size, monkeypatch))
    ours = sample.prompt(size)
    theirs, answers, query = _their_prompt(monkeypatch, sample, size, ours)
    assert ours.question == theirs
    assert sample.outputs == answers
    assert query in ours.answer_start


def _lm_eval_could_draw(sample: NeedleSample, size: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """No depth twice, and as many sentences for its splitter as for ours: they differ at some 1 in 250 (essays)."""
    if len(set(sample.depths_percent)) < len(sample.depths_percent):
        return False
    if sample.task.text != "prose":
        return True
    sample.prompt(size)
    builder, _ = needle_builder(monkeypatch)
    words = sample.units[:size]
    return len(builder.cached_sent_tokenize(" ".join(words))) == len(sentence_starts(words))


def _their_prompt(monkeypatch: pytest.MonkeyPatch, sample: NeedleSample, size: int, ours: Prompt) -> Any:
    """lm-eval's `generate_input_output`, every draw of it answered from `sample`."""
    builder, niah_utils = needle_builder(monkeypatch)
    task, n = sample.task, sample.task.n_values
    drawn = [text for i, key in enumerate(sample.keys) for text in (key, *sample.values[i * n : (i + 1) * n])]
    if task.text == "needles":
        drawn += [text for line in sample.units[:size] for text in NEEDLE.findall(line)[0]]
    drawn_next = iter(drawn)
    monkeypatch.setattr(builder, "generate_random", lambda _kind: next(drawn_next))
    if task.text == "prose":
        places, words = sample.depths_percent, sample.units[:size]
    else:
        places, words = [int(size * depth / 100) for depth in sample.depths_percent], None
    asked = range(task.n_asked)
    script = scripted([places, asked], in_order=lambda needles: sorted(needles, key=ours.question.index))
    monkeypatch.setattr(builder, "random", script)
    return builder.generate_input_output(
        size,
        words or builder.get_haystack(THEIR_TEXT[task.text]),
        type_haystack=THEIR_TEXT[task.text],
        num_needle_k=task.n_keys,
        type_needle_k=task.keys,
        num_needle_v=task.n_values,
        type_needle_v=task.values,
        num_needle_q=task.n_asked,
        template=niah_utils.TEMPLATE,
    )


@every_needle_task
def test_lm_evals_own_samples_are_put_together_again_by_our_texts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task function as it stands, over our words and tokenizer: number and kind of needles, question, prefix."""
    builder, niah_utils = needle_builder(monkeypatch)
    prose = list(islice(generated_text(random.Random(5)), 2000))
    monkeypatch.setattr(
        niah_utils,
        "get_haystack",
        lambda type_haystack: prose if type_haystack == "essay" else builder.get_haystack(type_haystack),
    )
    monkeypatch.setattr(niah_utils, "get_tokenizer", lambda _name: _their_tokenizer)
    monkeypatch.setattr(niah_utils, "generate_samples", _two_samples(builder.generate_samples))
    task = NEEDLE_TASKS[name]
    rows = getattr(niah_utils, name)(max_seq_lengths=[2048])["test"]
    assert len(rows) == 2
    for row in rows:
        context = row["input"].partition("\n")[2].rpartition("\n")[0]
        asked = (
            row["gen_prefix"]
            .removesuffix(" mentioned in the provided text is")
            .removesuffix(" mentioned in the provided text are")
            .partition(" for ")[2]
        )
        assert row["input"] == ruler.question(context, asked, task.values, task.n_answers)
        assert row["gen_prefix"] == ruler.answer_start(asked, task.values, task.n_answers)
        by_value = {value: key for key, value in NEEDLE.findall(context)}
        assert len(row["outputs"]) == task.n_answers
        assert asked == ruler.listed(list(dict.fromkeys(by_value[value] for value in row["outputs"])))
        for value, key in by_value.items():
            assert ruler.needle(key, value, task.values) in context
        if task.text != "needles":
            assert len(by_value) == task.n_keys * task.n_values


def _their_tokenizer(text: str) -> SimpleNamespace:
    return SimpleNamespace(input_ids=TOKENIZER.encode(text))


def _two_samples(build: Any) -> Any:
    return lambda *args, **kwargs: build(*args, **(kwargs | {"num_samples": 2}))


def test_depths_of_the_other_needles_are_lm_evals_forty(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(ruler.DEPTHS_PERCENT) == [int(depth) for depth in needle_builder(monkeypatch)[0].DEPTHS]


# --- variable tracking ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_lines", [1, 5, 6, 40])
def test_the_same_chain_in_the_same_lines_makes_lm_evals_prompt(n_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks.ruler import vt_utils

    sample = TrackingSample("sample 1", 4096)
    ours = tracking_prompt(n_lines, sample.outputs, sample.value, sample.places(n_lines))
    theirs = _their_chain(vt_utils, monkeypatch, sample.outputs, sample.value, sample.places(n_lines))
    text, names = theirs(n_lines, 1, 4)
    assert ours.question + ours.answer_start == text
    assert sample.outputs == names


def _their_chain(vt_utils: Any, monkeypatch: pytest.MonkeyPatch, names: Any, value: str, places: Any) -> Any:
    script = scripted([places], in_order=list)
    drawn = iter(names)
    script.choices = lambda _letters, k: list(next(drawn))
    monkeypatch.setattr(vt_utils, "random", script)
    monkeypatch.setattr(vt_utils.np.random, "randint", lambda low, high: int(value))
    return vt_utils.generate_input_output


def test_the_solved_example_stands_before_the_question_as_in_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its whole sampler, given our example and our draws."""
    from lm_eval.tasks.ruler import vt_utils

    sample = TrackingSample("sample 2", 4096)
    n_lines = 10
    ours = sample.prompt(n_lines)
    places = sample.places(n_lines)
    example = tracking_prompt(N_EXAMPLE_LINES, sample.example_names, sample.example_value, sample.example_places)
    # The search for a length ends after one draw, at twice its lines, for every text counts 100 tokens; then the sample
    # and the names of its example are drawn.
    script = scripted([places, places], in_order=list)
    drawn = iter([*sample.outputs, *sample.outputs, *sample.example_names])
    script.choices = lambda _letters, k: list(next(drawn))
    monkeypatch.setattr(vt_utils, "random", script)
    monkeypatch.setattr(vt_utils.np.random, "randint", lambda low, high: int(sample.value))
    (theirs,) = vt_utils.sys_vartrack_w_noise_random(
        tokenizer=lambda text: SimpleNamespace(input_ids=range(100)),
        num_samples=1,
        max_seq_length=100 + 30 + 100,
        incremental=n_lines // 2,
        icl_example={"input": example.question + example.answer_start, "outputs": sample.example_names},
    )
    assert ours == Prompt(theirs["input"], theirs["gen_prefix"])
    assert sample.outputs == theirs["outputs"]


@pytest.mark.parametrize(("tokens_of_a_line", "n_lines"), [(24, 10), (30, 10), (35, 10), (20, 15), (40, 5)])
def test_lm_evals_example_has_ten_lines_for_usual_tokenizers(
    tokens_of_a_line: int, n_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks.ruler import vt_utils

    # Unseeded, lm-eval fails now and then: of five names of three letters, two may be the same.
    monkeypatch.setattr(vt_utils, "random", random.Random(0))

    def tokenizer(text: str) -> SimpleNamespace:
        """A line is so many tokens, any other word one and a half, as names and numbers are several."""
        n = text.count("The grass")
        others = len(text.split()) - 19 * n
        return SimpleNamespace(input_ids=range(n * tokens_of_a_line + int(1.5 * others)))

    (example,) = vt_utils.sys_vartrack_w_noise_random(
        tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5
    )
    assert example["input"].count("The grass") == n_lines


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "size"), [(1024, 40), (4096, 200)])
def test_the_same_words_in_the_same_order_make_lm_evals_numbered_list(
    length: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks.ruler import cwe_utils

    sample = CommonWordsSample("sample 1", length)
    ours = sample.prompt(size)
    listed = re.findall(r"\d+\. (.+?)(?= \d+\. |$)", ours.question.split("\n")[1])
    others = sorted(set(listed) - set(sample.outputs))
    # Two lists are drawn, of which the first is an example that does not get into the prompt.
    n_example = 20 if length < 4096 else 40
    script = scripted(
        [cwe_utils.WORDS[:n_example], [*sample.outputs, *others]],
        in_order=lambda words: listed if len(words) == len(listed) else words,
    )
    monkeypatch.setattr(cwe_utils, "random", script)
    monkeypatch.setattr(cwe_utils, "RNG", script)
    _example, text, answers = cwe_utils.generate_input_output(size, length)
    prefix = cwe_utils.CONFIG["answer_prefix"]
    assert ours == Prompt(text.removesuffix(prefix), prefix.strip())
    assert sample.outputs == answers


@pytest.mark.parametrize(("length", "size"), [(256, 100), (1024, 300), (4096, 1313)])
def test_the_same_coded_words_make_lm_evals_text(length: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks.ruler import fwe_utils

    sample = FrequentWordsSample("sample 1", length)
    ours = sample.prompt(size)
    shown = ours.question.partition("coded words. ")[2].partition("\n")[0].split(" ")
    # lm-eval draws its vocabulary, then calls the most frequent word "...": any word will do for that rank.
    vocabulary = ["aaaaaa", *sample.by_rank[1:]]
    drawn = iter(vocabulary)
    script = scripted([], in_order=lambda words: vocabulary if sorted(words) == sorted(vocabulary) else shown)
    script.choices = lambda _letters, k: list(next(drawn))
    monkeypatch.setattr(fwe_utils, "random", script)
    text, answers, _size = fwe_utils.generate_input_output(
        10**6, _their_tokenizer, num_words=size, vocab_size=len(vocabulary)
    )
    prefix = fwe_utils.CONFIG["answer_prefix"]
    assert ours == Prompt(text.removesuffix(prefix), prefix.strip())
    assert sample.outputs == answers


# --- questions over documents -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_the_same_documents_in_the_same_order_make_lm_evals_prompt(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.tasks.ruler import qa_utils

    documents = [f"Text {letter}\nof two lines." for letter in "abcdef"]
    asked = Asked("Which is it?", ["the second"], own=[1], related=[3, 4])
    sample = QASample("sample 1", Corpus(documents, [asked]), asked, 4096)
    ours = sample.prompt(size)
    shown = re.findall(r"Document \d+:\n(.+?)(?=\n\n)", ours.question, flags=re.S)
    assert len(shown) == size
    places = [documents.index(document) for document in shown]
    drawn = [i for i in places if i != 1]
    if size > 3:
        drawn = [i for i in drawn if i not in (3, 4)]
    monkeypatch.setattr(qa_utils, "random", scripted([drawn], in_order=lambda _documents: shown))
    row = {"query": asked.query, "outputs": asked.outputs, "context": [1], "more_context": [3, 4]}
    text, answers = qa_utils.generate_input_output(0, size, [row], documents)
    assert ours == Prompt(text, "Answer:")
    assert sample.outputs == answers


def test_the_text_before_a_qa_answer_is_what_lm_evals_sampler_writes() -> None:
    from lm_eval.tasks.ruler import qa_utils

    source = inspect.getsource(qa_utils.generate_samples)
    assert f'"gen_prefix": "{qa_utils.CONFIG["answer_prefix"]}"' in source
