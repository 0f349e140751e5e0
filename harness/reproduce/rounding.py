"""What printed figures may have been before they were rounded, carried through the arithmetic on them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from harness.reproduce.printed import Number, Span


def span_of(function: Callable[..., float], *figures: Number) -> Span:
    """Least and most of `function` over all values that round to the printed figures.

    In each figure alone it must rise or fall throughout, as sums, products and ratios of positive figures do: its ends
    then lie at ends of the figures, and all of these are tried.

    >>> [round(end, 3) for end in span_of(lambda npu, gpu: npu / gpu, Number("1.26"), Number("0.99"))]
    [1.261, 1.284]
    """
    found = [function(*ends) for ends in product(*((low(one), high(one)) for one in figures))]
    return Span(min(found), max(found))


def meets(printed: Number, own: Span) -> bool:
    """Some value within `own` rounds to what is printed."""
    return own.low <= high(printed) and own.high >= low(printed)


def low(printed: Number) -> float:
    return printed.value - printed.half_digit


def high(printed: Number) -> float:
    return printed.value + printed.half_digit
