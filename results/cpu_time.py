"""CPU time as it was read, and what follows from it: the share of others, and the joules of a machine without a meter.

E(t) = idle_w * t + active_w_per_core * cpu_time(t)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, field_validator

from results.records import PowerTrace, Record
from results.trace_files import TraceFileError, raw_part

MAX_NAME, MAX_ORIGIN = 80, 400
"""Characters: both stand in tables."""
MAX_W_PER_CORE = 1_000.0
MAX_IDLE_W = 100_000.0
"""More than any core or machine draws."""
BEST_ACCURACY = 0.01
"""CPU time does not tell watts better than that: it sees no frequency and no memory traffic."""
TICK_S = 0.01
"""CPU time of processes is counted in these, and rounded."""
CPU_TIME: Final = "cpu, seconds of CPU time"
"""Component of the raw trace beside the joules of component `cpu`."""


class CpuSeconds(Record):
    """CPU time of the CPUs that a process may use: busy, busy for us, and all there was (cores x time)."""

    busy_s: float
    ours_s: float
    available_s: float
    machine_busy_s: float | None = None
    machine_available_s: float | None = None
    """Of all CPUs, where a meter sees what we may not use, too. Both are there, or neither."""

    @property
    def machine(self) -> tuple[float, float] | None:
        """(busy, available) seconds of all CPUs."""
        if self.machine_busy_s is None or self.machine_available_s is None:
            return None
        return self.machine_busy_s, self.machine_available_s


def foreign_share(before: CpuSeconds | None, after: CpuSeconds | None) -> float | None:
    """Busy CPU time that was not ours, over all the CPU time there was; None where it was not read. Of the CPUs that we
    may use and of the machine the larger share: one disturbs times, the other joules. At most: a process that none of
    ours waited for takes its CPU time with it, and then no more than all busy time was others'."""
    if before is None or after is None or after.available_s <= before.available_s:
        return None
    ours_s = max(0.0, after.ours_s - before.ours_s)
    shares = [(after.busy_s - before.busy_s - ours_s) / (after.available_s - before.available_s)]
    if before.machine is not None and after.machine is not None:
        busy_s, available_s = (then_s - first_s for first_s, then_s in zip(before.machine, after.machine, strict=True))
        if available_s > 0:
            shares.append((busy_s - ours_s) / available_s)
    return min(1.0, max(0.0, *shares))


def cores_used(before: CpuSeconds | None, after: CpuSeconds | None, duration_s: float) -> float | None:
    """CPU time that was ours over the time that went by: 1.97 is two busy cores, but for 3 %. None where it was not
    read, or where less was read after than before: a process of ours had gone, and what it took with it. Counted in
    ticks: of a window of a tick it says nothing."""
    if before is None or after is None or duration_s <= 0 or after.ours_s < before.ours_s - TICK_S:
        return None
    return max(0.0, after.ours_s - before.ours_s) / duration_s


class WattsSheet(Record):
    """Watts of a machine and where they come from."""

    name: str = Field(min_length=1, max_length=MAX_NAME)
    active_w_per_core: float = Field(gt=0, le=MAX_W_PER_CORE)
    idle_w: float = Field(ge=0, le=MAX_IDLE_W)
    relative_accuracy: float = Field(ge=BEST_ACCURACY, le=1)
    """Gain error of the whole model, one sigma."""
    origin: str = Field(min_length=1, max_length=MAX_ORIGIN)

    @field_validator("name", "origin")
    @classmethod
    def _is_printable(cls, text: str) -> str:
        if not text.isprintable():
            raise ValueError("must be one line without control characters")
        return text

    def joules(self, times_s: NDArray[np.float64], cpu_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """So far, at each time, of a process that had used so much CPU time by then."""
        return self.idle_w * times_s + self.active_w_per_core * cpu_s


def with_cpu_joules(parts: Mapping[str, Sequence[PowerTrace]], part: str) -> tuple[PowerTrace, ...]:
    """A part's traces, those of modelled CPU joules made again from the CPU time and the watts sheet kept beside them.

    Raises `TraceFileError` for a sheet that is none.
    """
    made = {raw.meter: _cpu_joules(raw) for raw in parts.get(raw_part(part), ()) if raw.component == CPU_TIME}
    return tuple(
        replace(trace, times_s=made[trace.meter][0], values=made[trace.meter][1]) if trace.meter in made else trace
        for trace in parts.get(part, ())
    )


def _cpu_joules(raw: PowerTrace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    try:
        sheet = WattsSheet.model_validate_json(raw.basis or "")
    except ValidationError as error:
        raise TraceFileError(f"{raw.meter} {raw.component}: its watts sheet cannot be read ({error})") from error
    return raw.times_s, sheet.joules(raw.times_s, raw.values)
