"""What ends the program from outside: Ctrl-C, SIGTERM (a scheduler, a shutdown), SIGHUP (the terminal is gone).

Each ends it with a line and the exit code 128 + its number, as a shell would say it: 130, 143, 129. Before a command
has anything to keep it ends at once; from `raise_in_command` on it is raised in the command, which keeps what is
finished. A second one does not wait for that; one that comes with the first (a wrapper passes it on, a service manager
sends two) is no second one. This module is imported first, and so imports almost nothing.

Standard output that cannot be written any more (a full disk, a reader who is gone) ends it in the same way.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated (SIGTERM)",
    signal.SIGHUP: "hung up (SIGHUP)",
}
FIRST_CODE = 128
NOT_WRITTEN_CODE = 7
SAME_S = 1.0
"""What comes so soon after the first was not sent by somebody who has read what the first one does."""

_taken: list[signal.Signals] = []
"""Those that the program answers; empty where it is used as a library."""
_raised: list[int] = []
"""The first one, once it was raised or held."""
_held: list[int] = []
"""The first one, until it is raised."""
_first_s: list[float] = []
_continued: list[int] = []
"""One for each time that this process was seen to have gone on."""
_looking = threading.Lock()
_in_command: list[bool] = []
"""Not empty from `raise_in_command` on."""


class InterruptedBySignalError(KeyboardInterrupt):
    """Passes through everything that Ctrl-C passes through."""

    def __init__(self, number: int) -> None:
        super().__init__(told(number))
        self.number = number


class OutputLostError(KeyboardInterrupt):
    """What is printed cannot be written. Passes through everything that Ctrl-C passes through."""

    def __init__(self, error: OSError) -> None:
        self.code = FIRST_CODE + signal.SIGPIPE if error.errno == errno.EPIPE else NOT_WRITTEN_CODE
        super().__init__(f"standard output cannot be written ({error.strerror})")


def told(number: int) -> str:
    return WORDS[signal.Signals(number)]


def words_and_code(error: KeyboardInterrupt) -> tuple[str, int]:
    """What to say of an interrupt, and the exit code."""
    if isinstance(error, OutputLostError):
        return str(error), error.code
    number = error.number if isinstance(error, InterruptedBySignalError) else signal.SIGINT
    return told(number), FIRST_CODE + number


def end_at_once() -> None:
    """From now on, for the whole program. What the caller ignores (nohup, a job in the background) stays ignored."""
    if not _taken:
        _taken.extend(number for number in WORDS if signal.getsignal(number) is not signal.SIG_IGN)
    for number in _taken:
        signal.signal(number, _end)
    _in_command.clear()
    count_stops()


def count_stops() -> None:
    """From now on, for the whole program. A stop itself (Ctrl-Z, SIGSTOP) cannot be seen; what ends it can.

    That is held back until `n_stops` asks for it. `timeout` and systemd send it right behind SIGTERM: a library's
    thread that it woke would take SIGTERM, and a main thread that waits would not hear of either.

    To be called before there are threads: one that does not hold it back would lose it. Threads and processes that are
    started afterwards hold it back too, so a worker of a fleet may have had threads before its own call.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCONT})


def n_stops() -> int:
    """How often this process was stopped and went on, since `count_stops`; between two calls, once at most."""
    with _looking:  # of two that saw it, one would wait for the next
        if signal.SIGCONT in signal.sigpending():
            _continued.append(signal.sigwait({signal.SIGCONT}))
    return len(_continued)


def raise_in_command(is_long: bool = False) -> None:
    """From now on, once. is_long: of a command that measures for minutes, a reader who has gone is told too."""
    _in_command.append(is_long)
    for number in _taken:
        signal.signal(number, _raise)


def hold(words: str) -> None:
    """From now on the first one breaks nothing off: `raise_held` raises it where that loses nothing.

    words: what is told at once, and that a second one ends it.
    """
    if _raised:
        return

    def keep(number: int, frame: FrameType | None) -> None:
        _note_first(number)
        _held.append(number)
        _tell(words)

    for number in _taken:
        signal.signal(number, keep)


def raise_held() -> None:
    """The one that came since `hold`, once."""
    if _held:
        raise InterruptedBySignalError(_held.pop())


def words_once_kept() -> str | None:
    """Which one a command has ended with in order."""
    return told(_raised[0]) if _raised else None


def code_once_kept() -> int:
    """The exit code of a command that Ctrl-C only shortens: 0 after that, else the signal's."""
    return FIRST_CODE + _raised[0] if _raised and _raised[0] != signal.SIGINT else 0


def _end(number: int, frame: FrameType | None) -> None:
    if _first_s and time.monotonic() - _first_s[0] < SAME_S:
        return
    _tell(f"error: {told(number)}")
    os._exit(FIRST_CODE + number)


def _raise(number: int, frame: FrameType | None) -> None:
    _note_first(number)
    raise InterruptedBySignalError(number)


def _note_first(number: int) -> None:
    _first_s.append(time.monotonic())
    _raised.append(number)
    for taken in _taken:
        signal.signal(taken, _end)
    if number == signal.SIGHUP:
        _leave_terminal()


class _Watched(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            _lose(self.fileno(), error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            _lose(self.fileno(), error)


def watch_output() -> None:
    """From now on, for the whole program. A stream that was closed (`>&-`) leads nowhere: the next file that is opened
    would have its number, and get what libraries and this module write there. A sign that a terminal of another
    alphabet (ISO-8859-1) lacks is shown by its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number
    sys.stdout, sys.stderr = _watched(sys.stdout), _watched(sys.stderr)
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")


def _watched(stream: Any) -> Any:
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    how = (stream.encoding, stream.errors, None, stream.line_buffering, stream.write_through)
    return _Watched(stream.buffer, *how)


def _lose(descriptor: int, error: OSError) -> None:
    """What is printed from now on goes nowhere. Errors that nobody can be told end nothing. Who stops reading a list
    (`| head`) has what they want: the command ends without a word then. Not with 1, which is `compare`'s "worse"."""
    _lead_nowhere(descriptor)
    if descriptor != 1 or threading.current_thread() is not threading.main_thread():
        return
    if error.errno == errno.EPIPE and not any(_in_command):
        raise SystemExit(FIRST_CODE + signal.SIGPIPE)
    if _in_command:
        raise OutputLostError(error)
    words, code = words_and_code(OutputLostError(error))
    _tell(f"error: {words}")
    os._exit(code)


def _tell(line: str) -> None:
    """Also from inside of a signal's handler."""
    with suppress(OSError):  # nobody may be left to read it
        os.write(2, f"{line}\n".encode())


def _leave_terminal() -> None:
    """What is printed to a terminal that is gone would be an error on top; it goes nowhere instead."""
    for descriptor in (1, 2):
        try:
            os.tcgetpgrp(descriptor)
        except OSError as error:
            if error.errno == errno.EIO:
                _lead_nowhere(descriptor)


def _lead_nowhere(descriptor: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
