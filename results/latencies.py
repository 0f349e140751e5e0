"""How long a request took, and its parts: of one request, and of all requests of a trial as columns.

What was set aside in a request is in none of its latencies.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from operator import sub

Stretches = Sequence[tuple[float, float]]


def lasting_s(from_s: float, to_s: float, set_aside_s: Stretches) -> float:
    """Without what was set aside meanwhile."""
    if not set_aside_s:
        return to_s - from_s
    return to_s - from_s - sum(max(0.0, min(to_s, b_s) - max(from_s, a_s)) for a_s, b_s in set_aside_s)


def first_token_s(start_s: float, token_times_s: Sequence[float], set_aside_s: Stretches) -> float | None:
    """TTFT; None for a log-likelihood, which emits no token."""
    return lasting_s(start_s, token_times_s[0], set_aside_s) if token_times_s else None


def n_behind_first(token_times_s: Sequence[float]) -> int:
    """Tokens that came later than the first one. A server's first chunk may bring several: those were computed before
    its stamp, and the time behind it is none of theirs."""
    return len(token_times_s) - bisect_right(token_times_s, token_times_s[0]) if token_times_s else 0


def per_token_s(token_times_s: Sequence[float], set_aside_s: Stretches) -> float | None:
    """TPOT: the time behind the first stamp over the tokens that came in it, (E2E - TTFT) / (n - 1) where each token
    has a stamp of its own; None where none came later."""
    n = n_behind_first(token_times_s)
    return lasting_s(token_times_s[0], token_times_s[-1], set_aside_s) / n if n else None


def gaps_s(token_times_s: Sequence[float], is_spread: bool) -> tuple[float, ...]:
    """Inter-token latencies, whose mean is TPOT; none where tokens have no stamps of their own."""
    if is_spread:
        return ()
    first = len(token_times_s) - n_behind_first(token_times_s)
    return tuple(map(sub, token_times_s[first:], token_times_s[first - 1 :])) if first else ()
