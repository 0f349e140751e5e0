"""A hardware sheet: what a machine that is not here costs, per launch, per byte, per FLOP and per second.

Every figure carries the place in the source that it came from and its kind: `stated` there, `fitted` on rows of its
tables, or `assumed` because nobody says. A price without provenance does not load.

What a price was fitted on bounds it (`KernelPrice.fitted_*`): beyond, it is an extrapolation. No sheet states an error
of its seconds or joules: the residual of a fit is about the rows of the fit. What is known stands in `missed_by`.

Time of one operation on a unit (a line in its work, the shape that Table 5 of 000-npumoe follows):

    t = launches * s_per_launch + weight_bytes * s_per_weight_byte + moved_bytes * s_per_moved_byte + flops * s_per_flop

plus `s_per_naive_launch` of the unit for each launch that the framework dispatched by itself; no less than
weight_bytes / memory bandwidth, where the sheet gives one. Energy of the same operation:

    E_unit = busy_w * t + j_per_flop * flops        E_comm = comm_w * t
"""

from __future__ import annotations

import hashlib
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


class Span(Record):
    """What the rows of a fit had of an amount, both ends included."""

    least: float = Field(gt=0, allow_inf_nan=False)
    most: float = Field(allow_inf_nan=False)

    @model_validator(mode="after")
    def _rises(self) -> Span:
        if self.least > self.most:
            raise ValueError(f"least {self.least:g} is above most {self.most:g}; swap them")
        return self


class KernelPrice(Record):
    """Seconds of one kind of work on one unit. An absent term costs nothing; at least one is there."""

    s_per_launch: SheetFigure | None = None
    s_per_weight_byte: SheetFigure | None = None
    s_per_moved_byte: SheetFigure | None = None
    s_per_flop: SheetFigure | None = None
    fitted_flops_per_weight_byte: Span | None = None
    """Least and most in the rows that the price was fitted on: with two bytes a value, the rows that a weight meets.
    None: of a price that no such rows bound, because it is none of weights, or because nobody compared it."""
    fitted_weight_bytes: Span | None = None
    """Least and most of one launch in those rows."""

    @model_validator(mode="after")
    def _has_a_term(self) -> KernelPrice:
        if not self.model_fields_set & set(_TERMS):
            raise ValueError(f"a price without terms; give at least one of {', '.join(_TERMS)}")
        return self

    def is_fitted_at(self, launches: int, weight_bytes: float, flops: float) -> bool:
        """Whether the rows of the fit had launches such as these, as far as the sheet tells."""
        if launches == 0 or not (self.fitted_flops_per_weight_byte or self.fitted_weight_bytes):
            return True
        if weight_bytes == 0:
            return False
        amounts = (
            (self.fitted_flops_per_weight_byte, flops / weight_bytes),
            (self.fitted_weight_bytes, weight_bytes / launches),
        )
        return all(known is None or known.least <= amount <= known.most for known, amount in amounts)

    def seconds(self, launches: int, weight_bytes: float, moved_bytes: float, flops: float) -> float:
        terms = (
            (self.s_per_launch, launches),
            (self.s_per_weight_byte, weight_bytes),
            (self.s_per_moved_byte, moved_bytes),
            (self.s_per_flop, flops),
        )
        return sum(figure.value * amount for figure, amount in terms if figure is not None)


_TERMS = ("s_per_launch", "s_per_weight_byte", "s_per_moved_byte", "s_per_flop")


class Misses(Record):
    """Modelled over stated, less one, of what the source states and no fit used: the least and the most of them."""

    least: float = Field(gt=-1, allow_inf_nan=False)
    most: float = Field(allow_inf_nan=False)
    origin: str = Field(min_length=1)

    @property
    def words(self) -> str:
        return f"{100 * self.least:+.0f} to {100 * self.most:+.0f} %"


class MissedBy(Record):
    """How far ratios between arms came out from those of the source."""

    seconds: Misses
    joules: Misses


class UnitSheet(Record):
    """A compute unit. Its energy lands in the component of the same name."""

    busy_w: SheetFigure
    """Power while the unit works, whatever it works on."""
    j_per_flop: SheetFigure | None = None
    s_per_naive_launch: SheetFigure | None = None
    """On top of a launch whose unit the framework itself chose at run time (Core ML naive); None: not priced."""
    relative_accuracy: SheetFigure
    """Energy residual of the fit, root mean square over the rows used. No error of its joules elsewhere."""
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
    only_for: str | None = Field(default=None, min_length=1)
    """The one thing that its prices are good for; None of a sheet that stands for its machine."""
    graph_bytes_limit: SheetFigure | None = None
    """A graph with more weight bytes than this runs on the CPU instead of the NPU."""
    idle_w: SheetFigure | None = None
    """Power of the machine doing nothing, booked on `cpu`; None where nobody says."""
    missed_by: MissedBy | None = None
    """None where nothing was compared with its source."""
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


def sheet_sha256(name: str) -> str:
    """Of the file as it is now. Raises `OSError`."""
    return hashlib.sha256(sheet_path(name).read_bytes()).hexdigest()


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
