"""The program `perfetto` of a fake phone, and the encoder of what it writes. Only the standard library: it starts fast.

    python perfetto_tracer.py PLAN.json [--query | --txt -c - -o -]

It traces what the plan says until it is told to end (SIGTERM), or its config's limit: `tests.fakes.perfetto` writes the
plan. Field numbers are those of Perfetto's protos; the encoding is protobuf's.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

MIN_POLL_MS = 100


class Reading(NamedTuple):
    """One value of a rail. None: the field is not written."""

    index: int | None
    stamp_ms: int | None
    energy_uj: int | None


class Tick(NamedTuple):
    """What one look at the HALs gave."""

    boot_ns: int
    rails: Sequence[Reading]
    current_ua: int | None = None


# --- encoding --------------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def number(field: int, value: int | None) -> bytes:
    return b"" if value is None else varint(field << 3) + varint(value)


def counted(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def encode(
    rails: Sequence[tuple[str, str]], ticks: Sequence[Tick], clocks_ns: Sequence[tuple[int, int]], battery: bool = False
) -> bytes:
    """rails: (name, subsystem), by index. clocks_ns: (boot time, wall time)."""
    names = b"".join(
        counted(1, number(1, i) + counted(2, name.encode()) + counted(3, subsystem.encode()))
        for i, (name, subsystem) in enumerate(rails)
    )
    trace = b"".join(
        counted(1, counted(6, counted(1, number(1, 6) + number(2, boot)) + counted(1, number(1, 1) + number(2, wall))))
        for boot, wall in clocks_ns
    )
    for i, tick in enumerate(ticks):
        if rails:
            read = b"".join(
                counted(2, number(1, r.index) + number(2, r.stamp_ms) + number(3, r.energy_uj)) for r in tick.rails
            )
            trace += counted(1, number(8, tick.boot_ns) + counted(40, (names if i == 0 else b"") + read))
        if battery:
            trace += counted(1, number(8, tick.boot_ns) + counted(38, number(3, tick.current_ua)))
    return trace


# --- the program -----------------------------------------------------------------------------------------------------


class ToldToEndError(Exception):
    """To end, by SIGTERM."""


def main(plan_path: Path, arguments: Sequence[str]) -> int:
    plan = json.loads(plan_path.read_text())
    if "--query" in arguments:
        sys.stdout.write("DATA SOURCES REGISTERED:\nandroid.power    traced_probes\n" if plan["sources"] else "\n")
        return 0
    config = sys.stdin.read()
    if plan["refusal"]:
        sys.stderr.write(plan["refusal"] + "\n")
        return 1
    poll_ms = max(MIN_POLL_MS, int(re.findall(r"battery_poll_ms: (\d+)", config)[0]))
    limit_s = int(re.findall(r"duration_ms: (\d+)", config)[0]) / 1e3
    wants_rails, wants_battery = "collect_power_rails: true" in config, "BATTERY_COUNTER_CURRENT" in config
    rails = [(r["name"], r["subsystem"]) for r in plan["rails"]] if wants_rails else []
    ticks: list[Tick] = []
    clocks = [_clocks_ns()]
    begun_s, (boot_ns, wall_ns) = time.monotonic(), clocks[0]
    first_s: float = begun_s + plan["first_after_s"]
    ends_s = begun_s + limit_s
    n_polls = math.floor(((first_s - begun_s) * 1e3 + wall_ns / 1e6) / poll_ms)

    def due_s() -> float:
        """Of the next tick: at once, then at multiples of the period by the wall clock."""
        if not ticks:
            return first_s
        return begun_s + ((n_polls + len(ticks)) * poll_ms - wall_ns / 1e6) / 1e3

    def look() -> None:
        """However late this program comes: what is read is what was to be read when it was due."""
        ticks.append(_look(plan, due_s(), boot_ns + round(1e9 * (due_s() - begun_s))))

    try:
        # Before it says that it traces: who reads that may end it at once.
        signal.signal(signal.SIGTERM, _told)
        sys.stderr.write("perfetto_cmd.cc:1170 Connected to the Perfetto traced service, starting tracing\n")
        sys.stderr.flush()
        while due_s() < ends_s:
            time.sleep(max(0.0, due_s() - time.monotonic()))
            look()
            if plan["dies_after"] and len(ticks) >= plan["dies_after"]:
                sys.stderr.write("traced went away\n")
                return 1
    except ToldToEndError:
        ends_s = min(ends_s, time.monotonic())
    while due_s() < ends_s:
        look()
    clocks.append(_clocks_ns())
    trace = encode(rails, ticks, clocks, wants_battery)
    # The plan may have changed meanwhile: what happens to the trace is decided at its end.
    cut = json.loads(plan_path.read_text())["cut_bytes"]
    sys.stdout.buffer.write(trace[: len(trace) - cut])
    return 0


def _told(signal_number: int, frame: FrameType | None) -> None:
    raise ToldToEndError


def _clocks_ns() -> tuple[int, int]:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME), time.time_ns()


def _look(plan: dict[str, Any], at_s: float, boot_ns: int) -> Tick:
    readings = [
        Reading(
            None if "index" in rail["without"] else i,
            None if "timestamp_ms" in rail["without"] else boot_ns // 1_000_000,
            None if "energy" in rail["without"] else round(1e6 * _joules(rail, at_s)),
        )
        for i, rail in enumerate(plan["rails"])
    ]
    watts = _watts(plan["battery"], at_s) if plan["battery"] else None
    return Tick(boot_ns, readings, None if watts is None else -round(1e6 * watts / plan["volts"]))


def _watts(power: dict[str, list[float]], at_s: float) -> float:
    i = bisect.bisect_right(power["edges_s"], at_s) - 1
    return power["watts"][min(max(i, 0), len(power["watts"]) - 1)]


def _joules(power: dict[str, list[float]], at_s: float) -> float:
    edges_s, watts = power["edges_s"], power["watts"]
    return sum(w * max(0.0, min(b, at_s) - a) for a, b, w in zip(edges_s, edges_s[1:], watts, strict=False))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
