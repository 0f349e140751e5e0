"""The systems of GPU-NDP scheduling (source 001) and what it compares itself with."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.caches import CacheParameters
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.place.hosts import CheaperParameters, HottestParameters
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
    Preset(
        "fiddler",
        "each expert on the CPU or on the GPU, where it costs less, its fetching counted",
        f"{_SOURCE}, baselines; Fiddler's published code",
        Choices(CheaperParameters(), ExactParameters(), "gpu", move=FetchParameters()),
        fixed=("backbone",),
    ),
    Preset(
        "monde",
        "the busiest experts of a step are fetched to the GPU, the others run on the NDP units that hold them",
        f"{_SOURCE}, baselines",
        Choices(HottestParameters(), ExactParameters(), "gpu", move=FetchParameters()),
        fixed=("backbone",),
    ),
    Preset(
        "duplex",
        "two units share a memory: the busiest experts of a step on the one with arithmetic, the others on the other",
        f"{_SOURCE}, §I",
        Choices(HottestParameters(ndps=1), ExactParameters(), "gpu"),
        fixed=("alpha", "backbone"),
    ),
)
