"""HTTP answers of which is known when their bytes were here: what came together has one time, however many lines it is.

A server, a proxy or the kernel may join chunks that were written one after the other. How fast they are then read tells
nothing of how fast they were computed. Over TLS a record is what comes together.
"""

from __future__ import annotations

import http.client
import io
import socket
from collections.abc import Callable
from typing import Any

MOST_TOGETHER = 1 << 20
"""Bytes."""


class _Told(io.RawIOBase):
    """A socket's bytes; `arrived` is called when some are here."""

    def __init__(self, received: io.RawIOBase, arrived: Callable[[], None]) -> None:
        self._received, self._arrived = received, arrived

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        n = self._received.readinto(buffer)
        self._arrived()
        return n

    def close(self) -> None:
        self._received.close()
        super().close()


def told_by(arrived: Callable[[], None]) -> Callable[..., http.client.HTTPResponse]:
    """What makes a connection's answers (`response_class`)."""

    class Response(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *of: Any, **named: Any) -> None:
            super().__init__(sock, *of, **named)
            self.fp.close()
            self.fp = io.BufferedReader(_Told(sock.makefile("rb", buffering=0), arrived), MOST_TOGETHER)

    return Response
