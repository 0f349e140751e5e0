"""The dispatch plan's second reader: one forward chunk becomes operations that a hardware model prices.

The first reader, `engines.model.experts`, computes the same plans. Pure functions: no clock, no model.

Order and partition follow §3.2 of 000-npumoe: norm, router, gather, padding, scatter and both residuals on the CPU;
attention and experts where the placement puts them. Where the backbone's unit takes norms too, as a GPU does, all these
are there. What is left out: embedding look-up, masks, sampling. A partial last chunk is priced at its own length
although a static graph would be padded to the full chunk. A sliding window is priced as attention to everything, which
a graph of fixed shape computes, unless the sheet prices scores apart: then what the mask hides is left out. What
travels: `engines.pricing.block`. Where the sheet says what the engine takes beside its kernels, for a step and for a
layer, that stands before them. Units that the sheet lacks are those that it says stand in for them.

Legend: T tokens of the chunk, L keys in the cache after it, H model width, I expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from devices.base import Unit
from devices.models.figures import Kernel, Roofline
from devices.models.operation import Operation
from devices.models.sheet import Sheet
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.pricing.block import Block, Travels, residual, row_bytes
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps
from engines.techniques.context import ChunkPhase

NUMBER_BYTES = 8
"""Of a token's or an expert's number, as engines keep them."""


@dataclass(frozen=True)
class PricedStep:
    """One forward chunk: T new tokens, L keys to attend to, the new ones included, each of n_sequences its own L."""

    n_tokens: int
    kv_length: int
    phase: ChunkPhase = "prefill"
    n_sequences: int = 1

    @property
    def seen_pairs(self) -> int:
        """Of queries and keys, those that causality leaves."""
        n_own = self.n_tokens // self.n_sequences
        return self.n_tokens * self.kv_length - self.n_tokens * (n_own - 1) // 2


def operations(
    step: PricedStep,
    plans: Sequence[DispatchPlan | None],
    shape: ModelShape,
    backbone: Unit,
    graph_bytes_limit: float | None,
    travels: Travels | None = None,
    n_before: int = 0,
) -> list[Operation]:
    """All layers of one forward chunk, without the LM head (`lm_head`), whose rows only the request knows.

    plans: one per layer of the model that computed, None for a dense layer. A priced shape with more layers reuses them
    in order, again from the first; one without dense layers reuses the sparse layers' plans only, and one with some
    has them first where the plans have none.
    backbone: the unit of attention and of what every token passes through; experts lie where the plans say.
    graph_bytes_limit: a static expert call with more weight bytes runs on the CPU. travels: of a sheet, and of the
    steps before; None of units that share one memory. n_before: operations before this step. Raises `EngineError` and
    `DeviceError` for plans that move weights or exchange activations where no link joins the units.
    """
    numbers = [i for i, plan in enumerate(plans) if plan is not None or shape.dense_width > 0]
    if not numbers:
        raise EngineError(f"nothing to price as {shape.name}: the step has {len(plans)} layers, none of them sparse")
    n_dense = 0 if None in plans else shape.n_dense_layers or 0
    sheet = None if travels is None else travels.sheet
    rest = unit_of_rest(sheet, backbone)
    backbone = backbone if sheet is None else sheet.computing(backbone)
    steps, block = Steps(n_before), Block(shape, rest, graph_bytes_limit, travels)
    of_step: Kernel = "decode_step" if step.phase == "decode" else "step"
    of_layer: Kernel = "decode_layer" if step.phase == "decode" else "layer"
    _add_engine(steps, of_step, rest, sheet, NUMBER_BYTES * step.n_tokens)
    for layer in range(shape.n_layers):
        reused = layer % len(numbers)
        plan = None if layer < n_dense else plans[numbers[reused]]
        chosen = 1 if plan is None else 1 + shape.top_k
        _add_engine(steps, of_layer, rest, sheet, NUMBER_BYTES * chosen * step.n_tokens)
        steps.add(norm(step, shape, rest))
        for operation in _attention(step, shape, backbone, sheet):
            steps.add(operation)
        steps.add(residual("attention residual", step.n_tokens, shape, rest))
        steps.add(norm(step, shape, rest))
        if plan is None:
            steps.add(_ffn("dense FFN", shape.dense_width, step, shape, backbone))
        else:
            later = {number: layer + i - reused for i, number in enumerate(numbers)}
            block.add_to(steps, plan, layer, later)
            if shape.shared_width:
                steps.add(_ffn("shared FFN", shape.shared_width, step, shape, backbone))
        steps.add(residual("residual", step.n_tokens, shape, rest))
    return steps.operations


def _add_engine(steps: Steps, kernel: Kernel, unit: Unit, sheet: Sheet | None, n_bytes: float) -> None:
    """Where the sheet says it. n_bytes: of the numbers of tokens and experts that it goes through."""
    if sheet is not None and unit in sheet.units and kernel in sheet.units[unit].kernels:
        steps.add(Operation("engine", unit, kernel, moved_bytes=n_bytes))


def unit_of_rest(sheet: Sheet | None, backbone: Unit) -> Unit:
    """Of norms, routers, gather, scatter and the head: the backbone's, where the sheet prices norms there."""
    computing = backbone if sheet is None else sheet.computing(backbone)
    unit = None if sheet is None else sheet.units.get(computing)
    return computing if unit is not None and unit.price("norm") is not None else "cpu"


def lm_head(n_rows: int, shape: ModelShape, unit: Unit = "cpu") -> Operation:
    """Final norm's rows to logits. With an NPU on the CPU: a vocabulary is among the matrices that gain nothing on the
    NPU (000 §2)."""
    weights = shape.hidden * shape.vocabulary
    return Operation("LM head", unit, "lm_head", flops=2.0 * n_rows * weights, weight_bytes=shape.head_bytes)


def norm(step: PricedStep, shape: ModelShape, unit: Unit) -> Operation:
    """Reads and writes T x H."""
    return Operation("norm", unit, "norm", moved_bytes=2.0 * row_bytes(shape) * step.n_tokens)


def _attention(step: PricedStep, shape: ModelShape, unit: Unit, sheet: Sheet | None) -> list[Operation]:
    own = None if sheet is None else sheet.units.get(unit)
    apart = own is not None and "scores" in own.kernels
    reads = own is not None and isinstance(own.price("attention"), Roofline)
    return attention(step, shape, unit, apart, reads)


def attention(step: PricedStep, shape: ModelShape, unit: Unit, apart: bool, reads: bool = False) -> list[Operation]:
    """Projections, and scores and values of T queries over L keys, masked ones included: the graph is dense.

    apart: two operations, and without what the mask hides. reads: the bytes of keys and values are told too, as they
    always are where scores stand apart; a fitted price has them in its figures.
    """
    n_keys, weight_bytes = step.n_sequences * step.kv_length, shape.attention_bytes
    projections, per_pair = shape.attention_work(step.n_tokens, n_keys, step.n_sequences)
    cache_bytes = float(n_keys * shape.cached_values * shape.bytes_per_value)
    if apart:
        scores = Operation("attention", unit, "scores", flops=per_pair * step.seen_pairs, moved_bytes=cache_bytes)
        return [Operation("attention", unit, "attention", flops=projections, weight_bytes=weight_bytes), scores]
    return [
        Operation(
            "attention",
            unit,
            "attention",
            flops=projections + per_pair * step.n_tokens * step.kv_length,
            weight_bytes=weight_bytes,
            moved_bytes=cache_bytes if reads else 0.0,
        )
    ]


def _ffn(name: str, width: int, step: PricedStep, shape: ModelShape, unit: Unit) -> Operation:
    """What every token passes through belongs to the backbone, so it runs where attention does (§5.1 on ANEMLL)."""
    weights = 3 * shape.hidden * width
    return Operation(
        name,
        unit,
        "expert_ffn",
        flops=2.0 * step.n_tokens * weights,
        weight_bytes=shape.dense_bytes(width),
    )
