"""Weight-only quantisation: int8 with one scale a row, int4 with one scale for each group of columns.

Arithmetic stays fp32: a quantised product equals, up to the order of its sums, the product with `to(torch.float32)`.

Legend: N rows (outputs), K columns (inputs), G groups of a row, B blocks of 64 columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engines.errors import EngineError

Int4Group = Literal[32, 64, 128]
BLOCK = 64
"""Columns whose nibbles share eight words: see `pack_int4`."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix [..., N, K], or a stack of them. Indexing and `to` work as on a tensor.

    | kind | values | scales |
    |---|---|---|
    | int8 | int8 [..., N, K] | fp32 [..., N] |
    | int4 | int32 [..., N, K/8] | fp32 [..., N, K/group] |
    """

    values: Tensor
    scales: Tensor
    kind: Literal["int8", "int4", "fp8", "mxfp4"]
    group: int | None = None
    """Columns that share a scale; None: all of a row."""

    @property
    def shape(self) -> torch.Size:
        columns = self.values.shape[-1] * (8 if self.values.dtype is torch.int32 else 1)
        return torch.Size((*self.values.shape[:-1], columns))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, index: int | slice) -> QuantisedMatrix:
        return QuantisedMatrix(self.values[index], self.scales[index], self.kind, self.group)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the stored one stands for."""
        if self.group is None:
            return (self.values.float() * self.scales[..., None]).to(dtype)
        n_NK = unpack_int4(self.values).float()
        grouped = n_NK.view(*self.scales.shape, self.group)
        return (grouped * self.scales[..., None]).flatten(-2).to(dtype)


Matrix = Tensor | QuantisedMatrix
"""A matrix as it is stored: `to` gives the one it stands for."""


def quantise_int8(weight: Tensor) -> QuantisedMatrix:
    """Symmetric: the largest magnitude of a row becomes 127."""
    largest = weight.float().abs().amax(dim=-1)
    scales = torch.where(largest > 0, largest / 127, torch.ones_like(largest))
    values = (weight.float() / scales[..., None]).round_().to(torch.int8)
    return QuantisedMatrix(values, scales, "int8")


def quantise_int4(weight: Tensor, group: Int4Group) -> QuantisedMatrix:
    """-8..7 times a scale whose sign puts the value of largest magnitude on -8, so that no level is lost."""
    if weight.shape[-1] % max(group, BLOCK):
        raise EngineError(
            f"int4 in groups of {group} needs a width that is a multiple of {max(group, BLOCK)}, "
            f"not {weight.shape[-1]}; use int8 for this component"
        )
    grouped = weight.float().reshape(*weight.shape[:-1], -1, group)
    largest = grouped.gather(-1, grouped.abs().argmax(dim=-1, keepdim=True)).squeeze(-1)
    scales = torch.where(largest != 0, largest / -8, torch.ones_like(largest))
    levels = (grouped / scales[..., None]).round_().clamp_(-8, 7).flatten(-2).to(torch.int8)
    return QuantisedMatrix(pack_int4(levels), scales, "int4", group)


def pack_int4(levels: Tensor) -> Tensor:
    """Levels -8..7 [..., K] to int32 words [..., K/8]. Word i of a block holds columns i, 8 + i, ... 56 + i.

    So eight lanes of a vector register, masked at one nibble, are eight neighbouring columns. Nibbles 0..6 hold
    level + 8 and the top one two's complement: a kernel can convert a masked word, read as signed, without a shift.
    """
    shift_81 = 4 * torch.arange(8)[:, None]
    levels_B88 = levels.reshape(*levels.shape[:-1], -1, 8, 8).to(torch.int64)
    nibbles_B88 = torch.where(shift_81 < 28, levels_B88 + 8, levels_B88 & 15)
    words = (nibbles_B88 << shift_81).sum(dim=-2).flatten(-2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """The inverse of `pack_int4`, as int8."""
    shift_81 = (4 * torch.arange(8, dtype=torch.int32))[:, None]
    nibbles_B88 = (words.reshape(*words.shape[:-1], -1, 1, 8) >> shift_81) & 15
    signed = (nibbles_B88 ^ 8) - 8
    return torch.where(shift_81 < 28, nibbles_B88 - 8, signed).to(torch.int8).flatten(-3)
