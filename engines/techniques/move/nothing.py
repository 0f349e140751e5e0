"""No weights travel: they lie where they are computed."""

from __future__ import annotations

from typing import ClassVar, Literal

from engines.calls import Calls
from engines.dispatch import Prediction
from engines.techniques.base import Moved
from engines.techniques.context import NOTHING, BuildContext, LayerInput
from results.records import Record


class NothingParameters(Record):
    """Has no parameters."""

    moves_weights: ClassVar[bool] = False
    moves_all: ClassVar[bool] = False
    loads_from_file: ClassVar[bool] = False

    kind: Literal["nothing"] = "nothing"

    @property
    def needs_profile(self) -> bool:
        return False

    def build(self, context: BuildContext) -> NothingMoves:
        return NothingMoves()


class NothingMoves:
    asks = NOTHING
    prefetches = False
    keeps_what_lies = True

    def moved(self, seen: LayerInput, calls: Calls, prediction: Prediction | None) -> Moved:
        return Moved()
