"""How the authors of source 002 tune prefill: how much of the work goes to the big cores.

Prefill runs on big and middle cores at once, and a rate says which share the big ones get, in percent. Their public
fork times 64 tokens at each rate from 50 to 90 in steps of 5, twice, and keeps the rate of the shortest time. Nothing
of it is energy, and nothing is tested against noise; a `race` of rates with the objective `latency` does that.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from harness.tuning.race import Answer, Ask, Failed

RATES = tuple(range(50, 91, 5))
PROBE_TOKENS = 64
REPEATS = 2


@dataclass(frozen=True)
class RateFound:
    """What was chosen. seconds: of each probe, by rate."""

    chosen: int
    seconds: dict[int, tuple[float, ...]]


def prefill_rates(
    rates: Sequence[int] = RATES, repeats: int = REPEATS, n_tokens: int = PROBE_TOKENS
) -> Generator[Ask[int], Answer, RateFound]:
    """A search as `race`. A rate that cannot be probed is left out. Raises ValueError where none can."""
    seconds: dict[int, tuple[float, ...]] = {}
    reason = "there is none"
    for rate in rates:
        for repeat in range(1, repeats + 1):
            answer = yield Ask(rate, repeat, "candidates", len(rates))
            if isinstance(answer, Failed):
                reason = answer.reason
                break
            seconds[rate] = (*seconds.get(rate, ()), n_tokens / answer.speed_tokens_per_s)
    if not seconds:
        raise ValueError(f"no rate of prefill could be probed: {reason}")
    return RateFound(min(seconds, key=lambda rate: min(seconds[rate])), seconds)
