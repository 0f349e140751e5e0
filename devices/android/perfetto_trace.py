"""Reads what `android.power` writes into a Perfetto trace: power rails, the battery's current, and the phone's clocks.

A trace is one protobuf message, a list of packets. A field is a key (number << 3 | wire type) and its value: a varint,
8 or 4 bytes, or a length and so many bytes (protobuf.dev/programming-guides/encoding). Only these fields are read, the
others are skipped (protos/perfetto/trace/{trace,trace_packet,clock_snapshot}.proto and trace/power/*.proto):

    Trace           1 packet
    TracePacket     8 timestamp (ns of CLOCK_BOOTTIME), 6 clock_snapshot, 38 battery, 40 power_rails
    ClockSnapshot   1 clocks: 1 clock_id (1 REALTIME, 6 BOOTTIME), 2 timestamp (ns)
    BatteryCounters 3 current_ua
    PowerRails      1 rail_descriptor: 1 index, 2 rail_name, 3 subsys_name
                    2 energy_data: 1 index, 2 timestamp_ms (of CLOCK_BOOTTIME), 3 energy (uJ since boot)

A reading of a rail has the stamp of the power-stats HAL where it gives one, as in Perfetto's own importer; else that of
its packet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import TransientDeviceError

Array = NDArray[np.float64]

_VARINT, _EIGHT_BYTES, _COUNTED, _FOUR_BYTES = 0, 1, 2, 5
_64_BITS = (1 << 64) - 1
_VARINT_BITS = 70
"""Ten bytes of seven bits hold the longest number; what is above 64 bits is dropped, as protobuf does."""
_PACKET = 1
_TIMESTAMP, _CLOCK_SNAPSHOT, _BATTERY, _POWER_RAILS = 8, 6, 38, 40
_CLOCK, _CLOCK_ID, _CLOCK_TIMESTAMP = 1, 1, 2
_REALTIME, _BOOTTIME = 1, 6
_CURRENT_UA = 3
_DESCRIPTOR, _ENERGY_DATA = 1, 2
_INDEX, _RAIL_NAME, _SUBSYSTEM = 1, 2, 3
_TIMESTAMP_MS, _ENERGY_UJ = 2, 3

MAX_STAMP_AGE_S = 5.0
"""A HAL's stamp this far from its packet's is of another clock than the boot time."""

STAMP_AHEAD_S = 0.25
"""A HAL's stamp this much later than the packet that carries it is not of that reading."""

USUALLY_AHEAD_S = 0.02
"""A packet is stamped before its HAL is asked: stamps lie ahead by what the call takes, usually milliseconds."""

STAMP_STEP_MS, FEWEST_STAMPS = 10, 10
"""So many stamps, all of them whole steps of so much or more apart, are of a clock that ticks so, not of readings."""

STAMP_LATE_S = 0.1
"""Between a HAL's reading and the packet that carries it: milliseconds, more where the phone is busy."""

Fields = dict[int, list[int | bytes]]


@dataclass(frozen=True)
class RailReadings:
    """One rail: boot times [n], rising, and joules since boot [n]. stamped: by the HAL, and not by the packet alone."""

    name: str
    subsystem: str
    boot_s: Array
    energy_j: Array
    stamped: bool


@dataclass(frozen=True)
class PowerLog:
    """What a trace says of power. Times are seconds of CLOCK_BOOTTIME.

    battery_boot_s [m], current_ua [m]: the battery's current as its HAL gives it, in its own sign. clock_boot_s and
    clock_wall_s [k]: the same instants on two clocks. n_incomplete: readings without an index, a name or a value.
    """

    rails: tuple[RailReadings, ...]
    battery_boot_s: Array
    current_ua: Array
    clock_boot_s: Array
    clock_wall_s: Array
    n_incomplete: int


def read_power_log(trace: bytes) -> PowerLog:
    """Raises `TransientDeviceError` where the trace is cut short or is none."""
    names: dict[int, tuple[str, str]] = {}
    energies: dict[int, list[_Reading]] = {}
    currents: dict[float, float] = {}
    clocks: list[tuple[float, float]] = []
    n_incomplete = 0
    for packet in _messages(trace, _PACKET):
        fields = read_fields(packet)
        packet_s = _seconds(_number(fields, _TIMESTAMP))
        for snapshot in _nested(fields, _CLOCK_SNAPSHOT):
            pair = _clock_pair(snapshot)
            if pair is not None:
                clocks.append(pair)
        for battery in _nested(fields, _BATTERY):
            current = _number(battery, _CURRENT_UA)
            if packet_s is None or current is None:
                n_incomplete += 1
            else:
                currents[packet_s] = float(_signed(current))
        for rails in _nested(fields, _POWER_RAILS):
            for descriptor in _nested(rails, _DESCRIPTOR):
                names[_number(descriptor, _INDEX) or 0] = _text(descriptor, _RAIL_NAME), _text(descriptor, _SUBSYSTEM)
            for reading in _nested(rails, _ENERGY_DATA):
                index, microjoule = _number(reading, _INDEX), _number(reading, _ENERGY_UJ)
                stamp_ms = _number(reading, _TIMESTAMP_MS)
                at_s = packet_s if stamp_ms is None else stamp_ms / 1e3
                if index is None or microjoule is None or at_s is None:
                    n_incomplete += 1
                else:
                    energies.setdefault(index, []).append(
                        _Reading(packet_s, at_s, microjoule * 1e-6, stamp_ms is not None)
                    )
    return PowerLog(
        rails=tuple(_rail(*names[i], energies.get(i, [])) for i in sorted(names) if names[i][0]),
        battery_boot_s=np.asarray(sorted(currents)),
        current_ua=np.asarray([currents[at_s] for at_s in sorted(currents)]),
        clock_boot_s=np.asarray([boot_s for boot_s, _ in sorted(clocks)]),
        clock_wall_s=np.asarray([wall_s for _, wall_s in sorted(clocks)]),
        n_incomplete=n_incomplete + sum(len(r) for i, r in energies.items() if not names.get(i, ("", ""))[0]),
    )


class _Reading(NamedTuple):
    """One value of a rail: boot time of its packet and of itself, joules, and whether the HAL gave the latter."""

    packet_s: float | None
    at_s: float
    joules: float
    stamped: bool


def _rail(name: str, subsystem: str, readings: Sequence[_Reading]) -> RailReadings:
    """Perfetto writes them in any order, and one twice where nothing was renewed. Of one stamp the last one counts."""
    if not _stamps_hold(readings):
        readings = [r._replace(at_s=r.at_s if r.packet_s is None else r.packet_s, stamped=False) for r in readings]
    joules = {r.at_s: r.joules for r in sorted(readings, key=lambda r: (r.packet_s or 0.0, r.joules))}
    boot_s = sorted(joules)
    return RailReadings(
        name,
        subsystem,
        np.asarray(boot_s),
        np.asarray([joules[at_s] for at_s in boot_s]),
        bool(readings) and all(r.stamped for r in readings),
    )


def _stamps_hold(readings: Sequence[_Reading]) -> bool:
    """Whether the HAL's stamps can be those of the readings.

    One that lies ahead of its packet, goes back from one packet to the next, or stays while the energy goes on, is not:
    a clock that stepped by 3 s would leave 3 s without energy. Nor is one that is new and older than the packet before,
    which would have shown it: it lags, and by how much may change. Nor are stamps that usually lie ahead, or tick in
    steps while every packet brings a new one. Then the packets' stamps are taken, of all.

    Perfetto looks when it begins, and next at a multiple of its interval: these two looks may lie within a millisecond,
    and have one stamp.
    """
    known = sorted((r.packet_s, r.at_s, r.joules) for r in readings if r.packet_s is not None and r.stamped)
    if any(not -STAMP_AHEAD_S <= packet_s - at_s <= MAX_STAMP_AGE_S for packet_s, at_s, _ in known):
        return False
    if known and median(at_s - packet_s for packet_s, at_s, _ in known) > USUALLY_AHEAD_S:
        return False
    if _tick_in_steps(known):
        return False
    for before, (packet_s, at_s, joules) in pairwise(known):
        if packet_s == before[0]:
            continue
        stays = at_s == before[1] and joules != before[2] and packet_s - before[0] > USUALLY_AHEAD_S
        if stays or at_s < before[1]:
            return False
        if at_s > before[1] and at_s < before[0] - STAMP_LATE_S:
            return False
    return True


def _tick_in_steps(known: Sequence[tuple[float, float, float]]) -> bool:
    """known: (packet's time, stamp, joules), in order. A stamp that follows its packet closely is a reading's own."""
    stamps_ms = sorted({round(at_s * 1e3) for _, at_s, _ in known})
    if len(stamps_ms) < max(FEWEST_STAMPS, len({packet_s for packet_s, _, _ in known})):
        return False
    step_ms = gcd(*(later - before for before, later in pairwise(stamps_ms)))
    behind_ms = [(packet_s - at_s) * 1e3 for packet_s, at_s, _ in known]
    return step_ms >= STAMP_STEP_MS and max(behind_ms) > STAMP_STEP_MS


def _clock_pair(snapshot: Fields) -> tuple[float, float] | None:
    """(boot time, wall time) of one snapshot."""
    read = {_number(c, _CLOCK_ID): _seconds(_number(c, _CLOCK_TIMESTAMP)) for c in _nested(snapshot, _CLOCK)}
    boot_s, wall_s = read.get(_BOOTTIME), read.get(_REALTIME)
    return None if boot_s is None or wall_s is None else (boot_s, wall_s)


# --- the wire format -------------------------------------------------------------------------------------------------


def read_fields(message: bytes) -> Fields:
    """Field number to its values in order: integers, or bytes. Raises `TransientDeviceError`."""
    fields: Fields = {}
    for number, value in _walk(message):
        fields.setdefault(number, []).append(value)
    return fields


def _walk(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        n_bytes = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(wire_type)
        if wire_type == _COUNTED:
            n_bytes, at = _varint(message, at)
        if n_bytes is None or number == 0:
            raise TransientDeviceError(f"what came is no Perfetto trace (wire type {wire_type} at byte {at} of {end})")
        if at + n_bytes > end:
            raise TransientDeviceError(
                f"the trace is cut short: {end - at} of {n_bytes} bytes at its end; was perfetto or the link killed?"
            )
        yield number, message[at : at + n_bytes]
        at += n_bytes


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """(value, where it ends): seven bits a byte, the lowest first; the eighth says that there is more."""
    value = shift = 0
    while at < len(message):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _64_BITS, at
        shift += 7
        if shift >= _VARINT_BITS:
            raise TransientDeviceError(
                f"what came is no Perfetto trace (a number beyond 64 bits ends at byte {at} of {len(message)})"
            )
    raise TransientDeviceError("the trace is cut short in the middle of a number; was perfetto or the link killed?")


def _messages(message: bytes, wanted: int) -> Iterator[bytes]:
    for number, value in _walk(message):
        if number == wanted and isinstance(value, bytes):
            yield value


def _nested(fields: Fields, number: int) -> Iterator[Fields]:
    for value in fields.get(number, []):
        if isinstance(value, bytes):
            yield read_fields(value)


def _number(fields: Fields, number: int) -> int | None:
    """The last value of a field counts, as protobuf wants it."""
    values = [v for v in fields.get(number, []) if isinstance(v, int)]
    return values[-1] if values else None


def _text(fields: Fields, number: int) -> str:
    values = [v for v in fields.get(number, []) if isinstance(v, bytes)]
    return values[-1].decode(errors="replace") if values else ""


def _signed(value: int) -> int:
    """int64: negative numbers are written as their two's complement."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / 1e9
