"""Which columns of a power recording are added up: what its column names say, and where they do not, its numbers.

the whole   `total_w`, `system_power_w`, `wall_w`, `battery_w`, ...: alone; the parts are shown beside it
a part      `cpu_w`, `gpu0_w`, `dram_w`, ..., or any name that begins with `part_`: added
inside      `core0_w` inside `cpu_w`, both inside `package_w`: shown, and not added
unknown     any other name. Beside other columns it is refused, unless its numbers are the sum of all others in
            every row: then it is the whole. A column taken for a part that is the whole would double the joules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from devices.base import MeterUnavailableError

Array = NDArray[np.float64]

PART_PREFIX = "part_"
_WHOLE = """
    total sum all whole system sys machine board wall combined psys node server chassis psu input battery dc ac mains
    plug outlet device phone computer pc host module supply laptop vdd_in pom_5v_in"""
_PART = """
    cpu gpu igpu dgpu npu ane tpu dsp dram ram mem memory hbm vram display screen panel lcd oled backlight disk ssd hdd
    nvme storage nic network wifi wlan modem radio fan fans core cores uncore cluster pp package pkg"""
_SAYS_NOTHING = "power draw usage consumption avg average mean inst instant in of the e p"
WHOLE_WORDS = frozenset(_WHOLE.split())
PART_WORDS = frozenset(_PART.split())
SAYS_NOTHING = frozenset(_SAYS_NOTHING.split())
IN_CPU = frozenset(("core", "cores", "cluster", "pp"))
IN_PACKAGE = IN_CPU | {"cpu", "uncore", "igpu"}
PACKAGE = frozenset(("package", "pkg"))
SAYS_POWER = frozenset(("w", "mw", "kw", "uw", "µw", "nw"))
_NO_DRAW = "limit limits cap capped max maximum min minimum peak tdp rated rating budget target source state mode"
NO_DRAW = frozenset(_NO_DRAW.split())
"""Beside power, in names of what was not drawn."""
SAME_PARTS = tuple(
    frozenset(names.split())
    for names in (
        "dram ram mem memory", "mem memory hbm vram", "gpu hbm vram", "dgpu hbm vram", "gpu igpu", "gpu dgpu",
        "npu ane", "display screen panel lcd oled backlight", "disk storage ssd nvme", "disk storage hdd",
        "network nic", "network wifi wlan", "modem radio", "fan fans", "core cores cluster pp", "package pkg",
    )
)  # fmt: skip
"""Names of one part, or of one inside the other: a GPU's board holds its memory."""
SAME_SUM = 1e-3
"""Relative: the columns are of slightly different instants."""
COARSE_SHARE = 0.05
"""Of the mean: rounding beyond lets sums agree by chance."""
MOST_DECIMALS = 6
LESS_THAN_A_PART = 0.98
"""The whole draws at least what a part does; a little less where two meters differ by their gains."""


def summed(path: Path, components: Sequence[str], watts: Array) -> tuple[bool, ...]:
    """Which components add up to the whole. Raises `MeterUnavailableError` where names and numbers leave it open."""
    if len(components) == 1:
        return (True,)
    roles = [_role(name) for name in components]
    wholes = [i for i, role in enumerate(roles) if role == "whole"]
    if not wholes:
        wholes = [i for i, role in enumerate(roles) if role == "unknown" and _is_sum_of_others(watts, i)]
    if len(wholes) > 1:
        names = " and ".join(f"{components[i]}_w" for i in wholes)
        raise MeterUnavailableError(f"replay: {path}: {names} are each the whole; keep one of them")
    if wholes:
        _refuse_less_than_a_part(path, components, watts, wholes[0])
        return tuple(i == wholes[0] for i in range(len(components)))
    unknown = [name for name, role in zip(components, roles, strict=True) if role == "unknown"]
    if unknown:
        raise MeterUnavailableError(
            f"replay: {path}: nothing says whether {unknown[0]}_w is a part beside the other columns or holds them;"
            f" call it {PART_PREFIX}{unknown[0]}_w if it is to be added, total_w if it is the whole, or delete it"
        )
    _refuse_gpu_in_package(path, components, watts)
    inside = _inside(components)
    _refuse_overlap(path, [name for name, is_inside in zip(components, inside, strict=True) if not is_inside])
    return tuple(not is_inside for is_inside in inside)


def _words(name: str) -> frozenset[str]:
    """Without digits and what says nothing: `VDD_IN` is one word, `CPU_0 power` is cpu."""
    told = name.lower()
    if told in WHOLE_WORDS:
        return frozenset({told})
    return frozenset(re.findall(r"[a-z]+", told)) - SAYS_NOTHING


def _role(name: str) -> str:
    if name.lower().startswith(PART_PREFIX):
        return "part"
    words = _words(name)
    if words & PART_WORDS:
        # `cpu_total` and `gpu_board` are of one part.
        return "part"
    return "whole" if words <= WHOLE_WORDS else "unknown"


def _is_sum_of_others(watts: Array, i: int) -> bool:
    """In every row, to the digits that were written."""
    own, others = watts[:, i], np.delete(watts, i, axis=1)
    if others.shape[1] < 2 or not own.any():
        return False
    rounded_w = _half_digit(watts) * watts.shape[1]
    # Digits so coarse prove nothing.
    atol_w = rounded_w if rounded_w < COARSE_SHARE * own.mean() else 0.0
    return bool(np.allclose(own, others.sum(axis=1), rtol=SAME_SUM, atol=atol_w))


def _half_digit(watts: Array) -> float:
    """Half of the last digit that the watts were written with: of the column that has most."""
    for decimals in range(MOST_DECIMALS + 1):
        if np.allclose(watts, np.round(watts, decimals), rtol=0, atol=1e-9):
            return float(0.5 * 10.0**-decimals)
    return 0.0


def _refuse_less_than_a_part(path: Path, components: Sequence[str], watts: Array, whole: int) -> None:
    mean_w = watts.mean(axis=0)
    largest = int(np.argmax(mean_w))
    if mean_w[whole] < LESS_THAN_A_PART * mean_w[largest]:
        raise MeterUnavailableError(
            f"replay: {path}: {components[whole]}_w is named as the whole and has {mean_w[whole]:.4g} W on average,"
            f" less than {components[largest]}_w with {mean_w[largest]:.4g} W; delete or rename one of them"
        )


def _refuse_gpu_in_package(path: Path, components: Sequence[str], watts: Array) -> None:
    """A `gpu_w` is a card's, or that of the processor: then the package holds it, and is never below."""
    words = [_words(name) for name in components]
    packages_w = watts[:, [bool(w) and w <= PACKAGE for w in words]].sum(axis=1)
    gpus = [w == {"gpu"} for w in words]
    at_least_w = watts[:, gpus].sum(axis=1) + watts[:, [w == {"cpu"} for w in words]].sum(axis=1)
    if packages_w.any() and any(gpus) and not (LESS_THAN_A_PART * at_least_w > packages_w).any():
        gpu = components[gpus.index(True)]
        raise MeterUnavailableError(
            f"replay: {path}: nothing says whether the package holds {gpu}_w; call it igpu_w if it does, dgpu_w if it"
            " is a card of its own"
        )


def _inside(components: Sequence[str]) -> list[bool]:
    words = [_words(name) for name in components]
    has_package = any(w and w <= PACKAGE for w in words)
    has_cpu = any(w == {"cpu"} for w in words)
    outer = IN_PACKAGE if has_package else IN_CPU if has_cpu else frozenset[str]()
    return [bool(w & outer) and not w & PACKAGE and not name.lower().startswith(PART_PREFIX)
            for w, name in zip(words, components, strict=True)]  # fmt: skip


def _refuse_overlap(path: Path, added: Sequence[str]) -> None:
    """`cpu_w` beside `cpu0_w` or `cpu_total_w`; `cpu_gpu_w` beside `gpu_w`; `memory_w` beside `dram_w`."""
    named = [name for name in added if not name.lower().startswith(PART_PREFIX)]
    for one, other in combinations(named, 2):
        parts, others = _words(one) & PART_WORDS, _words(other) & PART_WORDS
        shared = parts & others
        is_same = len(parts) == len(others) == 1 and any(parts | others <= same for same in SAME_PARTS)
        if (shared and not _are_siblings(one, other)) or (is_same and not shared):
            raise MeterUnavailableError(
                f"replay: {path}: {one}_w and {other}_w may hold the same {min(shared or parts)}; keep one of them, or"
                f" call each that is to be added {PART_PREFIX}NAME_w"
            )


def _are_siblings(one: str, other: str) -> bool:
    """The same name but for what counts them: `gpu0` and `gpu1`, `package-0` and `package-1`, `gpu_a` and `gpu_b`."""
    stems = [re.sub(r"\d+|(?<![a-z])[a-z](?![a-z])", "#", name.lower()) for name in (one, other)]
    return stems[0] == stems[1] and "#" in stems[0]
