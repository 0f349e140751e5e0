"""What a Trn2 can do, as its maker states it; the guide gives the quotient alone."""

from __future__ import annotations

from typing import NamedTuple


class Peak(NamedTuple):
    """Of one Trn2 device: AWS's data sheet of the chip."""

    bf16_flop_per_s: float
    fp8_flop_per_s: float
    bytes_per_s: float
    hbm_bytes: float


TRN2 = Peak(667e12, 1299e12, 2.9e12, 96e9)


def flop_per_byte() -> tuple[float, float]:
    """In bf16 and in fp8."""
    return TRN2.bf16_flop_per_s / TRN2.bytes_per_s, TRN2.fp8_flop_per_s / TRN2.bytes_per_s
