"""Orders that a row of class `ordering` tests: what must hold of our figures, as classes.csv writes it.

`>1`, `<1`, `>0`, `>=0`   every figure is on that side of the number
`rising`, `falling`       each figure is above, or below, the one before
`not rising`, `not falling`
`first is most`           no figure is above the first
`against 002-154`         our figure is on the same side of ours for that row as the source's is of its own
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from itertools import pairwise

Holds = Callable[[Sequence[float]], bool]
_SIDES: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}
SERIES: dict[str, Holds] = {
    "rising": lambda found: all(a < b for a, b in pairwise(found)),
    "falling": lambda found: all(a > b for a, b in pairwise(found)),
    "not rising": lambda found: all(a >= b for a, b in pairwise(found)),
    "not falling": lambda found: all(a <= b for a, b in pairwise(found)),
    "first is most": lambda found: all(one <= found[0] for one in found),
}
_SIDE = re.compile(r"(>=|<=|>|<)(-?\d+(?:\.\d+)?)")
_AGAINST = re.compile(r"against (\d{3}-\d{3})")


def parse_order(text: str) -> Holds | str | None:
    """What tells whether figures have the order; the id of the row to stand against; None where there is no order.

    Raises `ValueError`.
    """
    if not text:
        return None
    if text in SERIES:
        # One figure, or none, would have every order.
        series = SERIES[text]
        return lambda found: len(found) > 1 and series(found)
    side = _SIDE.fullmatch(text)
    if side:
        compare, limit = _SIDES[side[1]], float(side[2])
        return lambda found: bool(found) and all(compare(one, limit) for one in found)
    against = _AGAINST.fullmatch(text)
    if against:
        return against[1]
    raise ValueError(f"order {text!r} is unknown; take >1, <1, {', '.join(SERIES)} or against CLAIM")
