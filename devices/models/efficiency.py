"""What share of a peak a launch reaches, by its shape: points between which it is interpolated.

Between two points the share is a straight line over the logarithm of the shape, for shapes span orders of magnitude;
below the first point and beyond the last it stays as it is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, model_validator

from devices.toml_records import Fault, with_faults
from results.records import Record

Shape = Literal["flops_per_weight_byte", "flops", "bytes"]
"""Of one launch. With two bytes a weight, `flops_per_weight_byte` is the rows that meet each weight; without weights it
is beyond any point. `bytes` are weights and activations together."""


class EfficiencyPoint(Record):
    """One point with its provenance, as `SheetFigure` has it."""

    at: float = Field(gt=0, allow_inf_nan=False)
    share: float = Field(gt=0, le=1, allow_inf_nan=False)
    """Of the peak that the roofline states."""
    kind: Literal["stated", "fitted", "assumed"]
    origin: str = Field(min_length=1)


def _as_tuple(points: object) -> object:
    """TOML has lists alone."""
    return tuple(points) if isinstance(points, list) else points


def _falling(raw: object) -> Iterator[Fault]:
    """Of points as they are written: what is no number is told at its own place."""
    points = raw.get("points") if isinstance(raw, Mapping) else None
    shapes = [
        one.at if isinstance(one, EfficiencyPoint) else one.get("at") if isinstance(one, Mapping) else None
        for one in (points if isinstance(points, list | tuple) else ())
    ]
    known = [at for at in shapes if isinstance(at, int | float) and not isinstance(at, bool)]
    if any(one >= two for one, two in pairwise(known)):
        yield Fault("points", f"at must rise from each to the next, found {known[:8]}")


class Efficiency(Record):
    """A table of shape and share."""

    by: Shape
    points: Annotated[tuple[EfficiencyPoint, ...], BeforeValidator(_as_tuple)] = Field(min_length=1, max_length=256)

    @model_validator(mode="wrap")
    @classmethod
    def _rises(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        return with_faults(cls, raw, handler, _falling(raw))

    @cached_property
    def _curve(self) -> tuple[list[float], list[float]]:
        return [math.log(point.at) for point in self.points], [point.share for point in self.points]

    def share(self, launches: int, n_bytes: float, weight_bytes: float, flops: float) -> float:
        """Of an operation of so many launches alike."""
        if self.by == "flops_per_weight_byte":
            amount, over = flops, weight_bytes
        else:
            amount, over = (flops if self.by == "flops" else n_bytes), float(launches)
        at, shares = self._curve
        if over == 0:
            return shares[-1]
        if amount == 0:
            return shares[0]
        return float(np.interp(math.log(amount / over), at, shares))
