"""What runs a package: one prediction a call, on the unit that the plan says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engines.coreml.manifest import PackagePlan

Named = Mapping[str, NDArray[Any]]
ComputeUnits = Literal["cpu_and_ne", "all"]
"""cpu_and_ne: the Neural Engine, or the CPU for what it does not take. all: Core ML decides, the GPU included."""


class Placement(NamedTuple):
    """Of a function: its operations by the unit on which Core ML plans them; and of its estimated cost the share that
    lies on the Neural Engine. None: not told."""

    operations: Mapping[str, tuple[str, ...]]
    cost_on_ane: float | None


class Predictor(Protocol):
    """At least: macOS's own, and an interpreter that runs anywhere."""

    name: str
    """As tables call it."""
    dtype: type[np.float16] | type[np.float32]
    """Of what goes in and comes out."""
    is_a_mac: bool
    """Whether its times and joules are a Mac's. An interpreter's say nothing of one."""

    def load(self, package: PackagePlan, function: str, units: ComputeUnits) -> None:
        """Readies a function: no later prediction reads or compiles anything, or is its first. Raises `EngineError`."""
        ...

    def n_held(self) -> int:
        """Compiled graphs that this process holds, those of other arms too; 0 where nothing is compiled."""
        ...

    def predict(
        self, package: PackagePlan, function: str, given: Named, state: object | None, units: ComputeUnits
    ) -> Named:
        """Raises `EngineError`."""
        ...

    def new_state(self, package: PackagePlan, function: str, units: ComputeUnits) -> object:
        """All zeros; the functions of a package share one."""
        ...

    def placement(self, package: PackagePlan, function: str, units: ComputeUnits) -> Placement | None:
        """None of a predictor that has no units. Raises `EngineError` where it cannot be told."""
        ...


def package_path(folder: Path, package: PackagePlan) -> Path:
    return folder / package.path
