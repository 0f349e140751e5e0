"""What the shares of time that 003 prints bound, by its own Eq. 1."""

from __future__ import annotations

from harness.reproduce.ledger import Ledger

COMPUTE_SHARE = "003-008"


def stated_shares(book: Ledger) -> tuple[float, float]:
    """Least and most of compute in the time on demand, of Qwen3-30B-A3B on the A6000 (Fig. 7)."""
    low, high = book.ends(COMPUTE_SHARE)
    return low / 100, high / 100
