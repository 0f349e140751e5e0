"""The systems of GPU-NDP scheduling (source 001) and what it compares itself with."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.caches import CacheParameters
from engines.techniques.place.ndp import NdpParameters
from engines.techniques.systems.preset import ON_CPU, Preset

_SOURCE = "001 GPU-NDP"
_OF_THE_GPU = ("balanced", "resident", "costs_of", "as_shape")
SYSTEMS = (
    Preset(
        "ndp-tp",
        "every expert in slices over NDP units, partial sums added on the GPU",
        f"{_SOURCE}, §III-B",
        Choices(NdpParameters(), ExactParameters(), "gpu"),
        fixed=_OF_THE_GPU,
    ),
    Preset(
        "moe-ondemand",
        "the first experts of each layer stay in memory, the others are loaded when they are called",
        f"{_SOURCE}, baselines",
        Choices(ON_CPU, ExactParameters(), move=CacheParameters(evict="static", stay="first")),
        fixed=("evict", "stay", "unit", "naive_launch", "prefetch"),
    ),
)
