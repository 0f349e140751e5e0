"""Caches of experts, as others have them: what source 003 says of earlier work (§2), and what is usual."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.caches import CacheParameters, Evict
from engines.techniques.systems.preset import ON_CPU, Preset

_CACHES: dict[Evict, tuple[str, str]] = {
    "lru": (
        "a cache of experts in each layer; the one used longest ago goes",
        "Eliseev et al. 2023, of whom 003 speaks in §2",
    ),
    "lfu": ("a cache of experts in each layer; the one used least goes", "in no source; usual"),
    "static": (
        "the most chosen experts of each layer stay in memory, the others are loaded when they are called",
        "earlier work, of which 003 speaks in §2",
    ),
}
SYSTEMS = tuple(
    Preset(
        name,
        what,
        source,
        Choices(ON_CPU, ExactParameters(), move=CacheParameters(evict=name)),
        fixed=("evict", "naive_launch", "prefetch", *(() if name == "static" else ("stay",))),
    )
    for name, (what, source) in _CACHES.items()
)
