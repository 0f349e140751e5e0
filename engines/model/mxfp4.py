"""MXFP4 (Open Compute microscaling formats 1.0, §5.3): blocks of 32 four-bit floats with a shared power-of-two scale.

A value is sign, two bits of exponent, one of mantissa; a byte of a file holds two, the earlier in its low half. A scale
is a biased exponent: 2^(byte - 127), and 255 is NaN. bf16 holds every such product exactly (but for exponents beyond
its own range).

Legend: G blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
EXPONENT_BIAS = 127
MAX_EXPONENT = 2
"""Of a four-bit value: the largest is 1.5 * 2^2."""
NAN_SCALE = 255
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class PackedBlocks:
    """Matrices [..., 32 G] as files hold them: blocks [..., G, 16] and scales [..., G], both uint8. Indexed by rows."""

    blocks: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.scales.shape[:-1], self.scales.shape[-1] * BLOCK)

    def __getitem__(self, index: int | slice) -> PackedBlocks:
        return PackedBlocks(self.blocks[index], self.scales[index])


def unpack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """bf16 values [..., 32 G] of packed bytes [..., G, 16] and scales [..., G], both uint8."""
    # A byte's two values at once: a table of 256 pairs instead of two look-ups.
    values = _values(torch.bfloat16, blocks.device)
    byte = torch.arange(256, device=blocks.device)
    pairs = torch.stack([values[byte & 0xF], values[byte >> 4]], dim=-1)
    unscaled = pairs[blocks.to(torch.int32)].flatten(-2)
    return torch.ldexp(unscaled, scales.to(torch.int32)[..., None] - EXPONENT_BIAS).flatten(-2)


def codes(blocks: Tensor) -> Tensor:
    """The four-bit codes of packed bytes [..., G, 16], one a byte: uint8 [..., 32 G]."""
    return torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-3)


def widen(codes: Tensor, scales: Tensor) -> Tensor:
    """fp32 values of codes [..., 32 G] and scales [..., G]."""
    unscaled = _values(torch.float32, codes.device)[codes.to(torch.int32)].view(*scales.shape, BLOCK)
    return (unscaled * _power_of_two(scales.to(torch.int32) - EXPONENT_BIAS)).flatten(-2)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, uint8 [..., 32 G], and scales, uint8 [..., G], of fp32 values (§6.3 of the format).

    The shared exponent is that of the block's largest magnitude, less the largest exponent of a four-bit value; values
    are rounded to nearest, ties to the even mantissa, and those beyond 6 become 6.
    """
    grouped = weight.view(*weight.shape[:-1], -1, BLOCK)
    low, high = grouped.aminmax(dim=-1)
    # frexp gives a mantissa from 0.5 up to 1, the format's lies from 1 up to 2.
    exponent = torch.frexp(torch.maximum(-low, high)).exponent - 1 - MAX_EXPONENT
    exponent = exponent.clamp_(-EXPONENT_BIAS, NAN_SCALE - 1 - EXPONENT_BIAS)
    magnitude = grouped.abs().mul_(_power_of_two(-exponent))
    # Magnitudes rise in steps of 0.5, from 2 on of 1, from 4 on of 2: of the places that the three steps give, the
    # least is right. Even places are even mantissas, so rounding halves to even is the format's own.
    place = (2 * magnitude).round_()
    torch.minimum(place, magnitude.round().add_(2), out=place)
    torch.minimum(place, magnitude.mul_(0.5).round_().add_(4), out=place)
    code = place.clamp_(max=7).to(torch.uint8).add_(torch.signbit(grouped).to(torch.uint8), alpha=8)
    return code.flatten(-2), (exponent + EXPONENT_BIAS).to(torch.uint8)


def _power_of_two(exponent: Tensor) -> Tensor:
    """fp32, for each block. Exact down to 2^-127, which is subnormal."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)[..., None]


def _values(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Of the sixteen codes."""
    return torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], dtype=dtype, device=device)
