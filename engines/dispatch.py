"""The dispatch plan: what a technique decides for one MoE layer and one chunk of tokens.

It has two readers: `engines.model.experts.execute` computes it in torch, `engines.pricing.schedule` turns it into
operations that a hardware model prices. Accuracy and price cannot drift apart, because both read this.

Legend: T tokens, H hidden, K experts per token, E experts, R rows of the row space, padding included, S segments (the
rows of one expert in one call), C calls, M transfers, N units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal, NamedTuple, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from devices.base import Unit
from engines.calls import CallKind, Calls, Integers, Width, integers
from engines.foretold import Foretold, foretold, n_recalled
from engines.outline import Outline, outline
from results.counters import EngineCounters


@dataclass(frozen=True)
class Routing:
    """The router's choice. expert_ids_TK: int64; weights_TK: as the model combines them."""

    expert_ids_TK: Tensor
    weights_TK: Tensor
    n_experts: int

    @cached_property
    def ids_on_host_TK(self) -> Integers:
        """The experts, fetched once: whoever asks waits until a device has chosen."""
        found: Integers = self.expert_ids_TK.cpu().numpy()
        return found

    def tokens_per_expert_E(self) -> Tensor:
        return torch.bincount(self.expert_ids_TK.reshape(-1), minlength=self.n_experts)


FILE: Unit = "file"
"""Where weights lie that no memory holds: the checkpoint on a disk. Nothing computes there."""


class Link(NamedTuple):
    """From one unit's memory to another's."""

    source: Unit
    target: Unit


def way_to(unit: Unit) -> Link:
    """On which weights come that lie in no unit's own memory: from the host's, and there from the file."""
    return Link(FILE if unit == "cpu" else "cpu", unit)


class LayerExpert(NamedTuple):
    """An expert of a layer."""

    layer: int
    expert: int


@dataclass(frozen=True)
class Transfer:
    """Weights of an expert that must move.

    layer: whose call waits for them; a later one's is a prefetch. replaces: the expert whose slot they take. stays:
    whether they take a slot; else they pass through a buffer beside the slots, and are gone when their layer ran.
    """

    expert: int
    layer: int
    source: Unit
    target: Unit
    n_bytes: int
    width: Width | None = None
    replaces: LayerExpert | None = None
    stays: bool = True


@dataclass(frozen=True, eq=False)
class Transfers(Sequence[Transfer]):
    """The transfers of a plan in their order, as arrays. M transfers.

    width_M2: first and end of the columns; None: whole experts. replaced_M2: layer and expert, -1 where a slot was
    free; None: all were. stays_M: None: all stay. as_one: those of a layer fill a buffer, and the layer waits for all
    of them; else each call waits for its own experts.
    """

    expert_M: Integers
    layer_M: Integers
    n_bytes_M: Integers
    links: tuple[Link, ...]
    link_M: Integers | None = None
    """Index into `links`; None: all take the first."""
    width_M2: Integers | None = None
    replaced_M2: Integers | None = None
    stays_M: NDArray[np.bool_] | None = None
    as_one: bool = False

    @staticmethod
    def of(transfers: Iterable[Transfer], expert_width: int = 0) -> Transfers:
        """From transfers one by one. expert_width: columns of a whole expert, where some are parts and some not."""
        transfers = tuple(transfers)
        links = tuple(dict.fromkeys(Link(t.source, t.target) for t in transfers))
        has_parts = any(t.width is not None for t in transfers)
        replaces = any(t.replaces is not None for t in transfers)
        whole, free = Width(0, expert_width), LayerExpert(-1, -1)
        return Transfers(
            integers(t.expert for t in transfers),
            integers(t.layer for t in transfers),
            integers(t.n_bytes for t in transfers),
            links,
            integers(links.index(Link(t.source, t.target)) for t in transfers),
            np.array([t.width or whole for t in transfers], dtype=np.int64) if has_parts else None,
            np.array([t.replaces or free for t in transfers], dtype=np.int64) if replaces else None,
            None if all(t.stays for t in transfers) else np.array([t.stays for t in transfers]),
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
            self.stays_M is None or bool(self.stays_M[transfer]),
        )

    def __iter__(self) -> Iterator[Transfer]:
        return (self[transfer] for transfer in range(len(self)))


_NO_INTEGERS = np.empty(0, dtype=np.int64)
NO_TRANSFERS = Transfers(_NO_INTEGERS, _NO_INTEGERS, _NO_INTEGERS, ())


class Prediction(NamedTuple):
    """Experts and weights that were guessed for a later layer, before its router could choose. shown_TH: what whoever
    guessed took for that router's input; None where no state was guessed from."""

    layer: int
    routing: Routing
    shown_TH: Tensor | None = None


@dataclass(frozen=True)
class Exchange:
    """Activations that units send each other. bytes_NN[i][j]: from units[i] to units[j].

    broadcast: the first sends all others the same rows.
    """

    kind: Literal["all_gather", "all_to_all", "all_reduce", "reduce", "reduce_scatter", "broadcast"]
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
    unused: int | None
    prefetched: int | None
    predicted: int | None
    recalled: int | None

    def numbers(self) -> dict[str, int | None]:
        """By the fields of `EngineCounters`; None of what is not counted."""
        return {
            "routed_pairs": self.routed_pairs,
            "dropped_pairs": self.dropped_pairs,
            "computed_rows": self.n_rows,
            "padded_rows": self.n_rows - (self.routed_pairs - self.dropped_pairs),
            "expert_calls": len(self.calls),
            "weight_loads": self.calls.n_weight_loads,
            "rows_not_fetched": self.calls.n_rows_not_fetched,
            "bytes_moved": self.bytes_moved,
            "bytes_exchanged": self.bytes_exchanged,
            "hits": self.hits,
            "misses": self.misses,
            "prefetched": self.prefetched,
            "prefetched_unused": self.unused,
            "predicted": self.predicted,
            "recalled": self.recalled,
        }


def counted(tallies: Iterable[tuple[Tally, int]]) -> EngineCounters:
    """The sum of plans, of each tally as many. No record is made of each: there is one for every layer of a token."""
    sums: dict[str, int] = {}
    for tally, n_plans in tallies:
        for name, number in tally.numbers().items():
            if number is not None:
                sums[name] = sums.get(name, 0) + n_plans * number
    return EngineCounters(**sums)


@cache
def _on_unit(kind: CallKind, unit: Unit) -> CallKind:
    return kind if kind.unit == unit else replace(kind, unit=unit)


_T = TypeVar("_T")


def _changed(one: _T, **changes: object) -> _T:
    """As `dataclasses.replace`, in a fifth of the time: what was derived of `one` and is cached stays. A token has a
    plan for each layer."""
    found = object.__new__(type(one))
    found.__dict__.update(one.__dict__, **changes)
    return found


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
    unused: int | None = None
    """Of what was fetched ahead for this layer and goes with it, what it does not call; None of other moves."""
    prefetched: int | None = None
    """Transfers of later layers; None of a technique that does not prefetch."""
    executed: Routing | None = None
    prediction: Prediction | None = None
    compared: tuple[Routing, Routing] | None = None
    """The router's choice and what had been predicted for it; None where nothing was. Counted when there is time."""

    @cached_property
    def foretold(self) -> Foretold | None:
        return None if self.compared is None else foretold(*self.compared)

    @cached_property
    def outline(self) -> Outline | None:
        """Plans of equal outline cost alike."""
        return outline(self)

    def in_layer(self, layer: int) -> DispatchPlan:
        """The same of another layer, whose calls alone wait for what travels. It costs alike."""
        if not len(self.transfers):
            return self
        moved = _changed(self.transfers, layer_M=np.full(len(self.transfers), layer))
        if self.outline is None:
            return replace(self, transfers=moved)
        return _changed(self, transfers=moved, outline=self.outline._replace(layers=(layer,)))

    def on_units(self, units: Mapping[Unit, Unit]) -> DispatchPlan:
        """The same with calls on other units, which cost the same in the place of theirs."""
        kinds = tuple(_on_unit(kind, units.get(kind.unit, kind.unit)) for kind in self.calls.kinds)
        exchanges = tuple(_changed(one, units=tuple(units.get(u, u) for u in one.units)) for one in self.exchanges)
        calls = _changed(self.calls, kinds=kinds)
        if self.outline is None:
            return replace(self, calls=calls, exchanges=exchanges)
        own = self.outline._replace(units=tuple(units.items()))
        return _changed(self, calls=calls, exchanges=exchanges, outline=own)

    @cached_property
    def recalled(self) -> int | None:
        """Of the experts that the routers chose, those that had been predicted; None where nothing was."""
        if self.compared is None:
            return None
        chosen, predicted = self.compared
        return n_recalled(chosen.ids_on_host_TK, predicted.ids_on_host_TK)

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
        found = self.hits, self.misses, self.unused, self.prefetched, predicted, self.recalled
        return Tally(self.calls, len(self.token_R), *pairs, moved, sent, *found)

    def counters(self) -> EngineCounters:
        return counted([(self.tally, 1)])
