"""Decoding one token with every expert that its routers choose, in one call of the kernels.

This is what `engines.model.transformer` computes layer by layer; here nothing is decided between router and experts,
so that no layer waits for Python. Models with parts that only some families have are left to the transformer.

Legend: H hidden, K experts per token, L sparse layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from engines.dispatch import DispatchPlan, Routing
from engines.kernels.decoder import MAX_CHOSEN, Decoder, DecoderLayer
from engines.kernels.native import AttentionTable
from engines.model.architecture import SWIGLU, ModelConfig
from engines.model.attention import KeyValueCache
from engines.model.experts import GatedWeights
from engines.model.router import kernel_router
from engines.model.weights import LayerWeights, ModelWeights
from engines.techniques.base import Technique


class DecodePlans(Sequence[DispatchPlan | None]):
    """The plans of one step, made when somebody asks: most are only counted, after the time of the step is taken."""

    def __init__(self, technique: Technique, routings: Sequence[Routing | None]) -> None:
        self._technique = technique
        self._routings = routings

    def __len__(self) -> int:
        return len(self._routings)

    def __getitem__(self, layer: int) -> DispatchPlan | None:  # type: ignore[override]
        routing = self._routings[layer]
        return None if routing is None else self._technique.plan(routing, layer, "decode", None)

    def __iter__(self) -> Iterator[DispatchPlan | None]:
        return (self[layer] for layer in range(len(self)))


class FusedDecoder:
    """Decode steps of a model whose layers the kernels know whole."""

    def __init__(self, decoder: Decoder, config: ModelConfig) -> None:
        self._decoder = decoder
        self._config = config

    def step(
        self, hidden_1H: Tensor, cos_1P: Tensor, sin_1P: Tensor, cache: KeyValueCache, technique: Technique
    ) -> DecodePlans:
        """Turns the embedded token into the last layer's output, in place. The cache's length is the caller's."""
        ids_LK, weights_LK = self._decoder.step(hidden_1H, cos_1P, sin_1P, cache.keys, cache.values, cache.length)
        routings: list[Routing | None] = []
        row = 0
        for layer in range(self._config.n_layers):
            if self._config.moe is None or not self._config.is_sparse(layer):
                routings.append(None)
                continue
            routings.append(Routing(ids_LK[row : row + 1], weights_LK[row : row + 1], self._config.moe.n_experts))
            row += 1
        return DecodePlans(technique, routings)


def fused_decoder(
    config: ModelConfig, weights: ModelWeights, tables: Sequence[AttentionTable | None]
) -> FusedDecoder | None:
    """None where a layer has something that the kernels do not know. tables: of `attention.kernel_table`."""
    layers = [
        _layer(layer, config, number, table)
        for number, (layer, table) in enumerate(zip(weights.layers, tables, strict=True))
    ]
    known = [layer for layer in layers if layer is not None]
    return FusedDecoder(Decoder(known), config) if len(known) == len(layers) else None


def _layer(
    weights: LayerWeights, config: ModelConfig, number: int, table: AttentionTable | None
) -> DecoderLayer | None:
    norms = (weights.attention_norm, weights.mlp_norm)
    has_other_norms = weights.after_attention_norm is not None or weights.after_mlp_norm is not None
    if table is None or has_other_norms or any(norm.bias is not None for norm in norms) or config.unit != SWIGLU:
        return None
    router = experts = always = None
    if isinstance(weights.mlp, GatedWeights):
        always = weights.mlp.table
        if always is None:
            return None
    else:
        moe, mlp = config.moe, weights.mlp
        assert moe is not None  # sparse weights are read only where the config has experts
        router, experts = kernel_router(mlp.router, moe.router), mlp.experts.table
        if router is None or experts is None or moe.top_k > MAX_CHOSEN or mlp.shared_gate_1H is not None:
            return None
        if mlp.shared is not None:
            always = mlp.shared.table
            if always is None:
                return None
    return DecoderLayer(
        weights.attention_norm.weight,
        table,
        weights.mlp_norm.weight,
        config.norm.eps,
        router,
        experts,
        always,
        config.attention.rope_layers[number],
    )
