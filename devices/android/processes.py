"""Programs on a phone: bound to cores, with their output, exit code and CPU time; and ended when they must end.

adbd hangs up on the shell when the link goes, and on nothing that the shell started: the wrapper here passes it on, so
that a pulled cable does not leave an engine running on a phone that is measured again a minute later.
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from devices.android.shell import STDERR, Phone, ShellStream
from devices.android.topology import ONLINE, parse_core_list
from devices.base import DeviceError, UnendedProgramError
from devices.cpu_seconds import TICKS_PER_S, parse_cpu_seconds
from devices.timed_text import last_arrival_s
from results.core_lists import core_words
from results.cpu_time import CpuSeconds

WORK_FOLDER = "/data/local/tmp"
"""Where the shell may write and execute."""
START_TIMEOUT_S = 20.0
_UTIME, _CUTIME_END = 11, 15
"""Fields of /proc/PID/stat behind the name: utime, stime, cutime, cstime."""
_TICKS = re.compile(r"-?[0-9]{1,18}")
_ACCOUNT = "@account"
_SECONDS = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
_TIMES = re.compile(rf"([0-9]{{1,9}})m{_SECONDS}s ([0-9]{{1,9}})m{_SECONDS}s")
_UPTIMES = re.compile(rf"{_SECONDS} {_SECONDS}")
_ONLINE = re.compile(rf"{_SECONDS} {_SECONDS} ([0-9,-]{{1,999}}) ([0-9,-]{{1,999}})$", re.MULTILINE)

# The program's id comes first on the errors, before the program can write there; the account comes last. The link may
# go as soon as the id is told, and before it: the trap stands before the start, and nothing starts after it.
_SCRIPT = """cd {folder} || exit 126
trap 'kill -9 $!; exit 129' HUP
{{ read -r p <{online}; }} 2>/dev/null
read -r a x </proc/uptime
sh -c 'echo $$ >&2; exec "$@"' sh {program} </dev/null &
wait $!; r=$?
read -r b x </proc/uptime
{{ read -r o <{online}; }} 2>/dev/null
echo >&2; echo "{account} $a $b $p $o" >&2; times >&2
exit $r"""


# `taskset` takes any mask that has one core it may give, and says nothing of the others.
_CORES = "@cores"
_TELL_CORES = (
    f'while read -r k v; do case $k in Cpus_allowed:) echo {_CORES} $v >&2;; esac; done </proc/self/status; exec "$@"'
)
_TOLD_CORES = re.compile(rf"{_CORES} ([0-9a-f,]{{1,999}})\n")


class FewerCoresError(DeviceError):
    """A program ended well, and not on all cores that were asked for, or not until its end."""


@dataclass(frozen=True)
class ProcessResult:
    """A program that ended. cpu_s: user and system time, its children's included; wall_s on the phone's uptime."""

    stdout: str
    stderr: str
    exit_code: int
    cpu_s: float | None
    wall_s: float | None
    edges_s: tuple[float, float] | None = None
    """When it began and ended, on the phone's uptime."""


class PhoneProcess:
    """A running program. End it with `wait` or `kill`."""

    def __init__(self, phone: Phone, stream: ShellStream, pid: int, cores: frozenset[int] | None = None) -> None:
        """cores: that were asked for."""
        self.pid = pid
        self.result: ProcessResult | None = None
        self.is_running = True
        """Until it ended, or was killed for certain."""
        self._phone = phone
        self._stream = stream
        self._cores = cores
        self._always_online: frozenset[int] | None = None
        """At each look while it ran; None: there was none."""

    def saw_online(self, cores: Iterable[int]) -> None:
        """At a look while it ran."""
        seen = frozenset(cores)
        self._always_online = seen if self._always_online is None else self._always_online & seen

    def cpu_s(self) -> float | None:
        """CPU time so far; of a program that has ended: all of it. None where unreadable."""
        if self.result is not None:
            return self.result.cpu_s
        stat = self._phone.read(f"cat /proc/{self.pid}/stat")
        return None if stat is None else parse_process_cpu_s(stat)

    def wait(self, timeout_s: float) -> ProcessResult:
        """Its output, errors and exit code. Raises `FewerCoresError`, `TransientDeviceError`, and at the limit, after
        killing it, `UnendedProgramError`."""
        if self.result is None:
            until_s = time.monotonic() + timeout_s
            try:
                output, errors, exit_code = self._stream.finish(timeout_s)
            except DeviceError as error:
                is_late = time.monotonic() >= until_s
                with suppress(DeviceError):  # the first error is the one to tell
                    self.kill()
                if is_late and not self.is_running:  # the phone answers, and the program did not
                    words = f"the program has not ended after {timeout_s:g} s; it was killed"
                    raise UnendedProgramError(words) from error
                raise
            edges_s, lost = uptimes_of(errors), self._lost(errors)
            errors, cpu_s, wall_s = split_account(errors)
            errors, given = split_cores(errors)
            self.result = ProcessResult(output, errors, exit_code, cpu_s, wall_s, edges_s)
            self.is_running = False
            self._stream.close()
            if exit_code == 0 and self._cores is not None and given is not None and given != self._cores:
                raise FewerCoresError(
                    f"cores {core_words(self._cores)} were asked for, and the program had {core_words(given)}"
                    " alone: others are not there, off line, or kept from programs of the shell (cpuset)"
                )
            if exit_code == 0 and lost:
                raise FewerCoresError(
                    f"cores {core_words(self._cores or ())} were asked for, and {core_words(lost)} went off line while"
                    " the program ran, as some phones do when they are hot; let it cool, or ask for others"
                )
        return self.result

    def _lost(self, errors: str) -> frozenset[int]:
        """Of the cores that were asked for and were on line when it began, those that once were not."""
        found = online_of(errors)
        if found is None or self._cores is None:
            return frozenset()
        first, last = found
        stayed = last if self._always_online is None else last & self._always_online
        return (self._cores & first) - stayed

    def arrived_s(self, words: str) -> float | None:
        """When its output, or its errors, had these words for the last time, by `time.monotonic`; None: never."""
        return last_arrival_s(self._stream.written.values(), words)

    def kill(self) -> None:
        """Ends it now. The shell that waits for it is hung up on, should the link be lost already."""
        try:
            self._phone.run(f"kill -9 {self.pid} 2>/dev/null")
            self.is_running = False
        finally:
            self._stream.close()


def start_process(
    phone: Phone,
    arguments: Sequence[str],
    cores: Iterable[int] | None = None,
    folder: str = WORK_FOLDER,
    environment: Mapping[str, str] | None = None,
) -> PhoneProcess:
    """Starts a program on the phone, on the given cores only where some are given. Raises `DeviceError`."""
    words = ["env", *(f"{k}={v}" for k, v in environment.items())] if environment else []
    asked = None if cores is None else frozenset(cores)
    if asked is not None:
        words = ["taskset", f"{affinity_mask(asked):x}", "sh", "-c", _TELL_CORES, "sh", *words]
    program = shlex.join([*words, *arguments])
    folder = shlex.quote(folder)
    stream = phone.stream(_SCRIPT.format(folder=folder, program=program, account=_ACCOUNT, online=ONLINE))
    with ExitStack() as on_error:
        on_error.callback(stream.close)
        first = stream.await_line(STDERR, START_TIMEOUT_S)
        if not first.isdigit():
            raise DeviceError(f"{shlex.join(arguments)} did not start in {folder} on the phone: {first}")
        on_error.pop_all()
    return PhoneProcess(phone, stream, int(first), asked)


def affinity_mask(cores: Iterable[int]) -> int:
    """Bit c for core c, as `taskset` wants it. Raises ValueError for no core at all."""
    mask = 0
    for core in cores:
        mask |= 1 << core
    if not mask:
        raise ValueError("a program needs at least one core to run on")
    return mask


def parse_process_cpu_s(stat: str) -> float | None:
    """/proc/PID/stat: user and system time of the process and its ended children. Its name may hold anything.

    None where it is no such line.
    """
    fields = stat.rpartition(")")[2].split()[_UTIME:_CUTIME_END]
    if not all(_TICKS.fullmatch(ticks) for ticks in fields):
        return None
    return sum(map(int, fields)) / TICKS_PER_S


def phone_cpu_seconds(phone: Phone, processes: Iterable[PhoneProcess]) -> CpuSeconds | None:
    """CPU time of the phone, and of those processes of it; None where either is unreadable."""
    running = [p for p in processes if p.is_running]
    ended = [p.result.cpu_s for p in processes if p.result is not None]
    files = " ".join(f"/proc/{p.pid}/stat" for p in running)
    text = phone.read(f"head -n 1 /proc/stat{f'; cat {files}' if running else ''}")
    if text is None or not text.startswith("cpu "):
        return None
    try:
        busy_s, available_s = parse_cpu_seconds(text)
    except ValueError:
        return None
    own = [*ended, *map(parse_process_cpu_s, text.splitlines()[1:])]
    known = [s for s in own if s is not None]
    return CpuSeconds(busy_s=busy_s, ours_s=sum(known), available_s=available_s) if len(known) == len(own) else None


def split_account(errors: str) -> tuple[str, float | None, float | None]:
    """(the program's own errors, CPU seconds, wall seconds) out of the wrapper's errors."""
    own, found, account = errors.rpartition(f"\n{_ACCOUNT} ")
    if not found:
        return errors, None, None
    edges_s = uptimes_of(errors)
    times = _TIMES.findall(account)
    wall_s = edges_s[1] - edges_s[0] if edges_s else None
    # The shell's own times stand first, its children's second.
    cpu_s = sum(60 * float(m) + float(s) for m, s in (times[1][:2], times[1][2:])) if len(times) > 1 else None
    return own, cpu_s, wall_s


def split_cores(errors: str) -> tuple[str, frozenset[int] | None]:
    """(the program's own errors, the cores that it had when it began) out of the wrapper's errors."""
    told = _TOLD_CORES.match(errors)
    if told is None:
        return errors, None
    mask = int(told[1].replace(",", ""), 16)
    return errors[told.end() :], frozenset(core for core in range(mask.bit_length()) if mask >> core & 1)


def uptimes_of(errors: str) -> tuple[float, float] | None:
    """When the program began and ended, on the phone's uptime, out of the wrapper's errors."""
    _, found, account = errors.rpartition(f"\n{_ACCOUNT} ")
    uptimes = _UPTIMES.match(account) if found else None
    return (float(uptimes[1]), float(uptimes[2])) if uptimes else None


def online_of(errors: str) -> tuple[frozenset[int], frozenset[int]] | None:
    """The cores that were on line when the program began, and when it ended, out of the wrapper's errors."""
    _, found, account = errors.rpartition(f"\n{_ACCOUNT} ")
    told = _ONLINE.match(account) if found else None
    return None if told is None else (frozenset(parse_core_list(told[3])), frozenset(parse_core_list(told[4])))
