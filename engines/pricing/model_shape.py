"""Sizes of a model that decide what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from engines.errors import EngineError
from engines.model.spans import Span


class Parameters(NamedTuple):
    """Values of all matrices, and of those that one token meets: its row of the embedding is looked up, not counted."""

    total: int
    active: int


class WeightBits(NamedTuple):
    """Bits that a stored weight takes, scales of narrow forms counted, by component: routed experts, other feed-forward
    blocks, attention, head. The embedding is looked up, and routers and norms stay as they are."""

    experts: float = 16.0
    dense: float = 16.0
    attention: float = 16.0
    head: float = 16.0


class LatentShape(NamedTuple):
    """Latent attention: keys and values are made of kv_rank values a token, which are what is cached, beside one key of
    rope_dim. q_rank: of the queries' own bottleneck, None where they have none. nope_dim + rope_dim: of a query."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    def expansion(self, n_heads: int) -> int:
        """Values of the matrix that makes keys and values of the latent."""
        return self.kv_rank * n_heads * (self.nope_dim + self.value_dim)


class AttentionWork(NamedTuple):
    """FLOPs of one step: of projections, and of each pair of a query and a key, all heads together."""

    projections: float
    per_pair: float


VALUE_BYTES = 2
"""Of an activation, a key or a value, wherever a model is priced that says no other."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes that decide the price of a model. n_experts 0: no sparse layer; dense_width 0: no dense layer.

    Activations and cached keys and values take `bytes_per_value` each; weights too, unless `bits` says otherwise: 2, as
    all figures of the source are FP16.
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
    bytes_per_value: int = VALUE_BYTES
    shared_width: int = 0
    """Joint width of the experts that every token passes through; 0: none."""
    ties_embedding: bool = False
    """Whether the head is the embedding."""
    n_dense_layers: int | None = None
    """Where dense and sparse layers mix; the first ones, where the plans of another model do not say which."""

    latent: LatentShape | None = None
    """None of heads with keys and values of their own."""
    bits: WeightBits | None = None
    """None: weights are as wide as activations."""
    max_length: int | None = None
    """Tokens of a request, prompt and answer; None: not known."""
    spans: tuple[Span | None, ...] = (None,)
    """What queries see, of each layer in turn, again from the first where there are more layers; None: all."""

    def span_of(self, layer: int) -> Span | None:
        return self.spans[layer % len(self.spans)]

    def beyond_context(self, n_tokens: int) -> str | None:
        """That its config holds fewer tokens than a request of so many has; None where it does not, or nobody knows."""
        if self.max_length is None or n_tokens <= self.max_length:
            return None
        return f"{n_tokens:,} tokens are more than the {self.max_length:,} that {self.name} holds by its config.json"

    @property
    def attention_weights(self) -> int:
        """Values of the query, key, value and output projections of one layer, and of latent attention's expansion."""
        if self.latent is None:
            return self.hidden * self.head_dim * 2 * (self.n_heads + self.n_kv_heads)
        own, heads = self.latent, self.n_heads
        query = own.nope_dim + own.rope_dim
        queries = self.hidden * heads * query if own.q_rank is None else own.q_rank * (self.hidden + heads * query)
        keys = self.hidden * (own.kv_rank + own.rope_dim) + own.expansion(heads)
        return queries + keys + heads * own.value_dim * self.hidden

    @property
    def attention_bytes(self) -> float:
        """The same, as stored; latent attention's expansion is never narrow."""
        kept = 0 if self.latent is None or self.bits is None else self.latent.expansion(self.n_heads)
        narrow = (self.attention_weights - kept) * self.bytes_of("attention")
        return narrow + kept * self.bytes_per_value

    @property
    def cached_values(self) -> int:
        """Of a token, in one layer: of keys and values, or of the latent and the key that all heads share."""
        if self.latent is None:
            return 2 * self.n_kv_heads * self.head_dim
        return self.latent.kv_rank + self.latent.rope_dim

    @property
    def attention_values(self) -> int:
        """Of a token, in one layer: what attention reads and gives, its queries, what is cached, and what heads mix."""
        if self.latent is None:
            by_head = 2 * self.head_dim
        else:
            by_head = self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim
        return 2 * self.hidden + self.n_heads * by_head + self.cached_values

    def attention_work(self, n_tokens: int, n_keys: int, n_sequences: int = 1) -> AttentionWork:
        """n_tokens, n_keys: of a step and in the cache after it, of all its sequences together.

        Latent attention either makes keys and values of all that is cached, or has queries and results pass through the
        expansion and works on the latent itself: whichever takes less.
        """
        projections, own = 2.0 * n_tokens * self.attention_weights, self.latent
        if own is None:
            return AttentionWork(projections, 4.0 * self.n_heads * self.head_dim)
        inside = AttentionWork(projections, 2.0 * self.n_heads * (2 * own.kv_rank + own.rope_dim))
        again = 2.0 * (n_keys - n_tokens) * own.expansion(self.n_heads)
        expanded = AttentionWork(
            projections + again, 2.0 * self.n_heads * (own.nope_dim + own.rope_dim + own.value_dim)
        )
        return min(
            inside, expanded, key=lambda work: work.projections + work.per_pair * n_tokens * n_keys / n_sequences
        )

    @property
    def expert_weights(self) -> int:
        """Values of one expert: gate, up and down."""
        return 3 * self.hidden * self.expert_width

    @property
    def expert_bytes(self) -> float:
        """Of one expert, as stored."""
        return self.expert_weights * self.bytes_of("experts")

    def dense_bytes(self, width: int) -> float:
        """Of a feed-forward block that every token passes through."""
        return 3 * self.hidden * width * self.bytes_of("dense")

    @property
    def router_bytes(self) -> float:
        """Of one layer's; never narrow."""
        return self.hidden * self.n_experts * self.bytes_per_value

    @property
    def head_bytes(self) -> float:
        return self.hidden * self.vocabulary * self.bytes_of("head")

    def bytes_of(self, component: Literal["experts", "dense", "attention", "head"]) -> float:
        """Of one value."""
        return self.bytes_per_value if self.bits is None else getattr(self.bits, component) / 8

    @property
    def n_sparse_layers(self) -> int:
        """Raises `EngineError` where dense and sparse layers mix, and how many is not known."""
        if not self.n_experts or not self.dense_width:
            return self.n_layers if self.n_experts else 0
        if self.n_dense_layers is None:
            raise EngineError(f"{self.name} has dense and sparse layers, and its shape does not say how many of each")
        return self.n_layers - self.n_dense_layers

    @property
    def routed_bytes(self) -> float:
        """Of all experts that routers choose from. Raises as `n_sparse_layers`."""
        return self.n_sparse_layers * self.n_experts * self.expert_bytes

    @property
    def others_bytes(self) -> float:
        """Of all weights but routed experts, norms and biases. Raises as `n_sparse_layers`."""
        n_sparse, embedding = self.n_sparse_layers, self.vocabulary * self.hidden * self.bytes_per_value
        sparse = self.router_bytes + self.dense_bytes(self.shared_width)
        layers = self.n_layers * self.attention_bytes + (self.n_layers - n_sparse) * self.dense_bytes(self.dense_width)
        return layers + n_sparse * sparse + self.head_bytes + (0 if self.ties_embedding else embedding)

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
