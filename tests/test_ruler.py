"""Needles in a haystack: length, depth, what is asked, scoring. Their texts beside lm-eval's: test_ruler_texts."""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results.records import Request, Score
from tests.data_folder import data_folder
from tests.fakes.answers import answer
from tests.fakes.tiny_tokenizer import TinyTokenizer
from tests.ruler_answers import NEEDLE, needle_values
from workloads import ruler
from workloads.base import WorkloadError
from workloads.ruler import HaystackParameters, NeedleInHaystackParameters, NeedleParameters, RulerNeedles
from workloads.ruler_samples import RulerParameters, largest_fit

TOKENIZER = TinyTokenizer()
N_NEW_TOKENS = 128
PARAMETERS: dict[str, type[RulerParameters]] = {
    "niah_single_1": NeedleParameters,
    "niah_single_2": NeedleInHaystackParameters,
    "niah_single_3": NeedleInHaystackParameters,
    "niah_multikey_1": NeedleInHaystackParameters,
    "niah_multikey_2": NeedleParameters,
    "niah_multikey_3": NeedleParameters,
    "niah_multivalue": HaystackParameters,
    "niah_multiquery": HaystackParameters,
}
every_task = pytest.mark.parametrize("task", PARAMETERS)
both_tasks = pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_1"])


def workload(task: str, data_root: Path | None = None, **parameters: Any) -> RulerNeedles:
    made: RulerNeedles = getattr(ruler, task)(PARAMETERS[task](**parameters), data_root)
    return made


def build(task: str, **parameters: Any) -> tuple[RulerNeedles, tuple[Request, ...]]:
    made = workload(task, **parameters)
    return made, tuple(made.requests(TOKENIZER, 1 << 20))


def prompt(request: Request) -> str:
    return TOKENIZER.decode(list(request.prompt_ids))


def asked_keys(request: Request) -> list[str]:
    found = re.search(r"What (?:is|are all) the special magic \w+ for (.+?) mentioned", prompt(request))
    assert found
    return re.split(r", and |, ", found[1])


def expected_values(request: Request) -> list[str]:
    return needle_values(prompt(request))


def total(scores: list[Score]) -> Score:
    (score,) = [s for s in scores if s.sample_id is None]
    return score


# --- length -----------------------------------------------------------------------------------------------------------


@every_task
@pytest.mark.parametrize("length", [1024, 4096])
def test_a_sample_has_the_asked_length_and_never_more(task: str, length: int) -> None:
    _, requests = build(task, length=length, limit=3)
    assert len(requests) == 3
    # One more word of prose, line or other needle would be too much: lines and UUIDs are tens of tokens.
    least = 0.99 * length - (70 if task in ("niah_single_1", "niah_multikey_2", "niah_multikey_3") else 0)
    for request in requests:
        assert request.max_new_tokens == N_NEW_TOKENS
        assert least <= len(request.prompt_ids) + N_NEW_TOKENS <= length


@given(
    each=st.floats(0.3, 40),
    start=st.integers(0, 90),
    budget=st.integers(1, 5000),
    n=st.integers(1, 3000),
    data=st.data(),
)
def test_the_largest_fit_is_found_with_few_counts(
    each: float, start: int, budget: int, n: int, data: st.DataObject
) -> None:
    """Straight counts with noise: the closed form is a search through all sizes."""
    noise = data.draw(st.lists(st.integers(0, 3), min_size=8, max_size=8))
    counts = [start]
    for size in range(1, n):
        counts.append(max(counts[-1], start + int(size * each) + noise[size % 8]))
    asked: list[int] = []

    def count(size: int) -> int:
        asked.append(size)
        return counts[size - 1]

    fitting = [size for size in range(1, n + 1) if counts[size - 1] <= budget]
    assert largest_fit(count, range(1, n + 1), budget) == (max(fitting) if fitting else None)
    assert len(asked) == len(set(asked)) <= 24


def test_a_length_beyond_the_model_is_an_error() -> None:
    with pytest.raises(WorkloadError, match=r"length 4096 is more than the 2048 tokens .*; lower length"):
        workload("niah_single_2", length=4096).requests(TOKENIZER, 2048)


def test_a_length_beyond_the_model_is_left_out_where_the_plan_says_so() -> None:
    made = workload("niah_single_2", length=513, limit=2, too_long="skip")
    assert list(made.requests(TOKENIZER, 512)) == []
    assert made.notes == ("length 513 skipped: a sample may have 512 tokens with this model",)
    assert len(made.requests(TOKENIZER, 513)) == 2
    assert made.notes == ()


@every_task
@pytest.mark.parametrize("length", [1, 128, 180])
def test_a_length_without_room_for_the_needles_is_an_error(task: str, length: int) -> None:
    with pytest.raises(WorkloadError, match="raise length"):
        workload(task, length=length, limit=1).requests(TOKENIZER, 4096)


# --- what is hidden and asked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "n_needles", "n_asked", "key", "value"),
    [
        ("niah_single_1", 1, 1, r"[a-z]+\S*", r"\d{7}"),
        ("niah_single_2", 1, 1, r"[a-z]+\S*", r"\d{7}"),
        ("niah_single_3", 1, 1, r"[a-z]+\S*", r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
        ("niah_multikey_1", 4, 1, r"[a-z]+\S*", r"\d{7}"),
        ("niah_multikey_2", None, 1, r"[a-z]+\S*", r"\d{7}"),
        ("niah_multikey_3", None, 1, r"[0-9a-f-]{36}", r"[0-9a-f-]{36}"),
        ("niah_multivalue", 4, 4, r"[a-z]+\S*", r"\d{7}"),
        ("niah_multiquery", 4, 4, r"[a-z]+\S*", r"\d{7}"),
    ],
)
def test_as_many_needles_are_hidden_and_asked_as_the_task_says(
    task: str, n_needles: int | None, n_asked: int, key: str, value: str
) -> None:
    _, requests = build(task, length=1536, limit=4)
    for request in requests:
        found = NEEDLE.findall(prompt(request))
        assert len(found) == n_needles or (n_needles is None and len(found) > 10)
        assert len({v for _, v in found}) == len(found)
        assert len(expected_values(request)) == n_asked
        assert all(re.fullmatch(key, k) and re.fullmatch(value, v) for k, v in found)
    by_sample = [tuple(expected_values(request)) for request in requests]
    assert len(set(by_sample)) == len(requests)


@both_tasks
@pytest.mark.parametrize("depth_percent", [0.0, 25.0, 50.0, 100.0])
def test_the_asked_needle_lies_at_the_asked_depth(task: str, depth_percent: float) -> None:
    _, requests = build(task, length=4096, limit=3, depth_percent=depth_percent)
    for request in requests:
        assert depth(request) == pytest.approx(depth_percent, abs=3)
        assert f"/depth{depth_percent:g}/" in request.sample_id


@pytest.mark.parametrize("task", ["niah_single_1", "niah_multikey_2"])
@pytest.mark.parametrize("depth_percent", [0.0, 25.0, 50.0, 100.0])
def test_between_lines_too_the_asked_needle_lies_at_the_asked_depth(task: str, depth_percent: float) -> None:
    _, requests = build(task, length=4096, limit=2, depth_percent=depth_percent)
    for request in requests:
        lines = prompt(request).split("\n")[1:-1]
        (key,) = asked_keys(request)
        (place,) = [i for i, line in enumerate(lines) if f"for {key} is" in line]
        assert 100 * place / (len(lines) - 1) == pytest.approx(depth_percent, abs=2)


def depth(request: Request) -> float:
    """Percent of the text's characters before the asked needle, needles left out."""
    context = prompt(request).partition("\n")[2].rpartition("\n")[0]
    before, _, after = context.partition(f"One of the special magic numbers for {asked_keys(request)[0]} is")
    before, after = NEEDLE.sub("", before), NEEDLE.sub("", after)
    return 100 * len(before) / (len(before) + len(after))


def test_without_an_asked_depth_the_samples_spread_over_the_text() -> None:
    _, requests = build("niah_single_2", length=4096, limit=4)
    assert [depth(r) for r in requests] == pytest.approx([0, 50, 25, 75], abs=3)


def test_a_sample_is_the_same_whatever_the_limit_and_another_seed_gives_another() -> None:
    _, few = build("niah_multikey_1", length=512, limit=2)
    _, many = build("niah_multikey_1", length=512, limit=4)
    _, other = build("niah_multikey_1", length=512, limit=2, seed=1)
    assert many[:2] == few
    assert not {r.prompt_ids for r in other} & {r.prompt_ids for r in few}
    assert few[1].sample_id == "ruler_niah_multikey_1/512/seed0/1"


def test_keys_and_values_do_not_depend_on_the_tokenizer() -> None:
    made = workload("niah_multikey_1", length=1024, limit=3)
    other_tokenizer = TinyTokenizer(700)
    ours, others = made.requests(TOKENIZER, 4096), made.requests(other_tokenizer, 4096)
    for a, b in zip(ours, others, strict=True):
        assert a.prompt_ids != b.prompt_ids
        text = other_tokenizer.decode(list(b.prompt_ids))
        assert NEEDLE.findall(prompt(a)) == NEEDLE.findall(text)
        assert asked_keys(a)[0] in other_tokenizer.decode(list(b.prompt_ids[-40:]))


def test_calibration_samples_are_others_of_the_same_length() -> None:
    made, requests = build("niah_single_2", length=512, limit=3)
    prompts = made.calibration_prompts(TOKENIZER, 4096, 5)
    assert len({tuple(p) for p in prompts}) == 5
    asked = {value for r in requests for _, value in NEEDLE.findall(prompt(r))}
    shown = {value for p in prompts for _, value in NEEDLE.findall(TOKENIZER.decode(list(p)))}
    assert not asked & shown
    assert all(0.98 * 512 <= len(p) + N_NEW_TOKENS <= 512 for p in prompts)


# --- scoring ----------------------------------------------------------------------------------------------------------


@every_task
def test_the_values_score_one_and_junk_scores_nothing(task: str) -> None:
    made, requests = build(task, length=768, limit=3)
    right = list(made.score(requests, answer(requests, lambda r: f" {', '.join(expected_values(r))}. The rest")))
    wrong = list(made.score(requests, answer(requests, lambda r: " 12345")))
    assert [s.value for s in right] == [1.0] * 4
    assert [s.value for s in wrong] == [0.0] * 4
    assert {s.metric for s in right} == {"string_match_all"}
    assert [s.sample_id for s in right[:3]] == [r.sample_id for r in requests]


@pytest.mark.parametrize("task", ["niah_multivalue", "niah_multiquery"])
def test_three_of_four_values_score_three_quarters(task: str) -> None:
    made, requests = build(task, length=768, limit=2)
    replies = answer(requests, lambda r: " and ".join(expected_values(r)[1:]))
    assert [s.value for s in made.score(requests, replies)] == [0.75] * 3


def test_half_right_scores_a_half_with_the_standard_error_of_the_mean() -> None:
    made, requests = build("niah_single_2", length=4096, limit=4)
    first_two = {r.request_id for r in requests[:2]}
    replies = answer(requests, lambda r: expected_values(r)[0] if r.request_id in first_two else "none")
    score = total(list(made.score(requests, replies)))
    assert (score.value, score.n) == (0.5, 4)
    # sd of 1, 1, 0, 0 is sqrt(1/3); over sqrt(4).
    assert score.stderr == pytest.approx((1 / 3) ** 0.5 / 2)


@pytest.mark.parametrize("task", ["niah_multikey_1", "niah_multikey_2"])
def test_another_needle_than_the_asked_one_scores_nothing(task: str) -> None:
    made, requests = build(task, length=768, limit=3)

    def distractor(request: Request) -> str:
        (right,) = expected_values(request)
        return str(next(value for _, value in NEEDLE.findall(prompt(request)) if value != right))

    assert total(list(made.score(requests, answer(requests, distractor)))).value == 0.0


# --- haystacks --------------------------------------------------------------------------------------------------------


def test_a_text_of_ones_own_is_the_haystack_and_goes_round_when_short(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("The first sentence stands here. Another one follows it! Is a third one needed?")
    made = workload("niah_single_2", tmp_path, length=1024, limit=2, haystack="own.txt")
    requests = made.requests(TOKENIZER, 4096)
    assert made.data_source == str(tmp_path / "own.txt")
    assert all(prompt(r).count("Another one follows it!") > 10 for r in requests)
    assert all(0.98 * 1024 <= len(r.prompt_ids) + N_NEW_TOKENS <= 1024 for r in requests)


def test_repeated_lines_can_hide_several_keys_too() -> None:
    made, requests = build("niah_multikey_1", length=1024, limit=2, haystack="repeat")
    assert made.data_source == "generated"
    for request in requests:
        lines = [NEEDLE.sub("a needle", line) for line in prompt(request).split("\n")[1:-1]]
        grass = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
        assert set(lines) == {grass, "a needle"}
        assert lines.count("a needle") == 4


@pytest.mark.parametrize(
    ("name", "file"), [("public_domain", "haystack_public_domain.json.gz"), ("essays", "PaulGrahamEssays.json.gz")]
)
def test_the_texts_of_the_data_folder_are_haystacks_by_name(name: str, file: str) -> None:
    root = data_folder()
    made = workload("niah_multikey_1", root, length=2048, limit=2, haystack=name)
    requests = made.requests(TOKENIZER, 4096)
    assert made.data_source == str(root / "ruler" / file)
    text = json.loads(gzip.decompress((root / "ruler" / file).read_bytes()))["text"].split()
    for request in requests:
        assert f"/{name}/" in request.sample_id
        assert 0.98 * 2048 <= len(request.prompt_ids) + N_NEW_TOKENS <= 2048
        context = NEEDLE.sub("", prompt(request).partition("\n")[2].rpartition("\n")[0]).split()
        assert " ".join(context) in " ".join(text + text)


@pytest.mark.parametrize("name", ["essays", "public_domain"])
def test_a_text_of_the_data_folder_needs_a_folder(name: str) -> None:
    with pytest.raises(WorkloadError, match=f"{name}.*no data folder was given"):
        workload("niah_single_2", haystack=name)


def test_words_are_those_of_wonderwords_whatever_the_locale() -> None:
    """Where it is of ASCII, `plan check` ended with "nobody foresaw this"."""
    from wonderwords import RandomWord

    words = RandomWord()
    theirs = [
        sorted(set(words.filter(include_categories=[kind], exclude_with_spaces=True))) for kind in ("adjective", "noun")
    ]
    told = "from workloads.ruler import key_words as k; from workloads.ruler_words import english_words as e;"
    told += " print(ascii([*k(), e()]))"
    variables = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", told], env=variables, capture_output=True, text=True, check=True)
    own_keys = ast.literal_eval(done.stdout)
    assert own_keys[:2] == theirs
    assert own_keys[2] == sorted(set(words.filter(include_categories=["noun", "adjective", "verb"])))
    assert "jalapeño" in own_keys[1]
