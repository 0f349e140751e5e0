"""The schema of plans, the plans that come with the project, and that every field is read."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from engines.model.quantised import Quantisation
from engines.oracle import OracleParameters
from engines.techniques.parameters import Composed
from harness.catalog import TECHNIQUES
from harness.commands import app
from harness.device_specs import DEVICE_KINDS, AndroidSpec, HostSpec, IPhoneSpec, ModelledSpec
from harness.external.catalog import EXTERNAL
from harness.model_specs import ModelSpec
from harness.plan import build_plan, load_plan
from harness.schema import DEVICE, TECHNIQUE, EngineSpec, PlanFile, StopSpec, TechniqueSpec, TrialProtocol
from harness.workload_specs import SPEC_OF
from results.asked_tables import TableSpec
from tests.plans import (
    DROPLESS,
    problems,
    raw_plan,
    two_device_plan,
)

ROOT = Path(__file__).parents[1]


DEMO = ROOT / "plans" / "demo.toml"


FIRST = ROOT / "plans" / "first.toml"


# --- the schema ------------------------------------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """As the command prints it."""
    printed: dict[str, Any] = json.loads(CliRunner().invoke(app, ["plan", "schema"]).stdout)
    return printed


def test_the_schema_is_a_json_schema_that_the_demo_meets() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(tomllib.loads(DEMO.read_text(encoding="utf-8")), schema())


@pytest.mark.parametrize(
    "changes",
    [
        {"modle": 3},
        {"engine": [DROPLESS | {"prefil_chunk": 64}]},
        {"engine": [{"name": "a", "technique": {"name": "npumoe-t", "multiple": [1]}}]},
        {"workload": [{"name": "nope"}]},
        {"protocol": {"repeats": "3"}},
        {"engine": []},
    ],
)
def test_schema_and_loader_refuse_the_same(changes: dict[str, Any]) -> None:
    raw = raw_plan(**changes)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(raw, schema())
    problems(raw)


@pytest.mark.parametrize("path", sorted(DEMO.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_plans_that_come_with_joulebench_are_valid(path: Path) -> None:
    assert load_plan(path).cells


KEY_LINE = re.compile(r"^(# )?([\w.]+) = (.*?) +# \S.*$")


def explained_keys(path: Path) -> dict[str, dict[str, Any]]:
    """Section to its keys with their values, those of comments too. Every line with a key must explain it."""
    found: dict[str, dict[str, Any]] = {"": {}}
    section = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if header := re.fullmatch(r"\[+(\w+)\]+", line):
            section = header[1]
        elif line.startswith("# [sweep]"):
            break
        elif line and (not line.startswith("# ") or re.match(r"# [\w.]+ = ", line)):
            key = KEY_LINE.match(line)
            assert key, f"no explanation: {line}"
            table, _, name = key[2].rpartition(".")
            of_section = found.setdefault(section, {})
            (of_section.setdefault(table, {}) if table else of_section)[name] = tomllib.loads(f"v = {key[3]}")["v"]
    return found


def test_the_first_plan_explains_every_key_that_there_is() -> None:
    explained = explained_keys(FIRST)
    for section, record in (
        ("model", ModelSpec),
        ("engine", EngineSpec),
        ("protocol", TrialProtocol),
    ):
        assert set(explained[section]) == set(record.model_fields)
    assert set(explained["engine"]["quantise"]) == set(Quantisation.model_fields)
    assert set(explained["device"]) == {key for kind in DEVICE_KINDS for key in kind.model_fields}
    assert {*explained[""], *(s for s in explained if s), "sweep", "table"} == set(schema()["properties"])
    assert explained["protocol"]["stop"] == StopSpec().model_dump()


def test_the_ends_of_the_first_plan_are_as_they_would_be_written() -> None:
    """A sweep and a table, in comments: they are valid with the plan before them, and the table has every key."""
    text = FIRST.read_text(encoding="utf-8")
    before, ends = text[: text.index("# [sweep]")], text[text.index("# [sweep]") :]
    raw = tomllib.loads(before + re.sub(r"^# (?!---)", "", ends, flags=re.MULTILINE))
    assert set(raw["table"][0]) == set(TableSpec.model_fields)
    assert len(build_plan(raw).cells) == 3


def test_the_first_plan_tells_defaults_as_they_are() -> None:
    text, _, _ = FIRST.read_text(encoding="utf-8").partition("# [sweep]")
    commented = re.findall(r"^# (?:quantise\.)?(\w+) = (.*?) +# ", text, re.MULTILINE)
    records = (ModelSpec, EngineSpec, Quantisation, *DEVICE_KINDS, TrialProtocol)
    defaults = {n: f.default for r in records for n, f in r.model_fields.items()}
    told = {key: tomllib.loads(f"v = {value}")["v"] for key, value in commented}
    # What has no default, or one that nobody would write, shows an example.
    examples = {
        "baseline", "devices", "profile", "threads", "cores", "ranks", "expert_memory", "copy_bytes_per_s", "decoding",
        "last_layer", "label", "cross_check", "recording", "app", "priced_as", "sheet", "stop", "dense",
        "attention_arithmetic",
    }  # fmt: skip
    assert {k: v for k, v in told.items() if k not in examples} == {
        k: list(defaults[k]) if k == "meters" else defaults[k] for k in told if k not in examples
    }


@pytest.mark.parametrize("page", ["README.md", "docs/plans.md"])
def test_plans_of_the_pages_are_valid(page: str) -> None:
    examples = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    for example in examples:
        assert build_plan(tomllib.loads(example)).cells


def test_every_spec_of_a_plan_is_a_union_that_says_its_kind() -> None:
    """What is read is a member of what the type checker was told: the same annotation."""
    plan = build_plan(two_device_plan())
    assert {type(cell.device) for cell in plan.cells} == {HostSpec, ModelledSpec}
    phones = [DEVICE.read({"name": name}) for name in ("adb:R58M", "ios:0001")]
    assert [type(phone) for phone in phones] == [AndroidSpec, IPhoneSpec]
    technique, read_by = get_args(TechniqueSpec)
    assert set(get_args(technique)) == {Composed, OracleParameters}
    read = {type(TECHNIQUE.read({"name": name})) for name in TECHNIQUES}
    assert read == set(get_args(read_by.records))
    assert all(issubclass(one, technique) for one in read)


# --- no dead options -------------------------------------------------------------------------------------------------


SECTIONS_OF_A_PLAN: list[tuple[type[BaseModel], tuple[str, ...]]] = [
    (PlanFile, ("harness",)),
    (ModelSpec, ("harness",)),
    (EngineSpec, ("harness",)),
    (Quantisation, ("engines",)),
    *((spec, ("harness",)) for spec in EXTERNAL.values()),
    *((kind, ("harness",)) for kind in DEVICE_KINDS),
    (TrialProtocol, ("harness",)),
    (StopSpec, ("harness",)),
    *((entry.parameters, ("engines",)) for entry in TECHNIQUES.values()),
    *((spec, ("harness", "workloads")) for spec in dict.fromkeys(SPEC_OF.values())),
]


@cache
def names_read(packages: tuple[str, ...]) -> set[str]:
    """Attributes that are loaded anywhere in the packages, and keys looked up in dicts by a literal."""
    read: set[str] = set()
    for path in (p for package in packages for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                read.add(str(node.slice.value))
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "get" and node.args:
                read.add(str(getattr(node.args[0], "value", "")))
    return read


@pytest.mark.parametrize(("record", "packages"), SECTIONS_OF_A_PLAN, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_a_plan_is_read(record: type[BaseModel], packages: tuple[str, ...]) -> None:
    fields = {field.alias or name for name, field in record.model_fields.items()}
    assert fields - names_read(packages) == set()
