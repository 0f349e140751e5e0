"""Prices from measured times: non-negative least squares on relative errors, and how far the line misses its points.

A time is a line in the amounts of its work (`devices.models.figures`). Relative errors, because points span decades;
not below zero, because no byte gives time back. What a grid of shapes cannot tell apart is refused, never guessed: a
fit of bytes and FLOP from points with one ratio of the two would be right there and anywhere else wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devices.base import DeviceError

Array = NDArray[np.float64]
ALIKE = 1e-4
"""Least over largest singular value of the amounts, each scaled to 1: below it two of them cannot be told apart."""
IN_IT = 0.05
"""Of the largest share: a column with less has no part in it."""
SPARE_POINTS = 1
"""Beyond the terms: a fit through all its points would have no residual to show."""


class FitError(DeviceError):
    """Points that no price can be fitted on."""


@dataclass(frozen=True)
class Fit:
    """Constants and the relative residuals (model over measured - 1) of the rows used."""

    constants: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def rms(self) -> float:
        return math.sqrt(sum(r * r for r in self.residuals) / len(self.residuals))

    @property
    def median_miss(self) -> float:
        """Of the sizes of the residuals."""
        return float(np.median(np.abs(self.residuals)))

    @property
    def p90_miss(self) -> float:
        return float(np.quantile(np.abs(self.residuals), 0.9))


def relative_fit(
    amounts: Sequence[Sequence[float]], values: Sequence[float], known: Sequence[float] | None = None
) -> Fit:
    """Minimises sum ((A x + known) / y - 1)^2 over x >= 0. Columns are scaled first: FLOP and launches differ by 1e12.

    known: what is of each value already, by other prices.
    """
    from scipy.optimize import nnls

    a, y = np.asarray(amounts, dtype=np.float64), np.asarray(values, dtype=np.float64)
    own = np.zeros(len(y)) if known is None else np.asarray(known, dtype=np.float64)
    scale = a.max(axis=0)
    scaled, _ = nnls(a / scale / y[:, None], 1 - own / y)
    constants = scaled / scale
    return Fit(tuple(float(c) for c in constants), tuple(float(r) for r in (a @ constants + own) / y - 1))


Amounts = Mapping[str, float]
"""Of one point, by name: what constants multiply."""


def checked_fit(
    what: str,
    names: Sequence[str],
    points: Sequence[Amounts],
    seconds: Sequence[float],
    known: Sequence[float] | None = None,
) -> Fit:
    """`relative_fit` of some amounts by name; of one that no point has, the constant is 0.

    Raises `FitError` that lists every problem: too few points, times that are none, amounts that cannot be told apart.
    """
    problems = [
        f"point {i} took {took} s; measure it again"
        for i, took in enumerate(seconds, 1)
        if not (math.isfinite(took) and took > 0)
    ]
    problems += [
        f"point {i} has {value} {name}; amounts are finite and not below 0"
        for i, point in enumerate(points, 1)
        for name, value in point.items()
        if not (math.isfinite(value) and value >= 0)
    ]
    present = [name for name in names if any(point.get(name) for point in points)]
    if not present:
        problems.append(f"no point has any of {', '.join(names)}; measure work that has")
    elif len(seconds) < len(present) + SPARE_POINTS:
        problems.append(
            f"{len(seconds)} points for {len(present)} terms ({', '.join(present)}); measure at least"
            f" {len(present) + SPARE_POINTS} shapes"
        )
    if problems:
        raise FitError(f"{what} cannot be fitted: {'; '.join(problems)}")
    table = np.array([[point.get(name, 0.0) for name in present] for point in points])
    alike = _alike(present, table / table.max(axis=0) / np.asarray(seconds)[:, None])
    if alike:
        raise FitError(
            f"{what} cannot be fitted: its shapes do not tell {' and '.join(alike)} apart, which grow alike from point"
            " to point; vary one of them alone"
        )
    found = relative_fit(table.tolist(), seconds, known)
    constants = dict(zip(present, found.constants, strict=True))
    return Fit(tuple(constants.get(name, 0.0) for name in names), found.residuals)


def _alike(names: Sequence[str], table: Array) -> list[str]:
    """Columns of which one is made of the others; none where all can be told apart."""
    _, sizes, directions = np.linalg.svd(table / np.linalg.norm(table, axis=0), full_matrices=False)
    if sizes[-1] >= ALIKE * sizes[0]:
        return []
    share = np.abs(directions[-1])
    return [name for name, own in zip(names, share, strict=True) if own > IN_IT * share.max()]
