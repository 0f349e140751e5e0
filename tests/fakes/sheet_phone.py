"""A fake phone whose `llama-bench` computes as a sheet's cluster model says, on the cores that `taskset` gives it.

    decode    the sheet's model: bound by memory, so that speed saturates (`devices.models.core_clusters`)
    prefill   bound by arithmetic: PREFILL times one big core's speed for each core's worth of demand
    power     the model's, from the program's start to shortly after its end; IDLE_W otherwise

Little cores have the lowest numbers, as on phones. Time is a multiple of the sheet's: every speed is `faster` times as
high. The program tells the time for which it slept, so that a busy machine changes no speed; joules are read from the
battery as it runs. Nothing here was measured.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from devices.models.core_clusters import CoreCluster, DecodeModel, Selection, demand
from harness.tuning.race import Reading
from tests.fakes.battery import DRAWS
from tests.fakes.phone import FakePhone

IDLE_W = 0.5
PREFILL = 4.0
_AFTER_US = 60_000
_CPUS = "/sys/devices/system/cpu"
_PARTS = (0xD05, 0xD0B, 0xD4B)
"""A55, A76, A78C: names do not matter to the fake, and sizes follow from the clocks."""
_TASKSET = """#!/bin/sh
echo "Cpus_allowed: $1" >"$PHONE/proc/self/status"; export MASK=$1; shift; exec "$@"
"""
HUNG = f"601.{os.getpid()}"
"""Seconds; told apart from what tests in other processes let hang."""
LLAMA_BENCH = f"""#!/bin/bash
while [ $# -gt 0 ]; do case $1 in -p) p=$2;; -n) n=$2;; -d) d=$2;; -t) t=$2;; esac; shift; done
phase=decode; k=$n
[ "$p" -gt 0 ] && phase=prefill && k=$p
read -r ns watts cores <"$PHONE/figures/$phase-$MASK" || exit 3
[ "$t" = "$cores" ] || exit 4
read -r noise <"$PHONE/noise"
one=$((k*ns)); one=$((one + one/1000*(RANDOM%(2*noise+1)-noise)/10))
now=${{EPOCHREALTIME/./}}
printf '%s\n' "$now $watts" "$((now + one/1000 + {_AFTER_US})) {IDLE_W}" >>"$PHONE/{DRAWS}"
echo "$phase $MASK" >>"$PHONE/runs"
if [ -e "$PHONE/hang" ]; then rm "$PHONE/hang"; exec sleep {HUNG}; fi
sleep $((one/1000000000)).$(printf %09d $((one%1000000000)))
echo '['
echo '{{"build_commit": "fake", "backends": "CPU", "n_prompt": '$p', "n_gen": '$n', "n_depth": '${{d:-0}}','
echo '"n_threads": '$t', "samples_ns": ['$one']}}'
echo ']'
"""


class SheetPhone(FakePhone):
    """noise: each run's time differs by up to this share, evenly."""

    rooted = re.compile(rf"{FakePhone.rooted.pattern}|/(?=proc/self/status\b)")

    def __init__(
        self, root: Path, model: DecodeModel, serial: str = "FAKE0001", faster: float = 1.0, noise: float = 0.0
    ) -> None:
        super().__init__(root, serial)
        self.model = model
        self.faster = faster
        self.cores = _numbered(model.clusters)
        self._write_topology(model.clusters)
        self.file("/proc/meminfo", "MemTotal:       8000000 kB\n")
        self.file("/noise", f"{round(noise * 1e4)}\n")
        (root / "proc/self").mkdir(parents=True, exist_ok=True)
        taskset = root / "bin" / "taskset"
        taskset.write_text(_TASKSET)
        taskset.chmod(0o755)
        (root / "figures").mkdir()
        for mask in range(1, 1 << sum(cluster.n_cores for cluster in model.clusters)):
            selection = tuple(sum(bool(mask >> core & 1) for core in own) for own in self.cores)
            for phase, reading in self.readings(selection).items():
                ns = round(1e9 / reading.speed_tokens_per_s)
                row = f"{ns} {reading.power_w} {sum(selection)}\n"
                (root / "figures" / f"{phase}-{mask:x}").write_text(row)

    def readings(self, selection: Selection) -> Mapping[str, Reading]:
        """Speed and power of each phase, as the model has them: what a session should find."""
        power = self.model.power(selection)
        big = self.model.tokens_per_s((1, *(0,) * (len(selection) - 1))) * self.faster
        return {
            "prefill": Reading(PREFILL * big * demand(self.model.clusters, selection), power),
            "decode": Reading(self.model.tokens_per_s(selection) * self.faster, power),
        }

    def runs(self) -> list[str]:
        """Of its program: "phase mask", in order."""
        with suppress(FileNotFoundError):
            return (self.root / "runs").read_text().splitlines()
        return []

    def _write_topology(self, clusters: Sequence[CoreCluster]) -> None:
        n_cores = sum(cluster.n_cores for cluster in clusters)
        info = {}
        for k, (cluster, own) in enumerate(zip(clusters, self.cores, strict=True)):
            assert cluster.max_frequency_ghz is not None
            khz, span = round(cluster.max_frequency_ghz * 1e6), " ".join(map(str, own))
            for core in own:
                info[core] = _PARTS[len(clusters) - 1 - k]
                for name, text in (("cpuinfo_max_freq", khz), ("scaling_max_freq", khz), ("related_cpus", span)):
                    self.file(f"{_CPUS}/cpu{core}/cpufreq/{name}", f"{text}\n")
        for name in ("online", "present"):
            self.file(f"{_CPUS}/{name}", f"0-{n_cores - 1}\n")
        each = (
            f"processor\t: {core}\nCPU implementer\t: 0x41\nCPU part\t: 0x{info[core]:x}\n" for core in sorted(info)
        )
        self.file("/proc/cpuinfo", "\n".join(each))


def _numbered(clusters: Sequence[CoreCluster]) -> tuple[tuple[int, ...], ...]:
    """Cores of each cluster, the biggest cluster first, the highest numbers first."""
    found, above = [], sum(cluster.n_cores for cluster in clusters)
    for cluster in clusters:
        found.append(tuple(range(above - cluster.n_cores, above)))
        above -= cluster.n_cores
    return tuple(found)
