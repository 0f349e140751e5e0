"""What a technique is: a pure function from routing, and what calibration learnt, to a dispatch plan.

Legend: T tokens, K experts per token, P = T * K routed pairs in row-major order, E experts.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from torch import Tensor

from engines.decode_layout import DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.profile import Profile

ChunkPhase = Literal["prefill", "decode"]


class Technique(Protocol):
    """Plans one layer and one chunk at a time; keeps no state between calls."""

    name: str
    needs_saliency: bool
    """True when `plan` reads saliency_T: the L2 norm of each token's attention output."""
    couples_tokens: bool
    """True when what becomes of a token depends on the others of its chunk, as under a capacity."""

    def plan(self, routing: Routing, layer: int, phase: ChunkPhase, saliency_T: Tensor | None) -> DispatchPlan:
        """The plan of one layer. `phase` tells a one-token tail of a prefill from a decode step."""
        ...

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        """What `plan` makes of one decoded token, whatever its routing is, without saliency; the same at every call.

        None: something must be decided between router and experts, so that steps are computed layer by layer.
        """
        ...


class TechniqueParameters(Protocol):
    """The typed parameters of a technique (a frozen record), and the way to build it."""

    technique: ClassVar[str]
    static_shapes: ClassVar[bool]
    """True when every call's shape is known before the routing is."""
    lossless: ClassVar[bool]
    """True when it computes all that the router chose: its answers are the model's own, up to the order of sums."""

    @property
    def calibration_prompts(self) -> int:
        """How many prompts it wants to learn from; 0 for a technique that learns nothing offline."""
        ...

    def build(self, prefill_chunk: int, profile: Profile | None) -> Technique:
        """`profile` is None only where `calibration_prompts` is 0."""
        ...
