"""One cell of a table that no run made: a technique on a sheet, at a model's shape, over routing of a named source.

No model runs and no weights are needed. Plans are the technique's own (`engines.pricing.played`), and their price is
that of a run on a modelled device (`engines.pricing.schedule`, `devices.models.timeline`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from devices.base import Unit
from devices.models.repeating import RepeatingTimeline
from devices.models.sheet import Sheet
from devices.models.terms import Term
from engines.calls import Integers
from engines.errors import EngineError, NoRoomError
from engines.pricing.costs import SheetCosts
from engines.pricing.counted_plans import CountedPlans
from engines.pricing.played import Foresight, PlayedStep, dense_steps, played_steps, profile_of_source
from engines.pricing.room import kept_of_shape, lacks_room
from engines.pricing.routing_sources import RoutingSource
from engines.pricing.schedule import Schedule, lm_head, unit_of_rest
from engines.pricing.shapes import ModelShape, sizes_of
from engines.pricing.travels import Travels
from engines.shown import Shown
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext, ModelSizes
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.parameters import Composed
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.presets import preset_parameters
from results.collection import no_collection
from results.counters import EngineCounters
from results.resource_use import MachineUse

Spent = Mapping[tuple[str, str], float]
"""Seconds by operation and the unit or link that it ran on."""


@dataclass(frozen=True)
class Cell:
    """One request, or `batch` of them together, and where and how it is computed.

    technique: as `parameters` makes it. chunk: tokens of a prefill step. decode_steps: after the prompt, which gives
    the first token of the answer. backbone: None: the technique's. recall: of the predictions of a technique that
    predicts. expert_slots: experts that the plan's memory holds, None: no limit is given. calibration_tokens: that a
    profile is counted over. n_before: requests of the same lengths that ran before and are not counted: what they left
    in caches is there. cached_tokens: that the prompt follows: their keys and values are there, read by nobody here.
    """

    sheet: Sheet
    shape: ModelShape
    technique: Composed
    routing: RoutingSource
    prompt_tokens: int
    decode_steps: int = 0
    chunk: int = 256
    batch: int = 1
    backbone: Unit | None = None
    recall: float | None = None
    expert_slots: int | None = None
    calibration_tokens: int = 4096
    n_before: int = 0
    cached_tokens: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        least = {"prompt_tokens": 1, "decode_steps": 0, "chunk": 1, "batch": 1, "n_before": 0, "ranks": 1}
        least["cached_tokens"] = 0
        problems = [
            f"{name} = {getattr(self, name)} must be {n} or more"
            for name, n in least.items()
            if getattr(self, name) < n
        ]
        if self.recall is not None and not 0 <= self.recall <= 1:
            problems.append(f"recall = {self.recall} must be 0 to 1")
        if problems:
            raise EngineError("; ".join(problems))

    @property
    def unit(self) -> Unit:
        """Of the backbone."""
        return self.backbone or self.technique.backbone


@dataclass(frozen=True)
class PhaseCost:
    """Of the prefill, or of all decode steps. joules: by component, None where the sheet states no power of it."""

    seconds: float
    joules: Mapping[str, float | None]
    spent: Spent
    terms: Mapping[tuple[str, Term], float]
    """Seconds by unit or link, and which term of its price they come from."""
    outside_fit_s: float
    """Of operations unlike all that their price was fitted on."""
    bytes_by_link: Mapping[str, float]
    """By one way of a link."""
    use: MachineUse
    """Busy, waiting and idle."""
    counters: EngineCounters

    @property
    def total_j(self) -> float | None:
        """None where a component's is missing."""
        known = [one for one in self.joules.values() if one is not None]
        return sum(known) if len(known) == len(self.joules) else None


@dataclass(frozen=True)
class PricedCell:
    """Modelled. lacks: why nothing was priced: its experts fit nowhere, "N.S." or "oom"."""

    cell: Cell
    routing: str
    """Which source of routing."""
    prefill: PhaseCost | None = None
    decode: PhaseCost | None = None
    """None without decode steps."""
    lacks: NoRoomError | None = field(default=None, compare=False)

    @property
    def result(self) -> str:
        """ "ok", "N.S." or "oom"."""
        return "ok" if self.lacks is None else self.lacks.result

    @property
    def ttft_s(self) -> float | None:
        """Until the last prompt of the batch is read. None where nothing was priced."""
        return None if self.prefill is None else self.prefill.seconds

    @property
    def tpot_s(self) -> float | None:
        """Of a decode step, on average. None without any."""
        return None if self.decode is None else self.decode.seconds / self.cell.decode_steps

    @property
    def e2e_s(self) -> float | None:
        return None if self.prefill is None else sum(one.seconds for one in self.phases)

    @property
    def phases(self) -> tuple[PhaseCost, ...]:
        return tuple(one for one in (self.prefill, self.decode) if one is not None)

    @property
    def n_tokens(self) -> int:
        """Of the answers: prefill gives the first of each."""
        return self.cell.batch * (1 + self.cell.decode_steps)

    @property
    def joules(self) -> dict[str, float | None]:
        """By component, of all phases."""
        found: dict[str, float | None] = {}
        for component in self.prefill.joules if self.prefill is not None else ():
            own = [one.joules[component] for one in self.phases]
            known = [one for one in own if one is not None]
            found[component] = sum(known) if len(known) == len(own) else None
        return found

    @property
    def total_j(self) -> float | None:
        """None where the sheet states no power of a component (`no_joules`), or nothing was priced."""
        own = [one.total_j for one in self.phases]
        known = [one for one in own if one is not None]
        return sum(known) if own and len(known) == len(own) else None

    @property
    def no_joules(self) -> str | None:
        """Why joules are missing; None where they are not."""
        if self.lacks is not None:
            return str(self.lacks)
        lacking = [component for component, joules in self.joules.items() if joules is None]
        return f"sheet {self.cell.sheet.name} states no power of {', '.join(lacking)}" if lacking else None

    @property
    def counters(self) -> EngineCounters:
        return EngineCounters.total([one.counters for one in self.phases])


def parameters(name: str, **given: object) -> Composed:
    """Of a preset, with parameters of its choices. Raises `ValueError` of pydantic for those that it does not take."""
    return preset_parameters(name).model_validate(given)


def build(cell: Cell, sizes: ModelSizes, foresight: Foresight | None = None) -> Technique:
    """The technique as a run on that sheet would build it. Raises `EngineError`, and `DeviceError` where the sheet
    lacks what it asks for."""
    profile = None
    if cell.technique.learns:
        profile = profile_of_source(cell.routing, sizes, cell.calibration_tokens, cell.technique.wanted_prompts)
    return cell.technique.build(
        BuildContext(
            cell.chunk,
            sizes,
            profile,
            SheetCosts(cell.sheet, sizes),
            expert_slots=cell.expert_slots,
            priced_sizes=sizes,
            ranks=cell.ranks,
            foretells=foresight,
        )
    )


@no_collection(stay=False)
def price_cell(cell: Cell) -> PricedCell:
    """Raises `EngineError` for routing of another model, a technique that predicts without
    `recall` or that does not fit; `DeviceError` for a unit, link or price that the sheet lacks."""
    if lacks := lacks_room_for(cell):
        return PricedCell(cell, cell.routing.name, lacks=lacks)
    sizes = sizes_of(cell.shape)
    if sizes is None:
        return _priced_dense(cell)
    foresight = foresight_of(cell, sizes)
    technique = build(cell, sizes, foresight)
    shown, pricing = Shown(technique.asks, sizes), _Pricing(cell)
    for request in range(1 + cell.n_before):
        # Of several requests the last is counted: it finds what those before it left.
        n_tokens = cell.prompt_tokens + cell.decode_steps
        numbers = range(request * cell.batch, (request + 1) * cell.batch)
        sequences = [drawn(cell.routing, sizes, n_tokens, number) for number in numbers]
        pricing.start()
        for played in played_steps(
            technique,
            shown,
            sequences,
            sizes,
            cell.chunk,
            cell.prompt_tokens,
            foresight,
            own_predictions=False,
            all_arrived=pricing.all_arrived,
            any_order=pricing.any_order,
            interchange=pricing.interchange,
        ):
            pricing.add(played)
        prefetched_unused = shown.take_unused()
    return pricing.priced(prefetched_unused)


@lru_cache(maxsize=2)
def drawn(routing: RoutingSource, sizes: ModelSizes, n_tokens: int, sequence: int) -> Integers:
    """Cells of a table share their routing."""
    return routing.ids_LTK(sizes, n_tokens, "run", sequence)


def _priced_dense(cell: Cell) -> PricedCell:
    """Of a model without experts: a technique says which unit computes it, and nothing else."""
    check_places_nothing(cell)
    pricing = _Pricing(cell)
    for _ in range(1 + cell.n_before):
        pricing.start()
        for played in dense_steps(cell.shape.n_layers, cell.batch, cell.chunk, cell.prompt_tokens, cell.decode_steps):
            pricing.add(played)
    return pricing.priced(None)


def check_places_nothing(cell: Cell) -> None:
    """Of a cell of a dense model. Raises `EngineError`."""
    choices = cell.technique.choices
    places = isinstance(choices.place, OneUnitParameters) and isinstance(choices.layout, ExactParameters)
    if not places or choices.move.moves_weights or cell.recall is not None:
        raise EngineError(
            f"{cell.technique.technique} places experts, and {cell.shape.name} has none; use dropless with the backbone"
            " that computes it"
        )


def lacks_room_for(cell: Cell) -> NoRoomError | None:
    """Why its experts, or the keys and values of its requests, fit nowhere on its sheet; or None. Raises `EngineError`
    of a memory for experts that holds too few."""
    units = cell.technique.units
    if units == ("rank:0",):
        units = tuple(f"rank:{i}" for i in range(cell.ranks))
    cached_tokens = cell.batch * (cell.cached_tokens + cell.prompt_tokens + cell.decode_steps)
    move = cell.technique.choices.move
    n_kept = kept_of_shape(move, units, cell.shape, cell.expert_slots)
    return lacks_room(units, move.moves_weights, cell.sheet, cell.shape, cell.unit, cached_tokens, n_kept)


def foresight_of(cell: Cell, sizes: ModelSizes) -> Foresight | None:
    """Of a technique that predicts. Raises `EngineError` where recall is missing, or is of none."""
    predicts = cell.technique.choices.route.kind == "predicted"
    if predicts == (cell.recall is not None):
        return None if cell.recall is None else Foresight(cell.recall, sizes)
    name = cell.technique.technique
    if predicts:
        raise EngineError(f"{name} predicts experts, and no model runs that could; give the recall of its predictions")
    raise EngineError(f"recall = {cell.recall} is of predictions, and {name} makes none; leave it out")


class _Pricing:
    """Prices the steps of a cell one after another."""

    def __init__(self, cell: Cell) -> None:
        self._cell, self._timeline = cell, RepeatingTimeline(cell.sheet)
        limit, self._travels = cell.sheet.graph_bytes_limit, Travels(cell.sheet)
        self._schedule = Schedule(cell.shape, cell.unit, None if limit is None else limit.value, self._travels)
        self._rest = unit_of_rest(cell.sheet, cell.unit)
        self._head = (lm_head(cell.batch, cell.shape, self._rest),)

    def start(self) -> None:
        """A request."""
        self._counted: dict[str, CountedPlans] = {"prefill": CountedPlans(), "decode": CountedPlans()}
        self._timeline.take_use()
        self._start = self._timeline.read()
        self._prefill: PhaseCost | None = None

    def add(self, played: PlayedStep) -> None:
        if played.phase == "decode" and self._prefill is None:
            self._end_prefill()
        timeline = self._timeline
        self._take_arrived()
        step = replace(played.step, kv_length=played.step.kv_length + self._cell.cached_tokens)
        for part in self._schedule.parts(step, played.plans, timeline.n_run):
            timeline.run(part)
        if played.phase == "decode":
            timeline.run(self._head)
        for plan in played.plans:
            if plan is not None:
                self._counted[played.phase].add(plan)

    def all_arrived(self) -> bool:
        """Whether nothing is on its way that calls wait for one by one."""
        self._take_arrived()
        return all(one.expert is None for one in self._travels.on_the_way)

    @property
    def any_order(self) -> bool:
        """Whether units that work side by side cost the same in whatever order they are called: not where one stands
        in for another, nor where launches queue."""
        return not self._cell.sheet.stands_in and not self._timeline.has_queues

    def interchange(self, units: Sequence[Unit]) -> bool:
        """Whether units that only compute experts cost the same in each other's place."""
        return self._rest not in units and self._cell.unit not in units and self._cell.sheet.are_alike(units)

    def _take_arrived(self) -> None:
        if self._timeline.is_at_rest:
            self._travels.on_the_way.clear()  # all has arrived, whether it was called or not

    def priced(self, prefetched_unused: int | None) -> PricedCell:
        """prefetched_unused: of the whole request, counted where it ends."""
        self._counted["decode" if self._cell.decode_steps else "prefill"].prefetched_unused = prefetched_unused
        if self._prefill is None:
            self._end_prefill()
        decode = self._phase("decode") if self._cell.decode_steps else None
        return PricedCell(self._cell, self._cell.routing.name, self._prefill, decode)

    def _end_prefill(self) -> None:
        self._timeline.run(self._head)
        self._prefill = self._phase("prefill")

    def _phase(self, phase: str) -> PhaseCost:
        """Of what ran since the one before."""
        start, end = self._start, self._timeline.read()
        self._start = end
        spent = {key: s - start.spent.get(key, 0.0) for key, s in end.spent.items()}
        terms = {key: s - start.terms.get(key, 0.0) for key, s in end.terms.items()}
        components = self._cell.sheet.components
        return PhaseCost(
            end.at_s - start.at_s,
            {one: end.joules[one] - start.joules[one] if one in end.joules else None for one in components},
            {key: seconds for key, seconds in spent.items() if seconds},
            {key: seconds for key, seconds in terms.items() if seconds},
            end.outside_fit_s - start.outside_fit_s,
            {link: n - start.n_bytes.get(link, 0.0) for link, n in end.n_bytes.items()},
            self._timeline.take_use(),
            self._counted[phase].counters(),
        )
