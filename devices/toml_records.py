"""Records from TOML files that a user wrote: sheets of watts and of hardware. Refused in words, before they cost time.

Only a regular file is opened, for a pipe or a device may never end, and no more than `MAX_BYTES` of it are read.
"""

from __future__ import annotations

import stat
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ModelWrapValidatorHandler, ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from results.printable import n_digits, printable

MAX_BYTES = 1 << 20
MAX_SHOWN = 80
BETWEEN = "between"
"""Type of an error of pydantic that is ours: `Fault`."""
OF_A_KEY = "[key]"
"""As pydantic ends the place of a fault in the name of a table; the name stands before it."""
Read = TypeVar("Read", bound=BaseModel)


class RecordError(ValueError):
    """A file that is no such record. problems: one line each, without the file's path."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


def read_record(schema: type[Read], path: Path) -> Read:
    """Raises `OSError` where it cannot be read, `RecordError` where it is not such a record."""
    return record_of(schema, parse_toml(read_text(path)))


def read_text(path: Path) -> str:
    """Raises `OSError` where it cannot be read, `RecordError` where it is no text of a record's size."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise RecordError(["is no regular file; name a TOML file"])
    with path.open("rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise RecordError([f"has more than {MAX_BYTES:,} bytes, and no sheet needs so many; name another file"])
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        raise RecordError([problem]) from error


def parse_toml(text: str) -> dict[str, Any]:
    """Raises `RecordError`, for whole numbers beyond all floats too: to compare or print them may fail."""
    try:
        raw = tomllib.loads(text)
        huge = list(_beyond_floats(raw))
    except tomllib.TOMLDecodeError as error:
        raise RecordError([f"not TOML: {printable(str(error), MAX_SHOWN * 2)}"]) from error
    except (ValueError, RecursionError) as error:
        raise RecordError(
            ["holds a number of thousands of digits, or tables or lists too deep in each other"]
        ) from error
    if huge:
        raise RecordError(
            [
                f"{printable('.'.join(map(str, keys)), MAX_SHOWN)}: a whole number of {n_digits(number)} digits, and no"
                " figure is so large; correct it"
                for keys, number in huge
            ]
        )
    return raw


def _beyond_floats(value: object) -> Iterator[tuple[tuple[object, ...], int]]:
    """Each with the keys that lead to it."""
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        yield (), value
    held = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in held:
        for keys, number in _beyond_floats(one):
            yield (key, *keys), number


def record_of(schema: type[Read], raw: Mapping[str, Any]) -> Read:
    """Raises `RecordError` with every missing, unknown or malformed key."""
    try:
        return schema.model_validate(raw, strict=True)
    except ValidationError as error:
        faults = error.errors(include_url=False)
        raise RecordError([told(one) for one in faults if not _follows(one, faults)]) from error


class Fault(NamedTuple):
    """What is wrong between several values of a record, found before they are looked at one by one. key: under which
    of the record's keys."""

    key: str
    words: str


def with_faults(
    schema: type[Read], raw: object, handler: ModelWrapValidatorHandler[Read], faults: Iterable[Fault]
) -> Read:
    """For a record's wrap validator: what is wrong between its values is told beside what is wrong within them. Raises
    `ValidationError`."""
    between = [InitErrorDetails(type=_custom(words), loc=(key,), input={}) for key, words in faults]
    within: list[InitErrorDetails] = []
    try:
        record = handler(raw)
    except ValidationError as error:
        within = [_again(one) for one in error.errors(include_url=False)]
    if between or within:
        raise ValidationError.from_exception_data(schema.__name__, [*within, *between])
    return record


def _again(fault: ErrorDetails) -> InitErrorDetails:
    """An error of pydantic, to be raised with others."""
    place, found = fault["loc"], fault["input"]
    if fault["type"] == BETWEEN:
        return InitErrorDetails(type=_custom(fault["msg"]), loc=place, input=found)
    given = InitErrorDetails(type=fault["type"], loc=place, input=found)
    return InitErrorDetails(**given, ctx=fault["ctx"]) if "ctx" in fault else given


def _custom(words: str) -> PydanticCustomError:
    return PydanticCustomError(BETWEEN, "{words}", {"words": words})


def _follows(fault: ErrorDetails, faults: Sequence[ErrorDetails]) -> bool:
    """Whether a list is too short only because one of its items is none."""
    n = len(fault["loc"])
    return fault["type"] == "too_short" and any(
        one["loc"][:n] == fault["loc"] and len(one["loc"]) > n for one in faults
    )


def told(fault: ErrorDetails, n_outer: int = 0) -> str:
    """n_outer: names at the head of its place that the user did not write."""
    where = printable(".".join(str(one) for one in fault["loc"][n_outer:] if one != OF_A_KEY), MAX_SHOWN)
    match fault["type"]:
        case "missing":
            return f"{where}: missing; add it"
        case "extra_forbidden":
            return f"{where}: unknown key; remove it"
        case "too_short":
            return f"{where}: must have at least {fault['ctx']['min_length']}, found {fault['ctx']['actual_length']}"
        case "string_too_short" if not fault["input"]:
            return f"{where}: is empty; write it"
        case "model_type" | "dict_type":
            return f"{where}: must be a table, found {printable(repr(fault['input']), MAX_SHOWN)}; write {{ ... }}"
        case "union_tag_not_found":
            return f"{_of_tag(where, fault)}: missing; add it"
        case "union_tag_invalid":
            return f"{_of_tag(where, fault)}: must be one of {fault['ctx']['expected_tags']}"
    problem = printable(fault["msg"].removeprefix("Value error, ").replace("Input should", "must"))
    found = "" if isinstance(fault["input"], dict) else f", found {printable(repr(fault['input']), MAX_SHOWN)}"
    return f"{where}: {problem}{found}" if where else f"{problem}{found}"


def _of_tag(where: str, fault: ErrorDetails) -> str:
    """The key that says which of several records it is."""
    return ".".join(filter(None, (where, fault["ctx"]["discriminator"].strip("'"))))
