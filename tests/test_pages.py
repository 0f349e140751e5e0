"""README and docs: what they link to is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from devices.models.sheet import parse_sheet
from engines.estimator import EstimatorRecipe
from harness.commands import app
from harness.plan import draft_plan
from harness.technique_option import technique_of
from results.cpu_time import WattsSheet
from tests.plans import raw_plan

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
PLANS = sorted((ROOT / "plans").glob("*.toml"))


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


@cache
def program() -> Any:
    """joulebench with all its commands: typer takes a twentieth of a second to build them."""
    return typer.main.get_command(app)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """Arguments of joulebench, of each line in a block of code."""
    for line in "".join(blocks(page, "[a-z]*")).replace("\\\n", " ").splitlines():
        if found := re.match(r" *(?:[A-Z_]+=\S+ )*joulebench (.*)", line):
            args = shlex.split(found[1], comments=True)
            yield args[: next((i for i, arg in enumerate(args) if arg in ("&", ">", "|")), len(args))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_can_be_given_as_they_stand(page: Path) -> None:
    """Their names, options and the values of options; nothing is run."""
    for args in commands(page):
        command = program()
        context, rest = typer.Context(command), args
        while isinstance(command, TyperGroup):
            _, command, rest = command.resolve_command(context, rest)
        command.make_context(command.name, list(rest), parent=context)


GIVEN_LATER = ("MissingParameter", "BadParameter", "BadOptionUsage")


def mentioned(page: Path) -> Iterator[list[str]]:
    """Arguments of joulebench, of each command that stands within a sentence."""
    for found in re.findall(r"`(?:[A-Z_]+=\S+ )*joulebench ([^`]*)`", page.read_text("utf-8")):
        args = shlex.split(found)
        if not found.startswith(("...", "--")):  # options of the program itself
            yield args


@pytest.mark.parametrize("page", [*PAGES, *PLANS], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_that_a_page_mentions_have_such_options(page: Path) -> None:
    """Without what they are to be given, or with a word in its place."""
    for args in mentioned(page):
        command = program()
        context, rest = typer.Context(command), args
        while isinstance(command, TyperGroup) and rest:
            _, command, rest = command.resolve_command(context, rest)
        if not isinstance(command, TyperGroup):
            try:
                command.make_context(command.name, list(rest), parent=context)
            except Exception as error:
                if type(error).__name__ not in GIVEN_LATER:
                    raise


def test_before_its_first_command_the_readme_says_where_the_program_is() -> None:
    """`make demo` puts it into a folder of its own, where no shell looks for it."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (folder,) = re.findall(r"^VENV := (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert f"{folder}/bin/activate" in readme[: readme.index("\njoulebench ")]


def test_a_command_with_a_wrong_option_would_be_seen() -> None:
    group = program()
    _, command, rest = group.resolve_command(typer.Context(group), ["run", "my.toml", "--outt", "x"])
    with pytest.raises(Exception, match="No such option: --outt"):
        command.make_context("run", rest)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "toml")], ids=lambda page: str(page.relative_to(ROOT)))
def test_plans_and_sheets_of_a_page_have_known_keys(page: Path) -> None:
    """Parts of a plan are put into a whole one."""
    for text in blocks(page, "toml"):
        try:
            each = [tomllib.loads(text)]
        except tomllib.TOMLDecodeError:  # one line and another that may stand in its place
            each = [tomllib.loads(line) for line in text.splitlines()]
        for raw in each:
            if "units" in raw:
                parse_sheet(text, raw["name"])
            elif "idle_w" in raw:
                WattsSheet.model_validate(raw)
            elif "technique" in raw:
                assert draft_plan(raw_plan(engine=[{"name": "a", **raw}])).problems == ()
            else:
                told = draft_plan(raw_plan(**raw)).problems
                # What a plan names may not be on this machine.
                assert [problem for problem in told if "unknown" in problem or "must" in problem] == []


def options_of_commands(command: Any) -> Iterator[Any]:
    if isinstance(command, TyperGroup):
        for name in command.commands:
            yield from options_of_commands(command.commands[name])
    else:
        yield from command.params


def test_techniques_that_a_help_shows_are_some() -> None:
    shown = [
        text
        for option in options_of_commands(typer.main.get_command(app))
        if option.name == "technique"
        for text in re.findall(r"'(\{ name = .*? \})'", option.help or "")
    ]
    assert len(shown) == 2
    assert [technique_of(text).name for text in shown] == [re.findall(r'"(.*?)"', text)[0] for text in shown]


def test_defaults_that_a_help_tells_of_an_estimator_are_its_own() -> None:
    """They are the recipe's, which is not imported for a help."""
    told = {
        option.name: int(found[1])
        for option in program().commands["calibrate"].params
        if (found := re.search(r"default: (\d+)\.", option.help or ""))
    }
    recipe = EstimatorRecipe()
    assert told == {"seed": recipe.seed, "steps": recipe.n_steps, "expansion": recipe.expansion}
