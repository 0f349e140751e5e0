"""Shares and values as attention in int8 multiplies them: whole numbers, whose products for a block of keys are added
in 32 bits. What the kernels' `ByteBlock` computes, in torch.

Legend: M key/value heads, S tokens seen, from the first of the sequence on (kernels count blocks from there), V
features of a value, G query heads of one key/value head, T query tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

VALUE_BITS, SHARE_BITS, BLOCK_KEYS, LEAST_VALUE = 11, 13, 96, 1e-17
"""Values of a key that has none above LEAST_VALUE are zeros."""


def whole_values(value_MSV: Tensor) -> tuple[Tensor, Tensor]:
    """Each key's values in multiples of its unit, and the units [M, S]: powers of two, by which the largest value is
    below 2^11."""
    largest_MS = value_MSV.abs().amax(dim=-1).clamp(min=LEAST_VALUE)
    unit_MS = torch.ldexp(torch.ones_like(largest_MS), torch.frexp(largest_MS).exponent - VALUE_BITS)
    return (value_MSV / unit_MS[..., None]).round() * unit_MS[..., None], unit_MS


def whole_shares(share_GTS: Tensor, unit_S: Tensor) -> Tensor:
    """In multiples of 2^-13 of the largest share of each block of keys, where a share counts in its values' unit."""
    n_seen = share_GTS.shape[-1]
    padded_GTS = F.pad(share_GTS * unit_S, (0, -n_seen % BLOCK_KEYS))
    in_units = padded_GTS.reshape(*padded_GTS.shape[:-1], -1, BLOCK_KEYS)
    step = in_units.amax(dim=-1, keepdim=True) / 2**SHARE_BITS
    whole: Tensor = torch.where(step > 0, in_units / step, 0).round() * step
    return whole.flatten(-2)[..., :n_seen] / unit_S
