"""How often each expert was chosen, as a run keeps it: apart from the record of the trial, which all readers read."""

from __future__ import annotations

import operator

from pydantic import Field, model_validator

from results.records import Phase, Record

Counts = tuple[tuple[int, ...], ...]
"""A row for each layer."""


class LayerForetold(Record):
    """What a layer's router chose in a window, beside what an earlier layer had predicted for it."""

    tokens: int = Field(ge=1)
    """That had a prediction; each chose as many experts as there are ranks."""
    recalled: int = Field(ge=0)
    """Of the experts that they chose, those that were among the predicted ones of their token."""
    aligned: tuple[int, ...] = Field(min_length=1)
    """Of each rank by routing weight, tokens whose predicted expert of that rank is the one chosen."""
    cosine_tokens: int = Field(default=0, ge=0)
    """Tokens whose states were compared, the first of each request; 0 where none were kept, or of an older run."""
    cosine_sum: float | None = None
    """Over these, of what the prediction was made from with the router's true input; None where there are none."""
    profiled_cosine_q: float | None = None
    """Of the quasi-hidden state with the router's true input, on the prompts of the profile; None without one."""
    profiled_cosine_s: float | None = None
    """The same of the layer before's own router input."""

    @model_validator(mode="after")
    def _adds_up(self) -> LayerForetold:
        if self.recalled > self.tokens * len(self.aligned) or not all(0 <= n <= self.tokens for n in self.aligned):
            raise ValueError("more was predicted right than was predicted")
        return self

    @property
    def recall(self) -> float:
        """recall@k."""
        return self.recalled / (self.tokens * len(self.aligned))

    @property
    def cosine(self) -> float | None:
        """The mean."""
        return self.cosine_sum / self.cosine_tokens if self.cosine_sum is not None and self.cosine_tokens else None

    @property
    def rank_alignment(self) -> tuple[float, ...]:
        """The share of each rank."""
        return tuple(n / self.tokens for n in self.aligned)

    def plus(self, other: LayerForetold) -> LayerForetold:
        """Over both windows."""
        aligned = tuple(a + b for a, b in zip(self.aligned, other.aligned, strict=True))
        both = {"tokens": self.tokens + other.tokens, "recalled": self.recalled + other.recalled, "aligned": aligned}
        sums = [one.cosine_sum for one in (self, other) if one.cosine_sum is not None]
        alike = {"cosine_tokens": self.cosine_tokens + other.cosine_tokens, "cosine_sum": sum(sums) if sums else None}
        return self.model_copy(update=both | alike)


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
    foretold: tuple[LayerForetold | None, ...] | None = None
    """Of each of `layers`; None of one that is never predicted, and of a technique that predicts nothing."""
    windows: int = Field(1, ge=1, exclude=True)
    """Over how many windows `chosen` is added up. Not stored: what is, is of one."""

    @model_validator(mode="after")
    def _one_shape(self) -> ExpertHeat:
        kept = [counts for counts in (self.chosen, self.profiled, self.decoded) if counts is not None]
        if any(len(counts) != len(self.layers) for counts in kept) or len({len(row) for c in kept for row in c}) > 1:
            raise ValueError("counts of experts are not one row for each layer, all as long")
        if self.foretold is not None and len(self.foretold) != len(self.layers):
            raise ValueError("predictions are not one for each layer")
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
