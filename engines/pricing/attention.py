"""Attention of one layer in one step, as operations that a hardware model prices.

A layer that sees a window (`ModelShape.spans`) reads and multiplies the keys from the first that one of the step's
queries sees: T - 1 + W of a window of W that slides, or all where there are fewer. What the mask hides of these is
computed too, unless the sheet prices scores apart. The cache holds all positions of every layer, as the engine's does.
An NPU's graph has fixed shapes: it computes all positions and masks what the window leaves out.
"""

from __future__ import annotations

from devices.base import Unit
from devices.models.figures import Roofline
from devices.models.operation import Operation
from devices.models.sheet import Sheet
from engines.model.spans import Span
from engines.pricing.priced_step import PricedStep
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import made


def attention_on(
    step: PricedStep, shape: ModelShape, unit: Unit, sheet: Sheet | None, span: Span | None
) -> list[Operation]:
    """As the sheet prices that unit; span: of the layer."""
    own = None if sheet is None else sheet.units.get(unit)
    apart = own is not None and "scores" in own.kernels
    reads = own is not None and isinstance(own.price("attention"), Roofline)
    tile = 1 if own is None or own.query_tile is None else int(own.query_tile.value)
    return attention(step, shape, unit, apart, reads, tile, None if unit == "npu" else span)


def attention(
    step: PricedStep,
    shape: ModelShape,
    unit: Unit,
    apart: bool,
    reads: bool = False,
    query_tile: int = 1,
    span: Span | None = None,
) -> list[Operation]:
    """Projections, and scores and values of T queries over the keys of their span, masked ones included: the graph is
    dense.

    apart: two operations, and without what the mask hides from query_tile queries at a time; projections have the rows
    that lie between products too. reads: the bytes of keys and values are told too, as they always are where scores
    stand apart; a fitted price has them in its figures.
    """
    n_of_each, weight_bytes = step.n_keys(span), shape.attention_bytes
    n_keys = step.n_sequences * n_of_each
    projections, per_pair = shape.attention_work(step.n_tokens, n_keys, step.n_sequences)
    cache_bytes = float(n_keys * shape.cached_values * shape.bytes_per_value)
    if apart:
        pairs = step.met_pairs(query_tile, span)
        scores = made("attention", unit, "scores", flops=per_pair * pairs, moved_bytes=cache_bytes)
        between = float(step.n_tokens * shape.attention_values * shape.bytes_per_value)
        work = {"flops": projections, "weight_bytes": weight_bytes, "moved_bytes": between}
        return [made("attention", unit, "attention", **work), scores]
    return [
        made(
            "attention",
            unit,
            "attention",
            flops=projections + per_pair * step.n_tokens * n_of_each,
            weight_bytes=weight_bytes,
            moved_bytes=cache_bytes if reads else 0.0,
        )
    ]
