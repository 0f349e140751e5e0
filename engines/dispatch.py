"""The dispatch plan: what a technique decides for one MoE layer and one chunk of tokens.

It has two readers: `engines.model.experts.execute` computes it in torch, `engines.pricing.schedule` turns it into
operations that a hardware model prices. Accuracy and price cannot drift apart, because both read this.

Legend: T tokens, K experts per token, E experts, R rows of the row space, padding included, S segments (the rows of one
expert in one call), C calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.base import Unit
from results.records import EngineCounters

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Routing:
    """The router's choice. expert_ids_TK: int64; weights_TK: as the model combines them."""

    expert_ids_TK: Tensor
    weights_TK: Tensor
    n_experts: int

    def tokens_per_expert_E(self) -> Tensor:
        return torch.bincount(self.expert_ids_TK.reshape(-1), minlength=self.n_experts)


class Width(NamedTuple):
    """Columns [first, end) of a dimension: a part of an expert."""

    first: int
    end: int


@dataclass(frozen=True)
class CallKind:
    """What calls have in common.

    static: the shape was frozen before the routing was known, so that a unit without dynamic shapes can run the call.
    width: of the intermediate dimension; the parts' results add up. hidden: of the model width; the parts' sums before
    the activation add up, then each part makes its columns of the result. None computes whole experts.
    naive_launch: dispatched by a runtime that decides by itself where a graph goes. skips_padding: rows of padding are
    computed as any other, and not fetched. overlaps: does not wait for calls of other units that overlap too.
    """

    unit: Unit = "cpu"
    static: bool = False
    width: Width | None = None
    naive_launch: bool = False
    hidden: Width | None = None
    skips_padding: bool = False
    overlaps: bool = False

    @property
    def is_whole(self) -> bool:
        return self.width is None and self.hidden is None

    @property
    def is_first_slice(self) -> bool:
        """Or whole: slices of an expert share the rows of its first."""
        return all(part is None or part.first == 0 for part in (self.width, self.hidden))


@dataclass(frozen=True)
class ExpertCall:
    """One launch: the experts of one graph, each over its own contiguous slice of the plan's rows.

    Expert i of the call owns `rows_per_expert[i]` rows, of which the first `valid_per_expert[i]` carry tokens and the
    rest are zero padding. Calls of different slices share rows. `weight_loads`: how many
    experts' weights the call loads; fewer than its experts where a call before left some there.
    """

    experts: tuple[int, ...]
    rows_per_expert: tuple[int, ...]
    valid_per_expert: tuple[int, ...]
    first_row: int
    kind: CallKind = CallKind()
    weight_loads: int | None = None
    """None: all of `experts`."""

    @property
    def n_rows(self) -> int:
        return sum(self.rows_per_expert)

    @property
    def n_valid(self) -> int:
        return sum(self.valid_per_expert)

    @property
    def unit(self) -> Unit:
        return self.kind.unit

    @property
    def static(self) -> bool:
        return self.kind.static

    @property
    def n_weight_loads(self) -> int:
        return len(self.experts) if self.weight_loads is None else self.weight_loads


@dataclass(frozen=True, eq=False)
class Calls(Sequence[ExpertCall]):
    """The calls of a plan, as arrays: call c has the segments starts_C[c] .. starts_C[c + 1].

    A plan of many experts is made and read without a loop over them; whoever wants calls one by one iterates.
    """

    expert_S: Integers
    rows_S: Integers
    valid_S: Integers
    first_row_S: Integers
    starts_C: Integers
    kinds: tuple[CallKind, ...]
    kind_C: Integers | None = None
    """Index into `kinds`; None: all calls are of the first."""
    weight_loads_C: Integers | None = None
    """None: as many as each call has segments. Of a slice, loads of that slice."""

    @staticmethod
    def of(calls: Iterable[ExpertCall]) -> Calls:
        """From calls one by one."""
        calls = tuple(calls)
        kinds = tuple(dict.fromkeys(call.kind for call in calls))
        n_segments = [len(call.experts) for call in calls]
        rows_S = _integers(n for call in calls for n in call.rows_per_expert)
        first_row_S = _integers(
            call.first_row + sum(call.rows_per_expert[:i]) for call in calls for i in range(len(call.experts))
        )
        return Calls(
            _integers(e for call in calls for e in call.experts),
            rows_S,
            _integers(n for call in calls for n in call.valid_per_expert),
            first_row_S,
            np.cumsum([0, *n_segments], dtype=np.int64)[:-1],
            kinds,
            _integers(kinds.index(call.kind) for call in calls),
            _integers(call.n_weight_loads for call in calls),
        )

    @cached_property
    def ends_C(self) -> Integers:
        return np.append(self.starts_C[1:], len(self.expert_S))

    @cached_property
    def call_S(self) -> Integers:
        """The call of each segment."""
        return np.repeat(np.arange(len(self.starts_C)), self.ends_C - self.starts_C)

    @cached_property
    def is_one_after_another(self) -> bool:
        """Whether the segments are the rows of the row space, whole experts, each row once and in order."""
        ends_S = self.first_row_S + self.rows_S
        is_dense = not len(ends_S) or (self.first_row_S[0] == 0 and bool((self.first_row_S[1:] == ends_S[:-1]).all()))
        return is_dense and all(kind.is_whole for kind in self.kinds)

    @property
    def loads_C(self) -> Integers:
        """Experts whose weights each call loads."""
        return self.ends_C - self.starts_C if self.weight_loads_C is None else self.weight_loads_C

    @property
    def n_weight_loads(self) -> int:
        """In whole experts: the slices of an expert are one load together, which is counted at the first."""
        if all(kind.is_first_slice for kind in self.kinds):
            return len(self.expert_S) if self.weight_loads_C is None else int(self.weight_loads_C.sum())
        assert self.kind_C is not None
        is_first_K = np.array([kind.is_first_slice for kind in self.kinds])
        return int(self.loads_C[is_first_K[self.kind_C]].sum())

    @property
    def n_rows_not_fetched(self) -> int | None:
        """Rows of padding that calls leave where they are; None where no call leaves any. Slices share their rows."""
        skips_K = np.array([kind.skips_padding and kind.is_first_slice for kind in self.kinds], dtype=np.bool_)
        if not skips_K.any():
            return None
        padded_S = self.rows_S - self.valid_S
        return int(padded_S.sum() if self.kind_C is None else padded_S[skips_K[self.kind_C][self.call_S]].sum())

    def kind(self, call: int) -> CallKind:
        return self.kinds[0 if self.kind_C is None else self.kind_C[call]]

    def __len__(self) -> int:
        return len(self.starts_C)

    @overload
    def __getitem__(self, call: int) -> ExpertCall: ...
    @overload
    def __getitem__(self, call: slice) -> Sequence[ExpertCall]: ...
    def __getitem__(self, call: int | slice) -> ExpertCall | Sequence[ExpertCall]:
        if isinstance(call, slice):
            return [self[c] for c in range(*call.indices(len(self)))]
        call = range(len(self))[call]
        segments = slice(self.starts_C[call], self.ends_C[call])
        return ExpertCall(
            tuple(self.expert_S[segments].tolist()),
            tuple(self.rows_S[segments].tolist()),
            tuple(self.valid_S[segments].tolist()),
            int(self.first_row_S[segments][0]),
            self.kind(call),
            None if self.weight_loads_C is None else int(self.weight_loads_C[call]),
        )

    def __iter__(self) -> Iterator[ExpertCall]:
        return (self[call] for call in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Calls):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)


FILE: Unit = "file"
"""Where weights lie that no memory holds: the checkpoint on a disk. Nothing computes there."""


class Link(NamedTuple):
    """From one unit's memory to another's."""

    source: Unit
    target: Unit


class LayerExpert(NamedTuple):
    """An expert of a layer."""

    layer: int
    expert: int


@dataclass(frozen=True)
class Transfer:
    """Weights of an expert that must move.

    layer: whose call waits for them; a later one's is a prefetch. replaces: the expert whose slot they take.
    """

    expert: int
    layer: int
    source: Unit
    target: Unit
    n_bytes: int
    width: Width | None = None
    replaces: LayerExpert | None = None


@dataclass(frozen=True, eq=False)
class Transfers(Sequence[Transfer]):
    """The transfers of a plan in their order, as arrays. M transfers.

    width_M2: first and end of the columns; None: whole experts. replaced_M2: layer and expert, -1 where a slot was
    free; None: all were.
    """

    expert_M: Integers
    layer_M: Integers
    n_bytes_M: Integers
    links: tuple[Link, ...]
    link_M: Integers | None = None
    """Index into `links`; None: all take the first."""
    width_M2: Integers | None = None
    replaced_M2: Integers | None = None

    @staticmethod
    def of(transfers: Iterable[Transfer], expert_width: int = 0) -> Transfers:
        """From transfers one by one. expert_width: columns of a whole expert, where some are parts and some not."""
        transfers = tuple(transfers)
        links = tuple(dict.fromkeys(Link(t.source, t.target) for t in transfers))
        has_parts = any(t.width is not None for t in transfers)
        replaces = any(t.replaces is not None for t in transfers)
        whole, free = Width(0, expert_width), LayerExpert(-1, -1)
        return Transfers(
            _integers(t.expert for t in transfers),
            _integers(t.layer for t in transfers),
            _integers(t.n_bytes for t in transfers),
            links,
            _integers(links.index(Link(t.source, t.target)) for t in transfers),
            np.array([t.width or whole for t in transfers], dtype=np.int64) if has_parts else None,
            np.array([t.replaces or free for t in transfers], dtype=np.int64) if replaces else None,
        )

    @property
    def n_bytes(self) -> int:
        return int(self.n_bytes_M.sum())

    def link(self, transfer: int) -> Link:
        return self.links[0 if self.link_M is None else self.link_M[transfer]]

    def __len__(self) -> int:
        return len(self.expert_M)

    @overload
    def __getitem__(self, transfer: int) -> Transfer: ...
    @overload
    def __getitem__(self, transfer: slice) -> Sequence[Transfer]: ...
    def __getitem__(self, transfer: int | slice) -> Transfer | Sequence[Transfer]:
        if isinstance(transfer, slice):
            return [self[m] for m in range(*transfer.indices(len(self)))]
        transfer = range(len(self))[transfer]
        width = None if self.width_M2 is None else Width(*self.width_M2[transfer].tolist())
        replaced = (
            LayerExpert(-1, -1) if self.replaced_M2 is None else LayerExpert(*self.replaced_M2[transfer].tolist())
        )
        link = self.link(transfer)
        return Transfer(
            int(self.expert_M[transfer]),
            int(self.layer_M[transfer]),
            link.source,
            link.target,
            int(self.n_bytes_M[transfer]),
            width,
            None if replaced.expert < 0 else replaced,
        )

    def __iter__(self) -> Iterator[Transfer]:
        return (self[transfer] for transfer in range(len(self)))


_NO_INTEGERS = np.empty(0, dtype=np.int64)
NO_TRANSFERS = Transfers(_NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, ())


class Prediction(NamedTuple):
    """Experts and weights that were guessed for a later layer, before its router could choose."""

    layer: int
    routing: Routing


@dataclass(frozen=True)
class Exchange:
    """Activations that units send each other. bytes_NN[i][j]: from units[i] to units[j]."""

    kind: Literal["all_gather", "all_to_all", "all_reduce", "reduce", "reduce_scatter"]
    units: tuple[Unit, ...]
    bytes_NN: tuple[tuple[int, ...], ...]


class Tally(NamedTuple):
    """What is counted of a plan, without its rows: small enough to keep until there is time to count."""

    calls: Calls
    n_rows: int
    routed_pairs: int
    dropped_pairs: int
    bytes_moved: int
    bytes_exchanged: int | None
    hits: int | None
    misses: int | None
    prefetched: int | None
    predicted: int | None
    recalled: int | None

    def counters(self) -> EngineCounters:
        return EngineCounters(
            routed_pairs=self.routed_pairs,
            dropped_pairs=self.dropped_pairs,
            computed_rows=self.n_rows,
            padded_rows=self.n_rows - (self.routed_pairs - self.dropped_pairs),
            expert_calls=len(self.calls),
            weight_loads=self.calls.n_weight_loads,
            rows_not_fetched=self.calls.n_rows_not_fetched,
            bytes_moved=self.bytes_moved,
            bytes_exchanged=self.bytes_exchanged,
            hits=self.hits,
            misses=self.misses,
            prefetched=self.prefetched,
            predicted=self.predicted,
            recalled=self.recalled,
        )


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Calls over one row space. token_R: source token of each row, -1 for padding; weight_R: 0 for padding.

    executed: the experts and weights that were executed in the place of the router's choice; None where it is the
    router's. prediction: what was guessed for a later layer.
    """

    n_tokens: int
    token_R: Tensor
    weight_R: Tensor
    calls: Calls
    routed_pairs: int
    dropped_pairs: int
    transfers: Transfers = NO_TRANSFERS
    exchanges: tuple[Exchange, ...] = ()
    hits: int | None = None
    """Of the experts called, those whose weights lay where they were computed; None where nothing is moved."""
    misses: int | None = None
    prefetched: int | None = None
    """Transfers of later layers; None of a technique that does not prefetch."""
    executed: Routing | None = None
    prediction: Prediction | None = None
    recalled: int | None = None
    """Of the experts that the routers chose, those that had been predicted; None where nothing was."""

    @property
    def kept_pairs(self) -> int:
        return self.routed_pairs - self.dropped_pairs

    @property
    def tally(self) -> Tally:
        # Of the row space: a row that several widths share is computed once, in parts.
        moved = self.transfers.n_bytes if len(self.transfers) else 0
        sent = sum(sum(map(sum, e.bytes_NN)) for e in self.exchanges) if self.exchanges else None
        pairs = self.routed_pairs, self.dropped_pairs
        predicted = None if self.recalled is None else self.routed_pairs
        found = self.hits, self.misses, self.prefetched, predicted, self.recalled
        return Tally(self.calls, len(self.token_R), *pairs, moved, sent, *found)

    def counters(self) -> EngineCounters:
        return self.tally.counters()
