"""Traces of power by Perfetto, the tracer that every phone has from Android 9 on: one run on the phone and its outcome.

`android.power` reads the power-stats HAL (energy of rails since boot) and the battery's HAL, at most every 100 ms. What
it read waits in a buffer on the phone: nothing crosses the link, and works the radio, until the window has ended. Then
the trace comes as perfetto's own output: no file is left on the phone, and SELinux has no path to refuse. Perfetto ends
when it is told to, when the link goes (the shell passes the hang-up on), and at a limit of its own.

The trace's stamps are of the boot time. It also holds instants on both the boot time and the wall clock; the wall clock
is the one that `GaugeLoop`'s markers tie to the host's.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.android.device_clock import UPTIME_RESOLUTION_S
from devices.android.gauge_loop import GaugeLog, GaugeLoop, loop_script
from devices.android.perfetto_trace import PowerLog, read_power_log
from devices.android.shell import STDERR, STDOUT, UNTIL_INPUT_ENDS, Phone, ShellStream
from devices.base import Clock, DeviceError, MeterUnavailableError, TransientDeviceError

Array = NDArray[np.float64]

MIN_POLL_S = 0.1
"""`android.power` reads no faster (kMinPollIntervalMs of android_power_data_source.cc)."""
START_LIMIT_S = 2.0
"""Perfetto says when it is connected to its service. One that has not said so by then is taken to trace."""
SETTLE_S = 0.3
"""From there to the first reading. One that comes later leaves the window's start uncovered."""
LIMIT_S = 3600.0
"""The longest trace. One that reaches it ends, and leaves the rest of its window uncovered."""
BUFFER_KB = 32 * 1024
"""About 16 bytes a reading: 32 rails every 100 ms fill half of it in an hour. It is taken up as it fills."""
PIECE_S = 600.0
"""A recording asks for its trace so often: what is still on the phone is lost with the link."""
MAX_TRACE_BYTES = 2 * BUFFER_KB * 1024
MARKER_PERIOD_S = 0.5
TRACE_TIMEOUT_S = 60.0
"""For the trace to come over a slow link."""
_CONNECTED = "Connected to the Perfetto traced service"

# One SIGTERM ends a trace in good order, another one kills perfetto: it is sent once.
_SCRIPT = f"""echo {{config}} | perfetto --txt -c - -o - & p=$!
trap 'kill $p' HUP
{UNTIL_INPUT_ENDS}
kill $p 2>/dev/null
wait $p"""


class Config(NamedTuple):
    """What a trace is of."""

    rails: bool = False
    battery: bool = False
    poll_s: float = MIN_POLL_S
    limit_s: float = LIMIT_S

    def text(self) -> str:
        """In the text format of protobuf (TraceConfig), on one line.

        DISCARD: a full buffer keeps its beginning, where the rails are named.
        """
        wanted = ["collect_power_rails: true"] if self.rails else []
        wanted += ["battery_counters: BATTERY_COUNTER_CURRENT"] if self.battery else []
        return (
            f"buffers {{ size_kb: {BUFFER_KB} fill_policy: DISCARD }}"
            ' data_sources { config { name: "android.power" android_power_config {'
            f" battery_poll_ms: {round(max(self.poll_s, MIN_POLL_S) * 1e3)} {' '.join(wanted)} }} }} }}"
            f" duration_ms: {round(self.limit_s * 1e3)}"
        )


class PerfettoTrace:
    """One use: `start`, `stop`. Its clocks are tied to the host's meanwhile."""

    def __init__(self, phone: Phone, config: Config, clock: Clock, read: str = "c=; v=") -> None:
        """read: shell that sets c and v, for the loop beside the trace. Raises `DeviceError`."""
        self._clock = clock
        with ExitStack() as on_error:
            self._stream = _begin(phone, config)
            on_error.callback(self._stream.close)
            self._loop = GaugeLoop(phone, loop_script(read, MARKER_PERIOD_S), clock)
            on_error.pop_all()

    def start(self) -> None:
        """Returns when readings have begun. Raises `DeviceError`: perfetto or its service is not there."""
        try:
            _await_readings(self._stream, self._clock)
            self._loop.start()
        except DeviceError:
            self.cancel()
            raise

    def stop(self) -> tuple[PowerLog, GaugeLog]:
        """What was traced, and what the loop beside it gave. Raises `TransientDeviceError`."""
        try:
            beside = self._loop.stop()
            self._stream.end_input()
            return read_power_log(_finish(self._stream)), beside
        finally:
            self.cancel()

    @property
    def lost(self) -> BaseException | None:
        """Why the link is gone, and with it the trace; None while it is there."""
        return self._loop.lost

    def cancel(self) -> None:
        """Ends both; nobody asks for the trace."""
        self._loop.cancel()
        self._stream.close()


def short_trace(phone: Phone, config: Config, clock: Clock) -> PowerLog:
    """What there is to trace: a moment of it, without the host's clock. Raises `DeviceError`."""
    stream = _begin(phone, config)
    try:
        _await_readings(stream, clock)
        stream.end_input()
        return read_power_log(_finish(stream))
    finally:
        stream.close()


def phone_stamps(boot_s: Array, power: PowerLog) -> tuple[Array, Array]:
    """Boot times of a trace beside the stamps of the phone's shell: (wall clock, uptime), for `on_host_clock`.

    The wall clock is NaN where the trace ties the two nowhere. The shell's uptime is the boot time cut to 10 ms, and so
    half of that below it on average: as here.
    """
    uptime_s = boot_s - UPTIME_RESOLUTION_S / 2
    if not len(power.clock_boot_s):
        return np.full(len(boot_s), np.nan), uptime_s
    return boot_s + np.interp(boot_s, power.clock_boot_s, power.clock_wall_s - power.clock_boot_s), uptime_s


def _begin(phone: Phone, config: Config) -> ShellStream:
    return phone.stream(_SCRIPT.format(config=shlex.quote(config.text())))


def _await_readings(stream: ShellStream, clock: Clock) -> None:
    """Until they have begun. Raises `MeterUnavailableError` with perfetto's own words where it has ended."""
    deadline_s = clock.now_s() + START_LIMIT_S
    said: list[str] = []
    try:
        while _CONNECTED not in (said[-1] if said else ""):
            said.append(stream.await_line(STDERR, deadline_s - clock.now_s()))
    except TransientDeviceError:
        # The limit, or the link: that is told by the next use of it.
        if clock.now_s() < deadline_s:
            raise
    except DeviceError as error:
        raise MeterUnavailableError(f"perfetto: {_why_refused(said)}") from error
    clock.sleep_until_s(clock.now_s() + SETTLE_S)


def _why_refused(said: Sequence[str]) -> str:
    """What perfetto's last words mean to a user, with the remedy."""
    last = next((line.strip() for line in reversed(said) if line.strip()), "it said nothing")
    everything = " ".join(said).lower()
    if "not found" in everything:
        return f"the phone has none, Android 9 and newer do ({last})"
    if "permission denied" in everything or "avc:" in everything:
        return f"SELinux refuses it to the shell ({last}); a userdebug build or root allows it"
    if "traced" in everything:
        return f"its service does not run ({last}); start it: adb shell setprop persist.traced.enable 1"
    return f"it ended at once ({last})"


def _finish(stream: ShellStream) -> bytes:
    """The trace. Raises `TransientDeviceError`."""
    result = stream.finish(TRACE_TIMEOUT_S, MAX_TRACE_BYTES)
    trace = bytes(stream.written[STDOUT].text)
    if result.exit_code != 0 or not trace:
        last = result.stderr.strip().rpartition("\n")[2] or "it said nothing"
        raise TransientDeviceError(
            f"perfetto was killed on the phone: exit code {result.exit_code}, {len(trace)} bytes of trace ({last})"
        )
    return trace
