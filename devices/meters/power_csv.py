"""A CSV of recorded power: `time_s`, and a column that ends in `_w` for each component. Refused with the line at fault.

Which columns are summed: `devices.meters.power_columns`. What it may say of its values: `devices.meters.power_words`.
"""

from __future__ import annotations

import csv
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import MeterUnavailableError
from devices.meters.power_columns import NO_DRAW, SAYS_POWER, summed
from devices.meters.power_words import COMMENT, PowerWords, read_words, refuse_contradicted

Array = NDArray[np.float64]

TIME = "time_s"
WATTS = "_w"
MAX_W = 1e6
"""More than any machine that a recording is of: a megawatt."""
MAX_TIME_S = 1e11
"""Unix time, too, is below for another 3000 years."""
NOISE_SHARE = 0.01
"""Of the highest reading of the same column."""
_DECIMAL_COMMA = re.compile(r"\s*[-+]?\d*,\d+\s*")


class PowerTable(NamedTuple):
    """Times [n], watts [n, components], which components are summed, and what is told of each one's watts."""

    components: tuple[str, ...]
    additive: tuple[bool, ...]
    times_s: Array
    watts: Array
    words: tuple[PowerWords, ...]


def read_power_csv(path: Path) -> PowerTable:
    """Raises `MeterUnavailableError` with the line and what is wrong in it."""
    import pandas as pd

    try:
        file_words = read_words(path)
        columns = _header(path)
        wanted = [columns.index(TIME), *(i for i, c in enumerate(columns) if _is_watts(c))]
        with warnings.catch_warnings():
            # Fields without a name would be dropped with a warning, or shift the columns.
            warnings.simplefilter("error", pd.errors.ParserWarning)
            table = pd.read_csv(
                path,
                index_col=False,
                header=0,
                skiprows=file_words.n_lines,
                names=range(len(columns)),
                dtype=dict.fromkeys(wanted, np.float64),
                encoding="utf-8-sig",
            )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise MeterUnavailableError(f"replay: {path} cannot be read ({error})") from error
    except (ValueError, pd.errors.ParserWarning) as error:
        raise MeterUnavailableError(f"replay: {path}: {_first_fault(path) or error}") from error
    numbers = table[wanted].to_numpy(dtype=np.float64)
    times_s, watts = numbers[:, 0], numbers[:, 1:]
    # Pandas reads True as 1.
    if len(times_s) < 2 or not is_power(times_s, watts) or _has_truth_values(path, columns, wanted):
        fault = _first_fault(path, least_power_w(watts).tolist())
        raise MeterUnavailableError(f"replay: {path}: {fault or 'a column has less than 0 W on average'}")
    components = [columns[i][: -len(WATTS)] for i in wanted[1:]]
    names = [columns[i] for i in wanted[1:]]
    words = file_words.of_columns(names)
    refuse_contradicted(path, words, names, times_s, watts)
    return PowerTable(tuple(components), summed(path, components, watts), times_s, watts, words)


def is_power(times_s: Array, watts: Array) -> bool:
    """Whether these are increasing times and the watts of something that draws power."""
    return bool(
        (np.abs(times_s) < MAX_TIME_S).all()
        and (np.diff(times_s) > 0).all()
        and ((watts >= least_power_w(watts)) & (watts < MAX_W)).all()
        and (watts.mean(axis=0) >= 0).all()
    )


def least_power_w(watts: Array) -> Array:
    """What readings [n] or [n, components] may be below 0: noise of the sensor while next to nothing flows."""
    highest_w = np.where(np.isfinite(watts), watts, 0.0).max(axis=0, initial=0.0)
    return np.asarray(-NOISE_SHARE * highest_w)


def _header(path: Path) -> list[str]:
    """Raises `MeterUnavailableError` where the columns are not those of a recording."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(_lines(file))
        columns = _columns(rows)
    where = f"replay: {path}: line {rows.line_num}"
    if WATTS in columns:
        raise MeterUnavailableError(f"{where}: a column is called {WATTS}; write its part, as in cpu_w")
    if TIME in columns and any(map(_is_watts, columns)):
        repeated = [c for c in dict.fromkeys(columns) if columns.count(c) > 1 and (c == TIME or _is_watts(c))]
        if repeated:
            raise MeterUnavailableError(f"{where}: the column {repeated[0]} is there twice; rename one")
        for column in columns:
            _refuse_column(where, column)
        return columns
    remedy = f"it needs {TIME} and at least one that ends in {WATTS}"
    if len(columns) == 1 and (";" in columns[0] or "\t" in columns[0]):
        remedy = "write commas between columns, and points in numbers"
    told = ", ".join(columns)[:200] or "none"
    raise MeterUnavailableError(f"replay: {path} has the columns {told}; {remedy}")


def _is_watts(column: str) -> bool:
    return column.lower().endswith(WATTS)


def _refuse_column(where: str, column: str) -> None:
    """A power that would be dropped for its name, or a limit that would be added for its name."""
    words = frozenset(re.findall(r"[a-zµ]+", column.lower()))
    is_draw = not words & NO_DRAW
    if _is_watts(column):
        if not is_draw:
            raise MeterUnavailableError(
                f"{where}: {column} is named as a limit or an extreme, not as what was drawn; delete it"
            )
        return
    if is_draw and (words & SAYS_POWER or "power" in column.lower() or "watt" in column.lower()):
        raise MeterUnavailableError(
            f"{where}: {column} is named as a power, and only columns in watts that end in {WATTS} are"
            f" read; write watts and call it PART{WATTS}, as in gpu_w, or delete it"
        )


def _has_truth_values(path: Path, columns: Sequence[str], wanted: Sequence[int]) -> bool:
    """A column of nothing but these is taken for numbers, so the first row shows it."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(_lines(file))
        _columns(rows)
        first = next((row for row in rows if row), [""] * len(columns))
    return any(first[i].strip().lower() in ("true", "false") for i in wanted)


def _first_fault(path: Path, least_w: Sequence[float] | None = None) -> str | None:
    """What is wrong first, with its line in the file. None where nothing is. least_w: of each component."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = csv.reader(_lines(file))
        try:
            columns = _columns(rows)
            wanted = [i for i, c in enumerate(columns) if c == TIME or _is_watts(c)]
            powers = [i for i in wanted if columns[i] != TIME]
            least_of = dict(zip(powers, least_w or [-math.inf] * len(powers), strict=True))
            before_s, n_rows = -math.inf, 0
            for row in rows:
                if not row:
                    continue
                n_rows += 1
                fault = _fault_of(row, columns, wanted, before_s, least_of)
                if fault is not None:
                    return f"line {rows.line_num}: {fault}"
                before_s = float(row[columns.index(TIME)])
        except csv.Error as error:
            return f"line {rows.line_num}: {error}"
    return None if n_rows > 1 else f"{n_rows} row{'' if n_rows == 1 else 's'} of numbers; at least two rows are needed"


def _fault_of(
    row: Sequence[str], columns: Sequence[str], wanted: Sequence[int], before_s: float, least_of: Mapping[int, float]
) -> str | None:
    if len(row) > len(columns):
        return f"{len(row)} fields under {len(columns)} names; are its decimals commas, or has a column no name?"
    if len(row) < len(columns):
        return f"{len(row)} fields under {len(columns)} names; was the recording cut off here?"
    for i in wanted:
        name, cell = columns[i], row[i]
        fault = _cell_fault(name, cell, least_of.get(i, -math.inf))
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


def _lines(file: Iterator[str]) -> Iterator[str]:
    """Comments before the header are empty. `csv` refuses a NUL; here it is no number, which is told with its line."""
    is_before = True
    for line in file:
        is_before = is_before and line.startswith(COMMENT)
        yield "\n" if is_before else line.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _columns(rows: Iterator[list[str]]) -> list[str]:
    return [c.strip() for c in next((row for row in rows if row), [])]
