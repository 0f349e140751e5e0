"""A hardware sheet: what a machine that is not here costs, per launch, per byte, per FLOP and per second.

Every figure carries the place in the source that it came from and its kind: `stated` there, `fitted` on rows of its
tables, or `assumed` because nobody says. A price without provenance does not load.

What a price was fitted on bounds it (`KernelPrice.fitted_*`): beyond, it is an extrapolation. No sheet states an error
of its seconds or joules: the residual of a fit is about the rows of the fit. What is known stands in `missed_by`.

Time of one operation on a unit, where the sheet has a price of its kernel (a line in its work, the shape that Table 5
of 000-npumoe follows):

    t = launches * s_per_launch + weight_bytes * s_per_weight_byte + moved_bytes * s_per_moved_byte + flops * s_per_flop

plus `s_per_naive_launch` of the unit for each launch that the framework dispatched by itself; no less than
weight_bytes / memory bandwidth, where the sheet gives one. Where it has none but a roofline of the unit:

    t = launches * s_per_launch + max((weight_bytes + moved_bytes) / (bytes_per_s * bytes_share),
                                      flops / (flops_per_s * flops_share))

with the shares of the peaks that a launch of that shape reaches (`devices.models.efficiency`), 1 where none are given.
Over a link see `devices.models.links`. Energy of an operation on a unit, of what its units book as communication, and
of a unit that waits:

    E_unit = busy_w * t + j_per_flop * flops        E_comm = comm_w * t
    E_waiting = waiting_w * t                       E_idle = idle_w * t

Watts that are not stated are not 0: joules of that component, and of the whole, are missing then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, field_validator, model_validator

from devices.base import DeviceError, Unit
from devices.models import in_place
from devices.models.core_clusters import ClusterSheet, DecodeSheet, StateSheet
from devices.models.figures import FitMiss, MissedBy, QueueDepth, Rate, Roofline, RowTile
from devices.models.figures import Kernel as Kernel
from devices.models.figures import KernelPrice as KernelPrice
from devices.models.figures import SheetFigure as SheetFigure
from devices.models.links import NUMBERED, End, LinkSheet, PlainName
from devices.models.sheet_faults import MOST_ALIKE, MOST_LINKS, MOST_UNITS, faults
from devices.toml_records import RecordError, parse_toml, read_text, record_of, with_faults
from results.records import BACK, COMM, Record


class UnitSheet(Record):
    """A compute unit, or `count` units alike. Its energy lands in the component of the same name."""

    count: int | None = Field(default=None, ge=1, le=MOST_ALIKE)
    """Of a table such as [units.ndp]: it stands for ndp:0 to ndp:count-1. None of a table of one unit."""
    busy_w: SheetFigure | None = None
    """Power while the unit works, whatever it works on. None: not stated, and its joules are missing."""
    waiting_w: SheetFigure | None = None
    """Power while it does nothing and another unit or link works, which keeps it awake. None: as `idle_w`."""
    idle_w: SheetFigure | None = None
    """Power while nothing works on the whole machine, where `busy_w` is stated. None: not stated, and counted as 0."""
    queue_depth: QueueDepth | None = None
    """Launches that it is given before they are done, so that their cost hides behind its own work; see
    `devices.models.queues`. None: 1, each launch waits for the one before."""
    j_per_flop: SheetFigure | None = None
    s_per_naive_launch: SheetFigure | None = None
    """On top of a launch whose unit the framework itself chose at run time (Core ML naive); None: not priced."""
    row_tile: RowTile | None = None
    """Rows of an expert that its arithmetic takes at once: fewer take as long. None: any number takes its own time."""
    query_tile: RowTile | None = None
    """Queries of a prompt that scores take at once: they are multiplied with all keys that the last of them sees. None:
    each with its own. Of a sheet that prices `scores`."""
    relative_accuracy: SheetFigure | None = None
    """Energy residual of the fit, root mean square over the rows used. No error of its joules elsewhere."""
    kernels: dict[Kernel, KernelPrice] = Field(default_factory=dict)
    roofline: Roofline | None = None
    """Prices what has no price among `kernels`. Without either the unit holds weights, and computes nothing."""
    only_ratios: str | None = Field(default=None, min_length=1)
    """Why its prices are good for ratios of single operations alone; None where a whole model can be priced on it."""

    def price(self, kernel: Kernel) -> KernelPrice | Roofline | None:
        """None where the sheet does not price such work here."""
        return self.kernels.get(kernel, self.roofline)


class MemorySheet(Record):
    """The memory that all units share, and what the source books as communication."""

    comm_w: SheetFigure
    """Power of the component `comm` while any unit works."""
    relative_accuracy: SheetFigure
    bytes_per_s: Rate | None = None
    """Bandwidth that no unit's weight reads can beat."""
    capacity_bytes: Rate | None = None
    """That it holds. None: not stated, and nothing is checked."""


FITTED_BY = "`joulebench model fit`"
"""How the source of a sheet begins that was fitted on the machine itself."""


class Sheet(Record):
    """A machine: units, what lies between them, limits. Read by `load_sheet`."""

    name: str = Field(min_length=1)
    description: str = Field(min_length=1)
    source: str = Field(min_length=1)
    only_for: str | None = Field(default=None, min_length=1)
    """The one thing that its prices are good for; None of a sheet that stands for its machine."""
    graph_bytes_limit: SheetFigure | None = None
    """A graph with more weight bytes than this runs on the CPU instead of the NPU."""
    idle_w: SheetFigure | None = None
    """Power of the machine doing nothing, booked on `cpu`; None where nobody says."""
    missed_by: MissedBy | None = None
    """None where nothing was compared with its source."""
    fitted_weights: str | None = Field(default=None, min_length=1)
    """The form of the weights that its prices were fitted with; None where they were fitted on none."""
    fitted_value_bytes: float | None = Field(default=None, gt=0)
    """Of an activation, a key or a value, as the fit counted them. None: there was no fit here, or it was one from
    before this was kept, which counted other bytes than sheets price."""
    fit_misses: dict[End, dict[Literal["prefill", "decode"], FitMiss]] = Field(default_factory=dict)
    """By unit and phase. Empty where no whole requests were fitted on. Others may be missed by more."""
    units: dict[End, UnitSheet] = Field(max_length=MOST_UNITS)
    """Read: each unit by its own name, those that one table stands for too."""
    stands_in: dict[End, End] = Field(default_factory=dict)
    """By a unit that this machine lacks: its own unit that computes those calls, one after another with its own."""
    memory: MemorySheet | None = None
    """None of units with memories of their own."""
    memories: dict[End, Rate] = Field(default_factory=dict)
    """Bytes that a unit's own memory holds; `ndp`: of each."""
    links: dict[PlainName, LinkSheet] = Field(default_factory=dict, max_length=MOST_LINKS)
    clusters: dict[PlainName, ClusterSheet] = Field(default_factory=dict)
    """Of core:0 and those after it, the biggest cores first. Empty where the source tells no cores apart."""
    states: dict[PlainName, StateSheet] = Field(default_factory=dict)
    """How its source saw it decode, on which cores."""
    decode: DecodeSheet | None = None
    """What decoding on a selection of cores gives; None where nobody measured two of them."""

    @property
    def is_fitted_here(self) -> bool:
        """Whether `joulebench model fit` made it."""
        return self.source.startswith(FITTED_BY)

    @property
    def why_unpriced(self) -> str | None:
        """Why it prices no technique at all; None where it prices some."""
        if not self.clusters or any(unit.price("attention") for unit in self.units.values()):
            return None
        return "has the speeds of choices of cores, for `joulebench reproduce`, and prices no technique"

    @property
    def fit_words(self) -> str | None:
        """How well its prices meet what they were fitted on; None where that was not asked."""
        phases = {"prefill": "prefill", "decode": "a decoded token"}
        told = [
            f"{f'{unit}: ' if len(self.fit_misses) > 1 else ''}{phases[phase]} by {miss.words}"
            for unit, by_phase in self.fit_misses.items()
            for phase, miss in by_phase.items()
        ]
        return f"the prices miss whole requests that they were fitted on: {', '.join(told)}" if told else None

    @property
    def components(self) -> tuple[str, ...]:
        """What has joules of its own."""
        return (*self.units, *self.links, *((COMM,) if self.memory is not None else ()))

    def has_watts(self, component: str) -> bool:
        """Whether the sheet states what its joules follow from."""
        if component in self.units:
            return self.units[component].busy_w is not None
        return component not in self.links or self.links[component].pj_per_bit is not None

    def component_of(self, resource: str) -> str:
        """Of a unit, or of a link's direction: under which its joules are booked."""
        return resource if resource in self.units else resource.removesuffix(BACK)

    def computing(self, unit: Unit) -> Unit:
        """Which of its units computes what a plan gives to that one."""
        return self.stands_in.get(unit, unit)

    def capacity_bytes(self, unit: Unit) -> float | None:
        """Of its own memory; None where the sheet does not say."""
        found = self.memories.get(unit, self.memories.get(unit.partition(":")[0]))
        return None if found is None else found.value

    def resource_between(self, source: Unit, target: Unit) -> str | None:
        """The link on which bytes travel, in that direction; None where none joins the two."""
        for name, link in self.links.items():
            direction = link.direction(source, target)
            if direction is not None:
                return name + BACK if direction == "back" and link.kind == "duplex" else name
        return None

    def are_alike(self, units: Sequence[Unit]) -> bool:
        """Whether these units, all of the sheet's own, have the same figures, and the same links with all others."""
        first, *others = units
        rest = [unit for unit in self.units if unit not in units]
        return all(
            self.units[one] == self.units[first]
            and all(
                self.resource_between(*way) == self.resource_between(*of_first)
                for unit in rest
                for way, of_first in (((one, unit), (first, unit)), ((unit, one), (unit, first)))
            )
            for one in others
        )

    def link_of(self, resource: str) -> LinkSheet | None:
        """None of a unit."""
        return self.links.get(resource.removesuffix(BACK))

    @model_validator(mode="wrap")
    @classmethod
    def _with_faults_between_tables(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return with_faults(cls, raw, handler, faults(raw) if isinstance(raw, Mapping) else ())

    @field_validator("units")
    @classmethod
    def _numbered(cls, tables: dict[End, UnitSheet]) -> dict[End, UnitSheet]:
        """Each unit by its own name."""
        found = dict[End, UnitSheet]()
        for name, unit in tables.items():
            names = [f"{name}:{i}" for i in range(unit.count or 0)] if name in NUMBERED else [name]
            found |= dict.fromkeys(names, unit)
        return found


SheetRef = str | Path
"""A sheet of this package by its name, or a user's by its file."""
MOST_TOLD = 20
OF_A_USER = "a sheet of your own is a file, and its name ends in .toml"
_FOLDER = resources.files("devices.models") / "sheets"


KEYS: Final = "`joulebench sheets a100 --out NEW.toml` writes one with all keys"


class SheetError(DeviceError):
    """A sheet that is none. problems: one line each. hint: where to read on; no problem of its own. lines: both, the
    hint behind the last problem."""

    def __init__(self, which: SheetRef, problems: Sequence[str], hint: str = "") -> None:
        self.problems = tuple(problems)
        more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
        *others, last = *problems[:MOST_TOLD], *more
        self.lines = (*others, f"{last}; {hint}" if hint else last)
        super().__init__(f"sheet {which}: {'; '.join(self.lines)}")


@cache
def available_sheets() -> tuple[str, ...]:
    """Names that `load_sheet` takes."""
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))
    )


def sheet_path(ref: SheetRef) -> Path:
    return ref if isinstance(ref, Path) else Path(str(_FOLDER / f"{ref}.toml"))


def sheet_sha256(ref: SheetRef) -> str:
    """Of the file as it is now. Raises `OSError`."""
    return hashlib.sha256(sheet_path(ref).read_bytes()).hexdigest()


def load_sheet(ref: SheetRef) -> Sheet:
    """Raises `SheetError` with every problem of a sheet that is not there or not whole."""
    if isinstance(ref, Path):
        return _users_sheet(ref)
    if ref not in available_sheets():
        known = f"no hardware sheet has this name; available: {', '.join(available_sheets())}"
        raise SheetError(ref, [known], OF_A_USER)
    in_place.asked.add(ref)
    if ref in in_place.changed:
        return in_place.changed[ref]
    return parse_sheet(sheet_path(ref).read_text(encoding="utf-8"), ref)


def name_taken(name: str) -> str | None:
    """Why a user's sheet cannot be called so; None: it can."""
    if name not in available_sheets():
        return None
    return f"{name} is a sheet of joulebench; give the file another name, and the sheet in it the same"


def _users_sheet(path: Path) -> Sheet:
    names = [taken] if (taken := name_taken(path.stem)) is not None else []
    try:
        text = read_text(path)
    except OSError as error:
        raise SheetError(path, [*names, f"cannot be read ({error.strerror})"]) from error
    except ValueError as error:  # no text of a sheet's size, or a path that none can be
        raise SheetError(path, [*names, str(error)]) from error
    return parse_sheet(text, path.stem, path, names)


def parse_sheet(text: str, name: str, ref: SheetRef | None = None, known: Sequence[str] = ()) -> Sheet:
    """A sheet from TOML. ref: where it stands, for the error. known: what is wrong with its name. Raises
    `SheetError`."""
    names = [*known]
    try:
        raw = parse_toml(text)
        called = raw.get("name")
        if isinstance(called, str) and called and called != name:
            names.append(f"calls itself {called[:80]!r}; name the file after it")
        sheet = record_of(Sheet, raw)
    except RecordError as error:
        raise SheetError(ref or name, [*error.problems, *names], KEYS) from error
    if names:
        raise SheetError(ref or name, names)
    return sheet
