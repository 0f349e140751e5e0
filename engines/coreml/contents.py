"""What goes into a package, with nothing of the library that writes it: shapes, and weights as arrays.

A `Converter` turns a `Content` into a package. coremltools is one (`engines.coreml.mil`); a successor takes its place
by the same protocol.

Legend: H hidden, I expert width, N query heads, M key/value heads, D features of a head, P pairs of turned features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engines.coreml.manifest import PackagePlan, Weights
from engines.model.architecture import GatedUnit

Array = NDArray[np.float32] | NDArray[np.float16]


@dataclass(frozen=True)
class LinearContent:
    """weight_OI: [out, in]; fp16 as it is stored, before any narrower form."""

    weight_OI: Array
    bias_O: Array | None = None


@dataclass(frozen=True)
class GatedContent:
    """An expert, a shared expert or a dense layer's block."""

    gate: LinearContent
    up: LinearContent
    down: LinearContent


@dataclass(frozen=True)
class ExpertsContent:
    """Gated units of one layer, by the expert's number; 0 for what is no expert."""

    units: Mapping[int, GatedContent]
    unit: GatedUnit


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm of queries or keys: over each head's D features, or over all heads' at once. weight: [D] or [heads * D];
    None: without."""

    weight: Array | None
    eps: float
    over_all: bool = False


@dataclass(frozen=True)
class AttentionContent:
    """One layer's attention. n_pairs: P, 0 where nothing is turned; halves are turned, so heads whose neighbours are
    turned come with their features in another order. clip, softcap, scale, sinks_N: as of `AttentionConfig`.
    norm_after: norms follow the turning."""

    query: LinearContent
    key: LinearContent
    value: LinearContent
    out: LinearContent
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_pairs: int
    scale: float
    query_norm: HeadNorm | None = None
    key_norm: HeadNorm | None = None
    norm_after: bool = False
    clip: float | None = None
    softcap: float | None = None
    sinks_N: Array | None = None


Content = ExpertsContent | AttentionContent


class Converter(Protocol):
    """Writes packages. version: with the name of its library; it belongs to the identity of a conversion."""

    version: str

    def write(self, plan: PackagePlan, content: Content, weights: Weights, path: Path) -> None:
        """One package with all functions of the plan, at a path that is free. Raises `EngineError`, `OSError`."""
        ...


def n_weight_bytes(shapes: Sequence[tuple[int, int]], n_vector_values: int, weights: Weights) -> int:
    """Of matrices [out, in] and of vectors beside them, as they are stored."""
    values = sum(rows * columns for rows, columns in shapes)
    rows = sum(rows for rows, _ in shapes)
    vectors = 2 * n_vector_values
    if weights == "float16":
        return 2 * values + vectors
    if weights == "int8":
        return values + 2 * rows + vectors
    scales = sum(rows * -(-columns // INT4_BLOCK) for rows, columns in shapes)
    return -(-values // 2) + 2 * scales + vectors


INT4_BLOCK = 32
"""Columns of an int4 row that share a scale."""
MASKED = -3e4
"""Added to a score that counts for nothing: exp of it is 0, and no sum with a score leaves fp16."""
