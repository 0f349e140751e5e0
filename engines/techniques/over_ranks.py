"""A technique over processes: its plan says beside the calls what the ranks send each other.

In a step of prefill tokens are dealt: rank r has the rows [r T / N, (r + 1) T / N) of the residual stream. It routes
them, tells the others the choice, and rows and results travel:

    all_gather   every rank gets all rows, and each rank gets the partial results of its own rows from all others
    all_to_all   a row goes to the ranks that compute a part of it, and their partial results come back

A step that is not dealt (decoding; fewer tokens than ranks; `sequence_parallel = false`) has all rows on all ranks, and
only partial results travel, so that all ranks have the sum (`all_reduce`).

`engines.parallel` sends this and nothing else for the experts, and holds what it sent against the plan.

Legend: T tokens of the step, K experts per token, E experts, N ranks, H model width, R rows, S segments, C calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devices.base import Unit
from engines.calls import Integers, Width
from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan, Exchange
from engines.residency import Residency
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import ChunkPhase, LayerInput
from engines.techniques.one_token import AlikeTokens
from engines.techniques.place.ranks import Held, RankExchange, Ranks, RouterGather, unit_of
from engines.techniques.place.units import slices

VALUE_BYTES = 4
"""Activations travel in fp32; an expert's number as int32, its weight in fp32."""
DIRECT_BYTES = 1 << 16
"""A sum over ranks of up to so many bytes is sent in one round, each rank's part to all others: a round costs more than
its bytes. A larger one is sent in two, which is 2 / N of the bytes: parts to who adds them, sums to all."""

SPLIT_BYTES = 1 << 20
"""Of a layer's attention weights. Two rounds cost up to 20 us; in that time a core reads some 300 kB."""

MOST_SUMS = 64
"""Sizes of steps whose sums are remembered."""


class OverRanks:
    """An `engines.techniques.base.Technique` whose calls carry `rank:i`."""

    def __init__(
        self,
        technique: Technique,
        place: Ranks,
        hidden: int,
        sequence_parallel: bool,
        router_gather: RouterGather,
        row_exchange: RankExchange,
        decodes_exactly: bool,
    ) -> None:
        """decodes_exactly: the rows of a decoded token are a row for each choice."""
        self.name = technique.name
        self.asks = technique.asks
        self.needs_saliency = technique.needs_saliency
        self.couples_tokens = technique.couples_tokens
        self.n_ranks = place.n_ranks
        self.router_gather = router_gather
        self.row_exchange = row_exchange
        self.decodes_exactly = decodes_exactly
        """Whether a choice is one row, of one rank or a slice on each."""
        self.decodes_plainly = decodes_exactly and not place.has_replicas
        """Whether a rank computes one row of every choice that it holds, so that no plan need say so."""
        self._technique = technique
        self._place = place
        self._hidden = hidden
        self._sequence_parallel = sequence_parallel
        self._sums: dict[int, Exchange] = {}

    def held(self, layer: int, rank: int) -> Held:
        """What a rank computes with in a layer."""
        return self._place.held(layer, rank)

    def holders_E(self, layer: int) -> list[tuple[int, ...]] | None:
        """The ranks that take turns with each expert; None where nobody does."""
        return self._place.holders_E(layer) if self._place.has_replicas else None

    @property
    def widths(self) -> tuple[Width, ...]:
        """The columns in which ranks hold experts; none where they hold them whole. The same in all layers."""
        held = [self._place.held(0, rank).width for rank in range(self.n_ranks)]
        return tuple(dict.fromkeys(width for width in held if width is not None))

    def deals(self, n_tokens: int, phase: ChunkPhase) -> bool:
        """Whether the tokens of a step are dealt to the ranks."""
        return self._sequence_parallel and phase == "prefill" and 1 < self.n_ranks <= n_tokens

    def plan(self, seen: LayerInput) -> DispatchPlan:
        plan = self._technique.plan(seen)
        if self.n_ranks == 1:
            return plan
        n_tokens, top_k = seen.routing.expert_ids_TK.shape
        if not self.deals(n_tokens, seen.phase):
            return replace(plan, exchanges=(self._summed(n_tokens),))
        per_token = 2 * top_k if self.router_gather == "selection" else seen.routing.n_experts
        own_N = tokens_N(n_tokens, self.n_ranks)
        gathered = self._of("all_gather", VALUE_BYTES * per_token * _to_others(own_N))
        row_bytes = VALUE_BYTES * self._hidden
        if self.row_exchange == "all_gather":
            rows = self._of("all_gather", row_bytes * _to_others(own_N))
            results = self._of("reduce_scatter", row_bytes * _to_others(own_N).T)
            return replace(plan, exchanges=(gathered, rows, results))
        sent_NN = travelling_NN(wanted_NT(plan, self.n_ranks), own_N)
        rows, results = self._of("all_to_all", row_bytes * sent_NN), self._of("all_to_all", row_bytes * sent_NN.T)
        return replace(plan, exchanges=(gathered, rows, results))

    batches_exactly = False
    """As of its layouts."""

    @property
    def guesses(self) -> None:
        """None: as of its layouts."""

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        """None: ranks wait for each other between router and result."""
        return None

    def alike_tokens(
        self,
        layer: int,
        ids_NK: Integers,
        residency: Residency | None,
        any_order: bool,
        interchange: Callable[[Sequence[Unit]], bool],
    ) -> AlikeTokens | None:
        """As of the technique: a decoded token's sums do not hang on its experts."""
        technique = self._technique
        return (
            technique.alike_tokens(layer, ids_NK, residency, any_order, interchange)
            if isinstance(technique, ComposedTechnique)
            else None
        )

    def _summed(self, n_tokens: int) -> Exchange:
        """Of steps that are not dealt: few sizes, again and again."""
        if n_tokens not in self._sums:
            if len(self._sums) == MOST_SUMS:
                self._sums.clear()
            self._sums[n_tokens] = self._of("all_reduce", _summed_NN(n_tokens * self._hidden, self.n_ranks))
        return self._sums[n_tokens]

    def _of(self, kind: str, bytes_NN: Integers) -> Exchange:
        units = tuple(unit_of(rank) for rank in range(self.n_ranks))
        return Exchange(kind, units, tuple(map(tuple, bytes_NN.tolist())))  # type: ignore[arg-type]


def splits_attention(n_ranks: int, n_kv_heads: int, attention_bytes: float, n_passed: int) -> bool:
    """Whether each rank computes its heads of a decoded token for all: reading a part of a layer's weights, and not all
    of them, must gain more than two rounds cost. n_passed: values as of `passed_values`, which must fit into one
    round."""
    fits = VALUE_BYTES * n_passed <= DIRECT_BYTES
    return n_kv_heads >= n_ranks and attention_bytes >= SPLIT_BYTES and fits


def passed_values(n_heads: int, n_kv_heads: int, head_dim: int, hidden: int) -> int:
    """Of a token in a layer, where attention is split: what heads mix, new keys and values, what goes back."""
    return (n_heads + 2 * n_kv_heads) * head_dim + hidden


def tokens_N(n_tokens: int, n_ranks: int) -> Integers:
    """How many tokens of a dealt step each rank has, in order."""
    return np.array([part.end - part.first for part in slices(n_tokens, n_ranks)], dtype=np.int64)


def wanted_NT(plan: DispatchPlan, n_ranks: int) -> NDArray[np.bool_]:
    """Whether a rank computes a row of a token."""
    wanted = np.zeros((n_ranks, plan.n_tokens), dtype=np.bool_)
    token_R = plan.token_R.cpu().numpy()
    for rank in range(n_ranks):
        own_R = token_R[rows_of(plan, own_segments(plan, rank))]
        wanted[rank, own_R[own_R >= 0]] = True
    return wanted


def own_segments(plan: DispatchPlan, rank: int) -> Integers:
    """The segments with rows that a rank computes."""
    calls = plan.calls
    is_own_K = np.array([kind.unit == unit_of(rank) for kind in calls.kinds], dtype=np.bool_)
    is_own_C = np.full(len(calls), is_own_K[0]) if calls.kind_C is None else is_own_K[calls.kind_C]
    return np.flatnonzero(is_own_C[calls.call_S] & (calls.rows_S > 0))


def rows_of(plan: DispatchPlan, segments: Integers) -> Integers:
    """The rows of these segments, one segment after another."""
    rows_S, first_S = plan.calls.rows_S[segments], plan.calls.first_row_S[segments]
    before_S = np.cumsum(rows_S) - rows_S
    rows_R: Integers = np.repeat(first_S - before_S, rows_S) + np.arange(int(rows_S.sum()))
    return rows_R


def travelling_NN(wanted: NDArray[np.bool_], own_N: Sequence[int] | Integers) -> Integers:
    """[i][j]: tokens of rank i that rank j wants; none to itself. wanted: of `wanted_NT`."""
    ends = np.cumsum(own_N)
    sent = np.stack([wanted[:, end - n : end].sum(axis=1) for n, end in zip(own_N, ends, strict=True)])
    np.fill_diagonal(sent, 0)
    return np.asarray(sent, dtype=np.int64)


def _to_others(own_N: Integers) -> Integers:
    """[i][j]: all of rank i's to every other rank."""
    sent: Integers = np.repeat(own_N[:, None], len(own_N), axis=1)
    np.fill_diagonal(sent, 0)
    return sent


def _summed_NN(n_values: int, n_ranks: int) -> Integers:
    """Bytes of a sum that all ranks get: see `DIRECT_BYTES`."""
    if VALUE_BYTES * n_values <= DIRECT_BYTES:
        return VALUE_BYTES * _to_others(np.full(n_ranks, n_values))
    part_N = tokens_N(n_values, n_ranks)
    return VALUE_BYTES * (_to_others(part_N) + _to_others(part_N).T)
