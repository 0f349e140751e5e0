"""The bundled model in torch, rounded to fp16 where its graphs are: an oracle of what packages compute.

It reads the checkpoint and no package. Attention and the experts of the npu are written out here, and what each step
gives is rounded to fp16 once, from sums in float64. What is the host's (norms of layers, router, gather, weighted sum,
residuals, head, experts of the CPU) is fp32, as in the torch reader.

A product of two fp16 numbers is exact in float64, and so is nearly every sum of some hundred: another order of adding
gives the same fp16. So two readers that round in the same places have the same bits.

Legend: T tokens, S positions, H hidden, N query heads, M key/value heads, G query heads of a key/value head, D features
of a head, P pairs of turned features.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from engines.coreml.transformer import _of_calls
from engines.dispatch import DispatchPlan
from engines.model.attention import AttentionWeights
from engines.model.checkpoints import Checkpoint
from engines.model.experts import ExpertWeights, GatedWeights, execute, gather_rows
from engines.model.key_value_cache import KeyValueCache, Step
from engines.model.norms import NormWeights
from engines.model.said_layouts import SaidLayouts
from engines.model.transformer import Transformer
from engines.shown import Shown
from engines.techniques.base import Technique

SMALLEST_NORMAL = 2.0**-14


def half(x: Tensor) -> Tensor:
    """Rounded to fp16, and kept in float64. By numpy: torch rounds float64 to fp32 on the way, which is twice."""
    with np.errstate(over="ignore"):
        return torch.from_numpy(np.asarray(x).astype(np.float16)).to(torch.float64)


ROUNDED = WeakTensorKeyDictionary()
"""Weights by `half`, for as long as somebody has the weight."""


def linear(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    if weight_OI not in ROUNDED:
        ROUNDED[weight_OI] = half(weight_OI)
    return half(x_TI @ ROUNDED[weight_OI].T)


class PlannedReader(Transformer):
    """The torch reader in fp32. Each layer waits for its plan, in decoding too, so that plans can be given."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._decoder = None

    def _said(self, technique: Technique, shown: Shown) -> SaidLayouts | None:
        return None


class HalfReader(PlannedReader):
    """Of a checkpoint without biases, sinks, caps and windows, as the bundled model is.

    attends_by_graphs: whether attention is a graph too, and rounded; else it is the host's.
    """

    def __init__(self, checkpoint: Checkpoint, attends_by_graphs: bool = True) -> None:
        super().__init__(checkpoint)
        self._attends_by_graphs = attends_by_graphs

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache(self.config, dtype=torch.float64) if self._attends_by_graphs else super().new_cache()

    def _attend(self, normed_TH: Tensor, layer: int, step: Step) -> Tensor:
        if not self._attends_by_graphs:
            return super()._attend(normed_TH, layer, step)
        config, weights = self.config, self._weights.layers[layer].attention
        assert isinstance(weights, AttentionWeights)
        (chunk,) = step.chunks
        keys, values = chunk.cache.keys[layer], chunk.cache.values[layer]
        n_tokens, width, n_kv = len(normed_TH), config.head_dim, config.n_kv_heads
        cos_TP, sin_TP = half(step.cos_TP), half(step.sin_TP)

        def turned(matrix: Tensor, norm: NormWeights) -> Tensor:
            """[heads, T, D]"""
            x = normed(linear(x_TH, matrix).view(n_tokens, -1, width), norm).transpose(0, 1)
            first, second = x.chunk(2, dim=-1)
            return torch.cat(
                [
                    half(half(first * cos_TP) - half(second * sin_TP)),
                    half(half(second * cos_TP) + half(first * sin_TP)),
                ],
                dim=-1,
            )

        x_TH = half(normed_TH)
        query_NTD = half(turned(weights.q_QH, weights.q_norm) * half(torch.tensor(config.attention.scale)))
        keys[:, chunk.position : chunk.end] = turned(weights.k_MH, weights.k_norm)
        values[:, chunk.position : chunk.end] = linear(x_TH, weights.v_MH).view(n_tokens, n_kv, width).transpose(0, 1)
        key_MSD, value_MSD = keys[:, None, : chunk.end], values[:, None, : chunk.end]
        score_MGTS = half(query_NTD.unflatten(0, (n_kv, -1)) @ key_MSD.mT)
        is_later_TS = torch.arange(chunk.end) > torch.arange(chunk.position, chunk.end)[:, None]
        share_MGTS = half(score_MGTS.masked_fill(is_later_TS, -math.inf).softmax(dim=-1))
        mixed_NTD = half(share_MGTS @ value_MSD).flatten(0, 1)
        return linear(mixed_NTD.transpose(0, 1).flatten(1), weights.out_HQ).float()

    def _execute(self, plan: DispatchPlan, normed_TH: Tensor, experts: ExpertWeights, layer: int) -> Tensor:
        calls = list(plan.calls)
        on_cpu = [call for call in calls if call.unit == "cpu"]
        if len(on_cpu) == len(calls):
            return execute(plan, normed_TH, experts)
        out_TH = execute(_of_calls(plan, on_cpu), normed_TH, experts) if on_cpu else torch.zeros_like(normed_TH)
        rows_RH = gather_rows(plan, normed_TH)
        for call in calls:
            if call.unit == "cpu":
                continue
            first = call.first_row
            for expert, n_rows in zip(call.experts, call.rows_per_expert, strict=True):
                rows = slice(first, first + n_rows)
                made_RH = gated(half(rows_RH[rows]), experts.experts[expert]).float() * plan.weight_R[rows, None]
                valid_R = plan.token_R[rows] >= 0
                out_TH.index_add_(0, plan.token_R[rows][valid_R], made_RH[valid_R])
                first += n_rows
        return out_TH


def normed(x: Tensor, norm: NormWeights) -> Tensor:
    """Of the last axis. By way of x over its largest, as the graphs have it, for squares beyond fp16."""
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST_NORMAL)
    small, root = half(x / largest), half(half(torch.tensor(math.sqrt(norm.eps))) / largest)
    mean = half(half(half(small * small).mean(dim=-1, keepdim=True)) + half(root * root))
    return half(half(small * half(mean.rsqrt())) * half(norm.weight))


def gated(x_RH: Tensor, weights: GatedWeights) -> Tensor:
    """SwiGLU without biases."""
    gate_RI, up_RI = linear(x_RH, weights.gate_IH), linear(x_RH, weights.up_IH)
    return linear(half(half(torch.nn.functional.silu(gate_RI)) * up_RI), weights.down_HI)
