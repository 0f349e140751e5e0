"""The protocol's roads over HTTP, for programs of this machine.

No web page may ask: a request must name this machine in its Host header (else a foreign name that resolves to it would
do) and carry JSON by its content type, which a browser sends to another site only after a question that is refused.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import queue
import select
import socket
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from engines.errors import EngineError
from engines.serving.asked import BadRequestError, ChatAsked, CompletionAsked, read_asked
from engines.serving.computing import Answered, BusyError, Computing, Job
from engines.serving.pieces import TextPieces
from engines.serving.replies import TokenPlaces, chat_choice, completion_choice, scored_text, usage_of
from results.printable import printable

MOST_BODY_BYTES = 64 << 20
"""A prompt of some million token ids."""
PATIENCE_S = 60.0
"""For a client to send what it began, or to take what it is sent."""
LOOK_EVERY_S = 0.2
"""At a client that waits: whether it still does."""
DONE = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


class LocalServer(ThreadingHTTPServer):
    """Answers on a loopback address only. `port` is the one that was got."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, computing: Computing, model: str, address: str = "127.0.0.1", port: int = 0, version: str = ""
    ) -> None:
        """model: the name by which clients ask for it. version: what else decides its answers, for who keeps figures of
        it. Raises `OSError` where the port cannot be had, `ValueError` for
        an address that other machines reach."""
        if not ipaddress.ip_address(address).is_loopback:
            raise ValueError(f"address {address}: other machines reach it, and whoever asks is answered; use 127.0.0.1")
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)
        self.computing, self.model, self.version = computing, model, version
        self.port = int(self.server_address[1])
        shown = f"[{address}]" if ":" in address else address
        self.url = f"http://{shown}:{self.port}/v1"
        self.names = {f"{name}:{self.port}" for name in ("localhost", "127.0.0.1", "[::1]", shown)}
        self.started_s = int(time.time())

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that breaks off is none of ours."""
        log.info("a connection broke", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: LocalServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "joulebench", ""
    disable_nagle_algorithm = True
    """A token leaves when it is there."""
    timeout = PATIENCE_S
    _has_body = False
    """Whether the body of this request was read."""

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as the library calls it
        log.info("%s", printable(format % args))

    def do_GET(self) -> None:
        roads: dict[str, Callable[[], dict[str, Any]]] = {
            "/health": lambda: {"status": "ok"},
            "/version": lambda: {"version": self.server.version},
            "/v1/models": self._models,
        }
        if not self._is_from_here():
            return
        road = roads.get(self.path)
        if self.path.startswith(ONE_MODEL):
            self._tell_model(unquote(self.path.removeprefix(ONE_MODEL)))
        elif road is None:
            self._refuse(
                HTTPStatus.NOT_FOUND, f"{self.path}: there are /health, /version, /v1/models, and, with POST, {POSTS}"
            )
        else:
            self._reply(HTTPStatus.OK, road())

    def do_POST(self) -> None:
        self._has_body = False
        roads = {"/v1/completions": self._complete, "/v1/chat/completions": self._chat}
        if not self._is_from_here():
            return
        road = roads.get(self.path)
        if road is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"{self.path}: there are {POSTS}")
            return
        body = self._body()
        if body is None:
            return
        try:
            road(body)
        except BadRequestError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except BusyError as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except EngineError as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
        except _LeftError:
            self.close_connection = True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the library refuses by itself, in the form of the protocol's own errors."""
        status = HTTPStatus(code)
        # One with a bad version passes for HTTP/0.9, whose answers have no status.
        self.request_version = self.protocol_version
        if status is HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(
                HTTPStatus.METHOD_NOT_ALLOWED,
                f"{self.command} {self.path}: GET and POST are answered",
                Allow="GET, POST",
            )
        else:
            self._refuse(status, message or status.phrase)

    def _is_from_here(self) -> bool:
        """Whether the request names this machine; else it is refused."""
        if self.headers.get("Host", "").lower() in self.server.names:
            return True
        self._refuse(HTTPStatus.FORBIDDEN, f"Host {self.headers.get('Host')!r:.100}: ask at {self.server.url}")
        return False

    def _body(self) -> bytes | None:
        """None: refused."""
        kind, length = self.headers.get_content_type(), self.headers.get("Content-Length", "")
        if len(lengths := set(self.headers.get_all("Content-Length", ()))) > 1:
            # Where the body ends, and the next request begins, nobody can say: RFC 9112, 6.3.
            self._refuse(HTTPStatus.BAD_REQUEST, f"Content-Length: is given as {' and as '.join(sorted(lengths))}")
        elif kind != "application/json":
            told = f"Content-Type {kind}: send application/json"
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, told)
        elif "Transfer-Encoding" in self.headers or not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length: is missing; send the body whole, with its length")
        elif len(length) > 12 or int(length) > MOST_BODY_BYTES:
            told = f"body of {length[:20]} bytes: at most {MOST_BODY_BYTES} are taken"
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, told)
        else:
            body = self.rfile.read(int(length))
            self._has_body = True
            if len(body) == int(length):
                return body
            self._refuse(HTTPStatus.BAD_REQUEST, f"body of {len(body)} bytes: {length} were announced")
        return None

    def _model(self) -> dict[str, Any]:
        own = {"id": self.server.model, "object": "model", "created": self.server.started_s, "owned_by": "joulebench"}
        return own | {"max_model_len": self.server.computing.engine.max_length}

    def _models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model()]}

    def _tell_model(self, name: str) -> None:
        if name == self.server.model:
            self._reply(HTTPStatus.OK, self._model())
        else:
            self._refuse(HTTPStatus.NOT_FOUND, self._other_model(name))

    def _other_model(self, name: str) -> str:
        return f"model {name!r:.100}: this server has {self.server.model!r} only"

    # --- answers ------------------------------------------------------------------------------------------------------

    def _complete(self, body: bytes) -> None:
        asked = read_asked(CompletionAsked, body)
        self._check_model(asked.model)
        jobs: list[Job] = []
        try:
            for prompt in asked.prompts:
                with_prompt = asked.echo and asked.logprobs is not None
                jobs.append(self.server.computing.ask(prompt, asked, asked.max_tokens, asked.logprobs, with_prompt))
            if asked.stream:
                self._stream(jobs[0], asked, is_chat=False)
                return
            found = [self._whole(job) for job in jobs]
        finally:
            _leave(jobs)
        tokenizer = self.server.computing.engine.tokenizer
        choices = [completion_choice(i, answered, asked, tokenizer) for i, answered in enumerate(found)]
        n_new = 0 if asked.max_tokens == 0 else None
        self._reply(
            HTTPStatus.OK, self._named("text_completion") | {"choices": choices, "usage": usage_of(found, n_new)}
        )

    def _chat(self, body: bytes) -> None:
        asked = read_asked(ChatAsked, body)
        self._check_model(asked.model)
        tokenizer = self.server.computing.engine.tokenizer
        if not tokenizer.has_chat_template:
            raise BadRequestError(f"{self.server.model}: has no chat template; use /v1/completions")
        try:
            # A begin token is the template's to set: the tokenizer adds none.
            text = tokenizer.chat([message.said for message in asked.messages])
            self.server.computing.check_length(text)
            prompt = tokenizer.encode(text)
        except EngineError as error:
            raise BadRequestError(str(error)) from error
        job = self.server.computing.ask(prompt, asked, asked.most_tokens)
        try:
            if asked.stream:
                self._stream(job, asked, is_chat=True)
                return
            answered = self._whole(job)
        finally:
            _leave([job])
        choice = chat_choice(answered, asked)
        self._reply(
            HTTPStatus.OK, self._named("chat.completion") | {"choices": [choice], "usage": usage_of([answered])}
        )

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.server.model):
            raise BadRequestError(self._other_model(str(name)))

    def _named(self, kind: str) -> dict[str, Any]:
        number = time.time_ns()
        return {"id": f"joulebench-{number:x}", "object": kind, "created": number // 10**9, "model": self.server.model}

    def _events(self, job: Job) -> Iterator[int | Answered]:
        """Raises `EngineError`, and `_LeftError` once the client has gone. It is looked at between tokens too: where
        they come fast none is waited for, and only a stream is written before the end."""
        looked_s = time.monotonic()
        while True:
            event = None
            with contextlib.suppress(queue.Empty):
                event = job.events.get(timeout=LOOK_EVERY_S)
            if time.monotonic() - looked_s >= LOOK_EVERY_S:
                looked_s = time.monotonic()
                if self._has_left():
                    raise _LeftError
            if isinstance(event, EngineError):
                raise event
            if event is not None:
                yield event
            if isinstance(event, Answered):
                return

    def _whole(self, job: Job) -> Answered:
        return next(event for event in self._events(job) if isinstance(event, Answered))

    def _stream(self, job: Job, asked: CompletionAsked | ChatAsked, is_chat: bool) -> None:
        """A chunk for each token, when it is there; its text may be empty, where a character or a stop string is not
        yet whole."""
        tokenizer = self.server.computing.engine.tokenizer
        pieces, places = TextPieces(tokenizer.decode, asked.stops, tokenizer.open_ids), TokenPlaces(tokenizer.decode)
        named = self._named("chat.completion.chunk" if is_chat else "text_completion")
        options = asked.stream_options
        assert job.answer is not None
        n_prompt, n_new, n_said = len(job.answer.request.prompt_ids), 0, 0
        self._begin_stream()
        if is_chat:
            self._chunk(named | {"choices": [_choice(is_chat, "", role="assistant")]})
        try:
            for event in self._events(job):
                if isinstance(event, Answered):
                    last = _choice(is_chat, pieces.rest(event.completion.text), event.ended_by)
                    self._chunk(named | {"choices": [last]})
                    if options is not None and options.include_usage:
                        self._chunk(named | {"choices": [], "usage": usage_of([event])})
                    self._write_chunk(DONE)
                    self._write_chunk(b"")
                    return
                n_new += 1
                choice = _choice(is_chat, pieces.add(event))
                if asked.return_token_ids:
                    choice["token_ids"] = [event]
                    if n_new == 1:
                        choice["prompt_token_ids"] = list(job.answer.request.prompt_ids)
                if isinstance(asked, CompletionAsked) and asked.logprobs is not None:
                    said, n_said = job.answer.said[n_said:n_new], n_new
                    choice["logprobs"] = scored_text(said, asked, tokenizer.spell, [places.of_next(event)])
                told = named | {"choices": [choice]}
                if options is not None and options.continuous_usage_stats:
                    own = {"prompt_tokens": n_prompt, "completion_tokens": n_new, "total_tokens": n_prompt + n_new}
                    told["usage"] = own
                self._chunk(told)
        except EngineError as error:
            self._chunk(_error(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)))
            # No end: what came is not the answer.
            self.close_connection = True

    # --- bytes --------------------------------------------------------------------------------------------------------

    @property
    def _takes_chunks(self) -> bool:
        """HTTP/1.0 knows none: there a stream ends with its connection."""
        return self.request_version != "HTTP/1.0"

    def _begin_stream(self) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        if self._takes_chunks:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()

    def _chunk(self, told: dict[str, Any]) -> None:
        self._write_chunk(b"data: " + _json(told) + b"\n\n")

    def _write_chunk(self, content: bytes) -> None:
        """Raises `_LeftError` where nobody takes it."""
        try:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content) if self._takes_chunks else content)
        except OSError as error:
            raise _LeftError from error

    def _reply(self, status: HTTPStatus, told: dict[str, Any], **headers: str) -> None:
        body = _json(told)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, why: str, **headers: str) -> None:
        """A body that was not read would be taken for the next request: the connection ends."""
        self.close_connection = True
        # Without a head where that was none.
        lengths = self.headers.get_all("Content-Length", ()) if hasattr(self, "headers") else ()
        length = min(lengths, key=lambda told: (len(told), told), default="")
        if not self._has_body and length.isascii() and length.isdigit() and len(length) <= 6:
            # A connection that ends with bytes unread takes the answer with it.
            self.rfile.read(int(length))
        self._reply(status, _error(status, why), **headers)

    def _has_left(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        try:
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True


ONE_MODEL = "/v1/models/"
POSTS = "/v1/completions and /v1/chat/completions"


class _LeftError(Exception):
    """The client broke off."""


def _leave(jobs: list[Job]) -> None:
    """Whatever is not yet computed of them is not wanted any more."""
    for job in jobs:
        job.gone.set()


def _choice(is_chat: bool, text: str, finish_reason: str | None = None, role: str | None = None) -> dict[str, Any]:
    if not is_chat:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    delta = {"content": text} if role is None else {"role": role, "content": text}
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def _error(status: HTTPStatus, why: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    return {"error": {"message": printable(why, 1000), "type": kind, "code": int(status)}}


def _json(told: dict[str, Any]) -> bytes:
    """In ASCII: half a character, which a text of a model may hold, is no UTF-8."""
    return json.dumps(told, allow_nan=False).encode()
