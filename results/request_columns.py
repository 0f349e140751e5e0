"""What tables ask of all requests of a trial, column by column: of packed ones no record is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from results.derivation import not_alone
from results.latencies import Stretches, first_token_s, gaps_s, lasting_s, per_token_s
from results.packed import column_of
from results.records import Completion, Phase, Score


def edges_s(completions: Sequence[Completion], phase: Phase) -> tuple[Sequence[float], Sequence[float]]:
    """When each request's phase began and ended. Decoding ends with the last token: a server's connection may stay
    open behind it. Of one token at most it takes no time."""
    if phase == "decode":
        begins_s: Sequence[float] = column_of(completions, "prefill_end_s")
        token_times_s: Sequence[Sequence[float]] = column_of(completions, "token_times_s")
        behind = zip(begins_s, n_generated(completions), token_times_s, strict=True)
        return begins_s, [times_s[-1] if n > 1 else begin_s for begin_s, n, times_s in behind]
    return column_of(completions, "start_s"), column_of(completions, "prefill_end_s" if phase == "prefill" else "end_s")


class RequestColumns:
    """Each column has a value for each request of a trial, in their order."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions
        self._starts_s: Sequence[float] = column_of(completions, "start_s")
        self._token_times_s: Sequence[Sequence[float]] = column_of(completions, "token_times_s")
        self._aside_s: Sequence[Stretches] = column_of(completions, "set_aside_s")

    @property
    def ttft_s(self) -> list[float | None]:
        return list(map(first_token_s, self._starts_s, self._token_times_s, self._aside_s))

    @property
    def tpot_s(self) -> list[float | None]:
        return list(map(per_token_s, self._token_times_s, self._aside_s))

    @property
    def e2e_s(self) -> list[float]:
        return lasting(self._completions, "all")

    @property
    def itl_s(self) -> list[float]:
        """Of all requests together: a value for each gap."""
        return list(chain.from_iterable(map(gaps_s, self._token_times_s, column_of(self._completions, "is_spread"))))


def lasting(completions: Sequence[Completion], phase: Phase) -> list[float]:
    """How long each request was in a phase."""
    return list(map(lasting_s, *edges_s(completions, phase), column_of(completions, "set_aside_s")))


def waiting_s(completions: Sequence[Completion]) -> list[float]:
    """From the arrival of each until the engine took it; 0 of those that do not arrive by themselves."""
    starts_s, arrivals_s = column_of(completions, "start_s"), column_of(completions, "arrival_s")
    return [0.0 if at_s is None else start_s - at_s for start_s, at_s in zip(starts_s, arrivals_s, strict=True)]


def n_generated(completions: Sequence[Completion]) -> list[int]:
    return list(map(len, column_of(completions, "token_ids")))


def are_due(completions: Sequence[Completion]) -> bool:
    """Whether requests arrive by themselves."""
    return any(arrival_s is not None for arrival_s in column_of(completions, "arrival_s"))


def shared_time(completions: Sequence[Completion]) -> dict[str, str]:
    """As `not_alone`; that requests follow each other is seen at a glance."""
    starts_s, ends_s = column_of(completions, "start_s"), column_of(completions, "end_s")
    if all(end_s <= next_s for end_s, next_s in zip(ends_s, starts_s[1:], strict=False)):
        return {}
    return not_alone(completions)


def scores_told(scores: Sequence[Score]) -> Iterator[tuple[str | None, str, float]]:
    """(sample, metric, value) of each; no sample: of the whole."""
    return zip(*(column_of(scores, name) for name in ("sample_id", "metric", "value")), strict=True)
