"""Counts the routers' choices of a window, outside the time of any token. Legend: T tokens, K experts per token."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.dispatch import Routing
from engines.profile import Profile
from results.records import ExpertHeat

MOST_HELD_PAIRS = 1 << 22
"""Choices kept before they are counted in the middle of a request: 32 MiB of them."""


class HeatCounts:
    """Holds what was routed until somebody has time to count it."""

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor]] = {}
        self._n_held = 0
        self._counts: dict[int, Tensor] = {}
        self._n_experts = 0

    def hold(self, layer: int, routing: Routing) -> None:
        """One layer of one step. Nothing writes to the tensor later."""
        ids_TK = routing.expert_ids_TK
        self._held.setdefault(layer, []).append(ids_TK)
        self._n_held += ids_TK.numel()
        self._n_experts = routing.n_experts
        if self._n_held > MOST_HELD_PAIRS:
            self.count()

    def count(self) -> None:
        for layer, held in self._held.items():
            ids_P = torch.cat([ids_TK.reshape(-1) for ids_TK in held])
            counts_E = torch.bincount(ids_P, minlength=self._n_experts).cpu()
            self._counts[layer] = self._counts.get(layer, 0) + counts_E
        self._held.clear()
        self._n_held = 0

    def take(self, profile: Profile | None) -> ExpertHeat | None:
        """What was chosen since the last call, beside what the technique was calibrated on. None: no layer routed."""
        self.count()
        counts, self._counts = self._counts, {}
        if not counts:
            return None
        layers = tuple(sorted(counts))
        return ExpertHeat(
            layers=layers,
            chosen=tuple(tuple(counts[layer].tolist()) for layer in layers),
            profiled=None if profile is None else tuple(profile.tokens_per_expert[layer] for layer in layers),
        )
