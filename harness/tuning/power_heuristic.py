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

from harness.tuning.selections import CoreCluster, CoreKind, Selection


class Heuristic(Protocol):
    """Watts of a selection, by whatever is known of the device."""

    def watts(self, clusters: Sequence[CoreCluster], selection: Selection) -> float: ...


@dataclass(frozen=True)
class PowerHeuristic:
    """Constants of h. The fork's figures of 0.8 and 0.4 are read as scales of a cluster (a_i), 0.7 as b."""

    w_per_ghz2: float = 0.2
    scales: Mapping[CoreKind, float] = field(
        default_factory=lambda: {"prime": 1.0, "performance": 0.8, "efficiency": 0.4}
    )
    idle_factor: float = 0.7
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


def clock_load_ghz2(
    clusters: Sequence[CoreCluster], selection: Selection, scales: Mapping[CoreKind, float], idle_factor: float
) -> float:
    """The sum of Eq. 9 without its watts: what power rises with. Raises ValueError where a clock is not known."""
    share = _selected_share(clusters, selection)
    total = 0.0
    for cluster, n in zip(clusters, selection, strict=True):
        cores = n + (cluster.n_cores - n) * idle_factor
        total += scales[cluster.kind] * cores * (_ghz(cluster) * share) ** 2
    return total


def _selected_share(clusters: Sequence[CoreCluster], selection: Selection) -> float:
    """s of Eq. 9: by it the governor scales every clock."""
    capacities = [cluster.capacity for cluster in clusters if cluster.capacity is not None]
    speeds = capacities if len(capacities) == len(clusters) else [_ghz(cluster) for cluster in clusters]
    return max(speed for speed, n in zip(speeds, selection, strict=True) if n) / max(speeds)


def _ghz(cluster: CoreCluster) -> float:
    if cluster.max_frequency_ghz is None:
        raise ValueError(f"{cluster.name}: its highest clock is not known, and the heuristic power needs it")
    return cluster.max_frequency_ghz
