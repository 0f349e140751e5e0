"""Values that no place of a plan can hold: too long, too deep, too large, or unfit to be printed.

TOML allows them, and what comes after it does not: a number of 400 digits is no float, a NUL is in no path, an escape
code in a name reaches the terminal, and a list in 5,000 lists ends the recursion of whoever reads it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

from results.printable import n_digits

MAX_NAME = 100
"""Characters: a plan's name is a folder's, and file systems take 255 bytes."""
MAX_TEXT = 4096
"""Characters: the longest path that Linux takes."""
MAX_SHOWN = 80
MAX_SHOWN_PATH = 400
"""Of a path: whoever looks for the file needs all of it."""
MAX_DEPTH = 16
MAX_WHOLE = 10**18 - 1
"""TOML promises no more digits."""
TOO_DEEP = f"tables and lists lie at most {MAX_DEPTH} deep in each other; found deeper"
IN_LISTS = re.compile(r"(\[\d+\])+$")
UNPRINTABLE = ("Cc", "Cs", "Zl", "Zp")
"""Unicode's classes of what controls a terminal or breaks a line."""
DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""What makes a text read otherwise than it is."""


NO_WIDTH = frozenset(map(chr, (0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0xFE00, 0xFE10))))
"""Besides class Cf, of what Unicode lets a reader ignore: joiners, fillers, selectors of variants."""


class Sifted(NamedTuple):
    """A plan's content without the values that are told."""

    raw: Any
    """None in their place."""
    problems: dict[str, str]
    """Path to what is wrong there."""

    def others(self, problems: list[str]) -> list[str]:
        """Those that are of other places."""
        # What stands in lists that are too deep is told of the outermost.
        outer = (IN_LISTS.sub("", path) for path, problem in self.problems.items() if problem.endswith(TOO_DEEP))
        told = (*(f"{path}{end}" for path in self.problems for end in ":.["), *(f"{path}:" for path in outer))
        return [problem for problem in problems if not problem.startswith(told)]


def sift(value: Any) -> Sifted:
    problems: dict[str, str] = {}
    return Sifted(_sifted(value, "", 0, problems), problems)


def _sifted(value: Any, path: str, depth: int, problems: dict[str, str]) -> Any:
    problem = _problem(value, depth)
    if problem is not None:
        problems[path] = f"{path}: {problem}"
        return None
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            if problem := _text_problem(key):
                where = f"{path}: " if path else ""
                problems[f"{path}.{key}" if path else key] = f"{where}the key {shown(key)} {problem}"
            else:
                kept[key] = _sifted(item, f"{path}.{key}" if path else key, depth + 1, problems)
        return kept
    if isinstance(value, list):
        return [_sifted(item, f"{path}[{i}]", depth + 1, problems) for i, item in enumerate(value)]
    return value


def _problem(value: Any, depth: int) -> str | None:
    if isinstance(value, dict | list):
        return TOO_DEEP if depth > MAX_DEPTH else None
    if isinstance(value, str):
        problem = _text_problem(value)
        return problem and f"{problem}, found {shown(value)}"
    if isinstance(value, float):
        return None if math.isfinite(value) else f"must be a finite number, found {value}"
    if isinstance(value, int):
        return None if abs(value) <= MAX_WHOLE else f"must be a number of at most 18 digits, found {shown(value)}"
    # What else TOML knows: dates and times.
    return None if value is None else f"must not be a date or a time, found {value}; write it in quotes"


def _text_problem(text: str) -> str | None:
    if len(text) > MAX_TEXT:
        return f"must be at most {MAX_TEXT} characters long, and is {len(text)}"
    if any(is_unprintable(character) for character in text):
        return "must be one line without control characters"
    return None


def shown(value: Any, told: Callable[[Any], str] = repr) -> str:
    """As much of a value as a line has room for. told: `ascii` where it matters which characters there are."""
    if type(value) is int and abs(value) > MAX_WHOLE:
        return f"a number of {n_digits(value)} digits"
    if isinstance(value, bool):
        return str(value).lower()  # as TOML writes it
    text = told(value)
    return _in_part(text)


def _in_part(text: str) -> str:
    """Its two ends where it is long: a path says at its end which file is meant."""
    most = MAX_SHOWN_PATH if "/" in text else MAX_SHOWN
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def with_short_values(problem: str, raw: Any) -> str:
    """A problem in which a library or the system told a plan's value whole, with as much of it as a line has room for.

    raw: the plan's content.
    """
    for text in sorted(set(_texts(raw)), key=len, reverse=True):
        for told in (text, str(PurePath(text))):
            if (part := _in_part(told)) != told:
                problem = problem.replace(told, part)
    return problem


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def as_seen(text: str) -> str:
    """What a reader sees of it: composed, without characters of no width, spaces at its ends aside."""
    composed = unicodedata.normalize("NFC", text)
    return "".join(c for c in composed if unicodedata.category(c) != "Cf" and c not in NO_WIDTH).strip()


def is_unprintable(character: str) -> bool:
    return unicodedata.category(character) in UNPRINTABLE or character in DIRECTIONS
