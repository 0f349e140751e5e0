"""Which cores a selection stands for: clusters of a device, the biggest first, and the numbers of their cores.

phones      cores that share a clock are a cluster, as source 002 has them
Linux       the same files; clusters within 10 % of each other's clock are one (x86 shows a policy for each core, and
            favours some by a few percent), and of a core with several hardware threads the first alone is taken
elsewhere   macOS and iOS bind no thread to cores: one cluster of threads, and a selection is their number
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from devices.android.topology import CPU_FOLDER, CPUINFO, Cluster, Topology, build_topology, parse_core_list
from devices.models.core_clusters import CoreCluster, CoreKind, Selection

LITTLE = (
    "Cortex-A5",
    "Cortex-A7",
    "Cortex-A32",
    "Cortex-A34",
    "Cortex-A35",
    "Cortex-A53",
    "Cortex-A55",
    "Cortex-A510",
    "Cortex-A520",
    "Icestorm",
)
"""Cores that their makers sell as the small ones. Kryo's are called Silver."""
LITTLE_CLOCK = 0.75
"""Of the biggest cluster's highest clock: below it a cluster of unknown cores counts as efficiency cores. On source
002's phones (Table 2) efficiency cores have 0.65 to 0.69, and performance cores 0.81 to 0.95."""
ALIKE = 0.1
"""Of a host's clusters: their clocks may differ by this share."""
HOST_FILES = (
    "online",
    "present",
    "cpu[0-9]*/cpu_capacity",
    "cpu[0-9]*/cpufreq/cpuinfo_max_freq",
    "cpu[0-9]*/cpufreq/related_cpus",
    "cpu[0-9]*/topology/core_siblings_list",
    "cpu[0-9]*/topology/thread_siblings_list",
)


@dataclass(frozen=True)
class CorePlaces:
    """Clusters, and which cores each has. cores: empty where threads cannot be bound."""

    clusters: tuple[CoreCluster, ...]
    cores: tuple[tuple[int, ...], ...] = ()

    def cores_of(self, selection: Selection) -> tuple[int, ...] | None:
        """In ascending order, the first of each cluster, for its cores are alike; None where threads cannot be bound.

        Raises ValueError for a selection that these clusters do not have.
        """
        sizes = [cluster.n_cores for cluster in self.clusters]
        if len(selection) != len(sizes) or not any(selection):
            raise ValueError(f"{selection} selects nothing of clusters of {sizes} cores; give one number a cluster")
        if any(not 0 <= n <= size for n, size in zip(selection, sizes, strict=True)):
            raise ValueError(f"{selection} does not fit into clusters of {sizes} cores")
        if not self.cores:
            return None
        return tuple(sorted(core for own, n in zip(self.cores, selection, strict=True) for core in own[:n]))


def thread_places(n_threads: int) -> CorePlaces:
    """Where threads cannot be bound. Raises ValueError below 1."""
    if n_threads < 1:
        raise ValueError(f"{n_threads} threads: at least one must compute")
    return CorePlaces((CoreCluster("thread", n_threads, "prime"),))


def phone_places(topology: Topology) -> CorePlaces:
    """Of a phone: every cluster that it shows, cores that are off line left out."""
    return _places(tuple(reversed(topology.clusters)))


def host_places(files: Mapping[str, str], usable: Collection[int]) -> CorePlaces:
    """Of a Linux machine. files: path to content, as `read_host_files`; usable: the cores of this process.

    Raises ValueError where no usable core is shown.
    """
    topology = build_topology(files)
    siblings = {core: parse_core_list(files.get(_thread_file(core), "")) or (core,) for core in usable}
    first = {core for core, own in siblings.items() if core == min(c for c in own if c in usable)}
    clusters: list[Cluster] = []
    for cluster in reversed(topology.clusters):
        own = tuple(core for core in cluster.cores if core in first)
        if not own:
            continue
        if clusters and _are_alike(clusters[-1], cluster):
            clusters[-1] = replace(clusters[-1], cores=tuple(sorted((*clusters[-1].cores, *own))))
        else:
            clusters.append(replace(cluster, cores=own))
    if not clusters:
        raise ValueError(f"none of the cores {sorted(usable)} that this process may use is shown by {CPU_FOLDER}")
    return _places(clusters)


def read_host_files(root: Path = Path("/")) -> dict[str, str]:
    """What `host_places` reads of this machine; files that are hidden or absent are left out."""
    folder = root / CPU_FOLDER.removeprefix("/")
    paths = [root / CPUINFO.removeprefix("/"), *(path for pattern in HOST_FILES for path in folder.glob(pattern))]
    return {f"/{path.relative_to(root)}": text for path in paths if (text := _text(path)) is not None}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _thread_file(core: int) -> str:
    return f"{CPU_FOLDER}/cpu{core}/topology/thread_siblings_list"


def _are_alike(bigger: Cluster, cluster: Cluster) -> bool:
    """Both unknown, or within `ALIKE`."""
    for one, other in (
        (bigger.max_frequency_mhz, cluster.max_frequency_mhz),
        (bigger.capacity, cluster.capacity),
    ):
        if (one is None) != (other is None):
            return False
        if one is not None and other is not None and abs(one - other) > ALIKE * max(one, other):
            return False
    return bigger.name == cluster.name


def _places(clusters: Sequence[Cluster]) -> CorePlaces:
    """clusters: the biggest first."""
    return CorePlaces(
        tuple(_cluster(one, clusters[0]) for one in clusters), tuple(tuple(one.cores) for one in clusters)
    )


def _cluster(cluster: Cluster, biggest: Cluster) -> CoreCluster:
    ghz = None if cluster.max_frequency_mhz is None else cluster.max_frequency_mhz / 1e3
    name = cluster.name or "CPU"
    return CoreCluster(
        name if ghz is None else f"{name}({ghz:.2f}GHz)",
        len(cluster.cores),
        "prime" if cluster is biggest else _kind(cluster, biggest),
        ghz,
        None if cluster.capacity is None else float(cluster.capacity),
    )


def _kind(cluster: Cluster, biggest: Cluster) -> CoreKind:
    """Of one that is not the biggest: by its name, and where that is not known by its clock."""
    name = cluster.name or ""
    if name and not name.startswith("0x"):
        is_little = _begins(name, LITTLE) or name.endswith("Silver")
        return "efficiency" if is_little else "performance"
    if cluster.max_frequency_mhz is None or biggest.max_frequency_mhz is None:
        return "performance"
    return "efficiency" if cluster.max_frequency_mhz < LITTLE_CLOCK * biggest.max_frequency_mhz else "performance"


def _begins(name: str, words: Iterable[str]) -> bool:
    """Whole words: Cortex-A7 is no Cortex-A78."""
    return name.split(" ")[0] in words
