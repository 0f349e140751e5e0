"""A model's weights as the transformer wants them: who holds what, and nothing of files.

Legend: H hidden, L vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engines.model.attention import AttentionWeights, LatentWeights
from engines.model.experts import ExpertWeights, GatedWeights
from engines.model.norms import NormWeights
from engines.model.quantised import Matrix
from engines.model.router import RouterWeights


@dataclass(frozen=True)
class SparseWeights:
    router: RouterWeights
    experts: ExpertWeights
    shared: GatedWeights | None
    shared_gate_1H: Tensor | None


@dataclass(frozen=True)
class LayerWeights:
    """The norms before each block, and after it (before the residual) where the family has them."""

    attention_norm: NormWeights
    attention: AttentionWeights | LatentWeights
    after_attention_norm: NormWeights | None
    mlp_norm: NormWeights
    mlp: GatedWeights | SparseWeights
    after_mlp_norm: NormWeights | None


@dataclass(frozen=True)
class ModelWeights:
    """head_LH is the embedding itself where the model ties them, or its narrowed copy: then `head_is_copy`."""

    embedding_LH: Tensor
    layers: tuple[LayerWeights, ...]
    norm: NormWeights
    head_LH: Matrix
    head_bias_L: Tensor | None
    head_is_copy: bool = False

    @property
    def kept(self) -> torch.dtype:
        """How a cache on the CPU keeps keys and values."""
        attention = self.layers[0].attention
        return attention.kept if isinstance(attention, AttentionWeights) else torch.float32
