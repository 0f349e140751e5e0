"""`--technique` of a command: a name, or the table that a plan would have."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any

from harness.terminal import EXIT_BAD_PLAN, fail

if TYPE_CHECKING:
    from engines.techniques.base import TechniqueParameters

TECHNIQUE_HELP = "As in a plan: dropless, or '{ name = \"dropping\", factor = 1.5 }'."


def technique_of(text: str) -> TechniqueParameters:
    """Ends the command on one that is wrong."""
    from pydantic import ValidationError

    from harness.problems import told
    from harness.schema import TECHNIQUE

    try:
        return TECHNIQUE.read(_table(text))
    except ValidationError as error:
        problems = "; ".join(told("technique", error, TECHNIQUE.schema)[:10])
        fail(f"--technique {text}: {problems}; `joulebench list techniques` shows them", EXIT_BAD_PLAN)


def _table(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return {"name": text}
    try:
        found: dict[str, Any] = tomllib.loads(f"technique = {text}")["technique"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        fail(f"--technique {text}: no table in TOML ({error})", EXIT_BAD_PLAN)
    return found
