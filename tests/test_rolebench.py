"""RoleBench: its test sets, its questions, and ROUGE-L against a definition of its own."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from results.records import Completion
from tests.data_folder import data_folder
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads.base import WorkloadError
from workloads.datasets import SAMPLES, read_jsonl
from workloads.rolebench import METRIC, RoleBench, RoleBenchParameters, rouge_l

TOKENIZER = TinyTokenizer()


def longest_common_subsequence(a: list[str], b: list[str]) -> int:
    """Lin (2004), by the recursion."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def f_measure(reference: str, answer: str) -> float:
    a, b = (re.findall("[a-z0-9]+", text.lower()) for text in (reference, answer))
    common = longest_common_subsequence(a, b)
    return 2 * common / (len(a) + len(b)) if common else 0.0  # 2PR/(P+R) of P = common/b, R = common/a


ANSWER = "I light the lamp, and the horn must sound until the fog lifts."


def test_rouge_l_is_the_best_f_measure_over_the_references() -> None:
    for _, row in read_jsonl(SAMPLES / "rolebench_test.jsonl"):
        expected = max(f_measure(reference, ANSWER) for reference in row["generated"])
        assert rouge_l(row["generated"], ANSWER) == pytest.approx(expected, abs=1e-12)
        assert rouge_l(row["generated"], row["generated"][-1]) == 1.0
    assert rouge_l(["nothing of it"], "") == 0.0


def answered(sample_id: str, text: str) -> Completion:
    return Completion(
        request_id=sample_id, sample_id=sample_id, n_prompt_tokens=1, start_s=0, prefill_end_s=1, end_s=2, text=text
    )


def test_each_answer_is_scored_against_its_own_references() -> None:
    workload = RoleBench(RoleBenchParameters(limit=5, seed=1), None)
    rows = [row for _, row in read_jsonl(SAMPLES / "rolebench_test.jsonl")]
    requests = workload.requests(TOKENIZER, 4096)
    positions = [int(r.sample_id.rsplit("/", 1)[1]) for r in requests]
    texts = [ANSWER if i else rows[positions[0]]["generated"][0] for i in range(5)]
    completions = [answered(r.sample_id, text) for r, text in zip(requests, texts, strict=True)]
    *singles, whole = workload.score(requests, completions)
    expected = [max(f_measure(g, t) for g in rows[p]["generated"]) for p, t in zip(positions, texts, strict=True)]
    assert [s.value for s in singles] == pytest.approx(expected)
    assert expected[0] == 1.0
    assert [s.sample_id for s in singles] == [r.sample_id for r in requests]
    mean = sum(expected) / 5
    variance = sum((v - mean) ** 2 for v in expected) / 4
    assert (whole.metric, whole.sample_id, whole.n) == (METRIC, None, 5)
    assert whole.value == pytest.approx(mean)
    assert whole.stderr == pytest.approx(math.sqrt(variance / 5))


def test_a_question_that_stands_twice_keeps_the_references_of_both(tmp_path: Path) -> None:
    folder = tmp_path / "rolebench" / "role_generalization_eng"
    folder.mkdir(parents=True)
    asked = [("dinner?", ["Soup and bread."]), ("breakfast?", ["Eggs."]), ("dinner?", ["Fish.", "A roast."])]
    rows = [{"role": "a cook", "question": question, "generated": answers} for question, answers in asked * 2]
    rows += [{"role": "a clerk", "question": question, "generated": ["Nothing."]} for question, _ in asked]
    (folder / "role_specific_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = RoleBench(RoleBenchParameters(), tmp_path)
    dinner = next(r for r in workload.requests(TOKENIZER, 4096) if "dinner" in TOKENIZER.decode(list(r.prompt_ids)))
    for reference in ("Soup and bread.", "Fish.", "A roast."):
        assert workload.score([dinner], [answered(dinner.sample_id, reference)])[0].value == 1.0
    assert len(workload.requests(TOKENIZER, 4096)) == 3  # of four, one is for calibration


def test_a_question_names_its_role_and_stands_alone() -> None:
    workload = RoleBench(RoleBenchParameters(), None)
    rows = [row for _, row in read_jsonl(SAMPLES / "rolebench_test.jsonl")]
    prompts = [TOKENIZER.decode(list(r.prompt_ids)) for r in workload.requests(TOKENIZER, 4096)]
    assert len(prompts) == 8  # of ten, two are for calibration
    for prompt, row in zip(prompts, rows, strict=False):
        assert prompt.startswith(f"<user>Answer as {row['role']} would")
        assert prompt.endswith(f"{row['question']}<assistant>")
    shown = [TOKENIZER.decode(list(p)) for p in workload.calibration_prompts(TOKENIZER, 4096, 9)]
    assert len(shown) == 2
    assert not set(shown) & set(prompts)


@pytest.mark.parametrize(
    ("generalization", "questions", "n_rows"),
    [("role", "role_specific", 2517), ("role", "general", 1500), ("instruction", "role_specific", 2000)],
)
def test_all_test_sets_of_the_data_folder_are_read(generalization: str, questions: str, n_rows: int) -> None:
    # 17 of the 2534 role-specific questions to new roles stand there twice.
    parameters = RoleBenchParameters.model_validate({"generalization": generalization, "questions": questions})
    requests = RoleBench(parameters, data_folder()).requests(TOKENIZER, 8192)
    assert len(requests) == n_rows - n_rows // 5
    assert len({r.sample_id for r in requests}) == len(requests)
    assert all(r.sample_id.startswith(f"rolebench/{generalization}_generalization_eng/{questions}") for r in requests)


def test_a_test_set_that_is_not_published_is_told_with_what_there_is() -> None:
    parameters = RoleBenchParameters(generalization="instruction", questions="general")
    with pytest.raises(WorkloadError, match=r"no general_test\.jsonl .*found: role_specific_test\.jsonl\.gz"):
        RoleBench(parameters, data_folder()).requests(TOKENIZER, 8192)


@pytest.mark.parametrize(
    ("change", "expected"),
    [({"generated": "text"}, "generated must be a list"), ({"generated": []}, "generated must be a list"),
     ({"role": ""}, "role and question must be texts")],
)  # fmt: skip
def test_another_schema_is_told_with_its_line(tmp_path: Path, change: dict[str, object], expected: str) -> None:
    folder = tmp_path / "rolebench" / "role_generalization_eng"
    folder.mkdir(parents=True)
    row = {"role": "a cook", "question": "What is for dinner?", "generated": ["Soup."]}
    (folder / "role_specific_test.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | change) + "\n")
    with pytest.raises(WorkloadError, match=rf"role_specific_test\.jsonl:2: {expected}"):
        RoleBench(RoleBenchParameters(), tmp_path).requests(TOKENIZER, 4096)


def test_questions_longer_than_the_context_are_skipped_or_fail_as_the_plan_says() -> None:
    longest = max(len(r.prompt_ids) for r in RoleBench(RoleBenchParameters(), None).requests(TOKENIZER, 4096))
    workload = RoleBench(RoleBenchParameters(max_new_tokens=10), None)
    assert len(workload.requests(TOKENIZER, longest + 10)) == 8
    assert len(workload.requests(TOKENIZER, longest + 9)) == 7
    assert workload.notes == (f"1 of 8 questions skipped: longer than {longest + 9} tokens",)
    with pytest.raises(WorkloadError, match="1 of 8 questions are longer"):
        RoleBench(RoleBenchParameters(max_new_tokens=10, too_long="fail"), None).requests(TOKENIZER, longest + 9)
    with pytest.raises(WorkloadError, match="none of 8 questions fits the model's 12 tokens"):
        workload.requests(TOKENIZER, 12)
