"""The operations of a window as a raw trace: when each began, and which of the distinct ones, listed beside, it was.

Two columns and a short list, where every operation in words would take ten times the room. Beside each in the list
stands how long it takes (where units work at the same time, an operation does not end where the next one begins), and
whether the rows that its price was fitted on had any such.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from devices.models.operation import Operation, is_fitted
from devices.models.sheet import Sheet
from results.operations import FITTED, OPERATIONS, SECONDS
from results.records import PowerTrace
from results.trace_files import WINDOW, TraceFileError, raw_part

_DISTINCT = TypeAdapter(list[Operation])


class Ran(NamedTuple):
    """Operation i was `distinct[places[i]]`, and began at `starts_s[i]`."""

    starts_s: NDArray[np.float64]
    places: NDArray[np.int64]
    distinct: Sequence[Operation]


def operations_trace(
    meter: str,
    sheet: Sheet,
    starts_s: NDArray[np.float64],
    places: NDArray[np.int32],
    distinct: Sequence[tuple[Operation, float]],
) -> tuple[PowerTrace, ...]:
    """Of kind `raw`; empty where nothing ran. distinct: with the seconds of each."""
    if not distinct:
        return ()
    basis = json.dumps([{**asdict(one), SECONDS: seconds, FITTED: is_fitted(sheet, one)} for one, seconds in distinct])
    values = places.astype(np.float64)
    return (PowerTrace(meter, OPERATIONS, "raw", "modelled", starts_s, values, sample_interval_s=0.0, basis=basis),)


def operations_of(parts: Mapping[str, Sequence[PowerTrace]]) -> Ran | None:
    """What ran in a trial's window; None where that was not kept. Raises `TraceFileError`."""
    kept = [trace for trace in parts.get(raw_part(WINDOW), ()) if trace.component == OPERATIONS]
    if not kept:
        return None
    try:
        distinct = _DISTINCT.validate_json(kept[0].basis or "")
    except ValidationError as error:
        raise TraceFileError(f"the list of operations cannot be read ({error})") from error
    places = kept[0].values.astype(np.int64)
    if np.any((places < 0) | (places >= len(distinct))):
        raise TraceFileError(f"an operation is none of the {len(distinct)} that are listed")
    return Ran(kept[0].times_s, places, distinct)
