"""Trace files: raw readings of meters in Parquet, one row a reading, with all that describes them in the metadata.

    trace     which trace of the file (its description is in metadata `joulebench`, a JSON list)
    time_s    on the clock of whoever recorded
    value     W, or J of a counter

A file holds the traces of several parts: a trial's window and its idle baselines, or a recording's window.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from results.printable import printable
from results.records import PowerTrace
from results.report.files import flush, for_owner

IDLE_BEFORE, WINDOW, IDLE_AFTER = "idle before", "window", "idle after"
"""Parts of a trial that have traces of their own."""


def raw_part(part: str) -> str:
    """Where a part's raw readings are kept, apart from the power that was derived from them."""
    return f"{part}, raw"


_DESCRIPTION, _WINDOW = b"joulebench", b"joulebench window"
_MARKS, _STATES = b"joulebench marks", b"joulebench states"


class TraceFileError(Exception):
    """A file that is missing, holds no traces, or damaged ones. What was derived from them before stands."""


def write_traces(
    path: Path,
    traces: Mapping[str, Sequence[PowerTrace]],
    window: tuple[float, float] | None = None,
    marks: Sequence[str] = (),
    states: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Writes a file of traces by part; it appears whole or not at all. Returns its SHA-256, in hexadecimal.

    window: (start, end) on the clock of the readings, of which some may lie before and behind it. marks: what taints
    it. states: the device's, for people.
    """
    content = trace_file_of(traces, window, marks, states)
    temporary = temporary_of(path)
    try:
        with open(temporary, "wb", opener=for_owner) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush(path.parent)
    return hashlib.sha256(content).hexdigest()


def trace_file_of(
    traces: Mapping[str, Sequence[PowerTrace]],
    window: tuple[float, float] | None = None,
    marks: Sequence[str] = (),
    states: Sequence[Mapping[str, Any]] = (),
) -> memoryview:
    """What a file of traces holds, as `write_traces` writes it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    flat = [(part, trace) for part, own in traces.items() for trace in own]
    described = [{"part": part, **_describe(trace)} for part, trace in flat]
    lengths = [len(trace.times_s) for _, trace in flat]
    table = pa.table(
        {
            "trace": pa.array(np.repeat(np.arange(len(flat), dtype=np.int32), lengths)),
            "time_s": pa.array(np.concatenate([t.times_s for _, t in flat])),
            "value": pa.array(np.concatenate([t.values for _, t in flat])),
        }
    ).replace_schema_metadata(
        {
            _DESCRIPTION: json.dumps(described),
            _WINDOW: json.dumps(window),
            _MARKS: json.dumps(list(marks)),
            _STATES: json.dumps(list(states)),
        }
    )
    whole = pa.BufferOutputStream()
    pq.write_table(table, whole, write_page_checksum=True)
    return memoryview(whole.getvalue())


def temporary_of(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_suffix(".tmp")


def _describe(trace: PowerTrace) -> dict[str, Any]:
    return {k: v for k, v in vars(trace).items() if k not in ("times_s", "values")}


def read_traces(path: Path, part: str = WINDOW, sha256: str | None = None) -> tuple[PowerTrace, ...]:
    """Traces of one part. sha256: that the file must have, where it is known. Raises `TraceFileError`."""
    return _read_parts(path, sha256, part).get(part, ())


def read_parts(path: Path, sha256: str | None = None) -> dict[str, tuple[PowerTrace, ...]]:
    """All traces of a file by part. sha256: that the file must have, where it is known. Raises `TraceFileError`."""
    return _read_parts(path, sha256, None)


def _read_parts(path: Path, sha256: str | None, only: str | None) -> dict[str, tuple[PowerTrace, ...]]:
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise TraceFileError(f"trace file {path} is missing") from error
    except OSError as error:
        raise TraceFileError(f"trace file {path} is damaged ({error})") from error
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise TraceFileError(
            f"trace file {path} is damaged, or that of another trial: its SHA-256 is not the one that was kept"
        )
    return parts_of(content, f"trace file {path}", only)


def parts_of(content: bytes, told: str, only: str | None = None) -> dict[str, tuple[PowerTrace, ...]]:
    """The traces by part that a file of this content holds. told: what it is called. Raises `TraceFileError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # By this thread alone: a worker of pyarrow that lets go of the content while Python ends takes the process with
        # it ("terminate called without an active exception").
        file = pq.ParquetFile(pa.BufferReader(content), pre_buffer=False, page_checksum_verification=True)
        table = file.read(use_threads=False)
        described = json.loads((table.schema.metadata or {})[_DESCRIPTION])
        index, times_s, values = (table[name].to_numpy() for name in ("trace", "time_s", "value"))
        found: dict[str, list[PowerTrace]] = {}
        for i, one in enumerate(described):
            if only is None or one["part"] == only:
                trace = _described_trace(one, times_s[index == i], values[index == i])
                found.setdefault(printable(one["part"]), []).append(trace)
        return {part: tuple(own) for part, own in found.items()}
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError, RecursionError) as error:
        raise TraceFileError(f"{told} is damaged ({error})") from error


def read_window(path: Path) -> tuple[float, float] | None:
    """The window's start and end; None where the file does not say. Raises `TraceFileError`."""
    window = _read_metadata(path, _WINDOW)
    try:
        return None if window is None else (float(window[0]), float(window[1]))
    except (IndexError, ValueError, TypeError, KeyError) as error:
        raise TraceFileError(f"trace file {path} is damaged ({error})") from error


def read_marks(path: Path) -> tuple[str, ...]:
    """What taints the window of a recording; empty where nothing does. Raises `TraceFileError`."""
    return tuple(printable(str(mark)) for mark in _read_list(path, _MARKS))


def read_states(path: Path) -> list[Any]:
    """The device's states around and in the window of a recording. Raises `TraceFileError`."""
    return _read_list(path, _STATES)


def _read_list(path: Path, key: bytes) -> list[Any]:
    found = _read_metadata(path, key)
    if found is not None and not isinstance(found, list):
        raise TraceFileError(f"trace file {path} is damaged ({key.decode()} is no list)")
    return found or []


def _read_metadata(path: Path, key: bytes) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return json.loads((pq.read_schema(path).metadata or {}).get(key, b"null"))
    except FileNotFoundError as error:
        raise TraceFileError(f"trace file {path} is missing") from error
    except (OSError, pa.ArrowException, ValueError, RecursionError) as error:
        raise TraceFileError(f"trace file {path} is damaged ({error})") from error


def _described_trace(
    described: dict[str, Any], times_s: NDArray[np.float64], values: NDArray[np.float64]
) -> PowerTrace:
    fields: dict[str, Any] = {
        k: printable(v) if isinstance(v, str) and k != "basis" else v  # nobody reads a basis but who parses it
        for k, v in described.items()
        if k not in ("part", "gaps_s")
    }
    gaps_s = tuple((start_s, end_s) for start_s, end_s in described["gaps_s"])
    return PowerTrace(times_s=times_s, values=values, gaps_s=gaps_s, **fields)
