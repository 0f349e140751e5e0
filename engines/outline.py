"""What the price and the counters of a plan hang on, so that plans of equal outline are priced and counted once.

Which experts are called and which tokens stand in which rows is left out, but for which call waits for which transfer.

Legend: S segments, C calls, M transfers.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engines.dispatch import DispatchPlan


class Outline(NamedTuple):
    """layers: whose calls wait for what travels, ascending. as_one: all of a layer's fill a buffer together."""

    key: Hashable
    layers: tuple[int, ...] = ()
    as_one: bool = False


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
    key = (
        plan.n_tokens,
        plan.routed_pairs,
        plan.dropped_pairs,
        plan.hits,
        plan.misses,
        plan.unused,
        plan.prefetched,
        calls.kinds,
        _told(calls.rows_S),
        _told(calls.valid_S),
        _told(calls.starts_C),
        _told(calls.kind_C),
        _told(calls.weight_loads_C),
        travelling,
        plan.exchanges,
    )
    return Outline(key, layers, transfers.as_one)


def _told(values: NDArray[np.int64] | None) -> bytes | None:
    return None if values is None else values.tobytes()
