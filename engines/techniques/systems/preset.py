"""A system of a source, and what several of them share."""

from __future__ import annotations

from dataclasses import dataclass

from engines.techniques.choices import Choices
from engines.techniques.place.units import OneUnitParameters


@dataclass(frozen=True)
class Preset:
    """A system of a source. source: which, and where in it."""

    name: str
    what: str
    source: str
    choices: Choices
    fixed: tuple[str, ...] = ()
    """Parameters that are not exposed: of another value it would be another preset, or they have no effect in it."""

    @property
    def lossless(self) -> bool:
        return self.choices.lossless


ON_CPU, ON_GPU, ON_NPU = (OneUnitParameters(unit=unit) for unit in ("cpu", "gpu", "npu"))
