"""What ends the program from outside: Ctrl-C, SIGTERM (a scheduler, a shutdown), SIGHUP (the terminal is gone).

Each ends it with a line and the exit code 128 + its number, as a shell would say it: 130, 143, 129. Before a command
has anything to keep it ends at once; from `raise_in_command` on it is raised in the command, which keeps what is
finished. A second one does not wait for that. This module is imported first, and so imports almost nothing.
"""

from __future__ import annotations

import errno
import os
import signal
from contextlib import suppress
from types import FrameType

WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated (SIGTERM)",
    signal.SIGHUP: "hung up (SIGHUP)",
}
FIRST_CODE = 128

_taken: list[signal.Signals] = []
"""Those that the program answers; empty where it is used as a library."""
_raised: list[int] = []


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


def raise_in_command() -> None:
    """From now on, once."""
    for number in _taken:
        signal.signal(number, _raise)


def code_once_kept() -> int:
    """The exit code of a command that Ctrl-C only shortens: 0 after that, else the signal's."""
    return FIRST_CODE + _raised[0] if _raised and _raised[0] != signal.SIGINT else 0


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(OSError):  # nobody may be left to read it
        os.write(2, f"error: {told(number)}\n".encode())
    os._exit(FIRST_CODE + number)


def _raise(number: int, frame: FrameType | None) -> None:
    end_at_once()
    _raised.append(number)
    if number == signal.SIGHUP:
        _leave_terminal()
    raise InterruptedBySignalError(number)


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
