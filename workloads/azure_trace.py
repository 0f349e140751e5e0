"""Arrivals of a real service: Azure's LLM inference traces of November 2023 (Patel et al., Splitwise, ISCA 2024).

An hour of requests each of a conversation and of a code service: when they came, and the lengths of prompt and answer.
Texts are not published; prompts are running text of exactly the recorded length (`workloads.prose`), and answers are as
long as the recorded ones, whatever end tokens come. The loop is open: a request comes at its time, and waits where the
engine is busy. Bursts are what such a trace is for, so a subset is a stretch of neighbours, chosen by seed, and `rate`
only changes the speed at which it passes. The trace is from a data centre: on a small machine set `rate` below 1.

The data is the CSV file of https://github.com/Azure/AzurePublicDataset (CC-BY 4.0), TIMESTAMP, ContextTokens,
GeneratedTokens, under its own name or with the year, in `traces/workload` of the data folder, also gzipped.
"""

from __future__ import annotations

import csv
import gzip
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from results.records import Record
from workloads.base import Tokenizer, WorkloadError
from workloads.datasets import DAMAGED, MAKE_READABLE, shortage
from workloads.fitting import TooLong, told_too_long
from workloads.fixed_lengths import exact_request
from workloads.generation import Built, GenerationWorkload
from workloads.prose import exact_prompt

FOLDER = "traces/workload"
STEMS = {"conversation": "AzureLLMInferenceTrace_conv", "code": "AzureLLMInferenceTrace_code"}
COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class AzureTraceParameters(Record):
    """What a plan may say about the replay of a trace."""

    trace: Literal["conversation", "code"] = "conversation"
    limit: int = Field(default=100, ge=1)
    """Requests, neighbours in the trace."""
    rate: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """How many times as fast as on record they arrive."""
    too_long: TooLong = "skip"
    """Requests longer than the model's context. Leaving some out thins the load."""
    seed: int = 0
    """Which stretch of the trace."""


class Arrival(NamedTuple):
    """One request of the trace. at: the service's own time, to the microsecond; in UTC where the file names a zone."""

    at: datetime
    prompt_tokens: int
    new_tokens: int


class AzureTrace(GenerationWorkload):
    name = "azure_trace"

    def __init__(self, parameters: AzureTraceParameters, data_root: Path | None) -> None:
        super().__init__()
        self._parameters = parameters
        self._path = _path(STEMS[parameters.trace], data_root)
        self.data_source = str(self._path)
        self._arrivals: list[Arrival] | None = None

    def calibration_prompts(self, tokenizer: Tokenizer, max_length: int, n: int) -> Sequence[Sequence[int]]:
        """Other texts, of the lengths of requests at random places of the trace."""
        rng = random.Random(f"calibration/{self._parameters.seed}")
        fit = [a.prompt_tokens for a in self._read() if a.prompt_tokens <= max_length]
        lengths = rng.choices(fit, k=n) if fit else []
        return [exact_prompt(tokenizer, k, f"azure_trace/calibration/{i}") for i, k in enumerate(lengths)]

    def _build(self, tokenizer: Tokenizer, max_length: int) -> Built:
        p, arrivals = self._parameters, self._read()
        first = random.Random(p.seed).randrange(max(0, len(arrivals) - p.limit) + 1)
        stretch = {f"azure_{p.trace}/{i}": arrivals[i] for i in range(first, min(first + p.limit, len(arrivals)))}
        lengths = {name: a.prompt_tokens + a.new_tokens for name, a in stretch.items()}
        skipped = told_too_long(lengths, max_length, p.too_long, self.name, "requests")
        begin = arrivals[first].at
        requests = tuple(
            exact_request(
                name,
                exact_prompt(tokenizer, a.prompt_tokens, name),
                a.new_tokens,
                (a.at - begin).total_seconds() / p.rate,
            )
            for name, a in stretch.items()
            if lengths[name] <= max_length
        )
        lasts_s = (max(a.at for a in stretch.values()) - begin).total_seconds()
        told = f"{len(stretch)} requests from {begin} on came in {lasts_s:.1f} s, here in {lasts_s / p.rate:.1f} s"
        return Built(requests, (*shortage(len(arrivals), p.limit), told, *skipped))

    def _read(self) -> list[Arrival]:
        if self._arrivals is None:
            self._arrivals = list(_arrivals(self._path))
        return self._arrivals


def _path(stem: str, data_root: Path | None) -> Path:
    names = [f"{stem}{year}.csv{suffix}" for year in ("_2023", "") for suffix in (".gz", "")]
    if data_root is None:
        raise WorkloadError(
            f"azure_trace: the trace does not come with the project; set JOULEBENCH_DATA to a folder with {FOLDER}/"
            f"{names[-1]} from https://github.com/Azure/AzurePublicDataset"
        )
    for name in names:
        if (path := data_root / FOLDER / name).is_file():
            return path
    raise WorkloadError(
        f"azure_trace: none of {', '.join(names)} in {data_root / FOLDER}; put the file there, from "
        "https://github.com/Azure/AzurePublicDataset"
    )


def _arrivals(path: Path) -> Iterator[Arrival]:
    """All rows, checked. Raises `WorkloadError` with the line."""
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    number = 1
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            rows = csv.reader(lines)
            if (header := next(rows, [])) != COLUMNS:
                raise WorkloadError(f"{path}:1: columns {', '.join(header)}; {', '.join(COLUMNS)} are expected")
            before = datetime.min
            for number, row in enumerate(rows, start=2):
                arrival = _arrival(f"{path}:{number}", row)
                if arrival.at < before:
                    raise WorkloadError(
                        f"{path}:{number}: {arrival.at} is before the line above it ({before}); sort the file"
                    )
                before = arrival.at
                yield arrival
    except (*DAMAGED, csv.Error) as error:
        raise WorkloadError(f"{path}: unreadable after line {number} ({error}); fetch the file again") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error}; {MAKE_READABLE}") from error
    if number == 1:
        raise WorkloadError(f"{path}: no request in it; fetch the file again")


def _arrival(where: str, row: Sequence[str]) -> Arrival:
    try:
        time, prompt_tokens, new_tokens = row
        at = datetime.fromisoformat(time)
        if at.tzinfo is not None:
            at = at.astimezone(UTC).replace(tzinfo=None)
        arrival = Arrival(at, int(prompt_tokens), int(new_tokens))
    except (ValueError, OverflowError) as error:  # OverflowError: a time that is in no year of UTC
        raise WorkloadError(f"{where}: {', '.join(row)!r:.80} ({error}); a time and two counts are expected") from error
    if arrival.prompt_tokens < 1 or arrival.new_tokens < 1:
        raise WorkloadError(f"{where}: {arrival.prompt_tokens} and {arrival.new_tokens} tokens; at least 1 is expected")
    return arrival
