"""A plan: read from its file and validated; `harness.matrix` expands it into cells.

Everything is checked before anything runs, and all problems are told at once, each with its path in the file, the value
found and the remedy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness import sweep
from harness.bundled_plans import bundled_plans
from harness.combinations import AS_PLANNED, devices_problems
from harness.core_sets import too_many_threads
from harness.device_problems import device_problems, same_name_problems, sheet_problems
from harness.device_specs import with_sheet_path
from harness.external.base import ExternalSpec
from harness.matrix import CellPlan, Part, Parts, matrix, told_apart
from harness.model_specs import ModelSpec, PlayedModelSpec
from harness.only_devices import put_on_devices
from harness.plan_values import MAX_NAME, as_seen, shown, sift
from harness.problems import in_one_line, nearest, told
from harness.references import with_references
from harness.schema import (
    DEVICE,
    ENGINE,
    FIRST_SCHEMA,
    MODEL,
    PLAN_SCHEMA,
    PROTOCOL,
    TABLE,
    WORKLOAD,
    AnyEngineSpec,
    Element,
    PlanFile,
    Section,
    TrialProtocol,
)
from harness.tuning.tuned_plans import TunedFor, resolved
from harness.workload_specs import NamedWorkload, WorkloadSpec
from results.swept import swept_values

MAX_BYTES = 1 << 20
"""Of a plan file."""


class PlanError(Exception):
    """A plan that cannot be run. `problems`: one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(map(in_one_line, problems))
        super().__init__("\n".join(self.problems))


# --- the plan ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A valid plan: the protocol and the matrix."""

    name: str
    raw: dict[str, Any]
    protocol: TrialProtocol
    cells: tuple[CellPlan, ...]
    skipped: tuple[str, ...]
    """Combinations that make no cell (a unit that a sheet does not have, ...), with the reason."""
    left_out: tuple[str, ...] = ()
    """Cells that make sense and have nothing to ask of their model, and why: prompts longer than its context, ..."""
    warnings: tuple[str, ...] = ()
    """What runs and is hardly what was meant: blocks that a chunk leaves mostly empty, more threads than cores."""
    tuned_for: tuple[TunedFor, ...] = ()
    """Of phones, which are compared when they are opened: what the tuned profiles that were taken hold for."""

    @property
    def not_run(self) -> tuple[str, ...]:
        """What of its arms and workloads makes no cell, and why; not where the plan itself puts an arm elsewhere."""
        return (*(note for note in self.skipped if not note.endswith(AS_PLANNED)), *self.left_out)

    @property
    def plan_hash(self) -> str:
        """Of everything that a figure depends on."""
        content = [self.protocol.model_dump(), [c.cell.cell_id for c in self.cells]]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


# --- loading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draft:
    """What of a plan is sound in itself, and what is wrong with the rest. What it names was not looked at."""

    plan: Plan
    """Cells of sound parts; none where a plan would have too many."""
    parts: Parts
    named: Parts
    """Those of `parts`, and those of which only a setting is wrong: what they name can be looked at beside that."""
    problems: tuple[str, ...]
    is_part: bool = False
    """Whether `--device` took some of the plan's devices alone: an arm then has keys that the others read."""

    def sound(self) -> Plan:
        """Raises `PlanError`."""
        if self.problems:
            raise PlanError(self.problems)
        if not self.plan.cells:
            raise PlanError([f"the plan has no cell to run: {'; '.join(self.plan.skipped)}"])
        return self.plan


def read_toml(path: Path) -> dict[str, Any]:
    """The plan's raw content. Raises `PlanError`."""
    try:
        if path.is_dir():
            raise PlanError([f"{path}: is a folder; give the path of a plan file in it"])
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise PlanError([f"{path}: has more than {MAX_BYTES:,} bytes, and no plan needs so many; is it a plan?"])
        return tomllib.loads(content.decode("utf-8-sig"))
    except FileNotFoundError as error:
        remedy = "`joulebench init` writes a plan to start from"
        if path.stem in bundled_plans():
            remedy = f"`joulebench init {path.stem}.toml --from {path.stem}` writes it"
        raise PlanError([f"{path}: no such file; {remedy}"]) from error
    except OSError as error:
        raise PlanError([f"{path}: cannot be read as text ({error.strerror})"]) from error
    except UnicodeDecodeError as error:
        raise PlanError([f"{path}: no text in UTF-8 ({error}); is it a plan? Save it as UTF-8"]) from error
    except tomllib.TOMLDecodeError as error:
        raise PlanError([f"{path}: not TOML ({error}); `joulebench init` writes a plan to compare with"]) from error
    except (ValueError, RecursionError) as error:
        raise PlanError([f"{path}: holds a number of thousands of digits, or lists too deep in each other"]) from error


def read_draft(
    path: Path,
    settings: Sequence[str] = (),
    data_root: Path | None = None,
    max_cells: int = sweep.MAX_CELLS,
    devices: Sequence[str] = (),
) -> Draft:
    """Reads, overrides (`--set`, `--device`), validates and expands a plan. Raises `PlanError` where the file is none.

    data_root: the folder of data sets; it decides what is asked, so it is part of every cell's identity.
    """
    raw = read_toml(path)
    problems = []
    for assignment in settings:
        try:
            sweep.set_value(raw, assignment)
        except sweep.PathError as error:
            problems.append(f"--set {assignment[:80]}: {error}")
    written = raw.get("device")
    problems += put_on_devices(raw, devices)
    is_part = raw.get("device") != written
    return replace(draft_plan(raw, data_root, max_cells, problems, path.parent), is_part=is_part)


def load_plan(path: Path, settings: Sequence[str] = (), data_root: Path | None = None) -> Plan:
    """Raises `PlanError` with every problem that is in the file itself."""
    return read_draft(path, settings, data_root).sound()


def build_plan(raw: dict[str, Any], data_root: Path | None = None) -> Plan:
    """Validates and expands a raw plan. Raises `PlanError`."""
    return draft_plan(raw, data_root).sound()


def draft_plan(
    raw: dict[str, Any],
    data_root: Path | None = None,
    max_cells: int = sweep.MAX_CELLS,
    earlier: Sequence[str] = (),
    folder: Path = Path(),
) -> Draft:
    """Never raises. earlier: problems found before. folder: where paths of hardware sheets start."""
    raw, unresolved, notes, tuned_for = resolved(raw, folder)
    sifted = sift(raw)
    entries, problems = sweep.expand(sifted.raw, max_cells)
    too_many = any(problem.startswith(sweep.TOO_MANY) for problem in problems)
    problems += _frame_problems(sifted.raw)
    models, named_models, found = _validated_parts(entries["model"], MODEL)
    problems += found
    engines, named_engines, found = _validated_parts(entries["engine"], ENGINE)
    problems += found
    workloads, _, found = _validated_parts(entries["workload"], WORKLOAD)
    problems += found
    at_home = [entry._replace(raw=with_sheet_path(entry.raw, folder)) for entry in entries["device"]]
    devices, named_devices, found = _validated_parts(at_home, DEVICE)
    problems += found
    protocol = TrialProtocol()
    try:
        given = sifted.raw.get("protocol", {})
        protocol = PROTOCOL.read(given if isinstance(given, dict) else {})
    except ValidationError as error:
        problems += told("protocol", error, PROTOCOL.schema)
    problems += _twice("engine", engines) + _twice("device", devices)
    problems += _look_alike("engine", engines) + _look_alike("workload", workloads)
    if len(engines) == len(entries["engine"]) and not any(problem.startswith("sweep") for problem in problems):
        problems += _baseline_problems(
            sifted.raw.get("baseline"), list(dict.fromkeys(name for e in engines for name in (e.spec.name, e.label)))
        )
        if len(workloads) == len(entries["workload"]):
            problems += _table_problems(sifted.raw.get("table"), engines, workloads)
    engines, found = _meant(engines, _engine_problems)
    problems += found
    if len(named_devices) == len(entries["device"]):
        names = {part.spec.name for part in named_devices}
        engines, found = _meant(engines, partial(devices_problems, names=names))
        problems += found
    devices, found = _meant(devices, device_problems)
    problems += [*found, *same_name_problems([part.spec for part in named_devices])]
    named_devices = [part for part in named_devices if not sheet_problems(part.spec)]
    parts = Parts(models, engines, told_apart(workloads), devices)
    named = Parts(named_models, named_engines, parts.workloads, named_devices)
    cells, skipped = ([], []) if too_many else matrix(parts, data_root)
    name = raw.get("name")
    plan = Plan(str(name), raw, protocol, tuple(with_references(cells)), tuple(skipped), (), tuple(notes), tuned_for)
    everything = [*earlier, *unresolved, *sifted.problems.values(), *sifted.others(problems)]
    return Draft(plan, parts, named, tuple(dict.fromkeys(everything)))


def _validated_parts(
    entries: list[sweep.Entry], section: Section[Element]
) -> tuple[list[Part[Element]], list[Part[Element]], list[str]]:
    """(the sound ones, with those that are sound without the keys that are wrong, the problems)."""
    parts: list[Part[Element]] = []
    named: list[Part[Element]] = []
    problems: list[str] = []
    for entry in entries:
        try:
            parts.append(_part(entry, section.read(entry.raw)))
            named.append(parts[-1])
        except ValidationError as error:
            problems += told(entry.path, error, section.schema, entry.swept)
            if isinstance(entry.raw, dict):
                # Of a union, the tag of the member stands before the key.
                wrong = {next((place for place in e["loc"] if place in entry.raw), None) for e in error.errors()}
                with contextlib.suppress(ValidationError):
                    rest = {key: value for key, value in entry.raw.items() if key not in wrong}
                    part = _part(entry, section.read(rest))
                    named.append(part._replace(wrong=frozenset(entry.raw.keys() & wrong)))
    return parts, named, problems


def _part(entry: sweep.Entry, spec: Element) -> Part[Element]:
    if isinstance(spec, ModelSpec | PlayedModelSpec):
        name = spec.label
    else:
        name = spec.called if isinstance(spec, NamedWorkload) else spec.name
    return Part(entry.path, entry.suffix, spec, f"{name}[{entry.suffix}]" if entry.suffix else name)


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
        if key in raw and not (isinstance(found, list) and found and all(isinstance(e, dict) for e in found)):
            problems.append(f"{key}: must be written as [[{key}]] tables, found {shown(found)}")
    for key in ("model", "protocol"):
        if not isinstance(raw.get(key, {}), dict):
            problems.append(f"{key}: must be a table [{key}], found {shown(raw[key])}")
    if "name" in raw:
        problems += _name_problems(raw["name"])
    schema = raw.get("schema", FIRST_SCHEMA)
    if type(schema) is not int or schema != PLAN_SCHEMA:
        problems.append(
            f"schema: this joulebench reads schema {PLAN_SCHEMA}, found {shown(schema)}; update one of them"
        )
    return problems


def _name_problems(name: Any) -> list[str]:
    """It names the folder of the run."""
    if not (isinstance(name, str) and name.strip()):
        return [f"name: must be a text that is not empty, found {shown(name)}"]
    if name.startswith(".") or set(name) & {"/", "\\"}:
        return [f"name: names the run's folder, so no slash and no leading dot; found {shown(name)}"]
    if len(name) > MAX_NAME:
        return [f"name: names the run's folder, so at most {MAX_NAME} characters; found {len(name)}"]
    return []


def _engine_problems(path: str, engine: AnyEngineSpec) -> Iterator[str]:
    if isinstance(engine, ExternalSpec):
        yield from (f"{path}.{problem}" for problem in engine.problems())
        return
    if engine.max_batch > 1 and engine.reuse_prefix:
        yield (
            f"{path}.max_batch: a batch keeps nothing of the requests before, found {engine.max_batch} with"
            " reuse_prefix; set max_batch = 1 or reuse_prefix = false"
        )
    for problem in too_many_threads(engine.cores, engine.threads):
        yield f"{path}.{problem}"


def _baseline_problems(baseline: object, arms: list[str]) -> Iterator[str]:
    if baseline is not None and not isinstance(baseline, str):
        yield f"baseline: must be the name of an arm, found {shown(baseline)}"
    elif baseline is not None and arms and baseline not in arms:
        yield f"baseline: no arm has the name {shown(baseline)}; {nearest(baseline, arms)}"


def _table_problems(
    tables: object, engines: Sequence[Part[AnyEngineSpec]], workloads: Sequence[Part[WorkloadSpec]]
) -> Iterator[str]:
    """Of the tables that the report shall have: what they name."""
    if tables is None:
        return
    if not (isinstance(tables, list) and all(isinstance(one, dict) for one in tables)):
        yield f"table: must be written as [[table]] tables, found {shown(tables)}"
        return
    arms = list(dict.fromkeys(name for part in engines for name in (part.spec.name, part.label)))
    of_engines, of_workloads = _swept_keys(engines), _swept_keys(workloads)
    swept = [*of_engines, *of_workloads]
    for i, raw in enumerate(tables):
        try:
            spec = TABLE.read(raw)
        except ValidationError as error:
            yield from told(f"table[{i}]", error, TABLE.schema)
            continue
        for key, name in (("over", spec.over), *(("rows", row) for row in spec.rows or ())):
            if name not in arms:
                yield f"table[{i}].{key}: no arm has the name {shown(name)}; {nearest(name, arms)}"
        if spec.rows is not None and len(set(spec.rows)) < len(spec.rows):
            yield f"table[{i}].rows: names an arm twice; name each once"
        for key in spec.keys:
            if key not in swept:
                remedy = nearest(key, swept) if swept else "give it values in [sweep], or remove the line"
                yield f"table[{i}].columns: the sweep gives no arm's or workload's {shown(key)} values; {remedy}"
            elif key in of_engines and key in of_workloads:
                yield (
                    f"table[{i}].columns: the sweep gives values to {shown(key)} of engines and of workloads, and a"
                    " column can mean one of them; sweep one, or name another key"
                )
        if len(set(spec.keys)) < len(spec.keys):
            yield f"table[{i}].columns: names a key twice; name each once"


def _swept_keys(parts: Sequence[Part[Element]]) -> list[str]:
    """Last names of the paths that the sweep gives values."""
    return list(dict.fromkeys(key for part in parts for key in swept_values(part.suffix)))


def _meant(
    parts: list[Part[Element]], check: Callable[[str, Element], Iterator[str]]
) -> tuple[list[Part[Element]], list[str]]:
    """The parts whose names and settings mean something, and the problems of the others."""
    problems = [list(check(part.path, part.spec)) for part in parts]
    sound = [part for part, own in zip(parts, problems, strict=True) if not own]
    return sound, [problem for own in problems for problem in own]


def _twice(section: str, parts: Iterable[Part[Element]]) -> list[str]:
    return [
        f"{section}: the name {shown(name)} is used {n} times; give each its own"
        for name, n in sorted(Counter(part.label for part in parts).items())
        if n > 1
    ]


def _look_alike(section: str, parts: Iterable[Part[Element]]) -> list[str]:
    """Of names that only a machine can tell apart."""
    seen: dict[str, list[str]] = {}
    for label in dict.fromkeys(part.label for part in parts):
        seen.setdefault(as_seen(label), []).append(label)
    return [
        f"{section}: the names {' and '.join(shown(name, ascii) for name in names)} look the same; give each its own"
        for names in seen.values()
        if len(names) > 1
    ] + [f"{section}: the name {shown(name, ascii)} cannot be seen; give another" for name in seen.get("", [])[:1]]
