"""The meter of a machine without one: CPU time of this process x watts of a sheet. Modelled, and labelled so.

    E(t) = idle_w * t + active_w_per_core * cpu_time(t)

It sees how much of the CPU a window used, not how hard (no frequency, no memory traffic, no other process).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, field_validator

from devices.base import Channel, Clock, MeterUnavailableError
from devices.meters.polled import PolledMeter
from devices.toml_records import read_record
from results.records import Record

SHEETS = Path(__file__).parent / "watts"
MAX_NAME, MAX_ORIGIN = 80, 400
"""Characters: both stand in tables."""
MAX_W_PER_CORE = 1_000.0
MAX_IDLE_W = 100_000.0
"""More than any core or machine draws."""
BEST_ACCURACY = 0.01
"""CPU time does not tell watts better than that: it sees no frequency and no memory traffic."""


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
        return [self._sheet.idle_w * self._clock.now_s() + self._sheet.active_w_per_core * time.process_time()]
