"""Counters of many plans together.

Legend: T tokens, K experts that a token has, X experts that were predicted for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import numpy as np

from engines.calls import Integers
from engines.dispatch import DispatchPlan
from engines.foretold import n_recalled
from results.counters import EngineCounters


@dataclass
class _Counted:
    """Of a plan that n were like."""

    counters: EngineCounters
    n: int = 0


class CountedPlans:
    """Counters of many plans; those of equal outline are counted once."""

    def __init__(self) -> None:
        self._alike: dict[Hashable, _Counted] = {}
        self._others: list[EngineCounters] = []
        self._compared: dict[tuple[int, int], list[tuple[Integers, Integers]]] = {}
        """Experts that were chosen, and those that had been predicted, by how many of each a token has."""
        self.prefetched_unused: int | None = None

    def add(self, plan: DispatchPlan) -> None:
        outline = plan.outline
        if outline is None:
            self._others.append(plan.counters())
            return
        known = self._alike.get(outline.key)
        if known is None:
            known = self._alike[outline.key] = _Counted(replace(plan, compared=None).counters())
        known.n += 1
        if plan.compared is not None:
            chosen_TK, predicted_TX = (one.ids_on_host_TK for one in plan.compared)
            compared = self._compared.setdefault((chosen_TK.shape[1], predicted_TX.shape[1]), [])
            compared.append((chosen_TK, predicted_TX))

    def counters(self) -> EngineCounters:
        found = [EngineCounters(prefetched_unused=self.prefetched_unused), *self._others]
        for compared in self._compared.values():
            chosen_TK, predicted_TX = (np.concatenate(parts) for parts in zip(*compared, strict=True))
            found.append(EngineCounters(predicted=chosen_TK.size, recalled=n_recalled(chosen_TK, predicted_TX)))
        for alike in self._alike.values():
            counted = {name: value * alike.n for name, value in alike.counters if isinstance(value, int)}
            found.append(EngineCounters(**counted))
        return EngineCounters.total(found)
