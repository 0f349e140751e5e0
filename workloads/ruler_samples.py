"""What all tasks of RULER (Hsieh et al., 2024) share: samples built to a length, asked and scored as lm-eval does.

From lm-eval: every text around the generated parts, the generation limits, the prompt's assembly, the scoring.
Ours: the samples. lm-eval builds 500 of them in steps (of 1024 tokens asked one builder gave 480) with a tokenizer of
its own choice. Here a task draws as many as are asked, and each is as long as it can be without passing `length` tokens
of the model's own tokenizer, answer included.

Importing lm-eval's builders costs a download and a list of six million keys, so their texts are read from the source
without running it.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import Field

from results.records import Completion, Record, Request, Score
from workloads.base import Tokenizer, WorkloadError, n_tokens
from workloads.datasets import Row
from workloads.fitting import TooLong, told_length
from workloads.lm_eval_bridge import check_lengths, lm_eval_tasks, load_task, record_requests, score_completions


class RulerParameters(Record):
    """What a plan may say about any task of RULER."""

    length: int = Field(default=4096, ge=1)
    """Tokens of prompt and answer together."""
    limit: int = Field(default=100, ge=1, le=100_000)
    """Samples asked."""
    too_long: TooLong = "fail"
    """A length beyond the model's context: an error, or no cell for this model."""
    seed: int = 0


class Prompt(NamedTuple):
    """One item's text in lm-eval's two parts: what the user says, and how the answer begins."""

    question: str
    answer_start: str


class Sample(Protocol):
    """One item, its random parts drawn; only its size is open."""

    @property
    def outputs(self) -> Sequence[str]:
        """What an answer must name."""
        ...

    @property
    def sizes(self) -> range:
        """Sizes that it can have, in units of its own (words, lines, documents)."""
        ...

    def prompt(self, size: int) -> Prompt: ...


class RulerTask(ABC):
    """A task of RULER as a workload. Subclasses draw the samples."""

    scored = True

    def __init__(self, yaml_name: str, name: str, parameters: RulerParameters, data_source: str) -> None:
        """yaml_name: lm-eval's file of the task. data_source: what tables print as the source of its text."""
        self.name = name
        self.data_source = data_source
        self.notes: tuple[str, ...] = ()
        self.length = parameters.length
        self._parameters = parameters
        self._yaml_name = yaml_name
        self._built: dict[str, tuple[tuple[Request, ...], tuple[str, ...]]] = {}

    @abstractmethod
    def _sample(self, sample_id: str, number: int) -> Sample:
        """The sample with that number. Everything random comes from its id, so it does not depend on the others."""

    @property
    def _definition(self) -> dict[str, Any]:
        return _definition(self._yaml_name)

    def _identity(self) -> str:
        """The start of every sample's id: all that decides what is drawn."""
        return f"{self.name}/{self.length}"

    def _numbers(self) -> Sequence[int]:
        """The samples that are asked."""
        return range(self._parameters.limit)

    def _calibration_numbers(self, n: int) -> Sequence[int]:
        """Up to n more, for calibration; their ids are others."""
        return range(n)

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        self.notes = told_length(self.length, max_length, self._parameters.too_long, self.name)
        if self.notes:
            return ()
        if tokenizer.name not in self._built:
            self._built[tokenizer.name] = self._build(tokenizer, self._ids())
        requests, self.notes = self._built[tokenizer.name]
        return requests

    @property
    def most_tokens(self) -> int:
        return self.length

    def has_requests(self, tokenizer: Tokenizer, max_length: int) -> bool:
        self.notes = told_length(self.length, max_length, self._parameters.too_long, self.name)
        if self.notes:
            return False
        room = self._room
        least = []
        for sample_id, number in self._ids().items():
            sample = self._sample(sample_id, number)
            if not sample.sizes:
                continue
            least.append(self._prompt_tokens(tokenizer, sample, sample.sizes[0]))
            if least[-1] <= room:
                return bool(self._build(tokenizer, {sample_id: number})[0])
        raise self._too_short(tokenizer, least)

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Prompts of samples that are never asked."""
        ids = {f"{self._id_stem()}/calibration/{i}": i for i in self._calibration_numbers(n)}
        return [request.prompt_ids for request in self._build(tokenizer, ids)[0]]

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        # Scoring reads the expected values only, and those are the same for every tokenizer: no text is built.
        ids = self._ids()
        sample_ids = [request.sample_id for request in requests]
        rows = [self._row(Prompt("", ""), self._sample(sample_id, ids[sample_id])) for sample_id in sample_ids]
        metrics = {str(self.length): self._metric().__name__}
        return score_completions(self._task(rows), requests, completions, sample_ids, metrics)

    def expected(self) -> dict[str, str]:
        """What an answer must name, by sample id."""
        return {name: ", ".join(self._sample(name, number).outputs) for name, number in self._ids().items()}

    def _id_stem(self) -> str:
        return f"{self._identity()}/seed{self._parameters.seed}"

    def _ids(self) -> dict[str, int]:
        """Number by sample id, in the order of asking."""
        return {f"{self._id_stem()}/{i}": i for i in self._numbers()}

    def _build(self, tokenizer: Tokenizer, ids: Mapping[str, int]) -> tuple[tuple[Request, ...], tuple[str, ...]]:
        """(requests, notes) of those samples that can be as short as asked."""
        room = self._room
        rows: dict[str, Row] = {}
        least = []
        for sample_id, number in ids.items():
            sample = self._sample(sample_id, number)
            size = largest_fit(partial(self._prompt_tokens, tokenizer, sample), sample.sizes, room)
            if size is not None:
                rows[sample_id] = self._row(sample.prompt(size), sample)
            elif sample.sizes:
                least.append(self._prompt_tokens(tokenizer, sample, sample.sizes[0]))
        if ids and not rows:
            raise self._too_short(tokenizer, least)
        requests = record_requests(self._task(list(rows.values())), tokenizer, list(rows))
        check_lengths(requests, self.length, f"{self.name}: lm-eval joins the prompt in another way; use 0.4.13")
        return tuple(requests), self._notes(requests, len(ids))

    @property
    def _n_answer_tokens(self) -> int:
        return int(self._definition["generation_kwargs"]["max_gen_toks"])

    @property
    def _room(self) -> int:
        """Tokens that a prompt may have."""
        return self.length - self._n_answer_tokens

    def _prompt_tokens(self, tokenizer: Tokenizer, sample: Sample, size: int) -> int:
        return len(tokenizer.encode_prompt(self._definition["target_delimiter"].join(sample.prompt(size))))

    def _too_short(self, tokenizer: Tokenizer, least: Sequence[int]) -> WorkloadError:
        """least: tokens of each sample's prompt with nothing in it that could be left out."""
        raised = f"to {min(least) + self._n_answer_tokens} or more" if least else ""
        return WorkloadError(
            f"{self._identity()}: the answer takes {self._n_answer_tokens} of {self.length} tokens, and what must stand"
            f" in a prompt does not fit into the rest with tokenizer {tokenizer.name}; raise length {raised}".rstrip()
        )

    def _notes(self, requests: Sequence[Request], n_asked: int) -> tuple[str, ...]:
        notes = []
        if len(requests) < n_asked:
            notes.append(f"{n_asked - len(requests)} of {n_asked} samples left out: longer than {self.length} tokens")
        shortest = min((n_tokens(request) for request in requests), default=self.length)
        if shortest < 0.95 * self.length:
            notes.append(f"samples have {shortest} tokens and more, of the {self.length} asked for")
        return tuple(notes)

    def _row(self, prompt: Prompt, sample: Sample) -> Row:
        """The item as lm-eval's task reads it."""
        return {
            "input": prompt.question,
            "gen_prefix": prompt.answer_start,
            "outputs": list(sample.outputs),
            "max_length": self.length,
        }

    def _metric(self) -> Callable[..., float]:
        """RULER's `string_match_all`, or `string_match_part` where the YAML says so; lm-eval names it the length."""
        from lm_eval.tasks.ruler import common_utils

        is_part = str(self._definition["process_results"]).endswith("_part")
        return common_utils.string_match_part if is_part else common_utils.string_match_all  # type: ignore[no-any-return]

    def _task(self, rows: Sequence[Row]) -> Any:
        from lm_eval.tasks.ruler import common_utils

        process = getattr(common_utils, str(self._definition["process_results"]).rpartition(".")[2])
        # lm-eval names the metric after the length, and knows six lengths by default.
        metric = {
            "metric": str(self.length),
            "aggregation": common_utils.aggregate_metrics,
            "higher_is_better": True,
        }
        definition = self._definition | {"process_results": process, "metric_list": [metric]}
        return load_task(definition, {"test": rows}, seed=self._parameters.seed)


def largest_fit(tokens_at: Callable[[int], int], sizes: range, budget: int) -> int | None:
    """The largest size with at most `budget` tokens, for counts that grow with the size; None where none fits.

    Counts are nearly straight in the size, so each guess is where the line through the last two meets the budget: four
    to seven counts of a prompt, where halving needs twelve. The guesses depend on the sample alone, so the answer does
    too, even where a count falls by a token when a word is added.
    """
    if not sizes or (tokens := tokens_at(sizes[0])) > budget:
        return None
    fits, over = sizes[0], sizes[-1] + 1
    guess = fits + 16
    while over - fits > 1:
        guess = min(max(guess, fits + 1), over - 1)
        tokens_there = tokens_at(guess)
        tokens_each = max(tokens_there - tokens, 1) / (guess - fits)
        if tokens_there <= budget:
            fits, tokens = guess, tokens_there
        else:
            over = guess
        guess = fits + int((budget - tokens) / tokens_each)
    return fits


@cache
def lm_eval_text(file: str, name: str) -> Any:
    """A literal (text, or dict of texts) that one of lm-eval's RULER files assigns to `name`; the file is not run."""
    path = lm_eval_tasks() / "ruler" / file
    for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match statement:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant() | ast.Dict() as value) if found == name:
                return ast.literal_eval(value)
    raise WorkloadError(f"{path} defines no text {name}; install lm-eval 0.4.13")


@cache
def _definition(yaml_name: str) -> dict[str, Any]:
    """lm-eval's YAML, its functions left as names: resolving them would import the builder."""
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(lm_eval_tasks() / "ruler" / f"{yaml_name}.yaml", resolve_func=False)  # type: ignore[no-any-return]


def english_words_of(kind: str) -> set[str]:
    """Of wonderwords, whose own code reads its files in the encoding of the locale: "jalapeño" is another word in
    Latin-1, and an error in ASCII."""
    if (found := find_spec("wonderwords")) is None or found.submodule_search_locations is None:
        raise WorkloadError(
            "the package wonderwords, whose words RULER takes, is not installed; pip install wonderwords"
        )
    path = Path(found.submodule_search_locations[0]) / "assets" / f"{kind}list.txt"
    return set(map(str.rstrip, path.read_text("utf-8").splitlines()))
