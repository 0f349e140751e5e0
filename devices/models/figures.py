"""Numbers of a hardware sheet with where they come from, and what they make of work: seconds.

Every figure has its kind: `stated` by the source, `fitted` on rows of its tables, or `assumed` because nobody says.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from devices.models.efficiency import Efficiency
from results.records import Record

Kernel = Literal[
    "attention",
    "expert_ffn",
    "router",
    "gather_dynamic",
    "gather_static",
    "padding",
    "scatter",
    "residual",
    "norm",
    "lm_head",
    "scores",
    "step",
    "layer",
    "decode_step",
    "decode_layer",
    "fetching_layer",
    "prompt_fetching_layer",
    "prompt_fetch",
    "many_rows",
    "prompt_few_rows",
]
"""Price lists of a unit. Gather has two: into buffers sized after routing, or into buffers that stand ready. Scores are
what attention makes of queries, keys and values: a sheet that prices them apart has projections alone in `attention`,
and a machine that skips what the mask hides. The last nine are what the engine takes beside its kernels: for each step
that reads a prompt, for each of its layers, and the same of steps that decode one token; for a layer whose experts must
travel, besides, of a token and of a prompt; for each expert that must travel in a prompt; and for each weight byte of
experts that a token gives more than few rows, as a static shape does: it calls so few of them that its units wait for
memory, and for each other; and what experts with few rows take longer in a prompt, where each layer calls them by
itself, than in a decoded token, which is one call."""


LEAST_RATE, MOST = 1e-9, 1e24
"""Bounds of a figure, in any unit: sums and products of what lies between are no infinities."""


class SheetFigure(Record):
    """One number of the sheet with its provenance."""

    value: float = Field(ge=0, le=MOST, allow_inf_nan=False)
    kind: Literal["stated", "fitted", "assumed"]
    origin: str = Field(min_length=1)


def _is_positive(figure: SheetFigure) -> SheetFigure:
    if figure.value < LEAST_RATE:
        raise ValueError("must be above 0" if figure.value == 0 else f"must be at least {LEAST_RATE:g}")
    return figure


Rate = Annotated[SheetFigure, AfterValidator(_is_positive)]
"""One by which something is divided."""


MOST_TILE = 4096
MOST_QUEUED = 1024


def _is_depth(figure: SheetFigure) -> SheetFigure:
    if not (figure.value.is_integer() and 1 <= figure.value <= MOST_QUEUED):
        raise ValueError(f"must be a whole number from 1 to {MOST_QUEUED}")
    return figure


QueueDepth = Annotated[SheetFigure, AfterValidator(_is_depth)]
"""Launches that a unit is given and has not done, at most."""


def _is_tile(figure: SheetFigure) -> SheetFigure:
    if not (figure.value.is_integer() and 1 <= figure.value <= MOST_TILE):
        raise ValueError(f"must be a whole number from 1 to {MOST_TILE}")
    return figure


RowTile = Annotated[SheetFigure, AfterValidator(_is_tile)]
"""Rows that arithmetic takes at once."""


class Span(Record):
    """What the rows of a fit had of an amount, both ends included."""

    least: float = Field(gt=0, allow_inf_nan=False)
    most: float = Field(allow_inf_nan=False)

    @model_validator(mode="after")
    def _rises(self) -> Span:
        if self.least > self.most:
            raise ValueError(f"least {self.least:g} is above most {self.most:g}; swap them")
        return self


class PriceLine(Record):
    """Seconds of one kind of work on one unit: a line in its amounts. An absent term costs nothing; at least one is
    there."""

    s_per_launch: SheetFigure | None = None
    s_per_weight_byte: SheetFigure | None = None
    s_per_moved_byte: SheetFigure | None = None
    s_per_flop: SheetFigure | None = None
    fitted_flops_per_weight_byte: Span | None = None
    """Least and most in the rows that the price was fitted on: with two bytes a value, the rows that a weight meets.
    None: of a price that no such rows bound, because it is none of weights, or because nobody compared it."""
    fitted_weight_bytes: Span | None = None
    """Least and most of one launch in those rows."""

    @model_validator(mode="after")
    def _has_a_term(self) -> Self:
        if not self.model_fields_set & set(TERMS):
            raise ValueError(f"a price without terms; give at least one of {', '.join(TERMS)}")
        return self

    def is_fitted_at(self, launches: int, weight_bytes: float, flops: float) -> bool:
        """Whether the rows of the fit had launches such as these, as far as the sheet tells."""
        if launches == 0 or not (self.fitted_flops_per_weight_byte or self.fitted_weight_bytes):
            return True
        if weight_bytes == 0:
            return False
        amounts = (
            (self.fitted_flops_per_weight_byte, flops / weight_bytes),
            (self.fitted_weight_bytes, weight_bytes / launches),
        )
        return all(known is None or known.least <= amount <= known.most for known, amount in amounts)

    def seconds(self, launches: int, weight_bytes: float, moved_bytes: float, flops: float) -> float:
        terms = (
            (self.s_per_launch, launches),
            (self.s_per_weight_byte, weight_bytes),
            (self.s_per_moved_byte, moved_bytes),
            (self.s_per_flop, flops),
        )
        return sum(figure.value * amount for figure, amount in terms if figure is not None)


class FewRows(PriceLine):
    """The same of work that meets each weight with few rows, where other code computes it, or other limits bind."""

    most_flops_per_weight_byte: float = Field(gt=0, allow_inf_nan=False)
    """Beyond it the price's own line holds."""


class KernelPrice(PriceLine):
    """Seconds of one kind of work on one unit."""

    few_rows: FewRows | None = None
    """None: one line holds for any number of rows."""

    def line(self, weight_bytes: float, flops: float, as_few: bool = False) -> PriceLine:
        """The one that holds for so many rows. as_few: where the code of few rows computes them, however many."""
        few = self.few_rows
        is_few = few is not None and (as_few or flops <= few.most_flops_per_weight_byte * weight_bytes)
        return few if few is not None and is_few else self


TERMS = ("s_per_launch", "s_per_weight_byte", "s_per_moved_byte", "s_per_flop")


class Roofline(Record):
    """Seconds of any kind of work on a unit, as the slower of its memory and its arithmetic. Without shares it is the
    best that the unit could do: nobody compared it with what runs there."""

    bytes_per_s: Rate
    """Of its own memory, for weights and activations alike."""
    flops_per_s: Rate
    s_per_launch: SheetFigure | None = None
    """None: not stated, and counted as 0."""
    bytes_share: Efficiency | None = None
    """Of `bytes_per_s` that a launch reaches, by its shape. None: all of it."""
    flops_share: Efficiency | None = None
    """Of `flops_per_s`, the same."""

    def seconds(self, launches: int, weight_bytes: float, moved_bytes: float, flops: float) -> float:
        launch_s = 0.0 if self.s_per_launch is None else launches * self.s_per_launch.value
        return launch_s + max(self.sides_s(launches, weight_bytes, moved_bytes, flops))

    def sides_s(self, launches: int, weight_bytes: float, moved_bytes: float, flops: float) -> tuple[float, float]:
        """(of memory, of arithmetic), without launching."""
        n_bytes = weight_bytes + moved_bytes
        memory_s, compute_s = n_bytes / self.bytes_per_s.value, flops / self.flops_per_s.value
        shape = launches, n_bytes, weight_bytes, flops
        if self.bytes_share is not None:
            memory_s /= self.bytes_share.share(*shape)
        if self.flops_share is not None:
            compute_s /= self.flops_share.share(*shape)
        return memory_s, compute_s


class Misses(Record):
    """Modelled over stated, less one, of what the source states and no fit used: the least and the most of them."""

    least: float = Field(gt=-1, allow_inf_nan=False)
    most: float = Field(allow_inf_nan=False)
    origin: str = Field(min_length=1)

    @property
    def words(self) -> str:
        return f"{100 * self.least:+.0f} to {100 * self.most:+.0f} %"


class MissedBy(Record):
    """How far ratios between arms came out from those of the source."""

    seconds: Misses
    joules: Misses


class FitMiss(Record):
    """How far fitted prices miss whole requests that they were fitted on: shares of the measured times."""

    requests: int = Field(ge=1)
    median: float = Field(ge=0, allow_inf_nan=False)
    p90: float = Field(ge=0, allow_inf_nan=False)

    @property
    def words(self) -> str:
        return f"{100 * self.median:.2g} % (median of {self.requests}; 90th percentile {100 * self.p90:.2g} %)"
