"""A server that says what it is told to say, byte by byte, and keeps what it was asked."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

Script = bytes | Callable[[socket.socket], None]


class ScriptedServer:
    """`asked` holds the bodies that came; `heads` what stood before them."""

    def __init__(self, port: int = 0) -> None:
        self.scripts: list[Script] = []
        self.asked: list[Any] = []
        self.heads: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", port))
        self.port = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._answering = threading.Thread(target=self._answer, daemon=True)
        self._answering.start()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            while self._one(connection):
                pass

    def _one(self, connection: socket.socket) -> bool:
        """Whether the connection stays."""
        received = b""
        while b"\r\n\r\n" not in received:
            try:
                part = connection.recv(1 << 16)
            except OSError:
                return False
            if not part:
                return False
            received += part
        head, _, body = received.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        length = int(lengths[0].partition(b":")[2]) if lengths else 0
        while len(body) < length:
            body += connection.recv(1 << 16)
        self.heads.append(head.decode())
        self.asked.append(json.loads(body) if body else None)
        script = self.scripts.pop(0)
        if not isinstance(script, bytes):
            script(connection)
            return False
        connection.sendall(script)
        return True

    def close(self) -> None:
        """Nobody waits any more for a connection: a call that a signal starts again takes the number of a socket that
        is closed for the next server's."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._answering.join(10)
        self._listening.close()


@contextmanager
def scripted(*scripts: Script, port: int = 0) -> Iterator[ScriptedServer]:
    server = ScriptedServer(port)
    server.scripts += scripts
    try:
        yield server
    finally:
        server.close()


def answer(told: Any, status: str = "200 OK", headers: str = "") -> bytes:
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(*told: Any, done: bool = True) -> bytes:
    """Events in a chunked body; without `done` it ends as if all was well, but was not said to be done."""
    events = [event(one) for one in told] + [piece(b"data: [DONE]\n\n")] * done
    return STREAM_HEAD + b"".join(events) + b"0\r\n\r\n"


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def endless(first: bytes, again: bytes) -> Callable[[socket.socket], None]:
    """The beginning of a body in pieces, and then the same piece for ever: until the client goes away."""

    def send(connection: socket.socket) -> None:
        connection.sendall(STREAM_HEAD + first)
        with suppress(OSError):
            while True:
                connection.sendall(again)
                time.sleep(0.001)

    return send


def piece(event: bytes) -> bytes:
    """Of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(event), event)


def event(told: Any) -> bytes:
    return piece(b"data: " + json.dumps(told).encode() + b"\n\n")


def chunk(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": None} | more]}


def end(reason: str = "length") -> dict[str, Any]:
    return chunk("", finish_reason=reason)


def usage(n_prompt: int, n_new: int, n_cached: int | None = None) -> dict[str, Any]:
    counts: dict[str, Any] = {"prompt_tokens": n_prompt, "completion_tokens": n_new}
    if n_cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": n_cached}
    return {"choices": [], "usage": counts}


def unfinished(part: bytes) -> Callable[[socket.socket], None]:
    """The beginning of an answer, of which no more comes until the client goes away."""

    def send(connection: socket.socket) -> None:
        connection.sendall(part)
        with suppress(OSError):
            connection.recv(1)

    return send


def slowly(parts: Sequence[bytes], pause_s: float) -> Callable[[socket.socket], None]:
    """Parts with pauses between, then the connection ends."""

    def send(connection: socket.socket) -> None:
        for i, part in enumerate(parts):
            if i:
                time.sleep(pause_s)
            connection.sendall(part)

    return send
