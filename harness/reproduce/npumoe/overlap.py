"""Fig. 18's measure on routing of other models: its own needs a checkpoint that does not run here.

Overlap@K of a layer is the share of the K experts that are chosen most in one text which are among the K of another.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np

from engines.calls import Integers
from engines.pricing.routing_sources import read_trace
from results.popularity import imbalance, overlap_at_k

MODEL, N_EXPERTS = "gpt-oss-20b", 32
TRACE = "traces/moe/gpt-oss-20b_decode_trace.npz"
COUNTED, COUNTS = "OLMoE", "traces/moe/olmoe_expert_counts.json.gz"
KS = (4, 8)


class Recorded(NamedTuple):
    """overlap: Overlap@K in percent, mean over layers. imbalance: of the busiest expert, least and most of layers."""

    overlap: dict[int, float]
    imbalance: tuple[float, float]


def data_file(name: str) -> Path | None:
    """In the data folder; None where there is none."""
    folder = os.environ.get("JOULEBENCH_DATA")
    path = Path(folder) / name if folder else None
    return path if path is not None and path.is_file() else None


@cache
def recorded(path: Path) -> Recorded:
    """Of a trace of one model: every other sequence is calibration, the others are run time."""
    sequences = read_trace(path, MODEL, N_EXPERTS).sequences
    known_LE, chosen_LE = (_counts(np.concatenate(sequences[first::2])) for first in (0, 1))
    layers = list(zip(known_LE.tolist(), chosen_LE.tolist(), strict=True))
    ratios = [found for counts in known_LE.tolist() if (found := imbalance(counts)) is not None]
    return Recorded({k: _percent(layers, k) for k in KS}, (min(ratios), max(ratios)))


@cache
def across_texts(path: Path) -> dict[int, float]:
    """Overlap@K in percent of counts by kind of text, the mean over pairs of kinds and over layers."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        by_text = list(json.load(file)["counts"].values())
    pairs = [(one[layer], other[layer]) for one, other in combinations(by_text, 2) for layer in one]
    return {k: _percent(pairs, k) for k in KS}


def _percent(pairs: Sequence[tuple[list[int], list[int]]], k: int) -> float:
    return 100 * mean(overlap_at_k(known, chosen, k) for known, chosen in pairs)


def _counts(ids_TLK: Integers) -> Integers:
    """n_LE."""
    n_layers = ids_TLK.shape[1]
    return np.stack([np.bincount(ids_TLK[:, layer].reshape(-1), minlength=N_EXPERTS) for layer in range(n_layers)])
