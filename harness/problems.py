"""Problems of a plan in words: one line each, with the path in the file, the value found and the remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from engines.external.openai_flavours import FLAVOURS
from harness.catalog import TECHNIQUES, WORKLOADS
from harness.external.catalog import EXTERNAL
from harness.plan_values import shown
from harness.schema import (
    DEVICE,
    ENGINE,
    MODEL,
    PROTOCOL,
    TECHNIQUE,
    UNKNOWN_ENGINE,
    WORKLOAD,
    AllEngines,
    EngineSpec,
    ReadByName,
)

SECRET = re.compile("(^|_)(api_?key|key|token|secret|password|authorization)(_|$)", re.IGNORECASE)
"""Keys whose values no message repeats: a terminal and a schedule's log are kept."""
MAX_LINE = 1000
"""Characters of a problem: the longest list of known names, and a value."""


SCALARS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
"""What a key may be, as pydantic calls it and as a plan's reader does."""
TYPES = {"int_type": "int", "int_from_float": "int", "int_parsing": "int", "float_type": "float", "bool_type": "bool",
         "string_type": "str"}  # fmt: skip
"""What pydantic calls a value that is none of these."""
LIST = "a list"
BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def told(
    path: str, error: ValidationError, schema: object, swept: Mapping[tuple[str, ...], str] = MappingProxyType({})
) -> list[str]:
    """A line for each problem of one element. schema: what it was validated against, a record or a union of them.

    swept: of keys that the sweep sets, its path; a wrong value of one is told as the sweep's.
    """
    return [_line(path, one, schema, swept) for one in _one_a_mistake(error.errors(include_url=False))]


def _one_a_mistake(errors: Sequence[Any]) -> list[Any]:
    """Without a list's own problem beside those of its items, and one for a key whose value is of none of its kinds."""
    found: dict[Any, Any] = {}
    may_be_lists = {error["loc"][:i] for error in errors for i, part in enumerate(error["loc"]) if _is_list(part)}
    for error in errors:
        loc, told_as = error["loc"], error["type"]
        if loc[:-1] in may_be_lists and _kind(loc[-1]) != LIST and isinstance(error["input"], list):
            continue  # a list is told as one
        if told_as == "tuple_type" and _is_list(loc[-1]):
            told_as = "literal_error"
        else:
            loc = tuple(part for part in loc if not _is_list(part))
            error = {**error, "loc": loc}
        if told_as == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]:
            continue  # an item that is wrong counts as none
        kind = _kind(loc[-1]) if loc else None
        if kind is not None and told_as in BOUNDS:
            kind += error["msg"].removeprefix("Input should be").replace("greater than or equal to", "of at least")
            told_as = "literal_error"
        if kind is None or told_as not in (*TYPES, "literal_error"):
            found[loc, told_as] = error
        elif (loc[:-1], "kinds") in found:
            found[loc[:-1], "kinds"]["kinds"].append(kind)
        else:
            found[loc[:-1], "kinds"] = {**error, "loc": loc[:-1], "type": "kinds", "kinds": [kind]}
    return list(found.values())


def _kind(tag: object) -> str | None:
    """What a member of a union of plain values may be, by the tag that pydantic puts behind the key."""
    if _is_list(tag):
        return LIST
    if isinstance(tag, str) and tag.startswith("literal["):
        return tag.removeprefix("literal[").removesuffix("]").replace("'", '"')
    return SCALARS.get(tag.removeprefix("constrained-")) if isinstance(tag, str) else None


def _is_list(tag: object) -> bool:
    """Whether it stands for the lists that a key may hold beside something else."""
    return isinstance(tag, str) and tag.startswith("tuple[")


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for an unknown name."""
    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def nearest_engine(name: str, others: Iterable[str] = ()) -> str:
    """The remedy for an engine that is not known by this name. A server's is a flavour. others: more that are known."""
    if name.lower() in FLAVOURS.keys() - {"joulebench"}:  # which most likely means our own engine
        return f'it is a server: write runs = "openai", flavour = "{name.lower()}", and its url'
    return nearest(name, [*EXTERNAL, *others])


def in_one_line(problem: str) -> str:
    """As a terminal may show it: no line breaks, no control characters, no more than a screenful."""
    text = " ".join(problem.split())
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[: MAX_LINE + 1])
    return text if len(text) <= MAX_LINE else text[: MAX_LINE - 3] + "..."


def _line(path: str, error: Any, schema: object, swept: Mapping[tuple[str, ...], str]) -> str:
    loc = error["loc"]
    is_written = (not any(_tag(m) == p for m in _members_at(schema, loc[:i])) for i, p in enumerate(loc))
    location = [p for p, w in zip(loc, is_written, strict=True) if w and p not in TECHNIQUES and p not in WORKLOADS]
    where = path + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location)
    by_sweep = [_as_swept(location, keys, as_written, error["type"]) for keys, as_written in swept.items()]
    where = next(filter(None, by_sweep), where)
    found = (
        "found a value that is not shown here"
        if SECRET.search(str(loc[-1]) if loc else "")
        else f"found {shown(error['input'])}"
    )
    match error["type"]:
        case "extra_forbidden":
            record = _model_at(schema, error["loc"][:-1])
            if why := getattr(record, "misplaced", {}).get(error["loc"][-1]):
                return f"{where}: {why}"
            known = _keys(record)
            remedy = _place_of(str(error["loc"][-1]), record) or nearest(str(error["loc"][-1]), known)
            if any(by_sweep):  # once, and not for each value
                return f"{where}: unknown key; {remedy}"
            return f"{where}: unknown key, {found}; {remedy}"
        case "union_tag_invalid":
            tags = [t.strip("' ") for t in error["ctx"]["expected_tags"].split(",")]
            key = error["ctx"]["discriminator"].strip("'")
            return f"{where}.{key}: unknown {key} {shown(error['ctx']['tag'])}; {nearest(error['ctx']['tag'], tags)}"
        case told_as if told_as == UNKNOWN_ENGINE:
            runs = error["input"]["runs"]
            return f"{where}.runs: unknown engine {shown(runs)}; {nearest_engine(str(runs))}"
        case "union_tag_not_found":
            key = error["ctx"]["discriminator"].strip("'")
            return f'{where}: has no {key}, {found}; add {key} = "..."'
        case "model_attributes_type" | "model_type" | "dict_type":
            return f"{where}: must be a table, {found}; {_table_form(schema, error['loc'])}"
        case "missing":
            return f"{where}: missing; add {error['loc'][-1]} = ..."
        case "value_error":
            # What of a whole table does not go together is told by its keys; the table itself has no room in a line.
            end = "" if isinstance(error["input"], dict) else f" ({found})"
            return f"{where}: {error['msg'].partition(', ')[2]}{end}"
        case "kinds":
            return f"{where}: must be {' or '.join(error['kinds'])}, {found}"
        case wrong if wrong in TYPES:
            return f"{where}: must be {SCALARS[TYPES[wrong]]}, {found}"
        case "string_too_short" if not error["input"]:
            return f"{where}: must be a text that is not empty, {found}"
        case "string_too_long":
            most = error["ctx"]["max_length"]
            return f"{where}: must have at most {most} characters, found {len(error['input'])}"
        case "too_short" if isinstance(error["input"], list):
            return f"{where}: must hold at least {_items(error['ctx']['min_length'])}, {found}"
        case "too_long" if isinstance(error["input"], list):
            return f"{where}: must hold at most {_items(error['ctx']['max_length'])}, found {len(error['input'])}"
        case "byte_size" | "byte_size_unit":
            return f'{where}: must be a number of bytes, with a unit if you like ("2GB", "400MB", "1GiB"), {found}'
        case "tuple_type":
            return f"{where}: must be a list, {found}; write [ ... ]"
    problem = error["msg"][0].lower() + error["msg"][1:]
    return f"{where}: {problem.replace('input should', 'must')}, {found}"


def _place_of(key: str, record: type[BaseModel] | None) -> str | None:
    """Where a key belongs that a plan has, and this section or technique has not."""
    if not any(record in members for members in (*SECTIONS.values(), _members(TECHNIQUE.schema))):
        return None
    others = {name: members for name, members in SECTIONS.items() if record not in members}
    places = [name for name, members in others.items() if any(key in _keys(member) for member in members)]
    if places:
        return f"it is a key of {' and '.join(places)}"
    if record is EngineSpec and any(key in _keys(member) for member in _members(TECHNIQUE.schema)):
        return "it is a parameter of a technique: write it into technique = { ... }"
    return None


def _as_swept(location: Sequence[str | int], keys: tuple[str, ...], path: str, told_as: str) -> str | None:
    """A place in an element as the sweep calls it, which sets `keys` there by `path`; None where it sets others."""
    n = min(len(location), len(keys))
    is_whole = n == len(keys) or told_as == "extra_forbidden"
    if not n or not is_whole or tuple(location[:n]) != keys[:n]:
        return None
    named = path.rsplit(".", len(keys) - n)[0]
    return f"sweep.{named}" + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in location[n:])


def _items(n: int) -> str:
    return f"{n} value{'s' if n != 1 else ''}"


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
            schema = next((_type_of(m.model_fields[part]) for m in members if part in m.model_fields), None)
    return _members(schema)


def _type_of(field: FieldInfo) -> object:
    """What a key may hold, as it is read."""
    return next((told.records for told in field.metadata if isinstance(told, ReadByName)), field.annotation)


def _members(schema: object) -> list[type[BaseModel]]:
    read_by = [told for told in getattr(schema, "__metadata__", ()) if isinstance(told, ReadByName | AllEngines)]
    if read_by:
        return _members(read_by[0].records)
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        return [schema]
    return [m for argument in get_args(schema) for m in _members(argument)]


def _names(model: type[BaseModel]) -> tuple[str, ...]:
    """By which a plan chooses it among others, where they are its names."""
    return get_args(model.model_fields["name"].annotation) if "name" in model.model_fields else ()


def _tag(model: type[BaseModel]) -> str | None:
    """By which a plan chooses it among others, where that is its kind; it is no key of the plan."""
    if "tag" in vars(model):
        return str(vars(model)["tag"])
    return model.model_fields["kind"].default if "kind" in model.model_fields else None


def _keys(model: type[BaseModel] | None) -> list[str]:
    return sorted(model.model_fields) if model else []


SECTIONS = {
    "[model]": _members(MODEL.schema),
    "[[engine]]": _members(ENGINE.schema),
    "[[workload]]": _members(WORKLOAD.schema),
    "[[device]]": _members(DEVICE.schema),
    "[protocol]": _members(PROTOCOL.schema),
}
"""Of a plan, with the records that may stand in each."""
