"""Which experts' weights a step loads: those that it needs, or all.

Source: the Neuron guide (004), "selective loading" and "all-experts". Selective loading computes the unique experts of
the batch with their own rows and saves 1 - unique / E of the loads. All-experts computes every expert for every token
and weighs what the router did not choose with zero: here rows of padding, which cost the same and change nothing.

Selective switches to all-experts where T K >= alpha E, in decode steps; alpha is 0.8 to 1 in the guide, 1 in its
reference code. Its prefill computes unique experts: the guide has blocks for prefill.

Legend: T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from engines.calls import Integers
from engines.decode_layout import PLAIN, DecodeLayout
from engines.residency import Booleans
from engines.techniques.base import Overflow, Rows
from engines.techniques.context import NOTHING, BuildContext, LayerInput
from engines.techniques.layout.exact import exact_rows, one_call_each
from results.records import Record


class SelectiveParameters(Record):
    static: ClassVar[bool] = False
    needs_profile: ClassVar[bool] = False

    kind: Literal["selective"] = "selective"
    switch_alpha: float = Field(default=1.0, gt=0, le=1e6)

    @property
    def lossless(self) -> bool:
        return True

    def build(self, context: BuildContext) -> Loads:
        return Loads(self.switch_alpha, context)


class AllExpertsParameters(Record):
    """Has no parameters: every expert computes every token, in prefill too."""

    static: ClassVar[bool] = True
    needs_profile: ClassVar[bool] = False

    kind: Literal["all_experts"] = "all_experts"

    @property
    def lossless(self) -> bool:
        return True

    def build(self, context: BuildContext) -> Loads:
        return Loads(None, context)


class Loads:
    asks = NOTHING
    overflow: Overflow = "none"
    may_overflow = False
    renormalise = False
    skips_padding = False

    def __init__(self, switch_alpha: float | None, context: BuildContext) -> None:
        """switch_alpha: None computes all experts always."""
        self.static = switch_alpha is None
        self._alpha = switch_alpha
        self._top_k = context.sizes.top_k if context.sizes is not None else 1

    def rows(self, seen: LayerInput, load_E: Integers, own_E: Booleans | None = None) -> Rows:
        n_tokens, top_k = seen.routing.expert_ids_TK.shape
        if self._alpha is None or (seen.phase == "decode" and n_tokens * top_k >= self._alpha * len(load_E)):
            n_experts = len(load_E)
            return one_call_each(np.arange(n_experts), np.full(n_experts, n_tokens), load_E)
        return exact_rows(load_E)

    def decode_layout(self, layer: int, n_experts: int) -> DecodeLayout | None:
        is_all = self._alpha is None or self._top_k >= self._alpha * n_experts
        return DecodeLayout(group_of_E=(0,) * n_experts) if is_all else PLAIN
