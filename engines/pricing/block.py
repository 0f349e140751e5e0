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

from devices.base import DeviceError, Unit
from devices.models.operation import TRANSFER, Operation
from devices.models.sheet import Sheet
from engines.calls import CallKind, Calls, Integers
from engines.dispatch import DispatchPlan, Link
from engines.errors import EngineError
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps, made
from engines.pricing.tiles import RowTile, computed_rows, row_tiles
from engines.techniques.context import ModelSizes
from results.records import BACK

Numbers = list[int | None]
MANY = 8
"""Calls of a kind after which it pays to look at them together."""
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
        self._calls: dict[CallKind, dict[tuple[int, ...], Operation]] = {}
        """Calls of before by kind, and by rows, experts and loads."""

    def add_to(self, steps: Steps, plan: DispatchPlan, layer: int, later: Mapping[int, int]) -> None:
        """layer: of the priced model. later: by the number of a layer that computed, the priced one that it stands for
        from here on."""
        shape, rest, travels = self._shape, self._rest, self._travels
        plan = plan if self._sheet is None else stood_in(plan, self._sheet)
        steps.add(made("router", rest, "router", flops=2.0 * plan.n_tokens * shape.hidden * shape.n_experts))
        calls, table = plan.calls, _CallTable(plan.calls)
        buffers: list[int | None] = []
        if travels is None:
            _refuse_travel(plan)
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
        self, steps: Steps, calls: Calls, table: _CallTable, waits: Mapping[Unit, Numbers], layer: int
    ) -> dict[Unit, int | None]:
        """The last one of each unit. waits: what each unit's calls wait for."""
        travels = self._travels
        last: dict[Unit, int | None] = {}
        known = [self._calls.setdefault(kind, {}) for kind in calls.kinds]
        rows_C = table.rows_C
        if self._tiles:
            rows = iter(computed_rows([call for call in calls if call.n_rows > 0], self._tiles))
            rows_C = [next(rows) if n else 0 for n in rows_C]
        columns = list(zip(rows_C, table.n_experts_C, table.loads_C, strict=True))
        waited: set[tuple[str, Unit]] = set()
        arriving = {} if travels is None else travels.arriving(layer)
        expert_S, starts_C = (calls.expert_S.tolist(), calls.starts_C.tolist()) if arriving else ([], [])

        def operation_of(number: int, key: tuple[int, int, int]) -> Operation:
            found = known[number].get(key)
            if found is None:
                kind = calls.kinds[number]
                found = _expert_call(kind, *key, self._shape, self._columns, self._hidden, self._limit)
                known[number][key] = found
            return found

        for first, end, of_one_kind in table.runs():
            number = table.kind_C[first]
            kind = calls.kinds[number]
            if of_one_kind and kind.unit != "npu" and kind.unit not in arriving:
                # As below, of calls of which none waits for an expert, and no other unit takes any.
                keys = [key for key in columns[first:end] if key[0]]
                own = {key: operation_of(number, key) for key in set(keys)}
                if keys:
                    is_first = (kind.unit, kind.unit) not in waited
                    waited.add((kind.unit, kind.unit))
                    steps.add(own[keys[0]], waits.get(kind.unit, ()) if is_first else ())
                    last[kind.unit] = steps.extend([own[key] for key in keys[1:]])
                continue
            for call in range(first, end):
                if not columns[call][0]:
                    continue
                number = table.kind_C[call]
                unit = calls.kinds[number].unit
                operation = known[number].get(columns[call]) or operation_of(number, columns[call])
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
            number = _send(steps, travels, "activations", sent)
            waits.setdefault(sent.target, []).append(number)
        told = set(waits)
        for unit, n_tokens in tokens.items():
            if unit != self._rest and unit not in told:
                rows = Sent(self._rest, unit, row_bytes(self._shape) * n_tokens)
                waits[unit] = [_send(steps, travels, "activations", rows)]
        return waits

    def _add_results(
        self,
        steps: Steps,
        plan: DispatchPlan,
        tokens: Mapping[Unit, int],
        last: Mapping[Unit, int | None],
        travels: Travels,
    ) -> Numbers:
        all_sent = list(self._sent(plan, False))
        results = [_send(steps, travels, "results", sent, [last.get(sent.source)]) for sent in all_sent]
        told = {sent.source for sent in all_sent}
        for unit, n_tokens in tokens.items():
            if unit != self._rest and unit not in told:
                rows = Sent(unit, self._rest, row_bytes(self._shape) * n_tokens)
                results.append(_send(steps, travels, "results", rows, [last[unit]]))
        return results

    def _sent(self, plan: DispatchPlan, before_calls: bool) -> Iterator[Sent]:
        """By the plan's exchanges, which have the priced model's widths. before_calls: rows, and else results.

        What the unit that adds up sends in a sum is rows: it has the tokens at first.
        """
        own = (lambda unit: unit) if self._sheet is None else self._sheet.computing
        of_rows = [exchange for exchange in plan.exchanges if exchange.kind in OF_ROWS]
        last_dealt = [exchange for exchange in of_rows if exchange.kind == "all_to_all"][-1:]
        for exchange in plan.exchanges:
            is_of_rows = exchange.kind in OF_ROWS and not any(exchange is one for one in last_dealt)
            units = tuple(map(own, exchange.units))
            for source, row in zip(units, exchange.bytes_NN, strict=True):
                has_rows = is_of_rows or (exchange.kind == "reduce" and source == self._rest)
                if has_rows is not before_calls or not any(row):
                    continue
                for target, n_bytes in zip(units, row, strict=True):
                    if n_bytes and source != target:
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
    return steps.add(made(name, link, TRANSFER, moved_bytes=sent.n_bytes, aside=True), after)


class _CallTable:
    """The calls of a plan as lists. kind_C: index into their kinds."""

    def __init__(self, calls: Calls) -> None:
        self._calls, n = calls, len(calls)
        if n == len(calls.expert_S):
            self.rows_C: list[int] = calls.rows_S.tolist()
            self._valid_C: list[int] = calls.valid_S.tolist()
            self.n_experts_C = [1] * n
        else:
            self.rows_C = np.add.reduceat(calls.rows_S, calls.starts_C).tolist() if n else []
            self._valid_C = np.add.reduceat(calls.valid_S, calls.starts_C).tolist() if n else []
            self.n_experts_C = (calls.ends_C - calls.starts_C).tolist()
        self.kind_C: list[int] = [0] * n if calls.kind_C is None else calls.kind_C.tolist()
        self.loads_C: list[int] = self.n_experts_C if calls.weight_loads_C is None else calls.weight_loads_C.tolist()

    def gathered(self) -> tuple[int, int, int]:
        """Valid rows of static shapes, of others, and rows of padding that are filled. Slices share their rows."""
        kinds = self._calls.kinds
        rows_K, valid_K = [0] * len(kinds), [0] * len(kinds)
        if len(kinds) == 1:
            rows_K, valid_K = [sum(self.rows_C)], [sum(self._valid_C)]
        elif self._calls.kind_C is not None and len(self.rows_C) > MANY:
            # Whole numbers, exact in floating point.
            rows_K = np.bincount(self._calls.kind_C, self.rows_C, len(kinds)).astype(int).tolist()
            valid_K = np.bincount(self._calls.kind_C, self._valid_C, len(kinds)).astype(int).tolist()
        else:
            for number, n_rows, n_valid in zip(self.kind_C, self.rows_C, self._valid_C, strict=True):
                rows_K[number] += n_rows
                valid_K[number] += n_valid
        valid_static = valid_dynamic = padded = 0
        for kind, n_rows, n_valid in zip(kinds, rows_K, valid_K, strict=True):
            if not kind.is_first_slice:
                continue
            if kind.static:
                valid_static += n_valid
            else:
                valid_dynamic += n_valid
            if not kind.skips_padding:
                padded += n_rows - n_valid
        return valid_static, valid_dynamic, padded

    def runs(self) -> list[tuple[int, int, bool]]:
        """First and end of calls that stand one after another, and whether they are of one kind; all calls together
        where kinds change often."""
        n, kind_C = len(self.rows_C), self._calls.kind_C
        if n == 0:
            return []
        edges = [] if kind_C is None else (np.flatnonzero(kind_C[1:] != kind_C[:-1]) + 1).tolist()
        if MANY * len(edges) >= n:
            return [(0, n, not edges)]
        return [(first, end, True) for first, end in zip([0, *edges], [*edges, n], strict=True)]

    def spans(self) -> dict[Unit, tuple[Integers, Integers]]:
        """The rows of each unit's calls: first and end."""
        calls = self._calls
        first_C, rows_C = calls.first_row_S[calls.starts_C], np.array(self.rows_C, dtype=np.int64)
        kind_C = np.array(self.kind_C, dtype=np.int64)
        units = list(dict.fromkeys(kind.unit for kind in calls.kinds))
        unit_C = np.array([units.index(kind.unit) for kind in calls.kinds], dtype=np.int64)[kind_C]
        unit_C[rows_C == 0] = -1
        order_C = unit_C.argsort(kind="stable")
        first_C, end_C, unit_C = first_C[order_C], (first_C + rows_C)[order_C], unit_C[order_C]
        edges = unit_C.searchsorted(np.arange(len(units) + 1)).tolist()
        return {
            unit: (first_C[begin:end], end_C[begin:end])
            for unit, begin, end in zip(units, edges, edges[1:], strict=False)
        }

    def units(self) -> list[Unit]:
        """Of calls with rows, in their order."""
        kinds = self._calls.kinds
        numbers = dict.fromkeys(number for number, n in zip(self.kind_C, self.rows_C, strict=True) if n)
        return list(dict.fromkeys(kinds[number].unit for number in numbers))


def tokens_of_units(plan: DispatchPlan, table: _CallTable) -> dict[Unit, int]:
    """How many tokens each unit computes for."""
    units = table.units()
    if plan.n_tokens == 1 or len(units) == 1:
        return dict.fromkeys(units, plan.n_tokens)
    token_R = plan.token_R.cpu().numpy()
    spans, known = table.spans(), dict[tuple[bytes, bytes], int]()
    found: dict[Unit, int] = {}
    for unit in units:
        first_C, end_C = spans[unit]
        key = first_C.tobytes(), end_C.tobytes()
        if key not in known:
            change_R = np.zeros(len(token_R) + 1, dtype=np.int64)
            np.add.at(change_R, first_C, 1)
            np.add.at(change_R, end_C, -1)
            is_there_T = np.zeros(plan.n_tokens + 1, dtype=np.bool_)
            is_there_T[token_R[change_R[:-1].cumsum() > 0]] = True  # padding: the last
            known[key] = int(is_there_T[:-1].sum())
        found[unit] = known[key]
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
