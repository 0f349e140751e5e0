"""The calls of one decoded token where they are known by its experts: nothing overflows, nothing is ranked.

They say what the general way says, in a tenth of the steps: a plan stands between every two layers of a token.

Legend: T tokens (one), K experts of the token, E experts, R rows, S segments, C calls, G groups of calls that are made
together, X experts in the order of the plan; of several tokens at once, N of them, U units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from devices.base import Unit
from engines.calls import CallKind, Calls, Integers
from engines.dispatch import Exchange
from engines.residency import Booleans
from engines.techniques.base import Rows, Share
from engines.techniques.context import LayerInput
from engines.techniques.exchanges import visits
from engines.techniques.place.hosts import BetweenTwo
from engines.techniques.place.ndp import Division, Ndp


class Computed(NamedTuple):
    """Of one token: its calls, token_R and weight_R of their rows, what units send each other."""

    calls: Calls
    token_R: Tensor
    weight_R: Tensor
    exchanges: tuple[Exchange, ...] = ()


class Made(NamedTuple):
    """Calls, and what units send each other for them."""

    calls: Calls
    exchanges: tuple[Exchange, ...]


class AlikeTokens(NamedTuple):
    """of: whose answer it is; rows of the same compare, whatever their layer. told_NX: tokens of equal rows cost alike.

    units, on_NU: of units that cost the same in each other's place, which those are that each token's calls are on. A
    row leaves out which these are: the first of them stands for the first, and so on.
    """

    of: int
    told_NX: Integers
    units: tuple[Unit, ...] = ()
    on_NU: Booleans | None = None


class OneToken(Protocol):
    def computed(self, seen: LayerInput) -> Computed:
        """seen.routing: of one token, on the CPU."""
        ...

    def alike(self, ids_NK: Integers, held_E: Booleans | None, any_order: bool) -> Integers | None:
        """[N, X]: of N tokens, what their calls and what moves for them hang on; held_E: whether an expert lies in the
        memory of the GPU, None where nothing is watched. any_order: units that work side by side cost the same in
        whatever order they are called. None where more matters, or more than is worth telling."""
        ...


class ChosenAlone:
    """Each chosen expert has a call of its own."""

    def __init__(
        self, rows_E: Sequence[int] | Callable[[LayerInput], int] | None, kind: CallKind, is_sorted: bool = True
    ) -> None:
        """rows_E: of each expert's call, or what says those of all calls of a step; None: one each. is_sorted: calls
        stand by expert, as in the general way; else, where each has one row, in the router's order."""
        self._rows = rows_E if callable(rows_E) else None
        known_E = None if callable(rows_E) or rows_E is None or set(rows_E) == {1} else rows_E
        self._rows_E = None if known_E is None else np.array(known_E, dtype=np.int64)
        self.is_plain = self._rows is None and self._rows_E is None
        """Whether each call has one row."""
        self.is_sorted = is_sorted or not self.is_plain
        self._kinds = (kind,)

    def computed(self, seen: LayerInput) -> Computed:
        ids_K, weight_K = seen.routing.expert_ids_TK.numpy()[0], seen.routing.weights_TK.numpy()[0]
        order_K = ids_K.argsort(kind="stable") if self.is_sorted else slice(None)
        expert_S, n_pairs = ids_K[order_K], len(ids_K)
        counting_S, one_S = _counting(n_pairs)
        rows_S = None
        if self._rows is not None:
            rows_S = self._rows(seen) * one_S
        elif self._rows_E is not None:
            rows_S = self._rows_E[expert_S]
        if rows_S is None:
            token_R, weight_R = np.zeros(n_pairs, dtype=np.int64), weight_K[order_K]
            calls = Calls(expert_S, one_S, one_S, counting_S, counting_S, self._kinds)
        else:
            ends_S = rows_S.cumsum()
            first_S, n_rows = ends_S - rows_S, int(ends_S[-1])
            token_R, weight_R = np.full(n_rows, -1), np.zeros(n_rows, dtype=weight_K.dtype)
            token_R[first_S], weight_R[first_S] = 0, weight_K[order_K]
            calls = Calls(expert_S, rows_S, one_S, first_S, counting_S, self._kinds)
        return Computed(calls, torch.from_numpy(token_R), torch.from_numpy(weight_R))

    def alike(self, ids_NK: Integers, held_E: Booleans | None, any_order: bool) -> Integers | None:
        """How many rows each of its calls has, and which of its experts, as they stand, lie there."""
        if self._rows is not None:
            return None
        held_NX = _held(ids_NK, held_E, self.is_sorted)
        if self._rows_E is None:
            return held_NX
        told_NX: Integers = np.concatenate([self._rows_E[np.sort(ids_NK, axis=1)], held_NX], axis=1)
        return told_NX


class InGroups:
    """A chosen expert is computed with all experts of its group."""

    def __init__(self, every: Rows, group_of_E: Sequence[int], kind: CallKind) -> None:
        """every: what is laid out where all experts are chosen, each in one segment."""
        self._every = every
        self._group_of_E = np.array(group_of_E)
        self._group_of_S = self._group_of_E[every.expert_S]
        self._group_of_C = self._group_of_S[every.starts_C]
        self._n_segments_C = np.diff(every.starts_C, append=len(every.expert_S))
        self._first_S = every.rows_S.cumsum() - every.rows_S
        self._segment_of_E = every.expert_S.argsort()
        self._kinds = (kind,)

    def computed(self, seen: LayerInput) -> Computed:
        ids_K, weight_K = seen.routing.expert_ids_TK.numpy()[0], seen.routing.weights_TK.numpy()[0]
        every = self._every
        valid_S = np.zeros(len(every.expert_S), dtype=np.int64)
        valid_S[self._segment_of_E[ids_K]] = 1
        is_made_G = np.zeros(len(self._group_of_E), dtype=np.bool_)
        is_made_G[self._group_of_E[ids_K]] = True
        is_made_C = is_made_G[self._group_of_C]
        if is_made_C.all():
            first_E, rows_S = self._first_S[self._segment_of_E], every.rows_S
            calls = Calls(every.expert_S, rows_S, valid_S, self._first_S, every.starts_C, self._kinds)
        else:
            is_made_S = is_made_G[self._group_of_S]
            expert_S, rows_S, n_segments_C = (
                every.expert_S[is_made_S],
                every.rows_S[is_made_S],
                self._n_segments_C[is_made_C],
            )
            first_S = rows_S.cumsum() - rows_S
            first_E = np.zeros(len(self._group_of_E), dtype=np.int64)
            first_E[expert_S] = first_S
            starts_C = n_segments_C.cumsum() - n_segments_C
            calls = Calls(expert_S, rows_S, valid_S[is_made_S], first_S, starts_C, self._kinds)
        row_K, n_rows = first_E[ids_K], int(rows_S.sum())
        token_R, weight_R = np.full(n_rows, -1), np.zeros(n_rows, dtype=weight_K.dtype)
        token_R[row_K], weight_R[row_K] = 0, weight_K
        return Computed(calls, torch.from_numpy(token_R), torch.from_numpy(weight_R))

    def alike(self, ids_NK: Integers, held_E: Booleans | None, any_order: bool) -> Integers | None:
        return None


class OnNdp:
    """Chosen experts in slices on NDP units, some of them on the GPU: as many, and so wide, as lie there already.

    The calls of a number of them are made once, of the experts' places in an order: those on the GPU, one that is cut
    between both, the others; by number inside each. A row stands at the place of its expert.
    """

    def __init__(self, place: Ndp, top_k: int, made: Callable[[Sequence[Share], int], Made]) -> None:
        """made: of shares of experts 0 to top_k - 1 that have a row each."""
        self._place, self._top_k, self._made = place, top_k, made
        self._of_hits: dict[int, tuple[Division, Made]] = {}

    def computed(self, seen: LayerInput) -> Computed:
        ids_K, weight_K = seen.routing.expert_ids_TK.numpy()[0], seen.routing.weights_TK.numpy()[0]
        order_K, n_hits = ids_K.argsort(kind="stable"), 0
        if self._place.looks_for_hits(seen):
            hit_K = self._place.hits(seen)[ids_K[order_K]]
            n_hits = int(np.count_nonzero(hit_K))
            if 0 < n_hits < self._top_k:
                if n_hits > (n_on_gpu := self._division(n_hits)[0].n_whole):
                    hit_K &= hit_K.cumsum() <= n_on_gpu
                order_K = order_K[(~hit_K).argsort(kind="stable")]
        made = self._division(n_hits)[1]
        every = made.calls
        ordered_K = ids_K[order_K]
        calls = Calls(
            ordered_K[every.expert_S],
            every.rows_S,
            every.valid_S,
            every.first_row_S,
            every.starts_C,
            every.kinds,
            every.kind_C,
        )
        return Computed(calls, _no_token(self._top_k), torch.from_numpy(weight_K[order_K]), made.exchanges)

    def alike(self, ids_NK: Integers, held_E: Booleans | None, any_order: bool) -> Integers | None:
        """How many of its experts lie there: those run there, and the others are in slices."""
        if held_E is None:
            return np.zeros((len(ids_NK), 1), dtype=np.int64)
        n_held_N1: Integers = held_E[ids_NK].sum(axis=1, keepdims=True)
        return n_held_N1

    def _division(self, n_hits: int) -> tuple[Division, Made]:
        if n_hits not in self._of_hits:
            division = self._place.divided(self._top_k, self._top_k, 1, n_hits)
            shares = self._place.shares_of(_counting(self._top_k)[0], division, self._top_k)
            self._of_hits[n_hits] = division, self._made(shares, self._top_k)
        return self._of_hits[n_hits]


class BetweenUnits:
    """Each chosen expert has a row, in a call on the GPU or on the unit that holds it."""

    def __init__(self, place: BetweenTwo, kinds: tuple[CallKind, ...], value_bytes: int) -> None:
        """kinds: of the place's pieces. value_bytes: as of `exchanges_of`."""
        self._place, self._kinds, self._value_bytes = place, kinds, value_bytes
        self._of_kinds: dict[bytes, tuple[Exchange, ...]] = {}

    def computed(self, seen: LayerInput) -> Computed:
        ids_K, weight_K = seen.routing.expert_ids_TK.numpy()[0], seen.routing.weights_TK.numpy()[0]
        order_K = ids_K.argsort(kind="stable")
        expert_S = ids_K[order_K]
        counting_S, one_S = _counting(len(ids_K))
        kind_C = self._place.pieces_of_token(seen, expert_S)
        calls = Calls(expert_S, one_S, one_S, counting_S, counting_S, self._kinds, kind_C)
        exchanges = self._exchanges(kind_C) if self._place.whole.visited is not None else ()
        return Computed(calls, _no_token(len(ids_K)), torch.from_numpy(weight_K[order_K]), exchanges)

    def _exchanges(self, kind_C: Integers) -> tuple[Exchange, ...]:
        """The token's row to each unit that has a call, and a result from there."""
        key = kind_C.tobytes()
        if key not in self._of_kinds:
            assert self._place.whole.visited is not None
            tokens = {self._kinds[kind].unit: 1 for kind in np.unique(kind_C).tolist()}
            self._of_kinds[key] = visits(self._place.whole.visited, tokens, self._value_bytes)
        return self._of_kinds[key]

    def alike(self, ids_NK: Integers, held_E: Booleans | None, any_order: bool) -> Integers | None:
        """As of `ChosenAlone`, where one unit holds all. Of several: what the GPU is given, in the order of its calls,
        each expert by where it is fetched from, and how many each of the others is given."""
        if self._place.n_others == 1:
            return _held(ids_NK, held_E, True)
        if not any_order or not self._place.overlaps:
            return None
        expert_NX = np.sort(ids_NK, axis=1)
        lies_NX = None if held_E is None else held_E[expert_NX]
        piece_NX = self._place.pieces_of_tokens(expert_NX, lies_NX)
        comes_NX = (
            np.zeros_like(expert_NX) if lies_NX is None else np.where(lies_NX, 0, self._place.home_of(expert_NX) + 1)
        )
        told_NX = np.where(piece_NX == 0, -comes_NX, piece_NX)
        return np.take_along_axis(told_NX, piece_NX.argsort(axis=1, kind="stable"), axis=1)

    @property
    def others(self) -> tuple[Unit, ...]:
        return self._place.others

    def interchanged(self, told_NX: Integers) -> tuple[Integers, Booleans]:
        """What `alike` tells, where the others cost the same in each other's place, and which of them each token's
        calls are on."""
        is_other_NX = told_NX > 0
        is_next_NX = is_other_NX & (np.diff(told_NX, axis=1, prepend=0) > 0)  # they stand behind the GPU's, ascending
        on_NU = (told_NX[:, :, None] == np.arange(1, self._place.n_others + 1)).any(1)
        return np.where(is_other_NX, is_next_NX.cumsum(1), np.sign(told_NX)), on_NU


class OnRanks:
    """Chosen experts where they lie: by the shares that have them, and in each share by number.

    Whole experts have a call on one rank; to several that hold them they are dealt in turn. Of slices each rank of a
    share has a call for every expert; the calls of so many experts in each share are made once.
    """

    def __init__(
        self, shares: Sequence[Share], kinds_of_shares: Sequence[tuple[CallKind, ...]], n_experts: int
    ) -> None:
        """kinds_of_shares: of the pieces of each."""
        self._kinds = tuple(dict.fromkeys(kind for kinds in kinds_of_shares for kind in kinds))
        self._are_slices = any(len(share.pieces) > 1 and not share.dealt for share in shares)
        self._n_pieces_G = np.array([len(kinds) for kinds in kinds_of_shares])
        self._kind_GN = np.zeros((len(shares), self._n_pieces_G.max()), dtype=np.int64)
        share_of_E = np.zeros(n_experts, dtype=np.int64)
        for number, (share, kinds) in enumerate(zip(shares, kinds_of_shares, strict=True)):
            share_of_E[slice(None) if share.experts_E is None else share.experts_E] = number
            self._kind_GN[number, : len(kinds)] = [self._kinds.index(kind) for kind in kinds]
        self._share_of_E = share_of_E
        self._place_of_E = np.lexsort((np.arange(n_experts), share_of_E)).argsort()
        self._of_counts: dict[bytes, tuple[Integers, Integers]] = {}

    def computed(self, seen: LayerInput) -> Computed:
        ids_K, weight_K = seen.routing.expert_ids_TK.numpy()[0], seen.routing.weights_TK.numpy()[0]
        order_K = self._place_of_E[ids_K].argsort(kind="stable")
        expert_X, n = ids_K[order_K], len(ids_K)
        share_X = self._share_of_E[expert_X]
        row_S, kind_C = self._dealt(share_X) if not self._are_slices else self._sliced(share_X)
        counting_S, one_S = _counting(len(row_S))
        calls = Calls(
            expert_X if row_S is counting_S else expert_X[row_S], one_S, one_S, row_S, counting_S, self._kinds, kind_C
        )
        return Computed(calls, _no_token(n), torch.from_numpy(weight_K[order_K]))

    def alike(self, ids_NK: Integers, held_E: Booleans | None, any_order: bool) -> Integers | None:
        """In whose shares its experts are."""
        share_NK: Integers = np.sort(self._share_of_E[ids_NK], axis=1)
        return share_NK

    def _dealt(self, share_X: Integers) -> tuple[Integers, Integers]:
        """Row and kind of each call."""
        counting_X = _counting(len(share_X))[0]
        turn_X = counting_X - share_X.searchsorted(share_X)
        return counting_X, self._kind_GN[share_X, turn_X % self._n_pieces_G[share_X]]

    def _sliced(self, share_X: Integers) -> tuple[Integers, Integers]:
        """The same: a share's experts on its first rank, then on its next."""
        key = share_X.tobytes()
        if key not in self._of_counts:
            rows, kinds = [], []
            for share in dict.fromkeys(share_X.tolist()):
                own = (share_X == share).nonzero()[0]
                n_pieces = self._n_pieces_G[share]
                rows.append(np.tile(own, n_pieces))
                kinds.append(self._kind_GN[share, :n_pieces].repeat(len(own)))
            self._of_counts[key] = np.concatenate(rows), np.concatenate(kinds)
        return self._of_counts[key]


def _held(ids_NK: Integers, held_E: Booleans | None, is_sorted: bool) -> Integers:
    """Whether each expert lies there, in the order of the calls."""
    if held_E is None:
        return np.zeros((len(ids_NK), 1), dtype=np.int64)
    held_NK: Integers = held_E[np.sort(ids_NK, axis=1) if is_sorted else ids_NK].astype(np.int64)
    return held_NK


@cache
def _no_token(n_rows: int) -> Tensor:
    """token_R of rows of the one token. Nobody writes to it."""
    return torch.zeros(n_rows, dtype=torch.int64)


@cache
def _counting(n: int) -> tuple[Integers, Integers]:
    """0 to n - 1, and n ones. Nobody writes to them."""
    return np.arange(n), np.ones(n, dtype=np.int64)
