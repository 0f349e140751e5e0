"""What the units of a plan send each other, so that what they computed of a token adds up.

Legend: N units.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engines.calls import Calls
from engines.dispatch import Exchange
from engines.techniques.base import Share


def exchanges_of(shares: Sequence[Share], calls: Calls, n_tokens: int, value_bytes: int) -> tuple[Exchange, ...]:
    """Of the shares that add up. value_bytes: in the dtype in which activations are computed."""
    found: list[Exchange] = []
    for share in shares:
        if share.summed is not None:
            found += _exchanges(share, calls, n_tokens, value_bytes)
    return tuple(found)


def _exchanges(share: Share, calls: Calls, n_tokens: int, value_bytes: int) -> list[Exchange]:
    assert share.summed is not None
    units = tuple(piece.unit for piece in share.pieces)
    n_rows = n_tokens
    if share.summed.of_each == "row":
        own = [i for i, kind in enumerate(calls.kinds) if kind.unit == units[0]]
        kind_S = np.zeros(len(calls.rows_S), dtype=np.int64) if calls.kind_C is None else calls.kind_C[calls.call_S]
        n_rows = int(calls.rows_S[np.isin(kind_S, own)].sum())
    n_bytes = value_bytes * n_rows * share.summed.n_values
    if (on := share.summed.on) is not None:
        units = (on, *(unit for unit in units if unit != on))
        sent = [[n_bytes if i == 0 and j else 0 for j in range(len(units))] for i in range(len(units))]
        out = Exchange("broadcast", units, tuple(map(tuple, sent)))
        return [out, Exchange(share.summed.kind, units, _to_the_first(n_bytes, len(units)))]
    if share.summed.kind == "reduce":
        return [Exchange("reduce", units, _to_the_first(n_bytes, len(units)))]
    # Each adds up a part of what all send it, and sends it back to all.
    part = -(-2 * n_bytes // len(units))
    sent = [[part if i != j else 0 for j in range(len(units))] for i in range(len(units))]
    return [Exchange("all_reduce", units, tuple(map(tuple, sent)))]


def _to_the_first(n_bytes: int, n: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(n_bytes if j == 0 and i else 0 for j in range(n)) for i in range(n))
