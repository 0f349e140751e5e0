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
    n_dense_layers: int | None = None
    """Where dense and sparse layers mix; the first ones, where the plans of another model do not say which."""

    @property
    def attention_weights(self) -> int:
        """Values of the query, key, value and output projections of one layer."""
        return self.hidden * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)

    @property
    def expert_weights(self) -> int:
        """Values of one expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width

    @property
    def n_sparse_layers(self) -> int:
        """Raises `EngineError` where dense and sparse layers mix, and how many is not known."""
        if not self.n_experts or not self.dense_width:
            return self.n_layers if self.n_experts else 0
        if self.n_dense_layers is None:
            raise EngineError(f"{self.name} has dense and sparse layers, and its shape does not say how many of each")
        return self.n_layers - self.n_dense_layers

    @property
    def routed_bytes(self) -> int:
        """Of all experts that routers choose from. Raises as `n_sparse_layers`."""
        return self.n_sparse_layers * self.n_experts * self.expert_weights * self.bytes_per_value

    @property
    def parameters(self) -> Parameters:
        """Without norms and biases. Raises as `n_sparse_layers`."""
        n_sparse, vocabulary = self.n_sparse_layers, self.vocabulary * self.hidden
        sparse = self.hidden * self.n_experts + 3 * self.hidden * self.shared_width + self.top_k * self.expert_weights
        dense = 3 * self.hidden * self.dense_width
        active = self.n_layers * self.attention_weights + n_sparse * sparse + (self.n_layers - n_sparse) * dense
        others = n_sparse * (self.n_experts - self.top_k) * self.expert_weights
        return Parameters(
            active + vocabulary + others + (0 if self.ties_embedding else vocabulary), active + vocabulary
        )


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

QWEN3_235B_A22B = replace(
    QWEN3_30B_A3B, name="qwen3-235b-a22b", n_layers=94, hidden=4096, n_heads=64, expert_width=1536
)
"""Qwen/Qwen3-235B-A22B: 235 B parameters."""

MIXTRAL_8X7B = ModelShape("mixtral-8x7b", 32, 4096, 32, 8, 128, 0, 8, 2, 14336, 32000)
"""mistralai/Mixtral-8x7B-v0.1: 46.7 B parameters."""

DEEPSEEK_MOE_16B = ModelShape(
    "deepseek-moe-16b", 28, 2048, 16, 16, 128, 10944, 64, 6, 1408, 102400, shared_width=2816, n_dense_layers=1
)
"""deepseek-ai/deepseek-moe-16b-base: 16.4 B parameters, 66 x 27 experts with the shared ones (001, Table II)."""

GPT_OSS_20B = ModelShape("gpt-oss-20b", 24, 2880, 64, 8, 64, 0, 32, 4, 2880, 201088)
"""openai/gpt-oss-20b: 20.9 B parameters; two bytes a value here, as source 003 ran it, four bits in its checkpoint."""

GPT_OSS_120B = replace(GPT_OSS_20B, name="gpt-oss-120b", n_layers=36, n_experts=128)
"""openai/gpt-oss-120b: 116.8 B parameters."""

_NAMED = (
    PHI_3_5_MOE, PHI_TINY_MOE, QWEN3_30B_A3B, QWEN3_235B_A22B, MIXTRAL_8X7B, DEEPSEEK_MOE_16B, GPT_OSS_20B,
    GPT_OSS_120B,
)  # fmt: skip
NAMED_SHAPES = {shape.name: shape for shape in _NAMED}


def own_shape(name: str, config: ModelConfig) -> ModelShape:
    """The shape of the model that computes. Raises `EngineError` for latent attention, which is not priced here."""
    moe = config.moe
    if config.attention.latent is not None:
        raise EngineError(
            f"cannot price {config.architecture}: its attention is latent, and this schedule prices heads with keys of "
            "their own; measure it on the host, or price it as a shape of the same experts"
        )
    mixes = moe is not None and len(moe.sparse_layers) < config.n_layers
    return ModelShape(
        name=name,
        n_dense_layers=config.n_layers - len(moe.sparse_layers) if moe is not None and mixes else None,
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

    Raises as `ModelShape.n_sparse_layers`.
    """
    if shape.n_experts == 0:
        return None
    expert_bytes = shape.expert_weights * shape.bytes_per_value
    n_layers, hidden = shape.n_layers, shape.hidden
    experts = shape.n_experts, shape.top_k, hidden, shape.expert_width, expert_bytes
    return ModelSizes(*experts, n_layers, shape.n_sparse_layers, activation_bytes=shape.bytes_per_value)


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
