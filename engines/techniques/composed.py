"""The four decisions of a technique, put together to the plan of one layer.

Legend: T tokens, K experts per token, P = T * K routed pairs in row-major order, E experts, R rows, S segments, C
calls, M transfers; of decoded tokens, N of them, U units, X figures that tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from devices.base import Unit
from engines.calls import Calls, Integers
from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.prediction import GuessRules
from engines.residency import Residency, Slots
from engines.techniques.base import Layout, Move, Moved, Place, Route, Share
from engines.techniques.context import NOTHING, Asks, BuildContext, ChunkPhase, LayerInput
from engines.techniques.exchanges import exchanges_of
from engines.techniques.layout.capacity import Capacity
from engines.techniques.layout.exact import Exact, exact_rows
from engines.techniques.layout.tiers import Tiers
from engines.techniques.move.caches import Cache
from engines.techniques.move.nothing import NothingMoves
from engines.techniques.move.two_buffers import TwoBuffers
from engines.techniques.one_token import (
    AlikeTokens,
    BetweenUnits,
    ChosenAlone,
    InGroups,
    Made,
    OneToken,
    OnNdp,
    OnRanks,
)
from engines.techniques.place.hosts import GPU, BetweenTwo
from engines.techniques.place.ndp import Ndp
from engines.techniques.place.ranks import Ranks
from engines.techniques.place.residency import ByCost
from engines.techniques.place.units import DecodesOn, Fixed
from engines.techniques.route import PredictedRoute, RoutersChoice, ToldRoute
from engines.techniques.share_calls import calls_of, cut, joined_calls, kinds_of, of_share

NOTHING_MOVED = Moved()


class ComposedTechnique:
    """An `engines.techniques.base.Technique`."""

    def __init__(
        self,
        name: str,
        route: Route,
        place: Place,
        layouts: Mapping[ChunkPhase, Layout],
        move: Move,
        context: BuildContext,
    ) -> None:
        self.name = name
        self.asks = _joined_asks((route.asks, place.asks, *(layout.asks for layout in layouts.values()), move.asks))
        self.needs_saliency = any(layout.overflow == "saliency" for layout in layouts.values())
        is_of_phase = isinstance(route, PredictedRoute) and route.hangs_on_phase
        self.couples_tokens = is_of_phase or any(layout.may_overflow for layout in layouts.values())
        self._route = None if isinstance(route, RoutersChoice) else route
        self._move = None if isinstance(move, NothingMoves) else move
        self._place = place
        self._layouts = layouts
        self._known: dict[int, OneToken | None] = {}
        self._of_all_layers: OneToken | None = None
        self._on_ranks: dict[int, OneToken] = {}
        """By the identity of the place's shares."""
        # What is computed layer by layer only because something moves is, bit for bit, what it would be without.
        self._is_sorted = self._move is None or not context.routers_order
        self._n_experts = context.sizes.n_experts if context.sizes is not None else 0
        self._sparse_layers = context.sparse_layers
        self._activation_bytes = context.sizes.activation_bytes if context.sizes is not None else 0

    @cached_property
    def guesses(self) -> GuessRules | None:
        return self._route.rules(self._sparse_layers) if isinstance(self._route, PredictedRoute) else None

    @cached_property
    def batches_exactly(self) -> bool:
        """Of a place that knows no load."""
        is_fixed = isinstance(self._place, Fixed | DecodesOn)
        shares = self._place.decode_shares(0) if is_fixed else None
        if shares is None or len(shares) != 1 or self._route is not None or self._move is not None:
            return False
        share, layout = shares[0], self._layouts["decode"]
        is_whole = len(share.pieces) == 1 and share.pieces[0].width is share.pieces[0].hidden is None
        return self.asks == NOTHING and is_whole and not share.cut and (share.exact or isinstance(layout, Exact))

    def plan(self, seen: LayerInput) -> DispatchPlan:
        executed = prediction = compared = None
        if self._route is not None:
            if seen.predicted is not None:
                compared = seen.routing, seen.predicted
            routing = self._route.executed(seen)
            if routing is not seen.routing:
                seen, executed = replace(seen, routing=routing), routing
            prediction = self._route.predict(seen)
        routing, layout = seen.routing, self._layouts[seen.phase]
        n_tokens, top_k = routing.expert_ids_TK.shape
        if n_tokens == 1 and seen.phase == "decode" and routing.weights_TK.is_cpu:
            known = self._one_token(seen)
            if known is not None:
                calls, token_R, weight_R, exchanges = known.computed(seen)
                moved = NOTHING_MOVED if self._move is None else self._move.moved(seen, calls, prediction)
                if exchanges:
                    moved = moved._replace(exchanges=exchanges + moved.exchanges)
                told = self._prefetched(seen.layer, moved), executed, prediction, compared
                return DispatchPlan(1, token_R, weight_R, calls, top_k, 0, *moved, *told)
        ids_TK = routing.ids_on_host_TK
        load_E = np.bincount(ids_TK.reshape(-1), minlength=routing.n_experts)
        shares = self._place.shares(seen, load_E)
        if len(shares) == 1:
            laid = exact_rows(load_E) if shares[0].exact else cut(layout.rows(seen, load_E), shares[0], layout)
            calls = calls_of(laid, shares[0], layout, first_row=0)
            kept_E = laid.kept_E
        else:
            calls, kept_E = self._several(seen, load_E, shares)
        overflows = kept_E is not load_E and bool((kept_E < load_E).any())
        ranked_T = self._ranked(seen, n_tokens) if overflows else None
        pair_P, row_P = _rows_of_pairs(ids_TK, load_E, kept_E, calls, ranked_T)
        token_R, weight_R = self._rows(seen, pair_P, row_P, calls, overflows)
        moved = NOTHING_MOVED if self._move is None else self._move.moved(seen, calls, prediction)
        token_R_here = pair_P // top_k if shares[0].visited is not None else None
        exchanges = exchanges_of(shares, calls, n_tokens, self._activation_bytes, token_R_here)
        if exchanges:
            moved = moved._replace(exchanges=exchanges + moved.exchanges)
        n_pairs = n_tokens * top_k
        n_dropped = n_pairs - int(kept_E.sum())
        told = self._prefetched(seen.layer, moved), executed, prediction, compared
        return DispatchPlan(n_tokens, token_R, weight_R, calls, n_pairs, n_dropped, *moved, *told)

    def _prefetched(self, layer: int, moved: Moved) -> int | None:
        """Transfers of later layers."""
        if self._move is None or not self._move.prefetches:
            return None
        return int(np.count_nonzero(moved.transfers.layer_M > layer)) if len(moved.transfers) else 0

    def frozen(self, layers: Sequence[int]) -> dict[str, tuple[tuple[int, ...], ...]]:
        """What calibration froze for prefill, by the fields of `results.records.ExpertHeat`; empty where nothing is."""
        found: dict[str, tuple[tuple[int, ...], ...]] = {}
        layout = self._layouts["prefill"]
        if isinstance(layout, Tiers):
            found["capacities"] = tuple(layout.capacities(layer) for layer in layers)
            found["graphs"] = tuple(tuple(map(len, layout.graphs(layer).experts)) for layer in layers)
        place = self._place.prefill if isinstance(self._place, DecodesOn) else self._place
        if isinstance(place, ByCost):
            found["hot"] = tuple(place.hot_experts(layer) for layer in layers)
        return found

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        """Of one share that is laid out as the layout says, in whatever pieces; several shares are decided later.

        None where the route has a say between router and experts that is not said beforehand (`guesses`), or what is
        shown cannot be shown later. A move says nothing of what is called: its plan is made afterwards, or when an
        expert must be brought.
        """
        asks = self.asks
        if self._route is not None and (self.guesses is None or asks.slots):
            return None
        can_wait = not (asks.counts or asks.waits) and (self._route is not None or not asks.hidden_state)
        return self._said_layout(layer) if can_wait else None

    def told_layout(self, layer: int) -> DecodeLayout | None:
        """As `decode_layout`, of a route that is told its predictions. The price and the counters of a token's plan
        hang besides on how many of the experts that its router chose were predicted, and on nothing else.

        None of every other route, and where what lies somewhere outlasts its layer.
        """
        is_told = isinstance(self._route, ToldRoute) and isinstance(self._move, TwoBuffers)
        asks_more = self.asks.hidden_state or self.asks.counts or self.asks.slots
        return self._said_layout(layer) if is_told and not asks_more else None

    def _said_layout(self, layer: int) -> DecodeLayout | None:
        shares = self._place.decode_shares(layer)
        if shares is None or len(shares) != 1 or shares[0].cut:
            return None
        share = shares[0]
        said = DecodeLayout() if share.exact else self._layouts["decode"].decode_layout(layer, self._n_experts)
        widths = tuple(piece.width for piece in share.pieces if piece.width is not None)
        hidden = tuple(piece.hidden for piece in share.pieces if piece.hidden is not None)
        n_whole = len(share.pieces) - len(widths) - len(hidden)
        if n_whole and (widths or hidden or not (n_whole == 1 or share.dealt)):
            return None
        return said if said is None or n_whole else replace(said, widths=widths, hidden=hidden)

    def alike_tokens(
        self,
        layer: int,
        ids_NK: Integers,
        residency: Residency | None,
        any_order: bool,
        interchange: Callable[[Sequence[Unit]], bool],
    ) -> AlikeTokens | None:
        """What plans of decoded tokens hang on that are made token by token, of a layer that has had one. Those of
        equal rows cost and count alike, as long as the same lies in the same places. any_order: as of `OneToken.alike`.
        interchange: whether units cost the same in each other's place. None where more matters.
        """
        known = self._known.get(layer)
        stays = self._move is None or self._move.keeps_what_lies
        if known is None or not stays or self._route is not None or self.asks.hidden_state or self.asks.waits:
            return None
        held_E = None
        if residency is not None:
            if tuple(residency.slots) != (GPU,):
                return None
            held_E = residency.holds_E(GPU, layer)
        told_NX = known.alike(ids_NK, held_E, any_order)
        if told_NX is None:
            return None
        if isinstance(known, BetweenUnits) and len(known.others) > 1 and interchange(known.others):
            told_NX, on_NU = known.interchanged(told_NX)
            return AlikeTokens(id(known), told_NX, known.others, on_NU)
        return AlikeTokens(id(known), told_NX)

    @property
    def has_cache(self) -> bool:
        return isinstance(self._move, Cache)

    def cache_of_tokens(self, layers: Iterable[int]) -> Cache | None:
        """What a decoded token's experts pass through in these layers, which have had one, each with a call of one row,
        by number. Its plan hangs on nothing but which of them lie there. None where more matters."""
        alone = [self._known.get(layer) for layer in layers]
        if not all(isinstance(one, ChosenAlone) and one.is_plain and one.is_sorted for one in alone):
            return None
        asks_more = self._route is not None or self.asks.hidden_state or self.asks.counts or self.asks.waits
        return self._move if isinstance(self._move, Cache) and not asks_more else None

    def _one_token(self, seen: LayerInput) -> OneToken | None:
        """What is known of a decode step's calls before its experts are; asked once a layer."""
        if seen.layer not in self._known:
            self._known[seen.layer] = self._ask_one_token(seen)
        return self._known[seen.layer]

    def _ask_one_token(self, seen: LayerInput) -> OneToken | None:
        if self._of_all_layers is not None:
            return self._of_all_layers
        if isinstance(self._place, Ndp):
            self._of_all_layers = OnNdp(self._place, seen.routing.expert_ids_TK.shape[1], self._made)
            return self._of_all_layers
        if isinstance(self._place, BetweenTwo):
            kinds = kinds_of(self._place.whole, self._layouts["decode"])
            self._of_all_layers = BetweenUnits(self._place, kinds, self._activation_bytes)
            return self._of_all_layers
        if isinstance(self._place, Ranks) and isinstance(self._layouts["decode"], Exact):
            on_ranks = self._place.shares_of(seen.layer)
            if id(on_ranks) not in self._on_ranks:  # the place keeps its shares, of all layers or of each
                of_shares = [kinds_of(share, self._layouts["decode"]) for share in on_ranks]
                self._on_ranks[id(on_ranks)] = OnRanks(on_ranks, of_shares, seen.routing.n_experts)
            return self._on_ranks[id(on_ranks)]
        said, shares = self._said_layout(seen.layer), self._place.decode_shares(seen.layer)
        layout = self._layouts["decode"]
        if isinstance(layout, Capacity) and layout.keeps_graphs and shares is not None:
            is_whole = len(shares) == 1 and not shares[0].cut and not shares[0].exact and len(shares[0].pieces) == 1
            return ChosenAlone(layout.kept_rows, kinds_of(shares[0], layout)[0]) if is_whole else None
        if said is None or said.n_padding_calls or shares is None or len(shares[0].pieces) != 1:
            return None
        (kind,) = kinds_of(shares[0], layout)
        if said.group_of_E is None:
            return ChosenAlone(said.rows_E, kind, self._is_sorted)
        if len(said.group_of_E) != seen.routing.n_experts:
            return None  # built without the model's sizes
        every = layout.rows(seen, np.ones(seen.routing.n_experts, dtype=np.int64))
        return InGroups(every, said.group_of_E, kind) if every.weight_loads_C is None else None

    def _made(self, shares: Sequence[Share], n_experts: int) -> Made:
        """Of one token's experts, numbered from 0, that all have a row. Shares of exact rows."""
        layout, n_rows = self._layouts["decode"], 0
        parts: list[Calls] = []
        for share in shares:
            laid = exact_rows(np.ones(n_experts, np.int64) if share.experts_E is None else share.experts_E.astype(int))
            parts.append(calls_of(laid, share, layout, n_rows))
            n_rows += int(laid.rows_S.sum())
        calls = parts[0] if len(parts) == 1 else joined_calls(parts)
        return Made(calls, exchanges_of(shares, calls, 1, self._activation_bytes))

    def _several(self, seen: LayerInput, load_E: Integers, shares: Sequence[Share]) -> tuple[Calls, Integers]:
        parts: list[Calls] = []
        layout = self._layouts[seen.phase]
        kept_E, n_rows = np.zeros_like(load_E), 0
        for share in shares:
            own_E = load_E if share.experts_E is None else np.where(share.experts_E, load_E, 0)
            if share.exact:
                laid = exact_rows(own_E)
            else:
                laid = cut(of_share(layout.rows(seen, own_E, share.experts_E), share), share, layout)
            parts.append(calls_of(laid, share, layout, n_rows))
            n_rows += int(laid.rows_S.sum())
            kept_E += laid.kept_E
        return joined_calls(parts), kept_E

    def _ranked(self, seen: LayerInput, n_tokens: int) -> Integers | None:
        """Tokens in the order in which they get rows; None for the order in which they stand."""
        if self._layouts[seen.phase].overflow == "order" or n_tokens == 1:
            return None
        if seen.saliency_T is None:
            raise EngineError(f"{self.name} ranks overflow by saliency; pass the norm of each token's attention output")
        return np.argsort(-seen.saliency_T.cpu().numpy(), kind="stable")

    def _rows(
        self, seen: LayerInput, pair_P: Integers, row_P: Integers | None, calls: Calls, overflows: bool
    ) -> tuple[Tensor, Tensor]:
        """token_R and weight_R, where the routing is. row_P: of each pair; None: pair by pair, all rows."""
        n_tokens, top_k = seen.routing.expert_ids_TK.shape
        weight_P = seen.routing.weights_TK.reshape(-1)
        on_device_P = torch.from_numpy(pair_P).to(weight_P.device)
        if overflows and self._layouts[seen.phase].renormalise:
            weight_P = _renormalised(weight_P, on_device_P, n_tokens, top_k)
        token_P = pair_P // top_k
        if row_P is None:
            return torch.from_numpy(token_P).to(weight_P.device), weight_P[on_device_P]
        n_rows = int((calls.first_row_S + calls.rows_S).max(initial=0))
        token_R = np.full(n_rows, -1)
        token_R[row_P] = token_P
        weight_R = weight_P.new_zeros(n_rows)
        weight_R[torch.from_numpy(row_P).to(weight_P.device)] = weight_P[on_device_P]
        return torch.from_numpy(token_R).to(weight_P.device), weight_R


def _joined_asks(asked: Sequence[Asks]) -> Asks:
    """What one of them asks for is shown. Raises `EngineError` where two of them size one memory differently."""
    slots: dict[Unit, Slots] = {}
    for one in asked:
        for unit, own in one.slots.items():
            if slots.setdefault(unit, own) != own:
                raise EngineError(f"the memory of {unit} has {slots[unit].n} slots and {own.n}; size it once")
    waits = any(one.waits for one in asked)
    return Asks(any(one.hidden_state for one in asked), any(one.counts for one in asked), slots, waits)


def _rows_of_pairs(
    ids_TK: Integers, load_E: Integers, kept_E: Integers, calls: Calls, ranked_T: Integers | None
) -> tuple[Integers, Integers | None]:
    """The kept pairs, by expert and inside in the order of `ranked_T`, and the row of each; None: they fill all rows
    one after another."""
    top_k = ids_TK.shape[1]
    ordered = ids_TK if ranked_T is None else ids_TK[ranked_T]
    # Numbers of 16 bits are sorted by radix.
    pair_P = np.argsort(ordered.reshape(-1).astype(np.int16), kind="stable")
    if ranked_T is not None:
        pair_P = ranked_T[pair_P // top_k] * top_k + pair_P % top_k
    is_all_kept = kept_E is load_E or bool((kept_E == load_E).all())
    n_rows = int(calls.rows_S.sum())
    if is_all_kept and n_rows == len(pair_P) and _ascends(calls.expert_S):
        return pair_P, None
    # Where an expert's rows begin: assigned backwards, the first of its segments stands.
    first_E = np.zeros_like(load_E)
    first_E[calls.expert_S[::-1]] = calls.first_row_S[::-1]
    rank_P = np.arange(len(pair_P)) - np.repeat(np.cumsum(load_E) - load_E, load_E)
    row_P = np.repeat(first_E, load_E) + rank_P
    if is_all_kept:
        return pair_P, row_P
    is_kept_P = rank_P < np.repeat(kept_E, load_E)
    return pair_P[is_kept_P], row_P[is_kept_P]


def _ascends(numbers: Integers) -> bool:
    return bool((numbers[1:] >= numbers[:-1]).all())


def _renormalised(weight_P: Tensor, kept_P: Tensor, n_tokens: int, top_k: int) -> Tensor:
    """Surviving weights scaled so that each token's add up to what its routed weights added up to. kept_P: the pairs.

    A token that lost all its pairs has nothing to scale: its weights are not used.
    """
    routed_T = weight_P.reshape(n_tokens, top_k).sum(1)
    surviving_P = torch.zeros_like(weight_P)
    surviving_P[kept_P] = weight_P[kept_P]
    kept_T = surviving_P.reshape(n_tokens, top_k).sum(1)
    scale_T = torch.where(kept_T > 0, routed_T / kept_T.clamp_min(torch.finfo(kept_T.dtype).tiny), 1.0)
    return weight_P * scale_T.repeat_interleave(top_k)
