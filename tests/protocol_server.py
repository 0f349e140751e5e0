"""Our own server on a port of its own, and a plain client without any code of ours."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from engines.serving.computing import Computing
from engines.serving.http import LocalServer
from engines.techniques.parameters import Composed
from harness.schema import TECHNIQUE

MODEL = "bundled:tiny-qwen3-moe"
JSON = {"Content-Type": "application/json"}


@cache
def checkpoint() -> Checkpoint:
    return load_checkpoint(MODEL, torch.float32)


def dropless() -> Composed:
    found = TECHNIQUE.read({"name": "dropless"})
    assert isinstance(found, Composed)
    return found


def engine(**options: Any) -> ReferenceEngine:
    return ReferenceEngine(checkpoint(), dropless(), threads=1, **options)


@contextmanager
def served(own: ReferenceEngine | None = None, **options: Any) -> Iterator[LocalServer]:
    """own: the engine behind it; else one of the bundled model, of these options."""
    computing = Computing(own or engine(**options))
    server = LocalServer(computing, MODEL)
    threads = [
        threading.Thread(target=work, daemon=True)
        for work in (computing.compute_forever, lambda: server.serve_forever(0.01))
    ]
    for thread in threads:
        thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        computing.end()
        for thread in threads:
            thread.join(10)


def post(server: LocalServer, road: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """(status, the JSON that came). body: bytes go as they are."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    content = body if isinstance(body, bytes) else json.dumps(body)
    connection.request("POST", road, content, JSON if headers is None else headers)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def events(server: LocalServer, road: str, body: dict[str, Any]) -> list[Any]:
    """Of a stream: each chunk's JSON; the last is the text "[DONE]"."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", road, json.dumps(body | {"stream": True}), JSON)
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/event-stream"
    texts = [part.removeprefix("data: ") for part in response.read().decode().split("\n\n") if part]
    connection.close()
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
