"""Sizes of models that decide what they cost: of the one that computes, and of published ones by name.

Facts of their config.json files: no weights are needed to price them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

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
