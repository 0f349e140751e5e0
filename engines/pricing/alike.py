"""Plans of decoded tokens that are made once for all tokens of which their technique can say that they cost alike.

A technique that asks where experts lie, or which unit holds them, has another plan for every token. What such a plan
costs and counts hangs on less: on how many of a token's experts lie in a memory, or on which ranks they are. So what it
hangs on is asked for all tokens at once, and a plan is made for the first token of each kind.

Legend: L layers with experts, N decoded tokens, K experts of a token, X figures that tell kinds apart.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import numpy as np

from engines.calls import Integers
from engines.dispatch import DispatchPlan
from engines.pricing.cached import CachedPlans
from engines.residency import Residency
from engines.techniques.composed import ComposedTechnique
from engines.techniques.over_ranks import OverRanks


class SharedPlans(Protocol):
    """Of one request. Good only while nothing that experts wait for is on its way."""

    def start_token(self, token: int) -> None: ...

    def known(self, layer: int) -> DispatchPlan | None:
        """For the token; asked once, layer by layer. None where one must be made."""
        ...

    def keep(self, layer: int, plan: DispatchPlan) -> None:
        """What was made then, and ran."""
        ...


class AlikePlans:
    """Of a technique that leaves lying what lies."""

    def __init__(
        self,
        technique: ComposedTechnique | OverRanks,
        residency: Residency | None,
        ids_LNK: Integers,
        first_layer: int,
        any_order: bool,
    ) -> None:
        self._any_order = any_order
        self._technique, self._residency = technique, residency
        self._ids_LNK, self._first = ids_LNK, first_layer
        self._kinds: dict[int, list[Hashable] | None] = {}
        """By layer, of each token; None where plans cannot be shared."""
        self._of_layer: dict[tuple[int, Hashable], DispatchPlan] = {}
        self._of_kind: dict[Hashable, DispatchPlan] = {}
        self._token = 0

    def start_token(self, token: int) -> None:
        self._token = token

    def known(self, layer: int) -> DispatchPlan | None:
        kind = self._kind(layer)
        if kind is None:
            return None
        plan = self._of_layer.get((layer, kind))
        if plan is None and (other := self._of_kind.get(kind)) is not None:
            plan = self._of_layer[layer, kind] = other.in_layer(layer)
        return plan

    def keep(self, layer: int, plan: DispatchPlan) -> None:
        kind = self._kind(layer)
        if kind is not None and (not len(plan.transfers) or bool((plan.transfers.layer_M == layer).all())):
            self._of_layer[layer, kind] = self._of_kind[kind] = plan

    def _kind(self, layer: int) -> Hashable | None:
        if layer not in self._kinds:
            self._kinds[layer] = self._asked(layer)
        kinds = self._kinds[layer]
        return None if kinds is None else kinds[self._token]

    def _asked(self, layer: int) -> list[Hashable] | None:
        said = self._technique.alike_tokens(layer, self._ids_LNK[layer - self._first], self._residency, self._any_order)
        if said is None:
            return None
        who, told_NX = said
        return [(who, row.tobytes()) for row in np.ascontiguousarray(told_NX)]


def shared_plans(
    technique: object, residency: Residency | None, ids_LNK: Integers, first_layer: int, any_order: bool
) -> SharedPlans | None:
    """any_order: as of `OneToken.alike`. None of a technique that says nothing of it."""
    if not isinstance(technique, ComposedTechnique | OverRanks):
        return None
    if isinstance(technique, ComposedTechnique) and residency is not None and technique.has_cache:
        return CachedPlans(technique, residency, ids_LNK, first_layer)
    return AlikePlans(technique, residency, ids_LNK, first_layer, any_order)
