"""RULER's tracking, words and questions: length, what a careful reader finds in the prompt, scoring, files."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from results.records import Request
from tests import ruler_answers
from tests.fakes.answers import answer
from tests.fakes.damaged import unreadable
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads.base import Workload, WorkloadError
from workloads.ruler_qa import qa_hotpot, qa_squad
from workloads.ruler_samples import RulerParameters
from workloads.ruler_tracking import RulerVariableTracking
from workloads.ruler_words import RulerCommonWords, RulerFrequentWords

TOKENIZER = TinyTokenizer()
FAMILIES: dict[str, tuple[Callable[..., Workload], Callable[[str], list[str]], int]] = {
    "ruler_vt": (RulerVariableTracking, ruler_answers.tracked_names, 30),
    "ruler_cwe": (RulerCommonWords, ruler_answers.common_words, 120),
    "ruler_fwe": (RulerFrequentWords, ruler_answers.frequent_words, 50),
}
"""By name: (constructor, a careful reader, lm-eval's limit of new tokens)."""
every_family = pytest.mark.parametrize("name", FAMILIES)


def build(name: str, **parameters: Any) -> tuple[Workload, tuple[Request, ...]]:
    workload = FAMILIES[name][0](RulerParameters(**parameters), None)
    return workload, tuple(workload.requests(TOKENIZER, 1 << 20))


def text(request: Request) -> str:
    return TOKENIZER.decode(list(request.prompt_ids))


@every_family
@pytest.mark.parametrize("length", [1536, 4096])
def test_a_sample_has_the_asked_length_and_never_more(name: str, length: int) -> None:
    workload, requests = build(name, length=length, limit=3)
    assert (workload.name, workload.data_source, workload.notes) == (name, "generated", ())
    for request in requests:
        assert request.max_new_tokens == FAMILIES[name][2]
        assert 0.96 * length <= len(request.prompt_ids) + request.max_new_tokens <= length


@every_family
def test_what_a_careful_reader_finds_scores_one_and_all_but_one_loses_its_share(name: str) -> None:
    workload, requests = build(name, length=1536, limit=3)
    reader = FAMILIES[name][1]
    found = [reader(text(request)) for request in requests]
    n = {"ruler_vt": 5, "ruler_cwe": 10, "ruler_fwe": 3}[name]
    assert [len(set(words)) for words in found] == [n] * 3
    assert len({tuple(words) for words in found}) == 3, "samples must differ"
    right = answer(requests, lambda r: " ".join(reader(text(r))))
    assert [s.value for s in workload.score(requests, right)] == [1.0] * 4
    partly = answer(requests, lambda r: " ".join(reader(text(r))[1:]))
    assert [s.value for s in workload.score(requests, partly)] == pytest.approx([(n - 1) / n] * 4)
    assert [s.value for s in workload.score(requests, answer(requests, lambda r: "none"))] == [0.0] * 4


@every_family
def test_a_sample_is_the_same_whatever_the_limit_and_calibration_takes_others(name: str) -> None:
    _, few = build(name, length=1536, limit=2)
    workload, many = build(name, length=1536, limit=3)
    _, other = build(name, length=1536, limit=2, seed=1)
    assert many[:2] == few
    assert few[1].sample_id == f"{name}/1536/seed0/1"
    calibration = {tuple(ids) for ids in workload.calibration_prompts(TOKENIZER, 4096, 2)}
    assert len(calibration) == 2
    assert not {r.prompt_ids for r in many} & ({r.prompt_ids for r in other} | calibration)


@every_family
def test_a_length_without_room_for_the_question_is_an_error(name: str) -> None:
    with pytest.raises(WorkloadError, match="raise length"):
        build(name, length=240, limit=1)


def test_the_example_before_the_chain_is_solved_rightly() -> None:
    _, requests = build("ruler_vt", length=1536, limit=2)
    for request in requests:
        example, _, asked = text(request).rpartition("\n\n\n\n")
        solved = example.rpartition("they are: ")[2].split()
        assert ruler_answers.tracked_names(example) == solved
        assert {len(name) for name in solved} == {3}
        assert {len(name) for name in ruler_answers.tracked_names(asked)} == {5}


@pytest.mark.parametrize(("length", "n_common", "n_others"), [(2048, 6, 1), (4096, 30, 3)])
def test_common_words_are_as_common_as_lm_eval_makes_them(length: int, n_common: int, n_others: int) -> None:
    _, (request,) = build("ruler_cwe", length=length, limit=1)
    listed = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text(request).split("\n")[1])
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    times = sorted(Counter(word for _, word in listed).values(), reverse=True)
    assert times[:10] == [n_common] * 10
    assert set(times[10:]) == {n_others}


@pytest.mark.parametrize("length", [600, 1024, 4096])
def test_the_three_frequent_words_follow_zipfs_law_and_have_no_rival(length: int) -> None:
    _, requests = build("ruler_fwe", length=length, limit=3)
    for request in requests:
        words = text(request).partition("coded words. ")[2].partition("\n")[0].split(" ")
        times = [n for _, n in Counter(words).most_common(5)]
        assert times[0] == words.count("...")
        assert times[3] > times[4]
        # 1/k^2 of the first, rounded down
        assert [t / times[0] for t in times[:4]] == pytest.approx([1, 1 / 4, 1 / 9, 1 / 16], abs=2 / times[0])


# --- questions over documents -----------------------------------------------------------------------------------------


def squad(n_articles: int = 6) -> dict[str, Any]:
    """SQuAD 2.0's layout: articles of three paragraphs; the third has a question that nothing answers."""

    def paragraph(article: int, place: int) -> dict[str, Any]:
        name = f"town {article}-{place}"
        return {
            "context": f"The mayor of {name} is called Person{article}{place}. " + f"It lies by river {article}. " * 9,
            "qas": [
                {
                    "question": f"Who is the mayor of {name}?",
                    "is_impossible": place == 2,
                    "answers": [] if place == 2 else [{"text": f"Person{article}{place}"}, {"text": f"Mayor {place}"}],
                }
            ],
        }

    return {
        "data": [{"paragraphs": [paragraph(article, place) for place in range(3)]} for article in range(n_articles)]
    }


def hotpot() -> list[dict[str, Any]]:
    """HotpotQA's layout: each question with three titled passages of its own."""
    return [
        {
            "question": f"Where was writer {i} born?",
            "answer": f"Port {i}",
            "context": [[f"Title {i}-{j}", [f"Writer {i} wrote book {j}.", " It sold well."]] for j in range(3)],
        }
        for i in range(8)
    ]


def write_qa(root: Path) -> Path:
    (root / "ruler").mkdir(parents=True)
    (root / "ruler/dev-v2.0.json").write_text(json.dumps(squad()))
    (root / "ruler/hotpot_dev_distractor_v1.json.gz").write_bytes(gzip.compress(json.dumps(hotpot()).encode()))
    return root


@pytest.mark.parametrize(("task", "n_own"), [(qa_squad, 1), (qa_hotpot, 3)])
def test_a_question_has_its_own_documents_among_others_and_as_many_as_fit(
    task: Callable[..., Workload], n_own: int, tmp_path: Path
) -> None:
    workload = task(RulerParameters(length=700, limit=5), write_qa(tmp_path))
    requests = workload.requests(TOKENIZER, 4096)
    assert len({r.sample_id for r in requests}) == 5
    for request in requests:
        shown = text(request)
        documents = re.findall(r"Document (\d+):\n", shown)
        assert documents == [str(i) for i in range(1, len(documents) + 1)]
        name = re.search(r"Question: Who is the mayor of (town \d-\d)\?|Question: Where was (writer \d) born\?", shown)
        assert name
        own = name[1] or name[2].capitalize()
        assert len(re.findall(f"of {own} is|{own} wrote", shown)) == n_own
        assert len(documents) > n_own
        assert len(request.prompt_ids) + 32 <= 700
        assert shown.endswith("Answer:")


def test_questions_and_documents_are_read_as_lm_eval_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks.ruler import qa_utils

    from workloads.ruler_qa import HOTPOT, SQUAD

    for file, content, read in [(SQUAD, squad(), qa_utils.read_squad), (HOTPOT, hotpot(), qa_utils.read_hotpotqa)]:
        monkeypatch.setattr(qa_utils, "download_json", lambda _url, content=content: content)
        questions, documents = read.__wrapped__()
        corpus = file.parse(content)
        assert corpus.documents == documents
        assert [(q.query, q.outputs, q.own, q.related) for q in corpus.questions] == [
            (row["query"], row["outputs"], row["context"], row.get("more_context", [])) for row in questions
        ]


def test_one_of_two_reference_answers_scores_a_half_as_in_lm_eval(tmp_path: Path) -> None:
    from lm_eval.tasks.ruler.common_utils import process_results_part

    workload = qa_squad(RulerParameters(length=700, limit=3), write_qa(tmp_path))
    requests = workload.requests(TOKENIZER, 4096)

    def reference(request: Request) -> str:
        found = re.search(r"Question: Who is the mayor of town (\d)-(\d)", text(request))
        assert found
        return f"Person{found[1]}{found[2]}"

    scores = workload.score(requests, answer(requests, lambda r: f" {reference(r).upper()}, I think"))
    assert [(s.metric, s.value) for s in scores] == [("string_match_part", 0.5)] * 4
    row = {"max_length": 4096, "outputs": [reference(requests[0]), "Mayor 7"]}
    assert process_results_part(row, [reference(requests[0])])["4096"] == 0.5


def test_calibration_questions_are_never_asked(tmp_path: Path) -> None:
    workload = qa_squad(RulerParameters(length=700, limit=5), write_qa(tmp_path))
    requests = workload.requests(TOKENIZER, 4096)
    prompts = workload.calibration_prompts(TOKENIZER, 4096, 50)
    asked = {re.findall(r"Question: (.*)", text(r))[-1] for r in requests}
    shown = {re.findall(r"Question: (.*)", TOKENIZER.decode(list(ids)))[-1] for ids in prompts}
    assert (len(asked), len(shown), asked & shown) == (5, 7, set())


def test_questions_whose_documents_do_not_fit_are_left_out_and_counted(tmp_path: Path) -> None:
    content = squad()
    content["data"][0]["paragraphs"][0]["context"] += "One more bridge was built. " * 200
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/dev-v2.0.json").write_text(json.dumps(content))
    workload = qa_squad(RulerParameters(length=700, limit=12), tmp_path)
    requests = workload.requests(TOKENIZER, 4096)
    assert len(requests) == 11
    assert workload.notes[0] == "1 of 12 samples left out: longer than 700 tokens"
    scores = workload.score(requests, answer(requests, lambda r: "nobody"))
    assert [s.n for s in scores if s.sample_id is None] == [11]


def test_a_corpus_shorter_than_the_length_is_told(tmp_path: Path) -> None:
    workload = qa_squad(RulerParameters(length=4000, limit=2), write_qa(tmp_path))
    (request, _) = workload.requests(TOKENIZER, 4096)
    (note,) = workload.notes
    assert re.fullmatch(r"samples have \d+ tokens and more, of the 4000 asked for", note)
    assert text(request).count("Document ") == 18


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "does not have it; put the file there"),
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        (r'{"data": "\ud83d"}', "UnicodeEncodeError"),
        ('{"data": [{"paragraphs": [{"text": ""}]}]}', "KeyError \\('context'\\)"),
        ('{"data": []}', "no question with an answer"),
    ],
)
def test_a_file_that_is_not_squad_is_an_error_that_names_it_and_its_schema(
    tmp_path: Path, content: str | None, problem: str
) -> None:
    if content is not None:
        (tmp_path / "ruler").mkdir()
        (tmp_path / "ruler/dev-v2.0.json").write_text(content)
    with pytest.raises(WorkloadError, match=rf"dev-v2\.0\.json.*({problem}|SQuAD).*({problem}|SQuAD)"):
        qa_squad(RulerParameters(), tmp_path)


@pytest.mark.parametrize("answers", [[], [{"text": ""}], [{"text": "Mayor 7"}, {"text": " "}], [{"text": 7}]])
def test_a_question_with_an_empty_answer_is_refused(tmp_path: Path, answers: list[dict[str, Any]]) -> None:
    """Every reply holds an empty text: all questions were right, with accuracy 1."""
    content = squad()
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = answers
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/dev-v2.0.json").write_text(json.dumps(content))
    with pytest.raises(WorkloadError, match=r"each must be a text that is not empty"):
        qa_squad(RulerParameters(), tmp_path)


def test_fewer_questions_than_asked_for_are_noted(tmp_path: Path) -> None:
    workload = qa_squad(RulerParameters(length=700, limit=50), write_qa(tmp_path))
    assert len(workload.requests(TOKENIZER, 4096)) == 12
    assert workload.notes[0] == "50 items asked for, the data has 12"


@pytest.mark.parametrize("name", ["dev-v2.0.json", "dev-v2.0.json.gz"])
def test_a_file_of_questions_that_may_not_be_read_is_told(tmp_path: Path, name: str) -> None:
    path = unreadable(tmp_path / "ruler" / name)
    with pytest.raises(WorkloadError, match=rf"{re.escape(str(path))}: .*check that this user may read it"):
        qa_squad(RulerParameters(), tmp_path)


def test_questions_need_a_data_folder() -> None:
    with pytest.raises(WorkloadError, match=r"ruler/hotpot_dev_distractor_v1\.json.*no data folder was given"):
        qa_hotpot(RulerParameters(), None)
