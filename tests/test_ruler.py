"""Needles in a haystack: length, depth, texts as in lm-eval, scoring."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from results.records import Request, Score
from tests.data_folder import data_folder
from tests.fakes.answers import answer
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads.base import WorkloadError
from workloads.ruler import RulerNiahMultikey1, RulerNiahSingle2, RulerParameters

TOKENIZER = TinyTokenizer()
N_NEW_TOKENS = 128
NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d{7})\.")
Task = type[RulerNiahSingle2] | type[RulerNiahMultikey1]
both_tasks = pytest.mark.parametrize("task", [RulerNiahSingle2, RulerNiahMultikey1])
with_n_needles = pytest.mark.parametrize(("task", "n_needles"), [(RulerNiahSingle2, 1), (RulerNiahMultikey1, 4)])


def build(task: Task, **parameters: Any) -> tuple[RulerNiahSingle2 | RulerNiahMultikey1, tuple[Request, ...]]:
    workload = task(RulerParameters(**parameters), None)
    return workload, tuple(workload.requests(TOKENIZER, 1 << 20))


def prompt(request: Request) -> str:
    return TOKENIZER.decode(list(request.prompt_ids))


def needles(text: str) -> dict[str, str]:
    """Value by key, in the order of the text."""
    return dict(NEEDLE.findall(text))


def asked_key(request: Request) -> str:
    found = re.search(r"What is the special magic number for (\S+) mentioned", prompt(request))
    assert found
    return found[1]


def expected_value(request: Request) -> str:
    return needles(prompt(request))[asked_key(request)]


def total(scores: list[Score]) -> Score:
    (score,) = [s for s in scores if s.sample_id is None]
    return score


@both_tasks
@pytest.mark.parametrize("length", [512, 1024, 4096])
def test_a_sample_has_the_asked_length_and_never_more(task: Task, length: int) -> None:
    _, requests = build(task, length=length, limit=5)
    assert len(requests) == 5
    for request in requests:
        assert request.max_new_tokens == N_NEW_TOKENS
        assert 0.98 * length <= len(request.prompt_ids) + N_NEW_TOKENS <= length


@with_n_needles
def test_every_needle_is_there_once_with_its_own_key_and_value(task: Task, n_needles: int) -> None:
    _, requests = build(task, length=1024, limit=6)
    found = [needle for request in requests for needle in NEEDLE.findall(prompt(request))]
    assert len(found) == 6 * n_needles
    assert len({key for key, _ in found}) == len({value for _, value in found}) == 6 * n_needles


@both_tasks
@pytest.mark.parametrize("depth_percent", [0.0, 25.0, 50.0, 100.0])
def test_the_asked_needle_lies_at_the_asked_depth(task: Task, depth_percent: float) -> None:
    _, requests = build(task, length=4096, limit=3, depth_percent=depth_percent)
    for request in requests:
        assert depth(request) == pytest.approx(depth_percent, abs=3)
        assert f"/depth{depth_percent:g}/" in request.sample_id


def depth(request: Request) -> float:
    """Percent of the text's characters before the asked needle, needles left out."""
    context = prompt(request).partition("\n")[2].rpartition("\n")[0]
    before, _, after = context.partition(f"One of the special magic numbers for {asked_key(request)} is")
    before, after = NEEDLE.sub("", before), NEEDLE.sub("", after)
    return 100 * len(before) / (len(before) + len(after))


def test_without_an_asked_depth_the_samples_spread_over_the_text() -> None:
    _, requests = build(RulerNiahSingle2, length=4096, limit=4)
    assert [depth(r) for r in requests] == pytest.approx([0, 50, 25, 75], abs=3)


def test_a_sample_is_the_same_whatever_the_limit_and_another_seed_gives_another() -> None:
    _, few = build(RulerNiahMultikey1, length=512, limit=2)
    _, many = build(RulerNiahMultikey1, length=512, limit=4)
    _, other = build(RulerNiahMultikey1, length=512, limit=2, seed=1)
    assert many[:2] == few
    assert not {r.prompt_ids for r in other} & {r.prompt_ids for r in few}
    assert few[1].sample_id == "ruler_niah_multikey_1/512/seed0/1"


def test_keys_and_values_do_not_depend_on_the_tokenizer() -> None:
    workload = RulerNiahMultikey1(RulerParameters(length=1024, limit=3), None)
    other_tokenizer = TinyTokenizer(700)
    ours, others = workload.requests(TOKENIZER, 4096), workload.requests(other_tokenizer, 4096)
    for a, b in zip(ours, others, strict=True):
        assert a.prompt_ids != b.prompt_ids
        assert needles(prompt(a)) == needles(other_tokenizer.decode(list(b.prompt_ids)))
        assert asked_key(a) in other_tokenizer.decode(list(b.prompt_ids)[-40:])


@both_tasks
def test_the_needle_scores_one_and_junk_scores_nothing(task: Task) -> None:
    workload, requests = build(task, length=512, limit=4)
    right = list(workload.score(requests, answer(requests, lambda r: f" {expected_value(r)}. The rest")))
    wrong = list(workload.score(requests, answer(requests, lambda r: " 12345")))
    assert [s.value for s in right] == [1.0] * 5
    assert [s.value for s in wrong] == [0.0] * 5
    assert {s.metric for s in right} == {"string_match_all"}
    assert [s.sample_id for s in right[:4]] == [r.sample_id for r in requests]


def test_half_right_scores_a_half_with_the_standard_error_of_the_mean() -> None:
    workload, requests = build(RulerNiahSingle2, length=4096, limit=4)
    first_two = {r.request_id for r in requests[:2]}
    replies = answer(requests, lambda r: expected_value(r) if r.request_id in first_two else "none")
    score = total(list(workload.score(requests, replies)))
    assert (score.value, score.n) == (0.5, 4)
    # sd of 1, 1, 0, 0 is sqrt(1/3); over sqrt(4).
    assert score.stderr == pytest.approx((1 / 3) ** 0.5 / 2)


def test_another_needle_than_the_asked_one_scores_nothing() -> None:
    workload, requests = build(RulerNiahMultikey1, length=512, limit=3)

    def distractor(request: Request) -> str:
        return next(value for key, value in needles(prompt(request)).items() if key != asked_key(request))

    assert total(list(workload.score(requests, answer(requests, distractor)))).value == 0.0


@with_n_needles
def test_the_words_around_the_text_are_those_of_lm_eval(
    task: Task, n_needles: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's own builder, its download kept away by an empty folder; over its haystack that needs no splitter."""
    import nltk

    (tmp_path / "tokenizers" / "punkt_tab").mkdir(parents=True)
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    from lm_eval.tasks.ruler import niah_utils, prepare_niah

    (theirs,) = prepare_niah.generate_samples(
        prepare_niah.get_haystack("repeat"),
        TOKENIZER=lambda text: SimpleNamespace(input_ids=TOKENIZER.encode(text)),
        max_seq_length=1024,
        template=niah_utils.TEMPLATE,
        type_haystack="repeat",
        type_needle_k="words",
        type_needle_v="numbers",
        num_needle_k=n_needles,
        num_samples=1,
    )
    _, (ours,) = build(task, length=1024, limit=1)
    their_prompt = f"{theirs['input']} {theirs['gen_prefix']}"
    assert frame(prompt(ours)) == frame(their_prompt)
    assert len(NEEDLE.findall(their_prompt)) == len(NEEDLE.findall(prompt(ours))) == n_needles


def frame(text: str) -> tuple[str, str]:
    """What stands before and after the text, without the key."""
    before, after = text.partition("\n")[0], text.rpartition("\n")[2]
    key = re.search(r"number for (.+?) mentioned", after)
    assert key
    return before, after.replace(key[1], "KEY")


def test_lm_eval_builds_the_same_task_with_four_keys() -> None:
    """multikey_1 is four keys and one query in lm-eval's source, single_2 one key."""
    import lm_eval.tasks

    source = (Path(lm_eval.tasks.__file__).parent / "ruler" / "niah_utils.py").read_text()
    bodies = dict(re.findall(r"def (niah_\w+)\(\*\*kwargs\):\n(.*?)(?=\n\n\n|\Z)", source, flags=re.S))
    assert "num_needle_k=4" in bodies["niah_multikey_1"]
    assert "num_needle_q" not in bodies["niah_multikey_1"]
    assert "num_needle_" not in bodies["niah_single_2"]


def test_calibration_samples_are_others_of_the_same_length() -> None:
    workload, requests = build(RulerNiahSingle2, length=512, limit=3)
    prompts = workload.calibration_prompts(TOKENIZER, 4096, 5)
    assert len({tuple(p) for p in prompts}) == 5
    asked = {value for r in requests for _, value in NEEDLE.findall(prompt(r))}
    shown = {value for p in prompts for _, value in NEEDLE.findall(TOKENIZER.decode(list(p)))}
    assert not asked & shown
    assert all(0.98 * 512 <= len(p) + N_NEW_TOKENS <= 512 for p in prompts)


def test_a_length_beyond_the_model_is_an_error() -> None:
    workload = RulerNiahSingle2(RulerParameters(length=4096), None)
    with pytest.raises(WorkloadError, match="length 4096 is more than the model's 2048 tokens; lower length"):
        workload.requests(TOKENIZER, 2048)


@pytest.mark.parametrize("length", [1, 128, 200])
def test_a_length_without_room_for_the_needles_is_an_error(length: int) -> None:
    workload = RulerNiahMultikey1(RulerParameters(length=length, limit=1), None)
    with pytest.raises(WorkloadError, match="raise length"):
        workload.requests(TOKENIZER, 4096)


def test_a_text_of_ones_own_is_the_haystack_and_goes_round_when_short(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text("The first sentence stands here. Another one follows it! Is a third one needed?")
    workload = RulerNiahSingle2(RulerParameters(length=1024, limit=2, haystack="own.txt"), tmp_path)
    requests = workload.requests(TOKENIZER, 4096)
    assert workload.data_source == str(tmp_path / "own.txt")
    assert all(prompt(r).count("Another one follows it!") > 10 for r in requests)
    assert all(0.98 * 1024 <= len(r.prompt_ids) + N_NEW_TOKENS <= 1024 for r in requests)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.txt", None),
        ("empty.txt", b" \n"),
        ("binary.txt", b"\xff\xfe\x00"),
        ("other.json", b'{"words": "none"}'),
        ("list.json", b"[1]"),
        ("numbers.json", b'{"text": 3}'),
        ("broken.json", b'{"text": '),
        ("plain.txt.gz", b"not packed"),
        ("cut.txt.gz", gzip.compress(b"some text " * 500)[:-12]),
    ],
)
def test_a_haystack_without_text_is_an_error_that_names_the_file(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WorkloadError, match=re.escape(str(tmp_path / name))):
        RulerNiahSingle2(RulerParameters(haystack=name), tmp_path)


def test_the_folder_haystack_needs_a_folder() -> None:
    with pytest.raises(WorkloadError, match="no data folder was given"):
        RulerNiahSingle2(RulerParameters(haystack="file"), None)


def test_the_public_domain_novel_is_the_haystack_of_the_folder() -> None:
    root = data_folder()
    workload = RulerNiahMultikey1(RulerParameters(length=2048, limit=2, haystack="file"), root)
    requests = workload.requests(TOKENIZER, 4096)
    novel = json.loads(gzip.decompress((root / "ruler/haystack_public_domain.json.gz").read_bytes()))["text"].split()
    for request in requests:
        assert 0.98 * 2048 <= len(request.prompt_ids) + N_NEW_TOKENS <= 2048
        context = NEEDLE.sub("", prompt(request).partition("\n")[2].rpartition("\n")[0]).split()
        assert " ".join(context) in " ".join(novel + novel)
