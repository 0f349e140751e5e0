"""Plans of decoded tokens that are made once for all tokens of which their technique can say that they cost alike.

A technique that asks where experts lie, or which unit holds them, has another plan for every token. What such a plan
costs and counts hangs on less: on how many of a token's experts lie in a memory, or on which ranks they are. So what it
hangs on is asked for all tokens at once, and a plan is made for the first token of each kind.

Legend: L layers with experts, N decoded tokens, K experts of a token, X figures that tell kinds apart, U units, M
transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np

from devices.base import Unit
from engines.calls import Integers
from engines.dispatch import DispatchPlan
from engines.pricing.cached import CachedPlans
from engines.residency import Residency
from engines.techniques.composed import ComposedTechnique
from engines.techniques.over_ranks import OverRanks

Interchange = Callable[[Sequence[Unit]], bool]
"""Whether units cost the same in each other's place."""


class SharedPlans(Protocol):
    """Of one request. Good only while nothing that experts wait for is on its way."""

    def start_token(self, token: int) -> None: ...

    def known(self, layer: int) -> DispatchPlan | None:
        """For the token; asked once, layer by layer. None where one must be made."""
        ...

    def keep(self, layer: int, plan: DispatchPlan) -> None:
        """What was made then, and ran."""
        ...


class _Kind(NamedTuple):
    """told: what plans hang on, but for which units they are on where those cost the same."""

    told: Hashable
    units: tuple[Unit, ...]


class AlikePlans:
    """Of a technique that leaves lying what lies."""

    def __init__(
        self,
        technique: ComposedTechnique | OverRanks,
        residency: Residency | None,
        ids_LNK: Integers,
        first_layer: int,
        any_order: bool,
        interchange: Interchange,
    ) -> None:
        self._any_order, self._interchange = any_order, interchange
        self._technique, self._residency = technique, residency
        self._ids_LNK, self._first_layer = ids_LNK, first_layer
        self._numbers: dict[_Kind, int] = {}
        self._kinds: list[_Kind] = []
        """By number."""
        self._kinds_N: dict[int, list[int] | None] = {}
        """By layer, the number of each token's; None where plans cannot be shared."""
        self._of_layer: dict[tuple[int, int], DispatchPlan] = {}
        self._of_kind: dict[int, DispatchPlan] = {}
        self._first: dict[Hashable, tuple[DispatchPlan, tuple[Unit, ...]]] = {}
        """Of those that are told alike, the one that was made first, and the units that it is on."""
        self._token = 0

    def start_token(self, token: int) -> None:
        self._token = token

    def known(self, layer: int) -> DispatchPlan | None:
        kind = self._kind(layer)
        if kind is None:
            return None
        plan = self._of_layer.get((layer, kind))
        if plan is None and (other := self._of_any_layer(kind)) is not None:
            plan = self._of_layer[layer, kind] = other.in_layer(layer)
        return plan

    def _of_any_layer(self, number: int) -> DispatchPlan | None:
        plan, kind = self._of_kind.get(number), self._kinds[number]
        if plan is None and kind.told in self._first:
            first, units = self._first[kind.told]
            plan = self._of_kind[number] = first.on_units(dict(zip(units, kind.units, strict=True)))
        return plan

    def keep(self, layer: int, plan: DispatchPlan) -> None:
        number = self._kind(layer)
        if number is not None and (not len(plan.transfers) or bool((plan.transfers.layer_M == layer).all())):
            self._of_layer[layer, number] = self._of_kind[number] = plan
            kind = self._kinds[number]
            self._first[kind.told] = plan, kind.units

    def _kind(self, layer: int) -> int | None:
        if layer not in self._kinds_N:
            kinds = self._asked(layer)
            self._kinds_N[layer] = None if kinds is None else list(map(self._number, kinds))
        kinds_N = self._kinds_N[layer]
        return None if kinds_N is None else kinds_N[self._token]

    def _number(self, kind: _Kind) -> int:
        number = self._numbers.setdefault(kind, len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append(kind)
        return number

    def _asked(self, layer: int) -> list[_Kind] | None:
        said = self._technique.alike_tokens(
            layer, self._ids_LNK[layer - self._first_layer], self._residency, self._any_order, self._interchange
        )
        if said is None:
            return None
        told = [(said.of, row.tobytes()) for row in np.ascontiguousarray(said.told_NX)]
        if said.on_NU is None:
            return [_Kind(one, ()) for one in told]
        return [_Kind(one, tuple(compress(said.units, on_U))) for one, on_U in zip(told, said.on_NU, strict=True)]


def shared_plans(
    technique: object,
    residency: Residency | None,
    ids_LNK: Integers,
    first_layer: int,
    any_order: bool,
    interchange: Interchange,
) -> SharedPlans | None:
    """any_order, interchange: as of `ComposedTechnique.alike_tokens`. None of a technique that says nothing of it."""
    if not isinstance(technique, ComposedTechnique | OverRanks):
        return None
    if isinstance(technique, ComposedTechnique) and residency is not None and technique.has_cache:
        return CachedPlans(technique, residency, ids_LNK, first_layer)
    return AlikePlans(technique, residency, ids_LNK, first_layer, any_order, interchange)
