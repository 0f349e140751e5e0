"""README and docs: what they link to is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_readme_leads_to_every_page_that_answers_a_question() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "devices").glob("*.md")]
    assert pages
    assert [p.name for p in pages if str(p.relative_to(ROOT)) not in readme] == []


def test_what_is_to_be_installed_can_be_typed_and_is_an_extra() -> None:
    """zsh takes joulebench[mnn] without quotes for a pattern, and finds no file of that name."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"])
    sources = [
        path
        for folder in ("harness", "engines", "devices", "workloads", "results", "plans")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".toml")
    ]
    told = [
        found
        for path in (*PAGES, *sources)
        for found in re.findall(r"pip install (\S*)joulebench\[([\w,-]+)\]", path.read_text("utf-8"))
    ]
    assert {quote for quote, _ in told} == {"'", '"'}
    assert {name for _, names in told for name in names.split(",")} <= extras
