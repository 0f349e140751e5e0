"""The run's clock. One monotonic clock stamps readings, tokens and windows; the wall clock never enters arithmetic."""

from __future__ import annotations

import time


class MonotonicClock:
    """Seconds since an arbitrary start. Never steps back, also when somebody sets the time."""

    def now_s(self) -> float:
        return time.monotonic_ns() / 1e9

    def sleep_until_s(self, at_s: float) -> None:
        left_s = at_s - self.now_s()
        if left_s > 0:
            time.sleep(left_s)
