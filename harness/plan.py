"""The plan file: its schema, its validation, and the matrix of cells it stands for.

Everything is checked before anything runs, and all problems are told at once, each with its path in the file, the value
found and the remedy.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, create_model, model_validator

from devices.host import AUTO_ORDER
from engines.placements import PLACEMENTS
from engines.quantised import Quantisation
from harness import sweep
from harness.catalog import METERS, TECHNIQUES, WORKLOADS
from harness.problems import nearest, not_finite, told
from results.records import Cell, Record

PLAN_SCHEMA = 1


class PlanError(Exception):
    """A plan that cannot be run. `problems`: one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


# --- schema ----------------------------------------------------------------------------------------------------------


def _tagged(name: str, parameters: type[Record], **more: Any) -> type[BaseModel]:
    """A parameters record with its name as the union's tag."""
    tag: Any = (Literal[name], ...)
    return create_model(name, __base__=parameters, name=tag, **more)


def _union(members: Iterable[type[BaseModel]]) -> Any:
    return Annotated[functools.reduce(operator.or_, members), Field(discriminator="name")]


if TYPE_CHECKING:
    TechniqueSpec = Any
    WorkloadSpec = Any
else:
    TechniqueSpec = _union(_tagged(name, entry.parameters) for name, entry in TECHNIQUES.items())
    WorkloadSpec = _union(
        _tagged(name, entry.parameters, label=(str | None, None)) for name, entry in WORKLOADS.items()
    )


class ModelSpec(Record):
    """Which checkpoint, and in what type its weights are held (arithmetic is fp32 on a CPU)."""

    source: str = Field(min_length=1)
    """A Hugging Face folder, a hub id, or `bundled:NAME`. safetensors only."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class EngineSpec(Record):
    """One arm: the reference engine with a technique; on a modelled device also a placement."""

    name: str = Field(min_length=1)
    technique: TechniqueSpec
    placement: str = "host"
    prefill_chunk: int = Field(512, ge=1)
    threads: int | None = Field(None, ge=1)
    """CPU threads; torch's own number where it is not given."""
    reuse_prefix: bool = False
    """Start each request behind the tokens it shares with the one before: other latencies, the same answers."""
    quantise: Quantisation = Quantisation()
    """How each component's matrices are stored; one that is not named keeps the model's dtype."""


class DeviceSpec(Record):
    """Where it runs and what measures it."""

    name: str
    """`host`, or `model:SHEET`."""
    meters: tuple[str, ...] = Field(("auto",), min_length=1)
    watts_sheet: str = "generic"
    """Sheet of the modelled meter: a bundled name or a TOML file."""
    replay_csv: str | None = None
    """Recording of the replay meter."""
    priced_as: str | None = None
    """Modelled devices: price the routing with the shapes of this model instead of the plan's own."""


class StopSpec(Record):
    """Repeat until the 95 % interval of a metric is narrow enough."""

    metric: Literal["e2e_s", "ttft_s", "tpot_s", "energy_j"] = "e2e_s"
    relative_width: float = Field(0.05, gt=0, lt=1)
    """Half the interval over the mean."""
    min_repeats: int = Field(3, ge=2)
    max_repeats: int = Field(20, ge=2)

    @model_validator(mode="after")
    def _can_stop(self) -> StopSpec:
        if self.min_repeats > self.max_repeats:
            raise ValueError(f"min_repeats {self.min_repeats} is above max_repeats {self.max_repeats}; raise it")
        return self


class Protocol(Record):
    """How trials are taken. The same for all cells of a run."""

    warmup: int = Field(1, ge=0)
    """Requests answered before each window, outside it."""
    repeats: int = Field(3, ge=1)
    stop: StopSpec | None = None
    """Replaces `repeats`."""
    idle_s: float = Field(1.0, ge=0)
    """Idle baseline before and after each window; 0: none, and no net energy."""
    cooldown_s: float = Field(0.0, ge=0)
    order: Literal["interleaved", "sequential", "shuffled"] = "interleaved"
    """interleaved: every cell once, then again, so that drift hits all arms alike."""
    sample_interval_s: float = Field(0.05, ge=0.001, le=10)
    retries: int = Field(2, ge=0)
    """Of transient failures, a trial."""
    seed: int = 0

    def for_modelled(self) -> Protocol:
        """The same, taken once."""
        return self.model_copy(update={"repeats": 1, "stop": None})


class PlanFile(Record):
    """A plan as it stands in its TOML file."""

    schema_version: int = Field(PLAN_SCHEMA, alias="schema")
    name: str = Field(min_length=1)
    model: ModelSpec
    engine: tuple[EngineSpec, ...] = Field(min_length=1)
    workload: tuple[WorkloadSpec, ...] = Field(min_length=1)
    device: tuple[DeviceSpec, ...] = Field(min_length=1)
    protocol: Protocol = Protocol()
    sweep: dict[str, Any] = Field(default_factory=dict)
    """Dotted path to a list of values; each combination is an element of its own."""


@dataclass(frozen=True)
class CellPlan:
    """A cell with the specs it is built from."""

    cell: Cell
    model: ModelSpec
    engine: EngineSpec
    workload: Any
    device: DeviceSpec

    @property
    def is_modelled(self) -> bool:
        return self.device.name != "host"


@dataclass(frozen=True)
class Plan:
    """A valid plan: the protocol and the matrix."""

    name: str
    raw: dict[str, Any]
    protocol: Protocol
    cells: tuple[CellPlan, ...]
    skipped: tuple[str, ...]
    """Combinations that make no sense (a placement on the host, ...), for the dry run."""

    @property
    def plan_hash(self) -> str:
        """Of everything that a figure depends on."""
        content = [self.protocol.model_dump(), [c.cell.cell_id for c in self.cells]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# --- loading ---------------------------------------------------------------------------------------------------------


def read_toml(path: Path) -> dict[str, Any]:
    """The plan's raw content. Raises `PlanError`."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise PlanError([f"{path}: no such file; give the path of a plan, such as plans/demo.toml"]) from error
    except IsADirectoryError as error:
        raise PlanError([f"{path}: is a folder; give the path of a plan file in it"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError([f"{path}: cannot be read as text ({error})"]) from error
    except tomllib.TOMLDecodeError as error:
        raise PlanError([f"{path}: not TOML ({error}); see plans/demo.toml for the form"]) from error


def load_plan(path: Path, settings: Sequence[str] = (), data_root: Path | None = None) -> Plan:
    """Reads, overrides (`--set`), validates and expands a plan. Raises `PlanError` with every problem found.

    data_root: the folder of data sets; it decides what is asked, so it is part of every cell's identity.
    """
    raw = read_toml(path)
    problems = []
    for assignment in settings:
        try:
            sweep.set_value(raw, assignment)
        except sweep.PathError as error:
            problems.append(f"--set {assignment}: {error}")
    if problems:
        raise PlanError(problems)
    return build_plan(raw, data_root)


class Parsed(NamedTuple):
    """An element of the expanded plan, with where it stands in the file."""

    path: str
    suffix: str
    spec: Any


def build_plan(raw: dict[str, Any], data_root: Path | None = None) -> Plan:
    """Validates and expands a raw plan. Raises `PlanError`."""
    entries, problems = sweep.expand(raw)
    problems += _frame_problems(raw)
    parsed: dict[str, list[Parsed]] = {}
    adapters: dict[str, Any] = {
        "model": ModelSpec,
        "engine": EngineSpec,
        "workload": WorkloadSpec,
        "device": DeviceSpec,
    }
    for section, found in entries.items():
        parsed[section] = []
        for entry in found:
            try:
                spec = _validated(adapters[section], entry.raw)
                parsed[section].append(Parsed(entry.path, entry.suffix, spec))
            except ValidationError as error:
                problems += told(entry.path, error, adapters[section])
    protocol = Protocol()
    try:
        given = raw.get("protocol", {})
        protocol = _validated(Protocol, given if isinstance(given, dict) else {})
    except ValidationError as error:
        problems += told("protocol", error, Protocol)
    problems += [*not_finite(raw, ""), *_reference_problems(parsed)]
    if problems:
        raise PlanError(list(dict.fromkeys(problems)))
    cells, skipped = _matrix(parsed, data_root)
    if not cells:
        raise PlanError([f"the plan has no cell to run: {'; '.join(skipped)}"])
    return Plan(raw["name"], raw, protocol, tuple(cells), tuple(skipped))


def _validated(schema: Any, raw: Any) -> Any:
    """Strictly: TOML has types, so "3" and true are no numbers. By way of JSON, where a list may become a tuple."""
    return TypeAdapter(schema).validate_json(json.dumps(raw, default=str), strict=True)


def _frame_problems(raw: dict[str, Any]) -> list[str]:
    """Problems of the top level: missing sections, unknown keys, wrong kinds."""
    problems = []
    known = {f.alias or name: f for name, f in PlanFile.model_fields.items()}
    for key in raw:
        if key not in known:
            problems.append(f"{key}: unknown key; {nearest(key, known)}")
    for key, field in known.items():
        if field.is_required() and key not in raw:
            form = f"[[{key}]]" if key in sweep.LISTS else f"[{key}]" if key == "model" else f'{key} = "..."'
            problems.append(f"{key}: missing; add {form}")
    for key in sweep.LISTS:
        found = raw.get(key)
        if found is not None and not (isinstance(found, list) and found and all(isinstance(e, dict) for e in found)):
            problems.append(f"{key}: must be written as [[{key}]] tables, found {found!r}")
    for key in ("model", "protocol"):
        if not isinstance(raw.get(key, {}), dict):
            problems.append(f"{key}: must be a table [{key}], found {raw[key]!r}")
    if "name" in raw and not (isinstance(raw["name"], str) and raw["name"]):
        problems.append(f"name: must be a text that is not empty, found {raw['name']!r}")
    elif raw.get("name", "").startswith(".") or set(raw.get("name", "")) & {"/", "\\"}:
        problems.append(f"name: names the run's folder, so no slash and no leading dot; found {raw['name']!r}")
    if raw.get("schema", PLAN_SCHEMA) != PLAN_SCHEMA:
        problems.append(
            f"schema: this joulebench reads schema {PLAN_SCHEMA}, found {raw['schema']!r}; update one of them"
        )
    return problems


def _reference_problems(parsed: dict[str, list[Parsed]]) -> list[str]:
    """Names that mean something elsewhere: placements, meters, devices, sheets; and names given twice."""
    problems = [
        f"{path}.placement: unknown placement {engine.placement!r}; {nearest(engine.placement, PLACEMENTS)}"
        for path, _, engine in parsed["engine"]
        if engine.placement not in PLACEMENTS
    ]
    for path, _, device in parsed["device"]:
        problems += _host_problems(path, device) if device.name == "host" else _modelled_problems(path, device)
    for section in ("engine", "device"):
        names = [labelled(p.spec.name, p.suffix) for p in parsed[section]]
        problems += [
            f"{section}: the name {name!r} stands {names.count(name)} times; give each its own"
            for name in sorted(set(names))
            if names.count(name) > 1
        ]
    return problems


def _host_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    known = ["auto", *METERS]
    for meter in dict.fromkeys(device.meters):
        if meter not in known:
            yield f"{path}.meters: unknown meter {meter!r}; {nearest(meter, known)}"
        # Joules are summed by the meter's name, so one that runs twice would count twice.
        if device.meters.count(meter) > 1:
            yield f"{path}.meters: {meter!r} stands {device.meters.count(meter)} times; name it once"
    doubled = [m for m in AUTO_ORDER if m in device.meters]
    if "auto" in device.meters and doubled:
        yield f'{path}.meters: "auto" may choose {doubled[0]!r} a second time; name the meters, or "auto" without it'
    if "replay" in device.meters and device.replay_csv is None:
        yield f'{path}.replay_csv: missing; the replay meter needs replay_csv = "power.csv"'
    if device.replay_csv is not None and "replay" not in device.meters:
        yield f'{path}.replay_csv: has no effect; add "replay" to meters'
    if device.watts_sheet != DeviceSpec.model_fields["watts_sheet"].default and not {"auto", "modelled"} & {
        *device.meters
    }:
        yield f'{path}.watts_sheet: has no effect; add "modelled" to meters'
    if device.priced_as is not None:
        yield f"{path}.priced_as: only for modelled devices; remove the line"


def _modelled_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    from devices.models.device import available_sheets
    from engines.schedule import NAMED_SHAPES

    sheet = device.name.removeprefix("model:")
    if not device.name.startswith("model:"):
        known = ["host", *(f"model:{s}" for s in available_sheets())]
        yield f"{path}.name: unknown device {device.name!r}; {nearest(device.name, known)}"
    elif sheet not in available_sheets():
        yield f"{path}.name: no sheet {sheet!r}; {nearest(sheet, available_sheets())}"
    for key in ("meters", "watts_sheet", "replay_csv"):
        if getattr(device, key) != DeviceSpec.model_fields[key].default:
            yield f"{path}.{key}: a modelled device has its own meter; remove the line"
    if device.priced_as is not None and device.priced_as not in NAMED_SHAPES:
        yield f"{path}.priced_as: unknown shape {device.priced_as!r}; {nearest(device.priced_as, NAMED_SHAPES)}"


# --- matrix ----------------------------------------------------------------------------------------------------------


def labelled(name: str, suffix: str) -> str:
    return f"{name}[{suffix}]" if suffix else name


def _workload_labels(workloads: list[Parsed]) -> list[str]:
    labels = [labelled(p.spec.label or p.spec.name, p.suffix) for p in workloads]
    return [f"{label}#{i + 1}" if labels.count(label) > 1 else label for i, label in enumerate(labels)]


def _matrix(parsed: dict[str, list[Parsed]], data_root: Path | None) -> tuple[list[CellPlan], list[str]]:
    cells: list[CellPlan] = []
    skipped: dict[tuple[str, str], list[str]] = {}
    workloads = list(zip(parsed["workload"], _workload_labels(parsed["workload"]), strict=True))
    for device, model, (workload, workload_label), engine in sweep.product(
        parsed["device"], parsed["model"], workloads, parsed["engine"]
    ):
        reason = mismatch(engine.spec, device.spec)
        if reason:
            skipped.setdefault((device.spec.name, reason), []).append(labelled(engine.spec.name, engine.suffix))
        else:
            cells.append(_cell_plan(model, engine, workload, workload_label, device, data_root))
    return cells, [f"{device}: {', '.join(dict.fromkeys(own))}: {why}" for (device, why), own in skipped.items()]


def mismatch(engine: EngineSpec, device: DeviceSpec) -> str | None:
    """Why an engine does not go onto a device, or None."""
    if (engine.placement == "host") != (device.name == "host"):
        return "a modelled device needs a placement" if device.name != "host" else "placements are for modelled devices"
    if device.name != "host" and engine.quantise.asked:
        return "a modelled device prices weights of two bytes, so quantise is for the host"
    return None


def _cell_plan(
    model: Parsed, engine: Parsed, workload: Parsed, workload_label: str, device: Parsed, data_root: Path | None
) -> CellPlan:
    specs = [p.spec.model_dump(mode="json") for p in (model, engine, workload, device)]
    content = json.dumps([workload_label, str(data_root), *specs], sort_keys=True)
    engine_label = labelled(engine.spec.name, engine.suffix)
    device_label = labelled(device.spec.name, device.suffix)
    model_label = labelled(model.spec.source, model.suffix)
    if device.spec.priced_as:
        model_label += f" priced as {device.spec.priced_as}"
    cell = Cell(
        cell_id=hashlib.sha256(content.encode()).hexdigest()[:12],
        label=" · ".join(filter(None, (engine_label, model.suffix, workload_label, device_label))),
        engine=engine_label,
        technique=engine.spec.technique.name,
        technique_parameters=engine.spec.technique.model_dump(mode="json", exclude={"name"}),
        placement=engine.spec.placement,
        model=model_label,
        workload=workload_label,
        workload_parameters=workload.spec.model_dump(mode="json", exclude={"name", "label"}),
        device=device_label,
        engine_parameters={
            "prefill_chunk": engine.spec.prefill_chunk,
            "dtype": model.spec.dtype,
            **({"threads": engine.spec.threads} if engine.spec.threads else {}),
            **({"reuse_prefix": True} if engine.spec.reuse_prefix else {}),
            **engine.spec.quantise.asked,
        },
    )
    return CellPlan(cell, model.spec, engine.spec, workload.spec, device.spec)
