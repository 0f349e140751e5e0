"""A page names every key that it is the page of, so that nobody has to read a schema for one."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from engines.techniques.presets import PRESETS, preset_parameters
from harness.external.catalog import EXTERNAL
from harness.schema import WorkloadSpec

DOCS = Path(__file__).parent.parent / "docs"
OF_MOST_TECHNIQUES = {"unit", "backbone", "naive_launch"}
OF_EVERY_WORKLOAD = {"name", "label", "limit"}
OF_EVERY_ENGINE = {"name", "runs", "devices", "threads", "cores"}
"""`docs/plans.md` and the plan of `joulebench init` have them."""

REFUSED = {"openai": {"model_file"}, "coreml": {"model_file"}}
"""A server has its model already, and graphs are made of the plan's."""


def code_of(page: Path) -> str:
    """All that stands in backticks or in a block of code."""
    text = page.read_text("utf-8")
    return "\n".join(re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL))


def unnamed(keys: Collection[str], *pages: Path) -> list[str]:
    told = "\n".join(map(code_of, pages))
    return sorted(key for key in keys if not re.search(rf"\b{key}\b", told))


def pages_of_techniques() -> dict[str, list[Path]]:
    """By the table of `techniques/README.md`: the page that is called as the technique, else those of its row."""
    found = {}
    for line in (DOCS / "techniques" / "README.md").read_text("utf-8").splitlines():
        if row := re.match(r"\| ((?:`[\w-]+`(?:, )?)+) \|[^|]*\|[^|]*\| (.*) \|$", line):
            links = re.findall(r"\(([\w-]+)\.md\)", row[2])
            for name in re.findall(r"`([\w-]+)`", row[1]):
                found[name] = [DOCS / "techniques" / f"{n}.md" for n in ([name] if name in links else links)]
    return found


def with_those_it_leans_on(page: Path) -> set[Path]:
    """A section of parameters may say: those of another page."""
    found, section = {page}, re.search(r"^## Parameters\n(.*?)(?=^## |\Z)", page.read_text("utf-8"), re.M | re.S)
    for name in re.findall(r"\]\(([\w-]+\.md)\)", section[1] if section else ""):
        if name != "README.md" and (other := page.parent / name) != page:
            found |= with_those_it_leans_on(other)
    return found


def test_every_technique_has_a_page() -> None:
    assert set(pages_of_techniques()) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_page_of_a_technique_names_each_parameter(name: str) -> None:
    keys = set(preset_parameters(name).model_fields) - {"name"} - OF_MOST_TECHNIQUES
    pages = {page for named in pages_of_techniques()[name] for page in with_those_it_leans_on(named)}
    assert unnamed(keys, *pages) == []
    assert unnamed(OF_MOST_TECHNIQUES, DOCS / "techniques" / "README.md") == []


def test_the_page_of_questions_names_each_key_of_each_workload() -> None:
    schema = TypeAdapter(WorkloadSpec).json_schema()["$defs"]
    keys = {key for spec in schema.values() for key in spec.get("properties", {})}
    assert {"num_fewshot", "length", "arrivals_per_s", "task"} <= keys
    assert unnamed(keys, DOCS / "questions.md") == []
    assert keys >= OF_EVERY_WORKLOAD


@pytest.mark.parametrize("runs", EXTERNAL)
def test_the_page_of_an_engine_names_each_of_its_keys(runs: str) -> None:
    own = DOCS / "engines" / f"{'mnn' if runs == 'mnn-app' else runs}.md"
    keys = set(EXTERNAL[runs].model_fields) - OF_EVERY_ENGINE - REFUSED.get(runs, set())
    assert unnamed(keys, own, DOCS / "engines" / "programs.md") == []
