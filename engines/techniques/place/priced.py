"""Places that ask what a call costs, and on whose prices they do."""

from __future__ import annotations

from pydantic import Field

from engines.errors import EngineError
from engines.pricing.costs import costs_of, sizes_of_named
from engines.techniques.context import BuildContext, Costs, ModelSizes
from results.records import Record


class PricedParameters(Record):
    costs_of: str = Field(default="m2-ultra", max_length=100)
    """The hardware sheet whose prices decide where it runs on the host. A modelled device takes its own."""

    as_shape: str | None = Field(default=None, max_length=100)
    """The model at whose size calls are priced, such as phi-3.5-moe; the model's own where it is not given."""

    def priced_sizes(self, context: BuildContext) -> ModelSizes:
        """Raises `EngineError` for a dense model."""
        if context.sizes is None:
            raise EngineError("a place by cost needs a model with experts; use dropless")
        if self.as_shape is not None:
            return sizes_of_named(self.as_shape)
        return context.priced_sizes or context.sizes

    def costs(self, context: BuildContext) -> Costs:
        """Raises `EngineError` for a dense model, `DeviceError` for a sheet that is not there."""
        return context.costs or costs_of(self.costs_of, self.priced_sizes(context))

    def problem_with(self, costs: Costs, travels: bool) -> str | None:
        """Why these prices do not decide it, or None. travels: whether experts are fetched."""
        return None
