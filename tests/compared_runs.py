"""Small runs that are compared, and what the comparison found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from results.environments import Environment
from results.history.compared import Compared
from results.history.comparison import Comparison, RunTold, Side, compare, told_of
from results.history.unlike import What
from results.store import Store
from tests.histories import made_trial, write_run
from tests.run_builders import ENVIRONMENT, cell


def times(mean_s: float, seed: int, n: int = 8, spread: float = 0.01) -> list[float]:
    return [float(t) for t in mean_s * (1 + spread * np.random.default_rng(seed).standard_normal(n))]


def written(
    folder: Path,
    seconds: Sequence[float],
    arm: str = "dropless",
    environment: Environment = ENVIRONMENT,
    **changes: object,
) -> Path:
    trials = [made_trial("c1", i, s, **changes) for i, s in enumerate(seconds)]  # type: ignore[arg-type]
    return write_run(folder, [cell("c1", engine=arm)], trials, environment=environment)


def read(folder: Path) -> RunTold:
    with Store.view(folder) as store:
        return told_of(store.data())


def between(first: Path, second: Path, *allowed: What, **sides: str) -> Comparison:
    own = [{k[:-2]: v for k, v in sides.items() if k.endswith(end)} for end in ("_a", "_b")]
    return compare(Side("A", read(first), **own[0]), Side("B", read(second), **own[1]), frozenset(allowed))


def row(found: Comparison, metric: str = "e2e") -> Compared:
    return next(one for one in found.rows if one.first.metric == metric)
