"""Traces of power are read as Perfetto's own library wrote them, and nothing is made of what is missing or cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.android.perfetto_trace import PowerLog, read_power_log
from devices.base import TransientDeviceError
from tests.fakes.perfetto_tracer import Reading, Tick, encode

GOLDEN = Path(__file__).parent / "golden" / "perfetto_power.pftrace"
"""Encoded by Perfetto's Python protos from the text beside it; the values below are those of the text, by hand."""


@pytest.fixture(scope="module")
def golden() -> PowerLog:
    return read_power_log(GOLDEN.read_bytes())


def test_rails_have_their_names_and_joules_in_the_order_of_time(golden: PowerLog) -> None:
    big, gpu, display = golden.rails
    assert (big.name, big.subsystem) == ("S2M_VDD_CPUCL2", "CPU(BIG)")
    assert big.boot_s.tolist() == [5.098, 5.148, 5.198]
    assert big.energy_j.tolist() == pytest.approx([124.265856, 124.465856, 124.665856])
    assert (gpu.name, gpu.subsystem) == ("S2S_VDD_G3D", "GPU")
    assert (display.name, display.subsystem) == ("VSYS_PWR_DISPLAY", "Display")


def test_a_reading_that_the_hal_has_not_renewed_counts_once(golden: PowerLog) -> None:
    assert golden.rails[1].boot_s.tolist() == [5.099]
    assert golden.rails[1].energy_j.tolist() == [0.0]


def test_a_reading_without_a_stamp_of_its_own_has_its_packets(golden: PowerLog) -> None:
    display = golden.rails[2]
    assert display.boot_s.tolist() == [5.1, 5.197]
    assert display.energy_j.tolist() == pytest.approx([611.687448, 611.787448])
    assert [rail.stamped for rail in golden.rails] == [True, True, False]


def test_what_lacks_a_key_is_left_out_and_counted(golden: PowerLog) -> None:
    """A reading without its energy, one without its index, one of a rail without a name, a battery without current."""
    assert golden.n_incomplete == 4


def test_the_batterys_current_keeps_its_sign(golden: PowerLog) -> None:
    assert golden.battery_boot_s.tolist() == [5.1005, 5.2005]
    assert golden.current_ua.tolist() == [-512345.0, float(2**63 - 1)]


def test_the_two_clocks_are_tied_where_the_trace_ties_them(golden: PowerLog) -> None:
    assert golden.clock_boot_s.tolist() == [5.0, 15.0]
    assert (golden.clock_wall_s - golden.clock_boot_s).tolist() == pytest.approx(
        [1_700_000_000.00025, 1_700_000_000.00035]
    )


@pytest.mark.parametrize("n_bytes", [1, 3, 20, 300])
def test_a_trace_that_is_cut_short_is_no_trace(n_bytes: int) -> None:
    with pytest.raises(TransientDeviceError, match=r"cut short: \d+ of \d+ bytes|middle of a number"):
        read_power_log(GOLDEN.read_bytes()[:-n_bytes])


def test_what_is_no_trace_is_told() -> None:
    with pytest.raises(TransientDeviceError, match="no Perfetto trace"):
        read_power_log(b"sh: perfetto: inaccessible or not found")


def test_a_stamp_of_another_clock_is_not_believed() -> None:
    """A HAL that counts from its own start: an hour behind the boot time."""
    ticks = [Tick(3_700_000_000_000 + i * 100_000_000, [Reading(0, 100_000 + i * 100, i)]) for i in range(3)]
    [rail] = read_power_log(encode([("VDD", "CPU")], ticks, [])).rails
    assert not rail.stamped
    assert rail.boot_s.tolist() == pytest.approx([3700.0, 3700.1, 3700.2])


@given(st.binary(max_size=200))
def test_no_bytes_end_in_another_error(content: bytes) -> None:
    try:
        log = read_power_log(content)
    except TransientDeviceError:
        return
    assert all(np.diff(rail.boot_s).min(initial=1.0) > 0 for rail in log.rails)


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 2**62)), max_size=20, unique_by=lambda pair: pair[0]),
    st.text(min_size=1, max_size=20),
)
def test_any_readings_come_back_in_order(readings: list[tuple[int, int]], name: str) -> None:
    """Stamps that stand alone: the packet's is the same instant."""
    ticks = [Tick(stamp_ms * 1_000_000, [Reading(0, stamp_ms, energy_uj)]) for stamp_ms, energy_uj in readings]
    log = read_power_log(encode([(name, "")], ticks, [(1, 2)]))
    expected = sorted(readings)
    rails = [(rail.name, rail.boot_s.tolist(), rail.energy_j.tolist()) for rail in log.rails]
    if not ticks:
        assert rails == []
        return
    assert rails == [(name, [s / 1e3 for s, _ in expected], pytest.approx([e * 1e-6 for _, e in expected]))]


@pytest.mark.parametrize("length", [10, 11, 200, 100_000])
def test_a_number_beyond_64_bits_is_no_trace_and_costs_nothing(length: int) -> None:
    """Field 1 of a packet's clock snapshot: `length` bytes that each say that there is more, then an end."""
    number = b"\x80" * length + b"\x01"
    snapshot = b"\x08" + number
    packet = b"\x32" + _length(len(snapshot)) + snapshot
    trace = b"\x0a" + _length(len(packet)) + packet
    with pytest.raises(TransientDeviceError, match="a number beyond 64 bits"):
        read_power_log(trace)


def _length(n: int) -> bytes:
    """As a varint."""
    return bytes([n & 0x7F | 0x80]) + _length(n >> 7) if n > 0x7F else bytes([n])


def test_the_longest_number_keeps_its_64_bits() -> None:
    # current_ua (3) of a battery (38) in a packet with a time stamp (8): -1, and bits above the 64th, which are none.
    for last in (b"\x01", b"\x7f"):
        battery = b"\x18" + b"\xff" * 9 + last
        packet = b"\x40\x01" + b"\xb2\x02" + _length(len(battery)) + battery
        assert read_power_log(b"\x0a" + _length(len(packet)) + packet).current_ua.tolist() == [-1.0]
