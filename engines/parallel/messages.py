"""What the first rank's process and the others tell each other beside what they compute: a socket between each two.

A message is a length and so many bytes: JSON (settings, reports), or int64 numbers (what to compute next). Never
pickle: what comes in can be a number or a text, and nothing else.
"""

from __future__ import annotations

import json
import socket
import struct
from array import array
from collections.abc import Sequence
from typing import Any

LENGTH = struct.Struct("<q")
MOST_BYTES = 1 << 30
STOP, START, STEP, REPORT = range(4)
"""What a message of numbers begins with."""


class LostError(Exception):
    """The other end is gone."""


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send_numbers(self, numbers: Sequence[int]) -> None:
        self._send(array("q", numbers).tobytes())

    def receive_numbers(self) -> list[int]:
        return array("q", self._receive()).tolist()

    def send_json(self, told: dict[str, Any]) -> None:
        self._send(json.dumps(told).encode())

    def receive_json(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Raises `LostError`, `TimeoutError`."""
        self._connection.settimeout(timeout_s)
        try:
            told = json.loads(self._receive())
        finally:
            self._connection.settimeout(None)
        if not isinstance(told, dict):
            raise LostError(f"a message holds {type(told).__name__}")
        return told

    def close(self) -> None:
        self._connection.close()

    def _send(self, body: bytes) -> None:
        try:
            self._connection.sendall(LENGTH.pack(len(body)) + body)
        except OSError as error:
            raise LostError(str(error)) from error

    def _receive(self) -> bytes:
        (n_bytes,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if not 0 <= n_bytes <= MOST_BYTES:
            raise LostError(f"a message of {n_bytes} bytes")
        return self._exactly(n_bytes)

    def _exactly(self, n_bytes: int) -> bytes:
        parts, left = [], n_bytes
        while left:
            try:
                part = self._connection.recv(min(left, 1 << 20))
            except TimeoutError:
                raise
            except OSError as error:
                raise LostError(str(error)) from error
            if not part:
                raise LostError("the connection was closed")
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
