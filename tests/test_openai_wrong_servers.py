"""A server that answers wrongly, slowly or not at all: an error in one line, and no figure."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from engines.base import unheard
from engines.errors import EngineError, NoServerError
from engines.external.openai_link import WAIT_S, ServerLink
from results.cells import CACHE_NOT_KNOWN, SERVER_BUSY
from tests.openai_client import client, request
from tests.scripted_server import (
    STREAM_HEAD,
    Script,
    answer,
    chunk,
    end,
    endless,
    event,
    piece,
    scripted,
    slowly,
    stream,
    unfinished,
    usage,
)

OR_LATE = r"no (chunk|answer) in 0\.2 s|the answer broke off \(timed out\)"
"""Where the machine stood still for so long: the limit is met at the next byte, and is none without it."""
HOSTILE = "\x1b[2J" + "long words " * 200
INTERNAL = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked"
NESTED = b"HTTP/1.1 500 Bad\r\nContent-Length: 60000\r\n\r\n" + b"[" * 60000
OLD_ERROR = piece(b'error: {"code":500,"message":"of llama-server: out of slots"}\n\n')


def counted(n: int, *counts: int) -> Script:
    """Four tokens, one a chunk, with a running count that says something else."""
    texts = (" the", " rain", " had", " stopped")
    told = [chunk(text) | {"usage": usage(n, count)["usage"]} for text, count in zip(texts, counts, strict=True)]
    return stream(*told, end(), usage(n, 4, 0))


def wrong_answers(n: int) -> dict[str, tuple[Script, str]]:
    """What a server may say, and what of it must be told."""
    good = (chunk(" the"), chunk(" rain"))
    return {
        "ends early": (stream(*good, done=False), "ended before it was done"),
        "breaks off": (slowly([STREAM_HEAD + b"1f\r\ndata: "], 0), "ended within a line|broke off|before it was done"),
        "says no reason": (stream(*good, usage(n, 2)), "did not say why it ended"),
        "another count": (stream(*good, end(), usage(n, 3)), "counts 3 new tokens, and the plan's tokenizer makes 2"),
        "another prompt": (stream(*good, end(), usage(n + 1, 2)), f"counts {n + 1} prompt tokens, and .* {n} "),
        "other ids": (stream(chunk("a", token_ids=[5]), end(), usage(n, 1)), "not what its token ids mean"),
        "no counts": (stream(*good, end()), "neither the ids of its tokens nor their number"),
        "too few": (stream(*good, end("stop"), usage(n, 2)), "2 new tokens came, asked for exactly 4 .*'stop'"),
        "too many": (stream(*good * 3, end(), usage(n, 6)), "5 new tokens came and no end, asked for 4"),
        "too many in one": (stream(chunk(" the rain" * 3), end(), usage(n, 6)), "6 new tokens came, asked for 4"),
        "no end": (endless(b"", event(chunk(" the"))), "5 new tokens came and no end, asked for 4"),
        "no end of ids": (endless(b"", event(chunk(" the", token_ids=[5]))), "5 new tokens came and no end"),
        "no end, counted": (endless(b"", event(usage(n, 9, 0) | chunk(" the"))), "9 new tokens came"),
        "another model": (stream(*(one | {"model": "b"} for one in good), end(), usage(n, 2)), "answers as model 'b'"),
        "a second model": (stream(good[0] | {"model": "m"}, good[1] | {"model": "n"}, end()), "answers as model 'n'"),
        "all held": (stream(*good * 2, end(), usage(n, 4, n)), f"it held {n} of {n} prompt tokens"),
        "more held": (stream(*good * 2, end(), usage(n, 4, n + 7)), f"it held {n + 7} of {n} prompt tokens"),
        "counts fall": (counted(n, 1, 2, 1, 4), "counted 1 new tokens behind 2, of 4 in all"),
        "counts run ahead": (counted(n, 4, 4, 4, 4), "counted 4 new tokens behind 0, of 4 in all, when 4 characters"),
        "counts pass the whole": (counted(n, 1, 2, 3, 9), "9 new tokens came and no end, asked for 4"),
        "HTTP 500 in mid-stream": (slowly([STREAM_HEAD + event(good[0]) + INTERNAL], 0), "ended before it was done"),
        "error as an event": (slowly([STREAM_HEAD + event(good[0]) + OLD_ERROR], 0), "of llama-server: out of slots"),
        "error as an object": (stream(good[0], {"object": "error", "message": "GPU lost", "code": 500}), "GPU lost"),
        "error within": (stream(chunk(" a"), {"error": {"message": HOSTILE}}), r"\\x1b\[2J"),
        "refused": (answer({"error": {"message": HOSTILE}}, "400 Bad"), r"HTTP 400 Bad: \\x1b\[2J"),
        "moved": (answer({}, "302 Found", "Location: http://elsewhere/v1\r\n"), "moved to http://elsewhere/v1"),
        "no stream": (answer({"choices": []}), "answers with application/json where a stream was asked"),
        "no JSON": (stream(chunk(" a")).replace(b'{"choices"', b'["choices"', 1), "no JSON"),
        "hostile types": (stream({"choices": [{"text": ["a"]}]}), "text: must be a text"),
        "hostile counts": (stream(*good, end(), usage(n, -2)), "usage.completion_tokens: must be a count"),
        "refused without end": (slowly([NESTED], 0), r"HTTP 500 Bad: \[\[\[\["),
        "nothing": (slowly([], 0), "ended the connection without an answer"),
    }


@pytest.mark.parametrize("case", wrong_answers(0))
def test_a_wrong_answer_is_an_error_and_no_figure(case: str) -> None:
    script, words = wrong_answers(len(request().prompt_ids))[case]
    with scripted(script) as server:
        asked = request(4, ignore_end_tokens=True)
        with pytest.raises(EngineError, match=words) as caught:
            client(server.url, flavour="openai").run(asked, unheard)
        assert len(server.asked) == 1, "what began is not asked again"
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_where_counts_disagree_every_flavour_that_tells_ids_is_named() -> None:
    """`joulebench serve`, asked without its flavour, was told to be vLLM or SGLang."""
    good, n = (chunk(" the"), chunk(" rain")), len(request().prompt_ids)
    with scripted(stream(*good, end(), usage(n, 3))) as server, pytest.raises(EngineError) as caught:
        client(server.url, flavour="openai").run(request(4, ignore_end_tokens=True), unheard)
    words = str(caught.value).partition("a flavour that tells token ids settles it: ")[2]
    table = (Path(__file__).parents[1] / "docs" / "engines" / "openai.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    column = rows[0].index("ids of new tokens")
    telling = {row[2].strip("`") for row in rows[2:] if len(row) == len(rows[0]) and row[column].startswith("yes")}
    assert {*words.split(", ")} == telling


@pytest.mark.parametrize("reason", ["length", "abort", "content_filter", "error", "insufficient_system_resource"])
def test_an_answer_that_the_server_cuts_off_is_no_shorter_answer(reason: str) -> None:
    """A limit or a context of its own, such as max_new_tokens of generation_config.json."""
    good, n = (chunk(" the"), chunk(" rain")), len(request().prompt_ids)
    with scripted(stream(*good, end(reason), usage(n, 2)), stream(*good, end("stop"), usage(n, 2))) as server:
        through = client(server.url, flavour="openai")
        with pytest.raises(
            EngineError, match=rf"2 new tokens came, and the answer was cut off \('{reason}'\).* have 4"
        ):
            through.run(request(4), unheard)
        assert through.run(request(4), unheard).text == " the rain"


@pytest.mark.parametrize("again", [piece(b": alive\n"), piece(b"\n"), event({"choices": []}), event(chunk(""))])
@pytest.mark.parametrize("first", [b"", event(chunk(" the"))])
def test_a_server_that_only_keeps_its_stream_alive_is_not_waited_for_for_ever(first: bytes, again: bytes) -> None:
    with (
        scripted(endless(first, again)) as server,
        pytest.raises(EngineError, match=rf"nothing of the answer came in 0.2 s; raise timeout_s|{OR_LATE}"),
    ):
        client(server.url, flavour="openai", timeout_s=0.2).run(request(4), unheard)


@pytest.mark.parametrize("first", [b"HTTP/1.1 200 OK\r\nX-Queue: ", STREAM_HEAD + b"ffffff\r\ndata: "])
def test_a_line_that_comes_byte_by_byte_has_to_end_in_time(first: bytes) -> None:
    """Each byte was waited for anew, and the run with it."""

    def drips(connection: socket.socket) -> None:
        connection.sendall(first)
        ends_s = time.monotonic() + 2
        with suppress(OSError):
            while time.monotonic() < ends_s:
                connection.sendall(b" ")
                time.sleep(0.001)

    with scripted(drips) as server, pytest.raises(EngineError, match=r"no (chunk|answer) in 0\.2 s; raise timeout_s"):
        client(server.url, flavour="openai", timeout_s=0.2).run(request(4), unheard)


def test_an_answer_that_comes_byte_by_byte_has_to_end_in_time() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"

    def drips(connection: socket.socket) -> None:
        connection.sendall(head)
        with suppress(OSError):
            while True:
                connection.sendall(piece(b" "))
                time.sleep(0.001)

    cut = answer({"choices": []})[:-4]
    asked = request(0, kind="loglikelihood", continuation_ids=[5])
    with scripted(drips, slowly([cut], 0)) as server:
        with pytest.raises(EngineError, match=rf"the answer has not ended in 0.2 s; raise timeout_s|{OR_LATE}"):
            client(server.url, timeout_s=0.2).run(asked, unheard)
        with pytest.raises(EngineError, match=r"the answer broke off \(4 bytes are missing\)"):
            client(server.url).run(asked, unheard)


def test_a_slow_server_is_waited_for_so_long_and_no_longer() -> None:
    n = len(request().prompt_ids)
    whole = stream(chunk(" the"), end(), usage(n, 1, 0))
    with scripted(slowly([whole[:-90], whole[-90:]], 0.4), unfinished(whole[:-90])) as server:
        assert client(server.url).run(request(1), unheard).n_generated == 1
        with pytest.raises(EngineError, match=r"no (chunk|answer) in 0.1 s; raise timeout_s"):
            client(server.url, timeout_s=0.1).run(request(1), unheard)


@pytest.mark.parametrize(
    "behind",
    [
        lambda whole: unfinished(whole),
        lambda whole: endless(whole.removeprefix(STREAM_HEAD), piece(b": alive\n")),
        lambda whole: slowly([whole], 0),
        lambda whole: unfinished(whole.replace(CHUNKED, b"Connection: close")),
        lambda whole: slowly([whole.replace(CHUNKED, b"Connection: close")], 0),
    ],
    ids=["says no more", "keeps alive", "cuts the connection", "says no more, and would close", "closes"],
)
def test_an_answer_that_is_said_to_be_done_is_whole_also_where_its_body_does_not_end(
    behind: Callable[[bytes], Script],
) -> None:
    """Of a proxy or a server that ends its body late or never: it was waited for until timeout_s, and then refused."""
    n = len(request().prompt_ids)
    whole = stream(chunk(" the"), end(), usage(n, 1, 0))
    with scripted(behind(whole.removesuffix(b"0\r\n\r\n")), whole) as server:
        through = client(server.url, timeout_s=30)
        began_s = time.monotonic()
        assert [through.run(request(1), unheard).text for _ in range(2)] == [" the", " the"]
        assert time.monotonic() - began_s < 5
        assert len(server.asked) == 2


def test_a_request_is_sent_again_only_before_anything_came() -> None:
    """On a connection that the server had closed meanwhile, and to one that is busy."""
    n = len(request().prompt_ids)
    whole = stream(chunk(" the"), end(), usage(n, 1, 0))
    busy = answer({"error": {"message": "full"}}, "503 Service Unavailable")
    with scripted(whole, slowly([], 0), whole, busy, whole) as server:
        through = client(server.url)
        assert [through.run(request(1), unheard).n_generated for _ in range(3)] == [1, 1, 1]
        assert any("of their answer had come: " in note for note in through.take_remarks())
        assert len(server.asked) == 5


def test_a_server_that_had_no_room_at_first_marks_the_trial_once() -> None:
    """The second of waiting is in the request's time; a connection that had ended costs none, and marks nothing."""
    whole = stream(chunk(" the"), end(), usage(len(request().prompt_ids), 1, 0))
    busy = answer({"error": {"message": "full"}}, "503 Service Unavailable")
    with scripted(whole, slowly([], 0), whole, busy, whole, whole) as server:
        through = client(server.url)
        for marks, least_s in ((), 0.0), ((), 0.0), ((SERVER_BUSY,), WAIT_S), ((), 0.0):
            done = through.run(request(1), unheard)
            assert set(through.take_marks()) - {CACHE_NOT_KNOWN} == set(marks)
            assert (done.ttft_s or 0.0) >= least_s


@pytest.mark.parametrize(("below", "is_told"), [("", True), ("/v1", False)])
def test_an_address_without_v1_that_is_not_found_says_so(below: str, is_told: bool) -> None:
    with scripted(answer({"error": {"message": "none"}}, "404 Not Found")) as server:
        link = ServerLink(server.url.removesuffix("/v1") + below, None, 5.0, time.perf_counter)
        with pytest.raises(EngineError, match="HTTP 404 Not Found: none") as caught:
            link.get("/models")
        assert ("up to /v1" in str(caught.value)) == is_told


def test_the_key_is_sent_and_told_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVERS_KEY", "sk-verysecret")
    refusal = answer({"error": {"message": "bad key sk-verysecret"}}, "401 Unauthorized")
    with scripted(refusal) as server:
        through = client(server.url, key_variable="SERVERS_KEY")
        with pytest.raises(EngineError, match=r"HTTP 401 Unauthorized: bad key \*\*\*"):
            through.run(request(), unheard)
        assert "Authorization: Bearer sk-verysecret" in server.heads[0]
    monkeypatch.delenv("SERVERS_KEY")
    with pytest.raises(EngineError, match="key_variable SERVERS_KEY: the environment has none"):
        client("http://127.0.0.1:1/v1", key_variable="SERVERS_KEY")


def tells_version(connection: socket.socket) -> None:
    """And ends the connection."""
    connection.sendall(answer({"version": "1"}))


def test_a_server_that_has_gone_is_no_other_server() -> None:
    """It was told as one that tells no version, which is no fault of a day: a resume measured none of its trials."""
    with scripted(tells_version) as server:
        through = client(server.url)
        through.reset()
    with pytest.raises(NoServerError, match="no server answers"):
        through.reset()
    through.close()


def test_a_server_that_was_away_at_first_is_known_by_what_it_says_then() -> None:
    """All later trials were refused: it was said to be another one than at the first trial."""
    with scripted() as server:
        port = server.port
    through = client(server.url)
    with pytest.raises(NoServerError):
        through.reset()
    with scripted(tells_version, port=port):
        through.reset()
    through.close()
