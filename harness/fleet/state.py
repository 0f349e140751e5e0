"""How a fleet is doing, for people: what `fleet status` reads and the live view shows."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from results.records import Record
from results.report.files import replace_text

FILE = "fleet.json"
WRITE_EVERY_S = 2.0

DeviceIs = Literal["absent", "describing", "working", "idle", "refused", "offered twice", "not in the plan", "finished"]


class DeviceState(Record):
    device: str
    state: DeviceIs
    host: str | None = None
    """Of its worker."""
    cell: str | None = None
    repeat: int | None = None
    attempt: int | None = None
    since_s: float | None = None
    """How long it has been at this trial."""
    words: str | None = None
    """What its worker said last; why it is refused."""
    n_done: int = 0
    n_lost: int = 0
    """How often it or its worker was lost in the middle of a trial."""


class FleetState(Record):
    name: str
    address: str
    pid: int
    written_at: str
    """UTC, ISO 8601."""
    n_trials: int
    """At most, by the plan."""
    n_done: int
    n_failed: int
    is_over: bool
    devices: tuple[DeviceState, ...]


def write_state(directory: Path, state: FleetState) -> None:
    """Raises `OSError`."""
    replace_text(directory / FILE, state.model_dump_json(indent=1) + "\n")


def read_state(directory: Path) -> FleetState | None:
    """None where the run was never a fleet's. Raises `ValueError` where the file is none of ours."""
    try:
        return FleetState.model_validate_json((directory / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{directory / FILE} cannot be read; it is written again by the next `fleet start`") from error
