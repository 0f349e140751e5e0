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
    """layer: whose calls wait for what travels; None: nothing does."""

    key: Hashable
    layer: int | None


def outline(plan: DispatchPlan) -> Outline | None:
    """None where more matters: weights for later layers travel, or several units share the tokens of a chunk."""
    calls, transfers = plan.calls, plan.transfers
    if plan.n_tokens > 1 and len(calls.kinds) > 1:
        return None  # how many tokens each unit computes for hangs on all rows
    layer, travelling = None, None
    if len(transfers):
        layers = set(transfers.layer_M.tolist())
        if len(layers) > 1:
            return None
        layer = layers.pop()
        awaited = None
        if not transfers.as_one:
            places = {expert: place for place, expert in enumerate(transfers.expert_M.tolist())}
            awaited = tuple(places.get(expert) for expert in calls.expert_S.tolist())
        travelling = transfers.links, transfers.as_one, _told(transfers.n_bytes_M), _told(transfers.link_M), awaited
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
    return Outline(key, layer)


def _told(values: NDArray[np.int64] | None) -> bytes | None:
    return None if values is None else values.tobytes()
