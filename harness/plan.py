"""A plan: read from its file, validated, and expanded into the matrix of cells it stands for.

Everything is checked before anything runs, and all problems are told at once, each with its path in the file, the value
found and the remedy.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from devices.host import AUTO_ORDER
from devices.meters.same_counter import shared_counter
from devices.models.device import available_sheets
from engines.placements import PLACEMENTS
from harness import sweep
from harness.catalog import METERS
from harness.problems import nearest, not_finite, told
from harness.references import with_references
from harness.schema import (
    ANDROID_METERS,
    IOS_METERS,
    MODEL_PREFIX,
    PLAN_SCHEMA,
    DeviceSpec,
    EngineSpec,
    ModelSpec,
    PlanFile,
    Protocol,
    WorkloadSpec,
)
from results.records import Cell


class PlanError(Exception):
    """A plan that cannot be run. `problems`: one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CellPlan:
    """A cell with the specs it is built from."""

    cell: Cell
    model: ModelSpec
    engine: EngineSpec
    workload: Any
    device: DeviceSpec
    reference: CellPlan | None = None
    """The cell that `Cell.reference_id` names."""

    @property
    def is_modelled(self) -> bool:
        return self.device.is_modelled


@dataclass(frozen=True)
class Plan:
    """A valid plan: the protocol and the matrix."""

    name: str
    raw: dict[str, Any]
    protocol: Protocol
    cells: tuple[CellPlan, ...]
    skipped: tuple[str, ...]
    """Combinations that make no sense (a placement on the host, ...), for the dry run."""
    left_out: tuple[str, ...] = ()
    """Cells that make sense and have nothing to ask of their model, and why: prompts longer than its context, ..."""

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
        raise PlanError([f"{path}: no such file; `joulebench init` writes a plan to start from"]) from error
    except IsADirectoryError as error:
        raise PlanError([f"{path}: is a folder; give the path of a plan file in it"]) from error
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError([f"{path}: cannot be read as text ({error})"]) from error
    except tomllib.TOMLDecodeError as error:
        raise PlanError([f"{path}: not TOML ({error}); `joulebench init` writes a plan to compare with"]) from error


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
    problems += [*not_finite(raw, ""), *_reference_problems(parsed), *_baseline_problems(raw.get("baseline"), parsed)]
    if problems:
        raise PlanError(list(dict.fromkeys(problems)))
    cells, skipped = _matrix(parsed, data_root)
    if not cells:
        raise PlanError([f"the plan has no cell to run: {'; '.join(skipped)}"])
    return Plan(raw["name"], raw, protocol, tuple(with_references(cells)), tuple(skipped))


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
    problems += [
        f"{path}.max_batch: a batch keeps nothing of the requests before, found {engine.max_batch} with reuse_prefix; "
        "set max_batch = 1 or reuse_prefix = false"
        for path, _, engine in parsed["engine"]
        if engine.max_batch > 1 and engine.reuse_prefix
    ]
    for path, _, device in parsed["device"]:
        problems += device_problems(path, device)
    for section in ("engine", "device"):
        names = [labelled(p.spec.name, p.suffix) for p in parsed[section]]
        problems += [
            f"{section}: the name {name!r} stands {names.count(name)} times; give each its own"
            for name in sorted(set(names))
            if names.count(name) > 1
        ]
    return problems


def _baseline_problems(baseline: object, parsed: dict[str, list[Parsed]]) -> Iterator[str]:
    names = [labelled(p.spec.name, p.suffix) for p in parsed["engine"]]
    if baseline is not None and not isinstance(baseline, str):
        yield f"baseline: must be the name of an arm, found {baseline!r}"
    elif baseline is not None and names and baseline not in names:
        yield f"baseline: no arm has this name; {nearest(baseline, names)}"


def device_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    """What of a device cannot be meant: its name, its meters, settings that would do nothing."""
    if device.is_modelled:
        return _modelled_problems(path, device)
    if device.is_phone:
        return _phone_problems(path, device)
    if device.name == "host":
        return _host_problems(path, device)
    known = ["host", "adb:SERIAL", "ios:UDID", *(f"model:{s}" for s in available_sheets())]
    return iter([f"{path}.name: unknown device {device.name!r}; {nearest(device.name, known)}"])


def _phone_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    known = ["auto", *(IOS_METERS if device.is_ios else ANDROID_METERS)]
    for meter in dict.fromkeys(device.meters):
        if meter not in known:
            yield f"{path}.meters: a phone has no meter {meter!r}; it has {', '.join(known)}"
    if ("energy gauge" in device.meters) != (device.app is not None):
        yield f'{path}.app: the meter "energy gauge" follows one app, found {device.app!r}; give both or neither'
    for key in ("cross_check", "watts_sheet", "recording", "priced_as"):
        if getattr(device, key) != DeviceSpec.model_fields[key].default:
            yield f"{path}.{key}: has no effect on a phone; remove the line"


def _host_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    known = ["auto", *METERS]
    named = [*device.meters, *device.cross_check]
    for meter in dict.fromkeys(named):
        key = "meters" if meter in device.meters else "cross_check"
        if meter not in known:
            yield f"{path}.{key}: unknown meter {meter!r}; {nearest(meter, known)}"
        # Joules are summed by the meter's name, so one that runs twice would count twice.
        if named.count(meter) > 1:
            yield f"{path}.{key}: {meter!r} stands {named.count(meter)} times; name it once"
    for first, second in combinations(dict.fromkeys(device.meters), 2):
        if shared := shared_counter(first, second):
            yield (
                f"{path}.meters: {first!r} and {second!r} both read {shared}, the same joules twice; name one of them,"
                f' and the other as its check: cross_check = ["{second}"]'
            )
    for meter in dict.fromkeys(device.cross_check):
        if meter in known and not any(shared_counter(meter, m) for m in device.meters):
            yield (
                f"{path}.cross_check: {meter!r} reads nothing that one of {', '.join(device.meters)} reads; name the"
                " meter that it is to check, or name it under meters"
            )
    doubled = [m for m in AUTO_ORDER if m in device.meters]
    if "auto" in device.meters and doubled:
        yield f'{path}.meters: "auto" may choose {doubled[0]!r} a second time; name the meters, or "auto" without it'
    if "replay" in device.meters and device.recording is None:
        yield f'{path}.recording: missing; the replay meter needs recording = "trace.parquet"'
    if device.recording is not None and "replay" not in device.meters:
        yield f'{path}.recording: has no effect; add "replay" to meters'
    if device.watts_sheet != DeviceSpec.model_fields["watts_sheet"].default and not {"auto", "modelled"} & {
        *device.meters
    }:
        yield f'{path}.watts_sheet: has no effect; add "modelled" to meters'
    if device.priced_as is not None:
        yield f"{path}.priced_as: only for modelled devices; remove the line"
    if device.app is not None:
        yield f"{path}.app: only for the energy gauge of an iPhone; remove the line"


def _modelled_problems(path: str, device: DeviceSpec) -> Iterator[str]:
    from engines.schedule import NAMED_SHAPES

    sheet = device.name.removeprefix(MODEL_PREFIX)
    if sheet not in available_sheets():
        yield f"{path}.name: no sheet {sheet!r}; {nearest(sheet, available_sheets())}"
    for key in ("meters", "cross_check", "watts_sheet", "recording", "app"):
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
    if (engine.placement == "host") == device.is_modelled:
        return "a modelled device needs a placement" if device.is_modelled else "placements are for modelled devices"
    if device.is_modelled and engine.quantise.asked:
        return "a modelled device prices weights of two bytes, so quantise is for the host"
    if device.is_modelled and engine.max_batch > 1:
        return "a modelled device prices one request at a time, so max_batch is for the host"
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
            **({"max_batch": engine.spec.max_batch} if engine.spec.max_batch > 1 else {}),
            **engine.spec.quantise.asked,
            **({"computes": device.spec.computes} if device.spec.computes != "cpu" else {}),
        },
    )
    return CellPlan(cell, model.spec, engine.spec, workload.spec, device.spec)
