"""A hardware sheet: what a machine that is not here costs, per launch, per byte, per FLOP and per second.

Every figure carries the place in the source that it came from and its kind: `stated` there, `fitted` on rows of its
tables, or `assumed` because nobody says. A price without provenance does not load.

Time of one operation on a unit (a line in its work, the shape that Table 5 of 000-npumoe follows):

    t = launches * s_per_launch + weight_bytes * s_per_weight_byte + moved_bytes * s_per_moved_byte + flops * s_per_flop

plus `s_per_naive_launch` of the unit for each launch that the framework dispatched by itself; no less than
weight_bytes / memory bandwidth, where the sheet gives one. Energy of the same operation:

    E_unit = busy_w * t + j_per_flop * flops        E_comm = comm_w * t
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from devices.base import DeviceError, Unit
from devices.toml_records import parse_record
from results.records import Record

Kernel = Literal[
    "attention",
    "expert_ffn",
    "router",
    "gather_dynamic",
    "gather_static",
    "padding",
    "scatter",
    "residual",
    "norm",
    "lm_head",
]
"""Price lists of a unit. Gather has two: into buffers sized after routing, or into buffers that stand ready."""


COMM = "comm"
"""The component that holds what the source books as communication; every other component is a unit."""


class SheetFigure(Record):
    """One number of the sheet with its provenance."""

    value: float = Field(ge=0, allow_inf_nan=False)
    kind: Literal["stated", "fitted", "assumed"]
    origin: str = Field(min_length=1)


class KernelPrice(Record):
    """Seconds of one kind of work on one unit. An absent term costs nothing; at least one is there."""

    s_per_launch: SheetFigure | None = None
    s_per_weight_byte: SheetFigure | None = None
    s_per_moved_byte: SheetFigure | None = None
    s_per_flop: SheetFigure | None = None

    @model_validator(mode="after")
    def _has_a_term(self) -> KernelPrice:
        if not self.model_fields_set:
            raise ValueError(f"a price without terms; give at least one of {', '.join(type(self).model_fields)}")
        return self

    def seconds(self, launches: int, weight_bytes: float, moved_bytes: float, flops: float) -> float:
        terms = (
            (self.s_per_launch, launches),
            (self.s_per_weight_byte, weight_bytes),
            (self.s_per_moved_byte, moved_bytes),
            (self.s_per_flop, flops),
        )
        return sum(figure.value * amount for figure, amount in terms if figure is not None)


class UnitSheet(Record):
    """A compute unit. Its energy lands in the component of the same name."""

    busy_w: SheetFigure
    """Power while the unit works, whatever it works on."""
    j_per_flop: SheetFigure | None = None
    s_per_naive_launch: SheetFigure | None = None
    """On top of a launch whose unit the framework itself chose at run time (Core ML naive); None: not priced."""
    relative_accuracy: SheetFigure
    """Energy residual of the fit, root mean square over the rows used: one sigma of the component's counter."""
    kernels: dict[Kernel, KernelPrice]
    only_ratios: str | None = Field(default=None, min_length=1)
    """Why its prices are good for ratios of single operations alone; None where a whole model can be priced on it."""


class MemorySheet(Record):
    """The memory that all units share, and what the source books as communication."""

    comm_w: SheetFigure
    """Power of the component `comm` while any unit works."""
    relative_accuracy: SheetFigure
    bytes_per_s: SheetFigure | None = None
    """Bandwidth that no unit's weight reads can beat."""


class Sheet(Record):
    """A machine: units, shared memory, limits. Read by `load_sheet`."""

    name: str
    description: str
    source: str
    graph_bytes_limit: SheetFigure | None = None
    """A graph with more weight bytes than this runs on the CPU instead of the NPU."""
    idle_w: SheetFigure | None = None
    """Power of the machine doing nothing, booked on `cpu`; None where nobody says."""
    units: dict[Unit, UnitSheet]
    memory: MemorySheet

    @property
    def components(self) -> tuple[str, ...]:
        """What has joules of its own."""
        return (*self.units, COMM)

    @model_validator(mode="after")
    def _has_a_cpu(self) -> Sheet:
        if "cpu" not in self.units:
            raise ValueError(f"units are {sorted(self.units)}; a sheet needs `cpu`, where everything can fall back to")
        return self


_FOLDER = resources.files("devices.models") / "sheets"


def available_sheets() -> tuple[str, ...]:
    """Names that `load_sheet` takes."""
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))
    )


def sheet_path(name: str) -> Path:
    """Of a sheet of this package."""
    return Path(str(_FOLDER / f"{name}.toml"))


def load_sheet(name: str) -> Sheet:
    """Reads the sheet `name` of this package. Raises `DeviceError` when there is none, or when it is not whole."""
    if name not in available_sheets():
        raise DeviceError(f"no hardware sheet {name!r}; available: {', '.join(available_sheets())}")
    return parse_sheet((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), name)


def parse_sheet(text: str, name: str) -> Sheet:
    """A sheet from TOML. Raises `DeviceError` that lists every missing, unknown or malformed key."""
    try:
        sheet = parse_record(Sheet, text)
    except ValueError as error:
        raise DeviceError(f"sheet {name}: {error}; the keys are the fields of `devices.models.sheet.Sheet`") from error
    if sheet.name != name:
        raise DeviceError(f"sheet {name}: calls itself {sheet.name!r}; name the file after it")
    return sheet
