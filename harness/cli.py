"""Where the program begins: signals are answered before anything heavy is imported, then the commands are."""

from __future__ import annotations

from harness.interrupts import end_at_once


def main() -> None:
    end_at_once()
    from harness.commands import app

    try:
        app()
    except Exception as error:  # noqa: BLE001 - of every command, what none of them foresaw
        from harness.terminal import end_unforeseen

        end_unforeseen(error)
    finally:
        end_at_once()
