"""What ends the program from outside: Ctrl-C, SIGTERM (a scheduler, a shutdown), SIGHUP (the terminal is gone).

Each ends it with a line and the exit code 128 + its number, as a shell would say it: 130, 143, 129. Before a command
has anything to keep it ends at once; from `raise_in_command` on it is raised in the command, which keeps what is
finished. A second one does not wait for that; one that comes with the first (a wrapper passes it on, a service manager
sends two) is no second one. This module is imported first, and so imports almost nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import suppress
from types import FrameType

WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated (SIGTERM)",
    signal.SIGHUP: "hung up (SIGHUP)",
}
FIRST_CODE = 128
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
"""One for each time that this process was let go on."""


class InterruptedBySignalError(KeyboardInterrupt):
    """Passes through everything that Ctrl-C passes through."""

    def __init__(self, number: int) -> None:
        super().__init__(told(number))
        self.number = number


def told(number: int) -> str:
    return WORDS[signal.Signals(number)]


def words_and_code(error: KeyboardInterrupt) -> tuple[str, int]:
    """What to say of an interrupt, and the exit code."""
    number = error.number if isinstance(error, InterruptedBySignalError) else signal.SIGINT
    return told(number), FIRST_CODE + number


def end_at_once() -> None:
    """From now on, for the whole program. What the caller ignores (nohup, a job in the background) stays ignored."""
    if not _taken:
        _taken.extend(number for number in WORDS if signal.getsignal(number) is not signal.SIG_IGN)
    for number in _taken:
        signal.signal(number, _end)
    count_stops()


def count_stops() -> None:
    """From now on, for the whole program. A stop itself (Ctrl-Z, SIGSTOP) cannot be seen; what ends it can."""
    signal.signal(signal.SIGCONT, lambda number, frame: _continued.append(number))


def n_stops() -> int:
    """How often this process was stopped and went on, since `count_stops`."""
    return len(_continued)


def raise_in_command() -> None:
    """From now on, once."""
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
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
