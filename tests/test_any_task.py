"""Any task or group of lm-eval by its name: found, served with its own data, or refused with a reason."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.plan import build_plan
from results.records import Request, Score
from tests.command import joulebench
from tests.fakes.answers import answer
from tests.fakes.items import gsm8k as gsm8k_rows
from tests.fakes.items import write_rows
from tests.fakes.tiny_tokenizer import TinyTokenizer
from workloads import gsm8k
from workloads.any_task import AnyTask, AnyTaskParameters
from workloads.base import WorkloadError
from workloads.benchmark import Benchmark, GeneratingParameters
from workloads.single_task import SingleTask, TaskBenchmark

TOKENIZER = TinyTokenizer()
LONG = 100_000
PLAN = """
schema = 1
name = "offline"
model = { source = "bundled:tiny-qwen3-moe" }
engine = [{ name = "dropless", technique = { name = "dropless" } }]
workload = [{ name = "lm_eval", task = "arc_easy" }]
device = [{ name = "host" }]
"""


def any_task(root: Path | None, **parameters: Any) -> Benchmark:
    return AnyTask(AnyTaskParameters(**parameters), root)


def aggregates(scores: Sequence[Score]) -> dict[str, float]:
    return {score.metric: score.value for score in scores if score.sample_id is None}


def generated(task: SingleTask, root: Path, **parameters: Any) -> Benchmark:
    return TaskBenchmark(task, GeneratingParameters(**parameters), root)


def test_an_unknown_task_is_told_with_near_names(items: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no task or group 'wikitxt'; did you mean wikitext"):
        any_task(items, task="wikitxt")


def test_a_tag_is_told_from_a_task_with_the_tasks_that_bear_it(items: Path) -> None:
    with pytest.raises(WorkloadError, match=r"no task or group 'ai2_arc'; it is a tag, .* such as arc_easy"):
        any_task(items, task="ai2_arc")


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ("humaneval", "runs generated code"),
        ("niah_single_1", "builds its own data"),
        ("squadv2", "a Python class"),
        ("mmmu_val_art", "images or sounds"),
    ],
)
def test_tasks_that_are_not_served_say_why(task: str, reason: str, items: Path) -> None:
    with pytest.raises(WorkloadError, match=reason):
        any_task(items, task=task)


def test_with_a_data_folder_nothing_is_fetched(items: Path) -> None:
    with pytest.raises(WorkloadError, match=r'allenai/ai2_arc on the hub, .*nothing is fetched;.*data = "hub"'):
        any_task(items, task="arc_easy")


def test_a_folder_with_all_configs_of_a_repository_is_not_taken_for_one(items: Path) -> None:
    # mmlu/test.jsonl holds three subjects: it is not the data of mmlu_anatomy.
    with pytest.raises(WorkloadError, match="mmlu/anatomy, mmlu_anatomy"):
        any_task(items, task="mmlu_anatomy")


def test_a_task_by_name_finds_its_data_in_the_folder(items: Path) -> None:
    by_name, own = (w.requests(TOKENIZER, LONG) for w in (any_task(items, task="gsm8k"), generated(gsm8k.GSM8K, items)))
    assert by_name == own


def test_named_files_may_be_parquet_and_absent_ones_are_told(items: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = gsm8k_rows()[6:]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "test.parquet")
    write_rows(tmp_path / "test.jsonl", rows)
    packed, plain = (
        any_task(tmp_path, task="gsm8k_cot", data_files={"test": f"test.{suffix}"}).requests(TOKENIZER, LONG)
        for suffix in ("parquet", "jsonl")
    )
    assert packed == plain
    with pytest.raises(WorkloadError, match=r"data_files\.test: no file away\.jsonl"):
        any_task(tmp_path, task="gsm8k_cot", data_files={"test": "away.jsonl"})
    with pytest.raises(WorkloadError, match="reads a train split, which data_files does not name"):
        any_task(tmp_path, task="gsm8k", data_files={"test": "test.jsonl"}).requests(TOKENIZER, LONG)


def test_rows_of_named_files_are_told_by_the_files(tmp_path: Path) -> None:
    """A table said "items: ." of a file in the current folder, and so did the refusal of its rows."""
    write_rows(tmp_path / "mine.jsonl", [{"no": "such column"}])
    own = any_task(tmp_path, task="arc_easy", data_files={"test": "mine.jsonl"})
    assert own.data_source == str(tmp_path / "mine.jsonl")
    with pytest.raises(WorkloadError, match=f"cannot read the rows of {re.escape(str(tmp_path / 'mine.jsonl'))}"):
        own.requests(TOKENIZER, LONG)


def test_tables_call_a_task_by_its_name_and_two_of_them_by_theirs() -> None:
    """Both were "lm_eval", with a number behind it: no table said which task its accuracy is of."""
    raw = tomllib.loads(PLAN)
    [only] = build_plan(raw).cells
    assert only.cell.workload == "arc_easy"
    raw["workload"] += [{"name": "lm_eval", "task": "sciq"}, {"name": "lm_eval", "task": "piqa", "label": "lm_eval"}]
    assert [c.cell.workload for c in build_plan(raw).cells] == ["arc_easy", "sciq", "lm_eval"]


def test_rows_of_another_schema_are_told_with_the_one_expected(tmp_path: Path) -> None:
    write_rows(tmp_path / "test.jsonl", [{"text": "hello"}])
    with pytest.raises(WorkloadError, match=r"cannot read the rows.*the schema of openai/gsm8k is expected"):
        any_task(tmp_path, task="gsm8k_cot", data_files={"test": "test.jsonl"}).requests(TOKENIZER, LONG)


def test_a_task_that_shuffles_its_choices_asks_the_same_in_another_process_and_is_scored_by_what_it_asked(
    tmp_path: Path,
) -> None:
    """GPQA draws from Python's own generator, whose state is that of the process."""
    fields = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
    rows = [dict(zip(fields, (f"Which is {i}?", f"right {i}", "one", "two", "three"), strict=True)) for i in range(12)]
    write_rows(tmp_path / "rows.jsonl", rows)
    asked, shown = [], []
    for state in (1, 2):
        random.seed(state)
        np.random.seed(state)
        ours = any_task(tmp_path, task="gpqa_main_zeroshot", data_files={"train": "rows.jsonl"})
        requests = ours.requests(TOKENIZER, LONG)
        letters = [
            next(line[:3] for line in TOKENIZER.decode(list(r.prompt_ids)).splitlines() if line[4:] == f"right {i}")
            for i, r in enumerate(requests[::4])
        ]
        right = {f"{r.sample_id}#{'ABCD'.index(letter[1])}" for r, letter in zip(requests[::4], letters, strict=True)}
        before = random.getstate()
        scores = ours.score(requests, answer(requests, lambda r, right=right: 0.0 if r.request_id in right else -1.0))
        assert aggregates(scores)["acc"] == 1.0
        assert [sample.expected for sample in ours.samples()] == letters
        assert random.getstate() == before, "nobody else's draws are changed"
        asked.append([r.prompt_ids for r in requests])
        shown.append(letters)
    assert asked[0] == asked[1]
    assert len(set(shown[0])) > 1


def test_a_group_by_name_is_scored_as_a_whole_and_by_task(tmp_path: Path) -> None:
    sizes = {"wmdp-bio": 1, "wmdp-chem": 2, "wmdp-cyber": 1}
    for config, n in sizes.items():
        rows = [{"question": "Which is it?", "choices": list("pqrs"), "answer": 2}] * n
        write_rows(tmp_path / "wmdp" / config / "test.jsonl", rows)
    ours = any_task(tmp_path, task="wmdp")
    requests = ours.requests(TOKENIZER, LONG)
    assert len(requests) == 4 * 4

    def reply(request: Request) -> float:
        return 0.0 if request.request_id.endswith("#2") == ("chem" in request.request_id) else -9.0

    found = aggregates(ours.score(requests, answer(requests, reply)))
    assert found == {"acc": 0.5, "acc/wmdp_bio": 0.0, "acc/wmdp_chem": 1.0, "acc/wmdp_cyber": 0.0}


@pytest.mark.slow
def test_offline_a_task_of_the_hub_fails_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    run = joulebench("run", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "run"))
    assert run.code == 2
    assert "workload arc_easy: allenai/ai2_arc (test) could not be read from the hub or its cache" in run.stderr
    assert not (tmp_path / "run").exists()
