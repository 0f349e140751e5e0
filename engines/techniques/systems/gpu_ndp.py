"""The systems of GPU-NDP scheduling (source 001) and what it compares itself with."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.caches import CacheParameters
from engines.techniques.systems.preset import ON_CPU, Preset

_SOURCE = "001 GPU-NDP"
SYSTEMS = (
    Preset(
        "moe-ondemand",
        "the first experts of each layer stay in memory, the others are loaded when they are called",
        f"{_SOURCE}, baselines",
        Choices(ON_CPU, ExactParameters(), move=CacheParameters(evict="static", stay="first")),
        fixed=("evict", "stay", "unit", "naive_launch", "prefetch"),
    ),
)
