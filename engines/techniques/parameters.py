"""Parameters of a technique that is made of choices, as a plan gives them."""

from __future__ import annotations

from collections.abc import Set
from typing import ClassVar

from pydantic import Field, model_validator

from devices.base import Unit
from engines.profile import Learnt
from engines.techniques.base import Technique
from engines.techniques.choices import (
    CALIBRATION_PROMPTS,
    Backbone,
    Choices,
    LayoutChoice,
    MoveChoice,
    PlaceChoice,
    RouteChoice,
)
from engines.techniques.context import BuildContext
from engines.techniques.idle import changed
from engines.techniques.layout.exact import ExactParameters
from engines.techniques.move.nothing import NothingParameters
from engines.techniques.place.units import OneUnitParameters
from engines.techniques.route import RouterParameters
from results.records import Record

DECISIONS = ("route", "place", "layout", "decode", "move")


class Composed(Record):
    """Parameters of a technique that is made of choices."""

    technique: ClassVar[str]

    @property
    def choices(self) -> Choices:
        raise NotImplementedError

    backbone: Backbone
    """The unit of attention and of what every token passes through, on a machine that has several."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """Where experts are computed."""
        return tuple(dict.fromkeys((*self.choices.units("prefill"), *self.choices.units("decode"))))

    @property
    def loads_from_file(self) -> bool:
        """A cache in a GPU's memory is filled from the host's."""
        return self.choices.move.loads_from_file and "cpu" in self.units

    @property
    def lossless(self) -> bool:
        return self.choices.lossless

    @property
    def wanted_prompts(self) -> int:
        return self.choices.calibration_prompts if self.learns else 0

    @property
    def learns(self) -> frozenset[Learnt]:
        return self.choices.learns

    def build(self, context: BuildContext) -> Technique:
        return self.choices.build(self.technique, context)

    def given(self, decision: str) -> Set[str]:
        """The parameters of a decision that are not what they would be of themselves."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _fits_together(self) -> Composed:
        choices = self.choices
        problem = choices.problem() or choices.idle({decision: self.given(decision) for decision in DECISIONS})
        if problem is None and "calibration_prompts" in changed(self) and not choices.learns - {"estimator"}:
            problem = "calibration_prompts needs a choice that learns from prompts, and has no effect here; remove it"
        if problem is not None:
            raise ValueError(problem)
        return self


class CustomParameters(Composed):
    """A technique of no source: its choices stand in the plan."""

    technique: ClassVar[str] = "custom"

    route: RouteChoice = RouterParameters()
    place: PlaceChoice = OneUnitParameters()
    layout: LayoutChoice = ExactParameters()
    decode: LayoutChoice | None = None
    """The layout of decode steps, where it is another."""
    move: MoveChoice = NothingParameters()
    backbone: Backbone = "cpu"
    calibration_prompts: int = Field(default=CALIBRATION_PROMPTS, ge=1, le=100_000)

    @property
    def choices(self) -> Choices:
        return Choices(
            self.place, self.layout, self.backbone, self.decode, self.route, self.move, self.calibration_prompts
        )

    def given(self, decision: str) -> Set[str]:
        own = getattr(self, decision)
        return set() if own is None else changed(own)
