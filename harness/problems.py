"""Problems of a plan in words: one line each, with the path in the file, the value found and the remedy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from harness.catalog import TECHNIQUES, WORKLOADS
from harness.plan_values import shown

MAX_LINE = 1000
"""Characters of a problem: the longest list of known names, and a value."""


def told(path: str, error: ValidationError, schema: object) -> list[str]:
    """A line for each problem of one element. schema: what it was validated against, a record or a union of them."""
    return [_line(path, one, schema) for one in error.errors(include_url=False)]


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def in_one_line(problem: str) -> str:
    """As a terminal may show it: no line breaks, no control characters, no more than a screenful."""
    text = " ".join(problem.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: MAX_LINE + 1])
    return text if len(text) <= MAX_LINE else text[: MAX_LINE - 3] + "..."


def _line(path: str, error: Any, schema: object) -> str:
    loc = error["loc"]
    is_written = (not any(_tag(m) == p for m in _members_at(schema, loc[:i])) for i, p in enumerate(loc))
    location = [p for p, w in zip(loc, is_written, strict=True) if w and p not in TECHNIQUES and p not in WORKLOADS]
    where = path + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    found = f"found {shown(error['input'])}"
    match error["type"]:
        case "extra_forbidden":
            known = _keys(_model_at(schema, error["loc"][:-1]))
            return f"{where}: unknown key, {found}; {nearest(str(error['loc'][-1]), known)}"
        case "union_tag_invalid":
            tags = [t.strip("' ") for t in error["ctx"]["expected_tags"].split(",")]
            key = error["ctx"]["discriminator"].strip("'")
            return f"{where}.{key}: unknown {key} {shown(error['ctx']['tag'])}; {nearest(error['ctx']['tag'], tags)}"
        case "union_tag_not_found":
            key = error["ctx"]["discriminator"].strip("'")
            return f'{where}: has no {key}, {found}; add {key} = "..."'
        case "model_attributes_type" | "model_type" | "dict_type":
            return f"{where}: must be a table, {found}; {_table_form(schema, error['loc'])}"
        case "missing":
            return f"{where}: missing; add {error['loc'][-1]} = ..."
        case "value_error":
            return f"{where}: {error['msg'].partition(', ')[2]} ({found})"
        case "tuple_type":
            return f"{where}: must be a list, {found}; write [ ... ]"
    problem = error["msg"][0].lower() + error["msg"][1:]
    return f"{where}: {problem.replace('input should', 'must')}, {found}"


def _table_form(schema: object, location: Sequence[Any]) -> str:
    """How the table that belongs there is written."""
    members = _members_at(schema, location)
    if len(members) == 1:
        return f"write {{ KEY = VALUE }} with the keys {', '.join(_keys(members[0]))}"
    return 'write { name = "..." } with its parameters' if members else 'write { KEY = "..." }'


def _model_at(schema: object, location: Sequence[Any]) -> type[BaseModel] | None:
    """The record that a pydantic location names, if it is one."""
    members = _members_at(schema, location)
    return members[0] if len(members) == 1 else None


def _members_at(schema: object, location: Sequence[Any]) -> list[type[BaseModel]]:
    """Records that may stand where a pydantic location leads, through unions (their tag is part of the location)."""
    for part in location:
        members = _members(schema)
        if isinstance(part, int):
            continue
        tagged = [m for m in members if part in (*_names(m), _tag(m))]
        if tagged:
            schema = tagged[0]
        else:
            schema = next((m.model_fields[part].annotation for m in members if part in m.model_fields), None)
    return _members(schema)


def _members(schema: object) -> list[type[BaseModel]]:
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return [schema]
    return [m for argument in get_args(schema) for m in _members(argument)]


def _names(model: type[BaseModel]) -> tuple[str, ...]:
    """By which a plan chooses it among others, where they are its names."""
    return get_args(model.model_fields["name"].annotation) if "name" in model.model_fields else ()


def _tag(model: type[BaseModel]) -> str | None:
    """By which a plan chooses it among others, where that is its kind; it is no key of the plan."""
    return model.model_fields["kind"].default if "kind" in model.model_fields else None


def _keys(model: type[BaseModel] | None) -> list[str]:
    return sorted(model.model_fields) if model else []
