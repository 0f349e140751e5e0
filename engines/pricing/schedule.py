"""The dispatch plan's second reader: one forward chunk becomes operations that a hardware model prices.

The first reader, `engines.model.experts`, computes the same plans. Pure functions: no clock, no sheet, no model.

Order and partition follow §3.2 of 000-npumoe: norm, router, gather, padding, scatter and both residuals on the CPU;
attention and experts where the placement puts them. What is left out: embedding look-up, masks, sampling. A partial
last chunk is priced at its own length although a static graph would be padded to the full chunk. A sliding window is
priced as attention to everything, which a graph of fixed shape computes.

Legend: T tokens of the chunk, L keys in the cache after it, H model width, I expert width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from devices.base import Unit
from devices.models.operation import Operation
from engines.calls import ExpertCall
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.model_config import ModelConfig
from engines.techniques.context import ModelSizes


class Parameters(NamedTuple):
    """Values of all matrices, and of those that one token meets: its row of the embedding is looked up, not counted."""

    total: int
    active: int


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide the price of a model. n_experts 0: no sparse layer; dense_width 0: no dense layer.

    Activations and weights take `bytes_per_value` each: 2, as all figures of the source are FP16.
    """

    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    dense_width: int
    n_experts: int
    top_k: int
    expert_width: int
    vocabulary: int
    bytes_per_value: int = 2
    shared_width: int = 0
    """Joint width of the experts that every token passes through; 0: none."""
    ties_embedding: bool = False
    """Whether the head is the embedding."""

    @property
    def attention_weights(self) -> int:
        """Values of the query, key, value and output projections of one layer."""
        return self.hidden * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)

    @property
    def expert_weights(self) -> int:
        """Values of one expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width

    @property
    def parameters(self) -> Parameters:
        """Without norms and biases. Raises `EngineError` where dense and sparse layers mix: how many is not known."""
        if self.n_experts and self.dense_width:
            raise EngineError(f"{self.name} has dense and sparse layers, and its shape does not say how many of each")
        vocabulary = self.vocabulary * self.hidden
        every_token = self.attention_weights + self.hidden * self.n_experts
        every_token += 3 * self.hidden * (self.dense_width + self.shared_width)
        active = self.n_layers * (every_token + self.top_k * self.expert_weights) + vocabulary
        others = self.n_layers * (self.n_experts - self.top_k) * self.expert_weights
        return Parameters(active + others + (0 if self.ties_embedding else vocabulary), active)


PHI_3_5_MOE = ModelShape(
    name="phi-3.5-moe",
    n_layers=32,
    hidden=4096,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    dense_width=0,
    n_experts=16,
    top_k=2,
    expert_width=6400,
    vocabulary=32064,
)
"""microsoft/Phi-3.5-MoE-instruct: 41.9 B parameters, one expert 150 MiB in FP16 (§5.1)."""

PHI_TINY_MOE = replace(PHI_3_5_MOE, name="phi-tiny-moe", n_heads=16, n_kv_heads=4, expert_width=448)
"""microsoft/Phi-tiny-MoE-instruct: 3.8 B parameters."""

QWEN3_30B_A3B = ModelShape(
    name="qwen3-30b-a3b",
    n_layers=48,
    hidden=2048,
    n_heads=32,
    n_kv_heads=4,
    head_dim=128,
    dense_width=0,
    n_experts=128,
    top_k=8,
    expert_width=768,
    vocabulary=151936,
)
"""Qwen/Qwen3-30B-A3B: 30.5 B parameters."""

NAMED_SHAPES = {shape.name: shape for shape in (PHI_3_5_MOE, PHI_TINY_MOE, QWEN3_30B_A3B)}


@dataclass(frozen=True)
class PricedStep:
    """One forward chunk: T new tokens, L keys to attend to, the new ones included."""

    n_tokens: int
    kv_length: int


def own_shape(name: str, config: ModelConfig) -> ModelShape:
    """The shape of the model that computes. Raises `EngineError` for latent attention, which is not priced here."""
    moe = config.moe
    if config.attention.latent is not None:
        raise EngineError(
            f"cannot price {config.architecture}: its attention is latent, and this schedule prices heads with keys of "
            "their own; measure it on the host, or price it as a shape of the same experts"
        )
    return ModelShape(
        name=name,
        n_layers=config.n_layers,
        hidden=config.hidden,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        dense_width=config.dense_width if moe is None or len(moe.sparse_layers) < config.n_layers else 0,
        n_experts=moe.n_experts if moe is not None else 0,
        top_k=moe.top_k if moe is not None else 0,
        expert_width=moe.expert_width if moe is not None else 0,
        vocabulary=config.vocabulary_size,
        shared_width=moe.shared.width if moe is not None and moe.shared is not None else 0,
        ties_embedding=config.tie_embeddings,
    )


def sizes_of(shape: ModelShape) -> ModelSizes | None:
    """What a technique is told of a model that is priced at this shape; None of a dense one.

    All layers count as sparse: an engine puts the numbers of the model that it computes in their place.
    """
    if shape.n_experts == 0:
        return None
    expert_bytes = shape.expert_weights * shape.bytes_per_value
    n_layers, hidden = shape.n_layers, shape.hidden
    experts = shape.n_experts, shape.top_k, hidden, shape.expert_width, expert_bytes
    return ModelSizes(*experts, n_layers, n_layers, activation_bytes=shape.bytes_per_value)


def priced_shape(name: str, config: ModelConfig) -> ModelShape:
    """A named shape at which the routing of `config`'s model is priced.

    Routing carries over only between models that choose K of E alike: raises `EngineError` when E or K differ, or when
    the name is not known.
    """
    if name not in NAMED_SHAPES:
        raise EngineError(f"no shape {name!r} to price at; available: {', '.join(NAMED_SHAPES)}")
    shape = NAMED_SHAPES[name]
    found = (config.moe.n_experts, config.moe.top_k) if config.moe is not None else (0, 0)
    if found != (shape.n_experts, shape.top_k):
        raise EngineError(
            f"cannot price this model as {name}: it has {found[0]} experts, top-{found[1]}, {name} has "
            f"{shape.n_experts}, top-{shape.top_k}; route with a model of the same E and K"
        )
    return shape


def operations(
    step: PricedStep,
    plans: Sequence[DispatchPlan | None],
    shape: ModelShape,
    backbone: Unit,
    graph_bytes_limit: float | None,
) -> list[Operation]:
    """All layers of one forward chunk, without the LM head (`lm_head`), whose rows only the request knows.

    plans: one per layer of the model that computed, None for a dense layer. A priced shape with more layers reuses them
    in order, again from the first; one without dense layers reuses the sparse layers' plans only.
    backbone: the unit of attention and of what every token passes through; experts lie where the plans say.
    graph_bytes_limit: a static expert call with more weight bytes runs on the CPU. Raises `EngineError` for plans that
    move weights or exchange activations: on unified memory there is no link to price.
    """
    reused = [plan for plan in plans if plan is not None] if shape.dense_width == 0 else list(plans)
    if not reused:
        raise EngineError(f"nothing to price as {shape.name}: the step has {len(plans)} layers, none of them sparse")
    priced: list[Operation] = []
    for layer in range(shape.n_layers):
        plan = reused[layer % len(reused)]
        priced += [
            _norm(step, shape),
            _attention(step, shape, backbone),
            _residual("attention residual", step, shape),
            _norm(step, shape),
        ]
        if plan is None:
            priced += [_ffn("dense FFN", shape.dense_width, step, shape, backbone)]
        else:
            priced += _moe_block(plan, shape, graph_bytes_limit)
            if shape.shared_width:
                priced += [_ffn("shared FFN", shape.shared_width, step, shape, backbone)]
        priced += [_residual("residual", step, shape)]
    return priced


def lm_head(n_rows: int, shape: ModelShape) -> Operation:
    """Final norm's rows to logits. On the CPU: a vocabulary is among the matrices that gain nothing on the NPU (§2)."""
    weights = shape.hidden * shape.vocabulary
    return Operation(
        "LM head", "cpu", "lm_head", flops=2.0 * n_rows * weights, weight_bytes=weights * shape.bytes_per_value
    )


def _norm(step: PricedStep, shape: ModelShape) -> Operation:
    """Reads and writes T x H."""
    return Operation("norm", "cpu", "norm", moved_bytes=2.0 * _row_bytes(shape) * step.n_tokens)


def _attention(step: PricedStep, shape: ModelShape, unit: Unit) -> Operation:
    """Projections, and scores and values of T queries over L keys, masked ones included: the graph is dense."""
    projections = 2.0 * step.n_tokens * shape.attention_weights
    scores = 4.0 * step.n_tokens * step.kv_length * shape.n_heads * shape.head_dim
    return Operation(
        "attention",
        unit,
        "attention",
        flops=projections + scores,
        weight_bytes=shape.attention_weights * shape.bytes_per_value,
    )


def _ffn(name: str, width: int, step: PricedStep, shape: ModelShape, unit: Unit) -> Operation:
    """What every token passes through belongs to the backbone, so it runs where attention does (§5.1 on ANEMLL)."""
    weights = 3 * shape.hidden * width
    return Operation(
        name,
        unit,
        "expert_ffn",
        flops=2.0 * step.n_tokens * weights,
        weight_bytes=weights * shape.bytes_per_value,
    )


def _residual(name: str, step: PricedStep, shape: ModelShape) -> Operation:
    """The sum that ends the MoE block is the row of Table 4; the one after attention is in none of its rows."""
    return Operation(name, "cpu", "residual", moved_bytes=_row_bytes(shape) * step.n_tokens)


def _moe_block(plan: DispatchPlan, shape: ModelShape, graph_bytes_limit: float | None) -> list[Operation]:
    """Router to scatter, as the rows of Table 4. One after the other but for calls that overlap."""
    if len(plan.transfers):
        links = sorted({f"{source} to {target}" for source, target in plan.transfers.links})
        raise EngineError(
            f"the plan moves weights from {', '.join(links)}, but the modelled machine has one unified memory; "
            "use a technique without offloading there"
        )
    if plan.exchanges:
        units = sorted({unit for exchange in plan.exchanges for unit in exchange.units})
        raise EngineError(
            f"{', '.join(units)} send each other activations, and the modelled machine has no link between them; "
            "use a technique on units of one memory"
        )
    row_bytes = _row_bytes(shape)
    calls = list(plan.calls)
    gathering = [call for call in calls if call.kind.is_first_slice]
    valid_static, valid_dynamic = (
        sum(call.n_valid for call in gathering if call.static is static) for static in (True, False)
    )
    padded = sum(call.n_rows - call.n_valid for call in gathering if not call.kind.skips_padding)
    block = [
        Operation("router", "cpu", "router", flops=2.0 * plan.n_tokens * shape.hidden * shape.n_experts),
        Operation("gather", "cpu", "gather_dynamic", moved_bytes=row_bytes * valid_dynamic),
        Operation("gather", "cpu", "gather_static", moved_bytes=row_bytes * valid_static),
        Operation("padding", "cpu", "padding", moved_bytes=row_bytes * padded),
        *(_expert_call(call, shape, graph_bytes_limit) for call in calls if call.n_rows > 0),
        Operation("scatter", "cpu", "scatter", moved_bytes=row_bytes * (valid_static + valid_dynamic)),
    ]
    return [operation for operation in block if operation.flops > 0 or operation.moved_bytes > 0]


def _expert_call(call: ExpertCall, shape: ModelShape, graph_bytes_limit: float | None) -> Operation:
    """One launch of the call's experts. The NPU takes static shapes below the graph limit only (§4.1, §4.2).

    What it does not take, the CPU does.
    """
    width, part = call.kind.width, call.kind.hidden
    columns = shape.expert_width if width is None else width.end - width.first
    weights = 3 * (shape.hidden if part is None else part.end - part.first) * columns
    graph_bytes = weights * shape.bytes_per_value * len(call.experts)
    is_small = graph_bytes_limit is None or graph_bytes <= graph_bytes_limit
    runs = call.unit != "npu" or (call.static and is_small)
    return Operation(
        "expert FFN",
        call.unit if runs else "cpu",
        "expert_ffn",
        flops=2.0 * call.n_rows * weights,
        weight_bytes=weights * shape.bytes_per_value * call.n_weight_loads,
        naive_launch=call.kind.naive_launch and runs,
        alongside=call.kind.overlaps,
    )


def _row_bytes(shape: ModelShape) -> float:
    return float(shape.hidden * shape.bytes_per_value)
