"""Keys and values of the tokens before, and what a step sees of them.

Legend: T tokens of a chunk, S tokens seen, M key/value heads, D features of a query, R rank of the latent, P pairs of
turned features, X values of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.kernels.decoder import CacheTable, cache_table, chunk_table
from engines.kernels.tables import ChunkTable
from engines.model.architecture import ModelConfig
from engines.model.rope import Turns
from engines.model.spans import Span


class KeyValueCache:
    """What attention keeps of one sequence, in buffers of fixed size.

    keys, values: per layer [M, positions, D]; for latent attention keys are [1, positions, R + turned features] and
    values, which are the keys' first R features, take no room.
    """

    def __init__(
        self, config: ModelConfig, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """device: None is the CPU."""
        self._device = device
        self._config = config
        self._dtype = dtype
        self.length = 0
        self.n_positions = 0
        self.turned_for = 0
        """The length whose rotary factors the keys are turned by: `engines.model.rope_config.LongRope`."""
        self.turns = Turns(config.rope, 0)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._table: CacheTable | None = None

    @property
    def table(self) -> CacheTable:
        """As the kernels read it: on the CPU."""
        if self._table is None:
            self._table = cache_table(self.keys, self.values)
        return self._table

    def start(self, n_positions: int, n_kept: int = 0, turned_for: int | None = None) -> None:
        """For a sequence of up to n_positions that begins with the first n_kept held now. turned_for: None is the most
        that it may reach.

        Buffers stay where they are long enough.
        """
        if n_kept > self.length:
            raise EngineError(f"cache holds {self.length} positions and cannot keep {n_kept}; keep fewer")
        if not self.keys or self.keys[0].shape[1] < n_positions:
            keys, values = (
                [torch.empty(shape, device=self._device, dtype=self._dtype) for _ in range(self._config.n_layers)]
                for shape in _cached_shapes(self._config, n_positions)
            )
            if n_kept:
                for new, old in zip([*keys, *values], [*self.keys, *self.values], strict=True):
                    new[:, :n_kept] = old[:, :n_kept]
            self.keys, self.values, self._table = keys, values, None
        self.length, self.n_positions = n_kept, n_positions
        self.turned_for = n_positions if turned_for is None else turned_for
        self.turns = Turns(self._config.rope, self.turned_for)

    def check_room(self, n_tokens: int) -> None:
        """Raises `EngineError` where so many more do not fit."""
        end = self.length + n_tokens
        if not self.keys or end > self.n_positions:
            raise EngineError(f"chunk ends at position {end}, beyond the cache; call cache.start with enough positions")


def check_rooms(n_tokens: Sequence[int], caches: Sequence[KeyValueCache]) -> None:
    """Raises `EngineError` where so many tokens more do not fit, each sequence's in a cache of its own."""
    if len({id(cache) for cache in caches}) < len(caches):
        raise EngineError(f"{len(caches)} sequences in fewer caches; give each sequence a cache of its own")
    for n, cache in zip(n_tokens, caches, strict=True):
        cache.check_room(n)


def _cached_shapes(config: ModelConfig, n_positions: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    latent = config.attention.latent
    if latent is not None:
        return (1, n_positions, latent.kv_rank + latent.rope_dim), (1, n_positions, 0)
    shape = (config.n_kv_heads, n_positions, config.head_dim)
    return shape, shape


@dataclass(frozen=True)
class View:
    """What a chunk sees of the cache in a layer: positions from `first` on, and of those where mask_TS is true."""

    first: int
    span: Span | None
    position: int
    n_tokens: int
    device: torch.device | None

    @cached_property
    def mask_TS(self) -> Tensor | None:
        """None where everything from `first` on is seen. Made for who asks: kernels do not, and torch makes it on all
        its threads."""
        if self.n_tokens == 1:
            return None
        span, end = self.span, self.position + self.n_tokens
        query_T1 = torch.arange(self.position, end, device=self.device)[:, None]
        key_S = torch.arange(self.first, end, device=self.device)
        mask_TS = key_S <= query_T1
        if span is not None:
            mask_TS &= span.reaches(query_T1, key_S)
        return mask_TS


def view_of(span: Span | None, position: int, n_tokens: int, device: torch.device | None = None) -> View:
    """The chunk at `position` sees its past through the span."""
    return View(0 if span is None else span.first_seen(position), span, position, n_tokens, device)


@dataclass(frozen=True)
class Chunk:
    """The new tokens of one sequence: where they stand in it, and which rows of the step they are."""

    cache: KeyValueCache
    position: int
    n_tokens: int
    first_row: int
    views: dict[Span | None, View]

    @property
    def end(self) -> int:
        return self.position + self.n_tokens

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.n_tokens)

    def part(self, first: int, n_tokens: int, first_row: int, device: torch.device | None) -> Chunk:
        """So many of its tokens, `first` of its own being the first, as rows of another step."""
        position = self.position + first
        views = {span: view_of(span, position, n_tokens, device) for span in self.views}
        return Chunk(self.cache, position, n_tokens, first_row, views)


class SharedRows(Protocol):
    """Of a step whose rows are dealt to several processes: who has the others."""

    @property
    def chunks(self) -> Sequence[Chunk]:
        """Of all rows."""
        ...

    def gathered(self, own_TX: Tensor) -> Tensor:
        """The rows of all processes, in order. All of them call it."""
        ...


@dataclass(frozen=True)
class Step:
    """The chunks that are computed together. cos_TP and sin_TP turn the queries and keys of all rows, in layers that do
    so. shared: where these rows are some of a step's: queries are of these, keys and values of all."""

    chunks: Sequence[Chunk]
    cos_TP: Tensor
    sin_TP: Tensor
    shared: SharedRows | None = None

    @property
    def cached(self) -> Sequence[Chunk]:
        """Whose keys and values are kept."""
        return self.chunks if self.shared is None else self.shared.chunks

    @cached_property
    def chunk_table(self) -> ChunkTable:
        """As the kernels read them, in all layers."""
        return chunk_table([(chunk.cache.table, chunk.position, chunk.n_tokens) for chunk in self.chunks])

    def of_parts(self, parts: Sequence[tuple[int, int]], device: torch.device | None) -> tuple[slice | list[int], Step]:
        """Some tokens of each chunk alone: the first and how many, which may be none. Returns their rows here too."""
        chunks: list[Chunk] = []
        several: list[int] = []
        for chunk, (first, n_tokens) in zip(self.chunks, parts, strict=True):
            if n_tokens:
                chunks.append(chunk.part(first, n_tokens, len(several), device))
                several.extend(range(chunk.first_row + first, chunk.first_row + first + n_tokens))
        # Of one chunk nothing is copied.
        rows = slice(several[0], several[-1] + 1) if len(chunks) == 1 else several
        return rows, Step(chunks, self.cos_TP[rows], self.sin_TP[rows])
