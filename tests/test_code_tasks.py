"""HumanEval and MBPP+: what is asked, which answers pass, and that nothing runs unless it was allowed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engines.base import unheard
from harness.plan import PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from results.records import Request, Score
from tests.data_folder import data_folder
from tests.fakes.answers import answer
from tests.fakes.random_models import BUNDLED
from tests.fakes.tiny_tokenizer import TinyTokenizer
from tests.hf_peer import load_pair, texts_of_hf
from tests.plans import raw_plan
from workloads.base import WorkloadError
from workloads.benchmark import GeneratingParameters
from workloads.code_eval import CodeEval
from workloads.code_tasks import HUMANEVAL, HUMANEVAL_INSTRUCT, MBPP_PLUS, CodeBenchmark, CodeTask
from workloads.datasets import read_jsonl
from workloads.lm_eval_index import lm_eval_tasks

linux = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made of Landlock and seccomp of Linux")
TOKENIZER = TinyTokenizer()
LONG = 100_000
DOUBLE = {
    "task_id": "Toy/0",
    "prompt": 'def double(n):\n    """Twice n."""\n',
    "canonical_solution": "    return n + n\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-3) == -6\n",
    "entry_point": "double",
}
LARGEST = {
    "task_id": "Toy/1",
    "prompt": 'def largest(values):\n    """The largest of them."""\n',
    "canonical_solution": "    return max(values)\n",
    "test": "def check(candidate):\n    assert candidate([1, 3, 2]) == 3\n",
    "entry_point": "largest",
}
SQUARE = {
    "task_id": 1,
    "code": "def square(n):\n    return n * n\n",
    "prompt": "Write a function that squares a number.",
    "test_list": ["assert square(2) == 4", "assert square(0) == 0", "assert square(1) == 1"],
    "test": "import numpy as np\nfor n in range(-50, 50):\n    assert np.isclose(square(n), n**2)\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    for name, rows in (("openai_humaneval", [DOUBLE, LARGEST]), ("mbppplus", [SQUARE])):
        (root / name).mkdir()
        (root / name / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def workload(task: CodeTask, root: Path, **parameters: Any) -> CodeBenchmark:
    return CodeBenchmark(task, GeneratingParameters(**parameters), root, allow_code=True)


def scored(asked: CodeBenchmark, reply: Callable[[Request], str]) -> dict[tuple[str, str | None], Score]:
    requests = asked.requests(TOKENIZER, LONG)
    scores = asked.score(requests, answer(requests, reply))
    return {(score.metric, score.sample_id): score for score in scores}


def prompts(requests: Sequence[Request]) -> list[str]:
    return [TOKENIZER.decode(list(request.prompt_ids)) for request in requests]


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [HUMANEVAL, HUMANEVAL_INSTRUCT, MBPP_PLUS], ids=lambda task: task.name)
def test_the_same_programs_as_from_lm_evals_hf_model(task: CodeTask, folder: Path) -> None:
    from lm_eval.tasks._yaml_loader import load_yaml

    pair = load_pair(BUNDLED)
    tokenizer = pair.engine.tokenizer
    requests = workload(task, folder, max_new_tokens=12).requests(tokenizer, 8192)
    ours = [pair.engine.run(request, unheard).text for request in requests]
    generation = load_yaml(lm_eval_tasks() / task.definition, resolve_func=False)["generation_kwargs"]
    asked = [tokenizer.decode(list(request.prompt_ids)) for request in requests]
    assert ours == texts_of_hf(pair.hf, asked, generation | {"max_gen_toks": 12})


# --- permission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["humaneval", "humaneval_instruct", "mbpp_plus"])
def test_a_plan_with_code_is_refused_before_anything_runs(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JOULEBENCH_DATA", str(folder))
    draft = draft_plan(raw_plan(workload=[{"name": name}]))
    with pytest.raises(PlanError, match=f"workload {name}: it runs code that a model wrote, .*--allow-code lets it"):
        preflight(draft, RunParts(draft.plan.protocol))


@linux
def test_a_plan_with_code_is_fine_where_it_is_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOULEBENCH_DATA", str(folder))
    draft = draft_plan(raw_plan(workload=[{"name": "humaneval", "limit": 1, "max_new_tokens": 8}]))
    assert len(preflight(draft, RunParts(draft.plan.protocol, allow_code=True)).cells) == 1


def test_a_machine_without_walls_runs_no_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workloads.sandbox import check_walls

    check_walls.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(WorkloadError, match="generated code cannot be walled in on darwin"):
        workload(HUMANEVAL, folder)
    check_walls.cache_clear()


# --- what is asked ----------------------------------------------------------------------------------------------------


@linux
def test_humaneval_asks_with_the_prompt_alone_and_stops_at_the_next_statement(folder: Path) -> None:
    requests = workload(HUMANEVAL, folder).requests(TOKENIZER, LONG)
    assert prompts(requests) == [DOUBLE["prompt"], LARGEST["prompt"]]
    assert {r.stop for r in requests} == {("\nclass", "\ndef", "\n#", "\nif", "\nprint")}
    assert {(r.kind, r.max_new_tokens, r.sampling.temperature) for r in requests} == {("generate", 1024, 0.0)}


@linux
def test_mbpp_plus_shows_three_solved_problems_and_three_assertions(folder: Path) -> None:
    (request,) = workload(MBPP_PLUS, folder).requests(TOKENIZER, LONG)
    (prompt,) = prompts([request])
    before, own = prompt.split("[DONE]")[:-1], prompt.split("[DONE]")[-1]
    assert [next(name for name in SHOWN if f"def {name}(" in example) for example in before] == SHOWN
    assert (
        own.split("Your code should pass these tests:")[1].split()
        == " ".join([*SQUARE["test_list"], "[BEGIN]"]).split()
    )
    assert request.stop == ("[DONE]",)


SHOWN = ["similar_elements", "is_not_prime", "heap_queue_largest"]
"""The functions of MBPP's problems 2, 3 and 4, which are the examples of Austin et al. (2021)."""


@linux
def test_an_instruction_begins_the_answer_with_a_code_block(folder: Path) -> None:
    (prompt, _) = prompts(workload(HUMANEVAL_INSTRUCT, folder).requests(TOKENIZER, LONG))
    assert prompt.rstrip().endswith(f"```python\n{DOUBLE['prompt']}".rstrip())


@linux
def test_lm_evals_module_and_metric_loader_are_left_as_they_were(folder: Path) -> None:
    import evaluate

    loader = evaluate.load
    workload(HUMANEVAL, folder)
    assert evaluate.load is loader
    assert "lm_eval.tasks.humaneval.utils" not in sys.modules


# --- which answers pass -----------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize(
    ("body", "value"),
    [
        (DOUBLE["canonical_solution"], 1.0),
        ("    return 2 * n\n\ndef further():\n    return", 1.0),  # cut at "\ndef"
        ("    return n * n", 0.0),
        ("    return", 0.0),
        ("    return n +", 0.0),
        ("    import os; os._exit(0)", 0.0),
        ("    raise SystemExit(0)", 0.0),
        ("", 0.0),
    ],
)
def test_humaneval_passes_what_its_tests_pass(folder: Path, body: str, value: float) -> None:
    scores = scored(
        workload(HUMANEVAL, folder), lambda r: body if r.sample_id.endswith("/0") else LARGEST["canonical_solution"]
    )
    assert {sample: score.value for (_, sample), score in scores.items()} == {
        "humaneval/0": value,
        "humaneval/1": 1.0,
        None: (value + 1) / 2,
    }
    total = scores["pass@1", None]
    # The standard error of a share p of two: sqrt(p (1 - p) / (n - 1)).
    assert (total.n, total.higher_is_better) == (2, True)
    assert total.stderr == pytest.approx(((value + 1) / 2 * (1 - value) / 2) ** 0.5)


@linux
@pytest.mark.parametrize(
    ("solution", "value", "plus"),
    [
        (SQUARE["code"], 1.0, 1.0),
        ("def square(n):\n    return {0: 0, 1: 1, 2: 4}[n]", 1.0, 0.0),
        ("def square(n):\n    return 4", 0.0, 0.0),
        (f"{SQUARE['code']}[DONE]\nsyntax error", 1.0, 1.0),
    ],
)
def test_mbpp_plus_tells_what_three_assertions_do_not(folder: Path, solution: str, value: float, plus: float) -> None:
    scores = scored(workload(MBPP_PLUS, folder), lambda _: solution)
    assert {key: score.value for key, score in scores.items()} == {
        ("pass@1", "mbpp_plus/0"): value,
        ("pass@1", None): value,
        ("pass@1_plus", "mbpp_plus/0"): plus,
        ("pass@1_plus", None): plus,
    }


@linux
def test_of_an_instructions_answer_the_code_block_is_run(folder: Path) -> None:
    def reply(request: Request) -> str:
        code = (DOUBLE if request.sample_id.endswith("/0") else LARGEST)["canonical_solution"]
        return f"{code}\n```\nThis (solution) is right."

    assert {s.value for s in scored(workload(HUMANEVAL_INSTRUCT, folder), reply).values()} == {1.0}


@linux
def test_an_endless_answer_fails_is_told_and_is_not_run_on_more_tests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workloads import code_tasks
    from workloads.sandbox import Limits

    monkeypatch.setattr(code_tasks, "DEFAULT_LIMITS", Limits(cpu_s=1, wall_s=30.0))
    monkeypatch.setattr(code_tasks, "PLUS_LIMITS", Limits(cpu_s=300, wall_s=300.0))
    asked = workload(MBPP_PLUS, folder)
    scores = scored(asked, lambda _: "def square(n):\n    while True: pass")
    assert {score.value for score in scores.values()} == {0.0}
    (note,) = asked.notes
    assert note.startswith("1 programs met a limit of the sandbox")
    assert asked.requests(TOKENIZER, LONG)
    assert asked.notes == ()


@linux
def test_the_same_answer_is_run_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = workload(HUMANEVAL, folder)
    first = scored(asked, lambda _: "    return 1")
    monkeypatch.setattr("workloads.sandbox.subprocess", None)
    assert scored(asked, lambda _: "    return 1") == first


@linux
def test_items_that_are_not_asked_calibrate(folder: Path) -> None:
    asked = workload(HUMANEVAL, folder, limit=1)
    (own,) = prompts(asked.requests(TOKENIZER, LONG))
    (other,) = asked.calibration_prompts(TOKENIZER, LONG, 4)
    assert {own, TOKENIZER.decode(list(other))} == {DOUBLE["prompt"], LARGEST["prompt"]}


def test_pass_at_1_is_the_mean_over_problems_of_the_share_of_candidates() -> None:
    metric = CodeEval()
    metric.verdicts = {"good\nt": True, "bad\nt": False, "good\nu": True}
    assert metric.compute(["t", "u"], [["good", "bad"], ["good"]], [1]) == ({"pass@1": 0.75}, {})
    assert metric.asked == {"good\nt": "good", "bad\nt": "bad", "good\nu": "good"}
    with pytest.raises(WorkloadError, match=r"only pass@1 is computed, found k = \[10\]"):
        metric.compute(["t"], [["good"]], [10])


# --- data -------------------------------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize(
    ("task", "name", "row", "change", "complaint"),
    [
        (HUMANEVAL, "openai_humaneval", DOUBLE, {"entry_point": None}, "entry_point must be text, found None"),
        (HUMANEVAL, "openai_humaneval", DOUBLE, {"test": 3}, "test must be text, found 3"),
        (
            MBPP_PLUS,
            "mbppplus",
            SQUARE,
            {"test_list": ["assert 1"]},
            "test_list must be a list of at least three texts",
        ),
        (MBPP_PLUS, "mbppplus", SQUARE, {"test": None}, "test must be text, found None"),
    ],
)
def test_rows_of_another_schema_are_told(
    tmp_path: Path, task: CodeTask, name: str, row: dict[str, Any], change: dict[str, Any], complaint: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "test.jsonl").write_text(json.dumps(row | change))
    with pytest.raises(WorkloadError, match=f"test.jsonl:1: {complaint}"):
        workload(task, tmp_path).requests(TOKENIZER, LONG)


@linux
@pytest.mark.parametrize("task", [HUMANEVAL, MBPP_PLUS])
def test_the_datas_own_solutions_pass_and_broken_ones_do_not(task: CodeTask) -> None:
    root = data_folder()
    rows = [row for _, row in read_jsonl(root / task.dataset.name / "test.jsonl.gz")]
    broken = "    return object()" if task is HUMANEVAL else "def nothing(): pass"

    def solution(request: Request) -> str:
        row = rows[int(request.sample_id.split("/")[1])]
        return str(row["canonical_solution"] if task is HUMANEVAL else row["code"])

    asked = workload(task, root, limit=4)
    assert {score.value for score in scored(asked, solution).values()} == {1.0}
    assert {score.value for score in scored(asked, lambda _: broken).values()} == {0.0}
