"""What a technique is: four decisions, each a pure function with typed parameters, that make a dispatch plan together.

    route     which experts does each token get?
    place     which unit computes which slice of which expert, given the load?
    lay out   which rows does each call on that unit compute, and what overflows?
    move      which weights and activations travel, and when?

State lies in what the engine shows them (`LayerInput`); what was learnt or frozen before the first request comes in
through the `BuildContext`. `engines.techniques.systems` names the choices that the sources make.

Legend: T tokens, K experts per token, P = T * K routed pairs in row-major order, E experts, S segments, C calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from devices.base import Unit
from engines.calls import Calls, Integers, Width
from engines.decode_layout import DecodeLayout
from engines.dispatch import NO_TRANSFERS, DispatchPlan, Exchange, Prediction, Routing, Transfers
from engines.profile import Learnt
from engines.residency import Booleans

if TYPE_CHECKING:
    from engines.prediction import GuessRules

from engines.techniques.context import NOTHING, Asks, BuildContext, LayerInput

Overflow = Literal["saliency", "order", "none"]
"""Which pairs an expert with too many loses: those of the least salient tokens, those of later tokens; none has any."""


# --- route -----------------------------------------------------------------------------------------------------------


class Route(Protocol):
    """Which experts each token gets."""

    asks: Asks

    def executed(self, seen: LayerInput) -> Routing:
        """`seen.routing` itself where the router's choice is executed; another with its weights where it is not."""
        ...

    def predict(self, seen: LayerInput) -> Prediction | None:
        """For a later layer of this step, which is shown it as `predicted`. seen.routing: what this layer executes."""
        ...


# --- place -----------------------------------------------------------------------------------------------------------


class Piece(NamedTuple):
    """A slice of experts on a unit, of their intermediate dimension or of the model width. overlaps: its calls do not
    wait for those of other units. once: cut for one step, as the next has other widths."""

    unit: Unit
    width: Width | None = None
    naive_launch: bool = False
    hidden: Width | None = None
    overlaps: bool = False
    once: bool = False


class Summed(NamedTuple):
    """What the pieces of a share add up among each other: on all of them or on one, so many values at a time.

    on: the unit that adds up and has the tokens at first: it sends them to the others, as many values. None: the first
    piece adds up, and all have them.
    """

    kind: Literal["all_reduce", "reduce"]
    n_values: int
    of_each: Literal["row", "token"]
    on: Unit | None = None


class Visited(NamedTuple):
    """Pieces in memories of their own: `home` has the tokens, sends each piece those that it computes for, and gets a
    result of each back, so many values."""

    home: Unit
    n_values: int


@dataclass(frozen=True)
class Share:
    """Some experts and who computes them. Several pieces share the experts' rows, and their widths make a whole.

    experts_E: None for all. exact: the unit takes any shape, so that it computes exactly the rows that there are.
    dealt: the pieces are whole, and take the calls in turn. piece_E: they are whole, and each expert is of that one.
    cut: so that each piece has its part of every expert, an expert's rows are cut into as many calls as pieces are.
    summed: None where no piece needs another's results. visited: None where they share a memory, or `summed` says it.
    """

    pieces: tuple[Piece, ...]
    experts_E: NDArray[np.bool_] | None = None
    exact: bool = False
    dealt: bool = False
    cut: bool = False
    summed: Summed | None = None
    piece_E: Integers | None = None
    visited: Visited | None = None


class Place(Protocol):
    """Which unit computes which slice of which expert."""

    asks: Asks

    def shares(self, seen: LayerInput, load_E: Integers) -> Sequence[Share]:
        """Of the experts of one layer: each lies in one share."""
        ...

    def decode_shares(self, layer: int) -> Sequence[Share] | None:
        """What they are for one decoded token, where they do not hang on its experts; else None."""
        ...


# --- lay out ---------------------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """The rows of a share's calls, one after another. kept_E: how many pairs of each expert have a row.

    An expert's segments follow one another and fill up in their order. weight_loads_C: None for one a segment.
    """

    expert_S: Integers
    rows_S: Integers
    valid_S: Integers
    starts_C: Integers
    kept_E: Integers
    weight_loads_C: Integers | None = None


class Layout(Protocol):
    """Which rows each call computes."""

    asks: Asks
    static: bool
    """Whether shapes are frozen before the routing is known."""
    overflow: Overflow
    may_overflow: bool
    """Whether a chunk of prefill can have more pairs of an expert than rows."""
    renormalise: bool
    """Whether a token's surviving weights are scaled to the sum of those that it was routed with."""
    skips_padding: bool
    """Whether its rows of padding are not fetched."""

    def rows(self, seen: LayerInput, load_E: Integers, own_E: Booleans | None = None) -> Rows:
        """load_E: pairs of each expert of the share, 0 for the others. own_E: the experts of the share; None: all."""
        ...

    def decode_layout(self, layer: int, n_experts: int) -> DecodeLayout | None:
        """What one decoded token computes, where that is known before its experts are; None where it is not."""
        ...


# --- move ------------------------------------------------------------------------------------------------------------


class Moved(NamedTuple):
    """What travels for the calls of one layer, in its order. A transfer of a later layer is a prefetch.

    hits, misses: of the experts called, those whose weights lay where they are computed, and the others. unused: of
    those that lay there as they were fetched ahead for this layer, those that it does not call; None of a move whose
    experts stay from step to step (`engines.residency.Residency.take_unused`).
    """

    transfers: Transfers = NO_TRANSFERS
    exchanges: tuple[Exchange, ...] = ()
    hits: int | None = None
    misses: int | None = None
    unused: int | None = None


class Move(Protocol):
    """Which weights and activations travel, and when."""

    asks: Asks
    prefetches: bool
    """Whether it fetches for later layers."""
    keeps_what_lies: bool
    """Whether decoding leaves in every memory what lies there after its first step. What else comes, passes through."""

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        """Before the calls run. prediction: what the route guessed for a later layer. Every expert that lies in no
        memory of its call's unit must be transferred there; one that is replaced is not called after that."""
        ...


# --- the parameters and what they build -------------------------------------------------------------------------------


class RouteParameters(Protocol):
    """Typed parameters of a route."""

    @property
    def kind(self) -> str: ...
    @property
    def learns(self) -> frozenset[Learnt]: ...
    @property
    def lossless(self) -> bool:
        """Whether what is executed is always the router's choice."""
        ...

    def build(self, context: BuildContext) -> Route:
        """Raises `EngineError`."""
        ...


class MoveParameters(Protocol):
    """Typed parameters of a move. moves_weights: whether experts lie in slots and travel into them.
    moves_all: whether a unit computes those alone that came so, and none where it lies.
    loads_from_file: whether this engine really copies them, from the checkpoint file into slots that it holds."""

    moves_weights: ClassVar[bool]
    moves_all: ClassVar[bool]
    loads_from_file: ClassVar[bool]

    @property
    def kind(self) -> str: ...
    @property
    def needs_profile(self) -> bool: ...
    def build(self, context: BuildContext) -> Move:
        """Raises `EngineError`."""
        ...


class PlaceParameters(Protocol):
    """Typed parameters of a place."""

    @property
    def kind(self) -> str: ...
    @property
    def units(self) -> tuple[Unit, ...]: ...
    def build(self, context: BuildContext, layout: Layout) -> Place:
        """Is told the layout, whose frozen graphs it may place. Raises `EngineError`."""
        ...


class LayoutParameters(Protocol):
    """Typed parameters of a layout."""

    needs_profile: ClassVar[bool]

    @property
    def static(self) -> bool:
        """Whether shapes are frozen before the routing is known."""
        ...

    @property
    def kind(self) -> str: ...
    @property
    def lossless(self) -> bool:
        """Whether no pair can be dropped."""
        ...

    def build(self, context: BuildContext) -> Layout:
        """Raises `EngineError`."""
        ...


# --- the whole -------------------------------------------------------------------------------------------------------


class Technique(Protocol):
    """Plans one layer and one chunk at a time; keeps no state between calls."""

    name: str
    needs_saliency: bool
    """True when `plan` reads `saliency_T`."""
    couples_tokens: bool
    """True when what becomes of a token depends on the others of its chunk, as under a capacity, or on the phase."""
    asks: Asks
    """What `plan` must be shown beyond routing and saliency. Where it asks for nothing, its plan can be made later."""

    @property
    def guesses(self) -> GuessRules | None:
        """How each layer of a decoded token guesses the next one's experts; None where nothing is guessed, or only
        `plan` can."""
        ...

    @property
    def batches_exactly(self) -> bool:
        """Whether `plan` makes of every batch of decoded tokens, from their routing alone, one call of each expert that
        they chose, by number, with exactly its tokens in their order."""
        ...

    def plan(self, seen: LayerInput) -> DispatchPlan: ...
    def decode_layout(self, layer: int) -> DecodeLayout | None:
        """What `plan` makes of one decoded token, whatever its routing is, without saliency; the same at every call.

        None: something must be decided between router and experts, so that each layer waits for its plan.
        """
        ...


def stands_alone(technique: Technique) -> bool:
    """Whether what becomes of a prompt's token in a layer hangs on its own router's choice there, and on no other token
    or layer. Then a layer may be computed for some of the tokens."""
    sees_more = technique.couples_tokens or technique.needs_saliency or technique.asks != NOTHING
    return not sees_more and technique.guesses is None


class TechniqueParameters(Protocol):
    """The typed parameters of a technique (a frozen record), and the way to build it."""

    technique: ClassVar[str]

    @property
    def lossless(self) -> bool:
        """True when it computes all that the router chose: its answers are the model's own, up to the order of sums."""
        ...

    @property
    def loads_from_file(self) -> bool:
        """True when experts lie in slots of the engine and are copied there from the checkpoint file."""
        ...

    @property
    def wanted_prompts(self) -> int:
        """How many prompts it wants to learn from; 0 for a technique that learns nothing offline."""
        ...

    @property
    def learns(self) -> frozenset[Learnt]:
        """What it reads of a profile; empty where `wanted_prompts` is 0."""
        ...

    @property
    def units(self) -> tuple[Unit, ...]:
        """Where experts are computed."""
        ...

    @property
    def backbone(self) -> Unit:
        """Of attention and of what every token passes through, on a machine that has several units."""
        ...

    def build(self, context: BuildContext) -> Technique:
        """Raises `EngineError`. The profile may be None only where `wanted_prompts` is 0."""
        ...
