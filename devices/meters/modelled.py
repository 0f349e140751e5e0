"""The meter of a machine without one: CPU time of this process x watts of a sheet. Modelled, and labelled so.

    E(t) = idle_w * t + active_w_per_core * cpu_time(t)

It sees how much of the CPU a window used, not how hard (no frequency, no memory traffic, no other process).
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from devices.base import Channel, Clock, MeterUnavailableError
from devices.meters.polled import PolledMeter
from results.records import Record

SHEETS = Path(__file__).parent / "watts"


class WattsSheet(Record):
    """Watts of a machine and where they come from."""

    name: str
    active_w_per_core: float = Field(gt=0)
    idle_w: float = Field(ge=0)
    relative_accuracy: float = Field(ge=0, le=1)
    """Gain error of the whole model, one sigma."""
    origin: str


def watts_sheet_path(name_or_path: str) -> Path:
    """Of a bundled sheet by name, else the path itself."""
    path = SHEETS / f"{name_or_path}.toml"
    return path if path.is_file() else Path(name_or_path)


def load_watts_sheet(name_or_path: str) -> WattsSheet:
    """A bundled sheet by name, or a TOML file. Raises `MeterUnavailableError`."""
    try:
        path = watts_sheet_path(name_or_path)
        return WattsSheet.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in SHEETS.glob("*.toml")))
        raise MeterUnavailableError(
            f"watts sheet {name_or_path!r} cannot be read ({error.strerror}); name one of {known}, or a TOML file"
        ) from error
    except (ValueError, RecursionError) as error:  # no text, no TOML, or other keys and values
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
