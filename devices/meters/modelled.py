"""The meter of a machine without one: CPU time x watts of a sheet. Modelled, and labelled so.

The CPU time is that of this process, and of those that compute for it (`devices.cpu_seconds.counted_as_ours`).

The formula stands in `results.cpu_time`; CPU time and sheet are kept beside the joules. It sees how much of the CPU a
window used, not how hard (no frequency, no memory traffic, no other process).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from devices.base import Channel, Clock, MeterUnavailableError
from devices.cpu_seconds import own_cpu_seconds
from devices.meters.polled import Array, PolledMeter
from devices.toml_records import read_record
from results.cpu_time import CPU_TIME, WattsSheet
from results.records import PowerTrace

SHEETS = Path(__file__).parent / "watts"


def watts_sheet_path(name_or_path: str) -> Path:
    """Of a bundled sheet by name, else the path itself."""
    path = SHEETS / f"{name_or_path}.toml"
    return path if path.is_file() else Path(name_or_path)


def load_watts_sheet(name_or_path: str) -> WattsSheet:
    """A bundled sheet by name, or a TOML file. Raises `MeterUnavailableError`."""
    try:
        path = watts_sheet_path(name_or_path)
        return read_record(WattsSheet, path)
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in SHEETS.glob("*.toml")))
        raise MeterUnavailableError(
            f"watts sheet {name_or_path!r} cannot be read ({error.strerror}); name one of {known}, or a TOML file"
        ) from error
    except ValueError as error:
        raise MeterUnavailableError(f"watts sheet {path} is not valid: {error}") from error


class ModelledMeter(PolledMeter):
    """CPU time of this process x sheet watts."""

    name = "modelled"
    method = "modelled"
    fresh_on_read = True

    def __init__(self, interval_s: float, clock: Clock, sheet: WattsSheet) -> None:
        super().__init__(interval_s, clock)
        self._sheet = sheet
        self._raw: Sequence[PowerTrace] = ()

    def open(self) -> None:
        self.channels = (
            Channel(
                component="cpu",
                kind="counter",
                resolution=time.get_clock_info("process_time").resolution * self._sheet.active_w_per_core,
                relative_accuracy=self._sheet.relative_accuracy,
                note=f"CPU time x {self._sheet.active_w_per_core:g} W per busy core + {self._sheet.idle_w:g} W;"
                f" sheet {self._sheet.name} ({self._sheet.origin})",
            ),
        )

    def read(self) -> Sequence[float]:
        """CPU time, from which `traces` makes joules."""
        return [own_cpu_seconds()]

    def traces(self, times_s: Array, values: Array) -> Sequence[PowerTrace]:
        cpu_s = values[:, 0]
        found = super().traces(times_s, self._sheet.joules(times_s, cpu_s)[:, np.newaxis])
        basis = self._sheet.model_dump_json()
        self._raw = [
            replace(trace, component=CPU_TIME, kind="raw", values=cpu_s, resolution=0.0, basis=basis) for trace in found
        ]
        return found

    def raw_traces(self) -> Sequence[PowerTrace]:
        return self._raw
