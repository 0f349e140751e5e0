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

from engines.kernels.exchange import RankLostError
from engines.kernels.guesses import GuessTable
from engines.kernels.laid_out import HeldTable, LayoutTable
from engines.kernels.library import library
from engines.kernels.native import Largest
from engines.kernels.tables import (
    AttentionStruct,
    AttentionTable,
    ChunkTable,
    ExpertTable,
    MatrixStruct,
    RouterStruct,
    RouterTable,
    address,
    described,
    int64s,
    plain_format,
    reads,
    serves,
)
from engines.model.quantised import Matrix

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
        ("always_gate", MatrixStruct),
        ("eps", ctypes.c_float),
        ("is_turned", ctypes.c_int32),
    )


@dataclass(frozen=True)
class CacheTable:
    """The keys and values of a sequence in every layer, as the kernels read and write them."""

    keys: ctypes.Array[ctypes.c_void_p]
    values: ctypes.Array[ctypes.c_void_p]
    head_stride: int
    n_positions: int
    kept: tuple[Tensor, ...]
    """Owners of the memory that the table points into."""

    @property
    def form(self) -> int:
        """Of `enum Format`."""
        return plain_format(self.kept[0].dtype)

    @cached_property
    def places_LX(self) -> NDArray[np.int64]:
        """What `struct Chunk` of layer.h begins with, of every layer."""
        return np.array([(key, value, self.head_stride) for key, value in zip(self.keys, self.values, strict=True)])


def cache_table(keys: Sequence[Tensor], values: Sequence[Tensor]) -> CacheTable:
    """Of each layer [M, S, D], on the CPU, contiguous, all of one form of `enum Format`."""
    assert all(held.dtype is keys[0].dtype and held.is_cpu and held.is_contiguous() for held in (*keys, *values))
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
    assert all(cache.form == caches[0].form for cache in caches)
    chunks_LSX = np.empty((len(caches[0].keys), len(caches), 6), dtype=np.int64)
    np.stack([cache.places_LX for cache in caches], axis=1, out=chunks_LSX[:, :, :3])
    firsts = (0, *accumulate(counts))
    chunks_LSX[:, :, 3:] = np.array([positions, firsts[:-1], counts]).T
    return ChunkTable(chunks_LSX, firsts[-1], n_kv_heads, dim, caches[0].form, caches)


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
    block, or the shared expert. always_gate: of the shared expert, None where it counts whole. is_turned: whether the
    layer has rotary embedding."""

    attention_norm_H: Tensor
    attention: AttentionTable
    mlp_norm_H: Tensor
    eps: float
    router: RouterTable | None
    experts: ExpertTable | None
    always: ExpertTable | None
    always_gate_1H: Tensor | None
    is_turned: bool


class _Ends(ctypes.Structure):
    """`struct Ends` of layer.h."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("embedding", "head")),
        ("head_bias", ctypes.c_void_p),
        ("scale", ctypes.c_float),
    )


class Ends:
    """What lies before the layers and behind them, as the kernels read it: `reads` must hold of both matrices, `serves`
    of the bias. scale: of the embedding."""

    def __init__(self, embedding_LH: Matrix, head_LH: Matrix, head_bias_L: Tensor | None, scale: float) -> None:
        assert reads(embedding_LH)
        assert reads(head_LH)
        assert head_bias_L is None or serves(head_bias_L)
        self._kept = embedding_LH, head_LH, head_bias_L
        self._struct = _Ends(described(embedding_LH), described(head_LH), address(head_bias_L), scale)
        self.address = ctypes.addressof(self._struct)
        self.n_ids, self.n_logits = embedding_LH.shape[0], head_LH.shape[0]


class Decoder:
    """The layers as the kernel reads them. It computes one step at a time: it keeps the states of the last one."""

    def __init__(self, layers: Sequence[DecoderLayer], norm_H: Tensor, eps: float, ends: Ends | None = None) -> None:
        """norm_H, eps: of the RMS norm before the head. `serves` must hold of it."""
        assert serves(norm_H)
        self.layers, self.ends = tuple(layers), ends
        self._norm_H, self._eps = norm_H, eps
        self._states = torch.empty(1, len(norm_H)), torch.empty(1, len(norm_H))
        self._best, self._most = ctypes.c_int64(), ctypes.c_float()
        self._choice = ctypes.addressof(self._best), ctypes.addressof(self._most)
        self._layers = (_Layer * len(layers))(*map(_described, layers))
        self._row_of = list(accumulate((layer.router is not None for layer in layers), initial=0))
        self.top_k = max((layer.router.top_k for layer in layers if layer.router is not None), default=0)
        self.n_sparse = sum(layer.router is not None for layer in layers)
        self.n_experts = max((layer.router.struct.n_experts for layer in layers if layer.router is not None), default=0)

    def room(self, table: LayoutTable, guesses: GuessTable | None = None) -> StepRoom:
        """For one step."""
        n_rows = 0 if table.is_plain else self.n_sparse * self.n_experts
        return StepRoom(self.n_sparse, self.top_k, n_rows, 0 if guesses is None else guesses.n_chosen)

    def room_of_batch(self, n_tokens: int) -> StepRoom:
        """For one step of so many sequences: the rows of a layer follow those of the layer before."""
        return StepRoom(self.n_sparse * n_tokens, self.top_k, 0, 0)

    def batch(
        self, token_ids: Sequence[int], turns: Sequence[tuple[Tensor, Tensor]], chunks: ChunkTable, room: StepRoom
    ) -> Tensor:
        """One token of each sequence through all layers, from its id to logits_TL. Their keys and values are written to
        the caches. turns: of each sequence cos_SP and sin_SP, beyond the position of its token. All layers are plain,
        and all experts at hand."""
        n_tokens, ends = len(token_ids), self.ends
        assert ends is not None
        assert chunks.n_tokens == chunks.chunks_LSX.shape[1] == len(turns) == n_tokens
        assert len(chunks.chunks_LSX) == len(self.layers)
        attention = self.layers[0].attention.layer
        assert (chunks.n_kv_heads, chunks.dim, chunks.form) == (attention.n_kv_heads, attention.dim, attention.kept)
        assert min(token_ids) >= 0
        assert max(token_ids) < ends.n_ids
        n_pairs = turns[0][0].shape[1]
        of_tokens = list(zip(turns, chunks.chunks_LSX[0, :, 3].tolist(), strict=True))
        assert all(serves(*pair) and position < len(pair[0]) for pair, position in of_tokens)
        places = [pair[part].data_ptr() + 4 * position * n_pairs for part in (0, 1) for pair, position in of_tokens]
        logits_TL = torch.empty(n_tokens, ends.n_logits)
        kernels = library()
        assert kernels is not None  # the tables exist
        kernels.joulebench_batch(
            *(self._layers, len(self.layers), len(self._norm_H), int64s(token_ids), n_tokens),
            *(int64s(places), n_pairs, chunks.address, room.ids, room.weights),
            *(self._norm_H.data_ptr(), self._eps, ends.address, logits_TL.data_ptr(), torch.get_num_threads()),
        )
        return logits_TL

    def step(
        self,
        start: Tensor | int,
        turns: tuple[Tensor, Tensor],
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
        """One token through all layers. Its keys and values are written to the cache. `serves` must hold of all
        tensors.

        start: the embedded token, hidden_1H. It is turned into the last layer's output in place, and the same normed
        for the head is given. Or the token's id: what the head makes of it is given, logits_1L, and until the next step
        `largest`.

        turns: cos_SP and sin_SP of at least `position` + 1 positions.

        held: None where all experts lie at hand. Else what layers call is counted as used, and one that calls an expert
        which does not lie there is left to `lacking`, which may bring it; no rows are told of such a layer.

        exchange: of ranks with some of the experts each, what `SharedSums.of_step` gave; all layers are plain then, and
        all experts at hand. Raises `RankLostError`.

        guesses: how layers guess the next one's experts, which `room` has room for too; None where none does. states:
        address of what guesses are made from and what routers then read, [2, G, H].
        """
        assert exchange is None or (table.is_plain and held is None)
        cos_SP, sin_SP = turns
        assert serves(cos_SP, sin_SP)
        assert position < len(cos_SP)
        turned = 4 * position * cos_SP.shape[1]
        n_layers = len(self.layers)
        assert len(cache.keys) == len(table.layouts) == n_layers
        assert position < cache.n_positions
        assert self.layers[0].attention.layer.kept == cache.form
        kernels = library()
        assert kernels is not None  # the tables exist
        if isinstance(start, Tensor):
            assert serves(start)
            hidden_1H, normed_1H, ends, token, logits_1L = start, torch.empty_like(start), None, 0, None
        else:
            assert self.ends is not None
            assert 0 <= start < self.ends.n_ids
            hidden_1H, normed_1H = self._states
            ends, token = self.ends.address, start
            logits_1L = torch.empty(1, self.ends.n_logits)
        arguments = (
            self._layers,
            n_layers,
            hidden_1H.shape[1],
            hidden_1H.data_ptr(),
            cos_SP.data_ptr() + turned,
            sin_SP.data_ptr() + turned,
            cos_SP.shape[1],
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
            ends,
            token,
            None if logits_1L is None else logits_1L.data_ptr(),
            *self._choice,
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
        return normed_1H if logits_1L is None else logits_1L

    @property
    def largest(self) -> Largest:
        """Of the last step's logits."""
        return self._most.value, self._best.value


def _described(layer: DecoderLayer) -> _Layer:
    assert serves(layer.attention_norm_H, layer.mlp_norm_H)
    return _Layer(
        layer.attention.layer,
        layer.router.struct if layer.router is not None else RouterStruct(),
        address(layer.attention_norm_H),
        address(layer.mlp_norm_H),
        None if layer.experts is None else ctypes.addressof(layer.experts.matrices),
        None if layer.always is None else ctypes.addressof(layer.always.matrices),
        MatrixStruct() if layer.always_gate_1H is None else described(layer.always_gate_1H),
        layer.eps,
        layer.is_turned,
    )
