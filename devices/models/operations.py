"""The operations of a window as raw traces: when each began, and which of the distinct ones, listed beside, it was.

Two columns and a short list, where every operation in words would take ten times the room. Beside each in the list
stands how long it takes (where units work at the same time, an operation does not end where the next one begins), and
whether the rows that its price was fitted on had any such. Where operations name others that they wait for, two traces
more say in which order they were asked, and how long each waited.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from devices.models.operation import Operation, is_fitted
from devices.models.sheet import Sheet
from devices.models.timeline import Launched, Program
from results.ran_operations import FITTED, LAUNCH_BEGINS, LAUNCH_ENDS, OPERATIONS, ORDER, SECONDS, WAITED
from results.records import PowerTrace
from results.trace_files import WINDOW, TraceFileError, raw_part

_DISTINCT = TypeAdapter(list[Operation])


class Ran(NamedTuple):
    """Operation i was `distinct[places[i]]`, began at `starts_s[i]`, and was asked as number `order[i]`."""

    starts_s: NDArray[np.float64]
    places: NDArray[np.int64]
    distinct: Sequence[Operation]
    order: NDArray[np.int64]

    def program(self) -> Iterator[Operation]:
        """As they were asked."""
        return (self.distinct[place] for place in self.places[np.argsort(self.order)].tolist())


def operations_trace(
    meter: str,
    sheet: Sheet,
    starts_s: NDArray[np.float64],
    places: NDArray[np.int32],
    distinct: Sequence[tuple[Operation, float]],
    program: Program | None = None,
    launched: Launched | None = None,
) -> tuple[PowerTrace, ...]:
    """Of kind `raw`; empty where nothing ran. distinct: with the seconds of each. program, launched: of
    `Timeline`."""
    if not distinct:
        return ()
    basis = json.dumps([{**asdict(one), SECONDS: seconds, FITTED: is_fitted(sheet, one)} for one, seconds in distinct])
    columns: list[tuple[str, NDArray[Any], str | None]] = [(OPERATIONS, places, basis)]
    if program is not None:
        columns += [(ORDER, program.order, None), (WAITED, program.waited_s, None)]
    if launched is not None:
        columns += [(LAUNCH_BEGINS, launched.begins_s, None), (LAUNCH_ENDS, launched.ends_s, None)]
    return tuple(
        PowerTrace(
            meter, name, "raw", "modelled", starts_s, values.astype(np.float64), sample_interval_s=0.0, basis=own
        )
        for name, values, own in columns
    )


def operations_of(parts: Mapping[str, Sequence[PowerTrace]]) -> Ran | None:
    """What ran in a trial's window; None where that was not kept. Raises `TraceFileError`."""
    raw = parts.get(raw_part(WINDOW), ())
    kept = [trace for trace in raw if trace.component == OPERATIONS]
    if not kept:
        return None
    try:
        distinct = _DISTINCT.validate_json(kept[0].basis or "")
    except ValidationError as error:
        raise TraceFileError(f"the list of operations cannot be read ({error})") from error
    places = kept[0].values.astype(np.int64)
    if np.any((places < 0) | (places >= len(distinct))):
        raise TraceFileError(f"an operation is none of the {len(distinct)} that are listed")
    asked = next((trace.values.astype(np.int64) for trace in raw if trace.component == ORDER), np.arange(len(places)))
    if not np.array_equal(np.sort(asked), np.arange(len(places))):
        raise TraceFileError(f"the order of {len(places)} operations cannot be read")
    return Ran(kept[0].times_s, places, distinct, asked)
