"""From a device's topology to the clusters that a search chooses from, and from a selection to numbers of cores."""

from __future__ import annotations

import pytest

from devices.android.topology import CPU_FOLDER, build_topology
from harness.tuning.core_places import CorePlaces, host_places, phone_places, read_host_files, thread_places
from tests.test_android_topology import sysfs_files


def kinds(places: CorePlaces) -> list[tuple[int, str]]:
    return [(cluster.n_cores, cluster.kind) for cluster in places.clusters]


def phone(clusters: list[tuple[str, int]]) -> dict[str, str]:
    """Files of a phone without names: (cores as the kernel lists them, kHz)."""
    files = {f"{CPU_FOLDER}/online": "0-7"}
    for listed, khz in clusters:
        first, _, last = listed.partition("-")
        for core in range(int(first), int(last or first) + 1):
            files[f"{CPU_FOLDER}/cpu{core}/cpufreq/related_cpus"] = listed
            files[f"{CPU_FOLDER}/cpu{core}/cpufreq/cpuinfo_max_freq"] = str(khz)
    return files


@pytest.mark.parametrize(
    ("dump", "expected", "two_biggest"),
    [
        ("galaxy-s9-global", [(4, "prime"), (4, "efficiency")], (4, 5)),
        # The small cluster has 0.8 of the clock; its name tells.
        ("galaxy-s8-us", [(4, "prime"), (4, "efficiency")], (4, 5)),
        # Cores of 0.73 of the clock that are as big by name.
        ("huawei-mate-20", [(2, "prime"), (2, "performance"), (4, "efficiency")], (6, 7)),
        ("galaxy-a8-2018", [(2, "prime"), (6, "efficiency")], (6, 7)),
    ],
)
def test_clusters_read_off_recorded_phones_by_hand(
    dump: str, expected: list[tuple[int, str]], two_biggest: tuple[int, ...]
) -> None:
    places = phone_places(build_topology(sysfs_files(dump)))
    assert kinds(places) == expected
    assert places.cores_of((2,) + (0,) * (len(expected) - 1)) == two_biggest


def test_a_phone_of_unknown_cores_is_read_by_its_clocks() -> None:
    """Clocks of the Mate 40 Pro, Table 2 of source 002."""
    places = phone_places(build_topology(phone([("0-3", 2050000), ("4-6", 2540000), ("7", 3130000)])))
    assert kinds(places) == [(1, "prime"), (3, "performance"), (4, "efficiency")]
    assert places.cores_of((0, 2, 0)) == (4, 5)
    assert places.cores_of((1, 1, 2)) == (0, 1, 4, 7)


def test_a_hosts_hardware_threads_and_favoured_cores_make_one_cluster() -> None:
    """Four cores of two threads, a clock policy for each thread, one core 4 % faster; core 1 may not be used."""
    files = {f"{CPU_FOLDER}/online": "0-7"}
    for core in range(8):
        files[f"{CPU_FOLDER}/cpu{core}/cpufreq/related_cpus"] = str(core)
        files[f"{CPU_FOLDER}/cpu{core}/cpufreq/cpuinfo_max_freq"] = "5200000" if core % 4 == 2 else "5000000"
        files[f"{CPU_FOLDER}/cpu{core}/topology/thread_siblings_list"] = f"{core % 4},{core % 4 + 4}"
    places = host_places(files, usable={0, 2, 3, 4, 5, 6, 7})
    assert kinds(places) == [(4, "prime")]
    # 5 stands for the core whose first thread is not ours.
    assert places.cores_of((4,)) == (0, 2, 3, 5)


def test_a_host_of_two_kinds_of_cores_has_two_clusters() -> None:
    places = host_places(phone([("0-3", 5000000), ("4-7", 3500000)]), usable=range(8))
    assert kinds(places) == [(4, "prime"), (4, "efficiency")]


def test_this_machines_files_show_the_core_that_runs_this() -> None:
    places = host_places(read_host_files(), usable={0})
    assert places.cores_of((1,)) == (0,)


def test_threads_have_no_cores() -> None:
    places = thread_places(6)
    assert places.cores_of((2,)) is None
    with pytest.raises(ValueError, match=r"\(7,\) does not fit into clusters of \[6\] cores"):
        places.cores_of((7,))
    with pytest.raises(ValueError, match="0 threads: at least one"):
        thread_places(0)


def test_cores_that_are_not_shown_are_refused() -> None:
    with pytest.raises(ValueError, match=r"none of the cores \[12\]"):
        host_places(phone([("0-7", 2000000)]), usable={12})
