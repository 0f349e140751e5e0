"""A CSV of recorded power: `time_s`, and a column that ends in `_w` for each component. Refused with the line at fault.

Which columns are summed: all of them, unless one is the whole of the others. That is one whose name says so (`total_w`,
`system_w`, `wall_w`, ...) or whose watts are the others' sum in every row. Then the others are shown, and not added to
it. `package_w` is the whole of the parts of a CPU (`cpu_w`, `core0_w`, `uncore_w`), and of nothing else.
"""

from __future__ import annotations

import csv
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import MeterUnavailableError

Array = NDArray[np.float64]

TIME = "time_s"
WATTS = "_w"
MAX_W = 1e6
"""More than any machine that a recording is of: a megawatt."""
MAX_TIME_S = 1e11
"""Unix time, too, is below for another 3000 years."""
WHOLE = re.compile(r"total|sum|all|whole|system|machine|board|wall|combined|psys|vdd_in|pom_5v_in")
PACKAGE = re.compile(r"package(-?\d+)?|pkg\d*")
IN_PACKAGE = re.compile(r"(cpu|cores?|uncore|pp[01]|[ep]-?cluster)[-_]?\d*")
NOISE_SHARE = 0.01
"""Of the highest reading."""
SAME_SUM = 1e-3
"""Relative: rounded watts of columns and of their sum."""
_DECIMAL_COMMA = re.compile(r"\s*[-+]?\d*,\d+\s*")


class PowerTable(NamedTuple):
    """Times [n], watts [n, components], and which components are summed."""

    components: tuple[str, ...]
    additive: tuple[bool, ...]
    times_s: Array
    watts: Array


def read_power_csv(path: Path) -> PowerTable:
    """Raises `MeterUnavailableError` with the line and what is wrong in it."""
    import pandas as pd

    try:
        columns = _header(path)
        wanted = [columns.index(TIME), *(i for i, c in enumerate(columns) if c.endswith(WATTS))]
        with warnings.catch_warnings():
            # Fields without a name would be dropped with a warning, or shift the columns.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                path,
                index_col=False,
                header=0,
                names=range(len(columns)),
                dtype=dict.fromkeys(wanted, np.float64),
                encoding="utf-8-sig",
            )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MeterUnavailableError(f"replay: {path} cannot be read ({error})") from error
    except (ValueError, pd.errors.ParserWarning) as error:
        raise MeterUnavailableError(f"replay: {path}: {_first_fault(path, -math.inf) or error}") from error
    numbers = table[wanted].to_numpy(dtype=np.float64)
    times_s, watts = numbers[:, 0], numbers[:, 1:]
    if len(times_s) < 2 or not is_power(times_s, watts):
        fault = _first_fault(path, least_power_w(watts))
        raise MeterUnavailableError(f"replay: {path}: {fault or 'it holds no power over time'}")
    components = [columns[i].removesuffix(WATTS) for i in wanted[1:]]
    return PowerTable(tuple(components), summed(path, components, watts), times_s, watts)


def is_power(times_s: Array, watts: Array) -> bool:
    """Whether these are increasing times and the watts of something that draws power."""
    return bool(
        (np.abs(times_s) < MAX_TIME_S).all()
        and (np.diff(times_s) > 0).all()
        and ((watts >= least_power_w(watts)) & (watts < MAX_W)).all()
    )


def least_power_w(watts: Array) -> float:
    """What a reading may be below 0: noise of the sensor while next to nothing flows."""
    finite = watts[np.isfinite(watts)]
    return -NOISE_SHARE * float(finite.max(initial=0.0))


def summed(path: Path, components: Sequence[str], watts: Array) -> tuple[bool, ...]:
    """Which components add up to the whole. Raises `MeterUnavailableError` where two of them claim to be the whole."""
    wholes = [i for i, name in enumerate(components) if WHOLE.fullmatch(name.lower())]
    if len(wholes) > 1:
        names = " and ".join(components[i] + WATTS for i in wholes)
        raise MeterUnavailableError(f"replay: {path}: {names} are each the whole; keep one of them")
    if not wholes and len(components) > 2:
        every = watts.sum(axis=1)
        wholes = [
            i for i, own in enumerate(watts.T) if own.any() and np.allclose(2 * own, every, rtol=SAME_SUM, atol=0)
        ]
    if wholes:
        return tuple(i == wholes[0] for i in range(len(components)))
    has_package = any(PACKAGE.fullmatch(name.lower()) for name in components)
    return tuple(not (has_package and IN_PACKAGE.fullmatch(name.lower())) for name in components)


def _header(path: Path) -> list[str]:
    """Raises `MeterUnavailableError` where the columns are not those of a recording."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        columns = next(csv.reader(_without_nul(file)), [])
    if TIME in columns and any(c.endswith(WATTS) for c in columns):
        repeated = [c for c in dict.fromkeys(columns) if columns.count(c) > 1 and (c == TIME or c.endswith(WATTS))]
        if not repeated:
            return columns
        raise MeterUnavailableError(f"replay: {path}: line 1: the column {repeated[0]} is there twice; rename one")
    remedy = f"it needs {TIME} and at least one that ends in {WATTS}"
    if len(columns) == 1 and (";" in columns[0] or "\t" in columns[0]):
        remedy = "write commas between columns, and points in numbers"
    told = ", ".join(columns)[:200] or "none"
    raise MeterUnavailableError(f"replay: {path} has the columns {told}; {remedy}")


def _first_fault(path: Path, least_w: float) -> str | None:
    """What is wrong first, with its line; line 1 is the header. None where nothing is."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(_without_nul(file))
        try:
            columns = next(rows, [])
            wanted = [i for i, c in enumerate(columns) if c == TIME or c.endswith(WATTS)]
            before_s, n_rows = -math.inf, 0
            for row in rows:
                if not row:
                    continue
                n_rows += 1
                fault = _fault_of(row, columns, wanted, before_s, least_w)
                if fault is not None:
                    return f"line {rows.line_num}: {fault}"
                before_s = float(row[columns.index(TIME)])
        except csv.Error as error:
            return f"line {rows.line_num}: {error}"
    return None if n_rows > 1 else f"{n_rows} row{'' if n_rows == 1 else 's'} of numbers; at least two rows are needed"


def _fault_of(
    row: Sequence[str], columns: Sequence[str], wanted: Sequence[int], before_s: float, least_w: float
) -> str | None:
    if len(row) > len(columns):
        return f"{len(row)} fields under {len(columns)} names; are its decimals commas, or has a column no name?"
    if len(row) < len(columns):
        return f"{len(row)} fields under {len(columns)} names; was the recording cut off here?"
    for i in wanted:
        name, cell = columns[i], row[i]
        fault = _cell_fault(name, cell, least_w)
        if fault is not None:
            return f"{name} is {cell[:40].strip()!r}, {fault}" if cell.strip() else f"{name} is empty; delete the row"
        if name == TIME and float(cell) <= before_s:
            return f"{name} is {cell[:40]} after {before_s:.10g}; it must increase from row to row"
    return None


def _cell_fault(name: str, cell: str, least_w: float) -> str | None:
    try:
        value = float(cell)
    except ValueError:
        comma = _DECIMAL_COMMA.fullmatch(cell) is not None
        return "a decimal comma; write a point" if comma else "and that is no number; delete the row or correct it"
    if not math.isfinite(value):
        return "no finite number; delete the row, and a gap is seen there"
    if name == TIME:
        return None if abs(value) < MAX_TIME_S else f"beyond {MAX_TIME_S:g} s; is its unit another one?"
    if value < least_w:
        return "and power that is drawn is not negative; turn the sign, or delete rows in which a battery was filled"
    return None if value < MAX_W else f"beyond {MAX_W:g} W; is its unit another one?"


def _without_nul(lines: Iterator[str]) -> Iterator[str]:
    """`csv` refuses a NUL; here it is no number, which is told with its line."""
    return (line.replace("\0", "\N{REPLACEMENT CHARACTER}") for line in lines)
