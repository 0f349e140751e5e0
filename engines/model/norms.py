"""Normalisation over the last dimension, and the sums between blocks.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.kernels import native, tables

ALONE = (1 << 15) - 1
"""Values: torch shares out more among threads of its own, which wait on cores that the kernels' threads compute on."""


@dataclass(frozen=True)
class NormWeights:
    """RMS norm without a bias, layer norm with one. Always fp32."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        if tables.serves(x, self.weight):
            return native.rms_norm(x, self.weight, self.eps)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def summed(a: Tensor, b: Tensor) -> Tensor:
    """By the kernels' threads, which are awake between blocks; those of torch would be woken for each sum."""
    return native.add(a, b) if tables.serves(a, b) else a + b


def row_norms(x_TH: Tensor) -> Tensor:
    """The Euclidean norm of each row, in fp32. Where the kernels compute, so few rows at a time that torch wakes none;
    they are the same, bit for bit."""
    rows = max(1, ALONE // x_TH.shape[1] if tables.serves(x_TH) else len(x_TH))
    return torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in torch.split(x_TH, rows)])
