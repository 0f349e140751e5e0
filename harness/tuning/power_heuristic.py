"""What a selection of cores should draw, before anything is measured: h(I) of source 002 (Eq. 9).

    h(I) = sum_i a_i (|I_i| + (|C_i| - |I_i|) b) (f_max,i s)^2 + P_s        s = capacity of the biggest selected core
                                                                                / capacity of the biggest core

The paper gives the form and no constant. Those here are the authors' public engine fork's: 0.2 W/GHz^2, less for
performance and efficiency cores, idle cores at 0.7 of a busy one, 1 W besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from devices.models.core_clusters import IDLE_FACTOR, SCALES, CoreCluster, CoreKind, Selection, clock_load_ghz2


class Heuristic(Protocol):
    """Watts of a selection, by whatever is known of the device."""

    def watts(self, clusters: Sequence[CoreCluster], selection: Selection) -> float: ...


@dataclass(frozen=True)
class PowerHeuristic:
    """Constants of h. The fork's figures of 0.8 and 0.4 are read as scales of a cluster (a_i), 0.7 as b."""

    w_per_ghz2: float = 0.2
    scales: Mapping[CoreKind, float] = field(default_factory=lambda: SCALES)
    idle_factor: float = IDLE_FACTOR
    static_w: float = 1.0

    def watts(self, clusters: Sequence[CoreCluster], selection: Selection) -> float:
        """h of a selection. Raises ValueError where a cluster's clock is not known."""
        return self.static_w + self.w_per_ghz2 * clock_load_ghz2(clusters, selection, self.scales, self.idle_factor)


@dataclass(frozen=True)
class ThreadHeuristic:
    """h where threads cannot be bound and no clock is known (iOS): so much a thread, and so much besides.

    1.8 W is what the other heuristic gives a prime core of 3 GHz. Only the ratio of the two figures decides.
    """

    w_per_thread: float = 1.8
    static_w: float = 1.0

    def watts(self, clusters: Sequence[CoreCluster], selection: Selection) -> float:
        return self.static_w + self.w_per_thread * sum(selection)
