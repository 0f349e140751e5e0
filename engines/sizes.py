"""The sizes that a technique is told: of the model that computes, or of the one that its work is priced as."""

from __future__ import annotations

from engines.model.accelerator import Backend
from engines.model.model_config import ModelConfig
from engines.techniques.context import ModelSizes


def own_sizes(config: ModelConfig) -> ModelSizes | None:
    """Of a model with experts, its weights counted as the sources do: two bytes each."""
    if config.moe is None:
        return None
    moe = config.moe
    n_layers, n_sparse, hidden = config.n_layers, len(moe.sparse_layers), config.hidden
    expert_bytes = 6 * hidden * moe.expert_width
    return ModelSizes(moe.n_experts, moe.top_k, hidden, moe.expert_width, expert_bytes, n_layers, n_sparse)


def told_sizes(own: ModelSizes | None, priced: ModelSizes | None, backend: Backend | None) -> ModelSizes | None:
    """own: of the model that computes, None of a dense one. priced: of the one that stands for it on a sheet. Layers
    and widths are those that run here, whatever they are priced as: slices are cut from them."""
    if own is None:
        return None
    if priced is not None:
        return own._replace(expert_bytes=priced.expert_bytes, activation_bytes=priced.activation_bytes)
    return own if backend is None else own._replace(activation_bytes=backend.dtype.itemsize)
