"""The four decisions put together: what goes together, what has no effect, and what computes it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple

from pydantic import Field

from devices.base import Unit
from engines.profile import Learnt
from engines.techniques.base import (
    Layout,
    LayoutParameters,
    MoveParameters,
    Piece,
    PlaceParameters,
    RouteParameters,
    Share,
    Technique,
)
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import BuildContext, ChunkPhase
from engines.techniques.idle import IN_DECODING_ONLY, IN_PREFILL_ONLY, idle
from engines.techniques.layout.blocks import BlocksParameters
from engines.techniques.layout.capacity import CapacityParameters
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.layout.loads import AllExpertsParameters, SelectiveParameters
from engines.techniques.layout.tiers import TiersParameters
from engines.techniques.move.caches import CacheParameters
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.move.nothing import NothingParameters
from engines.techniques.move.slices import SlicesParameters
from engines.techniques.move.two_buffers import TwoBuffersParameters
from engines.techniques.over_ranks import OverRanks
from engines.techniques.place.hosts import CheaperParameters, HottestParameters
from engines.techniques.place.ndp import NdpParameters
from engines.techniques.place.ranks import (
    EplbParameters,
    ExpertParallelParameters,
    Ranks,
    RanksParameters,
    TensorParallelParameters,
    TpEpParameters,
)
from engines.techniques.place.residency import ByCostParameters
from engines.techniques.place.units import DecodesOn, OneUnitParameters, ShardsParameters
from engines.techniques.route import PredictedParameters, RouterParameters

Backbone = Literal["cpu", "npu", "gpu"]
CALIBRATION_PROMPTS = 8
RouteChoice = Annotated[RouterParameters | PredictedParameters, Field(discriminator="kind")]
PlaceChoice = Annotated[
    OneUnitParameters
    | ShardsParameters
    | ByCostParameters
    | CheaperParameters
    | HottestParameters
    | NdpParameters
    | TensorParallelParameters
    | ExpertParallelParameters
    | TpEpParameters
    | EplbParameters,
    Field(discriminator="kind"),
]
LayoutChoice = Annotated[
    ExactParameters
    | CapacityParameters
    | TiersParameters
    | BlocksParameters
    | SelectiveParameters
    | AllExpertsParameters,
    Field(discriminator="kind"),
]
MoveChoice = Annotated[
    NothingParameters | TwoBuffersParameters | CacheParameters | FetchParameters | SlicesParameters,
    Field(discriminator="kind"),
]


class Choices(NamedTuple):
    """One choice of each decision, and the unit of the backbone."""

    place: PlaceParameters
    layout: LayoutParameters
    backbone: Backbone = "cpu"
    decode: LayoutParameters | None = None
    """The layout of decode steps, where it is another."""
    route: RouteParameters = RouterParameters()
    move: MoveParameters = NothingParameters()
    calibration_prompts: int = CALIBRATION_PROMPTS

    @property
    def lossless(self) -> bool:
        return self.route.lossless and all(layout.lossless for layout in self.layouts)

    @property
    def tokens_stand_alone(self) -> bool:
        """See `engines.techniques.base.stands_alone`. Layouts but exact have a price that hangs on all tokens."""
        is_exact = all(isinstance(layout, ExactParameters) for layout in self.layouts)
        return is_exact and isinstance(self.route, RouterParameters) and isinstance(self.move, NothingParameters)

    @property
    def layouts(self) -> tuple[LayoutParameters, ...]:
        return (self.layout,) if self.decode is None else (self.layout, self.decode)

    @property
    def learns(self) -> frozenset[Learnt]:
        counts = self.move.needs_profile or any(layout.needs_profile for layout in self.layouts)
        counts = counts or isinstance(self.place, EplbParameters)
        return self.route.learns | (frozenset({"counts"}) if counts else frozenset())

    def decides_in_the_step(self, copies: bool) -> bool:
        """Whether a decoded token's experts must be known before its calls are, whatever was learnt: each layer then
        waits for its plan. copies: whether two buffers are really filled."""
        place, in_decoding = self.place, self.layouts[-1]
        if isinstance(place, CheaperParameters | HottestParameters | RanksParameters):
            return True
        if isinstance(place, NdpParameters) and place.uses_gpu:
            return True
        if isinstance(in_decoding, CapacityParameters) and _follows_the_busiest(in_decoding):
            return in_decoding.decode_graphs == "same"
        if isinstance(self.move, TwoBuffersParameters):
            return copies
        return isinstance(self.route, PredictedParameters) and isinstance(self.move, CacheParameters)

    def units(self, phase: ChunkPhase) -> tuple[Unit, ...]:
        """Where experts are computed in a phase; a place by cost may use one of its two alone."""
        in_decoding = self.layouts[-1]
        if phase == "decode" and isinstance(in_decoding, TiersParameters) and in_decoding.decode_graphs == "cpu":
            return ("cpu",)
        if phase == "decode" and isinstance(self.place, ByCostParameters) and _has_single_graphs(in_decoding):
            return ("npu",)
        return self.place.units

    def problem(self) -> str | None:
        """Why these do not go together, or None."""
        if isinstance(self.place, ByCostParameters) and not isinstance(self.layout, TiersParameters):
            return f"place by_cost places graphs of tiers, and layout {self.layout.kind} has none; use layout tiers"
        if self.move.loads_from_file and (
            not isinstance(self.place, OneUnitParameters) or self.place.unit not in ("cpu", "gpu")
        ):
            return (
                f"move {self.move.kind} loads experts into the memory of one cpu, or from there into"
                f" a gpu's, and place {self.place.kind} computes on {', '.join(self.place.units)}; use place"
                " one_unit with unit cpu or gpu"
            )
        if isinstance(self.place, CheaperParameters | HottestParameters):
            inexact = [layout.kind for layout in self.layouts if not isinstance(layout, ExactParameters)]
            if inexact:
                return f"place {self.place.kind} prices exact rows, and layout {inexact[0]} has others; use exact"
            if isinstance(self.place, HottestParameters) and self.place.h == "factor" and not self.move.moves_weights:
                return (
                    'h = "factor" weighs the link that experts travel over, and nothing travels; use move fetch, or'
                    ' h = "least"'
                )
        if isinstance(self.move, FetchParameters) and "gpu" not in self.place.units:
            return (
                f"move fetch brings experts to a gpu, and place {self.place.kind} computes on"
                f" {', '.join(self.place.units)}; use place cheaper or hottest, or one_unit with unit gpu"
            )
        if isinstance(self.place, NdpParameters):
            others = [layout.kind for layout in self.layouts if not isinstance(layout, ExactParameters)]
            if others:
                return f"place ndp computes exact rows; found layout {others[0]}; use exact"
            if (reason := self._not_on_ndp(self.place)) is not None:
                return reason
        elif isinstance(self.move, SlicesParameters):
            return (
                f"move slices brings experts to the GPU of place ndp, and found place {self.place.kind}; use place ndp"
            )
        if isinstance(self.place, RanksParameters) and (reason := self._not_over_ranks()) is not None:
            return f"place {self.place.kind} {reason}"
        is_naive = isinstance(self.place, OneUnitParameters) and self.place.naive_launch
        dynamic = [layout for layout in self.layouts if not layout.static]
        if "npu" in self.place.units and not is_naive and any(map(_follows_the_busiest, dynamic)):
            return (
                'rows = "max" follows the busiest expert of a step, and an NPU takes frozen shapes only; give a number'
                " or a factor, or naive_launch = true, for which a graph of that size is taken to be there"
            )
        dynamic = [layout for layout in dynamic if not _follows_the_busiest(layout)]
        if "npu" in self.place.units and dynamic:
            return (
                f"layout {dynamic[0].kind} follows the routing, and an NPU takes frozen shapes only; use tiers,"
                " capacity or blocks, or another unit"
            )
        if is_naive and "npu" not in self.place.units:
            return f"naive_launch is Core ML's, which launches on an npu; found unit {self.place.units[0]}"
        if isinstance(self.place, ByCostParameters) and _provisions(self.decode):
            return (
                "skip_padding_blocks = false provisions blocks for all experts, and place by_cost splits them between"
                " two units; leave it out"
            )
        return self._problem_of_weights_that_travel()

    def _problem_of_weights_that_travel(self) -> str | None:
        predicts = isinstance(self.route, PredictedParameters)
        if isinstance(self.route, PredictedParameters):
            if (problem := self.route.problem()) is not None:
                return problem
            if isinstance(self.place, RanksParameters):
                return f"place {self.place.kind} lies over processes, and predictions are made in one; use route router"
            if self.route.executes == "router" and not _prefetches(self.move):
                return (
                    'executes = "router" takes predictions as hints of what to fetch, and nothing is fetched ahead;'
                    " use move two_buffers or cache with prefetch = true"
                )
        if _prefetches(self.move) and not predicts:
            return (
                f"{self.move.kind} fetches what was predicted, and route router predicts nothing; set prefetch = false"
            )
        if isinstance(self.move, TwoBuffersParameters) and not isinstance(self.place, OneUnitParameters):
            return f"two_buffers fills the memory of one unit, and place {self.place.kind} has others; use one_unit"
        return None

    def _not_on_ndp(self, place: NdpParameters) -> str | None:
        """Why what travels is not what the GPU computes, or None."""
        move = self.move
        if not place.uses_gpu:
            if isinstance(move, NothingParameters):
                return None
            return f"place ndp computes nothing on the GPU, and move {move.kind} brings it experts; leave move out"
        if not isinstance(move, SlicesParameters):
            return f"place ndp computes on the GPU what comes from its units; found move {move.kind}; use slices"
        if place.resident and not move.prefetch:
            return (
                "resident = true looks for experts in the GPU's memory, and nothing is kept there; set prefetch = true"
            )
        if move.prefetch and not place.resident:
            return "prefetch = true keeps experts in the GPU's memory, and none is computed there; set resident = true"
        return None

    def _not_over_ranks(self) -> str | None:
        """Why ranks would not compute these choices, or None."""
        lossy = [layout.kind for layout in self.layouts if not isinstance(layout, _OVER_RANKS)]
        if lossy:
            return f"drops no pair; found layout {lossy[0]}; use exact, blocks, selective or all_experts"
        if self.backbone != "cpu":
            return f"has attention on every rank; found backbone {self.backbone}"
        if not isinstance(self.route, RouterParameters) or not isinstance(self.move, NothingParameters):
            return "executes the router's choice, and keeps every expert on its rank; leave route and move out"
        return None

    def idle(self, given: Mapping[str, Set[str]]) -> str | None:
        """Why a parameter that was given would have no effect, or None."""
        found = idle(self.move, given["move"]) or idle(self.layout, given["layout"])
        found = found or idle(self.place, given["place"])
        if self.decode is not None and found is None:
            found = idle(self.layout, given["layout"], IN_PREFILL_ONLY) or idle(self.decode, given["decode"])
            found = found or idle(self.decode, given["decode"], IN_DECODING_ONLY)
        return found

    def build(self, name: str, context: BuildContext) -> Technique:
        if isinstance(self.place, ByCostParameters):
            # Graphs are as large as the model at whose size they are priced allows.
            context = replace(context, sizes=self.place.graph_sizes(context))
        apart_from = self.backbone if self.move.moves_weights else None
        context = replace(context, units=self.place.units, apart_from=apart_from)
        layout = self.layout.build(context)
        decode = layout if self.decode is None else self.decode.build(context)
        place = self.place.build(context, layout)
        in_decoding = self.layouts[-1]
        if isinstance(in_decoding, TiersParameters) and in_decoding.decode_graphs == "cpu":
            place = DecodesOn(Share((Piece("cpu"),), exact=True), place)
        elif isinstance(self.place, ByCostParameters) and _has_single_graphs(in_decoding):
            place = DecodesOn(Share((Piece("npu"),)), place)
        layouts: dict[ChunkPhase, Layout] = {"prefill": layout, "decode": decode}
        composed = ComposedTechnique(name, self.route.build(context), place, layouts, self.move.build(context), context)
        if isinstance(self.place, RanksParameters) and isinstance(place, Ranks) and context.sizes is not None:
            own = self.place
            options = own.sequence_parallel, own.router_gather, own.row_exchange
            is_exact = isinstance(self.layouts[-1], ExactParameters)
            return OverRanks(composed, place, context.sizes.hidden, *options, decodes_exactly=is_exact)
        return composed


_OVER_RANKS = (ExactParameters, BlocksParameters, SelectiveParameters, AllExpertsParameters)
"""Layouts in which a pair's row hangs on no other rank's tokens."""


def _prefetches(move: MoveParameters) -> bool:
    return isinstance(move, TwoBuffersParameters | CacheParameters) and move.prefetch


def _follows_the_busiest(layout: LayoutParameters) -> bool:
    return isinstance(layout, CapacityParameters) and layout.rows == "max"


def _has_single_graphs(layout: LayoutParameters) -> bool:
    return isinstance(layout, TiersParameters) and layout.decode_graphs == "single"


def _provisions(layout: LayoutParameters | None) -> bool:
    return isinstance(layout, BlocksParameters) and not layout.skip_padding_blocks
