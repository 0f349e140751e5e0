"""Links of a hardware sheet: what lies between the memories of its units, and how long bytes take there.

    t = latency_s + bytes / bytes_per_s        E = 8 * bytes * pj_per_bit * 1e-12

A link has ends on two sides. `ndp` as an end means every unit of that kind: they share the link. A duplex link carries
both directions at the same time, and has a resource for each; a shared one carries one thing at a time.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from devices.models.figures import Rate, SheetFigure
from results.records import Record

FILE = "file"
"""Where weights lie that no unit's memory holds, as an end of a link: the same name as `engines.dispatch.FILE`."""
_UNIT = re.compile(r"(cpu|gpu|npu|(ndp|rank|core)(:(0|[1-9][0-9]{0,3}))?)")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_UNITS = "cpu, gpu, npu, or ndp, rank or core, of which one is ndp:0"


def is_unit(name: str) -> bool:
    """Whether a unit, or all numbered units of a kind, can be called so."""
    return _UNIT.fullmatch(name) is not None


def _unit(name: str) -> str:
    if not is_unit(name):
        raise ValueError(f"no unit is called so; units are {_UNITS}")
    return name


def _link_end(name: str) -> str:
    if name != FILE and not is_unit(name):
        raise ValueError(f"no unit is called so; a link ends at {_UNITS}, or at the file of the experts: {FILE}")
    return name


def _plain_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise ValueError("a name has small letters, digits, _ and -, begins with a letter, and has 40 at most")
    return name


End = Annotated[str, AfterValidator(_unit)]
"""A unit, or all numbered units of a kind: `gpu`, `ndp:0`, `ndp`."""
LinkEnd = Annotated[str, AfterValidator(_link_end)]
"""A unit, all numbered units of a kind, or the file of the experts."""
PlainName = Annotated[str, AfterValidator(_plain_name)]
"""Of a link, or of a cluster of cores."""
NUMBERED = ("ndp", "rank", "core")
"""Kinds of units of which there are several."""
TAKEN = ("cpu", "gpu", "npu", "ndp", "rank", "core", "comm", "total")
"""What no link can be called: a component of another kind."""


def _listed(ends: object) -> object:
    return (ends,) if isinstance(ends, str) else tuple(ends) if isinstance(ends, list) else ends


Ends = Annotated[tuple[LinkEnd, ...], BeforeValidator(_listed)]
"""One, or a list."""


class LinkSheet(Record):
    """Between the memories of two sides."""

    source: Ends = Field(min_length=1, max_length=64)
    target: Ends = Field(min_length=1, max_length=64)
    bytes_per_s: Rate
    """In each direction of a duplex link; of both together of a shared one."""
    latency_s: SheetFigure | None = None
    """Of each thing that is sent. None: not stated, and counted as 0."""
    pj_per_bit: SheetFigure | None = None
    """Picojoules. None: not stated, and the link's joules are missing."""
    kind: Literal["shared", "duplex"]
    whole_layers: bool = False
    """Whether the calls of a layer wait for all weights that travel to it; else each for those of its experts."""

    def seconds(self, launches: int, n_bytes: float) -> float:
        latency_s = 0.0 if self.latency_s is None else launches * self.latency_s.value
        return latency_s + n_bytes / self.bytes_per_s.value

    def direction(self, source: str, target: str) -> Literal["forth", "back"] | None:
        """None where it does not join the two."""
        return direction_between(source, target, self.source, self.target)


def direction_between(
    source: str, target: str, source_ends: tuple[str, ...], target_ends: tuple[str, ...]
) -> Literal["forth", "back"] | None:
    """Of a link with these ends; None where it does not join the two."""
    if _among(source, source_ends) and _among(target, target_ends):
        return "forth"
    if _among(source, target_ends) and _among(target, source_ends):
        return "back"
    return None


def _among(unit: str, ends: tuple[str, ...]) -> bool:
    return unit in ends or unit.partition(":")[0] in ends


def is_end_of(end: str, units: set[str]) -> bool:
    """Whether a unit, or a unit of that kind, is among them; the file of the experts is everywhere."""
    return end == FILE or end in units or any(unit.startswith(f"{end}:") for unit in units)
