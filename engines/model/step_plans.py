"""What the layers of a decode step computed, and its plans, which are made when somebody asks for them.

Legend: E experts, K experts per token, L sparse layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from engines.calls import Width
from engines.decode_layout import PLAIN, DecodeLayout
from engines.dispatch import DispatchPlan, Routing
from engines.errors import EngineError
from engines.kernels.decoder import StepRoom
from engines.model.guessed import GuessedStep
from engines.model.said_layouts import SaidLayouts
from engines.residency import Residency
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.context import LayerInput


@dataclass(frozen=True)
class Computed:
    """What a sparse layer of a step computed. routing: its router's choice. rows_E: rows of each expert's calls; None:
    one for each that was executed. layout: whose slices were computed. plan: of a layer that was left to its plan, for
    experts had to be brought."""

    routing: Routing
    rows_E: Tensor | None
    layout: DecodeLayout = PLAIN
    plan: DispatchPlan | None = None

    def rows_of_calls(self, executed: Routing | None = None) -> dict[int, int]:
        if self.rows_E is None:
            return dict(Counter((executed or self.routing).expert_ids_TK.reshape(-1).tolist()))
        return {expert: n_rows for expert, n_rows in enumerate(self.rows_E.tolist()) if n_rows}

    def check(self, plan: DispatchPlan, name: str, layer: int, executed: Routing | None = None) -> None:
        """Raises `EngineError` where the plan is not what was computed, with all experts where they lay. name: of the
        technique. executed: in the place of the router's choice."""
        ran, planned = self.rows_of_calls(executed), _rows_by_slice(plan)
        slices = [_Slice(width=w) for w in self.layout.widths] + [_Slice(hidden=w) for w in self.layout.hidden]
        for one in slices or [_Slice()]:
            rows = planned.pop(one, {})
            if ran != rows:
                raise EngineError(
                    f"{name} decoded layer {layer} with rows {ran} by expert and planned {rows}{one};"
                    " its decode_layout must say what its plan does"
                )
        for one, rows in planned.items():
            raise EngineError(
                f"{name} planned layer {layer} with rows {rows} by expert{one or ' of whole experts'}, and decoded none"
                " of them; its decode_layout must say what its plan does"
            )


class StepPlans(Sequence[DispatchPlan | None]):
    """The plans of one step. That of a layer which was computed by its layout is made when somebody asks: most are only
    counted, after the time of the step is taken.

    Raises `EngineError` where such a plan is not what was computed.
    """

    def __init__(
        self,
        technique: Technique,
        computed: Sequence[Computed | DispatchPlan | None],
        fused: bool,
        grouped: Set[bool] = frozenset(),
        shown: Shown | None = None,
    ) -> None:
        """computed: of each layer what was computed or, where that followed a plan, the plan; None of a dense one.
        fused: whether the step was one call, but for layers whose experts had to be brought. grouped: of layers that
        followed a plan, whether all their experts were computed together. shown: of a technique that is shown what
        lies where: such plans are made once, in the order of steps."""
        self.technique = technique
        self.computed = computed
        self.is_fused = fused
        self.grouped = grouped
        self._shown = shown if shown is not None and shown.residency is not None else None
        self._settled: list[DispatchPlan | None] | None = None

    @property
    def waited(self) -> bool:
        """Whether a layer's experts waited until its plan was made."""
        return any(isinstance(computed, DispatchPlan) for computed in self.computed)

    @property
    def of_one_token(self) -> WholeStep | None:
        """Of one token, all of whose experts were called as they were said to be, where they lay and with nothing
        guessed; None of every other step."""
        whole = self.computed
        return whole if isinstance(whole, WholeStep) and whole.is_as_said and self._shown is None else None

    def tell(self, listener: Callable[[int, Routing], None]) -> None:
        """What each sparse layer's router chose."""
        for layer, computed in enumerate(self.computed):
            if isinstance(computed, Computed):
                listener(layer, computed.routing)

    def __len__(self) -> int:
        return len(self.computed)

    def __getitem__(self, layer: int) -> DispatchPlan | None:  # type: ignore[override]
        if not isinstance(self.computed[layer], Computed):
            return self.computed[layer]  # type: ignore[return-value]
        if self._shown is None:
            return self._plan(layer, None)
        if self._settled is None:
            self._shown.settle(self)
        assert self._settled is not None  # it was deferred
        return self._settled[layer]

    def settle(self, residency: Residency) -> None:
        """Makes the plans, each as things lay then, and has each applied. Raises `EngineError`."""
        self._settled = []
        for layer in range(len(self.computed)):
            plan = self._plan(layer, residency)
            if plan is not None:
                residency.apply(layer, plan)
            self._settled.append(plan)

    def _plan(self, layer: int, residency: Residency | None) -> DispatchPlan | None:
        computed = self.computed[layer]
        if not isinstance(computed, Computed):
            return computed
        if computed.plan is not None:
            return computed.plan
        left = None if residency is None else 0
        seen = LayerInput(layer, "decode", computed.routing, residency=residency, prefill_left=left)
        executed = None
        guessed = self.computed.guessed if isinstance(self.computed, WholeStep) else None
        if guessed is not None:
            seen = replace(seen, predicted=guessed.for_layer(layer), guess=guessed.made_in(layer))
            executed = guessed.executed(layer)
        plan = self.technique.plan(seen)
        computed.check(plan, self.technique.name, layer, executed)
        if self._shown is not None and self._shown.slots is not None and len(plan.transfers):
            raise EngineError(f"{self.technique.name} planned to bring experts to layer {layer}, and all lay there")
        return plan

    def __iter__(self) -> Iterator[DispatchPlan | None]:
        return (self[layer] for layer in range(len(self)))


class _Slice(NamedTuple):
    """Of an expert; all of it where nothing is given."""

    width: Width | None = None
    hidden: Width | None = None

    def __str__(self) -> str:
        if self.width is None and self.hidden is None:
            return ""
        part, of = (self.width, "") if self.width is not None else (self.hidden, " of the model width")
        assert part is not None
        return f" in columns {part.first} to {part.end}{of}"


def _rows_by_slice(plan: DispatchPlan) -> dict[_Slice, dict[int, int]]:
    """Of each expert's calls."""
    calls = plan.calls
    slice_K = [_Slice(kind.width, kind.hidden) for kind in calls.kinds]
    kind_S = [0] * len(calls.expert_S) if calls.kind_C is None else calls.kind_C[calls.call_S].tolist()
    found: dict[_Slice, dict[int, int]] = {}
    for expert, n_rows, kind in zip(calls.expert_S.tolist(), calls.rows_S.tolist(), kind_S, strict=True):
        rows = found.setdefault(slice_K[kind], {})
        rows[expert] = rows.get(expert, 0) + n_rows
    return found


class WholeStep(Sequence[Computed | None]):
    """What the layers of a step computed that was one call, told when somebody asks. n_tokens: of as many sequences."""

    def __init__(self, said: SaidLayouts, room: StepRoom, n_experts: int, n_tokens: int = 1) -> None:
        self._said = said
        self._room = room
        self.n_experts = n_experts
        self._n_tokens = n_tokens
        self.by_plan: dict[int, DispatchPlan] = {}
        """Of layers whose experts had to be brought."""
        self.n_done = 0
        """Layers, all of them unless the step was broken off."""

    @property
    def is_as_said(self) -> bool:
        is_one = self._n_tokens == 1 and not self.by_plan and self.n_done == len(self._said.layouts)
        return is_one and self._said.guesses is None

    @property
    def sparse_layers(self) -> list[int]:
        return [layer for layer, layout in enumerate(self._said.layouts) if layout is not None]

    @property
    def ids_LK(self) -> Tensor:
        """What the routers of one token chose."""
        return self._room.ids_LK

    def __len__(self) -> int:
        return self.n_done

    def __getitem__(self, layer: int) -> Computed | None:  # type: ignore[override]
        return self._told[range(self.n_done)[layer]]

    def __iter__(self) -> Iterator[Computed | None]:
        return iter(self._told[: self.n_done])

    @cached_property
    def guessed(self) -> GuessedStep | None:
        """Inside of the step; None where nothing was."""
        guesses = self._said.guesses
        return None if guesses is None else GuessedStep(guesses, self._room, self.n_experts)

    @cached_property
    def _told(self) -> list[Computed | None]:
        """Once the step is over."""
        ids_LK, weights_LK, rows_LE = self._room.ids_LK, self._room.weights_LK, self._room.rows_LE(self.n_experts)
        told: list[Computed | None] = []
        row = 0
        for layer, layout in enumerate(self._said.layouts):
            if layout is None:
                told.append(None)
                continue
            end = row + self._n_tokens
            routing = Routing(ids_LK[row:end], weights_LK[row:end], self.n_experts)
            rows_E = None if rows_LE is None or layout.is_plain else rows_LE[row]
            told.append(Computed(routing, rows_E, layout, self.by_plan.get(layer)))
            row = end
        return told
