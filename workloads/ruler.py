"""RULER's needles in a haystack (Hsieh et al., 2024): a fact in a long text, asked for at its end.

niah_single_2 hides one needle in prose; niah_multikey_1 hides four, of which one is asked. A needle gives a "special
magic number" of seven digits for a key of two words; an answer scores when the number is in it, in any place.

From lm-eval: the question and needle texts, the generation limit (128 tokens), the prompt's assembly, the scoring.
Ours: the samples. lm-eval's own builder fetches essays and a sentence splitter, counts in steps of 500 words (of 1024
tokens asked it gave 480) and leaves the answer's first words out of the count. Here a sample has at most `length`
tokens of the model's tokenizer, answer included, and a word more would be too much. Importing lm-eval's builder costs a
download and a list of six million keys, so its two texts are read from its source without running it.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field

from results.records import Completion, Record, Request, Score
from workloads.base import Tokenizer, WorkloadError
from workloads.datasets import Row
from workloads.haystack import Haystack, file_text, generated_text
from workloads.lm_eval_bridge import check_lengths, lm_eval_tasks, load_task, record_requests, score_completions

PUBLIC_DOMAIN_HAYSTACK = "ruler/haystack_public_domain.json.gz"
METRIC = "string_match_all"
"""RULER's name for the share of the expected values that occur in the answer."""

_ANSWER_START = "The special magic number for {query} mentioned in the provided text is"


class RulerParameters(Record):
    """What a plan may say about a needle-in-a-haystack task."""

    length: int = Field(default=4096, ge=1)
    """Tokens of prompt and answer together."""
    limit: int = Field(default=100, ge=1)
    """Samples asked."""
    seed: int = 0
    depth_percent: float | None = Field(default=None, ge=0, le=100)
    """Where the asked needle lies, 0 at the start of the text; None: spread evenly over the samples."""
    haystack: str = "generated"
    """"generated", "file" (the data folder's public-domain novel), or the path of a text, also below that folder."""


class _NeedleInAHaystack:
    """n_needles needles, one of them asked."""

    scored = True

    def __init__(self, task: str, n_needles: int, parameters: RulerParameters, data_root: Path | None) -> None:
        self.name = f"ruler_{task}"
        self.notes: tuple[str, ...] = ()
        self._task_name = task
        self._n_needles = n_needles
        self._parameters = parameters
        self._haystack, self.data_source = _haystack(parameters.haystack, data_root)
        self._built: dict[str, tuple[Request, ...]] = {}

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        self._check_length(max_length)
        if tokenizer.name not in self._built:
            self._built[tokenizer.name] = tuple(self._record(tokenizer, self._sample_ids()))
        return self._built[tokenizer.name]

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Prompts of samples with other text, keys and values."""
        self._check_length(max_length)
        sample_ids = [f"{self._identity()}/calibration/{i}" for i in range(n)]
        return [request.prompt_ids for request in self._record(tokenizer, sample_ids)]

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        # Scoring reads the expected values only, and those are the same for every tokenizer: no text is built.
        sample_ids = self._sample_ids()
        rows = [_Sample(sample_id, self._n_needles).row([], 0.0, self._parameters.length) for sample_id in sample_ids]
        metrics = {str(self._parameters.length): METRIC}
        return score_completions(self._task(rows), requests, completions, sample_ids, metrics)

    def _identity(self) -> str:
        p = self._parameters
        depth = "" if p.depth_percent is None else f"/depth{p.depth_percent:g}"
        return f"{self.name}/{p.length}{depth}/seed{p.seed}"

    def _sample_ids(self) -> list[str]:
        return [f"{self._identity()}/{i}" for i in range(self._parameters.limit)]

    def _check_length(self, max_length: int) -> None:
        if self._parameters.length > max_length:
            raise WorkloadError(
                f"{self.name}: length {self._parameters.length} is more than the model's {max_length} tokens; "
                "lower length"
            )

    def _record(self, tokenizer: Tokenizer, sample_ids: Sequence[str]) -> list[Request]:
        length = self._parameters.length
        n_new_tokens = _definition(self._task_name)["generation_kwargs"]["max_gen_toks"]
        rows = []
        for i, sample_id in enumerate(sample_ids):
            depth = _spread(i) if self._parameters.depth_percent is None else self._parameters.depth_percent
            sample = _Sample(sample_id, self._n_needles)
            words = sample.fit(self._haystack, depth, length - n_new_tokens, tokenizer)
            rows.append(sample.row(words, depth, length))
        requests = record_requests(self._task(rows), tokenizer, sample_ids)
        check_lengths(requests, length, f"{self.name}: lm-eval joins the prompt in another way; install lm-eval 0.4.13")
        return requests

    def _task(self, rows: Sequence[Row]) -> Any:
        from lm_eval.tasks.ruler.common_utils import aggregate_metrics, process_results

        # lm-eval names the metric after the length, and knows six lengths by default.
        metric = {
            "metric": str(self._parameters.length),
            "aggregation": aggregate_metrics,
            "higher_is_better": True,
        }
        definition = _definition(self._task_name) | {"process_results": process_results, "metric_list": [metric]}
        return load_task(definition, {"test": rows}, seed=self._parameters.seed)


class RulerNiahSingle2(_NeedleInAHaystack):
    """One needle in prose."""

    def __init__(self, parameters: RulerParameters, data_root: Path | None) -> None:
        super().__init__("niah_single_2", 1, parameters, data_root)


class RulerNiahMultikey1(_NeedleInAHaystack):
    """Four needles with four keys in prose; one key is asked."""

    def __init__(self, parameters: RulerParameters, data_root: Path | None) -> None:
        super().__init__("niah_multikey_1", 4, parameters, data_root)


class _Sample:
    """Keys, values and the query of one sample; the text around them is chosen to fit a tokenizer."""

    def __init__(self, sample_id: str, n_needles: int) -> None:
        # A random state from the id: a sample is the same whatever the limit, and whatever was built before it.
        self._sample_id = sample_id
        rng = random.Random(sample_id)
        adjectives, nouns = _key_words()
        self._keys: list[str] = []
        while len(self._keys) < n_needles:
            key = f"{rng.choice(adjectives)}-{rng.choice(nouns)}"
            if key not in self._keys:
                self._keys.append(key)
        self._values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), n_needles)]
        self._other_depths = rng.sample(range(101), n_needles - 1)

    def row(self, words: Sequence[str], depth_percent: float, length: int) -> Row:
        """The item as lm-eval's task reads it. The first needle is the asked one."""
        return {
            "input": _question(self._context(words, depth_percent), self._keys[0]),
            "outputs": [self._values[0]],
            "gen_prefix": _ANSWER_START.format(query=self._keys[0]),
            "max_length": length,
        }

    def fit(self, haystack: Haystack, depth_percent: float, n_tokens: int, tokenizer: Tokenizer) -> list[str]:
        """The longest stretch of text, to the word, with which the prompt has at most n_tokens tokens."""
        words = haystack(n_tokens, random.Random(f"{self._sample_id}/text"))

        def fits(n_words: int) -> bool:
            row = self.row(words[:n_words], depth_percent, n_tokens)
            return len(tokenizer.encode_prompt(f"{row['input']} {row['gen_prefix']}")) <= n_tokens

        if not fits(1):
            raise WorkloadError(
                f"{self._sample_id}: question and needles alone need more than {n_tokens} tokens of prompt with "
                f"tokenizer {tokenizer.name}; raise length"
            )
        low, high = 1, len(words) + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return words[:low]

    def _context(self, words: Sequence[str], depth_percent: float) -> str:
        """Needles between sentences. At equal places the asked one comes first."""
        sentences = re.split(r"(?<=[.!?])\s+", " ".join(words))
        needles = sorted(
            (int(len(sentences) * depth / 100), i) for i, depth in enumerate([depth_percent, *self._other_depths])
        )
        for place, i in reversed(needles):
            sentences.insert(place, _needle(self._keys[i], self._values[i]))
        return " ".join(sentences)


def _haystack(name: str, data_root: Path | None) -> tuple[Haystack, str]:
    """(text, what tables print as its source)."""
    if name == "generated":
        return generated_text, "generated"
    if name == "file" and data_root is None:
        raise WorkloadError(
            'haystack = "file", but no data folder was given; set JOULEBENCH_DATA, name a text file, or use "generated"'
        )
    path = (data_root or Path()) / (PUBLIC_DOMAIN_HAYSTACK if name == "file" else name)
    return file_text(path), str(path)


def _spread(i: int) -> float:
    """Depth in percent of sample i: van der Corput's sequence, 0, 50, 25, 75, 12.5, ... Any prefix is evenly spread."""
    depth, step = 0.0, 50.0
    while i:
        depth += step * (i & 1)
        i, step = i >> 1, step / 2
    return depth


@cache
def _key_words() -> tuple[list[str], list[str]]:
    """Adjectives and nouns for keys, as in RULER, but without those of two words."""
    from wonderwords import RandomWord

    words = RandomWord()
    adjectives, nouns = (
        sorted(words.filter(include_categories=[kind], exclude_with_spaces=True)) for kind in ("adjective", "noun")
    )
    return adjectives, nouns


def _needle(key: str, value: str) -> str:
    return _lm_eval_text("prepare_niah.py", "NEEDLE").format(type_needle_v="numbers", key=key, value=value)


def _question(context: str, key: str) -> str:
    """The prompt in the singular, as lm-eval's builder puts it when one value is asked for."""
    template = _lm_eval_text("niah_utils.py", "TEMPLATE")
    template = template.replace("Some", "A").replace("are all", "is").replace("are", "is")
    return template.format(type_needle_v="number", context=context, query=key)


@cache
def _definition(task: str) -> dict[str, Any]:
    """lm-eval's YAML, its functions left as names: resolving them would import the builder."""
    from lm_eval.tasks._yaml_loader import load_yaml

    return load_yaml(lm_eval_tasks() / "ruler" / f"{task}.yaml", resolve_func=False)  # type: ignore[no-any-return]


@cache
def _lm_eval_text(file: str, name: str) -> str:
    """A string constant at the top of one of lm-eval's RULER files, read without running the file."""
    path = lm_eval_tasks() / "ruler" / file
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=found)], value=ast.Constant(value=str(text))) if found == name:
                return text
    raise WorkloadError(f"{path} defines no text {name}; install lm-eval 0.4.13")
