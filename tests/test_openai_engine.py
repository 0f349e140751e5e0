"""A server as an engine: the same answers as the engine behind it, and no figure from one that says something wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from devices.clock import MonotonicClock
from devices.cpu_seconds import counted_as_ours, host_cpu_seconds, own_cpu_seconds
from devices.host import Host
from engines.base import unheard
from engines.errors import EngineError, NotSupportedError
from engines.external.openai import OpenAIEngine, ServerOptions
from engines.external.openai_host import Whereabouts, whereabouts
from engines.external.openai_link import ServerLink
from engines.reference import ReferenceEngine
from engines.serving.http import LocalServer
from harness.device_building import seen_device
from harness.external.openai import OpenAISpec
from harness.plan import PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from results.cells import CACHE_NOT_KNOWN
from results.records import Request
from results.store import Store
from tests.command import joulebench
from tests.plans import DROPLESS, raw_plan, write_plan
from tests.protocol_server import checkpoint, engine, served
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
    usage,
)

PROMPT = "The miller came home. The key is"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def own() -> ReferenceEngine:
    return engine()


def client(url: str, **options: Any) -> OpenAIEngine:
    asked = ServerOptions(url, **{"flavour": "joulebench", "model": "m", **options})
    return OpenAIEngine(asked, checkpoint().tokenizer, checkpoint().config.max_length, time.perf_counter)


def request(n: int = 8, prompt: str = PROMPT, **changes: Any) -> Request:
    prompt_ids = checkpoint().tokenizer.encode(prompt)
    fields = {"request_id": "r", "sample_id": "s", "kind": "generate", "prompt_ids": prompt_ids, "max_new_tokens": n}
    return Request.model_validate(fields | changes)


@pytest.mark.parametrize("flavour", ["joulebench", "vllm", "sglang", "openai"])
def test_tokens_are_the_engines_own_and_stamps_rise(server: LocalServer, own: ReferenceEngine, flavour: str) -> None:
    """The plain protocol tells no ids: there the text is encoded again, and the counts must agree."""
    asked = request(24, ignore_end_tokens=flavour != "openai")
    expected = own.run(asked, unheard)
    through = client(server.url, flavour=flavour, model=None)
    heard: list[tuple[str, float]] = []
    found = through.run(asked, lambda event, at_s: heard.append((event, at_s)))
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert list(found.token_times_s) == sorted(set(found.token_times_s))
    assert found.start_s < found.prefill_end_s == found.token_times_s[0] < found.end_s
    edges = [("request start", found.start_s), ("prefill end", found.prefill_end_s), ("request end", found.end_s)]
    assert heard == edges
    assert any("encoded again" in note for note in through.take_remarks()) == (flavour == "openai")
    assert through.take_marks() == ()


def test_stop_strings_end_an_answer_as_the_engine_does(server: LocalServer, own: ReferenceEngine) -> None:
    free = own.run(request(40), unheard)
    asked = request(40, stop=[free.text[12:15]])
    expected = own.run(asked, unheard)
    assert 0 < len(expected.text) < len(free.text)
    found = client(server.url, model=None).run(asked, unheard)
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)


def test_log_likelihoods_are_the_engines_own(server: LocalServer, own: ReferenceEngine) -> None:
    through = client(server.url, model=None)
    for text in (" in the old mill.", " x"):
        continuation = checkpoint().tokenizer.encode(text)
        asked = request(0, kind="loglikelihood", continuation_ids=continuation)
        expected, found = own.run(asked, unheard), through.run(asked, unheard)
        assert found.loglikelihood == pytest.approx(expected.loglikelihood, abs=1e-4)
        assert (found.is_greedy, found.n_prompt_tokens) == (expected.is_greedy, expected.n_prompt_tokens)
    likeliest = own.run(request(1), unheard).token_ids
    assert through.run(request(0, kind="loglikelihood", continuation_ids=likeliest), unheard).is_greedy is True


def test_what_a_flavour_cannot_do_is_not_supported(server: LocalServer) -> None:
    for flavour in ("llama-server", "ollama", "openai"):
        asked = request(0, kind="loglikelihood", continuation_ids=[5])
        with pytest.raises(NotSupportedError, match="tells no log-likelihoods"):
            client(server.url, flavour=flavour, model=None).run(asked, unheard)


def test_a_warm_cache_is_no_prefill() -> None:
    asked = request(1)
    n = len(asked.prompt_ids)
    with served(reuse_prefix=True) as holding:
        declining = client(holding.url, model=None)
        assert [declining.run(asked, unheard).n_cached_tokens for _ in range(2)] == [0, 0]
        taking = client(holding.url, model=None, flavour="openai")
        # The last token of a prompt is always computed.
        assert taking.run(asked, unheard).n_computed_tokens == 1
        assert any(f"held {n - 1} prompt tokens" in note for note in taking.take_remarks())
    one = stream(chunk(" the"), end(), usage(n, 1))
    with scripted(one, one) as silent:
        unknown = client(silent.url, flavour="openai")
        unknown.run(asked, unheard)
        assert unknown.take_marks() == (CACHE_NOT_KNOWN,)
        off = client(silent.url, flavour="openai", cache_is_off=True)
        off.run(asked, unheard)
        assert off.take_marks() == ()
    ids = stream(chunk(" the", token_ids=checkpoint().tokenizer.encode(" the")), end(), usage(n, 1))
    with scripted(ids) as silent:
        asking = client(silent.url, flavour="vllm")
        asking.run(asked, unheard)
        # What was asked is not what was done.
        assert any("does not say whether it did" in note for note in asking.take_remarks())


def test_several_tokens_of_a_chunk_share_its_stamp() -> None:
    """Four tokens in two chunks behind one that names the role only: by ids, and by the text alone."""
    tokenizer = checkpoint().tokenizer
    ids = tokenizer.encode(" the rain had stopped")
    assert len(ids) == 4
    halves = [tokenizer.decode(ids[:2]), tokenizer.decode(ids)[len(tokenizer.decode(ids[:2])) :]]
    n = len(request().prompt_ids)
    for flavour, more in (("vllm", [{"token_ids": ids[:2]}, {"token_ids": ids[2:]}]), ("openai", [{}, {}])):
        chunks = [chunk(""), *(chunk(text, **with_ids) for text, with_ids in zip(halves, more, strict=True)), end()]
        whole = stream(*chunks, usage(n, 4, 0))
        cut = whole.rindex(b"data: ", 0, whole.index(halves[1].encode()))
        with scripted(slowly([whole[:cut], whole[cut:]], 0.05)) as server:
            through = client(server.url, flavour=flavour)
            found = through.run(request(4), unheard)
        times = found.token_times_s
        assert found.token_ids == tuple(ids)
        assert times[0] == times[1] < times[2] == times[3]
        assert times[2] - times[0] > 0.03
        assert found.prefill_end_s == times[0]
        assert any("4 of 4 tokens came in a chunk with others" in note for note in through.take_remarks())


def test_a_running_count_places_tokens_of_which_no_ids_were_told() -> None:
    """Two tokens in the first chunk, two in the second."""
    n = len(request().prompt_ids)
    told = [
        chunk(text) | {"usage": usage(n, count)["usage"]} for text, count in ((" the rain", 2), (" had stopped", 4))
    ]
    with scripted(stream(*told, end(), usage(n, 4, 0))) as server:
        times = client(server.url, flavour="openai").run(request(4), unheard).token_times_s
    assert times[0] == times[1] < times[2] == times[3]


HOSTILE = "\x1b[2J" + "long words " * 200


INTERNAL = b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n"
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


@pytest.mark.parametrize("again", [piece(b": alive\n"), piece(b"\n"), event({"choices": []}), event(chunk(""))])
@pytest.mark.parametrize("first", [b"", event(chunk(" the"))])
def test_a_server_that_only_keeps_its_stream_alive_is_not_waited_for_for_ever(first: bytes, again: bytes) -> None:
    with (
        scripted(endless(first, again)) as server,
        pytest.raises(EngineError, match=r"nothing of the answer came in 0.2 s; raise timeout_s"),
    ):
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
        with pytest.raises(EngineError, match=r"the answer has not ended in 0.2 s; raise timeout_s"):
            client(server.url, timeout_s=0.2).run(asked, unheard)
        with pytest.raises(EngineError, match=r"the answer broke off \(4 bytes are missing\)"):
            client(server.url).run(asked, unheard)


def test_a_slow_server_is_waited_for_so_long_and_no_longer() -> None:
    n = len(request().prompt_ids)
    whole = stream(chunk(" the"), end(), usage(n, 1, 0))
    with scripted(slowly([whole[:-90], whole[-90:]], 0.4), slowly([whole[:-90], whole[-90:]], 0.4)) as server:
        assert client(server.url).run(request(1), unheard).n_generated == 1
        with pytest.raises(EngineError, match=r"no chunk in 0.1 s; raise timeout_s"):
            client(server.url, timeout_s=0.1).run(request(1), unheard)


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


def test_an_exact_length_and_no_cache_are_asked_in_each_servers_words() -> None:
    n = len(request().prompt_ids)
    whole = stream(*[chunk(" the", token_ids=[checkpoint().tokenizer.encode(" the")[0]])] * 2, end(), usage(n, 2, 0))
    asked = request(2, ignore_end_tokens=True)
    words: dict[str, dict[str, Any]] = {
        "vllm": {"ignore_eos": True, "min_tokens": 2, "return_token_ids": True},
        "sglang": {"ignore_eos": True, "min_tokens": 2, "return_token_ids": True},
        "llama-server": {"ignore_eos": True, "cache_prompt": False, "logprobs": 1},
    }
    for flavour, expected in words.items():
        with scripted(whole, whole) as server:
            through = client(server.url, flavour=flavour)
            through.run(asked, unheard)
            through.run(asked, unheard)
            first, second = server.asked
        assert expected.items() <= first.items()
        assert (first["prompt"], first["max_tokens"], first["temperature"]) == (list(asked.prompt_ids), 2, 0)
        salts = {first.get("cache_salt"), second.get("cache_salt")}
        assert salts == {None} if flavour == "llama-server" else len(salts) == 2


def test_where_a_server_computes_decides_whose_joules_are_read(server: LocalServer) -> None:
    assert os.getpid() in whereabouts("127.0.0.1", server.port).process_ids
    remote = whereabouts("192.0.2.7", 8000)
    assert remote.process_ids == ()
    assert remote.elsewhere is not None
    assert "another machine (192.0.2.7)" in remote.elsewhere
    nobody = whereabouts("127.0.0.1", 1)
    assert nobody.note is not None
    assert nobody.elsewhere is None
    through, here = client(server.url, model=None), Host("host", [], {}, MonotonicClock())
    assert seen_device(here, through, MonotonicClock()) is here
    through._where = Whereabouts(elsewhere="far away")
    assert seen_device(here, through, MonotonicClock()).meters == ()
    assert "far away" in through.take_remarks()


def test_cpu_time_of_a_server_is_ours_and_not_foreign() -> None:
    """Of a process that we did not start: its parent has ended."""
    burn = "import time\nwhile time.process_time() < 20: pass"
    # It keeps no pipe of ours (-3 is DEVNULL), for whose end we would wait.
    start = (
        f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {burn!r}], stdout=-3, stderr=-3).pid)"
    )
    pid = int(subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True).stdout)
    try:
        with counted_as_ours([pid]):
            before, own_before_s = host_cpu_seconds().ours_s, own_cpu_seconds()
            uncounted_s = time.process_time()
            deadline_s = time.monotonic() + 20
            while own_cpu_seconds() - own_before_s < 0.3 and time.monotonic() < deadline_s:
                time.sleep(0.05)
            counted_s, uncounted_s = own_cpu_seconds() - own_before_s, time.process_time() - uncounted_s
            assert counted_s >= 0.3 > uncounted_s
            assert host_cpu_seconds().ours_s - before == pytest.approx(counted_s, abs=0.1)
        assert own_cpu_seconds() == pytest.approx(time.process_time(), abs=0.05)
    finally:
        os.kill(pid, 9)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"url": "127.0.0.1:8000"}, "engine[0].url: "),
        ({"url": "http://me:secret@127.0.0.1/v1"}, "engine[0].url: holds a name or a password"),
        ({"threads": 2}, "engine[0].threads: openai cannot be told its threads"),
        ({"flavour": "vlm"}, "engine[0].flavour: "),
        ({"model_file": "m.gguf"}, "engine[0].model_file: a server has its model already"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_told(changes: dict[str, Any], problem: str) -> None:
    raw = {"name": "s", "runs": "openai", "url": "http://127.0.0.1:8000/v1"} | changes
    found = draft_plan(raw_plan(engine=[raw])).problems
    assert [p for p in found if p.startswith(problem)], found
    assert not [p for p in found if "secret" in p]


@pytest.mark.parametrize(
    "raw",
    [
        {"runs": "openai", "url": "ftp://127.0.0.1/v1"},
        {"runs": "llama-bench", "model_file": __file__, "threads": 1},
    ],
)
def test_where_an_engine_is_not_is_told_once(raw: dict[str, Any]) -> None:
    fixed = {"name": "fixed_lengths", "prompt_tokens": 8, "new_tokens": 2, "limit": 1}
    draft = draft_plan(raw_plan(engine=[{"name": "s"} | raw], workload=[fixed]))
    with pytest.raises(PlanError) as caught:
        preflight(draft, RunParts(draft.plan.protocol))
    (problem,) = [line for line in caught.value.problems if "model_file" not in line]
    assert problem.startswith(("engine[0].url: ", "engine[0].program: "))


def test_the_server_that_answers_belongs_to_a_cell(server: LocalServer) -> None:
    spec = OpenAISpec.model_validate({"name": "s", "runs": "openai", "url": server.url, "flavour": "joulebench"})
    server.version = "joulebench 1: dropless"
    assert spec.find().version == f"joulebench joulebench 1: dropless; model {server.model}"
    with pytest.raises(EngineError, match="has no model 'another'; it has bundled"):
        spec.model_copy(update={"model": "another"}).find()
    with pytest.raises(EngineError, match="no server answers"):
        spec.model_copy(update={"url": "http://127.0.0.1:1/v1"}).find()


def test_a_server_that_was_exchanged_between_trials_is_refused(server: LocalServer) -> None:
    before = server.version
    through = client(server.url)
    through.reset()
    server.version = "joulebench 2: dropping"
    try:
        with pytest.raises(EngineError, match="and is joulebench 2: dropping; trials of two servers are in no mean"):
            through.reset()
    finally:
        server.version = before
        through.close()
    through.reset()


def test_a_run_through_the_protocol_answers_as_the_engine_does(server: LocalServer, tmp_path: Path) -> None:
    """Accuracy, tokens and samples of both arms are equal; the joules of the server's process are counted."""
    arm = {"name": "server", "runs": "openai", "url": server.url, "flavour": "joulebench"}
    workloads = [
        {"name": "hellaswag", "limit": 4, "data": "generated"},
        {"name": "fixed_lengths", "limit": 2, "prompt_tokens": 40, "new_tokens": 6},
    ]
    plan = write_plan(tmp_path / "plan.toml", raw_plan(engine=[DROPLESS, arm], workload=workloads))
    finished = joulebench("run", str(plan), "--out", str(tmp_path / "run"))
    assert finished.code == 0, finished.stderr
    with Store.view(tmp_path / "run") as store:
        run = store.data()
    for workload in ("hellaswag", "fixed_lengths"):
        ids = {cell.engine: cell.cell_id for cell in run.cells if cell.workload == workload}
        ours, theirs = (next(t for t in run.trials if t.cell_id == ids[name]) for name in ("dropless", "server"))
        assert [c.token_ids for c in theirs.completions] == [c.token_ids for c in ours.completions]
        assert [(s.sample_id, s.value) for s in theirs.scores] == [(s.sample_id, s.value) for s in ours.scores]
        assert theirs.requests_sha256 == ours.requests_sha256
        assert theirs.marks == ()
        joules = next(r for r in theirs.energy if r.phase == "all" and r.component == "total")
        assert joules.method == "modelled"
        assert theirs.counters is None
