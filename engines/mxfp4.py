"""MXFP4 (Open Compute microscaling formats 1.0, §5.3): blocks of 32 four-bit floats with a shared power-of-two scale.

A value is sign, two bits of exponent, one of mantissa; a byte holds two, the earlier in its low half. A scale is a
biased exponent: 2^(byte - 127). bf16 holds every such product exactly (but for exponents beyond its own range).

Legend: B blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
EXPONENT_BIAS = 127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bf16 values [..., 32 B] of packed bytes [..., B, 16] and scales [..., B], both uint8."""
    # A byte's two values at once: a table of 256 pairs instead of two look-ups.
    values = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=torch.bfloat16, device=blocks.device)
    byte = torch.arange(256, device=blocks.device)
    pairs = torch.stack([values[byte & 0xF], values[byte >> 4]], dim=-1)
    unscaled = pairs[blocks.to(torch.int32)].flatten(-2)
    return torch.ldexp(unscaled, scales.to(torch.int32)[..., None] - EXPONENT_BIAS).flatten(-2)
