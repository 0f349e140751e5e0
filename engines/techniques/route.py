"""Which experts each token gets: those that its router chose."""

from __future__ import annotations

from typing import ClassVar, Literal

from engines.dispatch import Prediction, Routing
from engines.techniques.base import NOTHING, BuildContext, LayerInput
from results.records import Record


class RouterParameters(Record):
    """Has no parameters."""

    needs_profile: ClassVar[bool] = False

    kind: Literal["router"] = "router"

    @property
    def lossless(self) -> bool:
        return True

    def build(self, context: BuildContext) -> RoutersChoice:
        return RoutersChoice()


class RoutersChoice:
    asks = NOTHING

    def executed(self, seen: LayerInput) -> Routing:
        return seen.routing

    def predict(self, seen: LayerInput) -> Prediction | None:
        return None
