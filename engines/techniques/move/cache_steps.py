"""What caches of all layers do for one decoded token, asked at once: who finds its expert there, who comes, who goes.

The rules are those of `engines.techniques.move.caches`, which decides layer by layer and says the same. Only for
tokens whose experts all find room beside each other, which a cache of top_k slots or more always has, and without
predictions. A token's experts stand by number.

Legend: L layers with experts, E experts, K experts of the token, S slots that all layers share, X what happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from engines.calls import Integers
from engines.residency import Booleans

Events = tuple[list[int], list[bool]]
"""Places in turn, and whether an expert comes there or goes."""


class CacheStep(NamedTuple):
    """hits_LK: whether each expert lies there when its layer is in turn. place_X, comes_X: what happens, in turn: the
    expert of a place in [L, E] comes, or goes. ends_L: how much of it once each layer ran."""

    hits_LK: Booleans
    place_X: Integers
    comes_X: Booleans
    ends_L: Integers


def step_of_layers(
    ids_LK: Integers, held_LE: Booleans, last_use_LE: Integers, uses_LE: Integers | None, n_slots: int
) -> CacheStep:
    """Each layer has slots of its own. uses_LE: the least used goes; None: the one of longest ago."""
    (n_layers, top_k), n_experts = ids_LK.shape, held_LE.shape[1]
    hits_LK = np.take_along_axis(held_LE, ids_LK, axis=1)
    n_given_up_L = top_k - hits_LK.sum(1) - (n_slots - held_LE.sum(1))
    first_L1 = n_experts * np.arange(n_layers)[:, None]
    goes_LK = np.zeros_like(ids_LK)
    if (n_given_up_L > 0).any():
        rank_LE = last_use_LE
        if uses_LE is not None:
            rank_LE = uses_LE * (int(last_use_LE.max()) + 1) + last_use_LE
        rank_LE = rank_LE * n_experts + np.arange(n_experts)
        never = np.iinfo(np.int64).max
        rank_LE = np.where(held_LE, rank_LE, never)
        np.put_along_axis(rank_LE, ids_LK, never, axis=1)
        least_LK = np.sort(np.partition(rank_LE, top_k - 1, axis=1)[:, :top_k], axis=1)
        goes_LK = least_LK % n_experts
    is_given_up_LK = np.arange(top_k) < n_given_up_L[:, None]
    happens_LX = np.concatenate([is_given_up_LK, ~hits_LK], axis=1)
    place_LX = np.concatenate([goes_LK, ids_LK], axis=1) + first_L1
    comes_LX = np.broadcast_to(np.arange(2 * top_k) >= top_k, place_LX.shape)
    return CacheStep(hits_LK, place_LX[happens_LX], comes_LX[happens_LX], happens_LX.sum(1).cumsum())


def step_of_stayers(
    ids_LK: Integers, held_LE: Booleans, last_use_LE: Integers, stays_LE: Booleans, n_shared: int
) -> CacheStep:
    """Some experts have slots of their own, and all others of all layers share some, of which the one of longest ago
    goes."""
    n_experts = held_LE.shape[1]
    hits_LK = np.take_along_axis(held_LE, ids_LK, axis=1)
    stays_LK = np.take_along_axis(stays_LE, ids_LK, axis=1)
    place_LK = ids_LK + n_experts * np.arange(len(ids_LK))[:, None]
    place_S = (held_LE & ~stays_LE).reshape(-1).nonzero()[0]
    shared = dict.fromkeys(place_S[last_use_LE.reshape(-1)[place_S].argsort(kind="stable")].tolist())
    first_stays_LK = stays_LK & ~hits_LK
    events = list[int](), list[bool]()
    ends, hits, n_free = [], list[bool](), n_shared - len(shared)
    for staying, passing in zip(_by_row(place_LK, first_stays_LK), _by_row(place_LK, ~stays_LK), strict=True):
        _happen(events, staying, True)
        if passing:
            hits += [place in shared for place in passing]
            n_free = _share(shared, passing, n_free, events)
        ends.append(len(events[0]))
    hits_LK[~stays_LK] = hits
    return CacheStep(hits_LK, np.array(events[0], np.int64), np.array(events[1], np.bool_), np.array(ends))


def _by_row(place_LK: Integers, chosen_LK: Booleans) -> Iterator[list[int]]:
    """Those that are chosen in each row."""
    places, ends = place_LK[chosen_LK].tolist(), chosen_LK.sum(1).cumsum().tolist()
    return (places[first:end] for first, end in zip([0, *ends], ends, strict=False))


def _happen(events: Events, places: Sequence[int], comes: bool) -> None:
    events[0].extend(places)
    events[1].extend([comes] * len(places))


def _share(shared: dict[int, None], called: Sequence[int], n_free: int, events: Events) -> int:
    """Those that are called, in ascending order, are in shared slots from now on, the latest; how many slots are free
    then. shared: in the order in which they go."""
    misses = [place for place in called if place not in shared]
    n_given_up = max(len(misses) - n_free, 0)
    if n_given_up:
        given_up = list(islice((one for one in shared if one not in called), n_given_up))
        for place in given_up:
            del shared[place]
        _happen(events, given_up, False)
    _happen(events, misses, True)
    for place in called:
        shared.pop(place, None)
        shared[place] = None
    return n_free - len(misses) + n_given_up
