"""Error messages that quote what was found: as much of it as a reader can use, and nothing that steers a terminal."""

from __future__ import annotations

HEAD, TAIL = 800, 300
"""Characters that are kept of a long message: what and where stand in front, the remedy at the end."""


def readable(message: str) -> str:
    """The message with its middle left out where it is long, and control characters and lone surrogates escaped."""
    if len(message) > HEAD + TAIL:
        left_out = len(message) - HEAD - TAIL
        message = f"{message[:HEAD]} [... {left_out} characters ...] {message[-TAIL:]}"
    if message.isprintable():
        return message
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in message)
