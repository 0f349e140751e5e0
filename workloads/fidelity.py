"""Fidelity: how near a model stays to itself when a technique or narrow weights change it. Cheap: no task is solved.

Each sample is a text of `length` tokens; its second half is asked about, so that each asked token has at least half of
the length before it (as llama.cpp's perplexity does). From the log-likelihoods of the measured window:

    nll_nats     -log p(token | all before it), mean over the asked tokens
    perplexity   e to its mean over all samples; its standard error by the delta method, perplexity times that of nll

and, where the engine shows its log-probabilities, against the reference arm's at the same positions:

    kl_nats      KL(reference || arm) of the next token's distribution, mean over positions: it cannot gain by chance
    same_top1    share of positions whose likeliest next token is the reference's

All samples have as many asked tokens, so means over samples are means over tokens. Standard errors are over samples:
tokens of one text hang together.
"""

from __future__ import annotations

import gzip
import lzma
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from results.records import Completion, Divergence, Record, Request, Score
from workloads import files_read
from workloads.base import Tokenizer, WorkloadError
from workloads.datasets import DAMAGED, find_file
from workloads.fitting import TooLong, told_length
from workloads.prose import exact_prompt

FOLDER_TEXTS = {
    "books": "corpus/gutenberg_valid.txt.xz",
    "wikipedia": "corpus/wikipedia_small.txt.xz",
    "shakespeare": "corpus/tinyshakespeare.txt.xz",
}
"""Texts of the data folder by the name that a plan gives them."""
ASKED_SHARE = 0.8
"""Of a text; the rest is for calibration."""
CHARACTERS_PER_TOKEN = 8
"""Encoded at first for each token wanted; more where that does not suffice."""
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}


class FidelityParameters(Record):
    """What a plan may say about the texts."""

    text: str = "generated"
    """"generated" prose, "books", "wikipedia" or "shakespeare" of the data folder, or the path of a text (.gz,
    .xz), also below that folder."""
    length: int = Field(default=256, ge=2)
    """Tokens of a sample."""
    limit: int = Field(default=16, ge=1, le=100_000)
    """Samples."""
    too_long: TooLong = "fail"
    """A length beyond the model's context: an error, or no cell for this model."""
    seed: int = 0


class Fidelity:
    """Likelihoods of text, scored by themselves and against the reference arm's."""

    name = "fidelity"
    scored = True

    def __init__(self, parameters: FidelityParameters, data_root: Path | None) -> None:
        self._parameters = parameters
        self._text, self.data_source = _text(parameters.text, data_root)
        self.notes: tuple[str, ...] = ()
        self._built: dict[str, tuple[Request, ...]] = {}

    @property
    def most_tokens(self) -> int:
        # The last token is asked about and never read.
        return self._parameters.length - 1

    def requests(self, tokenizer: Tokenizer, max_length: int) -> Sequence[Request]:
        # As above: a sample may have one token more than the model holds.
        self.notes = told_length(self._parameters.length, max_length + 1, self._parameters.too_long, self.name)
        if self.notes:
            return ()
        if tokenizer.name not in self._built:
            asked = self._stretches(tokenizer, self._parameters.limit, "asked")
            self._built[tokenizer.name] = tuple(_request(name, tokens) for name, tokens in asked)
        return self._built[tokenizer.name]

    def has_requests(self, tokenizer: Tokenizer, max_length: int) -> bool:
        self.notes = told_length(self._parameters.length, max_length + 1, self._parameters.too_long, self.name)
        return not self.notes and bool(self._stretches(tokenizer, 1, "asked"))

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Stretches of the last fifth of the text, or other generated ones."""
        return [tokens for _, tokens in self._stretches(tokenizer, n, "calibration")]

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        nll = {
            c.sample_id: -_loglikelihood(c) / len(r.continuation_ids)
            for r, c in zip(requests, completions, strict=True)
        }
        mean, stderr = _mean(nll.values())
        try:
            perplexity = math.exp(mean)
        except OverflowError as error:
            raise WorkloadError(
                f"{self.name}: {mean:.0f} nats a token have a perplexity beyond any number; try wider weights or "
                "arithmetic, or look for what breaks the model"
            ) from error
        spread = None if stderr is None else perplexity * stderr
        return [
            Score(metric="perplexity", value=perplexity, stderr=spread, n=len(nll), higher_is_better=False),
            *_scores("nll_nats", nll, higher_is_better=False),
        ]

    def score_divergences(self, divergences: Sequence[Divergence]) -> Sequence[Score]:
        """Of this arm against its reference."""
        kl = {d.sample_id: d.kl_nats for d in divergences}
        same = {d.sample_id: d.same_top1 for d in divergences}
        return [*_scores("kl_nats", kl, higher_is_better=False), *_scores("same_top1", same, higher_is_better=True)]

    def _stretches(self, tokenizer: Tokenizer, n: int, part: str) -> list[tuple[str, tuple[int, ...]]]:
        """(sample id, token ids) of n texts. Of a file they are spread over its part, one begins in each n-th of it."""
        p = self._parameters
        identity = f"{self.name}/{p.text}/{p.length}/seed{p.seed}/{part}"
        names = [f"{identity}/{i}" for i in range(n)]
        if self._text is None:
            return [(name, exact_prompt(tokenizer, p.length, name)) for name in names]
        cut = int(ASKED_SHARE * len(self._text))
        text = self._text[:cut] if part == "asked" else self._text[cut:]
        starts = [int(len(text) * random.Random(name).uniform(i, i + 1) / n) for i, name in enumerate(names)]
        return [(name, self._tokens(tokenizer, text, start)) for name, start in zip(names, starts, strict=True)]

    def _tokens(self, tokenizer: Tokenizer, text: str, start: int) -> tuple[int, ...]:
        """`length` tokens from the first word at or behind a place on; from further ahead where too little follows."""
        length = self._parameters.length
        n_characters = CHARACTERS_PER_TOKEN * length
        while True:
            word = next((i + 1 for i in range(start, len(text)) if text[i].isspace()), start) if start else 0
            tokens = tokenizer.encode_prompt(text[word : word + n_characters])
            if len(tokens) >= length:
                return tuple(tokens[:length])
            if word + n_characters < len(text):
                n_characters *= 2
            elif start:
                start = max(0, start - n_characters)
            else:
                raise WorkloadError(
                    f"{self.name}: {self.data_source}: a part of {len(text)} characters has {len(tokens)} tokens, a "
                    f"sample needs {length}; lower length, or name a longer text"
                )


def _request(name: str, token_ids: tuple[int, ...]) -> Request:
    half = len(token_ids) // 2
    return Request(
        request_id=name,
        sample_id=name,
        kind="loglikelihood",
        prompt_ids=token_ids[:half],
        continuation_ids=token_ids[half:],
    )


def _loglikelihood(completion: Completion) -> float:
    value = completion.loglikelihood
    if value is None or not math.isfinite(value):
        raise WorkloadError(
            f"{completion.request_id}: log-likelihood {value}; the engine must return a finite number (NaN hints at "
            "overflow: try wider weights or arithmetic)"
        )
    return value


def _scores(metric: str, values: Mapping[str, float], higher_is_better: bool) -> list[Score]:
    """Of each sample, and their mean with its standard error."""
    mean, stderr = _mean(values.values())
    singles = [
        Score(metric=metric, value=value, sample_id=sample, higher_is_better=higher_is_better)
        for sample, value in values.items()
    ]
    whole = Score(metric=metric, value=mean, stderr=stderr, n=len(values), higher_is_better=higher_is_better)
    return [*singles, whole]


def _mean(values: Collection[float]) -> tuple[float, float | None]:
    """(mean, sd / sqrt(n)); no standard error of one value."""
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return mean, None
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _text(name: str, data_root: Path | None) -> tuple[str | None, str]:
    """(text, None where it is generated; what tables print as its source). Raises `WorkloadError`."""
    if name == "generated":
        return None, name
    if name not in FOLDER_TEXTS:
        path = find_file("text", name, data_root)
    elif data_root is None:
        raise WorkloadError(
            f'text = "{name}" is {FOLDER_TEXTS[name]} of the data folder, but no data folder was given; '
            'set JOULEBENCH_DATA, name a text file, or use "generated"'
        )
    else:
        path = data_root / FOLDER_TEXTS[name]
    files_read.note(path)
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            text: str = file.read()
    except DAMAGED as error:
        raise WorkloadError(f"text {path}: {error}; UTF-8 text is expected, plain, .gz or .xz") from error
    except OSError as error:
        raise WorkloadError(f'text {path}: {error}; name a text file, or set text = "generated"') from error
    return text, str(path)
