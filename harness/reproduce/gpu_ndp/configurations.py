"""What source 001 asks: four models, 1 to 6 DIMMs, and which of them hold which model (Table II, §IV-A).

Table II counts the two shared experts of DeepSeek-MoE among the parameters of experts (15.4e9 = 27 x 66 x 3 x 2048 x
1408), so they lie in the DIMMs here and every token chooses them. `WITHOUT_SHARED` is the other reading: they are the
GPU's, the same for every technique, and no ratio has them.

Legend: T tokens, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.models.sheet import Sheet
from engines.errors import NoRoomError
from engines.pricing.room import lacks_room
from engines.pricing.shapes import NAMED_SHAPES, ModelShape

Integers = NDArray[np.int64]
SHEET = "rtx5080-ndp"
N_UNITS = (1, 2, 3, 4, 5, 6)
PRINTED_UNITS = (2, 4, 6)
"""DIMMs of its Fig. 9 to 11; averages are over the ten of twelve configurations that hold their model."""


class Asked(NamedTuple):
    """A model as the source has it. The first n_always of the highest numbers are chosen by every token."""

    name: str
    shape: ModelShape
    n_always: int = 0
    prefetched: int = 0
    """Experts of each layer that its ablation fetches ahead (§IV-D): TopK, and 1 of Mixtral."""

    @property
    def chance(self) -> float:
        """That a token chooses a certain routed expert, where all are alike."""
        return (self.shape.top_k - self.n_always) / (self.shape.n_experts - self.n_always)


def _with_shared(shape: ModelShape, n_shared: int) -> ModelShape:
    return replace(
        shape, name=f"{shape.name}+shared", n_experts=shape.n_experts + n_shared, top_k=shape.top_k + n_shared,
        shared_width=0,
    )  # fmt: skip


DEEPSEEK, QWEN3, PHI, MIXTRAL = "DeepSeek-MoE", "Qwen3-30B-A3B", "Phi-3.5-MoE", "Mixtral-8x7B"
MODELS: Mapping[str, Asked] = {
    asked.name: asked
    for asked in (
        Asked(DEEPSEEK, _with_shared(NAMED_SHAPES["deepseek-moe-16b"], 2), n_always=2, prefetched=6),
        Asked(QWEN3, NAMED_SHAPES["qwen3-30b-a3b"], prefetched=8),
        Asked(PHI, NAMED_SHAPES["phi-3.5-moe"], prefetched=2),
        Asked(MIXTRAL, NAMED_SHAPES["mixtral-8x7b"], prefetched=1),
    )
}
WITHOUT_SHARED: Mapping[str, Asked] = {
    **MODELS,
    DEEPSEEK: Asked(DEEPSEEK, replace(NAMED_SHAPES["deepseek-moe-16b"], shared_width=0), prefetched=6),
}


def no_room(asked: Asked, n_units: int, sheet: Sheet) -> NoRoomError | None:
    """Why so many DIMMs do not hold the model's experts ("N.S."), or None."""
    return lacks_room([f"ndp:{i}" for i in range(n_units)], True, sheet, asked.shape)


def uniform_choices(asked: Asked, n_tokens: int, random: np.random.Generator, skew: float = 0.0) -> Integers:
    """ids_TK. Every routed expert is as likely, or with the weight rank ** -skew; a token chooses one once.

    By Gumbel's trick: the K largest of log weight + noise are a draw without replacement.
    """
    n_routed, top_k = asked.shape.n_experts - asked.n_always, asked.shape.top_k - asked.n_always
    weight_E = -skew * np.log(np.arange(1, n_routed + 1)[random.permutation(n_routed)])
    score_TE = weight_E + random.gumbel(size=(n_tokens, n_routed))
    ids_TK = np.argpartition(-score_TE, top_k - 1, axis=1)[:, :top_k].astype(np.int64)
    always_TK = np.broadcast_to(np.arange(n_routed, n_routed + asked.n_always), (n_tokens, asked.n_always))
    return np.sort(np.concatenate([ids_TK, always_TK], axis=1), axis=1)
