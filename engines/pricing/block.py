"""The operations of one MoE block: router to scatter, as the rows of Table 4 of 000-npumoe, and what travels for it.

One after the other but for calls that overlap. On a machine whose units have memories of their own, besides:

    weights       over their link as soon as the router has chosen. A call waits for those of its experts; where they
                  fill a buffer together (`Transfers.as_one`), the block waits for all of them. Those of a later layer
                  travel meanwhile, and only that layer waits
    activations   from the unit of the backbone to each unit that computes, a row a token; a call waits for them
    results       back, a row a token that the unit computed for, or what the plan's exchanges say; the scatter waits

Legend: R rows of a plan, S segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import DeviceError, Unit
from devices.models.operation import TRANSFER, Operation
from devices.models.sheet import Sheet
from engines.calls import ExpertCall
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps
from engines.pricing.tiles import RowTile, computed_rows, row_tiles
from engines.techniques.context import ModelSizes
from results.records import BACK

Numbers = list[int | None]
OF_ROWS = ("all_gather", "all_to_all", "broadcast")
"""Exchanges of rows; the last all_to_all carries results, as all other kinds do."""


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

    def link(self, source: Unit, target: Unit, what: str) -> str:
        """The resource. Raises `DeviceError`."""
        found = self.sheet.resource_between(source, target)
        if found is None:
            raise DeviceError(
                f"{what} would travel from {source} to {target}, and sheet {self.sheet.name} has no link between them;"
                " choose a technique that keeps to its links"
            )
        return found

    @property
    def has_links(self) -> bool:
        return self.sheet.memory is None


class Block:
    """What all MoE blocks of a step have in common."""

    def __init__(
        self,
        shape: ModelShape,
        rest: Unit,
        graph_bytes_limit: float | None,
        travels: Travels | None,
        tiles: Mapping[Unit, RowTile] | None = None,
    ) -> None:
        """rest: the unit of router, gather and scatter. tiles: of units; None: as the sheet of `travels` says. Others
        as of `schedule.operations`."""
        self._shape, self._rest, self._limit = shape, rest, graph_bytes_limit
        self._travels = travels if travels is not None and travels.has_links else None
        self._sheet = None if travels is None else travels.sheet
        found = {} if self._sheet is None else row_tiles(self._sheet, shape.bytes_of("experts"))
        self._tiles = found if tiles is None else tiles
        computed = None if travels is None else travels.computed
        self._columns = shape.expert_width if computed is None else computed.expert_width
        self._hidden = shape.hidden if computed is None else computed.hidden

    def add_to(self, steps: Steps, plan: DispatchPlan, layer: int, later: Mapping[int, int]) -> None:
        """layer: of the priced model. later: by the number of a layer that computed, the priced one that it stands for
        from here on."""
        shape, rest, travels = self._shape, self._rest, self._travels
        plan = plan if self._sheet is None else stood_in(plan, self._sheet)
        steps.add(Operation("router", rest, "router", flops=2.0 * plan.n_tokens * shape.hidden * shape.n_experts))
        buffers: list[int | None] = []
        if travels is None:
            _refuse_travel(plan)
        else:
            self._add_transfers(steps, plan, layer, later, travels)
            units = {call.unit for call in plan.calls}
            buffers = [travels.on_the_way.pop(Arrival(layer, unit, None), None) for unit in units]
        calls = [call for call in plan.calls if call.n_rows > 0]
        gathering = [call for call in plan.calls if call.kind.is_first_slice]
        valid_static, valid_dynamic = (
            sum(call.n_valid for call in gathering if call.static is static) for static in (True, False)
        )
        padded = sum(call.n_rows - call.n_valid for call in gathering if not call.kind.skips_padding)
        a_row = row_bytes(shape)
        steps.add(Operation("gather", rest, "gather_dynamic", moved_bytes=a_row * valid_dynamic), buffers)
        steps.add(Operation("gather", rest, "gather_static", moved_bytes=a_row * valid_static), buffers)
        steps.add(Operation("padding", rest, "padding", moved_bytes=a_row * padded))
        waits = {} if travels is None else self._add_rows(steps, plan, calls, travels)
        last: dict[Unit, int | None] = {}
        for call, n_rows in zip(calls, computed_rows(calls, self._tiles), strict=True):
            operation = _expert_call(call, n_rows, shape, self._columns, self._hidden, self._limit)
            last[operation.unit] = steps.add(operation, self._awaited(call, layer, waits))
        results = [] if travels is None else self._add_results(steps, plan, calls, last, travels)
        steps.add(
            Operation("scatter", rest, "scatter", moved_bytes=a_row * (valid_static + valid_dynamic)),
            results,
        )

    def _add_transfers(
        self, steps: Steps, plan: DispatchPlan, layer: int, later: Mapping[int, int], travels: Travels
    ) -> None:
        for transfer in plan.transfers:
            awaited = later[transfer.layer]
            if awaited >= self._shape.n_layers:
                continue  # of a layer that the priced model does not have
            source, target = travels.sheet.computing(transfer.source), travels.sheet.computing(transfer.target)
            if source == target:
                continue
            link = travels.link(source, target, "experts")
            number = steps.add(
                Operation(
                    "expert transfer" if awaited == layer else "expert prefetch",
                    link,
                    TRANSFER,
                    moved_bytes=float(transfer.n_bytes),
                    aside=True,
                )
            )
            as_one = plan.transfers.as_one or travels.sheet.links[link.removesuffix(BACK)].whole_layers
            expert = None if as_one else transfer.expert
            travels.on_the_way[Arrival(awaited, target, expert)] = number

    def _awaited(self, call: ExpertCall, layer: int, waits: Mapping[Unit, Numbers]) -> Numbers:
        """Numbers of what brings its rows and its experts."""
        if self._travels is None:
            return []
        arriving = (self._travels.on_the_way.pop(Arrival(layer, call.unit, e), None) for e in call.experts)
        return [*waits.get(call.unit, ()), *arriving]

    def _add_rows(
        self, steps: Steps, plan: DispatchPlan, calls: list[ExpertCall], travels: Travels
    ) -> dict[Unit, Numbers]:
        """What each unit's calls wait for."""
        waits: dict[Unit, Numbers] = {}
        for sent in self._sent(plan, True):
            number = _send(steps, travels, "activations", sent)
            waits.setdefault(sent.target, []).append(number)
        told = set(waits)
        for unit, n_tokens in tokens_of_units(plan, calls).items():
            if unit != self._rest and unit not in told:
                rows = Sent(self._rest, unit, row_bytes(self._shape) * n_tokens)
                waits[unit] = [_send(steps, travels, "activations", rows)]
        return waits

    def _add_results(
        self,
        steps: Steps,
        plan: DispatchPlan,
        calls: list[ExpertCall],
        last: Mapping[Unit, int | None],
        travels: Travels,
    ) -> Numbers:
        all_sent = list(self._sent(plan, False))
        results = [_send(steps, travels, "results", sent, [last.get(sent.source)]) for sent in all_sent]
        told = {sent.source for sent in all_sent}
        for unit, n_tokens in tokens_of_units(plan, calls).items():
            if unit != self._rest and unit not in told:
                rows = Sent(unit, self._rest, row_bytes(self._shape) * n_tokens)
                results.append(_send(steps, travels, "results", rows, [last[unit]]))
        return results

    def _sent(self, plan: DispatchPlan, before_calls: bool) -> Iterator[Sent]:
        """By the plan's exchanges, which have the priced model's widths. before_calls: rows, and else results.

        What the unit that adds up sends in a sum is rows: it has the tokens at first.
        """
        of_rows = [exchange for exchange in plan.exchanges if exchange.kind in OF_ROWS]
        last_dealt = [exchange for exchange in of_rows if exchange.kind == "all_to_all"][-1:]
        for exchange in plan.exchanges:
            is_of_rows = exchange.kind in OF_ROWS and not any(exchange is one for one in last_dealt)
            for source, row in zip(exchange.units, exchange.bytes_NN, strict=True):
                has_rows = is_of_rows or (exchange.kind == "reduce" and source == self._rest)
                for target, n_bytes in zip(exchange.units, row, strict=True):
                    if n_bytes and source != target and has_rows is before_calls:
                        yield Sent(source, target, n_bytes)


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


def _send(steps: Steps, travels: Travels, name: str, sent: Sent, after: Sequence[int | None] = ()) -> int | None:
    link = travels.link(sent.source, sent.target, name)
    return steps.add(Operation(name, link, TRANSFER, moved_bytes=sent.n_bytes, aside=True), after)


def tokens_of_units(plan: DispatchPlan, calls: list[ExpertCall]) -> dict[Unit, int]:
    """How many tokens each unit computes for."""
    token_R: NDArray[np.int64] | None = None
    rows: dict[Unit, set[tuple[int, int]]] = {}
    for call in calls:
        rows.setdefault(call.unit, set()).add((call.first_row, call.first_row + call.n_rows))
    if plan.n_tokens > 1 and len(rows) > 1:
        token_R = plan.token_R.cpu().numpy()
    found = {}
    for unit, spans in rows.items():
        if token_R is None:
            found[unit] = plan.n_tokens
            continue
        tokens = np.unique(np.concatenate([token_R[first:end] for first, end in spans]))
        found[unit] = int((tokens >= 0).sum())
    return found


def _refuse_travel(plan: DispatchPlan) -> None:
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


def _expert_call(
    call: ExpertCall, n_rows: int, shape: ModelShape, columns: int, hidden: int, graph_bytes_limit: float | None
) -> Operation:
    """One launch of the call's experts. The NPU takes static shapes below the graph limit only (§4.1, §4.2).

    What it does not take, the CPU does. n_rows: with those that fill tiles. columns, hidden: of an expert of the model
    that computed, of which a slice is a part.
    """
    width, part = call.kind.width, call.kind.hidden
    weights: float = shape.expert_weights
    if width is not None:
        weights = weights * (width.end - width.first) / columns
    if part is not None:
        weights = weights * (part.end - part.first) / hidden
    expert_bytes = weights * shape.bytes_of("experts")
    graph_bytes = expert_bytes * len(call.experts)
    is_small = graph_bytes_limit is None or graph_bytes <= graph_bytes_limit
    runs = call.unit != "npu" or (call.static and is_small)
    return Operation(
        "expert FFN",
        call.unit if runs else "cpu",
        "expert_ffn",
        flops=2.0 * n_rows * weights,
        weight_bytes=expert_bytes * call.n_weight_loads,
        naive_launch=call.kind.naive_launch and runs,
        alongside=call.kind.overlaps,
    )


def residual(name: str, n_tokens: int, shape: ModelShape, unit: Unit) -> Operation:
    """The sum that ends the MoE block is the row of Table 4; the one after attention is in none of its rows."""
    return Operation(name, unit, "residual", moved_bytes=row_bytes(shape) * n_tokens)


def row_bytes(shape: ModelShape) -> float:
    return float(shape.hidden * shape.bytes_per_value)
