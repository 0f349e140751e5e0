"""Where the program begins: signals are answered before anything heavy is imported, then the commands are."""

from __future__ import annotations

import os
import sys

from harness.interrupts import end_at_once, watch_output


def main() -> None:
    end_at_once()
    watch_output()
    _refuse_a_folder_that_is_gone()
    from harness.commands import app

    try:
        app()
    except Exception as error:  # noqa: BLE001 - of every command, what none of them foresaw
        from harness.terminal import end_unforeseen

        end_unforeseen(error)
    finally:
        end_at_once()


def _refuse_a_folder_that_is_gone() -> None:
    """Arithmetic libraries end the process there, and blame a file of their own."""
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write("error: the current folder is not there any more: go to another one (cd)\n")
        raise SystemExit(2) from None
