"""The loop that reads the battery on the phone, and its other end on the host.

A round trip through adb costs 14 to 30 ms on a cable and more on Wi-Fi, and each works the phone; so one shell loop
runs on the phone, reads the gauge with builtins alone (no process is started for a sample), stamps it there, and
sleeps in `read -t`, which also takes in the host's markers. It ends when its input does. How long it sleeps is drawn
from half to one and a half of the period, as in `devices.sampler`: a load in step with the loop would look steady.

    S,<wall s>,<uptime s>,<current>,<voltage>,<o> a sample, raw; o: 1 with a charger on line, 0 without, empty: unknown
    M,<wall s>,<uptime s>,<number>                a marker came in
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from devices.android.device_clock import ClockMap, Marker, fit_clock, steady_stamps
from devices.android.shell import EXIT, STDOUT, Phone
from devices.base import Clock, DeviceError, TransientDeviceError

Array = NDArray[np.float64]

BURST_MARKERS = 12
"""The chance that all of them are slow: with delays of up to 20 ms either way, above 10 ms for 1 burst in 4000."""
BURST_EVERY_S = 60.0
RESEND_S = 0.3
"""A marker is lost when `read -t` times out in the middle of it, which happens on a machine under load: what the shell
had is dropped, and what is left matches no marker, or an older one, which only widens the bound."""
BURST_TIMEOUT_S = 10.0
START_TIMEOUT_S = 10.0
SILENCE_S = 5.0
"""No sample for so long behind the next one's latest time: the link or the phone is gone."""
LONGEST = 1.5
"""Periods from one sample to the next."""

HIGHEST_READING = 1e15
"""A clock in microseconds, or a kiloampere in nanoampere, is below."""
MAX_LINE = 4096
"""A sample has some 60 characters, a marker fewer."""
FASTEST_SAMPLES_PER_S = 2000
"""No loop that sleeps between readings is as fast: one that does not would fill the memory."""

log = logging.getLogger(__name__)

# `read -t` that comes back at once without a line, time and again, is the end of the input: shells differ in status.
_SCRIPT = """export LC_ALL=C; n=0; o=
while :; do
{read}
read -r u x </proc/uptime
echo "S,$EPOCHREALTIME,$u,$c,$v,$o"
t=$(({shortest_ms}+RANDOM*{period_ms}/32768)); f=$((t%1000+1000))
read -r -t $((t/1000)).${{f#1}} m; r=$?
read -r w x </proc/uptime
if [ $r = 0 ]; then echo "M,$EPOCHREALTIME,$w,$m"
elif [ $r -gt 128 ] || [ "$u" != "$w" ]; then n=0
else n=$((n+1)); [ $n -gt 20 ] && exit
fi
done 2>/dev/null"""


@dataclass(frozen=True)
class GaugeLog:
    """What came from the phone, as it came: times of its two clocks, raw current and voltage (NaN: unreadable) [n]."""

    wall_s: Array
    uptime_s: Array
    current: Array
    voltage: Array
    bursts: tuple[tuple[Marker, ...], ...]
    chargers: tuple[tuple[float, bool], ...] = ()
    """When, on the host's clock, a charger was first seen to be on line, and to be gone again."""


def loop_script(read: str, period_s: float) -> str:
    """read: shell that sets c and v. period_s: of its readings on average, up to a minute."""
    period_ms = round(period_s * 1e3)
    # mksh counts with 32 bits.
    assert 0 < period_ms < 2**16
    return _SCRIPT.format(read=read, period_ms=period_ms, shortest_ms=(period_ms + 1) // 2)


class GaugeLoop:
    """One use: `start`, `stop`. What goes wrong on the way is raised by `stop`, as a `DeviceError`."""

    def __init__(self, phone: Phone, script: str, clock: Clock, period_s: float = 0.0) -> None:
        """period_s: between two samples of the script, where it is no small part of `SILENCE_S`."""
        self._clock = clock
        self._silence_s = SILENCE_S + LONGEST * period_s
        self._begun_s = clock.now_s()
        self._rows: list[tuple[float, ...]] = []
        self._bursts: list[list[Marker]] = []
        self._chargers: list[tuple[float, bool]] = []
        self._sent_s: dict[str, float] = {}
        self._n_markers = 0
        self._is_bursting = False
        self._is_closing = False
        self._has_ended = False
        self._partial = ""
        self._changed = threading.Condition()
        self._stream = phone.stream(script)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gauge-loop")
        self._reader: Future[None] = self._pool.submit(self._read)

    def start(self) -> None:
        """Returns after the first sample and the first burst: a window opened then is covered, and its times known."""
        try:
            self._wait_for(lambda: len(self._rows) > 0, START_TIMEOUT_S, "a first sample")
            self._burst()
        except DeviceError:
            self._close()
            raise

    def stop(self) -> GaugeLog:
        """Ends the loop after a last burst."""
        try:
            self._wait_for(lambda: not self._is_bursting, BURST_TIMEOUT_S, "markers")
            self._burst()
        finally:
            self._close()
        return self.received()

    def received(self) -> GaugeLog:
        """What came until now: also of a loop whose link broke. Its times are known from the bursts before."""
        with self._changed:
            wall_s, uptime_s, current, voltage = np.asarray(self._rows, dtype=np.float64).reshape(-1, 4).T
            return GaugeLog(
                wall_s, uptime_s, current, voltage, tuple(tuple(b) for b in self._bursts), tuple(self._chargers)
            )

    @property
    def lost(self) -> BaseException | None:
        """Why no sample comes any more; None while they do."""
        return self._reader.exception() if self._reader.done() else None

    def cancel(self) -> None:
        """Ends the loop; nobody asks for its samples."""
        self._close()

    def _burst(self) -> None:
        with self._changed:
            self._begin_burst()
        self._wait_for(lambda: not self._is_bursting, BURST_TIMEOUT_S, "markers")

    def _wait_for(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: condition() or self._has_ended, limit_s)
        if self._has_ended:
            self._reader.result()
        if not came:
            raise TransientDeviceError(f"the phone has not sent {what} for {limit_s:g} s; is it asleep?")

    def _close(self) -> None:
        self._is_closing = True
        self._stream.close()
        with suppress(DeviceError):  # told by `_wait_for`, or asked for by nobody
            self._reader.result()
        self._pool.shutdown(wait=False)

    # --- the reader's thread -----------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            n_rows, latest_s = 0, time.monotonic()
            while True:
                if len(self._rows) > n_rows:
                    n_rows, latest_s = len(self._rows), time.monotonic()
                # What comes without a sample in it, however often, is silence.
                left_s = latest_s + self._silence_s - time.monotonic()
                if left_s <= 0:
                    raise TransientDeviceError(f"the phone has not sent a sample for {self._silence_s:g} s")
                packet_id, payload = self._stream.receive(left_s)
                at_s = self._clock.now_s()
                if packet_id == STDOUT:
                    with self._changed:
                        self._take(payload.decode(errors="replace"), at_s)
                        self._changed.notify_all()
                elif packet_id == EXIT:
                    raise TransientDeviceError("the battery loop ended on the phone; was its shell killed?")
        except DeviceError:
            if not self._is_closing:
                raise
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def _take(self, text: str, at_s: float) -> None:
        *lines, self._partial = (self._partial + text).split("\n")
        if len(self._partial) > MAX_LINE:
            raise TransientDeviceError(f"a line of {len(self._partial)} characters is none of the battery loop")
        for line in lines:
            kind, *fields = line.strip().split(",")
            if kind == "S" and len(fields) in (4, 5):
                self._rows.append(tuple(_number(f) for f in fields[:4]))
                if fields[4:] in (["0"], ["1"]):
                    self._note_charger(at_s, fields[4] == "1")
                if len(self._rows) > FASTEST_SAMPLES_PER_S * (10.0 + at_s - self._begun_s):
                    raise TransientDeviceError(
                        f"{len(self._rows)} readings in {at_s - self._begun_s:.0f} s; none slept"
                    )
                self._keep_marking(at_s)
            elif kind == "M" and len(fields) == 3 and fields[2] in self._sent_s and self._is_bursting:
                wall_s, uptime_s = _number(fields[0]), _number(fields[1])
                self._bursts[-1].append(Marker(self._sent_s.pop(fields[2]), wall_s, uptime_s, at_s))
                self._is_bursting = len(self._bursts[-1]) < BURST_MARKERS
                if self._is_bursting:
                    self._send_marker()

    def _note_charger(self, at_s: float, is_on: bool) -> None:
        """Only what changes: a recording lasts hours."""
        if is_on != (self._chargers[-1][1] if self._chargers else False):
            self._chargers.append((at_s, is_on))

    def _keep_marking(self, at_s: float) -> None:
        if self._is_bursting:
            if at_s - max(self._sent_s.values(), default=0.0) > RESEND_S:
                self._send_marker()
        elif self._bursts and at_s - self._bursts[-1][0].sent_s > BURST_EVERY_S:
            self._begin_burst()

    def _begin_burst(self) -> None:
        self._is_bursting = True
        self._bursts.append([])
        self._sent_s.clear()
        self._send_marker()

    def _send_marker(self) -> None:
        self._n_markers += 1
        marker = str(self._n_markers)
        self._sent_s[marker] = self._clock.now_s()
        self._stream.send(marker + "\n")


def on_host_clock(readings: GaugeLog) -> tuple[Array, ClockMap, str]:
    """(host times of the samples, the map, which clock of the phone it is). Raises `TransientDeviceError`."""
    n_samples = len(readings.wall_s)
    markers = [m for burst in readings.bursts for m in burst]
    wall_s = np.concatenate([readings.wall_s, [m.wall_s for m in markers]])
    uptime_s = np.concatenate([readings.uptime_s, [m.uptime_s for m in markers]])
    stamps = steady_stamps(wall_s, uptime_s)
    device_s = iter(stamps.times_s[n_samples:].tolist())
    trips = [[(m.sent_s, next(device_s), m.received_s) for m in burst] for burst in readings.bursts]
    clock = fit_clock(trips, stamps.resolution_s)
    return clock.to_host_s(stamps.times_s[:n_samples]), clock, stamps.source


def _number(text: str) -> float:
    """NaN where it is none, and where no gauge or clock can show it: its square is beyond every arithmetic."""
    try:
        number = float(text)
    except ValueError:
        return float("nan")
    return number if abs(number) < HIGHEST_READING else float("nan")
