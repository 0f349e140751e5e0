"""What the harness asks of an engine that is not joulebench's own, besides `engines.base.Engine`.

An engine is found (which build, where), built on a model file that it can read, asked, and closed. What it cannot do is
told before it is asked, and is a result: "not supported".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from devices.base import Device
from engines.errors import NotSupportedError
from engines.model.checkpoints import CheckpointFacts
from results.records import Request

Stamps = Literal["token", "chunk", "phase"]
"""token: each token has its own; chunk: so have the pieces in which it answers, of one token or more; phase: the ends
of prefill and of decoding alone."""
Form = Literal["f32", "f16", "q8_0", "q4_0"]
"""Of a model's matrices in a GGUF file."""
PerPhase = Literal["each phase", "both phases", "no"]
"""Whether its threads, or cores, can be chosen: for each phase, one choice for both, or not at all."""


@dataclass(frozen=True)
class Abilities:
    """What an engine can. Each is told in `joulebench engines doctor`, and a request beyond it is refused."""

    token_ids: bool
    """It takes a prompt as the token ids that ours takes, so that both answer the same request."""
    loglikelihoods: bool
    stamps: Stamps
    only_fixed_lengths: bool
    """It makes up its prompt: a request's numbers of tokens are asked, and not its tokens."""
    samples: bool = False
    """It draws tokens as a request's `Sampling` says; without, greedy requests alone."""
    stop_texts: bool = True
    threads: PerPhase = "each phase"
    cores: PerPhase = "no"
    devices: tuple[str, ...] = ("host",)
    """Kinds of devices that it goes onto, by their tags in a plan: host, adb, ios."""


@dataclass(frozen=True)
class Found:
    """A build of an engine that is here. files: what decides its figures, by what each is called; its digests belong
    to the identity of every cell, so that a run is not resumed with another build."""

    where: str
    version: str | None
    """As it says itself; None where it says none."""
    files: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What an engine is built from, besides its own options."""

    source: str
    """The plan's model, as the plan names it."""
    facts: CheckpointFacts
    """Its config and tokenizer. Its weights are read by whoever needs them (`engines.model.checkpoints`)."""
    device: Device
    """Opened."""
    now_s: Callable[[], float]
    """The run's clock."""
    models: Path
    """A folder that keeps models in forms of other engines, for runs to come."""
    on_note: Callable[[str], None]
    """Told what takes long."""


Answer = tuple[int, ...] | str
"""Token ids of the plan's tokenizer, or a text where an engine tells none."""


@runtime_checkable
class AnswersAside(Protocol):
    """An engine whose completions hold no words of its own. It is asked for them besides, outside any window."""

    why_silent: str | None
    """Why its answers cannot be seen; None where they can."""

    def answer_aside(self, request: Request) -> Answer:
        """Greedily, and without the prompt. Raises `EngineError`, `DeviceError`."""
        ...


@runtime_checkable
class Closes(Protocol):
    """An engine with something to give back: a process, a program on a phone, memory."""

    def close(self) -> None: ...


@runtime_checkable
class MakesRoom(Protocol):
    """An engine that holds memory for the longest sequence that it will be asked: outside any window."""

    def make_room(self, n_positions: int) -> None:
        """n_positions: of a prompt with its answer. Raises `EngineError`, `OutOfMemoryError`."""
        ...


def why_not_asked(abilities: Abilities, name: str, requests: Sequence[Request], made_up: bool) -> str | None:
    """Why an engine cannot answer requests as ours does, or None. made_up: they are of a workload of fixed lengths,
    whose tokens say nothing."""
    if (abilities.only_fixed_lengths or not abilities.token_ids) and not made_up:
        return f"{name} makes up its prompts and takes no tokens; ask it the workload fixed_lengths"
    if not abilities.loglikelihoods and any(r.kind == "loglikelihood" for r in requests):
        return f"{name} tells no log-likelihoods of a given answer, by which this workload is scored"
    if not abilities.samples and any(r.sampling.temperature > 0 for r in requests):
        return f"{name} is asked greedily here; set temperature = 0 in the workload"
    if not abilities.stop_texts and any(r.stop for r in requests):
        return f"{name} does not end an answer at a text, and this workload asks for that"
    return None


def refuse_what_it_cannot(abilities: Abilities, name: str, requests: Sequence[Request], made_up: bool) -> None:
    """Raises `NotSupportedError`."""
    reason = why_not_asked(abilities, name, requests, made_up)
    if reason is not None:
        raise NotSupportedError(reason)
