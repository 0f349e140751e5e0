"""What a Trn2 chip can do, by the sheet; the guide gives a quotient alone."""

from __future__ import annotations

from functools import cache

from devices.models.sheet import load_sheet

FP8_FLOP_PER_S = 1299e12
"""Of the same chip, on the same page of AWS; the sheet has bf16, in which its techniques compute."""


@cache
def flop_per_byte() -> tuple[float, float]:
    """In bf16 and in fp8."""
    roofline = load_sheet("trn2").units["gpu"].roofline
    assert roofline is not None  # the sheet has no other prices
    assert roofline.bytes_per_s is not None
    assert roofline.flops_per_s is not None
    bandwidth = roofline.bytes_per_s.value
    return roofline.flops_per_s.value / bandwidth, FP8_FLOP_PER_S / bandwidth


@cache
def hbm_bytes() -> float:
    found = load_sheet("trn2").capacity_bytes("gpu")
    assert found is not None
    return found
