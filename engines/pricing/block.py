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

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devices.base import Unit
from devices.models.operation import TRANSFER, Operation
from devices.models.sheet import Sheet
from engines.calls import CallKind, Calls
from engines.dispatch import DispatchPlan, Link
from engines.pricing.call_table import CallTable, places_of, tokens_of_units
from engines.pricing.cut import cut_anew
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps, made, same
from engines.pricing.tiles import RowTile, computed_rows, row_tiles
from engines.pricing.travels import Arrival, Sent, Travels, refuse_travel, send, stood_in
from results.records import BACK

Numbers = list[int | None]
Booleans = NDArray[np.bool_]
OF_ROWS = ("all_gather", "all_to_all", "broadcast")
"""Exchanges of rows; the last all_to_all carries results, as all other kinds do."""
OF_EXPERTS = ("expert transfer", "expert prefetch")
"""What brings an expert: of the layer at hand, and of a later one."""


class _MadeCalls(dict[tuple[int, int, int, int, bool], Operation]):
    """Calls by their kind, rows, experts, loads, and whether the code of few rows makes them; made when they are first
    asked for."""

    def __init__(self, make: Callable[[int, int, int, int, bool], Operation]) -> None:
        self._make = make

    def __missing__(self, key: tuple[int, int, int, int, bool]) -> Operation:
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
        between: Collection[Unit] = (),
    ) -> None:
        """rest: the unit of router, gather and scatter. tiles: of units; None: as the sheet of `travels` says. between:
        units on which what lies between an expert's products is told. Others as of `schedule.operations`."""
        self._shape, self._rest, self._limit = shape, rest, graph_bytes_limit
        self._travels = travels if travels is not None and travels.has_links else None
        self._sheet = None if travels is None else travels.sheet
        found = {} if self._sheet is None else row_tiles(self._sheet, shape.bytes_of("experts"))
        self._tiles = found if tiles is None else tiles
        self._between = between
        computed = None if travels is None else travels.computed
        self._columns = shape.expert_width if computed is None else computed.expert_width
        self._hidden = shape.hidden if computed is None else computed.hidden
        self._kinds: list[CallKind] = []
        self._numbers: dict[CallKind, int] = {}
        self._calls = _MadeCalls(self._call)

    def add_to(self, steps: Steps, plan: DispatchPlan, layer: int, later: Mapping[int, int]) -> None:
        """layer: of the priced model. later: by the number of a layer that computed, the priced one that it stands for
        from here on."""
        shape, rest, travels = self._shape, self._rest, self._travels
        plan = plan if self._sheet is None else stood_in(plan, self._sheet)
        flops = 2.0 * plan.n_tokens * shape.hidden * shape.n_experts
        steps.add(made("router", rest, "router", flops=flops, weight_bytes=shape.router_bytes))
        calls, table = plan.calls, CallTable(plan.calls)
        buffers: list[int | None] = []
        if travels is None:
            refuse_travel(plan)
        else:
            self._add_transfers(steps, plan, layer, later, travels)
            if travels.on_the_way:
                units = {calls.kinds[number].unit for number in set(table.kind_C.tolist())}
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
        kinds, rows_C = calls.kinds, table.rows_C
        as_few_C = np.zeros(len(rows_C), dtype=np.bool_)
        if self._tiles and (rows_C > 0).any():
            has_rows_C, rows_C = rows_C > 0, rows_C.copy()
            computed = computed_rows([call for call in calls if call.n_rows > 0], self._tiles)
            rows_C[has_rows_C], as_few_C[has_rows_C] = zip(*computed, strict=True)
        runs_C = (rows_C > 0) & np.array([_has_columns(kind) for kind in kinds])[table.kind_C]
        number_C = table.kind_C[runs_C]
        known_C = np.array([self._number(kind) for kind in self._priced(kinds)])[number_C]
        columns = known_C, rows_C[runs_C], table.n_experts_C[runs_C], table.loads_C[runs_C], as_few_C[runs_C]
        found = list(map(self._calls.__getitem__, zip(*(column.tolist() for column in columns), strict=True)))
        if self._travels is None:
            steps.extend(found)
            return {}
        asked = [kind.unit for kind in kinds]
        takes = asked
        if "npu" in asked:  # what it does not take, the CPU does
            number_C = number_C + len(kinds) * np.array([one.unit == "cpu" for one in found])
            asked, takes = 2 * asked, [*asked, *("cpu" for _ in kinds)]
        first = steps.next_number
        after: dict[int, Numbers] = {}
        # A unit works on one call after another: what the first waited for is there.
        waited: set[tuple[Unit, Unit]] = set()
        for number, place in places_of(number_C, len(takes)).items():
            pair = takes[number], asked[number]
            if pair not in waited and asked[number] in waits:
                after[place] = list(waits[asked[number]])
            waited.add(pair)
        for place, brings in self._arrived(self._travels, calls, table, runs_C, layer):
            after.setdefault(place, []).append(brings)
        steps.extend(found, after)
        n = len(found)
        back = places_of(number_C[::-1], len(takes))
        return {takes[number]: first + n - 1 - place for number, place in reversed(back.items())}

    def _call(self, number: int, n_rows: int, n_experts: int, n_loads: int, as_few: bool) -> Operation:
        sizes = self._shape, self._limit, self._between
        made_call = _expert_call(self._kinds[number], n_rows, n_experts, n_loads, *sizes)
        return same(replace(made_call, as_few=as_few))

    def _priced(self, kinds: tuple[CallKind, ...]) -> tuple[CallKind, ...]:
        kinds = cut_anew(kinds, "width", self._columns, self._shape.expert_width)
        return cut_anew(kinds, "hidden", self._hidden, self._shape.hidden)

    def _number(self, kind: CallKind) -> int:
        if kind not in self._numbers:
            self._numbers[kind] = len(self._kinds)
            self._kinds.append(kind)
        return self._numbers[kind]

    @staticmethod
    def _arrived(
        travels: Travels, calls: Calls, table: CallTable, runs_C: Booleans, layer: int
    ) -> Iterator[tuple[int, int | None]]:
        """Of weights that travel one by one: the first call that needs them, by its place among those that run, and
        what brings them."""
        arriving = travels.arriving(layer)
        if not arriving:
            return
        place_S, runs_S = (runs_C.cumsum() - 1)[calls.call_S], runs_C[calls.call_S]
        for unit, own_experts in arriving.items():
            is_own_S = np.array([kind.unit == unit for kind in calls.kinds])[table.kind_C][calls.call_S] & runs_S
            called = calls.expert_S[is_own_S][::-1].tolist(), place_S[is_own_S][::-1].tolist()
            first_of = dict(zip(*called, strict=True))
            for expert, arrival in own_experts.items():
                if expert in first_of:
                    yield first_of[expert], travels.on_the_way.pop(arrival)

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
                operation = made(OF_EXPERTS[awaited != layer], link, TRANSFER, moved_bytes=float(n_bytes), aside=True)
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
    graph_bytes_limit: float | None,
    between: Collection[Unit],
) -> Operation:
    """One launch of so many experts. The NPU takes static shapes below the graph limit only (§4.1, §4.2).

    What it does not take, the CPU does. kind: of slices of the shape's own columns. n_rows: with those that fill tiles.
    n_loads: of experts whose weights it loads. between: as of `Block`.
    """
    width, part = kind.width, kind.hidden
    weights: float = shape.expert_weights
    row: float = shape.expert_width * shape.bytes_per_value
    if width is not None:
        share = (width.end - width.first) / shape.expert_width
        weights, row = weights * share, row * share
    if part is not None:
        weights = weights * (part.end - part.first) / shape.hidden
    expert_bytes = weights * shape.bytes_of("experts")
    graph_bytes = expert_bytes * n_experts
    is_small = graph_bytes_limit is None or graph_bytes <= graph_bytes_limit
    runs = kind.unit != "npu" or (kind.static and is_small)
    unit = kind.unit if runs else "cpu"
    return Operation(
        "expert FFN",
        unit,
        "expert_ffn",
        flops=2.0 * n_rows * weights,
        weight_bytes=expert_bytes * n_loads,
        moved_bytes=row * n_rows if unit in between else 0.0,
        naive_launch=kind.naive_launch and runs,
        alongside=kind.overlaps,
    )


def units_that_price_between(sheet: Sheet | None) -> Collection[Unit]:
    """Those whose price of experts has a term of the rows between gate and up, and down. To other units they are not
    told: a roofline would count them as bytes of memory, which they are not where caches hold them."""
    units = {} if sheet is None else sheet.units
    prices = {name: unit.kernels.get("expert_ffn") for name, unit in units.items()}
    return {name for name, price in prices.items() if price is not None and price.s_per_moved_byte is not None}


def _has_columns(kind: CallKind) -> bool:
    """Of a slice without any there is nothing to run."""
    return all(part is None or part.end > part.first for part in (kind.width, kind.hidden))


def residual(name: str, n_tokens: int, shape: ModelShape, unit: Unit) -> Operation:
    """The sum that ends the MoE block is the row of Table 4; the one after attention is in none of its rows."""
    return made(name, unit, "residual", moved_bytes=row_bytes(shape) * n_tokens)


def row_bytes(shape: ModelShape) -> float:
    return float(shape.hidden * shape.bytes_per_value)
