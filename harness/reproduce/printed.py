"""Values as a source prints them: a number, a range, a bound, several numbers, or text that stays text.

Each kind writes itself back as it was printed (`str`), so that nothing of a value is lost on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

_DIGITS = r"[+-]?\d+(?:\.\d+)?"

AS_TEXT: tuple[tuple[str, str], ...] = (
    (r"-", "the source has no entry"),
    (r"CANNOT RUN|N\.S\.", "a result without a number"),
    (r"decreasing|rank-monotone|>", "an order, not a number"),
    (r".*A\d+.*|.*Oryon.*|.*GHz.*|\d thread", "cores by cluster, with clocks"),
    (r".*(PCIe|NVLink).*", "a machine's memory and link"),
    (r"\[.*\]", "token positions of blocks"),
    (r"block_size.*", "a formula"),
    (r"n_group=.*|4x base|.*text also.*|multiples of .*", "settings"),
    (r"\(.*\) in C=\d+", "tokens of experts and their capacity"),
)
"""Values that stay text, as a pattern, and why."""


class Span(NamedTuple):
    """Least and most of what we computed, to compare with a printed range end by end."""

    low: float
    high: float


@dataclass(frozen=True)
class Number:
    """text: as printed; its last digit says how it is rounded. is_about: with a "~" before it."""

    text: str
    is_about: bool = False

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def half_digit(self) -> float:
        """Half of the last digit printed; a little more, as ties go either way."""
        return 0.5001 * 10.0 ** -len(self.text.partition(".")[2])

    def __str__(self) -> str:
        return f"~{self.text}" if self.is_about else self.text


@dataclass(frozen=True)
class WithError:
    """An accuracy with its standard error."""

    number: Number
    error: Number

    def __str__(self) -> str:
        return f"{self.number}±{self.error}"


@dataclass(frozen=True)
class Range:
    low: Number
    high: Number
    is_about: bool = False

    def __str__(self) -> str:
        return f"{'~' if self.is_about else ''}{self.low}-{self.high}"


@dataclass(frozen=True)
class Bound:
    """sign: as printed: "<", "<=", ">", ">=", "up to " before the limit, or "+" behind it."""

    sign: str
    limit: Number

    @property
    def is_above(self) -> bool:
        """What we compute must be above the limit, or at it."""
        return self.sign in (">", ">=", "+")

    def __str__(self) -> str:
        return f"{self.limit}+" if self.sign == "+" else f"{self.sign}{self.limit}"


@dataclass(frozen=True)
class Several:
    """Numbers that belong together, and what stands between them."""

    numbers: tuple[Number, ...]
    between: str

    def __str__(self) -> str:
        return self.between.join(map(str, self.numbers))


@dataclass(frozen=True)
class Words:
    """reason: why it is no number."""

    text: str
    reason: str

    def __str__(self) -> str:
        return self.text


Printed = Number | WithError | Range | Bound | Several | Words


def _range(match: re.Match[str]) -> Range:
    low, high = Number(match[2]), Number(match[3])
    if low.value > high.value:
        raise ValueError(f"value {match[0]!r}: its lower end is above its upper one; swap them")
    return Range(low, high, bool(match[1]))


def _several(match: re.Match[str]) -> Several:
    between = next(sign for sign in (" and ", "/", ",") if sign in match[0])
    return Several(tuple(map(Number, match[0].split(between))), between)


_FORMS: tuple[tuple[str, Callable[[re.Match[str]], Printed]], ...] = (
    (rf"({_DIGITS})", lambda m: Number(m[1])),
    (rf"~({_DIGITS})", lambda m: Number(m[1], is_about=True)),
    (rf"({_DIGITS})±({_DIGITS})", lambda m: WithError(Number(m[1]), Number(m[2]))),
    (rf"(~?)({_DIGITS})-({_DIGITS})", _range),
    (rf"(<=|>=|<|>|up to )({_DIGITS})", lambda m: Bound(m[1], Number(m[2]))),
    (rf"(~?)({_DIGITS})\+", lambda m: Bound("+", Number(m[2], is_about=bool(m[1])))),
    (rf"{_DIGITS}(?:(?:/{_DIGITS})+|(?:,{_DIGITS})+|(?: and {_DIGITS})+)", _several),
)


def parse_printed(text: str) -> Printed:
    """Raises `ValueError` where the text is of no known form: a value that nobody understands is compared with none."""
    for pattern, read in _FORMS:
        match = re.fullmatch(pattern, text)
        if match:
            return read(match)
    for pattern, reason in AS_TEXT:
        if re.fullmatch(pattern, text):
            return Words(text, reason)
    raise ValueError(
        f"value {text!r} is neither a number, a range, a bound nor several numbers;"
        " write it so, or give printed.AS_TEXT the reason why it stays text"
    )
