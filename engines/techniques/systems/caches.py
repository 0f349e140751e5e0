"""Caches of experts that sources 001 and 003 compare themselves with."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.caches import CacheParameters, Evict
from engines.techniques.systems.preset import ON_CPU, Preset

_CACHES: dict[Evict, str] = {
    "lru": "a cache of experts in each layer; the one used longest ago goes",
    "lfu": "a cache of experts in each layer; the one used least goes",
    "static": "the most chosen experts of each layer stay in memory, the others are loaded when they are called",
}
SYSTEMS = tuple(
    Preset(
        name,
        what,
        "the caches that 001 and 003 compare themselves with",
        Choices(ON_CPU, ExactParameters(), move=CacheParameters(evict=name)),
        fixed=("evict", "naive_launch", "prefetch", *(() if name == "static" else ("stay",))),
    )
    for name, what in _CACHES.items()
)
