"""Seconds of the expert part of one layer ("MoE latency" of 001's Fig. 8, 10 and 11), by our techniques' own plans.

A technique makes the plan of one layer of a step, the schedule makes operations of it, and the timeline says when the
last of them ends. What the GPU does before and after, the same for all, is taken off: norms, attention, router, gather,
scatter. What is left is fetching, activations, experts and results.

Legend: T tokens, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from devices.models.operation import operation_seconds
from devices.models.sheet import Sheet
from devices.models.timeline import Timeline
from engines.dispatch import LayerExpert, Routing
from engines.pricing.costs import SheetCosts
from engines.pricing.priced_step import PricedStep
from engines.pricing.schedule import operations
from engines.pricing.shapes import ModelShape, sizes_of
from engines.pricing.travels import Travels
from engines.residency import Counts, Residency, Slots
from engines.techniques.base import Technique
from engines.techniques.choices import Choices
from engines.techniques.context import BuildContext, ChunkPhase, LayerInput
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.presets import preset_parameters
from engines.techniques.systems.preset import ON_GPU

GPU: Literal["gpu"] = "gpu"
ON_DEMAND, FIDDLER, MONDE = "moe-ondemand", "fiddler", "monde"
TP, TP_LB, TP_PRE, FULL = "ndp-tp", "ndp-tp-lb", "ndp-tp-pre", "ndp"
BASELINES, ABLATIONS = (ON_DEMAND, FIDDLER, MONDE), (TP, TP_LB, TP_PRE, FULL)
ARMS = (*BASELINES, *ABLATIONS)


@dataclass(frozen=True)
class Arm:
    """A technique on so many units. parameters: beyond the number of units."""

    name: str
    n_units: int
    parameters: tuple[tuple[str, Any], ...] = ()


class Stage:
    """One arm at one model's size. A step's seconds are those of one layer."""

    def __init__(self, arm: Arm, shape: ModelShape, sheet: Sheet, prefetched: int = 0) -> None:
        """prefetched: experts of each layer that the GPU keeps, in the arms that fetch ahead."""
        self._sheet = sheet
        self._shape = replace(shape, n_layers=1, n_dense_layers=None, dense_width=0, shared_width=0)
        sizes = sizes_of(self._shape)
        assert sizes is not None  # every model of the source has experts
        self._slots = prefetched if arm.name in (TP_PRE, FULL) else 0
        moe = SimpleNamespace(sparse_layers=(0,), n_experts=shape.n_experts)
        model: Any = SimpleNamespace(config=SimpleNamespace(moe=moe))
        context = BuildContext(512, sizes, None, SheetCosts(sheet, sizes), model)
        self._technique = _built(arm, context, self._slots)

    def seconds(self, ids_TK: NDArray[np.int64], phase: ChunkPhase = "decode", held: Sequence[int] = ()) -> float:
        """held: experts that lie in the GPU's memory already."""
        shape, asks = self._shape, self._technique.asks
        weights_TK = torch.full(ids_TK.shape, 1 / ids_TK.shape[1])
        residency = counts = None
        if asks.slots:
            slots = {
                unit: Slots(own.n, own.of, tuple(LayerExpert(0, e) for e in held) or own.from_start)
                for unit, own in asks.slots.items()
            }
            residency = Residency(1, shape.n_experts, shape.expert_width, slots)
        if asks.counts:
            counts = Counts(1, shape.n_experts)
        routing = Routing(torch.from_numpy(ids_TK), weights_TK, shape.n_experts)
        seen = LayerInput(0, phase, routing, residency=residency, counts=counts, prefill_left=0)
        n_tokens = len(ids_TK)
        listed = operations(
            PricedStep(n_tokens, n_tokens, phase), [self._technique.plan(seen)], shape, GPU, None, Travels(self._sheet)
        )
        timeline = Timeline(self._sheet)
        timeline.run(listed)
        others = (one for one in listed if one.unit == GPU and one.name != "expert FFN")
        return timeline.now_s() - sum(operation_seconds(self._sheet, one) for one in others)


def _built(arm: Arm, context: BuildContext, slots: int) -> Technique:
    if arm.name == ON_DEMAND:  # the preset of that name serves one CPU; on this machine the GPU fetches
        return Choices(ON_GPU, ExactParameters(), GPU, move=FetchParameters()).build(ON_DEMAND, context)
    kind = preset_parameters(arm.name)
    given: dict[str, Any] = dict(arm.parameters)
    if "ndps" in kind.model_fields:
        given["ndps"] = arm.n_units
    if slots:
        given["slots"] = slots
    return kind.model_validate(given).build(context)


class Spread(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float


def spread(values: Sequence[float]) -> Spread:
    """Of draws that are independent."""
    n = len(values)
    return Spread(float(np.mean(values)), float(np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else 0.0)


def with_ndp_clock(sheet: Sheet, hertz: float) -> Sheet:
    """The same machine with 64 multipliers a DIMM (Table I) at another clock, two FLOP each."""
    units: Mapping[str, Any] = sheet.units
    made = {}
    for name, unit in units.items():
        if name.startswith("ndp:"):
            roofline = unit.roofline
            flops = roofline.flops_per_s.model_copy(update={"value": 2 * 64 * hertz})
            unit = unit.model_copy(update={"roofline": roofline.model_copy(update={"flops_per_s": flops})})
        made[name] = unit
    return sheet.model_copy(update={"units": made})
