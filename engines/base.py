"""What the harness asks of an engine, and what an engine reports while it works."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from engines.errors import EngineError as EngineError
from engines.model.tokenizer import Tokenizer
from results.copies import DecodeStep
from results.counters import EngineCounters
from results.environments import Road
from results.expert_heat import ExpertHeat
from results.graph_placement import GraphPlacement
from results.records import ActiveWeights, Completion, Request

if TYPE_CHECKING:
    from torch import Tensor

    from engines.profile import Profile

PhaseEvent = Literal["request start", "prefill end", "request end"]


class PhaseListener(Protocol):
    """Called by the engine at each phase edge with the time stamp it also puts into the `Completion`.

    A meter that can be read at will takes a reading here, so that phases shorter than the sampling interval resolve.
    """

    def __call__(self, event: PhaseEvent, at_s: float) -> None: ...


def unheard(event: PhaseEvent, at_s: float) -> None:
    """A listener for work outside any window: warm-up, calibration, a clock that is not the run's."""


class Engine(Protocol):
    """A model that answers requests. At least: the reference engine, and that of `engines.pricing.modelled`."""

    device: str
    """The machine it runs on, by the plan's name; only that machine's meters can measure it."""
    tokenizer: Tokenizer
    max_length: int
    time_method: Literal["measured", "modelled"]

    @property
    def needs_calibration(self) -> bool:
        """True until `calibrate` was called, for techniques that learn something offline."""
        ...

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """Learns from prompts (token ids) that are not asked in any window."""
        ...

    def use_profile(self, profile: Profile) -> None:
        """Takes what was learnt before, of the same model, in the place of `calibrate`."""
        ...

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        """Answers one request. Raises `EngineError` on a request that it cannot take."""
        ...

    def reset(self) -> None:
        """Forgets the requests answered so far, so that the next is computed whole. What was calibrated stays."""
        ...

    def take_counters(self) -> EngineCounters | None:
        """What the technique did since the last call, and starts counting anew; None of an engine that tells nothing
        of it."""
        ...


class HeldWeights(NamedTuple):
    """How large a model is as an engine holds it. n_bytes: in the form in which each matrix is stored."""

    n_parameters: int
    n_bytes: int


@runtime_checkable
class HoldsWeights(Protocol):
    """An engine that knows how large its model is."""

    def held_weights(self) -> HeldWeights: ...


@runtime_checkable
class TellsActiveWeights(Protocol):
    """An engine that knows which of its weights one token needs."""

    def active_weights(self) -> ActiveWeights: ...


@runtime_checkable
class ShowsLogProbabilities(Protocol):
    """An engine that shows all that a model says of the next token, not only what it said of the asked one."""

    def show_log_probabilities(self, request: Request, listener: Callable[[Tensor], object]) -> None:
        """Computes a log-likelihood request whole, outside any window: it is neither timed nor counted.

        listener: told the log-probabilities [A, L] over the vocabulary at the next A positions of the continuation,
        chunk by chunk. Raises `EngineError`.
        """
        ...


@runtime_checkable
class SpansProcesses(Protocol):
    """An engine that computes in several processes of this machine, with links to end."""

    def process_ids(self) -> Sequence[int]:
        """This process first."""
        ...

    def close(self) -> None:
        """Ends the others."""
        ...


@runtime_checkable
class AsksServer(Protocol):
    """An engine whose answers another program computes, which we did not start; perhaps on another machine."""

    def why_unseen(self, by_cpu_time: bool) -> str | None:
        """Why the device's meters do not see it; None where they do. by_cpu_time: they go by CPU time."""
        ...


@runtime_checkable
class TellsMarks(Protocol):
    """An engine that knows of its answers what keeps them out of a mean."""

    def take_marks(self) -> tuple[str, ...]:
        """Of the requests answered since the last call."""
        ...


@runtime_checkable
class TellsHeat(Protocol):
    """An engine that says which experts its routers chose."""

    def take_heat(self) -> ExpertHeat | None:
        """Of the requests answered since the last call; None where nothing was routed."""
        ...


@runtime_checkable
class TellsSteps(Protocol):
    """An engine that copies experts and says when."""

    def take_decode_steps(self) -> tuple[DecodeStep, ...]:
        """The first ones of the requests answered since the last call; empty where nothing was copied."""
        ...


@runtime_checkable
class TellsRoad(Protocol):
    """An engine that says what computed its tokens: the same technique takes several times as long on another road."""

    def take_road(self) -> Road | None:
        """Of the requests answered since the last call; None where nothing was computed."""
        ...


@runtime_checkable
class TellsPlacement(Protocol):
    """An engine whose graphs another library places on units of the machine."""

    def take_placement(self) -> tuple[GraphPlacement, ...]:
        """Of the graphs that ran since the last call. It may take as long as loading them: never in a window."""
        ...


@runtime_checkable
class TellsRemarks(Protocol):
    """An engine that says how its figures came about, where that is not by stamps on the run's own clock."""

    def take_remarks(self) -> tuple[str, ...]:
        """Of the requests answered since the last call."""
        ...


@runtime_checkable
class StartsPrograms(Protocol):
    """An engine that starts a program for each request: what is told of this process is not told of it."""

    starts_programs: Literal[True]
