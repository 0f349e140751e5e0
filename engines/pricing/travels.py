"""What travels between units that have memories of their own, and the links of a sheet on which it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from devices.base import DeviceError, Unit
from devices.models.operation import TRANSFER
from devices.models.sheet import Sheet
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.pricing.steps import Steps, made
from engines.techniques.context import ModelSizes


class Sent(NamedTuple):
    """Bytes from one unit's memory to another's."""

    source: Unit
    target: Unit
    n_bytes: float


class Arrival(NamedTuple):
    """Weights that are on their way. expert: None of all that fill a buffer together."""

    layer: int
    unit: Unit
    expert: int | None


@dataclass
class Travels:
    """The links of a sheet, and what is on its way over them from one step to the next.

    computed: sizes of the model whose plans are priced, where the priced one has others.
    """

    sheet: Sheet
    computed: ModelSizes | None = None
    on_the_way: dict[Arrival, int | None] = field(default_factory=dict)
    """The number of the operation that brings it."""
    _known: dict[tuple[Unit, Unit], str] = field(default_factory=dict, repr=False)

    def link(self, source: Unit, target: Unit, what: str) -> str:
        """The resource. Raises `DeviceError`."""
        found = self._known.get((source, target))
        if found is None:
            found = self.sheet.resource_between(source, target)
        if found is None:
            raise DeviceError(
                f"{what} would travel from {source} to {target}, and sheet {self.sheet.name} has no link between them;"
                " choose a technique that keeps to its links"
            )
        self._known[source, target] = found
        return found

    def arriving(self, layer: int) -> dict[Unit, dict[int, Arrival]]:
        """What is on its way for calls of that layer one by one: by unit and expert."""
        found: dict[Unit, dict[int, Arrival]] = {}
        for one in self.on_the_way:
            if one.layer == layer and one.expert is not None:
                found.setdefault(one.unit, {})[one.expert] = one
        return found

    @property
    def has_links(self) -> bool:
        return self.sheet.memory is None


def stood_in(plan: DispatchPlan, sheet: Sheet) -> DispatchPlan:
    """The plan with calls of the sheet's own units: those of a stand-in do not overlap."""
    own = sheet.computing
    if not any(kind.unit != own(kind.unit) for kind in plan.calls.kinds):
        return plan
    kinds = tuple(
        kind if kind.unit == own(kind.unit) else replace(kind, unit=own(kind.unit), overlaps=False)
        for kind in plan.calls.kinds
    )
    return replace(plan, calls=replace(plan.calls, kinds=kinds))


def send(steps: Steps, travels: Travels, name: str, sent: Sent, after: Sequence[int | None] = ()) -> int | None:
    link = travels.link(sent.source, sent.target, name)
    return steps.add(made(name, link, TRANSFER, moved_bytes=sent.n_bytes, aside=True), after)


def refuse_travel(plan: DispatchPlan) -> None:
    """On units that share one memory. Raises `EngineError`."""
    if len(plan.transfers):
        links = sorted({f"{source} to {target}" for source, target in plan.transfers.links})
        raise EngineError(
            f"the plan moves weights from {', '.join(links)}, but the modelled machine has one unified memory; "
            "use a technique without offloading there"
        )
    if plan.exchanges:
        units = sorted({unit for exchange in plan.exchanges for unit in exchange.units})
        raise EngineError(
            f"{', '.join(units)} send each other activations, and the modelled machine has no link between them; "
            "use a technique on units of one memory"
        )
