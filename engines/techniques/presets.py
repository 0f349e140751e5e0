"""The systems of the sources, each a named choice of the four decisions with the unit of the backbone.

In a plan, `technique = { name = "npumoe" }` takes a preset, and any parameter of its choices may stand beside the name.
`technique = { name = "custom", place = { kind = ... }, layout = { kind = ... } }` spells the choices out.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, cast

from pydantic import Field, create_model, model_validator

from devices.base import Unit
from engines.profile import Learnt
from engines.techniques.base import (
    BuildContext,
    ChunkPhase,
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
from engines.techniques.idle import IN_DECODING_ONLY, IN_PREFILL_ONLY, changed, idle
from engines.techniques.layout.blocks import BlocksParameters
from engines.techniques.layout.capacity import CapacityParameters
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.layout.loads import AllExpertsParameters, SelectiveParameters
from engines.techniques.layout.tiers import TiersParameters
from engines.techniques.move.caches import CacheParameters, Evict
from engines.techniques.move.nothing import NothingParameters
from engines.techniques.move.two_buffers import TwoBuffersParameters
from engines.techniques.over_ranks import OverRanks
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
from results.records import Record

Backbone = Literal["cpu", "npu", "gpu"]
CALIBRATION_PROMPTS = 8
RouteChoice = Annotated[RouterParameters | PredictedParameters, Field(discriminator="kind")]
PlaceChoice = Annotated[
    OneUnitParameters
    | ShardsParameters
    | ByCostParameters
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
MoveChoice = Annotated[NothingParameters | TwoBuffersParameters | CacheParameters, Field(discriminator="kind")]


class Composed(Record):
    """Parameters of a technique that is made of choices."""

    technique: ClassVar[str]

    @property
    def choices(self) -> Choices:
        raise NotImplementedError

    backbone: Backbone
    """The unit of attention and of what every token passes through, on a machine that has several."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """Where experts are computed."""
        return tuple(dict.fromkeys((*self.choices.units("prefill"), *self.choices.units("decode"))))

    @property
    def loads_from_file(self) -> bool:
        return self.choices.move.loads_from_file

    @property
    def static_shapes(self) -> bool:
        return all(layout.static for layout in self.choices.layouts)

    @property
    def lossless(self) -> bool:
        return self.choices.lossless

    @property
    def wanted_prompts(self) -> int:
        return self.choices.calibration_prompts if self.learns else 0

    @property
    def learns(self) -> frozenset[Learnt]:
        return self.choices.learns

    def build(self, context: BuildContext) -> Technique:
        return self.choices.build(self.technique, context)

    def given(self, decision: str) -> Set[str]:
        """The parameters of a decision that are not what they would be of themselves."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _fits_together(self) -> Composed:
        choices = self.choices
        problem = choices.problem() or choices.idle({decision: self.given(decision) for decision in _DECISIONS})
        if problem is None and "calibration_prompts" in changed(self) and not choices.learns - {"estimator"}:
            problem = "calibration_prompts needs a choice that learns from prompts, and has no effect here; remove it"
        if problem is not None:
            raise ValueError(problem)
        return self


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
    def layouts(self) -> tuple[LayoutParameters, ...]:
        return (self.layout,) if self.decode is None else (self.layout, self.decode)

    @property
    def learns(self) -> frozenset[Learnt]:
        counts = self.move.needs_profile or any(layout.needs_profile for layout in self.layouts)
        counts = counts or isinstance(self.place, EplbParameters)
        return self.route.learns | (frozenset({"counts"}) if counts else frozenset())

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
        if self.move.loads_from_file and (not isinstance(self.place, OneUnitParameters) or self.place.unit != "cpu"):
            return (
                f"move {self.move.kind} loads experts from the checkpoint file into the memory of one cpu, and place"
                f" {self.place.kind} computes on {', '.join(self.place.units)}; use place one_unit with unit cpu"
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
                    " use move two_buffers with prefetch = true"
                )
        if _prefetches(self.move) and not predicts:
            return "two_buffers fetches what was predicted, and route router predicts nothing; set prefetch = false"
        if isinstance(self.move, TwoBuffersParameters) and not isinstance(self.place, OneUnitParameters):
            return f"two_buffers fills the memory of one unit, and place {self.place.kind} has others; use one_unit"
        return None

    def _not_over_ranks(self) -> str | None:
        """Why ranks would not compute these choices, or None."""
        lossy = [layout.kind for layout in self.layouts if not isinstance(layout, ExactParameters | BlocksParameters)]
        if lossy:
            return f"computes exact rows or blocks; found layout {lossy[0]}"
        if self.backbone != "cpu":
            return f"has attention on every rank; found backbone {self.backbone}"
        if not isinstance(self.route, RouterParameters) or not isinstance(self.move, NothingParameters):
            return "executes the router's choice, and keeps every expert on its rank; leave route and move out"
        return None

    def idle(self, given: Mapping[str, Set[str]]) -> str | None:
        """Why a parameter that was given would have no effect, or None."""
        found = idle(self.move, given["move"]) or idle(self.layout, given["layout"])
        if self.decode is not None and found is None:
            found = idle(self.layout, given["layout"], IN_PREFILL_ONLY) or idle(self.decode, given["decode"])
            found = found or idle(self.decode, given["decode"], IN_DECODING_ONLY)
        return found

    def build(self, name: str, context: BuildContext) -> Technique:
        if isinstance(self.place, ByCostParameters):
            # Graphs are as large as the model at whose size they are priced allows.
            context = replace(context, sizes=self.place.graph_sizes(context))
        context = replace(context, units=self.place.units)
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


def _prefetches(move: MoveParameters) -> bool:
    return isinstance(move, TwoBuffersParameters) and move.prefetch


def _follows_the_busiest(layout: LayoutParameters) -> bool:
    return isinstance(layout, CapacityParameters) and layout.rows == "max"


def _has_single_graphs(layout: LayoutParameters) -> bool:
    return isinstance(layout, TiersParameters) and layout.decode_graphs == "single"


def _provisions(layout: LayoutParameters | None) -> bool:
    return isinstance(layout, BlocksParameters) and not layout.skip_padding_blocks


class CustomParameters(Composed):
    """A technique of no source: its choices stand in the plan."""

    technique: ClassVar[str] = "custom"

    route: RouteChoice = RouterParameters()
    place: PlaceChoice = OneUnitParameters()
    layout: LayoutChoice = ExactParameters()
    decode: LayoutChoice | None = None
    """The layout of decode steps, where it is another."""
    move: MoveChoice = NothingParameters()
    backbone: Backbone = "cpu"
    calibration_prompts: int = Field(default=CALIBRATION_PROMPTS, ge=1, le=100_000)

    @property
    def choices(self) -> Choices:
        return Choices(
            self.place, self.layout, self.backbone, self.decode, self.route, self.move, self.calibration_prompts
        )

    def given(self, decision: str) -> Set[str]:
        own = getattr(self, decision)
        return set() if own is None else changed(own)


@dataclass(frozen=True)
class Preset:
    """A system of a source. source: which, and where in it."""

    name: str
    what: str
    source: str
    choices: Choices
    fixed: tuple[str, ...] = ()
    """Parameters that are not exposed: of another value it would be another preset, or they have no effect in it."""

    @property
    def lossless(self) -> bool:
        return self.choices.lossless


_CPU, _GPU, _NPU = (OneUnitParameters(unit=unit) for unit in ("cpu", "gpu", "npu"))
_WHERE = ("unit", "naive_launch", "backbone")
"""What parts the systems of Table 2."""
_AHEAD = TwoBuffersParameters()
_NPUMOE, _NEURON, _SPECULATING = "000 NPUMoE", "004 Neuron MoE guide", "003 Speculating experts"
_NDP = "001 GPU-NDP"
_CACHES: dict[Evict, str] = {
    "lru": "a cache of experts in each layer; the one used longest ago goes",
    "lfu": "a cache of experts in each layer; the one used least goes",
    "static": "the most chosen experts of each layer stay in memory, the others are loaded when they are called",
}
PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "dropless",
            "tokens grouped by expert, nothing dropped; equals the oracle",
            "every source's yardstick",
            Choices(_CPU, ExactParameters()),
        ),
        Preset("coreml-cpu", "all on the CPU", f"{_NPUMOE}, Table 2", Choices(_CPU, ExactParameters()), _WHERE),
        Preset(
            "coreml-naive",
            "a graph an expert on the NPU, as large as the busiest needs (of one row in decoding); Core ML decides",
            f"{_NPUMOE}, Table 2",
            Choices(
                OneUnitParameters(unit="npu", naive_launch=True),
                CapacityParameters(rows="max", overflow="none", renormalise_survivors=False),
            ),
            _WHERE,
        ),
        Preset(
            "anemll",
            "attention on the NPU, experts on the CPU",
            f"{_NPUMOE}, Table 2",
            Choices(_CPU, ExactParameters(), "npu"),
            _WHERE,
        ),
        Preset("gpu", "all on the GPU", f"{_NPUMOE}, Table 8", Choices(_GPU, ExactParameters(), "gpu"), _WHERE),
        Preset(
            "npumoe-base",
            "one fixed shape for every expert on the NPU, overflow pruned by saliency",
            f"{_NPUMOE}, §5.7",
            Choices(
                _NPU,
                CapacityParameters(factor=2.0, of="chunk", align=16, overflow="saliency", renormalise_survivors=False),
                "npu",
            ),
        ),
        Preset(
            "npumoe-t",
            "calibrated static capacity tiers, overflow pruned by saliency",
            f"{_NPUMOE}, §4.1",
            Choices(_NPU, TiersParameters(), "npu"),
            fixed=("grouped", "group_size", "graph_bytes"),
        ),
        Preset(
            "npumoe-tg",
            "tiers, and experts of one tier share a graph",
            f"{_NPUMOE}, §4.2",
            Choices(_NPU, TiersParameters(grouped=True), "npu"),
            fixed=("grouped",),
        ),
        Preset(
            "npumoe",
            "tiers in graphs, hot ones on the NPU, cold ones on the CPU",
            f"{_NPUMOE}, §4.3",
            Choices(ByCostParameters(), TiersParameters(grouped=True), "npu"),
        ),
        Preset(
            "blockwise",
            "blocks of equal rows, one expert each; nothing dropped",
            f"{_NEURON}, blockwise",
            Choices(_CPU, BlocksParameters(), decode=SelectiveParameters()),
        ),
        Preset(
            "dropping",
            "a capacity factor; later tokens overflow, surviving weights are scaled up",
            f"{_NEURON}, dropping",
            Choices(_CPU, CapacityParameters()),
        ),
        Preset(
            "selective",
            "loads the unique experts of a step, or all where most are needed",
            f"{_NEURON}, selective loading",
            Choices(_CPU, SelectiveParameters()),
        ),
        Preset(
            "all-experts",
            "every expert computes every token",
            f"{_NEURON}, all-experts",
            Choices(_CPU, AllExpertsParameters()),
        ),
        Preset(
            "on-demand",
            "experts lie on the host; each is fetched when its layer asks for it",
            f"{_SPECULATING}, §5.1",
            Choices(_GPU, ExactParameters(), "gpu", move=TwoBuffersParameters(prefetch=False)),
            fixed=(
                "naive_launch",
                "prefetch",
            ),
        ),
        Preset(
            "prefetch-hint",
            "predicted experts are fetched a layer ahead, missed ones on demand; equals the oracle",
            f"{_SPECULATING}, §4",
            Choices(_GPU, ExactParameters(), "gpu", route=PredictedParameters(executes="router"), move=_AHEAD),
            fixed=("naive_launch", "prefetch", "executes", "speculate_prefill"),
        ),
        Preset(
            "router-pf",
            "experts as the next router says of a guess at its input: fetched a layer ahead and executed",
            f"{_SPECULATING}, §4",
            Choices(_GPU, ExactParameters(), "gpu", route=PredictedParameters(), move=_AHEAD),
            fixed=("naive_launch", "prefetch", "executes", "predictor"),
        ),
        Preset(
            "est-pf",
            "experts as a trained estimator says: fetched a layer ahead and executed",
            f"{_SPECULATING}, §6",
            Choices(_GPU, ExactParameters(), "gpu", route=PredictedParameters(predictor="estimator"), move=_AHEAD),
            fixed=("naive_launch", "prefetch", "executes", "predictor", "source"),
        ),
        Preset(
            "hybrid-pf",
            "the estimator for layers that it tells better than their router; fetched a layer ahead and executed",
            f"{_SPECULATING}, §6",
            Choices(_GPU, ExactParameters(), "gpu", route=PredictedParameters(predictor="hybrid"), move=_AHEAD),
            fixed=("naive_launch", "prefetch", "executes", "predictor", "source"),
        ),
        Preset(
            "tensor-parallel",
            "every expert in slices over processes, results added",
            f"{_NEURON}, tensor parallelism",
            Choices(TensorParallelParameters(), ExactParameters()),
        ),
        Preset(
            "expert-parallel",
            "experts dealt to processes; rows travel to them and back",
            f"{_NEURON}, expert parallelism",
            Choices(ExpertParallelParameters(), ExactParameters()),
        ),
        Preset(
            "tp-ep",
            "experts dealt to groups of processes, in slices inside a group",
            f"{_NEURON}, combined TP and EP",
            Choices(TpEpParameters(), ExactParameters()),
        ),
        Preset(
            "eplb",
            "experts dealt to processes by their load, busy ones in several",
            f"{_NEURON}, EPLB; DeepSeek's packing",
            Choices(EplbParameters(), ExactParameters()),
        ),
        Preset(
            "moe-ondemand",
            "the first experts of each layer stay in memory, the others are loaded when they are called",
            f"{_NDP}, baselines",
            Choices(_CPU, ExactParameters(), move=CacheParameters(evict="static", stay="first")),
            fixed=("evict", "stay", "unit", "naive_launch"),
        ),
        *(
            Preset(
                name,
                what,
                "the caches that 001 and 003 compare themselves with",
                Choices(_CPU, ExactParameters(), move=CacheParameters(evict=name)),
                fixed=("evict", "unit", "naive_launch", *(() if name == "static" else ("stay",))),
            )
            for name, what in _CACHES.items()
        ),
    )
}

_DECISIONS = ("route", "place", "layout", "decode", "move")


@cache
def preset_parameters(name: str) -> type[Composed]:
    """The record of a preset: every parameter of its choices, with the preset's values as defaults."""
    preset = PRESETS[name]
    fields: dict[str, Any] = {}
    for decision in _DECISIONS:
        own = cast(Record | None, getattr(preset.choices, decision))
        if own is None:
            continue
        for field_name, field in type(own).model_fields.items():
            if field_name not in ("kind", *preset.fixed):
                changed = field._copy()
                changed.default = getattr(own, field_name)
                fields[field_name] = (field.annotation, changed)
    backbone = preset.choices.backbone
    fields["backbone"] = (Literal[backbone] if "backbone" in preset.fixed else Backbone, backbone)
    if preset.choices.learns and "estimator" not in preset.choices.learns:
        fields["calibration_prompts"] = (int, Field(CALIBRATION_PROMPTS, ge=1, le=100_000))
    made = create_model(f"{name} parameters", __base__=_PresetParameters, **fields)
    made.technique = name
    return made


class _PresetParameters(Composed):
    @property
    def choices(self) -> Choices:
        preset = PRESETS[self.technique]
        chosen: dict[str, Any] = {}
        for decision in _DECISIONS:
            own = getattr(preset.choices, decision)
            if own is None:
                continue
            kind = type(own)
            names = [name for name in kind.model_fields if name != "kind"]
            chosen[decision] = kind(**{name: getattr(self, name, getattr(own, name)) for name in names})
        return preset.choices._replace(
            **chosen,
            backbone=self.backbone,
            calibration_prompts=getattr(self, "calibration_prompts", CALIBRATION_PROMPTS),
        )

    def given(self, decision: str) -> Set[str]:
        return changed(self)


DroplessParameters = preset_parameters("dropless")


def dropless() -> Technique:
    """What the model computes of itself, for whoever needs its answers and no arm."""
    return PRESETS["dropless"].choices.build("dropless", BuildContext(chunk=1))
