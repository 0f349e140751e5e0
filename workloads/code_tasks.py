"""HumanEval (Chen et al., 2021) and MBPP+ (Liu et al., 2023): a model writes a function, and tests run it.

Prompts, stop strings, filters and the metric pass@1 are lm-eval's; each program runs in a sandbox of its own, outside
the measured window, and only where the user allowed it (`--allow-code`).

lm-eval scores MBPP+ by the first three assertions of MBPP, which a prompt shows to the model: `pass@1` here too. The
tests that make it MBPP+ are some hundred inputs a problem: `pass@1_plus`. Four problems (98, 124, 137, 300) use `math`
in their assertions and do not import it, which lm-eval leaves to the answer; their tests of MBPP+ do.

lm-eval's mbpp_plus_instruct is not here: its filter (0.4.13) takes the first word of an answer for the language of the
code block, so one that begins with `def` never passes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from results.records import Completion, Request, Score
from results.units import MIB
from workloads.base import Tokenizer, WorkloadError
from workloads.benchmark import Benchmark, GeneratingParameters, Part
from workloads.code_eval import CodeEval, read_code_definition
from workloads.datasets import Dataset, Row, data_source, not_text
from workloads.sandbox import DEFAULT_LIMITS, Limits, SandboxError, check_walls, run_programs

log = logging.getLogger(__name__)

PLUS_LIMITS = Limits(cpu_s=60, wall_s=600.0, memory_bytes=4096 * MIB)
"""Tests of MBPP+ have large inputs: the data's own solutions take up to 34 s on a busy core, and 2.2 GB."""
ONE_MEANING = {"metric": "pass@1", "higher_is_better": True}
"""lm-eval calls it `pass@1,create_test` or `pass_at_1`."""
Scorer = Callable[[Sequence[Request], Sequence[Completion]], Sequence[Score]]


@dataclass(frozen=True)
class CodeTask:
    """One of lm-eval's code tasks."""

    name: str
    definition: str
    """The YAML, below lm-eval's folder of tasks."""
    dataset: Dataset
    plus_tests: str | None = None
    """Column of further tests; None where there are no others."""


def _humaneval_problem(row: Row) -> str | None:
    return not_text(row, ("prompt", "test", "entry_point"))


def _mbpp_problem(row: Row) -> str | None:
    asserted = row["test_list"]
    if not isinstance(asserted, list) or len(asserted) < 3 or not all(isinstance(a, str) for a in asserted):
        return f"test_list must be a list of at least three texts, found {asserted!r:.80}"
    return not_text(row, ("prompt", "test"))


HUMANEVAL_DATA = Dataset(
    name="openai_humaneval",
    hub_id="openai/openai_humaneval",
    columns=("prompt", "test", "entry_point"),
    problem=_humaneval_problem,
)
MBPP_PLUS_DATA = Dataset(
    name="mbppplus", hub_id="evalplus/mbppplus", columns=("prompt", "test_list", "test"), problem=_mbpp_problem
)
HUMANEVAL = CodeTask("humaneval", "humaneval/humaneval.yaml", HUMANEVAL_DATA)
HUMANEVAL_INSTRUCT = CodeTask("humaneval_instruct", "humaneval/humaneval_instruct.yaml", HUMANEVAL_DATA)
MBPP_PLUS = CodeTask("mbpp_plus", "mbpp/mbpp_plus.yaml", MBPP_PLUS_DATA, "test")


class CodeBenchmark(Benchmark):
    """A `CodeTask` as a workload."""

    def __init__(
        self, task: CodeTask, parameters: GeneratingParameters, data_root: Path | None, allow_code: bool
    ) -> None:
        """Raises `WorkloadError` where code may not run, or this machine cannot wall it in."""
        if not allow_code:
            raise WorkloadError(
                "it runs code that a model wrote, and nobody will have read it; --allow-code lets it, each program in "
                "a sandbox without network, other processes or files outside a folder of its own"
            )
        try:
            check_walls()
        except SandboxError as error:
            raise WorkloadError(str(error)) from error
        source = data_source(parameters.data, data_root)

        @cache
        def rows(split: str) -> list[Row]:
            return source.rows(task.dataset, split)

        self._code_eval = CodeEval()
        self._limited: set[str] = set()
        """Programs that met a limit."""
        self._notes_of_requests: tuple[str, ...] = ()
        definition, label = read_code_definition(task.definition, self._code_eval), source.label(task.dataset)
        super().__init__(task.name, [Part(task.name, definition, rows)], parameters, label)
        self._plus: Benchmark | None = None
        if task.plus_tests:
            # The same items, scored by other tests. Nothing is asked with it, so it needs no examples.
            further = definition | {"doc_to_target": f"{{{{{task.plus_tests}}}}}", "num_fewshot": 0}
            unshown = parameters.model_copy(update={"num_fewshot": None})
            self._plus = Benchmark(task.name, [Part(task.name, further, rows)], unshown, label)

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        requests = super().requests(tokenizer, max_length)
        self._notes_of_requests = self.notes
        return requests

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        """pass@1 of each sample and of all, by lm-eval's tests; then by those of MBPP+, where there are any."""
        base = self._asked_by(super().score, requests, completions)
        self._run(base, DEFAULT_LIMITS)
        scores = [s.model_copy(update=ONE_MEANING) for s in super().score(requests, completions)]
        programs = set(base)
        if self._plus is not None:
            plus = self._asked_by(self._plus.score, requests, completions)
            # Who does not end with three small inputs does not end with hundreds, and would take longest for it.
            endless = {candidate for program, candidate in base.items() if program in self._limited}
            self._run({p: candidate for p, candidate in plus.items() if candidate not in endless}, PLUS_LIMITS)
            meaning = ONE_MEANING | {"metric": "pass@1_plus"}
            scores += [s.model_copy(update=meaning) for s in self._plus.score(requests, completions)]
            programs |= set(plus)
        n_limited = len(programs & self._limited)
        note = f"{n_limited} programs met a limit of the sandbox (time or files), and count as failed"
        self.notes = (*self._notes_of_requests, *([note] if n_limited else []))
        return scores

    def _asked_by(
        self, score: Scorer, requests: Sequence[Request], completions: Sequence[Completion]
    ) -> dict[str, str]:
        """The programs of a scoring, each with the answer in it."""
        self._code_eval.asked.clear()
        score(requests, completions)
        return dict(self._code_eval.asked)

    def _run(self, programs: Iterable[str], limits: Limits) -> None:
        """Learns the verdicts that are not known from an arm or a repeat before."""
        unknown = [program for program in programs if program not in self._code_eval.verdicts]
        for program, outcome in zip(unknown, run_programs(unknown, limits), strict=True):
            self._code_eval.verdicts[program] = outcome.passed
            if outcome.end == "met a limit":
                self._limited.add(program)
            log.info("%s: %s (%s), %.1f s", self.name, outcome.end, outcome.reason, outcome.wall_s)
