"""HTTP to a server that speaks OpenAI's protocol: one connection, JSON, and streams with a stamp for each chunk.

A key is read from the environment, sent, and nothing else: it stands in no message, and no redirection carries it on.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from engines.errors import EngineError, NoServerError
from engines.external.arrivals import told_by
from results.printable import printable

MOST_ANSWER_BYTES = 1 << 30
MOST_LINE_BYTES = 64 << 20
READ_BYTES = 1 << 20
WORDS = 300
"""Characters that are told of what a server says."""
MOST_TRIES = 3
WAIT_S = 1.0
"""Before a busy server is asked again."""
BUSY = (429, 503)
DONE = "[DONE]"
END_WAIT_S = 0.25
"""Behind it, for the end of the body: what a connection needs that is to take the next request too."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Chunk(NamedTuple):
    """at_s: when it was here, on the run's clock, one time for all that came together. told: `NOTHING` of a line that
    only keeps the connection alive."""

    at_s: float
    told: Any


class ServerLink:
    """Of one engine. `n_again` counts requests that were sent again, `n_busy` those for which a server had no room."""

    def __init__(self, url: str, key_variable: str | None, timeout_s: float, now_s: Callable[[], float]) -> None:
        """url: up to and with /v1. Raises `EngineError`."""
        self.url = url.rstrip("/")
        self._split = checked_url(url)
        self._timeout_s, self._now_s = timeout_s, now_s
        self._key = None if key_variable is None else _key(key_variable)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        self._has_answered = False
        """On this connection: one that has not may be ended for what was asked."""
        self._arrived_s = 0.0
        """The last bytes of an answer."""
        self._due_s = math.inf
        """When the line that is read has to be whole: a socket's own limit begins anew with each byte."""
        self.n_again = self.n_busy = 0

    @property
    def host(self) -> str:
        return self._split.hostname or ""

    @property
    def port(self) -> int:
        return self._split.port or (443 if self._split.scheme == "https" else 80)

    def get(self, road: str, beside_v1: bool = False) -> Any:
        """The JSON of a road below the url, or beside its /v1. Raises `EngineError`."""
        path = self._split.path.rstrip("/")
        path = path.removesuffix("/v1") if beside_v1 else path
        return self._json(self._answer("GET", path + road, None))

    def post(self, road: str, body: Mapping[str, Any]) -> Chunk:
        """The whole answer. Raises `EngineError`."""
        response = self._answer("POST", self._split.path.rstrip("/") + road, json.dumps(body).encode())
        content = self._read(response)
        return Chunk(self._arrived_s, self._parsed(content))

    def stream(self, road: str, body: Mapping[str, Any]) -> Iterator[Chunk]:
        """Chunks as they come. Raises `EngineError`, also where the stream ends before it is done: what came until then
        is no answer."""
        response = self._answer("POST", self._split.path.rstrip("/") + road, json.dumps(body).encode())
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            self.close()
            raise EngineError(f"{self.url}: answers with {self._told(kind)} where a stream was asked; it cannot stream")
        finished, n_bytes = False, 0
        try:
            while line := self._line(response):
                at_s = self._arrived_s
                n_bytes += len(line)
                if n_bytes > MOST_ANSWER_BYTES:
                    raise EngineError(f"{self.url}: an answer of more than {MOST_ANSWER_BYTES} bytes")
                field, _, rest = line.partition(b":")
                if field not in (b"data", b"error"):
                    yield Chunk(at_s, NOTHING)  # a comment, a name of an event, or the blank line between two
                    continue
                content = rest.strip()
                if content == DONE.encode():
                    finished = self._ends(response)
                    return
                told = self._parsed(content)
                if field == b"error" or is_error(told):
                    raise EngineError(f"{self.url}: {self._words(told)}")
                yield Chunk(at_s, told)
            raise EngineError(f"{self.url}: the stream ended before it was done; look at the server's log")
        finally:
            if not finished:
                self.close()

    def ready(self) -> None:
        """Connects where no connection stands, so that no request's time holds that. llama-server ends each after a
        stream. A server that is not there is told by the request."""
        kept = None if self._connection is None else self._connection.sock
        if kept is not None and not select.select([kept], [], [], 0)[0]:
            return
        # What can be read before anything was asked is the end of the connection.
        self.close()
        self._connection = self._made()
        with suppress(OSError):
            self._connection.connect()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # --- one request --------------------------------------------------------------------------------------------------

    def _answer(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        """The head of the answer. Asked again only while nothing has come: a connection that the server had closed
        meanwhile, or a server that says it is busy."""
        for left in reversed(range(MOST_TRIES)):
            is_kept = self._has_answered
            try:
                response = self._asked(method, path, body)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
                self.close()
                if not left or not is_kept:
                    raise EngineError(f"{self.url}: ended the connection without an answer ({error})") from error
            except TimeoutError as error:
                self.close()
                raise EngineError(f"{self.url}: no answer in {self._timeout_s:g} s; raise timeout_s") from error
            except (OSError, http.client.HTTPException) as error:
                self.close()
                raise NoServerError(f"{self.url}: no server answers ({self._told(str(error))}); start it") from error
            else:
                self._has_answered = True
                if response.status == http.client.OK:
                    return response
                if response.status not in BUSY or not left:
                    raise EngineError(f"{self.url}: {self._refusal(response)}")
                self.close()
                self.n_busy += 1
                time.sleep(WAIT_S)
            self.n_again += 1
        raise AssertionError  # the last turn returns or raises

    def _asked(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        if self._connection is None:
            self._connection = self._made()
        headers = {"Accept": "application/json, text/event-stream"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        self._connection.request(method, path, body, headers)
        # Of an answer that ends with its connection, the connection has none any more.
        self._socket = self._connection.sock
        with self._in_time():
            return self._connection.getresponse()

    def _made(self) -> http.client.HTTPConnection:
        self._has_answered = False
        made = http.client.HTTPSConnection if self._split.scheme == "https" else http.client.HTTPConnection
        connection = made(self.host, self.port, timeout=self._timeout_s)
        connection.response_class = told_by(self._arrive)  # type: ignore[assignment]
        return connection

    def _arrive(self) -> None:
        self._arrived_s = self._now_s()
        if time.monotonic() > self._due_s:
            raise TimeoutError

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """What is read, in all. Raises `TimeoutError`."""
        self._due_s = time.monotonic() + self._timeout_s
        try:
            yield
        finally:
            self._due_s = math.inf

    def _refusal(self, response: http.client.HTTPResponse) -> str:
        """What the server says, in its own words."""
        said = ""
        with suppress(EngineError):
            content = self._read(response, 1 << 16)
            try:
                said = self._words(json.loads(content))
            except (ValueError, RecursionError):
                said = self._told(content.decode(errors="replace"))
        self.close()
        where = response.headers.get("Location")
        moved = f", moved to {self._told(where)}: give that url" if where else ""
        is_below_v1 = self._split.path.rstrip("/").endswith("/v1")
        elsewhere = (
            "" if response.status != http.client.NOT_FOUND or is_below_v1 else "; most servers need a url up to /v1"
        )
        return (
            f"HTTP {response.status} {self._told(response.reason)}{moved}" + (f": {said}" if said else "") + elsewhere
        )

    def _read(
        self, response: http.client.HTTPResponse, most_bytes: int = MOST_ANSWER_BYTES, wait_s: float | None = None
    ) -> bytes:
        """The rest of an answer. One that comes byte by byte has to end in time too: in wait_s, or the link's own."""
        wait_s = self._timeout_s if wait_s is None else wait_s
        content, deadline_s = bytearray(), time.monotonic() + wait_s
        why = None
        try:
            while part := response.read1(READ_BYTES):
                content += part
                if len(content) > most_bytes:
                    why = f"an answer of more than {most_bytes} bytes"
                elif time.monotonic() > deadline_s:
                    why = f"the answer has not ended in {wait_s:g} s; raise timeout_s"
                if why is not None:
                    break
        except (OSError, http.client.HTTPException) as error:
            why = f"the answer broke off ({self._told(str(error) or 'cut')})"
        if why is None and response.length:
            why = f"the answer broke off ({response.length} bytes are missing)"
        if why is not None:
            self.close()
            raise EngineError(f"{self.url}: {why}")
        # Else the connection takes it for unread, and no further request.
        response.close()
        return bytes(content)

    def _ends(self, response: http.client.HTTPResponse) -> bool:
        """Of an answer that is said to be done, and is whole: whether its body ends too. One that stays open (a proxy,
        a server that ends it late) is not waited for."""
        assert self._socket is not None
        self._socket.settimeout(END_WAIT_S)
        try:
            self._read(response, wait_s=END_WAIT_S)
        except EngineError:
            response.close()
            return False
        if self._connection is not None and self._connection.sock is not None:
            self._connection.sock.settimeout(self._timeout_s)
        return True

    def _line(self, response: http.client.HTTPResponse) -> bytes:
        """The next one with its end; empty at the end of the stream."""
        try:
            with self._in_time():
                line = response.readline(MOST_LINE_BYTES)
        except TimeoutError as error:
            raise EngineError(f"{self.url}: no chunk in {self._timeout_s:g} s; raise timeout_s") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{self.url}: the stream broke off ({self._told(str(error) or 'cut')})") from error
        if line and not line.endswith(b"\n"):
            raise EngineError(f"{self.url}: the stream ended within a line; look at the server's log")
        return line

    def _json(self, response: http.client.HTTPResponse) -> Any:
        return self._parsed(self._read(response))

    def _parsed(self, content: bytes) -> Any:
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            self.close()
            raise EngineError(f"{self.url}: answers with no JSON: {self._told(repr(content[:80]))}") from error

    def _words(self, told: Any) -> str:
        """Of an error: its message, wherever a server puts it."""
        for key in ("error", "message", "detail"):
            if isinstance(told, dict) and told.get(key):
                told = told[key]
        return self._told(told if isinstance(told, str) else json.dumps(told))

    def _told(self, text: str) -> str:
        """Fit to be told: short, on one line, and without the key."""
        return printable(text if self._key is None else text.replace(self._key, "***"), WORDS)


def is_error(told: Any) -> bool:
    """In place of a chunk, as servers write one: {"error": ...}, or {"object": "error", "code": 500, ...}."""
    return isinstance(told, dict) and bool(told.get("error") or told.get("object") == "error")


def checked_url(url: str) -> SplitResult:
    """Raises `EngineError`. A name and password in it would be stored with the plan."""
    remedy = 'give it as "http://127.0.0.1:8000/v1"'
    try:
        split = urlsplit(url)
        _ = split.port
    except ValueError as error:
        raise EngineError(f"url {printable(url, 100)}: {error}; {remedy}") from error
    if split.username is not None or split.password is not None:
        raise EngineError("url: holds a name or a password, which would be stored; name a key_variable instead")
    if split.scheme not in ("http", "https") or not split.hostname or split.query or split.fragment:
        raise EngineError(f"url {printable(url, 100)}: no address of a server; {remedy}")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise EngineError(f"url {printable(url, 100)}: holds a blank or a character that no address has; {remedy}")
    return split


def _key(variable: str) -> str:
    key = os.environ.get(variable, "")
    if not key:
        raise EngineError(f"key_variable {variable}: the environment has none of that name; set it to the server's key")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EngineError(f"key_variable {variable}: what it holds is no key (blanks, or characters outside ASCII)")
    return key
