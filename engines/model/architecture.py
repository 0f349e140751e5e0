"""The architecture of a model as data: what the one transformer of this engine has to compute.

Every family is a choice of these parts. A part names a mathematical difference, never a model: a family that differs in
nothing new is a new line in `engines.model.families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engines.model.rope_config import RopeConfig
from engines.model.spans import Span

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class GatedUnit:
    """How gate and up are joined: activation(gate) * up, with up <= limit, -limit <= up, gate <= limit where clamped.

    With `alpha`, the activation is gate * sigmoid(alpha * gate) and up is raised by 1 (GPT-OSS).
    """

    activation: Activation = "silu"
    alpha: float | None = None
    limit: float | None = None


SWIGLU = GatedUnit()


@dataclass(frozen=True)
class NormConfig:
    """RMS norm, or layer norm with a bias. `from_one`: files hold the weight's distance from 1 (Gemma)."""

    kind: Literal["rms", "layer"]
    eps: float
    from_one: bool = False


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2 §2.1): keys and values are expanded from one small vector per token.

    kv_rank: width of that vector, which is what is cached, beside one turned key of rope_dim for all heads. q_rank:
    width of the queries' own bottleneck, None for a plain projection. A query has nope_dim + rope_dim features.
    """

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Temperature:
    """Llama 4, layers without rope: queries at position p grow by 1 + strength * log(1 + floor((p + 1) / floor))."""

    floor_tokens: float
    strength: float


@dataclass(frozen=True)
class AttentionConfig:
    """scale multiplies the scores. clip: q, k and v are clamped to it. softcap: scores become cap * tanh(score / cap).

    qk_norm: over each head, over all heads at once, or an L2 norm without weight that follows rope.
    sinks: each head has one learnt score that takes part in the softmax and carries no value.
    spans: per layer, None for all that is past. rope_layers: which layers turn queries and keys.
    """

    scale: float
    qkv_bias: bool
    out_bias: bool
    qk_norm: Literal["head", "all heads", "l2"] | None
    sinks: bool
    softcap: float | None
    clip: float | None
    spans: tuple[Span | None, ...]
    rope_layers: tuple[bool, ...]
    temperature: Temperature | None
    latent: LatentConfig | None


@dataclass(frozen=True)
class RouterConfig:
    """From scores to choice to weights; see `engines.model.router`.

    n_groups, top_groups: choose inside the best groups only. group_score: a group is as good as its best expert, or as
    its two best together. normalise: weights add up to 1. scale: applied last. jitter: sparsemixer's epsilon.
    """

    scoring: Literal["softmax", "sigmoid", "softmax of chosen", "sigmoid of chosen", "sparsemixer"]
    top_k: int
    normalise: bool = False
    scale: float = 1.0
    n_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "two best"] = "best"
    has_bias: bool = False
    """A learnt bias on the logits."""
    has_correction: bool = False
    """A bias on the scores that steers the choice and not the weights (DeepSeek-V3 §2.1.2)."""
    jitter: float = 0.0

    @property
    def weights_add_up(self) -> bool:
        """Whether a token's weights add up to the same for every token: to 1, times the scale."""
        return self.normalise or self.scoring == "softmax of chosen"


@dataclass(frozen=True)
class SharedExpertConfig:
    """Experts that every token passes through, as one of their joint width. gated: times sigmoid(x . gate)."""

    width: int
    gated: bool


@dataclass(frozen=True)
class MoeConfig:
    """The sparse layers. expert_width is the inner width of one expert, in features."""

    n_experts: int
    expert_width: int
    router: RouterConfig
    shared: SharedExpertConfig | None
    unit: GatedUnit
    expert_bias: bool
    weights_input: bool
    """The router's weight multiplies an expert's input, not its output (Llama 4)."""
    mxfp4: bool
    """The files hold the experts as 4-bit blocks (`engines.model.mxfp4`)."""
    sparse_layers: tuple[int, ...]

    @property
    def top_k(self) -> int:
        return self.router.top_k


@dataclass(frozen=True)
class TensorNames:
    """How a family's checkpoints call their tensors; `E` stands for the expert's number."""

    root: str = ""
    """Before "model." and "lm_head." (Llama 4's text model lies inside a larger one)."""
    ignored_prefixes: tuple[str, ...] = ()
    """Of tensors that belong to the larger model only."""
    fused_qkv: bool = False
    fused_dense: bool = False
    """Gate and up of a dense layer are one tensor."""
    mlp_norm: str = "post_attention_layernorm"
    after_attention_norm: str | None = None
    """A norm on the attention block's output, before the residual; and the same for the feed-forward block."""
    after_mlp_norm: str | None = None
    mlp: str = "mlp"
    router: str = "gate"
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    stacked_experts: Literal["halves", "interleaved"] | None = None
    """All experts in one tensor [E, in, out]: gate then up, or gate and up in turns. None: a tensor for each."""
    shared: str = "shared_experts"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in features, tokens and layers; `weight_dtype` is what the files hold."""

    architecture: str
    hidden: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    """Features of a query; of a value too, except in latent attention."""
    dense_width: int
    vocabulary_size: int
    """Rows of the embedding, which may be more than the tokenizer's ids."""
    max_length: int
    norm: NormConfig
    rope: RopeConfig
    attention: AttentionConfig
    unit: GatedUnit
    """Of dense layers and shared experts."""
    embedding_scale: float
    logit_softcap: float | None
    head_bias: bool
    tie_embeddings: bool
    moe: MoeConfig | None
    names: TensorNames
    ignored_layers: tuple[int, ...]
    """Numbers of layers that the files hold beyond the model, which predict tokens further ahead while training."""
    weight_dtype: torch.dtype
    fp8_block: tuple[int, int] | None
    """Rows and columns that share a scale, where the layers' projections are stored in FP8."""
    eos_token_ids: tuple[int, ...]
    """From generation_config.json where the model brings one, else from config.json; empty where that names none."""
    note: str | None
    """What a reader must know before believing an accuracy (`joulebench_note`), such as "random weights"."""

    def is_sparse(self, layer: int) -> bool:
        return self.moe is not None and layer in self.moe.sparse_layers
