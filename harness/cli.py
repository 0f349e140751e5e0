"""Where the program begins: signals are answered before anything heavy is imported, then the commands are."""

from __future__ import annotations

from harness.interrupts import end_at_once


def main() -> None:
    end_at_once()
    from harness.commands import app

    try:
        app()
    finally:
        end_at_once()
