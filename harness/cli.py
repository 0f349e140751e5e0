"""Where the program begins: signals are answered before anything heavy is imported, then the commands are."""

from __future__ import annotations

import os
import sys

from harness.interrupts import end_at_once, watch_output, words_and_code


def main() -> None:
    end_at_once()
    watch_output()
    _refuse_a_folder_that_is_gone()
    from harness.commands import app

    try:
        app()
    except SystemExit as ended:
        _tell_interrupt(ended)
        raise
    except Exception as error:  # noqa: BLE001 - of every command, what none of them foresaw
        from harness.terminal import end_unforeseen

        end_unforeseen(error)
    finally:
        end_at_once()


def _tell_interrupt(ended: SystemExit) -> None:
    """One that a command did not answer, as while it imports: typer ends with 130 and says nothing."""
    interrupt = None if ended.__context__ is None else ended.__context__.__cause__
    if isinstance(interrupt, KeyboardInterrupt):
        words, code = words_and_code(interrupt)
        sys.stderr.write(f"error: {words}\n")
        raise SystemExit(code) from None


def _refuse_a_folder_that_is_gone() -> None:
    """Arithmetic libraries end the process there, and blame a file of their own."""
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write("error: the current folder is not there any more: go to another one (cd)\n")
        raise SystemExit(2) from None
