"""Instruments that are simulated from their data sheets, and the powers over time that they are asked to measure.

Each takes a power with a known integral and a seed, and gives the trace that the meter of the same name would have
handed over for the window from `START_S` to `END_S`: read before and behind the window as that meter is, with a random
phase of its renewals and late readings. None of them has a gain error, so none is granted: what is looked at is the
arithmetic between the readings and the joules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from devices.android.calibration import Calibration
from devices.android.device_clock import Marker
from devices.android.gauge_loop import GaugeLog
from devices.android.perfetto_rails import rail_channels, rail_traces
from devices.android.perfetto_trace import read_power_log
from devices.android.raw_gauge import energy_of, power_of, raw_traces
from devices.base import Channel
from results.records import PowerTrace
from tests.fakes.perfetto_tracer import Reading, Tick, encode
from tests.fakes.waveforms import StepPower, counter_trace, trace

Array = NDArray[np.float64]
Waveform = Callable[[np.random.Generator], StepPower]
Instrument = Callable[[StepPower, np.random.Generator], PowerTrace]

START_S, WINDOW_S = 2.0, 10.0
END_S = START_S + WINDOW_S
INTERVAL_S = 0.05
"""The harness' default between two readings."""
COUNTER_UPDATE_S = 0.1
GAUGE_UPDATE_S = 0.25
VOLTS = 4.0
UA_STEP = 244
"""Of a 16-bit converter over a sense resistor of 10 mOhm, in microampere."""
CHARGE_STEP_UAH = 1000
CHARGE_INTERVAL_S = 1.0
RAIL_POLL_S = 0.1
LINK_DELAY_S = 0.02
"""The longest, either way."""


# --- powers over time ------------------------------------------------------------------------------------------------


def constant(rng: np.random.Generator) -> StepPower:
    return StepPower(np.array([0.0, 100.0]), np.array([rng.uniform(0.5, 8.0)]))


def in_turns(
    rng: np.random.Generator, low_s: tuple[float, float], high_s: tuple[float, float], low_w: float, high_w: float
) -> StepPower:
    """Low and high power in turns, of lengths drawn evenly from the two ranges."""
    is_high = np.arange(400) % 2 == 1
    lengths_s = np.where(is_high, rng.uniform(*high_s, 400), rng.uniform(*low_s, 400))
    watts = np.where(is_high, high_w, low_w) * rng.uniform(0.9, 1.1, 400)
    return StepPower(np.concatenate([[0.0], np.cumsum(lengths_s)]), watts)


def ramps(rng: np.random.Generator) -> StepPower:
    """Up and down between 1 and 6 W in 2 to 5 s, in steps of 10 ms."""
    edges_s = np.arange(0.0, 100.0, 0.01)
    period_s = rng.uniform(4.0, 10.0)
    phase = (edges_s[:-1] / period_s + rng.uniform()) % 1.0
    return StepPower(edges_s, 1.0 + 5.0 * np.abs(2.0 * phase - 1.0))


WAVEFORMS: dict[str, Waveform] = {
    "constant": constant,
    "square, 1 to 3 s": lambda rng: in_turns(rng, (1.0, 3.0), (1.0, 3.0), 1.0, 6.0),
    "ramps of 2 to 5 s": ramps,
    "bursts of 0.4 to 1.2 s": lambda rng: in_turns(rng, (0.4, 1.2), (0.4, 1.2), 1.5, 5.0),
    "spikes of 30 to 200 ms": lambda rng: in_turns(rng, (0.2, 0.9), (0.03, 0.2), 1.0, 4.0),
    "spikes of 2 to 20 ms": lambda rng: in_turns(rng, (0.02, 0.2), (0.002, 0.02), 1.0, 20.0),
}
"""The spikes are shorter than a gauge's update, and shorter than a counter's."""


# --- instruments -----------------------------------------------------------------------------------------------------


def _reads_s(
    rng: np.random.Generator, around_s: float, interval_s: float = INTERVAL_S, at_random: bool = False
) -> Array:
    """When a polled meter reads: at once, then on a grid, or 0.5 to 1.5 intervals after each other, past the end.

    Up to a fifth of an interval late.
    """
    grid_s = np.arange(START_S - around_s, END_S + around_s, interval_s)
    if at_random:
        waits_s = rng.uniform(0.5 * interval_s, 1.5 * interval_s, 2 * len(grid_s))
        grid_s = START_S - around_s + np.concatenate([[0.0], np.cumsum(waits_s)])
        grid_s = grid_s[grid_s < END_S + around_s]
    late_s = rng.uniform(0.0, 0.2 * interval_s, len(grid_s))
    late_s[0] = 0.0
    return np.append(grid_s + late_s, END_S + around_s + interval_s)


def slow_counter(power: StepPower, rng: np.random.Generator) -> PowerTrace:
    """Joules in steps of 1 mJ, renewed every 100 ms (NVML), read from a tick before to a tick behind the window."""
    at_s = _reads_s(rng, COUNTER_UPDATE_S + INTERVAL_S)
    phase_s = rng.uniform(0.0, COUNTER_UPDATE_S)
    return replace(counter_trace(power, at_s, COUNTER_UPDATE_S, phase_s, step_j=1e-3), sample_interval_s=INTERVAL_S)


def fast_counter(power: StepPower, rng: np.random.Generator) -> PowerTrace:
    """Joules in steps of 2^-14 J, renewed every millisecond, wrapping (RAPL); marked at the window's edges."""
    update_s, wrap_at_j = 1e-3, 40.0
    marks_s = np.array([START_S, END_S]) + rng.uniform(20e-6, 80e-6, 2)
    at_s = np.unique(np.concatenate([_reads_s(rng, 5 * update_s), marks_s]))
    read = counter_trace(power, at_s, update_s, rng.uniform(0.0, update_s), step_j=2.0**-14)
    return replace(read, values=read.values % wrap_at_j, wrap_at_j=wrap_at_j, sample_interval_s=INTERVAL_S)


def sampled_power(update_s: float) -> Instrument:
    """Watts at an instant in steps of 1 mW, renewed every `update_s` (0: at each reading), read every 50 ms."""

    def read(power: StepPower, rng: np.random.Generator) -> PowerTrace:
        at_s = _reads_s(rng, update_s + INTERVAL_S, at_random=True)
        phase_s = rng.uniform(0.0, update_s)
        shown_s = np.floor((at_s - phase_s) / update_s) * update_s + phase_s if update_s else at_s
        watts = np.round(power.power_w(shown_s), 3)
        return trace("power", at_s, watts, INTERVAL_S, update_period_s=update_s, resolution=1e-3)

    return read


def battery_gauge(averages: bool) -> Instrument:
    """A phone's gauge: a value every 250 ms, an instant or the mean since the value before; read every 50 ms."""

    def read(power: StepPower, rng: np.random.Generator) -> PowerTrace:
        raw = raw_traces(gauge_log(power, rng, averages), "current", INTERVAL_S)
        return power_of(raw, Calibration(-1, 1e-6, 1e-6), Channel("battery", "held"))

    return read


def charge_counter(power: StepPower, rng: np.random.Generator) -> PowerTrace:
    """A phone's charge counter: what is left, in steps of 1 mAh (14 J), read every second."""
    at_s = np.arange(0.0, END_S + 2.5, CHARGE_INTERVAL_S) + rng.uniform(0.0, 0.05)
    left_uah = 3e6 + rng.uniform(0, CHARGE_STEP_UAH) - power.since_start_j(at_s) / VOLTS / 3600 * 1e6
    shown_uah = np.floor(left_uah / CHARGE_STEP_UAH) * CHARGE_STEP_UAH
    raw = raw_traces(_log(at_s, shown_uah, VOLTS * 1e3, rng), "charge", CHARGE_INTERVAL_S)
    return energy_of(raw, Channel("battery", "counter"))


def phone_rails(power: StepPower, rng: np.random.Generator) -> PowerTrace:
    """A rail of a phone: microjoule, read every 100 ms by Perfetto, stamped in milliseconds by its HAL."""
    looked_s = np.arange(rng.uniform(0.0, RAIL_POLL_S), END_S + 0.5, RAIL_POLL_S)
    read_s = looked_s - rng.uniform(0.5e-3, 5e-3, len(looked_s))
    return rails_read(power, looked_s, read_s, read_s, rng)


def rails_read(
    power: StepPower, looked_s: Array, stamps_s: Array, valued_s: Array, rng: np.random.Generator
) -> PowerTrace:
    """A rail looked at at some times [n], with the HAL's stamps and its energy as of others."""
    ticks = [
        Tick(_boot_ns(at_s), [Reading(0, _boot_ns(stamp_s) // 10**6, int(joules * 1e6))])
        for at_s, stamp_s, joules in zip(looked_s, stamps_s, power.since_start_j(valued_s), strict=True)
    ]
    clocks = [(_boot_ns(at_s), round(float(phone_clock(at_s)) * 1e9)) for at_s in (0.0, 10.0)]
    log = read_power_log(encode([("VDD_CPU", "CPU")], ticks, clocks))
    [channel] = rail_channels(log.rails)
    nothing = np.array([])
    beside = _log(looked_s[[0, -1]], nothing, 0.0, rng)
    [trace] = rail_traces(log, beside, [replace(channel, relative_accuracy=0.0)], RAIL_POLL_S)
    return trace


def _boot_ns(at_s: float) -> int:
    """The phone started some days before; its clocks run alike."""
    return round((3e5 + float(phone_clock(at_s)) - 1.7e9) * 1e9)


INSTRUMENTS: dict[str, Instrument] = {
    "counter, renewed every 100 ms": slow_counter,
    "counter, renewed every 1 ms": fast_counter,
    "power, renewed every 100 ms": sampled_power(COUNTER_UPDATE_S),
    "power, fresh at each reading": sampled_power(0.0),
    "gauge, 250 ms, instants": battery_gauge(averages=False),
    "gauge, 250 ms, means": battery_gauge(averages=True),
    "charge counter, 1 mAh": charge_counter,
    "phone's rails, every 100 ms": phone_rails,
}


# --- a phone's log ---------------------------------------------------------------------------------------------------


def gauge_log(power: StepPower, rng: np.random.Generator, averages: bool = False) -> GaugeLog:
    """What a phone would send from time 0 to a second behind the window."""
    end_s = END_S + 1.0
    # As the loop sleeps, and what its reading takes.
    waits_s = rng.uniform(0.5 * INTERVAL_S, 1.5 * INTERVAL_S, int(end_s / INTERVAL_S))
    at_s = np.cumsum(waits_s + rng.uniform(0.0, 2e-3, len(waits_s)))
    phase_s = rng.uniform(0.0, GAUGE_UPDATE_S)
    update = np.floor((at_s - phase_s) / GAUGE_UPDATE_S)
    shown_s = np.maximum(update * GAUGE_UPDATE_S + phase_s, 0.0)
    if averages:
        before_s = np.maximum(shown_s - GAUGE_UPDATE_S, 0.0)
        spent_j = power.since_start_j(shown_s) - power.since_start_j(before_s)
        watts = spent_j / np.maximum(shown_s - before_s, 1e-9)
    else:
        watts = power.power_w(shown_s)
    flicker = rng.integers(-2, 3, 10_000)[update.astype(int) + 1]
    current = -(np.round(watts / VOLTS * 1e6 / UA_STEP) + flicker) * UA_STEP
    return _log(at_s, current, VOLTS * 1e6, rng)


def phone_clock(host_s: Array) -> Array:
    """Far ahead of the host's, and fast by 40 ppm."""
    return 1.7e9 + host_s * (1 + 40e-6)


def _log(at_s: Array, raw: Array, volts_raw: float, rng: np.random.Generator) -> GaugeLog:
    """Readings under the phone's stamps, with bursts of markers before and behind them over a link that jitters."""
    bursts = tuple(
        tuple(
            Marker(t, phone_clock(np.array([t + out_s]))[0], np.nan, t + out_s + back_s)
            for t, out_s, back_s in zip(
                begun_s + 0.05 * np.arange(12), *rng.uniform(0.0, LINK_DELAY_S, (2, 12)), strict=True
            )
        )
        for begun_s in (0.0, float(at_s[-1]) - 0.6)
    )
    return GaugeLog(phone_clock(at_s), np.full(len(at_s), np.nan), raw, np.full(len(at_s), volts_raw), bursts)
