"""The operations of one MoE block: router to scatter, as the rows of Table 4 of 000-npumoe, and what travels for it.

One after the other but for calls that overlap. On a machine whose units have memories of their own, besides:

    weights       over their link as soon as the router has chosen. A call waits for those of its experts; where they
                  fill a buffer together (`Transfers.as_one`), the block waits for all of them. Those of a later layer
                  travel meanwhile, and only that layer waits
    activations   from the unit of the backbone to each unit that computes, a row a token; a call waits for them
    results       back, a row a token that the unit computed for, or what the plan's exchanges say; the scatter waits

Legend: S segments, C calls, M transfers, N units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from devices.base import Unit
from devices.models.operation import TRANSFER, Operation
from engines.calls import CallKind, Calls
from engines.dispatch import DispatchPlan, Link
from engines.pricing.call_table import CallTable, tokens_of_units
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps, made
from engines.pricing.tiles import RowTile, computed_rows, row_tiles
from engines.pricing.travels import Arrival, Sent, Travels, refuse_travel, send, stood_in
from results.records import BACK

Numbers = list[int | None]
OF_ROWS = ("all_gather", "all_to_all", "broadcast")
"""Exchanges of rows; the last all_to_all carries results, as all other kinds do."""


class _OfKind(dict[tuple[int, int, int], Operation]):
    """Calls of a kind, by rows, experts and loads; made when they are first asked for."""

    def __init__(self, make: Callable[[int, int, int], Operation]) -> None:
        self._make = make

    def __missing__(self, key: tuple[int, int, int]) -> Operation:
        found = self[key] = self._make(*key)
        return found


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
        self._calls: dict[CallKind, _OfKind] = {}

    def add_to(self, steps: Steps, plan: DispatchPlan, layer: int, later: Mapping[int, int]) -> None:
        """layer: of the priced model. later: by the number of a layer that computed, the priced one that it stands for
        from here on."""
        shape, rest, travels = self._shape, self._rest, self._travels
        plan = plan if self._sheet is None else stood_in(plan, self._sheet)
        steps.add(made("router", rest, "router", flops=2.0 * plan.n_tokens * shape.hidden * shape.n_experts))
        calls, table = plan.calls, CallTable(plan.calls)
        buffers: list[int | None] = []
        if travels is None:
            refuse_travel(plan)
        else:
            self._add_transfers(steps, plan, layer, later, travels)
            if travels.on_the_way:
                units = {calls.kinds[number].unit for number in set(table.kind_C)}
                buffers = [travels.on_the_way.pop(Arrival(layer, unit, None), None) for unit in units]
        valid_static, valid_dynamic, padded = table.gathered()
        a_row = row_bytes(shape)
        steps.add(made("gather", rest, "gather_dynamic", moved_bytes=a_row * valid_dynamic), buffers)
        steps.add(made("gather", rest, "gather_static", moved_bytes=a_row * valid_static), buffers)
        steps.add(made("padding", rest, "padding", moved_bytes=a_row * padded))
        tokens: dict[Unit, int] = {} if travels is None else tokens_of_units(plan, table)
        waits = {} if travels is None else self._add_rows(steps, plan, tokens, travels)
        last = self._add_calls(steps, calls, table, waits, layer)
        results = [] if travels is None else self._add_results(steps, plan, tokens, last, travels)
        steps.add(
            made("scatter", rest, "scatter", moved_bytes=a_row * (valid_static + valid_dynamic)),
            results,
        )

    def _add_calls(
        self, steps: Steps, calls: Calls, table: CallTable, waits: Mapping[Unit, Numbers], layer: int
    ) -> dict[Unit, int | None]:
        """The last one of each unit. waits: what each unit's calls wait for."""
        travels = self._travels
        last: dict[Unit, int | None] = {}
        known = [self._operations_of(kind) for kind in calls.kinds]
        rows_C = table.rows_C
        if self._tiles:
            rows = iter(computed_rows([call for call in calls if call.n_rows > 0], self._tiles))
            rows_C = [next(rows) if n else 0 for n in rows_C]
        columns = list(zip(rows_C, table.n_experts_C, table.loads_C, strict=True))
        waited: set[tuple[str, Unit]] = set()
        arriving = {} if travels is None else travels.arriving(layer)
        expert_S, starts_C = (calls.expert_S.tolist(), calls.starts_C.tolist()) if arriving else ([], [])
        has_empty = 0 in rows_C
        for first, end, of_one_kind in table.runs():
            number = table.kind_C[first]
            kind = calls.kinds[number]
            if of_one_kind and kind.unit != "npu" and kind.unit not in arriving:
                # As below, of calls of which none waits for an expert, and no other unit takes any.
                keys = [key for key in columns[first:end] if key[0]] if has_empty else columns[first:end]
                if keys:
                    first_one, *others = map(known[number].__getitem__, keys)
                    is_first = (kind.unit, kind.unit) not in waited
                    waited.add((kind.unit, kind.unit))
                    steps.add(first_one, waits.get(kind.unit, ()) if is_first else ())
                    last[kind.unit] = steps.extend(others)
                continue
            for call in range(first, end):
                if not columns[call][0]:
                    continue
                number = table.kind_C[call]
                unit = calls.kinds[number].unit
                operation = known[number][columns[call]]
                after: Sequence[int | None] = ()
                if travels is not None:
                    # A unit works on one call after another: what the first waited for is there.
                    if (operation.unit, unit) not in waited:
                        waited.add((operation.unit, unit))
                        after = waits.get(unit, ())
                    if own_experts := arriving.get(unit):
                        segment = starts_C[call]
                        called = expert_S[segment : segment + table.n_experts_C[call]]
                        there = [own_experts.pop(expert) for expert in called if expert in own_experts]
                        if there:
                            after = [*after, *map(travels.on_the_way.pop, there)]
                last[operation.unit] = steps.add(operation, after)
        return last

    def _operations_of(self, kind: CallKind) -> _OfKind:
        def make(n_rows: int, n_experts: int, n_loads: int) -> Operation:
            sizes = self._shape, self._columns, self._hidden, self._limit
            return _expert_call(kind, n_rows, n_experts, n_loads, *sizes)

        if kind not in self._calls:
            self._calls[kind] = _OfKind(make)
        return self._calls[kind]

    def _add_transfers(
        self, steps: Steps, plan: DispatchPlan, layer: int, later: Mapping[int, int], travels: Travels
    ) -> None:
        transfers = plan.transfers
        if not len(transfers):
            return
        ways = [self._way(link, travels) for link in transfers.links]
        link_M = [0] * len(transfers) if transfers.link_M is None else transfers.link_M.tolist()
        columns = transfers.layer_M.tolist(), transfers.expert_M.tolist(), transfers.n_bytes_M.tolist(), link_M
        known: dict[tuple[int, int, int], Operation] = {}
        found: list[Operation] = []
        for of_layer, expert, n_bytes, number in zip(*columns, strict=True):
            awaited, way = later[of_layer], ways[number]
            if awaited >= self._shape.n_layers:
                continue  # of a layer that the priced model does not have
            if way is None:
                continue
            link, target, as_one = way
            operation = known.get((awaited, number, n_bytes))
            if operation is None:
                name = "expert transfer" if awaited == layer else "expert prefetch"
                operation = made(name, link, TRANSFER, moved_bytes=float(n_bytes), aside=True)
                known[awaited, number, n_bytes] = operation
            arrival = Arrival(awaited, target, None if as_one or transfers.as_one else expert)
            travels.on_the_way[arrival] = steps.next_number + len(found) if n_bytes else None
            if n_bytes:
                found.append(operation)
        steps.extend(found)

    @staticmethod
    def _way(link: Link, travels: Travels) -> tuple[str, Unit, bool] | None:
        """The resource, whose memory, and whether what arrives there is awaited together. None: it lies there."""
        source, target = travels.sheet.computing(link.source), travels.sheet.computing(link.target)
        if source == target:
            return None
        resource = travels.link(source, target, "experts")
        return resource, target, travels.sheet.links[resource.removesuffix(BACK)].whole_layers

    def _add_rows(
        self, steps: Steps, plan: DispatchPlan, tokens: Mapping[Unit, int], travels: Travels
    ) -> dict[Unit, Numbers]:
        """What each unit's calls wait for."""
        waits: dict[Unit, Numbers] = {}
        for sent in self._sent(plan, True):
            number = send(steps, travels, "activations", sent)
            waits.setdefault(travels.sheet.computing(sent.target), []).append(number)
        told = set(waits)
        for unit, n_tokens in tokens.items():
            if unit != self._rest and unit not in told:
                rows = Sent(self._rest, unit, row_bytes(self._shape) * n_tokens)
                waits[unit] = [send(steps, travels, "activations", rows)]
        return waits

    def _add_results(
        self,
        steps: Steps,
        plan: DispatchPlan,
        tokens: Mapping[Unit, int],
        last: Mapping[Unit, int | None],
        travels: Travels,
    ) -> Numbers:
        all_sent, own = list(self._sent(plan, False)), travels.sheet.computing
        results = [send(steps, travels, "results", sent, [last.get(own(sent.source))]) for sent in all_sent]
        told = {own(sent.source) for sent in all_sent}
        for unit, n_tokens in tokens.items():
            if unit != self._rest and unit not in told:
                rows = Sent(unit, self._rest, row_bytes(self._shape) * n_tokens)
                results.append(send(steps, travels, "results", rows, [last[unit]]))
        return results

    def _sent(self, plan: DispatchPlan, before_calls: bool) -> Iterator[Sent]:
        """By the plan's exchanges, which have the priced model's widths. before_calls: rows, and else results.

        What the unit that adds up sends in a sum is rows: it has the tokens at first. Two units that one unit stands in
        for send each other only what a link of the sheet joins them for: processes of one machine have a part of its
        memory each.
        """
        sheet = self._sheet
        own = (lambda unit: unit) if sheet is None else sheet.computing
        of_rows = [exchange for exchange in plan.exchanges if exchange.kind in OF_ROWS]
        last_dealt = [exchange for exchange in of_rows if exchange.kind == "all_to_all"][-1:]
        for exchange in plan.exchanges:
            is_of_rows = exchange.kind in OF_ROWS and not any(exchange is one for one in last_dealt)
            units = exchange.units
            for source, row in zip(units, exchange.bytes_NN, strict=True):
                has_rows = is_of_rows or (exchange.kind == "reduce" and own(source) == self._rest)
                if has_rows is not before_calls or not any(row):
                    continue
                for target, n_bytes in zip(units, row, strict=True):
                    if not n_bytes:
                        continue
                    if own(source) != own(target):
                        yield Sent(own(source), own(target), n_bytes)
                    elif source != target and sheet is not None and sheet.resource_between(source, target) is not None:
                        yield Sent(source, target, n_bytes)


def _expert_call(
    kind: CallKind,
    n_rows: int,
    n_experts: int,
    n_loads: int,
    shape: ModelShape,
    columns: int,
    hidden: int,
    graph_bytes_limit: float | None,
) -> Operation:
    """One launch of so many experts. The NPU takes static shapes below the graph limit only (§4.1, §4.2).

    What it does not take, the CPU does. n_rows: with those that fill tiles. n_loads: of experts whose weights it
    loads. columns, hidden: of an expert of the model that computed, of which a slice is a part.
    """
    width, part = kind.width, kind.hidden
    weights: float = shape.expert_weights
    if width is not None:
        weights = weights * (width.end - width.first) / columns
    if part is not None:
        weights = weights * (part.end - part.first) / hidden
    expert_bytes = weights * shape.bytes_of("experts")
    graph_bytes = expert_bytes * n_experts
    is_small = graph_bytes_limit is None or graph_bytes <= graph_bytes_limit
    runs = kind.unit != "npu" or (kind.static and is_small)
    return Operation(
        "expert FFN",
        kind.unit if runs else "cpu",
        "expert_ffn",
        flops=2.0 * n_rows * weights,
        weight_bytes=expert_bytes * n_loads,
        naive_launch=kind.naive_launch and runs,
        alongside=kind.overlaps,
    )


def residual(name: str, n_tokens: int, shape: ModelShape, unit: Unit) -> Operation:
    """The sum that ends the MoE block is the row of Table 4; the one after attention is in none of its rows."""
    return Operation(name, unit, "residual", moved_bytes=row_bytes(shape) * n_tokens)


def row_bytes(shape: ModelShape) -> float:
    return float(shape.hidden * shape.bytes_per_value)
