"""What is unlike between two runs, cells or figures, so that a difference of them would be of that too.

A comparison refuses what is unlike until its user allows that kind of it, and then says it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal, NamedTuple

from results.environments import Build, Environment
from results.history.points import CellPoint, Figure, RunPoint
from results.records import Method, Phase
from results.runs import shown_value
from results.units import format_bytes

What = Literal["requests", "methods", "meters", "machines", "systems", "versions", "roads"]
WHATS: Final[dict[What, str]] = {
    "requests": "other questions",
    "methods": "measured beside modelled, and other ways to a figure",
    "meters": "joules of other meters",
    "machines": "another processor, core count, memory, NVIDIA GPU, or phone of one model",
    "systems": "another operating system",
    "versions": "other versions of Python, packages, NVIDIA's driver, joulebench or its kernels",
    "roads": "computed in unlike ways (decision 0025)",
}
MEMORY_ALIKE: Final = 0.02
"""Relative: the kernel's own part differs from start to start."""
BUILD: Final = "build "
MOST_TOLD: Final = 4


class Unlike(NamedTuple):
    what: What
    words: str


def unlike_runs(first: RunPoint, second: RunPoint, device: str) -> Iterator[Unlike]:
    """In machine and software, of a device that both have. The code of a checkout changes under its version."""
    one, other = first.environments.get(device), second.environments.get(device)
    yield from unlike_environments(one, other)
    if one is None or other is None or one.joulebench != other.joulebench:
        return
    if first.code is not None and second.code is not None and first.code != second.code:
        codes = f"{shown_value(first.code)}; {shown_value(second.code)}"
        yield Unlike("versions", f"code of joulebench {one.joulebench} {codes}")


def unlike_environments(first: Environment | None, second: Environment | None) -> Iterator[Unlike]:
    if first is None or second is None or first == second:
        return
    for name, words in (
        ("machine", "architecture"),
        ("cpu_model", "CPU"),
        ("n_cores", "cores"),
        ("n_threads", "threads"),
        ("unit", "phone (digest of its serial number)"),
    ):
        one, other = getattr(first, name), getattr(second, name)
        if one != other and one is not None and other is not None:
            yield Unlike("machines", f"{words} {one}; {other}")
    if first.memory_bytes and second.memory_bytes:
        apart = abs(first.memory_bytes - second.memory_bytes) / max(first.memory_bytes, second.memory_bytes)
        if apart > MEMORY_ALIKE:
            yield Unlike("machines", f"memory {format_bytes(first.memory_bytes)}; {format_bytes(second.memory_bytes)}")
    if gpus := first.other_gpus(second):
        yield Unlike("machines", f"GPU {'; '.join(gpus)}")
    if first.os != second.os:
        yield Unlike("systems", f"{first.os}; {second.os}")
    versions = _versions(first, second)
    if versions:
        more = f" and {len(versions) - MOST_TOLD} more" if len(versions) > MOST_TOLD else ""
        yield Unlike("versions", ", ".join(versions[:MOST_TOLD]) + more)


def _versions(first: Environment, second: Environment) -> list[str]:
    found = [
        f"{name} {one}; {other}"
        for name, one, other in (
            ("Python", first.python, second.python),
            ("joulebench", first.joulebench, second.joulebench),
        )
        if one != other
    ]
    for name in sorted(first.packages.keys() | second.packages.keys()):
        one, other = first.packages.get(name, "none"), second.packages.get(name, "none")
        if one != other:
            found.append(f"{name} {one}; {other}")
    if drivers := first.other_gpu_driver(second):
        found.append(f"GPU driver {'; '.join(drivers)}")
    one_build, other_build = _built(first.build), _built(second.build)
    return [*found, f"kernels {one_build}; {other_build}"] if one_build != other_build else found


def _built(build: Build | None) -> str:
    if build is None:
        return "none"
    return f"{build.compiler or build.road} {build.flags or ''}".strip()


def unlike_cells(first: CellPoint, second: CellPoint) -> Iterator[Unlike]:
    """Whether they were asked the same, as far as it is known."""
    if first.asked and second.asked and first.asked != second.asked:
        yield Unlike("requests", f"requests {_digests(first.asked)}; {_digests(second.asked)}")


def _digests(asked: Sequence[str]) -> str:
    return ", ".join(digest[:12] for digest in asked[:2])


def unlike_figures(
    first: Figure, second: Figure, roads: tuple[CellPoint, CellPoint], allowed: Collection[What]
) -> Iterator[Unlike]:
    """How two figures of the same metric came to be. Scores are compared on every road (decision 0025).

    allowed: with other versions the kernels' build is another too, and no road of its own.
    """
    if first.unit != second.unit:
        yield Unlike("meters", f"{first.unit}; {second.unit}")
    if _way(first.method) != _way(second.method):
        yield Unlike("methods", f"{first.method}; {second.method}")
    if first.meter != second.meter:
        yield Unlike("meters", f"{first.meter}; {second.meter}")
    if first.kind in ("time", "energy"):
        one, other = (_roads(cell, first.phase, "versions" in allowed) for cell in roads)
        if one and other and one != other:
            yield Unlike("roads", f"{' / '.join(sorted(one))}; {' / '.join(sorted(other))}")


def _way(method: Method) -> str:
    """Seconds that follow from a speed that a program told are a clock's too."""
    return "measured" if method == "derived" else method


def _roads(cell: CellPoint, phase: Phase | None, without_build: bool) -> frozenset[str]:
    own = cell.roads.get(phase or "all", ())
    if not without_build:
        return frozenset(own)
    return frozenset(", ".join(p for p in road.split(", ") if not p.startswith(BUILD)) for road in own)
