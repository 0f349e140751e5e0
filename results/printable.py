"""The one place that makes text of devices, files and servers fit for a terminal, a log and a table.

A phone's name or an error of its shell may hold escape codes, which set a terminal's title, hide lines or clear the
screen; directions of writing that turn a line around; line ends that feign a second message; or megabytes.
"""

from __future__ import annotations

import math
import re

LONGEST = 4000
"""Characters of one message: a list of all meters that do not open, and why, is below."""


def printable(text: str, longest: int = LONGEST) -> str:
    """On one line: white space as blanks, other controls as \\xNN or \\uNNNN, the middle left out of what is long."""
    if len(text) <= longest:
        shown = _escaped(text)
        return shown if len(shown) <= longest else _shortened(shown, shown, longest, len(shown))
    return _shortened(_escaped(text[:longest]), _escaped(text[-longest:]), longest, len(text))


def with_colon(device: str) -> str:
    """In front of what is said of a device. `adb:` and `ios:`, the only phone in reach, end with a colon already."""
    return device if device.endswith(":") else f"{device}:"


def n_digits(number: int) -> int:
    """Of one that may be too long to be printed: Python refuses it from some thousands of digits on."""
    about = round(math.log10(abs(number)))
    return about + 1 if abs(number) >= int(10**about) else about


TURNS_LINES = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Controls, and directions of writing: those turn around what stands behind them on a page, too."""


def on_page(value: object) -> object:
    """What a template shows, with those as \\xNN or \\uNNNN. Everything that is no text stays as it is."""
    return TURNS_LINES.sub(lambda found: _escaped(found[0]), value) if type(value) is str else value


def _shortened(start: str, end: str, longest: int, n: int) -> str:
    """Not longer than `longest`. n: characters of the whole."""
    half = (longest - 40) // 2
    return f"{start[:half]} ... {n - 2 * half} characters left out ... {end[-half:]}"


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode("ascii") for c in text
    )
