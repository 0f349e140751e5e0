"""The schema of plan files: one record a section, unknown keys rejected. `harness.plan` reads and expands them."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import (
    ByteSize,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    TypeAdapter,
    model_validator,
)
from pydantic_core import CoreSchema

from engines.model.quantised import Quantisation
from engines.techniques.place.ranks import MOST_RANKS
from harness.core_sets import CoresOfPhases, ThreadsOfPhases
from harness.device_specs import DeviceSpec
from harness.external.base import ExternalSpec
from harness.external.catalog import EXTERNAL, keys_of_others
from harness.model_specs import AnyModelSpec, ModelSpec, PlayedModelSpec
from harness.plan_values import MAX_NAME
from harness.technique_specs import ReadByName as ReadByName
from harness.technique_specs import TechniqueSpec as TechniqueSpec
from harness.workload_specs import WorkloadSpec
from results import stop_reached
from results.asked_tables import TableSpec
from results.records import Record

PLAN_SCHEMA = FIRST_SCHEMA = 1
"""What this joulebench reads, and what a plan is that says none: no later form is read into it."""
MAX_REPEATS = 100_000
DAY_S = 86_400.0
"""The longest that one step of a run may wait."""


if TYPE_CHECKING:
    from typing_extensions import TypeForm


def _keys_elsewhere() -> dict[str, str]:
    """Keys that an engine of ours has not, and where they belong: to engines of others, or into its `quantise`."""
    found = keys_of_others()
    found["weights"] += "; of joulebench's own, quantise has them by component"
    example = 'quantise = { experts = "int8", arithmetic = "int8" }'
    return found | dict.fromkeys(Quantisation.model_fields, f"is a key of quantise: write it there, as in {example}")


class EngineSpec(Record):
    """One arm: the reference engine with a technique. misplaced: keys that it has not, and where they belong."""

    tag: ClassVar[str] = "reference"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(_keys_elsewhere())

    name: str = Field(min_length=1, max_length=MAX_NAME)
    technique: TechniqueSpec
    profile: str | None = Field(None, min_length=1)
    """Folder that `joulebench calibrate` wrote, or "bundled:NAME" of the one installed with that model: learnt from in
    the place of prompts of the workload, in all cells."""
    devices: tuple[str, ...] | None = Field(None, min_length=1, max_length=64)
    """Names of the devices that it goes onto; all of the plan where it is not given."""
    prefill_chunk: int = Field(512, ge=1, le=1 << 20)
    threads: ThreadsOfPhases | None = None
    """CPU threads, of both phases or of each; where it is not given a thread for each core, or torch's own number. With
    ranks, of each rank; the cores over the ranks where it is not given."""
    cores: CoresOfPhases | None = None
    """Of the host's CPU, on which threads compute: "0-3" in both phases, or a set for each."""
    ranks: int | None = Field(None, ge=1, le=MOST_RANKS)
    """Processes that compute together, with a technique that places experts on ranks."""
    reuse_prefix: bool = False
    """Start each request behind the tokens it shares with the one before: other latencies, the same answers."""
    last_layer: Literal["asked"] | None = None
    """asked: the last layer computes only the tokens of a prompt whose logits are wanted, and of the others what later
    tokens attend to: less work, the same answers. All tokens where it is not given, as techniques see them."""
    long_rope: Literal["at_once", "when_reached"] = "at_once"
    """When a sequence takes LongRoPE's long factors, in models that have them: from its first token on where it may
    reach beyond the original length, or as transformers does once it is there, and all is computed again."""
    max_batch: int = Field(1, ge=1, le=1 << 16)
    """Requests answered together, of those that wait when the engine is free."""
    expert_memory: ByteSize | None = Field(None, ge=1)
    """What a technique that loads experts may hold of them ("2GB"): the others stay in the checkpoint file. Techniques
    with two buffers really copy experts where it is given; else they count what would travel."""
    copy_bytes_per_s: ByteSize | None = Field(None, ge=1)
    """The most that experts are copied with ("400MB"): a link of that speed, made by pauses. As fast as the machine
    copies where it is not given."""
    decoding: Literal["plan by plan"] | None = None
    """How a token is decoded on the CPU. plan by plan: each layer waits until its plan is made, as in techniques that
    decide between router and experts, so that a baseline has ratios to them. In one call of the kernels where the
    technique allows it and nothing is given."""
    quantise: Quantisation = Quantisation()
    """How each component's matrices are stored; one that is not named keeps the model's dtype."""


UNKNOWN_ENGINE = "unknown_engine"
"""What an element is called whose `runs` names no engine."""


def _runs_what(raw: object) -> str | None:
    """The tag of an engine of a plan; None, which is an error, where `runs` names none."""
    if isinstance(raw, EngineSpec | ExternalSpec):
        return raw.tag
    if not isinstance(raw, Mapping) or "runs" not in raw:
        return EngineSpec.tag
    return raw["runs"] if isinstance(raw["runs"], str) and raw["runs"] in EXTERNAL else None


class AllEngines:
    """Of an engine of a plan: ours, or the record that `runs` names."""

    records: Any = functools.reduce(
        operator.or_,
        (Annotated[spec, Tag(spec.tag)] for spec in EXTERNAL.values()),
        Annotated[EngineSpec, Tag(EngineSpec.tag)],
    )

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        told: dict[str, Any] = {
            "custom_error_type": UNKNOWN_ENGINE,
            "custom_error_message": "runs names no engine",
        }
        return handler.generate_schema(Annotated[self.records, Discriminator(_runs_what, **told)])


AnyEngineSpec = Annotated[EngineSpec | ExternalSpec, AllEngines()]
"""One arm: joulebench's own engine with a technique, or an engine that is not ours."""


OTHER_TIMES = ("s", "seconds", "minute", "h", "hour", "hours", "day", "days")
"""Keys by which others may ask for a run that ends by time."""


class StopSpec(Record):
    """Repeat until the 95 % interval of a metric is narrow enough."""

    tag: ClassVar[str] = "width"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(OTHER_TIMES, "unknown key; `stop = { minutes = 60 }` ends by time, without metric and its keys")
    )

    metric: Literal["e2e_s", "ttft_s", "tpot_s", "energy_j"] = stop_reached.METRIC
    relative_width: float = Field(stop_reached.WIDTH, gt=0, lt=1)
    """Half the interval over the mean."""
    min_repeats: int = Field(3, ge=2, le=MAX_REPEATS)
    max_repeats: int = Field(stop_reached.MOST_REPEATS, ge=2, le=MAX_REPEATS)

    @model_validator(mode="after")
    def _can_stop(self) -> StopSpec:
        if self.min_repeats > self.max_repeats:
            raise ValueError(f"min_repeats {self.min_repeats} is above max_repeats {self.max_repeats}; raise it")
        return self


class EnduranceSpec(Record):
    """Repeat without a pause until time, heat or the battery says stop: how long does a device keep its speed?"""

    tag: ClassVar[str] = "endurance"
    misplaced: ClassVar[Mapping[str, str]] = MappingProxyType(
        dict.fromkeys(OTHER_TIMES, "unknown key; time is given in minutes")
    )

    minutes: float = Field(gt=0, le=DAY_S / 60)
    """The longest. Each trial is a round over the workload; the one that is under way at the end is finished."""
    until_temperature_c: float | None = Field(None, gt=0, le=200)
    """Of what the device tells: a phone's battery, a host's CPU. Where it is not given 45 of a phone; a host has no
    limit."""
    until_charge_percent: float = Field(15.0, ge=0, lt=100)
    """Of a battery that gives the load: stop at this level."""


def _stops_by(raw: object) -> str:
    """The tag of `stop`."""
    endures = isinstance(raw, EnduranceSpec) or (
        isinstance(raw, Mapping) and not raw.keys().isdisjoint(EnduranceSpec.model_fields)
    )
    return EnduranceSpec.tag if endures else StopSpec.tag


AnyStopSpec = Annotated[
    Annotated[StopSpec, Tag(StopSpec.tag)] | Annotated[EnduranceSpec, Tag(EnduranceSpec.tag)], Discriminator(_stops_by)
]


class TrialProtocol(Record):
    """How trials are taken. The same for all cells of a run."""

    warmup: int = Field(1, ge=0, le=1_000_000)
    """Requests answered before each window, outside it."""
    repeats: int = Field(3, ge=1, le=MAX_REPEATS)
    stop: AnyStopSpec | None = None
    """Replaces `repeats`."""
    idle_s: float = Field(1.0, ge=0, le=DAY_S)
    """Idle baseline before and after each window; 0: none, and no net energy."""
    cooldown_s: float = Field(0.0, ge=0, le=DAY_S)
    order: Literal["interleaved", "sequential", "shuffled"] = "interleaved"
    """interleaved: every cell once, then again backwards, and so on, so that drift hits all arms alike (Cox 1951)."""
    sample_interval_s: float = Field(0.05, ge=0.001, le=10)
    retries: int = Field(2, ge=0, le=1000)
    """Of transient failures, a trial."""
    max_foreign_cpu_share: float = Field(0.1, ge=0, le=1)
    """Of the CPU time of the cores that we may use, taken by other processes in a window; beside a meter that sees all
    cores of the machine also of all. Above it the trial is taken again. 1: never.

    An engine on n cores waits for its slowest: one busy neighbour is 1/n of the machine and may cost most of the speed.
    """
    contention_retries: int = Field(2, ge=0, le=1000)
    """How often a trial is taken again because of others, before it stands, marked."""
    max_temperature_c: float = Field(40.0, gt=0, le=200)
    """Of a phone's battery: a trial waits until it is below."""
    min_charge_percent: float = Field(50.0, ge=0, lt=100)
    """Of a phone's battery: a trial waits until it is above."""
    gate_wait_s: float = Field(600.0, ge=0, le=DAY_S)
    """How long a trial waits for a phone to be on battery, cool and charged, before it fails."""
    seed: int = 0

    @model_validator(mode="after")
    def _can_begin(self) -> TrialProtocol:
        if isinstance(self.stop, EnduranceSpec) and self.stop.until_charge_percent >= self.min_charge_percent:
            raise ValueError(
                f"stop.until_charge_percent {self.stop.until_charge_percent:g} is not below min_charge_percent"
                f" {self.min_charge_percent:g}, from which a run may begin; lower it"
            )
        return self

    def for_modelled(self) -> TrialProtocol:
        """The same, taken once."""
        return self.model_copy(update={"repeats": 1, "stop": None})


class PlanFile(Record):
    """A plan as it stands in its TOML file."""

    schema_version: int = Field(FIRST_SCHEMA, alias="schema")
    name: str = Field(min_length=1, max_length=MAX_NAME)
    baseline: str | None = None
    """The arm that reports tell the others as times of, by its name; the reference arm where it is not given."""
    model: AnyModelSpec
    engine: tuple[AnyEngineSpec, ...] = Field(min_length=1)
    workload: tuple[WorkloadSpec, ...] = Field(min_length=1)
    device: tuple[DeviceSpec, ...] = Field(min_length=1)
    protocol: TrialProtocol = TrialProtocol()
    table: tuple[TableSpec, ...] = Field((), max_length=64)
    """Tables of speed-ups in the report, beside those of every run."""
    sweep: dict[str, Any] = Field(default_factory=dict)
    """Dotted path to a list of values; each combination is an element of its own."""


# --- reading one section ----------------------------------------------------------------------------------------------

S = TypeVar("S")
Element = TypeVar("Element", bound=ModelSpec | PlayedModelSpec | EngineSpec | ExternalSpec | WorkloadSpec | DeviceSpec)
"""One of each makes a cell."""


class Section(Generic[S]):
    """What may stand in a section of a plan."""

    def __init__(self, schema: TypeForm[S]) -> None:
        """schema: a record, or a union of them."""
        self.schema = schema

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[S]:
        return TypeAdapter(self.schema)

    def read(self, raw: object) -> S:
        """Strictly: TOML has types, so "3" and true are no numbers. By way of JSON, where a list may become a tuple.

        Raises pydantic's `ValidationError`.
        """
        return self._adapter.validate_json(json.dumps(raw), strict=True)


MODEL = Section[AnyModelSpec](AnyModelSpec)
ENGINE = Section[AnyEngineSpec](AnyEngineSpec)
TECHNIQUE = Section[TechniqueSpec](TechniqueSpec)
WORKLOAD = Section[WorkloadSpec](WorkloadSpec)
DEVICE = Section[DeviceSpec](DeviceSpec)
PROTOCOL = Section[TrialProtocol](TrialProtocol)
TABLE = Section[TableSpec](TableSpec)
