"""Which of RAPL's counters are of a package of their own.

A package of AMD has one energy counter. Linux 6.9, and some releases after it, take each of its core complexes (CCD)
for a die with a counter of its own, and list that one once for each: as zones `package-0-die-0`, `package-0-die-1`, and
as CPUs in the mask of perf's events. Added up, a package of twelve draws twelve times its power. Newer ones list it
once (Linux, "Fix the energy-pkg event for AMD CPUs", in powercap and in perf). Intel's dies count each for themselves.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable
from pathlib import Path

from devices.cpu_policy import CPUS
from devices.sysfs import read_word

CPUINFO = Path("/proc/cpuinfo")
ONE_A_PACKAGE = frozenset(("AuthenticAMD", "HygonGenuine"))
"""Vendors whose dies share their package's counter."""
_VENDOR = re.compile(r"^vendor_id\s*:\s*(\S+)", re.MULTILINE)
_DIE = re.compile(r"(package-\d+)-die-\d+")


def repeated_zones(names: Iterable[str]) -> list[bool]:
    """Of powercap's zones, by their names: which show a counter again that one before them shows."""
    return _repeated(found[1] if (found := _DIE.fullmatch(name)) else None for name in names)


def repeated_cpus(cpus: Iterable[int], folder: Path = CPUS) -> list[bool]:
    """Of the CPUs on which perf counts packages: which are in the package of one before them."""
    return _repeated(read_word(folder / f"cpu{cpu}" / "topology" / "physical_package_id") for cpu in cpus)


def _repeated(packages: Iterable[Hashable | None]) -> list[bool]:
    """packages: None where it is not told; those stand for themselves."""
    if not _is_one_a_package():
        return [False for _ in packages]
    seen: set[Hashable] = set()
    repeated = []
    for package in packages:
        repeated.append(package is not None and package in seen)
        seen.add(package)
    return repeated


def _is_one_a_package() -> bool:
    try:
        found = _VENDOR.search(CPUINFO.read_text(errors="replace"))
    except OSError:
        return False
    return found is not None and found[1] in ONE_A_PACKAGE
