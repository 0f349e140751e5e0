"""How large the estimators of 003 are (Fig. 11), whose widths it does not say.

A is d/n x d, so the width is the model's over a whole number n; B and C widen it m times and back. Printed in whole
millions, a size fits many pairs (n, m): that one of them gives it is no prediction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from engines.estimator import estimator_shapes
from engines.pricing.shapes import ModelShape

MOST_DIVISORS, MOST_EXPANSION = 8, 64


class Widths(NamedTuple):
    width: int
    expansion: int


def millions(shape: ModelShape, widths: Widths) -> float:
    """Parameters, 1e6. The last layer with experts has no next one to be guessed."""
    shapes = estimator_shapes(shape.n_layers - 1, shape.hidden, shape.n_experts, *widths)
    return sum(map(math.prod, shapes.values())) / 1e6


def fitting(shape: ModelShape, printed_millions: float) -> list[Widths]:
    """All whose size rounds to what is printed, n up to 8 and m up to 64; those that widen least first."""
    widths = [shape.hidden // n for n in range(1, MOST_DIVISORS + 1) if shape.hidden % n == 0]
    pairs = [Widths(width, m) for m in range(1, MOST_EXPANSION + 1) for width in widths]
    return [pair for pair in pairs if round(millions(shape, pair)) == printed_millions]
