"""What an engine's steps computed, kept until there is time to count it.

No token's time should hold the counting, nor the plan of a decode step that nothing else asks for. It is done between
two requests, so that it does lie in the window of a trial, and in its joules: what counts alike is planned once.

Legend: N tokens, L sparse layers, K experts per token, G groups of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch

from engines.calls import Integers
from engines.dispatch import DispatchPlan, Routing, Tally, counted
from engines.errors import EngineError
from engines.heat import HeatCounts
from engines.model.step_plans import StepPlans, WholeStep
from engines.profile import Profile
from engines.road import Decoding, Prefill
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.composed import ComposedTechnique
from engines.techniques.context import ChunkPhase
from engines.techniques.over_ranks import OverRanks
from results.counters import EngineCounters
from results.expert_heat import ExpertHeat


class Counting:
    """Of one engine."""

    def __init__(self) -> None:
        self._counters = EngineCounters()
        self._heat = HeatCounts()
        self._uncounted: list[StepPlans] = []
        self._tallies: list[tuple[Tally, int]] = []
        """And of how many plans."""
        self._prefilled: set[Prefill] = set()
        self._decoded: set[Decoding] = set()

    def routed(self, layer: int, routing: Routing, phase: ChunkPhase) -> None:
        """What a layer's router chose, where the step does not tell it afterwards."""
        self._heat.hold(layer, routing, phase)

    def step(self, plans: StepPlans, phase: ChunkPhase) -> None:
        """A step that ran, and how."""
        if phase == "decode":
            self._uncounted.append(plans)
            self._decoded.add("fused" if plans.is_fused else "plan by plan" if plans.waited else "layer by layer")
            return
        self.again(plans)
        self._prefilled |= {"grouped" if is_grouped else "expert by expert" for is_grouped in plans.grouped}

    def again(self, plans: StepPlans) -> None:
        """Tokens that were computed once more, whose road is that of the first time."""
        # Not their rows, which are as many as a prompt's pairs.
        self._tallies += [(plan.tally, 1) for plan in plans if plan is not None]
        self._compare(plans)

    def end_request(self, shown: Shown) -> None:
        """Adds up what was planned; the plans of a decode step are made here (`engines.model.step_plans`). Raises
        `EngineError` where one is not what was computed: then nothing of the request is counted."""
        steps, self._uncounted = self._uncounted, []
        try:
            self._tally(steps)
            unused = EngineCounters(prefetched_unused=shown.take_unused())
        except BaseException:
            self._heat.forget()
            shown.likeness.take()
            if shown.slots is not None:
                with suppress(EngineError):  # a copy that failed too
                    shown.slots.take_copied()
            raise
        finally:
            tallies, self._tallies = self._tallies, []
        for layer, found in shown.likeness.take().items():
            self._heat.alike(layer, found)
        of_request = EngineCounters.total([unused, counted(tallies)])
        if shown.slots is not None:
            of_request = shown.slots.take_copied().observed(of_request)
        elif of_request.bytes_moved:
            of_request = of_request.model_copy(update={"bytes_copied": 0})
        self._counters = EngineCounters.total([self._counters, of_request])
        self._heat.count()

    def _tally(self, steps: Sequence[StepPlans]) -> None:
        of_one_token = []
        for step in steps:
            whole = step.of_one_token
            if whole is not None:
                of_one_token.append((step, whole))
                continue
            if step.is_fused:
                step.tell(self._heat.hold)
            self.again(step)
        if of_one_token and of_one_token[0][1].sparse_layers:
            self._count_alike(of_one_token)

    def _count_alike(self, steps: Sequence[tuple[StepPlans, WholeStep]]) -> None:
        """Of one technique. Of those whose plans of a layer count alike the first is made, and the last if there are
        more; both are compared with what ran, and must count alike. The others were called by the same layout."""
        first, whole = steps[0]
        ids_NLK = torch.stack([one.ids_LK for _, one in steps])
        for row, layer in enumerate(whole.sparse_layers):
            ids_NK = ids_NLK[:, row]
            self._heat.hold_ids(layer, ids_NK, whole.n_experts, "decode")
            known = first[layer]  # what plans of tokens hang on is known once there is one
            for n, last, n_alike in _examples(first.technique, layer, ids_NK.numpy()):
                plan, other = known if not n else steps[n][0][layer], steps[last][0][layer] if last > n else None
                assert plan is not None  # of a sparse layer
                if other is not None and other.tally.numbers() != plan.tally.numbers():
                    raise EngineError(
                        f"{first.technique.name} counts two tokens of layer {layer} otherwise, and said that they are"
                        " alike; its alike_tokens must tell what its plans hang on"
                    )
                self._tallies.append((plan.tally, n_alike))

    def _compare(self, plans: Sequence[DispatchPlan | None]) -> None:
        """What had been predicted, with what the routers chose."""
        for layer, plan in enumerate(plans):
            if plan is not None and plan.foretold is not None:
                self._heat.foretold(layer, plan.foretold)

    def take_counters(self) -> EngineCounters:
        counters, self._counters = self._counters, EngineCounters()
        return counters

    def take_heat(self, profile: Profile | None) -> ExpertHeat | None:
        return self._heat.take(profile)

    def take_roads(self) -> tuple[set[Prefill], set[Decoding]]:
        """Those that prompts and tokens took since the last call."""
        prefilled, self._prefilled = self._prefilled, set()
        decoded, self._decoded = self._decoded, set()
        return prefilled, decoded


def _examples(technique: Technique, layer: int, ids_NK: Integers) -> list[tuple[int, int, int]]:
    """Of tokens whose plans of the layer count alike the first and the last, and how many they are."""
    told = None
    if isinstance(technique, ComposedTechnique | OverRanks):
        told = technique.alike_tokens(layer, ids_NK, None, any_order=False, interchange=lambda _: False)
    if told is None:
        return [(n, n, 1) for n in range(len(ids_NK))]
    _, first_G, counts_G = np.unique(told.told_NX, axis=0, return_index=True, return_counts=True)
    _, behind_G = np.unique(told.told_NX[::-1], axis=0, return_index=True)
    return list(zip(first_G.tolist(), (len(ids_NK) - 1 - behind_G).tolist(), counts_G.tolist(), strict=True))
