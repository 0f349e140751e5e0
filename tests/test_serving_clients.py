"""What clients of other servers send to `joulebench serve` too: texts in parts, a question for one model,
and bodies of megabytes."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest

from engines.serving.http import LocalServer
from tests.protocol_server import MODEL, events, post, served

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with served() as found:
        yield found


def got(server: LocalServer, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def answered(server: LocalServer, content: object) -> tuple[list[int], str]:
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    _, found = post(server, CHAT, asked | {"return_token_ids": True})
    (choice,) = found["choices"]
    return choice["prompt_token_ids"], choice["message"]["content"]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def test_parts_of_a_message_are_its_lines(server: LocalServer) -> None:
    """vLLM and llama-server join them so."""
    whole = answered(server, "The key is blue.\nWhere is it?")
    assert answered(server, parts("The key is blue.", "Where is it?")) == whole
    assert answered(server, parts("The key is blue.\nWhere is it?")) == whole
    assert answered(server, parts("The key is blue. Where is it?")) != whole


@pytest.mark.parametrize(
    "content",
    [
        [],
        5,
        ["a text"],
        [{"type": "text"}],
        [{"type": "text", "text": "What is here?"}, {"type": "image_url", "image_url": {"url": "data:"}}],
    ],
    ids=["no part", "a number", "no object", "no text", "an image"],
)
def test_what_no_text_model_can_read_is_refused_in_one_line(server: LocalServer, content: object) -> None:
    asked = {"messages": [{"role": "system", "content": "Answer."}, {"role": "user", "content": content}]}
    status, found = post(server, CHAT, asked)
    assert status == 400
    told = 'messages[1].content: must be a text, or parts {"type": "text", "text": "..."} alone'
    assert found["error"]["message"] == told


def test_an_answer_tells_the_ids_that_its_stream_tells(server: LocalServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"messages": messages, "max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    (whole,) = post(server, CHAT, asked)[1]["choices"]
    choices = [chunk["choices"][0] for chunk in events(server, CHAT, asked)[:-1]]
    assert [whole["prompt_token_ids"]] == [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c]
    assert whole["token_ids"] == [i for c in choices for i in c.get("token_ids", ())]
    assert len(whole["token_ids"]) == 3


def test_one_model_is_told_by_its_name(server: LocalServer) -> None:
    (of_all,) = got(server, "/v1/models")[1]["data"]
    for name in (MODEL, quote(MODEL, safe="")):
        assert got(server, f"/v1/models/{name}") == (200, of_all)
    status, found = got(server, "/v1/models/another")
    assert status == 404
    assert found["error"]["message"] == f"model 'another': this server has {MODEL!r} only"


@pytest.mark.parametrize("is_chat", [False, True], ids=("completion", "chat"))
def test_a_text_of_megabytes_is_refused_at_once(server: LocalServer, is_chat: bool) -> None:
    """16 MB were cut into tokens first: 15 to 38 s, and 4 GB."""
    text = "x" * 16_000_000
    begin_s = time.monotonic()
    if is_chat:
        status, found = post(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]})
    else:
        status, found = post(server, "/v1/completions", {"prompt": ["a", text]})
    assert time.monotonic() - begin_s < 5
    message = found["error"]["message"]
    assert (status, "characters, at least " in message, "exceeds max_length 8192" in message) == (400, True, True)


@pytest.mark.parametrize(
    ("road", "body", "words"),
    [
        ("completions", {"prompt": [*[1] * 1_000_000, 1.5]}, "prompt: must be a text, a list of token ids, or a list"),
        ("completions", {"prompt": [[1]] * 90_000}, "prompt: must be a text, a list of token ids, or a list"),
        ("completions", {"prompt": "a", "stop": [1] * 1_000_000}, "stop: Input should be a valid string"),
        ("completions", dict.fromkeys(map(str, range(300_000)), 1), "the body: 300000 keys; at most 100 are read"),
        ("completions", {"prompt": [[1]] * 1_000_000}, "the body has more than 100000 objects and lists"),
        ("chat/completions", {"messages": [USER] * 500_000}, "the body has more than 100000 objects and lists"),
        ("chat/completions", {"messages": [{"role": 1}] * 90_000}, "messages[0].role: Input should be 'system'"),
    ],
    ids=("ids", "lists", "stops", "keys", "million lists", "many messages", "messages"),
)
def test_a_wrong_body_of_megabytes_is_refused_at_once(
    server: LocalServer, road: str, body: dict[str, Any], words: str
) -> None:
    """Every error was told: a list of 4 million ids with a wrong one kept all clients waiting for minutes."""
    content = json.dumps(body).encode()
    begin_s = time.monotonic()
    status, found = post(server, f"/v1/{road}", content)
    assert time.monotonic() - begin_s < 5
    assert (status, found["error"]["message"].startswith(words)) == (400, True)


def test_braces_in_a_text_are_neither_objects_nor_lists(server: LocalServer) -> None:
    status, found = post(server, "/v1/completions", {"prompt": '{[\\"' * 200_000})
    assert (status, "prompt of 800000 characters" in found["error"]["message"]) == (400, True)


@pytest.mark.parametrize(("first", "second"), [("2", "40"), ("40", "2"), ("2", "2")])
def test_two_lengths_of_one_body_are_refused_where_they_differ(server: LocalServer, first: str, second: str) -> None:
    """RFC 9112, 6.3. Of equal ones the body is read, which asks for nothing here."""
    head = f"Host: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    lengths = f"Content-Length: {first}\r\nContent-Length: {second}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}{lengths}\r\n{{}}".encode())
        with client.makefile("rb") as answer:
            told = answer.read().decode()
    assert " 400 " in told.splitlines()[0]
    assert ("Content-Length: is given as 2 and as 40" in told) == (first != second)
    assert ("prompt: is missing" in told) == (first == second)


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(server: LocalServer) -> None:
    """It knows none: lengths in hexadecimal stood in its text. The end of the connection is the stream's (RFC 9112)."""
    body = json.dumps({"prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True})
    head = f"Host: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(f"POST /v1/completions HTTP/1.0\r\n{head}\r\n{body}".encode())
        with client.makefile("rb") as answer:
            told, _, text = answer.read().partition(b"\r\n\r\n")
    assert (b"200 OK" in told, b"chunked" in told) == (True, False)
    events_of = text.decode().split("\n\n")
    assert events_of[-2:] == ["data: [DONE]", ""]
    assert [one for one in events_of[:-1] if not one.startswith("data: ")] == []
