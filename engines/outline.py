"""What the price and the counters of a plan hang on, so that plans of equal outline are priced and counted once.

Which experts are called and which tokens stand in which rows is left out, but for which call waits for which transfer;
of rows that carry tokens, how many each kind of call has.

Legend: S segments, C calls, K kinds of calls, M transfers.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import Unit

if TYPE_CHECKING:
    from engines.calls import Calls
    from engines.dispatch import DispatchPlan


class Key:
    """What is told, with its hash computed once: it is looked up for every layer of every step."""

    __slots__ = ("_hash", "told")

    def __init__(self, told: Hashable) -> None:
        self.told, self._hash = told, hash(told)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self._hash == other._hash and self.told == other.told)


class Outline(NamedTuple):
    """layers: whose calls wait for what travels, ascending. as_one: all of a layer's fill a buffer together.

    units: which units stand for which others, that cost the same in their place; but for that the plan is as the one of
    equal outline without any, and it counts alike.
    """

    key: Hashable
    layers: tuple[int, ...] = ()
    as_one: bool = False
    units: tuple[tuple[Unit, Unit], ...] = ()


def outline(plan: DispatchPlan) -> Outline | None:
    """None where more matters: weights for several layers travel one by one, or several units share the tokens of a
    chunk."""
    calls, transfers = plan.calls, plan.transfers
    if plan.n_tokens > 1 and len(calls.kinds) > 1:
        return None  # how many tokens each unit computes for hangs on all rows
    layers: tuple[int, ...] = ()
    travelling = None
    if len(transfers):
        layer_M = transfers.layer_M.tolist()
        layers = tuple(sorted(set(layer_M)))
        if len(layers) > 1 and not transfers.as_one:
            return None
        of_layer = None if len(layers) == 1 else tuple(map(layers.index, layer_M))
        awaited = None
        if not transfers.as_one:
            places = {expert: place for place, expert in enumerate(transfers.expert_M.tolist())}
            awaited = tuple(places.get(expert) for expert in calls.expert_S.tolist())
        columns = _told(transfers.n_bytes_M), _told(transfers.link_M), of_layer, awaited
        travelling = transfers.links, transfers.as_one, *columns
    told = (
        plan.n_tokens,
        plan.routed_pairs,
        plan.dropped_pairs,
        plan.hits,
        plan.misses,
        plan.unused,
        plan.prefetched,
        calls.kinds,
        _told(calls.rows_S),
        _valid_K(calls),
        _told(calls.starts_C),
        _told(calls.kind_C),
        _told(calls.weight_loads_C),
        travelling,
        plan.exchanges,
    )
    return Outline(Key(told), layers, transfers.as_one)


def _valid_K(calls: Calls) -> int | bytes:
    """Rows that carry tokens, by kind of call."""
    n = len(calls.kinds)
    if n == 1 or calls.kind_C is None:
        return int(calls.valid_S.sum())
    kind_S = calls.kind_C if len(calls.kind_C) == len(calls.valid_S) else calls.kind_C[calls.call_S]
    return np.bincount(kind_S, calls.valid_S, n).tobytes()


def _told(values: NDArray[np.int64] | None) -> bytes | None:
    return None if values is None else values.tobytes()
