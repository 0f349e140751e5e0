"""Counts the routers' choices of a window, outside the time of any token.

Legend: T tokens, K experts per token, P = T * K routed pairs, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engines.dispatch import Routing
from engines.foretold import Foretold
from engines.likeness import Cosines
from engines.profile import Profile
from engines.techniques.context import ChunkPhase
from results.expert_heat import ExpertHeat, LayerForetold

MOST_HELD_PAIRS = 1 << 22
"""Choices kept before they are counted in the middle of a request: 32 MiB of them."""


class HeatCounts:
    """Holds what was routed until somebody has time to count it."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, ChunkPhase], list[Tensor]] = {}
        self._n_held = 0
        self._counts: dict[tuple[int, ChunkPhase], Tensor] = {}
        self._foretold: dict[int, Foretold] = {}
        self._cosines: dict[int, Cosines] = {}
        self._n_experts = 0

    def hold(self, layer: int, routing: Routing, phase: ChunkPhase = "decode") -> None:
        """One layer of one step; a fused one, which tells no phase, decodes. Nothing writes to the tensor later."""
        self.hold_ids(layer, routing.expert_ids_TK, routing.n_experts, phase)

    def hold_ids(self, layer: int, ids_TK: Tensor, n_experts: int, phase: ChunkPhase) -> None:
        """The same, of one step or of several."""
        self._held.setdefault((layer, phase), []).append(ids_TK)
        self._n_held += ids_TK.numel()
        self._n_experts = n_experts
        if self._n_held > MOST_HELD_PAIRS:
            self.count()

    def forget(self) -> None:
        """What was held since the last `count`."""
        self._held.clear()
        self._n_held = 0

    def foretold(self, layer: int, found: Foretold) -> None:
        """Of one layer of one step."""
        before = self._foretold.get(layer)
        self._foretold[layer] = found if before is None else before + found

    def alike(self, layer: int, found: Cosines) -> None:
        """Of one layer of one request."""
        before = self._cosines.get(layer)
        self._cosines[layer] = found if before is None else before.plus(found)

    def count(self) -> None:
        for place, held in self._held.items():
            ids_P = torch.cat([ids_TK.reshape(-1) for ids_TK in held])
            counts_E = torch.bincount(ids_P, minlength=self._n_experts).cpu()
            self._counts[place] = self._counts.get(place, 0) + counts_E
        self.forget()

    def take(self, profile: Profile | None) -> ExpertHeat | None:
        """What was chosen since the last call, beside what the technique was calibrated on. None: no layer routed."""
        self.count()
        counts, self._counts = self._counts, {}
        if not counts:
            return None
        told, self._foretold = self._foretold, {}
        cosines, self._cosines = self._cosines, {}
        layers = tuple(sorted({layer for layer, _ in counts}))
        none_E = torch.zeros(self._n_experts, dtype=torch.int64)
        prefilled = [counts.get((layer, "prefill"), none_E) for layer in layers]
        decoded = [counts.get((layer, "decode"), none_E) for layer in layers]
        return ExpertHeat(
            layers=layers,
            chosen=tuple(tuple((a_E + b_E).tolist()) for a_E, b_E in zip(prefilled, decoded, strict=True)),
            decoded=tuple(tuple(counts_E.tolist()) for counts_E in decoded),
            profiled=None if profile is None else tuple(profile.tokens_per_expert[layer] for layer in layers),
            foretold=tuple(_told(told.get(n), cosines.get(n), n, profile) for n in layers) if told else None,
        )


def _told(found: Foretold | None, alike: Cosines | None, layer: int, profile: Profile | None) -> LayerForetold | None:
    if found is None:
        return None
    predictions = None if profile is None else profile.predictions
    rows = [] if predictions is None else [row for row in predictions.accuracies if row.layer == layer]
    cosines = {(row.predictor, row.data): row.cosine for row in rows}
    q, s = (cosines.get((name, "held out"), cosines.get((name, "calibration"))) for name in ("router q", "router s"))
    return LayerForetold(
        tokens=found.tokens,
        recalled=found.recalled,
        aligned=found.aligned_K,
        cosine_tokens=0 if alike is None else alike.tokens,
        cosine_sum=None if alike is None else alike.total,
        profiled_cosine_q=q,
        profiled_cosine_s=s,
    )
