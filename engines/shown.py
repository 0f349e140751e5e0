"""What an engine shows its technique of what happened so far, and keeps up to date.

Techniques keep no state: it lies here, of one engine, and only what a technique asks for.

Legend: T tokens, K experts per token, E experts, L layers with experts, H hidden.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from torch import Tensor

from engines.calls import Integers
from engines.dispatch import DispatchPlan, Prediction, Routing
from engines.errors import EngineError
from engines.kernels.laid_out import HeldTable
from engines.likeness import Likeness
from engines.model.copy_stamps import CopyStamps
from engines.model.slots import ExpertSlots
from engines.residency import Counts, Residency
from engines.techniques.context import NOTHING, Asks, ChunkPhase, HiddenState, LayerInput, ModelSizes

if TYPE_CHECKING:
    from engines.model.buffers import LayerBuffers
    from engines.model.step_plans import StepPlans


class Shown:
    """Of the requests that an engine computes."""

    def __init__(self, asks: Asks, sizes: ModelSizes | None, plans_first: bool = False) -> None:
        """sizes: of the model; None of a dense one, of which there is nothing to show. plans_first: each layer of a
        decoded token waits for its plan, although the technique could say beforehand what it calls: what is compared
        with techniques that cannot, then decodes on their road. Raises `EngineError`."""
        if sizes is None and asks != NOTHING:
            raise EngineError("a technique asks what its experts did, and the model is dense; use dropless")
        self.asks = asks
        self.plans_first = plans_first
        self._slots: ExpertSlots | LayerBuffers | None = None
        self.stamps: CopyStamps | None = None
        """Of copies to there."""
        self.kept_slots: ExpertSlots | None = None
        """Those that stay filled from step to step; None where there are none."""
        self.residency: Residency | None = None
        self.counts: Counts | None = None
        if sizes is not None and asks.slots:
            self.residency = Residency(sizes.n_layers, sizes.n_experts, sizes.expert_width, asks.slots)
        if sizes is not None and asks.counts:
            self.counts = Counts(sizes.n_layers, sizes.n_experts)
        self._predicted: dict[int, Prediction] = {}
        self.likeness = Likeness()
        self._prefill_left: int | None = None
        self.held: HeldTable | None = None
        """What lies in the engine's slots, for kernels; None where it has none."""
        self._deferred: deque[StepPlans] = deque()
        self._replayed: Residency | None = None
        self._is_deferring = False

    def start_request(self) -> None:
        """What lies where stays as the request before left it."""
        if self.counts is not None:
            self.counts.reset()

    @property
    def slots(self) -> ExpertSlots | LayerBuffers | None:
        """Where the engine really loads experts; None: they are computed where they lie."""
        return self._slots

    @slots.setter
    def slots(self, slots: ExpertSlots | LayerBuffers | None) -> None:
        self._slots, own = slots, self.residency
        self.stamps = None if slots is None else slots.stamps
        self.kept_slots, self.held = slots if isinstance(slots, ExpertSlots) else None, None
        if self.kept_slots is not None and own is not None:
            at_hand_LE = self.kept_slots.at_hand_LE
            tables = [self.kept_slots.table(layer) for layer in range(len(at_hand_LE))]
            self.held = HeldTable(at_hand_LE, own.uses_LE, own.last_use_LE, own.n_plans_1, tables)

    def defer(self) -> bool:
        """Before a step whose plans are made later, in their turn (`settle`): what an engine really loads is decided
        and kept up to date meanwhile, and what is replayed later begins here. Whether it wants to hear when it is
        `deferred`, also where it was broken off."""
        if self.residency is None:
            return False
        if self._slots is not None and self._replayed is None:
            self._replayed = self.residency.copy()
        self._is_deferring = True
        return True

    def deferred(self, step: StepPlans) -> None:
        self._is_deferring = False
        self._deferred.append(step)

    def settle(self, last: StepPlans | None = None) -> None:
        """Has deferred steps make their plans, from the first to `last`; None: all. Raises `EngineError` where a plan
        is not what was computed, or where all of them do not come to what lies in the slots."""
        try:
            while self._deferred:
                step = self._deferred.popleft()
                assert self.residency is not None  # else nothing is deferred
                step.settle(self.residency if self._replayed is None else self._replayed)
                if step is last:
                    break
        except EngineError:
            self._forget_deferred()
            raise
        if not self._deferred and self._replayed is not None:
            replayed, self._replayed = self._replayed, None
            assert self.residency is not None
            if not replayed.is_as(self.residency):
                raise EngineError("the plans of decode steps do not come to the experts that lie in the slots")

    def _forget_deferred(self) -> None:
        self._deferred.clear()
        self._replayed = None

    def start_step(self, prefill_left: int | None, decodes: bool = False) -> None:
        """prefill_left: tokens of the prompts that are read after this step; None where that is not known. decodes:
        whether `end_step` follows, when its tokens are known."""
        if self.stamps is not None:
            self.stamps.start_step(decodes)
        self._predicted.clear()
        self._prefill_left = prefill_left

    def break_off(self) -> None:
        """A request ends before its time: nothing waits for what is copied at a stated rate."""
        if self.slots is not None:
            self.slots.break_off()

    def end_step(self) -> None:
        if self.stamps is not None:
            self.stamps.end_step()

    def layer(
        self, layer: int, phase: ChunkPhase, routing: Routing, saliency_T: Tensor | None, state: HiddenState | None
    ) -> LayerInput:
        if not self._is_deferring:
            self.settle()
        predicted = self._predicted.get(layer)
        if predicted is not None and predicted.shown_TH is not None and state is not None:
            self.likeness.hold(layer, predicted.shown_TH, state.router_input_TH)
        return LayerInput(
            layer,
            phase,
            routing,
            saliency_T,
            state if self.asks.hidden_state else None,
            self.residency,
            self.counts,
            None if predicted is None else predicted.routing,
            self._prefill_left,
        )

    def foretell(self, prediction: Prediction) -> None:
        """What was guessed for a later layer of this step, where no plan that was made for it says so."""
        self._predicted[prediction.layer] = prediction

    def ran(self, seen: LayerInput, plan: DispatchPlan) -> None:
        """Once for each layer of a step, when its calls ran."""
        if plan.prediction is not None:
            self.foretell(plan.prediction)
        if self.counts is not None:
            self.counts.add(seen.layer, seen.phase, seen.routing.expert_ids_TK)
        if self.residency is not None:
            self.residency.apply(seen.layer, plan)

    def passed(self, layer: int, ids_TK: Integers) -> None:
        """In the place of `ran`, where all lies as it did: these experts were called."""
        if self.residency is not None:
            self.residency.passed(layer, ids_TK.reshape(-1))

    def take_unused(self) -> int | None:
        """See `Residency.take_unused`; None where nothing is kept."""
        self.settle()
        return None if self.residency is None else self.residency.take_unused()

    def reset(self) -> None:
        """As before the first request."""
        self._forget_deferred()
        self.start_request()
        if self.residency is not None:
            self.residency.reset()
        if self.slots is not None:
            self.slots.clear()
