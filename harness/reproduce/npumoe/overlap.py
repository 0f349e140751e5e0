"""Fig. 18's measure on routing of another model: its own needs checkpoints that we do not run.

Overlap@K of a layer is the share of the K experts that are chosen most at run time which are the K of calibration; the
source prints its median or mean over layers.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

import numpy as np

from engines.calls import Integers
from engines.pricing.routing_sources import read_trace
from results.popularity import imbalance, overlap_at_k

MODEL, N_EXPERTS = "gpt-oss-20b", 32
TRACE = Path("traces/moe/gpt-oss-20b_decode_trace.npz")


class Recorded(NamedTuple):
    """overlap: Overlap@K in percent, mean and median over layers. imbalance: of the busiest expert, least and most of
    all layers."""

    overlap: dict[int, tuple[float, float]]
    imbalance: tuple[float, float]


def trace_path() -> Path | None:
    """In the data folder; None where there is none."""
    folder = os.environ.get("JOULEBENCH_DATA")
    path = Path(folder) / TRACE if folder else None
    return path if path is not None and path.is_file() else None


@cache
def recorded(path: Path) -> Recorded:
    """Every other sequence is calibration, the others are run time."""
    sequences = read_trace(path, MODEL, N_EXPERTS).sequences
    known_LE, chosen_LE = (_counts(np.concatenate(sequences[first::2])) for first in (0, 1))
    layers = list(zip(known_LE.tolist(), chosen_LE.tolist(), strict=True))
    by_k = {k: [100 * overlap_at_k(known, chosen, k) for known, chosen in layers] for k in (4, 8)}
    ratios = [found for counts in known_LE.tolist() if (found := imbalance(counts)) is not None]
    return Recorded({k: (mean(found), median(found)) for k, found in by_k.items()}, (min(ratios), max(ratios)))


def _counts(ids_TLK: Integers) -> Integers:
    """n_LE."""
    return np.stack(
        [np.bincount(ids_TLK[:, layer].reshape(-1), minlength=N_EXPERTS) for layer in range(ids_TLK.shape[1])]
    )
