"""What a technique did: what an engine counts of it, and the figures of that. Each figure is one line of `COUNTERS` and
reaches CSV, HTML and terminal from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from results.records import Record


class CountedLayers(Record):
    """Of a modelled machine that prices another number of layers than ran: counters are of those that ran."""

    n_run: int
    n_priced: int

    @property
    def words(self) -> str:
        return f"of the {self.n_run} layers that ran; priced are {self.n_priced}"


class EngineCounters(Record):
    """What the technique did, observed and summed over the window (routed pairs are (token, expert) choices)."""

    counted_layers: CountedLayers | None = None
    """None where the counters are of all layers that are timed."""
    routed_pairs: int = 0
    dropped_pairs: int = 0
    computed_rows: int = 0
    """Rows that went through an expert, padding included."""
    padded_rows: int = 0
    expert_calls: int = 0
    weight_loads: int | None = None
    """Experts whose weights a call loaded; fewer than calls where one finds them there from the one before. All slices
    of an expert are one load. None: not counted, as in stores of before."""
    rows_not_fetched: int | None = None
    """Of the padded ones, those that no transfer brought in. None: none was left out, or not counted, as in stores of
    before."""
    bytes_moved: int = 0
    """As the plans of its layers say; of experts that this engine copies, as they were copied."""
    bytes_copied: int | None = None
    """Of these, the ones that this engine really copied; 0 where moves are planned and counted only. None: nothing
    moves, or not told apart, as in stores of before."""
    copying_s: float | None = None
    """While experts were copied, in prefill and decoding. None: nothing was, or not measured; so are the next ones."""
    decode_timed_s: float | None = None
    """Of decode steps, from their beginning until their tokens were known."""
    decode_waited_s: float | None = None
    """Of these, while what computes waited for experts that were being copied."""
    decode_copied_s: float | None = None
    """While experts were copied in decode steps; of these seconds hidden ones, while others were computed."""
    decode_hidden_s: float | None = None
    decode_hideable_s: float | None = None
    """The most that could be hidden: of each step the shorter of computing and copying."""
    bytes_exchanged: int | None = None
    """Activations that units sent each other. None: no unit sends any, or not counted, as in stores of before."""
    hits: int | None = None
    misses: int | None = None
    prefetched: int | None = None
    """Transfers of weights that a later layer waits for. None: the technique does not prefetch, or not counted."""
    prefetched_unused: int | None = None
    """Of these, the ones that left their slot, or saw the request end, before anything called them."""
    predicted: int | None = None
    """Of the routed pairs, those whose experts a layer before had guessed at. None: the technique does not guess, or
    not counted."""
    recalled: int | None = None
    """Of these, the ones whose expert was among the guessed: what the router chose, whatever was executed."""

    @classmethod
    def total(cls, counted: Iterable[EngineCounters]) -> EngineCounters:
        """Sums; of what none of them counted, None."""
        counted = tuple(counted)
        names = cls.model_fields.keys() - {"counted_layers"}
        columns = {name: [getattr(one, name) for one in counted] for name in names}
        known = {name: [n for n in column if n is not None] for name, column in columns.items()}
        return cls(**{name: sum(column) for name, column in known.items() if column})

    @property
    def drop_rate(self) -> float | None:
        return self.dropped_pairs / self.routed_pairs if self.routed_pairs else None

    @property
    def copy_rate(self) -> float | None:
        """Bytes a second, while copies were made."""
        return self.bytes_copied / self.copying_s if self.bytes_copied and self.copying_s else None

    @property
    def compute_share(self) -> float | None:
        """Of the time of decode steps, that in which nothing waited for a copy."""
        waited = self.wait_share
        return None if waited is None else 1 - waited

    @property
    def wait_share(self) -> float | None:
        """The rest: what computes waited for experts."""
        return _share(self.decode_timed_s, self.decode_waited_s)

    @property
    def copy_share(self) -> float | None:
        """Of the same time, that in which experts were copied; it and computing may go on together."""
        return _share(self.decode_timed_s, self.decode_copied_s)

    @property
    def hidden_share(self) -> float | None:
        """Of what could be hidden of copying behind computing, what was."""
        return _share(self.decode_hideable_s, self.decode_hidden_s)

    @property
    def recall(self) -> float | None:
        """recall@k of the predictions."""
        return None if self.recalled is None or not self.predicted else self.recalled / self.predicted

    @property
    def pad_rate(self) -> float | None:
        """Padding over computed rows: (sum C_e - kept) / sum C_e."""
        return self.padded_rows / self.computed_rows if self.computed_rows else None


def _share(whole: float | None, part: float | None) -> float | None:
    return None if part is None or not whole else part / whole


Table = Literal[
    "Experts", "Padding", "Exchanges", "Cache of experts", "Predicted experts", "Prefetched experts", "Copied experts"
]
NOT_ROUTED = "no token was routed to an expert"


@dataclass(frozen=True)
class Counter:
    """A figure of one window.

    metric, unit: in the tidy table. column: in the summary. heading: in the page. reason: why it has no value.
    short: over a column of the terminal's table; the others stand in a line below it, where they part the arms.
    is_optional: has no row where it has no value; most techniques have nothing of the kind. table: of the page.
    """

    metric: str
    unit: str
    column: str
    heading: str
    read: Callable[[EngineCounters], float | None]
    reason: str = NOT_ROUTED
    short: str | None = None
    is_optional: bool = False
    table: Table = "Experts"


def _optional(
    metric: str,
    unit: str,
    heading: str,
    read: Callable[[EngineCounters], float | None],
    table: Table,
    column: str | None = None,
) -> Counter:
    return Counter(metric, unit, column or metric, heading, read, is_optional=True, table=table)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


COUNTERS = (
    Counter("drop_rate", "%", "dropped_percent", "dropped", lambda c: _percent(c.drop_rate), short="drop %"),
    Counter("pad_rate", "%", "padded_percent", "padded", lambda c: _percent(c.pad_rate), short="pad %"),
    Counter("expert_calls", "calls", "expert_calls", "calls", lambda c: c.expert_calls),
    Counter(
        "weight_loads", "experts", "weight_loads", "loads", lambda c: c.weight_loads, "weight loads were not counted"
    ),
    Counter("bytes_moved", "B", "bytes_moved", "moved", lambda c: c.bytes_moved),
    _optional("rows_not_fetched", "rows", "not fetched", lambda c: c.rows_not_fetched, "Padding"),
    _optional("bytes_exchanged", "B", "exchanged", lambda c: c.bytes_exchanged, "Exchanges"),
    _optional("hits", "experts", "hits", lambda c: c.hits, "Cache of experts"),
    _optional("misses", "experts", "misses", lambda c: c.misses, "Cache of experts"),
    _optional("predicted", "pairs", "predicted", lambda c: c.predicted, "Predicted experts"),
    _optional("recall", "%", "recalled", lambda c: _percent(c.recall), "Predicted experts", "recall_percent"),
    _optional("prefetched", "experts", "prefetched", lambda c: c.prefetched, "Prefetched experts"),
    _optional("prefetched_unused", "experts", "unused", lambda c: c.prefetched_unused, "Prefetched experts"),
    _optional("bytes_copied", "B", "copied", lambda c: c.bytes_copied, "Copied experts"),
    _optional("copy_rate", "B/s", "rate", lambda c: c.copy_rate, "Copied experts", "copied_bytes_per_s"),
    _optional(
        "compute_share", "%", "computing", lambda c: _percent(c.compute_share), "Copied experts", "compute_percent"
    ),
    _optional("wait_share", "%", "waiting", lambda c: _percent(c.wait_share), "Copied experts", "wait_percent"),
    _optional("copy_share", "%", "copying", lambda c: _percent(c.copy_share), "Copied experts", "copy_percent"),
    _optional("hidden_share", "%", "hidden", lambda c: _percent(c.hidden_share), "Copied experts", "hidden_percent"),
)
