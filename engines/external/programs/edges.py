"""When the last phase of a program ended, from what was seen of it: its last words arrive, and then it ends.

Each may be late for itself: the shell that waits for the program, which also frees its memory first, and the link that
carries its words. Neither is early. So the earlier of the two is taken, and what is left is carried into the joules.
One delay is seen, two are not: words that a link holds up while the program still frees its memory count as in time.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Edge(NamedTuple):
    """uncertainty_s: standard."""

    at_s: float
    uncertainty_s: float


def last_edge(ended: Edge, arrived_s: float, trip_s: float) -> Edge:
    """All on the run's clock. ended: of the program. arrived_s: of its last words, here. trip_s: how long the link
    takes, there and back.

    Words that took longer than that were held up, and say only how disturbed the link was: what was held up with them
    may have been the program's end.
    """
    written_s = arrived_s - trip_s
    if written_s > ended.at_s:
        return Edge(ended.at_s, math.hypot(ended.uncertainty_s, (written_s - ended.at_s) / math.sqrt(12)))
    latest_s = min(arrived_s, ended.at_s + math.sqrt(3) * ended.uncertainty_s)
    return Edge((written_s + latest_s) / 2, (latest_s - written_s) / math.sqrt(12))
