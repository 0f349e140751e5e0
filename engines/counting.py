"""What an engine's steps computed, kept until there is time to count it.

No token's time should hold the counting, nor the plan of a decode step that nothing else asks for.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.dispatch import DispatchPlan, Routing, Tally
from engines.heat import HeatCounts
from engines.model.step_plans import StepPlans
from engines.profile import Profile
from engines.road import Decoding, Prefill
from engines.shown import Shown
from engines.techniques.context import ChunkPhase
from results.counters import EngineCounters
from results.expert_heat import ExpertHeat


class Counting:
    """Of one engine."""

    def __init__(self) -> None:
        self._counters = EngineCounters()
        self._heat = HeatCounts()
        self._uncounted: list[StepPlans] = []
        self._tallies: list[Tally] = []
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
        self._tallies += [plan.tally for plan in plans if plan is not None]
        self._compare(plans)

    def end_request(self, shown: Shown) -> None:
        """Adds up what was planned; the plans of a decode step are made here (`engines.model.step_plans`)."""
        for step in self._uncounted:
            if step.is_fused:
                step.tell(self._heat.hold)
            plans = list(step)
            self._compare(plans)
            self._tallies += [plan.tally for plan in plans if plan is not None]
        for layer, found in shown.likeness.take().items():
            self._heat.alike(layer, found)
        tallies, self._tallies = self._tallies, []
        self._uncounted.clear()
        unused = EngineCounters(prefetched_unused=shown.take_unused())
        counted = EngineCounters.total([unused, *(tally.counters() for tally in tallies)])
        if shown.slots is not None:
            counted = shown.slots.take_copied().observed(counted)
        elif counted.bytes_moved:
            counted = counted.model_copy(update={"bytes_copied": 0})
        self._counters = EngineCounters.total([self._counters, counted])
        self._heat.count()

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
