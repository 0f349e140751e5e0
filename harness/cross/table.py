"""The rows of the cross table: what each arm costs on its machine, and what binds it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from devices.base import DeviceError
from devices.models.sheet import Sheet
from engines.errors import EngineError
from engines.pricing.cells import Cell, PhaseCost, PricedCell, price_cell
from engines.pricing.model_shape import ModelShape
from engines.pricing.routing_sources import RoutingSource
from engines.techniques.parameters import Composed
from harness.cross.arms import Arm, arms_on
from harness.fitted_sheets import older_fit, other_weights
from results.units import format_share

FLOAT_NOISE = 1e-9
KEEPS = ("cache", "slices")
"""Moves whose slots outlive a request."""
WORDS = {
    "launches": "launching",
    "weights": "reading weights",
    "activations": "moving activations",
    "arithmetic": "arithmetic",
    "memory": "reading memory",
    "latency": "latency",
    "bytes": "bytes",
}
"""What a unit's or link's seconds are spent on, for a reader."""


@dataclass(frozen=True)
class Question:
    """What is asked of every machine: one model, one request. recall: of techniques that predict. What a technique
    keeps in slots from the request before is there: another request of the same lengths ran first."""

    shape: ModelShape
    routing: RoutingSource
    prompt_tokens: int = 512
    decode_steps: int = 64
    chunk: int = 256
    recall: float = 0.9

    @property
    def words(self) -> str:
        return (
            f"{self.shape.name}, {width_words(self.shape)}; {self.prompt_tokens} tokens of prompt in chunks of"
            f" {self.chunk}, {self.decode_steps} decoded; routing: {self.routing.name}; techniques that predict recall"
            f" {format_share(self.recall)} of the experts"
        )

    @property
    def n_tokens(self) -> int:
        """Whose keys and values are kept at last."""
        return self.prompt_tokens + self.decode_steps

    def arms_on(self, sheet: Sheet, techniques: tuple[str, ...]) -> list[Arm]:
        return arms_on(sheet, self.shape, techniques, self.n_tokens)

    def cell(self, arm: Arm, sheet: Sheet) -> Cell:
        assert arm.parameters is not None
        return Cell(
            sheet,
            self.shape,
            arm.parameters,
            self.routing,
            self.prompt_tokens,
            self.decode_steps,
            self.chunk,
            recall=self.recall if predicts(arm.parameters) else None,
            n_before=1 if arm.parameters.choices.move.kind in KEEPS else 0,
            backbone=arm.backbone,
            ranks=arm.ranks,
            expert_slots=arm.expert_slots,
        )


@dataclass(frozen=True)
class Row:
    """An arm on a machine. why_not: why it was not priced. lost_prefill, lost_decode: of the routed pairs, the
    share that is not as the model's own routers chose: dropped, or computed by other experts."""

    machine: str
    arm: Arm
    result: str
    """ "ok", "N.S.", "oom" or "not priced"."""
    why_not: str | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    j_per_prompt_token: float | None = None
    j_per_token: float | None = None
    """Of a decoded token."""
    no_joules: str | None = None
    binds_prefill: str | None = None
    binds_decode: str | None = None
    moved_bytes_per_prompt_token: float | None = None
    moved_bytes_per_token: float | None = None
    """Over links, for a decoded token."""
    lost_prefill: float | None = None
    lost_decode: float | None = None
    outside_fit: float | None = None
    """Of the seconds, the share of launches unlike all that the sheet was fitted on. None where nothing was fitted:
    rooflines alone say the best that a machine could do."""
    on_front: bool = False
    equals: tuple[str, ...] = ()
    """Other arms of the machine that cost the same in all of `costs`."""

    @property
    def front_words(self) -> str:
        """For a cell of a table: empty where it is not on the front."""
        if not self.on_front:
            return ""
        return f"yes, as {', '.join(self.equals)}" if self.equals else "yes"

    @property
    def costs(self) -> tuple[float, ...] | None:
        """What a better arm has less of; None where nothing was priced. Joules count where the machine states watts."""
        found = (
            self.ttft_s, self.tpot_s, self.lost_prefill, self.lost_decode, self.j_per_prompt_token, self.j_per_token
        )  # fmt: skip
        return None if self.ttft_s is None else tuple(one for one in found if one is not None)


def width_words(shape: ModelShape) -> str:
    """How wide the weights are."""
    if shape.bits is None:
        return f"weights of {8 * shape.bytes_per_value} bits, whatever its checkpoint has"
    bits = {name: getattr(shape.bits, name) for name in ("experts", "dense", "attention", "head")}
    return "weights of " + ", ".join(f"{name} {n:.4g}" for name, n in bits.items()) + " bits"


def predicts(technique: Composed) -> bool:
    return technique.choices.route.kind == "predicted"


Asked = tuple[Arm, Sheet]
Pricing = Callable[[Sequence[Asked]], Iterator["Row"]]
"""Rows in the order in which they are asked."""


def cross_table(
    question: Question,
    sheets: Sequence[Sheet],
    techniques: tuple[str, ...],
    say: Callable[[str], object] = lambda line: None,
    price: Pricing | None = None,
) -> list[Row]:
    """Machine by machine; the Pareto front of each is marked. price: None: here, one after another."""
    rows: list[Row] = []
    asked = [(arm, sheet) for sheet in sheets for arm in question.arms_on(sheet, techniques)]
    found = (row_of(question, *one) for one in asked) if price is None else price(asked)
    for sheet in sheets:
        say(f"{sheet.name}: {sheet.description}")
        if (older := older_fit(sheet, question.shape)) is not None:
            say(f"{sheet.name}: {older}")
        elif (doubt := other_weights(sheet, question.shape)) is not None:
            say(f"{sheet.name}: {doubt}; ask for --weights {sheet.fitted_weights}, or fit a sheet with such weights")
        own = [next(found) for _, its in asked if its is sheet]
        there = {row.arm.technique for row in own if row.result != "not priced"}
        # One that stands on another unit of the machine is not told to be absent too.
        rows += with_front(row for row in own if row.result != "not priced" or row.arm.technique not in there)
    return rows


def row_of(question: Question, arm: Arm, sheet: Sheet) -> Row:
    if arm.why_not is not None:
        return Row(sheet.name, arm, "not priced", arm.why_not)
    try:
        priced = price_cell(question.cell(arm, sheet))
    except (EngineError, DeviceError) as error:
        return Row(sheet.name, arm, "not priced", str(error))
    if priced.lacks is not None:
        return Row(sheet.name, arm, priced.result, str(priced.lacks))
    return _priced(arm, priced)


def with_front(rows: Iterable[Row]) -> list[Row]:
    """Marks those that no other row of the machine is better than in one cost, and as good in all; and those that cost
    the same, which are on the front together or not at all."""
    own = list(rows)
    known = [(row.arm.name, row.costs) for row in own if row.costs is not None]
    found = []
    for row in own:
        if (costs := row.costs) is not None:
            on_front = not any(dominates(other, costs) for _, other in known)
            equals = tuple(name for name, other in known if name != row.arm.name and same_costs(other, costs))
            row = replace(row, on_front=on_front, equals=equals)
        found.append(row)
    return found


def dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    if len(one) != len(other):
        return False
    return any(map(is_less, one, other)) and not any(map(is_less, other, one))


def same_costs(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and not any(map(is_less, one, other)) and not any(map(is_less, other, one))


def is_less(one: float, other: float) -> bool:
    """Sums in another order are no difference."""
    return one < (1 - FLOAT_NOISE) * other


def _priced(arm: Arm, priced: PricedCell) -> Row:
    prefill, decode = priced.prefill, priced.decode
    assert prefill is not None
    cell = priced.cell
    n_prompt, n_decoded = cell.batch * cell.prompt_tokens, cell.batch * cell.decode_steps
    return Row(
        cell.sheet.name,
        arm,
        "ok",
        ttft_s=priced.ttft_s,
        tpot_s=priced.tpot_s,
        j_per_prompt_token=_per_token(prefill.total_j, n_prompt),
        j_per_token=None if decode is None else _per_token(decode.total_j, n_decoded),
        no_joules=priced.no_joules,
        binds_prefill=binding(prefill),
        binds_decode=None if decode is None else binding(decode),
        moved_bytes_per_prompt_token=sum(prefill.bytes_by_link.values()) / n_prompt,
        moved_bytes_per_token=None if decode is None else sum(decode.bytes_by_link.values()) / n_decoded,
        lost_prefill=_lost(prefill, priced),
        lost_decode=None if decode is None else _lost(decode, priced),
        outside_fit=_outside_fit(priced) if has_fits(cell.sheet) else None,
    )


def has_fits(sheet: Sheet) -> bool:
    """Whether any price of the sheet is more than a roofline."""
    return any(unit.kernels for unit in sheet.units.values())


def are_bounds(sheet: Sheet) -> bool:
    """Whether its times are the least that there could be: rooflines alone, and each unit always reaches its peaks."""
    rooflines = [unit.roofline for unit in sheet.units.values() if unit.roofline is not None]
    has_shares = any(one.flops_share is not None or one.bytes_share is not None for one in rooflines)
    return not has_fits(sheet) and not has_shares


def _outside_fit(priced: PricedCell) -> float:
    return sum(phase.outside_fit_s for phase in priced.phases) / sum(phase.seconds for phase in priced.phases)


def _per_token(joules: float | None, n_tokens: int) -> float | None:
    return None if joules is None else joules / n_tokens


def binding(phase: PhaseCost) -> str:
    """The unit or link that works most of the time, and what for: "npu: reading weights, 93 % busy"; or launching,
    where nothing works for longer than that."""
    if not phase.use.by_resource:
        return "nothing"
    busiest = max(phase.use.by_resource, key=lambda name: phase.use.by_resource[name].busy_s)
    spent = {term: seconds for (resource, term), seconds in phase.terms.items() if resource == busiest}
    if phase.use.idle_s > phase.use.by_resource[busiest].busy_s:
        return f"launching: for {100 * phase.use.idle_s / phase.use.window_s:.0f} % of the time nothing works"
    share = phase.use.by_resource[busiest].busy_s / phase.use.window_s
    what = f" {WORDS[max(spent, key=lambda term: spent[term])]}," if spent else ""
    return f"{busiest}:{what} {100 * share:.0f} % busy"


def _lost(phase: PhaseCost, priced: PricedCell) -> float:
    counters = phase.counters
    if counters.routed_pairs == 0:
        return 0.0
    lost = counters.dropped_pairs
    if not priced.cell.technique.choices.route.lossless and counters.predicted is not None:
        lost += counters.predicted - (counters.recalled or 0)
    return lost / counters.routed_pairs


COLUMNS = (
    "machine", "technique", "result", "ttft_s", "tpot_s", "j_per_prompt_token", "j_per_decoded_token",
    "joules_missing_because", "binds_prefill", "binds_decode", "moved_bytes_per_prompt_token",
    "moved_bytes_per_decoded_token", "pairs_lost_prefill", "pairs_lost_decode", "outside_fit_share",
    "on_front", "same_costs_as", "method", "why_not",
)  # fmt: skip


def records(rows: Sequence[Row]) -> Iterator[Mapping[str, Any]]:
    """For the CSV and `--json`."""
    for row in rows:
        figures = (
            row.machine, row.arm.name, row.result, row.ttft_s, row.tpot_s, row.j_per_prompt_token, row.j_per_token,
            row.no_joules, row.binds_prefill, row.binds_decode, row.moved_bytes_per_prompt_token,
            row.moved_bytes_per_token, row.lost_prefill, row.lost_decode, row.outside_fit, row.on_front,
            "; ".join(row.equals), "modelled" if row.result == "ok" else None, row.why_not,
        )  # fmt: skip
        yield dict(zip(COLUMNS, figures, strict=True))
