"""Where the routing of a model comes from that does not run: a recorded trace, or draws.

A source gives the experts of one token after another, for all layers with experts. Every table that rests on it names
it. What calibration counts is apart from what the runs are told.

Legend: L layers with experts, T tokens, E experts, K experts per token, S sequences, X tokens of all layers, those that
are drawn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from engines.calls import Integers
from engines.errors import EngineError
from engines.techniques.context import ModelSizes

Purpose = Literal["run", "calibration"]
EVERY = 10
"""Which n-th sequence of a trace calibration counts; all others are for runs."""


class RoutingSource(Protocol):
    @property
    def name(self) -> str:
        """What tables say of it."""
        ...

    def __hash__(self) -> int:
        """What was drawn is kept by the source."""
        ...

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        """The experts of tokens that follow each other, each token's distinct. sequence: of several that are asked at
        once or one after another, which. The same every time, and nobody writes to it. Raises `EngineError` where it is
        of another model."""
        ...


@dataclass(frozen=True)
class UniformRouting:
    """Each token chooses K of E experts, all alike, whatever the token before chose."""

    seed: int = 0

    @property
    def name(self) -> str:
        return f"generated, all experts alike, seed {self.seed}"

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        n_layers, n_experts, top_k = sizes.n_sparse_layers, sizes.n_experts, sizes.top_k
        random = np.random.default_rng((self.seed, purpose == "calibration", sequence))
        if 2 * top_k > n_experts:
            keys_XE = random.random((n_layers * n_tokens, n_experts), dtype=np.float32)
            ids_XK: Integers = np.argpartition(keys_XE, top_k - 1, axis=1)[:, :top_k]
            return ids_XK.reshape(n_layers, n_tokens, top_k)
        # Drawn with repeats; who has some draws again.
        ids_XK = random.integers(0, n_experts, (n_layers * n_tokens, top_k))
        again_X = np.arange(len(ids_XK))
        while len(again_X):
            ordered_XK = np.sort(ids_XK[again_X], axis=1)
            again_X = again_X[(ordered_XK[:, 1:] == ordered_XK[:, :-1]).any(axis=1)]
            ids_XK[again_X] = random.integers(0, n_experts, (len(again_X), top_k))
        return ids_XK.reshape(n_layers, n_tokens, top_k)


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """What a model's routers chose, one sequence behind another. Where more tokens are asked than were recorded, it
    begins again with the first."""

    model: str
    n_experts: int
    sequences: Sequence[Integers]
    """ids_TLK of each."""

    @property
    def n_layers(self) -> int:
        return int(self.sequences[0].shape[1])

    @property
    def top_k(self) -> int:
        return int(self.sequences[0].shape[2])

    @property
    def name(self) -> str:
        n_tokens = sum(map(len, self.sequences))
        return f"recorded, {self.model}, {n_tokens} tokens of {len(self.sequences)} sequences"

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        n_layers, top_k = self.n_layers, self.top_k
        found, wanted = (n_layers, self.n_experts, top_k), (sizes.n_sparse_layers, sizes.n_experts, sizes.top_k)
        if found != wanted:
            raise EngineError(
                f"the trace of {self.model} has {sizes_told(found)}, and the model that is priced has"
                f" {sizes_told(wanted)}; take a trace of that model, or a generator"
            )
        is_counted = purpose == "calibration"
        own = [one for n, one in enumerate(self.sequences) if (n % EVERY == 0) is is_counted] or list(self.sequences)
        first = sequence % len(own)
        ordered_TLK = np.concatenate([*own[first:], *own[:first]])
        ids_TLK = np.resize(ordered_TLK, (n_tokens, n_layers, top_k))
        return np.ascontiguousarray(ids_TLK.transpose(1, 0, 2)).astype(np.int64)


def sizes_told(sizes: tuple[int, int, int]) -> str:
    return f"{sizes[0]} layers of {sizes[1]} experts, top-{sizes[2]}"


def read_trace(path: Path, model: str, n_experts: int) -> RecordedRouting:
    """A trace as the data folder has it: `experts` [tokens, layers, K] and `offsets` of its sequences, in one .npz.

    Raises `EngineError` for a file that is absent or not such a trace.
    """
    try:
        with np.load(path, allow_pickle=False) as trace:
            experts_TLK, offsets = trace["experts"], trace["offsets"]
    except (OSError, ValueError, KeyError) as error:
        # What numpy says of a file that is no .npz is an invitation to load it unsafely.
        why = "it is no .npz of numbers" if isinstance(error, ValueError) else error
        raise EngineError(f"{path}: no trace of routing ({why}); give an .npz with experts and offsets") from error
    is_whole = experts_TLK.ndim == 3 and offsets.ndim == 1 and len(offsets) > 1 and offsets[0] == 0
    if not is_whole or offsets[-1] != len(experts_TLK) or (np.diff(offsets) < 1).any():
        raise EngineError(
            f"{path}: experts must be [tokens, layers, K] and offsets where sequences begin, from 0 to the end; found"
            f" {experts_TLK.shape} and {offsets.shape}"
        )
    if experts_TLK.dtype.kind not in "ui" or int(experts_TLK.min()) < 0:
        raise EngineError(f"{path}: experts must be whole numbers from 0 on; give a trace that has them so")
    if (most := int(experts_TLK.max())) >= n_experts:
        raise EngineError(
            f"{path}: experts must be numbers from 0 to {n_experts - 1}, as the model that is priced has them, and the"
            f" trace has {most} ({experts_TLK.shape[1]} layers, top-{experts_TLK.shape[2]}); take a trace of that model"
        )
    ordered = np.sort(experts_TLK, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise EngineError(f"{path}: a token chooses the same expert twice in a layer; fetch the trace again")
    return RecordedRouting(model, n_experts, np.split(experts_TLK, offsets[1:-1].tolist()))
