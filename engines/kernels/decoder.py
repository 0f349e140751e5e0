"""One token through all layers in one call: what lies between two kernels in Python costs as much as a small kernel.

Legend: L layers, G layers that are guessed for, E experts, K experts per token, H hidden, M key/value heads,
S positions of the cache, D features of a head, P pairs of turned features.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engines.decode_layout import DecodeLayout
from engines.kernels.exchange import RankLostError
from engines.kernels.guesses import GuessTable
from engines.kernels.library import library
from engines.kernels.native import (
    AttentionStruct,
    AttentionTable,
    ChunkTable,
    ExpertTable,
    RouterStruct,
    RouterTable,
    address,
    int64s,
    serves,
)

MAX_CHOSEN = 64
"""Experts of one token: `kMaxChosen` in experts.h."""


class _Layer(ctypes.Structure):
    """`struct DecoderLayer` of layer.h."""

    _fields_ = (
        ("attention", AttentionStruct),
        ("router", RouterStruct),
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("always", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("is_turned", ctypes.c_int32),
    )


class _Layout(ctypes.Structure):
    """`struct DecodeLayout` of laid_out.h."""

    _fields_ = (
        ("rows_E", ctypes.c_void_p),
        ("group_E", ctypes.c_void_p),
        ("n_padding_calls", ctypes.c_int64),
        ("slices", ctypes.c_void_p),
        ("n_slices", ctypes.c_int64),
        ("of_hidden", ctypes.c_int64),
    )


@dataclass(frozen=True)
class LayoutTable:
    """What every layer computes for its choice, as the kernels read it."""

    layouts: ctypes.Array[_Layout]
    is_plain: bool
    """Whether all of them are."""
    kept: tuple[object, ...]
    """Owners of the memory that the layouts point into."""


def layout_table(
    layouts: Sequence[DecodeLayout | None], n_experts: int, slices: Sequence[Sequence[ExpertTable]]
) -> LayoutTable:
    """layouts: of every layer, None of a dense one. slices: of every layer, its experts' part in each slice."""
    described, kept = list[_Layout](), list[object]()
    for layout, tables in zip(layouts, slices, strict=True):
        if layout is None or layout.is_plain:
            described.append(_Layout())
            continue
        assert layout.n_experts in (None, n_experts)
        assert len(tables) == len(layout.slices)
        numbers = [None if of_E is None else int64s(of_E) for of_E in (layout.rows_E, layout.group_of_E)]
        matrices = (ctypes.c_void_p * len(tables))(*(ctypes.addressof(table.matrices) for table in tables))
        described.append(
            _Layout(
                *(None if array is None else ctypes.addressof(array) for array in numbers),
                layout.n_padding_calls,
                ctypes.addressof(matrices) if tables else None,
                len(tables),
                bool(layout.hidden),
            )
        )
        kept += [*numbers, matrices, *tables]
    return LayoutTable((_Layout * len(described))(*described), not kept, tuple(kept))


class _Held(ctypes.Structure):
    """`struct Held` of laid_out.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("at_hand_LE", "uses_LE", "last_use_LE", "n_plans")),
        ("n_experts", ctypes.c_int64),
        ("matrices_L", ctypes.c_void_p),
    )


class HeldTable:
    """Which experts lie where they are computed, and what was used when, as the kernels read and write it."""

    def __init__(
        self,
        at_hand_LE: NDArray[np.bool_],
        uses_LE: NDArray[np.int64],
        last_use_LE: NDArray[np.int64],
        n_plans: NDArray[np.int64],
        experts: Sequence[ExpertTable | None] = (),
    ) -> None:
        """See `engines.residency.Residency`. n_plans: one number. They are read and written where they lie. experts: of
        every layer, where they lie elsewhere than `DecoderLayer` says."""
        assert at_hand_LE.shape == uses_LE.shape == last_use_LE.shape
        arrays = at_hand_LE, uses_LE, last_use_LE, n_plans
        assert all(array.flags.c_contiguous for array in arrays)
        matrices = [None if table is None else ctypes.addressof(table.matrices) for table in experts]
        assert len(matrices) in (0, len(at_hand_LE))
        matrices_L = (ctypes.c_void_p * len(matrices))(*matrices)
        self._kept = *arrays, matrices_L, experts
        places = *(array.ctypes.data for array in arrays), at_hand_LE.shape[1]
        self._struct = _Held(*places, ctypes.addressof(matrices_L) if matrices else None)
        self.address = ctypes.addressof(self._struct)


def mix_laid_out(
    x_1H: Tensor,
    experts: ExpertTable,
    table: LayoutTable,
    layer: int,
    ids_1K: Tensor,
    weights_1K: Tensor,
    held: HeldTable | None = None,
) -> tuple[Tensor, Tensor] | None:
    """Weighted sum of the chosen experts of one token with the calls of a layer's layout, and the rows of each
    expert's call, rows_E: 0 of those not called. `serves(x, weights)` must hold.

    held: None where all experts lie at hand. Else what is called is counted as used; None is given back, and nothing
    done, where one of them does not."""
    assert len(x_1H) == len(ids_1K) == len(weights_1K) == 1
    assert x_1H.shape[1] == experts.hidden
    assert serves(x_1H, weights_1K)
    assert ids_1K.is_contiguous()
    n_experts = len(experts.kept) // 3
    out_1H, rows_E = torch.empty_like(x_1H), torch.empty(n_experts, dtype=torch.int64)
    kernels = library()
    assert kernels is not None  # the table exists
    ran = kernels.joulebench_laid_out(
        experts.matrices,
        ctypes.byref(table.layouts[layer]),
        n_experts,
        ids_1K.shape[1],
        ids_1K.data_ptr(),
        x_1H.data_ptr(),
        weights_1K.data_ptr(),
        out_1H.data_ptr(),
        rows_E.data_ptr(),
        None if held is None else held.address,
        layer,
        torch.get_num_threads(),
    )
    return (out_1H, rows_E) if ran else None


@dataclass(frozen=True)
class CacheTable:
    """The keys and values of a sequence in every layer, as the kernels read and write them."""

    keys: ctypes.Array[ctypes.c_void_p]
    values: ctypes.Array[ctypes.c_void_p]
    head_stride: int
    n_positions: int
    kept: tuple[Tensor, ...]
    """Owners of the memory that the table points into."""

    @cached_property
    def places_LX(self) -> NDArray[np.int64]:
        """What `struct Chunk` of layer.h begins with, of every layer."""
        return np.array([(key, value, self.head_stride) for key, value in zip(self.keys, self.values, strict=True)])


def cache_table(keys: Sequence[Tensor], values: Sequence[Tensor]) -> CacheTable:
    """Of each layer [M, S, D]. `serves` must hold of all."""
    assert serves(*keys, *values)
    assert all(key.shape == value.shape == keys[0].shape for key, value in zip(keys, values, strict=True))
    addresses = ctypes.c_void_p * len(keys)
    return CacheTable(
        addresses(*(key.data_ptr() for key in keys)),
        addresses(*(value.data_ptr() for value in values)),
        keys[0].stride(0),
        keys[0].shape[1],
        (*keys, *values),
    )


def chunk_table(sequences: Sequence[tuple[CacheTable, int, int]]) -> ChunkTable:
    """Of each sequence its cache, the position of its first new token, and how many it has."""
    caches, positions, counts = zip(*sequences, strict=True)
    assert all(n and position + n <= cache.n_positions for cache, position, n in sequences)
    n_kv_heads, _, dim = caches[0].kept[0].shape
    assert all(cache.kept[0].shape[::2] == (n_kv_heads, dim) for cache in caches)
    chunks_LSX = np.empty((len(caches[0].keys), len(caches), 6), dtype=np.int64)
    np.stack([cache.places_LX for cache in caches], axis=1, out=chunks_LSX[:, :, :3])
    firsts = (0, *accumulate(counts))
    chunks_LSX[:, :, 3:] = np.array([positions, firsts[:-1], counts]).T
    return ChunkTable(chunks_LSX, firsts[-1], n_kv_heads, dim, caches)


class LackingExperts(Protocol):
    """Computes what the experts of a layer give for one token where not all that it calls lie at hand."""

    def __call__(self, layer: int, normed_1H: Tensor, ids_1K: Tensor, weights_1K: Tensor) -> Tensor: ...


class StepRoom:
    """Where a step writes of its sparse layers what the routers chose, how many rows of each expert were computed, and
    what was guessed. One piece of memory, for it is made once a token; it is looked at when somebody asks."""

    def __init__(self, n_layers: int, top_k: int, n_rows: int, n_guessed: int) -> None:
        """n_rows: 0 where all layers are plain. n_guessed: experts that are guessed for all layers."""
        self._n_layers, self._top_k, self._n_rows, self._n_guessed = n_layers, top_k, n_rows, n_guessed
        self._n_chosen = n_layers * top_k
        self._floats = torch.empty(3 * self._n_chosen + 2 * n_rows + 3 * n_guessed)
        self.ids = self._floats.data_ptr()
        self.rows = self.ids + 8 * self._n_chosen
        self.guessed = self.rows + 8 * n_rows
        self.weights = self.guessed + 12 * n_guessed
        """Addresses."""

    def _int64s(self, at: int, n: int) -> Tensor:
        first = (at - self.ids) // 4
        return self._floats[first : first + 2 * n].view(torch.int64)

    def _some_floats(self, at: int, n: int) -> Tensor:
        first = (at - self.ids) // 4
        return self._floats[first : first + n]

    @cached_property
    def ids_LK(self) -> Tensor:
        return self._int64s(self.ids, self._n_chosen).view(self._n_layers, self._top_k)

    @cached_property
    def weights_LK(self) -> Tensor:
        return self._some_floats(self.weights, self._n_chosen).view(self._n_layers, self._top_k)

    def rows_LE(self, n_experts: int) -> Tensor | None:
        """None where all layers are plain; of a plain layer no numbers, for there it is one for each chosen expert."""
        return self._int64s(self.rows, self._n_rows).view(-1, n_experts) if self._n_rows else None

    @cached_property
    def guessed_GK(self) -> tuple[Tensor, Tensor]:
        """Ids, and weights."""
        ids, weights = self.guessed, self.guessed + 8 * self._n_guessed
        ids_G, weights_G = self._int64s(ids, self._n_guessed), self._some_floats(weights, self._n_guessed)
        return ids_G.view(-1, self._top_k), weights_G.view(-1, self._top_k)


@dataclass(frozen=True)
class DecoderLayer:
    """Norms are RMS without a bias. experts and router: None in a dense layer. always: the dense layer's feed-forward
    block, or the shared expert. is_turned: whether the layer has rotary embedding."""

    attention_norm_H: Tensor
    attention: AttentionTable
    mlp_norm_H: Tensor
    eps: float
    router: RouterTable | None
    experts: ExpertTable | None
    always: ExpertTable | None
    is_turned: bool


class Decoder:
    """The layers as the kernel reads them."""

    def __init__(self, layers: Sequence[DecoderLayer], norm_H: Tensor, eps: float) -> None:
        """norm_H, eps: of the RMS norm before the head. `serves` must hold of it."""
        assert serves(norm_H)
        self.layers = tuple(layers)
        self._norm_H, self._eps = norm_H, eps
        self._layers = (_Layer * len(layers))(*map(_described, layers))
        self._row_of = list(accumulate((layer.router is not None for layer in layers), initial=0))
        self.top_k = max((layer.router.top_k for layer in layers if layer.router is not None), default=0)
        self.n_sparse = sum(layer.router is not None for layer in layers)
        self.n_experts = max((layer.router.struct.n_experts for layer in layers if layer.router is not None), default=0)

    def room(self, table: LayoutTable, guesses: GuessTable | None = None) -> StepRoom:
        """For one step."""
        n_rows = 0 if table.is_plain else self.n_sparse * self.n_experts
        return StepRoom(self.n_sparse, self.top_k, n_rows, 0 if guesses is None else guesses.n_chosen)

    def step(
        self,
        hidden_1H: Tensor,
        cos_1P: Tensor,
        sin_1P: Tensor,
        cache: CacheTable,
        position: int,
        table: LayoutTable,
        room: StepRoom,
        held: HeldTable | None = None,
        lacking: LackingExperts | None = None,
        exchange: object = None,
        guesses: GuessTable | None = None,
        states: int | None = None,
    ) -> Tensor:
        """Turns the embedded token into the last layer's output, in place, and writes its keys and values to the cache.
        Gives the same normed for the head. `serves` must hold of all tensors.

        held: None where all experts lie at hand. Else what layers call is counted as used, and one that calls an expert
        which does not lie there is left to `lacking`, which may bring it; no rows are told of such a layer.

        exchange: of ranks with some of the experts each, what `SharedSums.of_step` gave; all layers are plain then, and
        all experts at hand. Raises `RankLostError`.

        guesses: how layers guess the next one's experts, which `room` has room for too; None where none does. states:
        address of what guesses are made from and what routers then read, [2, G, H].
        """
        assert exchange is None or (table.is_plain and held is None)
        assert serves(hidden_1H, cos_1P, sin_1P)
        n_layers = len(self.layers)
        assert len(cache.keys) == len(table.layouts) == n_layers
        assert position < cache.n_positions
        kernels = library()
        assert kernels is not None  # the tables exist
        normed_1H = torch.empty_like(hidden_1H)
        arguments = (
            self._layers,
            n_layers,
            hidden_1H.shape[1],
            hidden_1H.data_ptr(),
            cos_1P.data_ptr(),
            sin_1P.data_ptr(),
            cos_1P.shape[1],
            cache.keys,
            cache.values,
            cache.head_stride,
            position,
            None if table.is_plain else table.layouts,
            room.ids,
            room.weights,
            None if table.is_plain else room.rows,
            exchange,
            None if held is None else held.address,
            None if guesses is None else guesses.address,
            room.guessed,
            states,
            normed_1H.data_ptr(),
            self._norm_H.data_ptr(),
            self._eps,
        )
        layer = kernels.joulebench_step(*arguments, 0, None, torch.get_num_threads())
        while 0 <= layer < n_layers:
            assert lacking is not None  # all lie at hand where nothing is said of them
            row = self._row_of[layer]
            ids_1K, weights_1K = room.ids_LK[row : row + 1], room.weights_LK[row : row + 1]
            mixed_1H = lacking(layer, normed_1H, ids_1K, weights_1K)
            assert serves(mixed_1H)
            layer = kernels.joulebench_step(*arguments, layer, mixed_1H.data_ptr(), torch.get_num_threads())
        if layer < 0:
            raise RankLostError("a rank of a step is gone")
        return normed_1H


def _described(layer: DecoderLayer) -> _Layer:
    assert serves(layer.attention_norm_H, layer.mlp_norm_H)
    return _Layer(
        layer.attention.layer,
        layer.router.struct if layer.router is not None else RouterStruct(),
        address(layer.attention_norm_H),
        address(layer.mlp_norm_H),
        None if layer.experts is None else ctypes.addressof(layer.experts.matrices),
        None if layer.always is None else ctypes.addressof(layer.always.matrices),
        layer.eps,
        layer.is_turned,
    )
