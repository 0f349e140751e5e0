"""fp16 numbers held in float64, where they are computed with: rounded there, to the bits that numpy gives their fp16.

numpy converts to fp16 and back one number after another, 25 ns each; what is here takes a tenth of that.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]

FEW = 512
"""Fewer are converted sooner than they are looked up or rounded in place."""
_EXPONENT, _SIGN = np.uint64(0x7FF << 52), np.uint64(1 << 63)
_SMALLEST_NORMAL, _LARGE = 2.0**-14, 2.0**15
_LAST_PLACE = 1.5 * 2.0 ** (52 - 10)
"""Of a number's power of two: a sum of both has its last bit where the number's fp16 has its last bit."""


def is_half(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.float16


def widened(value: Values) -> Values:
    """fp16 in float64."""
    if value.size < FEW:
        return value.astype(np.float64)
    found: Values = _all_halves().take(value.view(np.uint16))
    return found


def rounded(value: Values) -> Values:
    """To the nearest of fp16, of two as near to the even one: a new array, in float64. Infinity beyond fp16, of which
    numpy warns unless it is told not to."""
    if value.size < FEW or value.dtype != np.float64:
        return widened(value.astype(np.float16))
    bits = np.ascontiguousarray(value).view(np.uint64)
    power = (bits & _EXPONENT).view(np.float64)
    if power.max() >= _LARGE:  # may round to infinity, is infinite or no number
        return widened(value.astype(np.float16))
    np.maximum(power, _SMALLEST_NORMAL, out=power)  # below it fp16 has the places of its smallest normal
    power *= _LAST_PLACE
    found: Values = value + power
    found -= power
    found_bits = found.view(np.uint64)
    found_bits |= bits & _SIGN  # of zeros
    return found


@cache
def _all_halves() -> Values:
    """In float64, by their bits."""
    with np.errstate(invalid="ignore"):  # some are NaN that signal
        return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
