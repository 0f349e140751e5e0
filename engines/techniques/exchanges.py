"""What the units of a plan send each other, so that each has the rows that it computes, and what it computed adds up.

Legend: N units, T tokens, R rows, S segments, C calls, K kinds of calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from devices.base import Unit
from engines.calls import Calls, Integers
from engines.dispatch import Exchange
from engines.techniques.base import Share, Visited


def exchanges_of(
    shares: Sequence[Share], calls: Calls, n_tokens: int, value_bytes: int, token_R: Integers | None = None
) -> tuple[Exchange, ...]:
    """value_bytes: in the dtype in which activations are computed. token_R: of the rows, without padding and one call
    after another, as those of a visited share are; None where no share is visited."""
    found: list[Exchange] = []
    for share in shares:
        if share.summed is not None:
            found += _exchanges(share, calls, n_tokens, value_bytes)
        if share.visited is not None and token_R is not None:
            found += visits(share.visited, _tokens_of_units(calls, n_tokens, token_R), value_bytes)
    return tuple(found)


def visits(visited: Visited, tokens: Mapping[Unit, int], value_bytes: int) -> tuple[Exchange, Exchange]:
    """Rows to those that compute, and results back: where all stay at home, none are sent. tokens: of each unit that
    computes."""
    others = {unit: n for unit, n in tokens.items() if unit != visited.home}
    sent = [0, *(n * visited.n_values * value_bytes for n in others.values())]
    none = (0,) * len(sent)
    units = (visited.home, *others)
    back = tuple((n_bytes, *none[1:]) for n_bytes in sent)
    return Exchange("all_to_all", units, (tuple(sent), *(none for _ in others))), Exchange("all_to_all", units, back)


def _tokens_of_units(calls: Calls, n_tokens: int, token_R: Integers) -> dict[Unit, int]:
    """How many tokens each unit computes for, in the order of the kinds of calls."""
    kind_C = np.zeros(len(calls), dtype=np.int64) if calls.kind_C is None else calls.kind_C
    is_there_KT = np.zeros((len(calls.kinds), n_tokens), dtype=np.bool_)
    is_there_KT[np.repeat(kind_C[calls.call_S], calls.rows_S), token_R] = True
    n_K = is_there_KT.sum(1)
    return {calls.kinds[kind].unit: int(n_K[kind]) for kind in np.unique(kind_C).tolist()}


def _exchanges(share: Share, calls: Calls, n_tokens: int, value_bytes: int) -> list[Exchange]:
    assert share.summed is not None
    units = tuple(piece.unit for piece in share.pieces)
    n_rows = n_tokens
    if share.summed.of_each == "row":
        is_own_K = np.array([kind.unit == units[0] for kind in calls.kinds], dtype=np.bool_)
        kind_S = np.zeros(len(calls.rows_S), dtype=np.int64) if calls.kind_C is None else calls.kind_C[calls.call_S]
        n_rows = int(calls.rows_S[is_own_K[kind_S]].sum())
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
