"""The dispatch plan's second reader: one forward chunk becomes operations that a hardware model prices.

The first reader, `engines.model.experts`, computes the same plans. Pure functions: no clock, no model.

Order and partition follow §3.2 of 000-npumoe: norm, router, gather, padding, scatter and both residuals on the CPU;
attention and experts where the placement puts them. Where the backbone's unit takes norms too, as a GPU does, all these
are there. What is left out: embedding look-up, masks, sampling. A partial last chunk is priced at its own length
although a static graph would be padded to the full chunk. Attention: `engines.pricing.attention`. What
travels: `engines.pricing.block`. Where the sheet says what the engine takes beside its kernels, for a step and for a
layer, that stands before them. Units that the sheet lacks are those that it says stand in for them.

Legend: T tokens of the chunk, L keys in the cache after it, H model width, I expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from devices.base import Unit
from devices.models.figures import Kernel
from devices.models.operation import TRANSFER, Operation
from devices.models.sheet import Sheet
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.spans import Span
from engines.pricing.attention import attention_on
from engines.pricing.block import OF_EXPERTS, Block, residual, row_bytes, units_that_price_between
from engines.pricing.priced_step import PricedStep
from engines.pricing.processes import Repeats, repeated, repeats
from engines.pricing.shapes import ModelShape
from engines.pricing.steps import Steps, made, same
from engines.pricing.travels import Arrival, Travels

NUMBER_BYTES = 8
"""Of a token's or an expert's number, as engines keep them."""


MOST_KEPT = 4096
"""Steps and layers of different shape."""
Part = Sequence[Operation]
"""Operations that follow each other. One that may come again in the same way is the same tuple then."""


class _Known(NamedTuple):
    """Operations of a block. taken: units whose weights were on their way and are there now. sends: those that are on
    their way from then on: how many layers ahead, to which unit, and which of the operations brings them."""

    operations: tuple[Operation, ...]
    taken: tuple[Unit, ...]
    sends: tuple[tuple[int, Unit, int | None], ...]


class Schedule:
    """What steps of a model are made of on a machine; keeps what it made, for steps and layers of equal shape."""

    def __init__(
        self, shape: ModelShape, backbone: Unit, graph_bytes_limit: float | None, travels: Travels | None = None
    ) -> None:
        """backbone: the unit of attention and of what every token passes through; experts lie where the plans say.
        graph_bytes_limit: a static expert call with more weight bytes runs on the CPU. travels: of a sheet, and of the
        steps before; None of units that share one memory."""
        self._shape, self._travels = shape, travels
        self._sheet = None if travels is None else travels.sheet
        self._rest = unit_of_rest(self._sheet, backbone)
        self._backbone = backbone if self._sheet is None else self._sheet.computing(backbone)
        self._between = units_that_price_between(self._sheet)
        self._block = Block(shape, self._rest, graph_bytes_limit, travels, between=self._between)
        self._most_few = self._few_where("many_rows")
        self._most_few_of_prompt = self._few_where("prompt_few_rows")
        self._prices_fetches = self._has_price("prompt_fetch")
        self._parts: dict[Hashable, tuple[Operation, ...]] = {}
        self._blocks: dict[Hashable, _Known] = {}
        """By outlines."""
        self._moved: dict[tuple[int, Unit], tuple[Operation, Operation]] = {}
        """By the identity of an operation, which is kept, and a unit: the same on that unit."""

    def parts(self, step: PricedStep, plans: Sequence[DispatchPlan | None], n_before: int = 0) -> Iterator[Part]:
        """As of `operations`, one after another; each begins in the line."""
        shape = self._shape
        numbers = [i for i, plan in enumerate(plans) if plan is not None or shape.dense_width > 0]
        if not numbers:
            raise EngineError(
                f"nothing to price as {shape.name}: the step has {len(plans)} layers, none of them sparse"
            )
        n_dense = 0 if None in plans else shape.n_dense_layers or 0
        of_step = self._kept(("step", step.n_tokens, step.phase), partial(self._engine, step, "step", 1))
        n = n_before + len(of_step)
        place_of = {number: i for i, number in enumerate(numbers)}
        if of_step:
            yield of_step
        is_one_decoded = step.phase == "decode" and step.n_tokens == 1
        again = repeats(plans, is_one_decoded, shape, self._backbone, self._sheet)
        before: dict[tuple[bool, bool, Span | None], tuple[Operation, ...]] = {}
        for layer, reused in enumerate(_stands_for(shape.n_layers, n_dense, len(numbers), plans)):
            plan = None if layer < n_dense else plans[numbers[reused]]
            is_dense = plan is None
            fetches = plan is not None and len(plan.transfers) > 0
            span = shape.span_of(layer)
            first = before.get((is_dense, fetches, span), ())
            if not first:
                own = step, is_dense, fetches, again, span
                first = self._kept(own, partial(self._before_ffn, *own))
                before[is_dense, fetches, span] = first
            n += len(first)
            yield first
            rest: Part = (
                self._kept(("dense", step.n_tokens, step.phase), partial(self._after_block, step, True))
                if plan is None
                else self._from_block(step, plan, layer, place_of, reused, n)
            )
            n += len(rest)
            yield rest

    def _kept(self, key: Hashable, make: Callable[[], list[Operation]]) -> tuple[Operation, ...]:
        if key not in self._parts:
            if len(self._parts) >= MOST_KEPT:
                self._parts.clear()
            self._parts[key] = tuple(make())
        return self._parts[key]

    def _before_ffn(
        self, step: PricedStep, is_dense: bool, fetches: bool, again: Repeats, span: Span | None
    ) -> list[Operation]:
        """What stands before the experts of a layer, or before its one block. again, span: of attention."""
        shape, rest, steps = self._shape, self._rest, Steps()
        for operation in (
            *self._engine(step, "layer", 1 if is_dense else 1 + shape.top_k),
            *(self._engine(step, "fetching layer", 1 + shape.top_k) if fetches else ()),
            norm(step, shape, rest),
            *repeated(attention_on(step, shape, self._backbone, self._sheet, span), again),
            residual("attention residual", step.n_tokens, shape, rest),
            norm(step, shape, rest),
        ):
            steps.add(operation)
        return steps.operations

    def _from_block(
        self,
        step: PricedStep,
        plan: DispatchPlan,
        layer: int,
        place_of: Mapping[int, int],
        reused: int,
        n_before: int,
    ) -> Part:
        """The block and what follows it in its layer.

        Plans of equal outline are the same block, where the same is on its way for their layer. place_of: of the
        layers that computed, by number. reused: which of them this one stands for.
        """
        hangs_on = self._key(plan, layer, place_of, reused, n_before)
        units = () if plan.outline is None else plan.outline.units
        key = None if hangs_on is None else (hangs_on, step.phase, units)
        known = None if key is None else self._blocks.get(key)
        if known is None and units and (other := self._blocks.get((hangs_on, step.phase, ()))) is not None:
            known = self._blocks[key] = other._replace(operations=self._on_units(other.operations, dict(units)))
        if known is not None:
            self._pass(known, layer, n_before)
            return known.operations
        on_the_way = {} if self._travels is None else self._travels.on_the_way
        was = dict(on_the_way)
        later = {number: layer + i - reused for number, i in place_of.items()}
        steps = Steps(n_before)
        self._block.add_to(steps, plan, layer, later)
        block = steps.operations
        beside = [*self._fetches(block, step), *self._many_rows(block, step), *self._few_rows_of_prompt(block, step)]
        steps.extend([*beside, *self._after_block(step, False)])
        left = [(one, number) for one, number in on_the_way.items() if one not in was or was[one] != number]
        if key is None or any(one.expert is not None for one, _ in left):
            return steps.operations
        if len(self._blocks) >= MOST_KEPT:
            self._blocks.clear()
        sends = [(one.layer - layer, one.unit, None if number is None else number - n_before) for one, number in left]
        taken = tuple(one.unit for one in was if one not in on_the_way)
        self._blocks[key] = _Known(tuple(steps.operations), taken, tuple(sends))
        return self._blocks[key].operations

    def _on_units(self, operations: Sequence[Operation], units: Mapping[Unit, Unit]) -> tuple[Operation, ...]:
        """The same on other units."""
        found = []
        for one in operations:
            unit = units.get(one.unit, one.unit)
            if unit != one.unit:
                key = id(one), unit
                if key not in self._moved:
                    self._moved[key] = one, same(replace(one, unit=unit))
                one = self._moved[key][1]
            found.append(one)
        return tuple(found)

    def _key(self, plan: DispatchPlan, layer: int, place_of: Mapping[int, int], reused: int, n_before: int) -> Hashable:
        """What the operations of a block hang on; None where more matters than is told."""
        outline = plan.outline
        if outline is None:
            return None
        layers = outline.layers
        ahead = (place_of[layers[0]] - reused,) if len(layers) == 1 else tuple(place_of[one] - reused for one in layers)
        if ahead and (layer + max(ahead) >= self._shape.n_layers or not (outline.as_one or ahead == (0,))):
            return None
        if self._travels is None or not self._travels.on_the_way:
            return outline.key, ahead
        arriving: list[tuple[Unit, int | None]] = []
        for one, number in self._travels.on_the_way.items():
            if one.layer == layer:
                if one.expert is not None:
                    return None
                arriving.append((one.unit, None if number is None else n_before - number))
        return outline.key, ahead, *arriving

    def _pass(self, known: _Known, layer: int, n_before: int) -> None:
        """What is on its way after a block that is known."""
        if self._travels is None:
            return
        on_the_way = self._travels.on_the_way
        for unit in known.taken:
            del on_the_way[Arrival(layer, unit, None)]
        for ahead, unit, number in known.sends:
            on_the_way[Arrival(layer + ahead, unit, None)] = None if number is None else n_before + number

    def _after_block(self, step: PricedStep, is_dense: bool) -> list[Operation]:
        shape, steps = self._shape, Steps()
        if is_dense:
            steps.add(_ffn("dense FFN", shape.dense_width, step, shape, self._backbone, self._between))
        elif shape.shared_width:
            steps.add(_ffn("shared FFN", shape.shared_width, step, shape, self._backbone, self._between))
        steps.extend(self._few_rows_of_prompt(steps.operations, step))
        steps.add(residual("residual", step.n_tokens, shape, self._rest))
        return steps.operations

    def _engine(
        self, step: PricedStep, of: Literal["step", "layer", "fetching layer"], n_numbers: int
    ) -> list[Operation]:
        """Where the sheet says it. n_numbers: of tokens and experts that it goes through, for each token."""
        kernels: dict[str, Kernel] = {"step": "step", "layer": "layer", "fetching layer": "prompt_fetching_layer"}
        if step.phase == "decode":
            kernels = {"step": "decode_step", "layer": "decode_layer", "fetching layer": "fetching_layer"}
        kernel, unit = kernels[of], self._rest
        if not self._has_price(kernel):
            return []
        return [Operation("engine", unit, kernel, moved_bytes=NUMBER_BYTES * n_numbers * step.n_tokens)]

    def _has_price(self, kernel: Kernel) -> bool:
        """Of its own, on the unit of the rest."""
        unit = None if self._sheet is None else self._sheet.units.get(self._rest)
        return unit is not None and kernel in unit.kernels

    def _fetches(self, block: Iterable[Operation], step: PricedStep) -> list[Operation]:
        """What experts that travel in a prompt take besides, each of them."""
        if step.phase == "decode" or not self._prices_fetches:
            return []
        n = sum(one.kernel == TRANSFER and one.name in OF_EXPERTS for one in block)
        return [Operation("engine", self._rest, "prompt_fetch", launches=n)] if n else []

    def _few_where(self, kernel: Kernel) -> float | None:
        """FLOP for a weight byte up to which experts have few rows; None where the sheet does not price that kernel."""
        if self._sheet is None or not self._has_price(kernel) or not self._has_price("expert_ffn"):
            return None
        few = self._sheet.units[self._rest].kernels["expert_ffn"].few_rows
        return 0.0 if few is None else few.most_flops_per_weight_byte

    def _many_rows(self, block: Iterable[Operation], step: PricedStep) -> list[Operation]:
        """What a token takes besides where its experts get more rows than few."""
        if step.phase != "decode" or self._most_few is None:
            return []
        n_bytes = sum(one.weight_bytes for one in experts_by_rows(block, self._most_few, self._rest).many)
        return [Operation("engine", self._rest, "many_rows", moved_bytes=n_bytes)] if n_bytes else []

    def _few_rows_of_prompt(self, operations: Iterable[Operation], step: PricedStep) -> list[Operation]:
        """What a prompt's experts with few rows take besides, for each of their layers is a call of its own."""
        most = self._most_few_of_prompt
        if step.phase == "decode" or most is None:
            return []
        few = experts_by_rows(operations, most, self._rest).few
        n_bytes, flops = sum(one.weight_bytes for one in few), sum(one.flops for one in few)
        return [Operation("engine", self._rest, "prompt_few_rows", flops=flops, weight_bytes=n_bytes)] if few else []


class ByRows(NamedTuple):
    """Experts of a block that get few rows each, and those that get more."""

    few: list[Operation]
    many: list[Operation]


def experts_by_rows(operations: Iterable[Operation], most_few: float, unit: Unit | None = None) -> ByRows:
    """most_few: FLOP for a weight byte up to which rows are few. unit: that computes them; None: any."""
    found = ByRows([], [])
    for one in operations:
        if one.kernel == "expert_ffn" and unit in (None, one.unit):
            is_few = one.as_few or one.flops <= most_few * one.weight_bytes
            (found.few if is_few else found.many).append(one)
    return found


def operations(
    step: PricedStep,
    plans: Sequence[DispatchPlan | None],
    shape: ModelShape,
    backbone: Unit,
    graph_bytes_limit: float | None,
    travels: Travels | None = None,
    n_before: int = 0,
) -> list[Operation]:
    """All layers of one forward chunk, without the LM head (`lm_head`), whose rows only the request knows.

    plans: one per layer of the model that computed, None for a dense layer. A priced shape with more layers reuses them
    in order, again from the first; one without dense layers reuses the sparse layers' plans only, and one with some
    has them first where the plans have none. Others as of `Schedule`. n_before: operations before this step. Raises
    `EngineError` and `DeviceError` for plans that move weights or exchange activations where no link joins the units.
    """
    parts = Schedule(shape, backbone, graph_bytes_limit, travels).parts(step, plans, n_before)
    return [operation for part in parts for operation in part]


def _stands_for(n_layers: int, n_dense: int, n_run: int, plans: Sequence[DispatchPlan | None]) -> Sequence[int]:
    """Which of the layers that ran each priced one stands for: they take turns. Where buffers are filled a layer ahead,
    the first finds nothing there and the last fills none, once in a model of any depth: those between take turns."""
    n_sparse = n_layers - n_dense
    fills = all(plan is not None for plan in plans) and any(
        plan is not None and plan.transfers.as_one and len(plan.transfers) > 0 for plan in plans
    )
    if not fills or not 2 < n_run < n_sparse:
        return [layer % n_run for layer in range(n_layers)]
    return [0] * (n_dense + 1) + [1 + i % (n_run - 2) for i in range(n_sparse - 2)] + [n_run - 1]


def unit_of_rest(sheet: Sheet | None, backbone: Unit) -> Unit:
    """Of norms, routers, gather, scatter and the head: the backbone's, where the sheet prices norms there."""
    computing = backbone if sheet is None else sheet.computing(backbone)
    unit = None if sheet is None else sheet.units.get(computing)
    return computing if unit is not None and unit.price("norm") is not None else "cpu"


def lm_head(n_rows: int, shape: ModelShape, unit: Unit = "cpu") -> Operation:
    """Final norm's rows to logits. With an NPU on the CPU: a vocabulary is among the matrices that gain nothing on the
    NPU (000 §2)."""
    weights = shape.hidden * shape.vocabulary
    return Operation("LM head", unit, "lm_head", flops=2.0 * n_rows * weights, weight_bytes=shape.head_bytes)


def norm(step: PricedStep, shape: ModelShape, unit: Unit) -> Operation:
    """Reads and writes T x H."""
    return made("norm", unit, "norm", moved_bytes=2.0 * row_bytes(shape) * step.n_tokens)


def _ffn(
    name: str, width: int, step: PricedStep, shape: ModelShape, unit: Unit, between: Collection[Unit]
) -> Operation:
    """What every token passes through belongs to the backbone, so it runs where attention does (§5.1 on ANEMLL).
    between: as of `Block`."""
    weights = 3 * shape.hidden * width
    return Operation(
        name,
        unit,
        "expert_ffn",
        flops=2.0 * step.n_tokens * weights,
        weight_bytes=shape.dense_bytes(width),
        moved_bytes=float(step.n_tokens * width * shape.bytes_per_value) if unit in between else 0.0,
    )
