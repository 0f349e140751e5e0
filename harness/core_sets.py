"""Cores and threads of an arm as its plan writes them: one value for both phases, or a table with a value for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticKnownError

from results.core_lists import core_words, parse_cores
from results.records import Record

MOST_THREADS = 1024


def _cores(text: str) -> str:
    return core_words(parse_cores(text))


CoreList = Annotated[str, Field(max_length=1000), AfterValidator(_cores)]
Threads = Annotated[int, Field(ge=1, le=MOST_THREADS)]


class _ByPhase(Record):
    """At least one phase has a value."""

    @model_validator(mode="after")
    def _some(self) -> _ByPhase:
        if not self.model_fields_set:
            raise ValueError("says nothing of any phase; give prefill, decode, or both")
        return self


class CoreSets(_ByPhase):
    prefill: CoreList | None = None
    decode: CoreList | None = None
    """A phase without its own may use all cores of the process."""


class ThreadCounts(_ByPhase):
    prefill: Threads | None = None
    decode: Threads | None = None
    """A phase without its own has a thread for each of its cores, or torch's number."""


def _both_cores(value: Any) -> Any:
    if isinstance(value, str):
        _cores(value)  # told once, not for each phase
        return {"prefill": value, "decode": value}
    if value is not None and not isinstance(value, dict | CoreSets):
        raise ValueError('must be a list of cores like "0-3", or a table like { prefill = "0-3", decode = "0,1" }')
    return value


def _both_threads(value: Any) -> Any:
    if type(value) is int:
        if value < 1:
            raise PydanticKnownError("greater_than_equal", {"ge": 1})
        if value > MOST_THREADS:
            raise PydanticKnownError("less_than_equal", {"le": MOST_THREADS})
        return {"prefill": value, "decode": value}
    if value is not None and not isinstance(value, dict | ThreadCounts):
        raise ValueError("must be a whole number, or a table like { prefill = 4, decode = 2 }")
    return value


CoresOfPhases = Annotated[CoreSets, BeforeValidator(_both_cores, json_schema_input_type=str | CoreSets)]
ThreadsOfPhases = Annotated[ThreadCounts, BeforeValidator(_both_threads, json_schema_input_type=int | ThreadCounts)]


def in_words(by_phase: _ByPhase) -> str:
    """ "0-3 for prefill, 0-1 for decode"; one value alone where both have it."""
    values = {phase: value for phase, value in by_phase if value is not None}
    if len(values) == 2 and len(set(values.values())) == 1:
        return str(next(iter(values.values())))
    return ", ".join(f"{value} for {phase}" for phase, value in values.items())


def too_many_threads(cores: CoreSets | None, threads: ThreadCounts | None) -> Iterator[str]:
    """More threads than cores spin against each other, and the figure would be the scheduler's."""
    for phase in ("prefill", "decode"):
        own, n = getattr(cores, phase, None), getattr(threads, phase, None)
        if own is not None and n is not None and n > (most := len(parse_cores(own))):
            yield f'threads: {n} for {phase} on cores "{own}"; at most one on each core, {most}'
