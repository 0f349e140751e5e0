"""Tasks of lm-eval as workloads: subsets, examples, what does not fit, and what cannot be asked at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from results.records import Request, Score
from tests.data_folder import data_folder
from tests.fakes.answers import answer
from tests.fakes.items import gsm8k as gsm8k_rows
from tests.fakes.items import math_qa, mmlu, write_data_folder, write_rows
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads import aime, gsm8k, mathqa, strategyqa, truthfulqa
from workloads.any_task import AnyTask, AnyTaskParameters
from workloads.base import WorkloadError, n_tokens
from workloads.benchmark import Benchmark, BenchmarkParameters, GeneratingParameters
from workloads.datasets import DataSource
from workloads.mmlu import DATASET as MMLU_DATA
from workloads.mmlu import MMLU, MMLUParameters
from workloads.single_task import SingleTask, TaskBenchmark

TOKENIZER = TinyTokenizer()
LONG = 100_000


def asked(task: SingleTask, root: Path, **parameters: Any) -> Benchmark:
    return TaskBenchmark(task, BenchmarkParameters(**parameters), root)


def generated(task: SingleTask, root: Path, **parameters: Any) -> Benchmark:
    return TaskBenchmark(task, GeneratingParameters(**parameters), root)


def any_task(root: Path | None, **parameters: Any) -> Benchmark:
    return AnyTask(AnyTaskParameters(**parameters), root)


def prompt(request: Request) -> str:
    return TOKENIZER.decode(list(request.prompt_ids))


def aggregates(scores: Sequence[Score]) -> dict[str, float]:
    return {score.metric: score.value for score in scores if score.sample_id is None}


# --- scores -----------------------------------------------------------------------------------------------------------


def test_each_filter_is_a_metric_of_its_own(items: Path) -> None:
    ours = generated(gsm8k.GSM8K, items)
    requests = ours.requests(TOKENIZER, LONG)
    # 11 + 60 and 25 + 4: in the form of the examples, and only as a number.
    replies = {"gsm8k/0": "So there are\n#### 71", "gsm8k/1": "I would say 29"}
    scores = ours.score(requests, answer(requests, lambda request: replies[request.sample_id]))
    assert aggregates(scores) == {"exact_match,strict-match": 0.5, "exact_match,flexible-extract": 1.0}
    strict = {s.sample_id: s.value for s in scores if s.metric == "exact_match,strict-match"}
    assert strict == {"gsm8k/0": 1.0, "gsm8k/1": 0.0, None: 0.5}


def test_mc2_is_the_share_of_probability_on_true_choices(items: Path) -> None:
    ours = asked(truthfulqa.MC2, items)
    requests = ours.requests(TOKENIZER, LONG)
    # All choices alike: the share of a question is that of its true choices, here 1 of 3, 2 of 3 and 2 of 4.
    scores = ours.score(requests, answer(requests, lambda _: -3.0))
    of_samples = {s.sample_id: s.value for s in scores if s.sample_id is not None}
    assert of_samples == pytest.approx({"truthfulqa_mc2/0": 1 / 3, "truthfulqa_mc2/1": 2 / 3, "truthfulqa_mc2/2": 0.5})
    assert aggregates(scores)["acc"] == pytest.approx((1 / 3 + 2 / 3 + 1 / 2) / 3)


def test_repeats_of_a_sampled_task_are_requests_with_draws_of_their_own(items: Path) -> None:
    ours = any_task(items, task="gsm8k_cot_self_consistency", limit=1, max_new_tokens=5)
    requests = ours.requests(TOKENIZER, LONG)
    sample_id = requests[0].sample_id
    assert [r.request_id for r in requests] == [f"{sample_id}#{k}" for k in range(64)]
    assert {r.sampling.temperature for r in requests} == {0.2}
    both = any_task(items, task="gsm8k_cot_self_consistency", limit=2, max_new_tokens=5).requests(TOKENIZER, LONG)
    assert len({r.sampling.seed for r in both}) == 2 * 64
    assert all(0 <= r.sampling.seed < 2**31 for r in both), "what a server is asked is what our engine draws with"
    right = gsm8k_rows()[6 + int(sample_id.split("/")[1])]["answer"].split("#### ")[1]
    # 40 votes of 64 are right, but neither the first nor most of the first eight.
    replies = {f"{sample_id}#{k}": f" The answer is {right if k >= 24 else 1}." for k in range(64)}
    scores = ours.score(requests, answer(requests, lambda request: replies[request.request_id]))
    assert aggregates(scores) == {
        "exact_match,score-first": 0.0,
        "exact_match,maj@64": 1.0,
        "exact_match,maj@8": 0.0,
    }


def test_mmlu_weighs_each_question_alike(items: Path) -> None:
    ours = MMLU(MMLUParameters(), items)
    requests = ours.requests(TOKENIZER, LONG)
    rows = mmlu({"anatomy": 3, "college_physics": 2, "virology": 4})
    by_subject = {s: [r for r in rows if r["subject"] == s] for s in ("anatomy", "college_physics", "virology")}

    def reply(request: Request) -> float:
        _, subject, i = request.sample_id.split("/")
        is_right = request.request_id.endswith(f"#{by_subject[subject][int(i)]['answer']}")
        return 0.0 if is_right == (subject != "virology") else -9.0

    scores = ours.score(requests, answer(requests, reply))
    expected = {"acc": 5 / 9, "acc/stem": 1.0, "acc/other": 0.0}
    expected |= {"acc/anatomy": 1.0, "acc/college_physics": 1.0, "acc/virology": 0.0}
    assert aggregates(scores) == expected
    first = next(s for s in scores if s.sample_id is None)
    assert (first.metric, first.n) == ("acc", 9)
    assert len([s for s in scores if s.sample_id is not None]) == 9


def test_equal_answers_are_scored_once_and_others_again(items: Path) -> None:
    ours = asked(strategyqa.TASK, items)
    requests = ours.requests(TOKENIZER, LONG)
    yes = answer(requests, lambda r: 0.0 if r.request_id.endswith("#0") else -1.0)
    no = answer(requests, lambda r: -1.0 if r.request_id.endswith("#0") else 0.0)
    assert ours.score(requests, yes) is ours.score(requests, yes)
    assert aggregates(ours.score(requests, yes)) == {"acc": pytest.approx(2 / 3)}
    assert aggregates(ours.score(requests, no)) == {"acc": pytest.approx(1 / 3)}


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_examples_of_mmlu_come_from_the_dev_split_of_the_same_subject(items: Path) -> None:
    requests = MMLU(MMLUParameters(subjects=("virology",), num_fewshot=2), items).requests(TOKENIZER, LONG)
    texts = {prompt(r) for r in requests}
    assert len(texts) == 4  # one for the choices of each question
    for text in texts:
        assert text.startswith("The following are multiple choice questions (with answers) about virology.")
        # The dev split's questions start at 3 as well; each is told with its answer, and the last is left open.
        assert text.count("Answer:") == 3
        assert text.count("Which number of virology is 3?") >= 1
        assert "anatomy" not in text


def test_examples_of_gsm8k_are_train_items_and_never_asked_ones(items: Path) -> None:
    requests = generated(gsm8k.GSM8K, items).requests(TOKENIZER, LONG)
    train = {row["question"] for row in gsm8k_rows()[:6]}
    for request in requests:
        *examples, last = [part.split("\nAnswer:")[0] for part in prompt(request).split("Question: ")[1:]]
        assert len(set(examples)) == 5
        assert set(examples) <= train
        assert last not in train


def test_the_subset_of_a_group_is_drawn_from_all_of_its_items(items: Path) -> None:
    def ids(**parameters: Any) -> set[str]:
        return {r.sample_id for r in MMLU(MMLUParameters(**parameters), items).requests(TOKENIZER, LONG)}

    assert len(ids()) == 9
    assert len(ids(limit=4)) == 4
    assert ids(limit=4) < ids(limit=6) < ids()
    assert ids(limit=4, seed=1) != ids(limit=4, seed=2)


def test_calibration_shows_items_that_are_not_asked(items: Path) -> None:
    train = {row["Problem"] for row in math_qa()[:4]}
    prompts = asked(mathqa.TASK, items, limit=2).calibration_prompts(TOKENIZER, LONG, 9)
    shown = [TOKENIZER.decode(list(ids)).split("\n")[0].removeprefix("Question: ") for ids in prompts]
    assert sorted(shown) == sorted(train)
    # TruthfulQA has one split: what the limit leaves.
    few = asked(truthfulqa.MC1, items, limit=2)
    (left,) = few.calibration_prompts(TOKENIZER, LONG, 9)
    assert TOKENIZER.decode(list(left)) not in {prompt(r) for r in few.requests(TOKENIZER, LONG)}
    with pytest.raises(WorkloadError, match="all 3 are; lower limit"):
        asked(truthfulqa.MC1, items).calibration_prompts(TOKENIZER, LONG, 9)


def test_a_calibration_item_too_long_is_left_out_whatever_the_plan_says_of_asked_ones(tmp_path: Path) -> None:
    write_data_folder(tmp_path)
    train = math_qa()[:4]
    long = train[0] | {"Problem": "what is 1 " + "and 1 " * 1000 + "?"}
    write_rows(tmp_path / "math_qa" / "train.jsonl", [*train, long])
    for too_long in ("fail", "skip"):
        ours = asked(mathqa.TASK, tmp_path, too_long=too_long)
        assert len({r.sample_id for r in ours.requests(TOKENIZER, 500)}) == 4
        prompts = ours.calibration_prompts(TOKENIZER, 500, 9)
        shown = [TOKENIZER.decode(list(ids)).split("\n")[0].removeprefix("Question: ") for ids in prompts]
        assert sorted(shown) == sorted(row["Problem"] for row in train)


def test_a_subject_whose_calibration_items_are_all_too_long_leaves_the_others(tmp_path: Path) -> None:
    write_data_folder(tmp_path)
    short, (long, *_) = mmlu({"virology": 2}), mmlu({"anatomy": 1})
    write_rows(tmp_path / "mmlu" / "validation.jsonl", [long | {"question": "Which? " * 1000}, *short])
    ours = MMLU(MMLUParameters(num_fewshot=0, too_long="skip"), tmp_path)
    texts = [TOKENIZER.decode(list(ids)) for ids in ours.calibration_prompts(TOKENIZER, 500, 9)]
    assert len(texts) == 2
    assert all("of virology is" in text for text in texts)


def test_samples_tell_question_answer_and_choices(items: Path) -> None:
    (first, *_) = asked(mathqa.TASK, items).samples()
    assert first.question == "Question: what is 16 more than 16 ?\nAnswer:"
    assert first.choices == ("20", "23", "26", "29", "32")
    assert (first.sample_id, first.expected) == ("mathqa/0", "32")
    assert [s.expected for s in asked(strategyqa.TASK, items).samples()] == ["No", "Yes", "Yes"]


def test_a_text_is_asked_in_windows_of_the_models_length_after_a_begin_token(tmp_path: Path) -> None:
    class Begins(TinyTokenizer):
        def __init__(self) -> None:
            super().__init__()
            self.name, self.bos_token_id = "begins", 7

    write_rows(
        tmp_path / "pages.jsonl", [{"page": "a b c d e f g h i j k l m n o p q r s t u v w x y z"}, {"page": ""}]
    )
    ours = any_task(tmp_path, task="wikitext", data_files={"test": "pages.jsonl"})
    for tokenizer, begin in ((Begins(), 7), (TOKENIZER, TOKENIZER.eos_token_ids[0])):
        requests = ours.requests(tokenizer, 10)
        text = tokenizer.encode("a b c d e f g h i j k l m n o p q r s t u v w x y z")
        assert [i for r in requests for i in r.continuation_ids] == text
        assert requests[0].prompt_ids == (begin,)
        assert all(n_tokens(r) <= 10 for r in requests)
        # The last window has as much context as fits.
        assert n_tokens(requests[-1]) == 10
        scores = ours.score(requests, answer(requests, lambda r: -2.0 * len(r.continuation_ids)))
        # 26 words and an empty text, which lm-eval counts as one word; 51 bytes.
        found = aggregates(scores)
        assert found["word_perplexity"] == pytest.approx(2.718281828459045 ** (2 * len(text) / 27))
        assert found["bits_per_byte"] == pytest.approx(2 * len(text) / 51 / 0.6931471805599453)
        assert {s.metric: s.higher_is_better for s in scores} == dict.fromkeys(found, False)
        assert all(s.sample_id is None for s in scores)


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_items_too_long_are_skipped_counted_and_left_out_of_the_score(items: Path) -> None:
    every = asked(truthfulqa.MC1, items).requests(TOKENIZER, LONG)
    longest: dict[str, int] = {}
    for request in every:
        longest[request.sample_id] = max(longest.get(request.sample_id, 0), n_tokens(request))
    limit = sorted(longest.values())[1]
    fitting = {sample_id for sample_id, n in longest.items() if n <= limit}
    assert len(fitting) == 2

    with pytest.raises(WorkloadError, match=rf'1 of 3 items do not fit the model.s {limit} tokens.*too_long = "skip"'):
        asked(truthfulqa.MC1, items).requests(TOKENIZER, limit)
    ours = asked(truthfulqa.MC1, items, too_long="skip")
    requests = ours.requests(TOKENIZER, limit)
    assert {r.sample_id for r in requests} == fitting
    assert ours.notes == (f"1 of 3 items skipped: longer than {limit} tokens",)
    scores = ours.score(requests, answer(requests, lambda r: 0.0 if r.request_id.endswith("#0") else -1.0))
    (whole,) = [s for s in scores if s.sample_id is None]
    assert (whole.value, whole.n) == (1.0, 2)
    with pytest.raises(WorkloadError, match="none of 3 items fits the model's 20 tokens"):
        ours.requests(TOKENIZER, 20)
    assert ours.requests(TOKENIZER, LONG) == every
    assert ours.notes == ()


def test_an_answer_longer_than_the_context_is_told_with_its_remedy(items: Path) -> None:
    with pytest.raises(WorkloadError, match=r"2 of 2 items do not fit the model's 4096 tokens.*lower max_new_tokens"):
        generated(aime.AIME24, items).requests(TOKENIZER, 4096)
    requests = generated(aime.AIME24, items, max_new_tokens=100).requests(TOKENIZER, 4096)
    assert {r.max_new_tokens for r in requests} == {100}


# --- bad input --------------------------------------------------------------------------------------------------------

BAD_ROWS: list[tuple[SingleTask, str, dict[str, Any], str]] = [
    (gsm8k.GSM8K_COT, "gsm8k/test", {"question": "Why?", "answer": "42"}, 'must end in "#### NUMBER"'),
    (gsm8k.GSM8K_COT, "gsm8k/test", {"problem": "Why?", "answer": "#### 42"}, "no column question"),
    (gsm8k.GSM8K, "gsm8k/test", {"question": 7, "answer": "#### 42"}, "question must be text, found 7"),
    (mathqa.TASK, "math_qa/test", {"Problem": "1", "options": "a ) 1", "correct": "a"}, "options must read"),
    (mathqa.TASK, "math_qa/test", {"Problem": None, "options": "", "correct": "a"}, "Problem must be text, found None"),
    (mathqa.TASK, "math_qa/test", {"Problem": "1", "options": "", "correct": "f"}, "a letter from a to e, found 'f'"),
    (aime.AIME24, "aime24/train", {"Problem": "1", "Answer": "204"}, "Answer must be a whole number, found '204'"),
    (aime.AIME25, "aime25/test", {"problem": "1", "answer": "x"}, "answer must be a whole number, found 'x'"),
    (strategyqa.TASK, "strategyqa/validation", {"question": "1", "answer": "yes"}, "true or false, found 'yes'"),
    (
        truthfulqa.MC1,
        "truthful_qa/multiple_choice/validation",
        {"question": "1", "mc1_targets": {"choices": ["a", "b"], "labels": [0, 1]}, "mc2_targets": {}},
        "the first choice of mc1_targets must be the true one",
    ),
    (
        truthfulqa.MC1,
        "truthful_qa/multiple_choice/validation",
        {"question": "1", "mc1_targets": {"choices": ["a", ""], "labels": [1, 0]}, "mc2_targets": {}},
        "mc1_targets must hold texts, one of them labelled 1",
    ),
    (
        truthfulqa.GEN,
        "truthful_qa/generation/validation",
        {"question": "1", "correct_answers": [""], "incorrect_answers": ["x"]},
        "correct_answers must be a list of texts",
    ),
]


@pytest.mark.parametrize(("task", "file", "row", "complaint"), BAD_ROWS)
def test_rows_that_could_not_be_scored_are_named(
    task: SingleTask, file: str, row: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / f"{file}.jsonl", [row])
    with pytest.raises(WorkloadError) as caught:
        asked(task, tmp_path).requests(TOKENIZER, LONG)
    assert f"{path}:1: " in str(caught.value)
    assert complaint in str(caught.value)


def test_rows_of_no_or_an_unknown_subject_are_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "mmlu" / "test.jsonl", [mmlu({"alchemy": 1})[0]])
    with pytest.raises(WorkloadError, match="unknown subject 'alchemy'"):
        MMLU(MMLUParameters(), tmp_path).requests(TOKENIZER, LONG)
    with pytest.raises(WorkloadError, match="no subject alchemy; known: abstract_algebra, anatomy"):
        MMLU(MMLUParameters(subjects=("alchemy",)), tmp_path)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        *(({"choices": choices}, "choices must be a list of four texts") for choices in ("abcd", ["a"] * 3, ["a"] * 5)),
        ({"choices": ["a", "b", "c", 4]}, "choices must be a list of four texts"),
        *(({"answer": answer}, "answer must be a position from 0 to 3") for answer in (-1, 4, "B", True)),
    ],
)
def test_mmlu_rows_that_could_not_be_scored_are_named(tmp_path: Path, wrong: dict[str, Any], complaint: str) -> None:
    good = mmlu({"anatomy": 1})[0]
    path = write_rows(tmp_path / "mmlu" / "test.jsonl", [*(good | {"answer": i} for i in range(4)), good | wrong])
    with pytest.raises(WorkloadError, match=f"{path}:5: {complaint}"):
        MMLU(MMLUParameters(num_fewshot=0), tmp_path).requests(TOKENIZER, LONG)


def test_a_task_without_a_sample_says_where_its_data_may_be() -> None:
    with pytest.raises(WorkloadError, match=r"no sample of its test split.*JOULEBENCH_DATA.*gsm8k/test\.jsonl"):
        TaskBenchmark(gsm8k.GSM8K, BenchmarkParameters(), None).requests(TOKENIZER, LONG)


def test_settings_without_effect_are_refused(items: Path) -> None:
    with pytest.raises(WorkloadError, match="without examples, found num_fewshot = 3"):
        asked(truthfulqa.MC1, items, num_fewshot=3)
    with pytest.raises(WorkloadError, match="generates nothing, found max_new_tokens = 9"):
        any_task(items, task="mathqa", max_new_tokens=9, data_files={"test": "math_qa/test.jsonl"})
    with pytest.raises(WorkloadError, match=r"num_fewshot 9 needs 9 written items, there are 8"):
        generated(gsm8k.GSM8K_COT, items, num_fewshot=9).requests(TOKENIZER, LONG)


# --- real files -------------------------------------------------------------------------------------------------------

SINGLE = [
    *(truthfulqa.MC1, truthfulqa.MC2, truthfulqa.GEN, mathqa.TASK, strategyqa.TASK),
    *(gsm8k.GSM8K, gsm8k.GSM8K_COT, gsm8k.GSM8K_COT_ZEROSHOT, aime.AIME24, aime.AIME25),
]


@pytest.mark.parametrize("task", SINGLE, ids=lambda task: task.name)
def test_real_files_have_the_schema_and_are_asked(task: SingleTask) -> None:
    ours = TaskBenchmark(task, BenchmarkParameters(limit=2), data_folder())
    requests = ours.requests(TOKENIZER, LONG)
    assert len({r.sample_id for r in requests}) == 2
    texts = {sample.sample_id: sample.question for sample in ours.samples()}
    assert all(prompt(r).endswith(texts[r.sample_id].strip()) for r in requests)


@pytest.mark.slow
def test_the_real_mmlu_has_57_subjects_and_14042_questions() -> None:
    # Building all of it takes minutes: its rows are counted, and a part of it is built.
    rows = DataSource("folder", data_folder()).rows(MMLU_DATA, "test")
    assert len(rows) == 14042  # of the paper's table
    assert len({row["subject"] for row in rows}) == 57
    requests = MMLU(MMLUParameters(limit=200, num_fewshot=0), data_folder()).requests(TOKENIZER, LONG)
    assert len(requests) == 4 * 200
