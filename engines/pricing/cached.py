"""Plans of decoded tokens whose experts pass through a cache: made once for all of which the same calls miss.

What such a plan costs and counts hangs on which of a token's calls find their expert in a slot, and on nothing else.
So that is asked for all layers of a token at once, and a plan is made for the first that misses alike. What lies where
goes on as if each had been made.

Legend: L layers with experts, E experts, N decoded tokens, K experts of a token, X what happens in a cache.
"""

from __future__ import annotations

import numpy as np

from engines.calls import Integers
from engines.dispatch import DispatchPlan
from engines.residency import Residency
from engines.techniques.composed import ComposedTechnique
from engines.techniques.move.cache_steps import CacheStep
from engines.techniques.move.caches import Cache


class CachedPlans:
    """An `engines.pricing.alike.SharedPlans`."""

    def __init__(self, technique: ComposedTechnique, residency: Residency, ids_LNK: Integers, first_layer: int) -> None:
        self._technique, self._residency = technique, residency
        self._called_LNK, self._first = np.sort(ids_LNK, axis=2), first_layer
        self._cache: Cache | None = None
        self._token = 0
        self._step: CacheStep | None = None
        self._kinds_L: list[bytes] = []
        self._n_ran = 0
        """Layers of this token whose experts were called, as far as the residency knows."""
        self._of_layer: dict[tuple[int, bytes], DispatchPlan] = {}
        self._of_kind: dict[bytes, DispatchPlan] = {}

    def start_token(self, token: int) -> None:
        layers = range(self._first, self._first + len(self._called_LNK))
        self._token, self._cache, self._step = token, self._technique.cache_of_tokens(layers), None
        if self._cache is not None:
            self._step = self._cache.step(self._residency, self._called_LNK[:, token], self._first)
        self._kinds_L = [] if self._step is None else [row.tobytes() for row in self._step.hits_LK]
        self._n_ran = 0

    def known(self, layer: int) -> DispatchPlan | None:
        if self._step is None:
            return None
        row = layer - self._first
        kind = self._kinds_L[row]
        plan = self._of_layer.get((row, kind))
        if plan is None and (other := self._of_kind.get(kind)) is not None:
            plan = self._of_layer[row, kind] = other.in_layer(layer)
        if plan is None or row + 1 == len(self._kinds_L):
            self._run_until(row if plan is None else row + 1)
        return plan

    def keep(self, layer: int, plan: DispatchPlan) -> None:
        """What was made in its turn, and ran."""
        if self._step is None:
            return
        row = layer - self._first
        self._n_ran = row + 1
        self._of_layer[row, self._kinds_L[row]] = self._of_kind[self._kinds_L[row]] = plan

    def _run_until(self, row: int) -> None:
        assert self._step is not None
        assert self._cache is not None
        first, self._n_ran = self._n_ran, row
        if first == row:
            return
        happened = slice(0 if not first else int(self._step.ends_L[first - 1]), int(self._step.ends_L[row - 1]))
        self._residency.apply_token(
            self._cache.unit,
            self._first + first,
            self._called_LNK[first:row, self._token],
            self._step.place_X[happened] + self._first * self._residency.uses_LE.shape[1],
            self._step.comes_X[happened],
        )
