"""The systems of GPU-NDP scheduling (source 001) and what it compares itself with."""

from __future__ import annotations

from engines.techniques.choices import Choices
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.caches import CacheParameters
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.move.slices import SlicesParameters
from engines.techniques.place.hosts import CheaperParameters, HottestParameters
from engines.techniques.place.ndp import NdpParameters
from engines.techniques.systems.preset import ON_CPU, Preset

_SOURCE = "001 GPU-NDP"
_WHAT = ("balanced", "resident", "prefetch")
SYSTEMS = (
    Preset(
        "ndp-tp",
        "every expert in slices over NDP units, partial sums added on the GPU",
        f"{_SOURCE}, §III-B",
        Choices(NdpParameters(), ExactParameters(), "gpu"),
        fixed=(*_WHAT, "costs_of", "as_shape"),
    ),
    Preset(
        "ndp-tp-lb",
        "slices, and as many experts on the GPU as balance both sides, one of them in part",
        f"{_SOURCE}, §III-C",
        Choices(NdpParameters(balanced=True), ExactParameters(), "gpu", move=SlicesParameters()),
        fixed=(*_WHAT, "slots"),
    ),
    Preset(
        "ndp-tp-pre",
        "slices, and the experts that a prompt chose most lie on the GPU while it is answered",
        f"{_SOURCE}, §III-D",
        Choices(NdpParameters(resident=True), ExactParameters(), "gpu", move=SlicesParameters(prefetch=True)),
        fixed=_WHAT,
    ),
    Preset(
        "ndp",
        "slices, experts that a prompt chose most on the GPU, and where a token needs none of them, balance",
        f"{_SOURCE}, §III",
        Choices(
            NdpParameters(balanced=True, resident=True), ExactParameters(), "gpu", move=SlicesParameters(prefetch=True)
        ),
        fixed=_WHAT,
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
