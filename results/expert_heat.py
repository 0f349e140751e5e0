"""How often each expert was chosen, as a run keeps it: apart from the record of the trial, which all readers read."""

from __future__ import annotations

import operator

from pydantic import Field, model_validator

from results.records import Phase, Record

Counts = tuple[tuple[int, ...], ...]
"""A row for each layer."""


class ExpertHeat(Record):
    """How often each expert of each sparse layer was chosen in a window, before a technique dropped any of it."""

    layers: tuple[int, ...]
    chosen: Counts
    """For each of `layers`, of each expert."""
    decoded: Counts | None = None
    """Of `chosen`, those of steps that decode; the others are of prefill. None: of an older run, which kept none."""
    profiled: Counts | None = None
    """The same of the prompts that the technique was calibrated on; None where it learns nothing."""
    capacities: Counts | None = None
    """Rows of each expert's graph in prefill, as calibration froze them; None where nothing is frozen."""
    graphs: Counts | None = None
    """How many experts each frozen graph of a layer holds."""
    hot: Counts | None = None
    """Experts of each layer that lie on the NPU, where their place was frozen by cost; the others lie on the CPU."""
    windows: int = Field(1, ge=1, exclude=True)
    """Over how many windows `chosen` is added up. Not stored: what is, is of one."""

    @model_validator(mode="after")
    def _one_shape(self) -> ExpertHeat:
        kept = [counts for counts in (self.chosen, self.profiled, self.decoded) if counts is not None]
        if any(len(counts) != len(self.layers) for counts in kept) or len({len(row) for c in kept for row in c}) > 1:
            raise ValueError("counts of experts are not one row for each layer, all as long")
        if any(n < 0 for counts in kept for row in counts for n in row):
            raise ValueError("a count of an expert is below 0")
        if self.decoded is not None and any(n < 0 for row in self.of("prefill") or () for n in row):
            raise ValueError("experts were chosen more often in decoding than in all")
        return self

    def of(self, phase: Phase) -> Counts | None:
        """What was chosen in a phase, for each of `layers`, of each expert. None where that was not kept."""
        if phase == "all" or self.decoded is None:
            return self.chosen if phase == "all" else None
        if phase == "decode":
            return self.decoded
        return tuple(tuple(map(operator.sub, whole, own)) for whole, own in zip(self.chosen, self.decoded, strict=True))
