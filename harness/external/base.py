"""What every engine of a plan has that is not joulebench's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import Field

from engines.base import Engine
from engines.errors import EngineError
from engines.external.base import Abilities, Found, Surroundings
from harness.core_sets import CoresOfPhases, ThreadsOfPhases, too_many_threads
from harness.plan_values import MAX_NAME
from results.records import Record

OF_OURS = "is of joulebench's own engine, and this one computes in its own way; remove the line, or remove runs"

SHARED = {"name", "runs", "devices", "threads", "cores"}
"""Keys that a cell tells elsewhere."""


def not_of(*keys: str, why: str) -> Mapping[str, str]:
    return MappingProxyType(dict.fromkeys(keys, why))


class ExternalSpec(Record):
    """One arm that another engine computes. tag: what `runs` says. what: for lists, one line.

    misplaced: keys of other kinds, and why not here. abilities: what the engine can; a key of `threads` or `cores` that
    it cannot take is refused with that.
    """

    tag: ClassVar[str]
    what: ClassVar[str]
    abilities: ClassVar[Abilities]
    misplaced: ClassVar[Mapping[str, str]] = not_of(
        "technique", "profile", "prefill_chunk", "ranks", "reuse_prefix", "last_layer", "long_rope", "max_batch",
        "expert_memory", "copy_bytes_per_s", "decoding", "quantise", why=OF_OURS,
    )  # fmt: skip
    max_batch: ClassVar[int] = 1
    model_begins: ClassVar[bytes] = b""
    """With which bytes a model file begins that it reads; empty where nothing tells."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    runs: str
    """Which engine. A member of the union narrows it to a literal."""
    devices: tuple[str, ...] | None = Field(None, min_length=1, max_length=64)
    """Names of the devices that it goes onto; all of the plan where it is not given."""
    threads: ThreadsOfPhases | None = None
    """CPU threads, of both phases or of each; the engine's own number where it is not given."""
    cores: CoresOfPhases | None = None
    """Of the device's CPU, on which it computes: "0-3" in both phases, or a set for each."""
    model_file: str | None = Field(None, min_length=1)
    """The model in a form that this engine reads, from where joulebench is called; the plan's model still gives the
    tokenizer. Where it is not given, the plan's model is written in that form, for engines that can have that."""

    def problems(self) -> Iterator[str]:
        """What of it cannot be meant, each with its key in front: "threads: ..."."""
        for key in ("threads", "cores"):
            asked, can = getattr(self, key), getattr(self.abilities, key)
            if asked is None:
                continue
            if can == "no":
                yield f"{key}: {self.runs} cannot be told its {key}; remove the line"
            elif can == "both phases" and asked.prefill != asked.decode:
                yield (
                    f"{key}: {self.runs} takes one value for both phases, found"
                    f" {asked.prefill} for prefill and {asked.decode} for decode; give one"
                )
        yield from too_many_threads(self.cores, self.threads)

    @classmethod
    def look(cls, environments: Sequence[Path] = ()) -> Found:
        """What of it is here without a plan. environments: virtual ones that may have its wheel.

        Raises `EngineError`: what is missing, and how to get it."""
        raise EngineError("a plan names where it is")

    def why_not_on(self, cores: frozenset[int]) -> str | None:
        """Why it cannot be bound to these cores of this host; None where it can. In this process its threads are."""
        from engines.cores import why_not_bound

        return why_not_bound(cores)

    @property
    def is_lossless(self) -> bool:
        """Whether it computes all of the model, so that the gate asks for answers that begin as ours."""
        return True

    @property
    def options(self) -> dict[str, Any]:
        """Its own, as a cell keeps them."""
        return self.model_dump(mode="json", exclude=SHARED)

    @property
    def changed_options(self) -> dict[str, Any]:
        """Those that are not the default."""
        return self.model_dump(mode="json", exclude=SHARED, exclude_defaults=True)

    def find(self) -> Found:
        """The build that would run, without running it. Raises `EngineError`: what is missing, and how to get it."""
        raise NotImplementedError

    def build(self, around: Surroundings) -> Engine:
        """On a model that it can read. Raises `NotSupportedError`, `EngineError`, `DeviceError`."""
        raise NotImplementedError

    def own_files(self) -> dict[str, Path]:
        """Files that the plan names and that decide figures, by what each is called."""
        return {} if self.model_file is None else {f"model file {self.model_file}": Path(self.model_file).expanduser()}
