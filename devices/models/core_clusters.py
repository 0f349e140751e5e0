"""Cores by cluster of a phone's sheet: what they are, how they were seen to run, and what a selection of them gives.

A selection says how many cores of each cluster compute, the biggest cluster first: (1, 2, 0) is one prime core and two
middle ones. Cores of one cluster are alike, so nothing says which. Decoding is bound by memory, so that speed
saturates, and each further core costs something besides (threads wait for each other, and crowd the bus):

    speed(I) = ceiling * (1 - (1 - alone) ^ demand(I)) / (1 + loss * (cores - 1))
    demand(I) = sum_i |I_i| * weight_i * f_i / f_0             weight: 1, of efficiency cores 0.4
    power(I) = static + W per load * load(I)                   load: Eq. 9 of 002-mnn-aecs without its watts

`alone` is the share of the ceiling that one core of the biggest cluster reaches. Where threads cannot be bound (iOS),
a selection is their number, they take the biggest cores first, and load(I) is demand(I), for no clock is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field, field_validator, model_validator

from devices.models.figures import Rate, SheetFigure
from devices.models.links import PlainName
from results.records import Record

Selection = tuple[int, ...]
CoreKind = Literal["prime", "performance", "efficiency"]
SCALES: Mapping[CoreKind, float] = {"prime": 1.0, "performance": 0.8, "efficiency": 0.4}
"""a_i of Eq. 9, and the weight of an efficiency core, as in the authors' public engine fork."""
IDLE_FACTOR = 0.7
"""b of Eq. 9: what an idle core draws of a busy one's. From the same fork."""


@dataclass(frozen=True)
class CoreCluster:
    """Cores alike, which share a clock. None: not stated."""

    name: str
    n_cores: int
    kind: CoreKind
    max_frequency_ghz: float | None = None
    capacity: float | None = None
    """The scheduler's relative speed of a core at its highest frequency; the frequency stands for it where none is."""


def clock_load_ghz2(
    clusters: Sequence[CoreCluster],
    selection: Selection,
    scales: Mapping[CoreKind, float] = SCALES,
    idle_factor: float = IDLE_FACTOR,
) -> float:
    """The sum of Eq. 9 without its watts: sum_i a_i (|I_i| + (|C_i| - |I_i|) b) (f_max,i s)^2.

    s: capacity of the biggest selected core over that of the biggest core; the governor scales every clock by it.
    Raises ValueError where a clock is not known.
    """
    capacities = [cluster.capacity for cluster in clusters if cluster.capacity is not None]
    speeds = capacities if len(capacities) == len(clusters) else [_ghz(cluster) for cluster in clusters]
    share = max(speed for speed, n in zip(speeds, selection, strict=True) if n) / max(speeds)
    total = 0.0
    for cluster, n in zip(clusters, selection, strict=True):
        cores = n + (cluster.n_cores - n) * idle_factor
        total += scales[cluster.kind] * cores * (_ghz(cluster) * share) ** 2
    return total


def _ghz(cluster: CoreCluster) -> float:
    if cluster.max_frequency_ghz is None:
        raise ValueError(f"{cluster.name}: its highest clock is not known, and the heuristic power needs it")
    return cluster.max_frequency_ghz


class ClusterSheet(Record):
    """Cores alike, in the order in which the sheet lists its clusters: the biggest has core:0."""

    n_cores: int = Field(ge=1, le=64)
    core: str = Field(min_length=1, max_length=40)
    """As its maker calls it: A77."""
    kind: CoreKind
    max_frequency_hz: Rate | None = None
    """None: not stated."""


class StateSheet(Record):
    """A phone as its source saw it decode. None: not stated in this state."""

    engine: str = Field(min_length=1)
    model: str = Field(min_length=1)
    cores: dict[PlainName, int] = Field(default_factory=dict)
    """By cluster; empty where threads are not bound."""
    threads: int | None = Field(default=None, ge=1)
    frequency_hz: dict[PlainName, SheetFigure] = Field(default_factory=dict)
    """Mean over the run, by cluster."""
    tokens_per_s: SheetFigure | None = None
    power_w: SheetFigure | None = None
    relative_power: SheetFigure | None = None
    """Of a gauge without units."""
    cpu_use: SheetFigure | None = None
    """Cores' worth of time: 2.3 is 230 %."""


class DecodeSheet(Record):
    """Constants of the module's formulas, for one model on this phone."""

    model: str = Field(min_length=1)
    binds_threads: bool
    """Whether threads can be bound to cores: not on iOS."""
    ceiling_tokens_per_s: Rate
    alone: SheetFigure
    loss: SheetFigure
    static_w: SheetFigure | None = None
    """None: the source has relative power alone."""
    w_per_load: SheetFigure | None = None
    relative_static: SheetFigure | None = None
    relative_per_load: SheetFigure | None = None
    rms_residual: SheetFigure
    """Over the rows that it was fitted on, speed and power together, relative."""

    @field_validator("alone")
    @classmethod
    def _is_a_share(cls, alone: SheetFigure) -> SheetFigure:
        if not 0 < alone.value < 1:
            raise ValueError(f"is {alone.value:g}; a share of the ceiling lies between 0 and 1, neither included")
        return alone

    @model_validator(mode="after")
    def _has_one_power(self) -> DecodeSheet:
        watts = (self.static_w is not None, self.w_per_load is not None)
        relative = (self.relative_static is not None, self.relative_per_load is not None)
        if {watts, relative} != {(True, True), (False, False)}:
            raise ValueError("needs static_w and w_per_load, or relative_static and relative_per_load, and not both")
        return self


@dataclass(frozen=True)
class DecodeModel:
    """Speed and power of a selection of cores, or of a number of threads, as the module's formulas have them."""

    clusters: tuple[CoreCluster, ...]
    binds_threads: bool
    ceiling_tokens_per_s: float
    alone: float
    loss: float
    static_power: float
    power_per_load: float

    @property
    def selectable(self) -> tuple[CoreCluster, ...]:
        """What a search may choose from: the clusters, or one cluster of threads."""
        if self.binds_threads:
            return self.clusters
        return (CoreCluster("thread", sum(cluster.n_cores for cluster in self.clusters), "prime"),)

    def tokens_per_s(self, selection: Selection) -> float:
        saturation = 1.0 - math.pow(1.0 - self.alone, self._demand(selection))
        return self.ceiling_tokens_per_s * saturation / (1.0 + self.loss * (sum(selection) - 1))

    def power(self, selection: Selection) -> float:
        """W; of a phone whose source has relative power alone, in its units."""
        load = clock_load_ghz2(self.clusters, selection) if self.binds_threads else self._demand(selection)
        return self.static_power + self.power_per_load * load

    def _demand(self, selection: Selection) -> float:
        return demand(self.clusters, selection if self.binds_threads else biggest_first(self.clusters, selection[0]))


def demand(clusters: Sequence[CoreCluster], selection: Selection) -> float:
    """In cores of the biggest cluster. Where no clock is known, cores of one kind count alike."""
    biggest = clusters[0].max_frequency_ghz or 1.0
    return sum(n * core_speed(cluster) / biggest for cluster, n in zip(clusters, selection, strict=True))


def core_speed(cluster: CoreCluster) -> float:
    """Of one of its cores, in an unknown unit: its highest clock, and a share of that for an efficiency core."""
    return (SCALES["efficiency"] if cluster.kind == "efficiency" else 1.0) * (cluster.max_frequency_ghz or 1.0)


def biggest_first(clusters: Sequence[CoreCluster], threads: int) -> Selection:
    """Threads on the biggest cores first."""
    taken: list[int] = []
    for cluster in clusters:
        taken.append(min(cluster.n_cores, threads - sum(taken)))
    return tuple(taken)


def clusters_of(sheets: Mapping[str, ClusterSheet]) -> tuple[CoreCluster, ...]:
    """Of a sheet, named as Table 7 of 002-mnn-aecs names cores: A77(2.54GHz)."""
    found = []
    for sheet in sheets.values():
        ghz = None if sheet.max_frequency_hz is None else sheet.max_frequency_hz.value / 1e9
        found.append(
            CoreCluster(sheet.core if ghz is None else f"{sheet.core}({ghz:g}GHz)", sheet.n_cores, sheet.kind, ghz)
        )
    return tuple(found)


def decode_model(clusters: Mapping[str, ClusterSheet], decode: DecodeSheet) -> DecodeModel:
    """Of a sheet."""
    watts, relative = (decode.static_w, decode.w_per_load), (decode.relative_static, decode.relative_per_load)
    static, per_load = watts if decode.static_w is not None else relative
    assert static is not None  # the sheet is refused otherwise
    assert per_load is not None
    return DecodeModel(
        clusters_of(clusters),
        decode.binds_threads,
        decode.ceiling_tokens_per_s.value,
        decode.alone.value,
        decode.loss.value,
        static.value,
        per_load.value,
    )
