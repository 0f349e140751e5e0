"""How long a request took, and its parts: of one request, and of all requests of a trial as columns.

What was set aside in a request is in none of its latencies.
"""

from __future__ import annotations

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


def per_token_s(token_times_s: Sequence[float], set_aside_s: Stretches) -> float | None:
    """TPOT, (E2E - TTFT) / (n - 1); None below two tokens."""
    n = len(token_times_s)
    return lasting_s(token_times_s[0], token_times_s[-1], set_aside_s) / (n - 1) if n >= 2 else None


def gaps_s(token_times_s: Sequence[float], is_spread: bool) -> tuple[float, ...]:
    """Inter-token latencies; none where tokens have no stamps of their own."""
    return () if is_spread else tuple(map(sub, token_times_s[1:], token_times_s))
