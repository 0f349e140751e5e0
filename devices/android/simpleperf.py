"""CPU cycles of programs on a phone, by `simpleperf stat` (of newer Androids, and of the NDK) or `perf stat`.

The tool is attached to running programs, counts all of their threads and those they start, and tells the count when it
is interrupted. It needs the phone's PMU, and a kernel that lets the shell use it (security.perf_harden 0).

    simpleperf stat --csv   6595722690,cpu-cycles,4.511040,GHz,(100%),
    perf stat -x,           6595722690,,cpu-cycles,1462129000,100.00,,

The last figure is for how much of the time the counter was on the hardware. Linux binds a plain `cpu-cycles` of a
program to the counters of one kind of cores: on the others it does not count, and the share is below 100 %. What it
missed is not guessed here; a program that is bound to one cluster has its whole count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress

from devices.android.shell import STDERR, STDOUT, UNTIL_INPUT_ENDS, Phone, ShellStream
from devices.base import DeviceError, TransientDeviceError
from devices.cpu_cycles import USER_MODE_ONLY, CpuCycles
from results.units import format_share

TOOLS = ("simpleperf", "/data/local/tmp/simpleperf", "perf")
WHOLE_SHARE = 0.99
"""Of its time; a counter that was there for less has missed something."""
START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 20.0
NO_PROGRAM = "CPU cycles: no program that was started through joulebench runs on the phone"
NO_PMU = "CPU cycles: this phone shows no hardware counter for them (emulators do not, some makers switch it off)"
LATE = "CPU cycles: the counting tool was not seen to begin, and may have missed a part; is the phone busy?"
_COUNTING, _UNSEEN = "@counting", "@unseen"
_NO_TOOL = "neither simpleperf nor perf"
_SHARE = re.compile(r"\(?(\d+(?:\.\d+)?)%?\)?")

# Counting has begun when the tool holds a descriptor of the kernel's counters. Until it has a handler for SIGINT of its
# own the signal is lost (shells have it ignored in what runs behind them), so it is sent again.
_SCRIPT = """for t in {tools}; do command -v $t >/dev/null 2>&1 && break; t=; done
[ -n "$t" ] || {{ echo '{no_tool}' >&2; exit; }}
case $t in *simpleperf) o=--csv;; *) o=-x,;; esac
$t stat $o -e cpu-cycles -p {pids} & p=$!
trap 'kill -INT $p' HUP
n=0 s={unseen}
while kill -0 $p 2>/dev/null && [ $n -lt 100 ]; do
ls -l /proc/$p/fd 2>/dev/null | grep -q perf_event && s={counting} && break
n=$((n+1)); sleep 0.02
done
kill -0 $p 2>/dev/null && echo $s
{until_input_ends}
n=0
while kill -0 $p 2>/dev/null; do
[ $((n%25)) = 0 ] && kill -INT $p
n=$((n+1)); sleep 0.02
done
wait $p"""


class PhoneCycles:
    """Counts from one `read` to the next. A phone that cannot count is asked once."""

    def __init__(self, phone: Phone) -> None:
        self._phone = phone
        self._stream: ShellStream | None = None
        self._is_seen = False
        """The tool had begun to count when `read` returned."""
        self._total = 0
        self._why_never: str | None = None

    def read(self, pids: Sequence[int]) -> CpuCycles:
        """Cycles since the first reading, of the programs that each reading named for the time until the next.

        Raises `TransientDeviceError`: the link.
        """
        if self._why_never is not None:
            return CpuCycles(None, self._why_never)
        ended = self._end()
        why_not = self._begin(pids)
        if ended is not None:
            return ended
        return CpuCycles(self._total) if why_not is None else CpuCycles(None, why_not)

    def close(self) -> None:
        """Ends the tool; nobody asks for its count."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _begin(self, pids: Sequence[int]) -> str | None:
        """Why there will be no count; None where it has begun."""
        if not pids:
            return NO_PROGRAM
        stream = self._phone.stream(
            _SCRIPT.format(
                tools=" ".join(TOOLS),
                no_tool=_NO_TOOL,
                pids=",".join(map(str, pids)),
                counting=_COUNTING,
                unseen=_UNSEEN,
                until_input_ends=UNTIL_INPUT_ENDS,
            )
        )
        try:
            self._is_seen = stream.await_line(STDOUT, START_TIMEOUT_S) == _COUNTING
        except TransientDeviceError:
            stream.close()
            raise
        except DeviceError:
            said = stream.written[STDERR].text.decode(errors="replace")
            stream.close()
            return self._refused(said)
        self._stream = stream
        return None

    def _end(self) -> CpuCycles | None:
        """What was counted so far; None where nothing was."""
        if self._stream is None:
            return None
        stream, self._stream = self._stream, None
        try:
            stream.end_input()
            # simpleperf writes its table to the output, perf to the errors.
            output, errors, _ = stream.finish(END_TIMEOUT_S)
        finally:
            stream.close()
        counted = parse_stat(output + errors)
        if counted.cycles is None:
            if counted.remark == NO_PMU:
                self._why_never = NO_PMU
            return counted
        if not self._is_seen:
            return CpuCycles(None, LATE)
        self._total += counted.cycles
        return CpuCycles(self._total, counted.remark)

    def _refused(self, said: str) -> str:
        """Why the tool ended at once. What will not change is remembered."""
        last = said.strip().rpartition("\n")[2].strip()
        low = said.lower()
        if last == _NO_TOOL:
            self._why_never = f"CPU cycles: the phone has {_NO_TOOL}; push the NDK's simpleperf to /data/local/tmp"
            return self._why_never
        if "perf_harden" in low or "paranoid" in low or "permission denied" in low or "not permitted" in low:
            with suppress(DeviceError):
                harden = (self._phone.read("getprop security.perf_harden") or "").strip()
                last = f"security.perf_harden is {harden}; {last}" if harden else last
            self._why_never = f"CPU cycles: refused to the shell ({last}); adb shell setprop security.perf_harden 0"
            return self._why_never
        if "not supported" in low or "unsupported" in low:
            self._why_never = NO_PMU
            return NO_PMU
        return f"CPU cycles: the counting tool ended at once ({last or 'it said nothing'})"


def parse_stat(output: str) -> CpuCycles:
    """The table of `simpleperf stat --csv` or `perf stat -x,`: a count, or why it is none."""
    rows = [row for row in (line.split(",") for line in output.splitlines()) if _event(row) is not None]
    if not rows:
        last = output.strip().rpartition("\n")[2] or "it said nothing"
        return CpuCycles(None, f"CPU cycles: the counting tool gave no count ({last})")
    count, event = rows[0][0].strip(), _event(rows[0])
    if count == "<not supported>":
        return CpuCycles(None, NO_PMU)
    share = _share(rows[0])
    if len(rows) > 1 or not count.isdigit() or share < WHOLE_SHARE:
        return CpuCycles(
            None,
            f"CPU cycles: the counter was on the hardware for {format_share(share)} of the time: it follows one kind of"
            " cores, or other programs hold it; bind the program to one cluster",
        )
    return CpuCycles(int(count), USER_MODE_ONLY if event == "cpu-cycles:u" else None)


def _event(row: Sequence[str]) -> str | None:
    return next((field for field in row if field.startswith("cpu-cycles")), None)


def _share(row: Sequence[str]) -> float:
    """simpleperf: the last field that is not empty, such as (100%); perf: the fifth."""
    figures = [field.strip() for field in row if field.strip()]
    text = figures[-1] if figures[-1].endswith("%)") else row[4] if len(row) > 4 else ""
    found = _SHARE.fullmatch(text.strip())
    return float(found[1]) / 100 if found else 0.0
