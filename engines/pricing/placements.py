"""Where attention and experts run: the comparing targets of 000-npumoe (Table 2), as data.

Core ML (naive) is not here: Core ML itself decides at run time which of its expert graphs reach the NPU, and the source
does not say what it decided, so there is nothing to price.
"""

from __future__ import annotations

from dataclasses import dataclass

from devices.base import Unit
from engines.errors import EngineError


@dataclass(frozen=True)
class Placement:
    """Unit of attention and of the experts. Everything else stays on the CPU (§3.2).

    The units are None on the machine that computes: there, where things run is not ours to choose.
    """

    name: str
    attention: Unit | None
    experts: Unit | None


HOST = Placement("host", None, None)
PLACEMENTS: dict[str, Placement] = {
    placement.name: placement
    for placement in (
        HOST,
        Placement("coreml-cpu", attention="cpu", experts="cpu"),
        Placement("anemll", attention="npu", experts="cpu"),
        Placement("npumoe", attention="npu", experts="npu"),
    )
}


def find_placement(name: str) -> Placement:
    """The placement called `name`. Raises `EngineError` naming those there are."""
    if name not in PLACEMENTS:
        raise EngineError(f"no placement {name!r}; available: {', '.join(PLACEMENTS)}")
    return PLACEMENTS[name]


def check(placement: Placement, technique_static_shapes: bool) -> str | None:
    """Why a technique cannot run under a placement, or None when it can.

    technique_static_shapes: the technique freezes every expert call's shape before routing is known.
    """
    if placement.experts == "npu" and not technique_static_shapes:
        return (
            f"placement {placement.name} runs experts on the NPU, which takes static shapes only; "
            "use a technique that freezes them (capacity_tiers), or a placement with experts on the CPU (anemll)"
        )
    return None
