"""What a technique did, as figures: each counter is one line of `COUNTERS` and reaches CSV, HTML and terminal from
there. What an engine counts is `results.records.EngineCounters`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from results.records import EngineCounters

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
    metric: str, unit: str, heading: str, read: Callable[[EngineCounters], float | None], table: Table
) -> Counter:
    return Counter(metric, unit, metric, heading, read, is_optional=True, table=table)


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
    _optional("recall", "%", "recalled", lambda c: _percent(c.recall), "Predicted experts"),
    _optional("prefetched", "experts", "prefetched", lambda c: c.prefetched, "Prefetched experts"),
    _optional("prefetched_unused", "experts", "unused", lambda c: c.prefetched_unused, "Prefetched experts"),
    _optional("bytes_copied", "B", "copied", lambda c: c.bytes_copied, "Copied experts"),
    _optional("copy_rate", "B/s", "rate", lambda c: c.copy_rate, "Copied experts"),
    _optional("compute_share", "%", "computing", lambda c: _percent(c.compute_share), "Copied experts"),
    _optional("wait_share", "%", "waiting", lambda c: _percent(c.wait_share), "Copied experts"),
    _optional("copy_share", "%", "copying", lambda c: _percent(c.copy_share), "Copied experts"),
    _optional("hidden_share", "%", "hidden", lambda c: _percent(c.hidden_share), "Copied experts"),
)
