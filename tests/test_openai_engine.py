"""A server as an engine: the same answers as the engine behind it, in each server's words, and whose joules are read.

Servers that answer wrongly or not at all: `tests.test_openai_wrong_servers`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devices.clock import MonotonicClock
from devices.cpu_seconds import counted_as_ours, host_cpu_seconds, own_cpu_seconds
from devices.host import Host
from engines.base import unheard
from engines.errors import EngineError, NotSupportedError
from engines.external.openai import ONE_CLIENT
from engines.external.openai_flavours import FlavourName
from engines.external.openai_host import Whereabouts, whereabouts
from engines.reference import ReferenceEngine
from engines.serving.http import LocalServer
from harness.device_building import seen_device
from harness.external.openai import OpenAISpec
from harness.plan import PlanError, draft_plan
from harness.preflight import preflight
from harness.run_parts import RunParts
from results.cells import CACHE_NOT_KNOWN
from results.records import Sampling
from results.store import Store
from tests.command import joulebench
from tests.eventually import eventually
from tests.openai_client import client, request
from tests.plans import DROPLESS, raw_plan, write_plan
from tests.protocol_server import checkpoint, engine, served
from tests.scripted_server import chunk, end, event, scripted, slowly, stream, usage

WORDS = (" the", " rain")


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def own() -> ReferenceEngine:
    return engine()


@pytest.mark.parametrize("flavour", ["joulebench", "vllm", "sglang", "openai"])
def test_tokens_are_the_engines_own_and_no_stamp_goes_back(
    server: LocalServer, own: ReferenceEngine, flavour: str
) -> None:
    """The plain protocol tells no ids: there the text is encoded again, and the counts must agree."""
    asked = request(24, ignore_end_tokens=flavour != "openai")
    expected = own.run(asked, unheard)
    through = client(server.url, flavour=flavour, model=None)
    heard: list[tuple[str, float]] = []
    found = through.run(asked, lambda event, at_s: heard.append((event, at_s)))
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert list(found.token_times_s) == sorted(found.token_times_s)
    assert found.start_s < found.prefill_end_s == found.token_times_s[0] < found.end_s
    edges = [("request start", found.start_s), ("prefill end", found.prefill_end_s), ("request end", found.end_s)]
    assert heard == edges
    aside = "encoded again, and its counts agree; the window's CPU time and joules hold that"
    assert any(aside in note for note in through.take_remarks()) == (flavour == "openai")
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
        with scripted(slowly([whole[:cut], whole[cut:]], 0.4)) as server:
            through = client(server.url, flavour=flavour)
            found = through.run(request(4), unheard)
        times = found.token_times_s
        assert found.token_ids == tuple(ids)
        assert times[0] == times[1] < times[2] == times[3]
        assert times[2] - times[0] > 0.2
        assert found.prefill_end_s == times[0]
        # Of the four one came with the first, and two behind it.
        assert found.tpot_s == pytest.approx((times[2] - times[0]) / 2)
        remarks = through.take_remarks()
        assert any("4 of 4 tokens came together with others" in note for note in remarks)
        assert any("1 of 4 tokens came together with the first of their answer" in note for note in remarks)


def test_a_running_count_places_tokens_of_which_no_ids_were_told() -> None:
    """Two tokens in the first chunk, two in the second."""
    n = len(request().prompt_ids)
    told = [
        chunk(text) | {"usage": usage(n, count)["usage"]} for text, count in ((" the rain", 2), (" had stopped", 4))
    ]
    whole = stream(*told, end(), usage(n, 4, 0))
    cut = whole.index(event(told[1]))
    with scripted(slowly([whole[:cut], whole[cut:]], 0.4)) as server:
        times = client(server.url, flavour="openai").run(request(4), unheard).token_times_s
    assert times[0] == times[1] < times[2] == times[3]


@pytest.mark.parametrize("flavour", ["vllm", "openai"])
def test_chunks_that_a_proxy_or_the_kernel_joined_share_a_stamp(flavour: str) -> None:
    """Four chunks of a token each, sent two and two. Read one by one, they were microseconds apart."""
    n, tokenizer = len(request().prompt_ids), checkpoint().tokenizer
    ids = tokenizer.encode(" the rain had stopped")
    words = [tokenizer.decode([i]) for i in ids]
    told = [
        chunk(word, **({"token_ids": [i]} if flavour == "vllm" else {})) for word, i in zip(words, ids, strict=True)
    ]
    whole = stream(*told, end(), usage(n, 4, 0))
    third = whole.index(event(told[2]))
    with scripted(slowly([whole[:third], whole[third:]], 0.4)) as server:
        through = client(server.url, flavour=flavour)
        found = through.run(request(4), unheard)
    times = found.token_times_s
    assert times[0] == times[1] < times[2] == times[3]
    assert found.tpot_s == pytest.approx((times[2] - times[0]) / 2)
    remarks = through.take_remarks()
    assert any("1 of 4 tokens came together with the first of their answer" in note for note in remarks)


def test_an_answer_that_a_proxy_held_until_its_end_has_no_time_per_token() -> None:
    """All chunks in one piece: a time per token of microseconds stood there."""
    n, tokenizer = len(request().prompt_ids), checkpoint().tokenizer
    ids = tokenizer.encode(" the rain had stopped")
    told = [chunk(tokenizer.decode([i]), token_ids=[i]) for i in ids]
    with scripted(stream(*told, end(), usage(n, 4, 0))) as server:
        found = client(server.url, flavour="vllm").run(request(4), unheard)
    assert len(set(found.token_times_s)) == 1
    assert found.tpot_s is None


@pytest.mark.parametrize("flavour", ["vllm", "openai"])
def test_an_end_token_that_is_counted_and_not_shown_came_with_the_end(flavour: str) -> None:
    """Three tokens: two and the end token, 0.4 s apart. So TPOT is half of both gaps."""
    n, tokenizer = len(request().prompt_ids), checkpoint().tokenizer
    ids = tokenizer.encode(" the rain")
    told = [
        chunk(text, token_ids=[i]) if flavour == "vllm" else chunk(text) for text, i in zip(WORDS, ids, strict=True)
    ]
    whole = stream(*told, end("stop"), usage(n, 3, 0))
    second, third = whole.index(event(told[1])), whole.index(event(end("stop")))
    parts = [whole[:second], whole[second:third], whole[third:]]
    with scripted(slowly(parts, 0.4)) as server:
        found = client(server.url, flavour=flavour).run(request(8), unheard)
    assert found.token_ids == (*ids, tokenizer.eos_token_ids[0])
    first_s, second_s, third_s = found.token_times_s
    assert first_s < second_s < third_s == found.end_s
    assert found.tpot_s == pytest.approx((found.end_s - found.prefill_end_s) / 2)


def test_a_prompt_that_a_server_does_not_count_is_told() -> None:
    """Its ids prove what it said, and nothing proves what it read."""
    whole = stream(chunk(" the", token_ids=checkpoint().tokenizer.encode(" the")), end())
    with scripted(whole, whole) as server:
        through = client(server.url, flavour="vllm")
        for _ in range(2):
            through.run(request(1), unheard)
    assert any("did not count the prompt tokens of 2 requests" in note for note in through.take_remarks())
    assert not any("did not count" in note for note in through.take_remarks())


def test_what_one_chunk_counts_is_not_taken_back_by_a_later_one() -> None:
    """llama-server's `timings` may stand in another chunk than its `usage`."""
    n = len(request().prompt_ids)
    held = {"choices": [], "timings": {"cache_n": 3}}
    for counts in ([usage(n, 1), held], [held, usage(n, 1)]):
        with scripted(stream(chunk(" the"), end(), *counts)) as server:
            through = client(server.url, flavour="openai")
            assert through.run(request(1), unheard).n_cached_tokens == 3
            assert through.take_marks() == ()


def test_a_process_that_a_server_starts_with_its_first_request_is_the_servers_too(tmp_path: Path) -> None:
    """As Ollama does: what listens computes nothing, and its CPU time alone would be next to none."""
    code = (
        "import socket, subprocess, sys, time\n"
        "listening = socket.create_server(('127.0.0.1', 0))\n"
        "print(listening.getsockname()[1], flush=True)\n"
        "sys.stdin.readline()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'], stdin=sys.stdin)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        through = client(f"http://127.0.0.1:{int(process.stdout.readline())}/v1", flavour="openai")
        assert through.process_ids() == (os.getpid(), process.pid)
        process.stdin.write("go\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        through.reset()
        assert through.process_ids() == (os.getpid(), process.pid, child)
        process.stdin.close()


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
        assert first.get("repetition_penalty", first.get("repeat_penalty")) == 1, "else that of generation_config.json"
        assert not {"top_k", "top_p", "min_p"} & first.keys()
        salts = {first.get("cache_salt"), second.get("cache_salt")}
        assert salts == {None} if flavour == "llama-server" else len(salts) == 2


@pytest.mark.parametrize(
    ("flavour", "all_tokens"), [("vllm", -1), ("sglang", -1), ("llama-server", 0), ("openai", None)]
)
def test_draws_are_held_to_what_is_asked(flavour: FlavourName, all_tokens: int | None) -> None:
    """What is left out they take from generation_config.json (vLLM, SGLang) or from themselves (llama-server: 40)."""
    drawn = Sampling(temperature=0.5, top_p=0.9)
    asked = [request(1, sampling=drawn)]
    if all_tokens is not None:
        asked.append(request(1, sampling=drawn.model_copy(update={"top_k": 7})))
    n = len(request().prompt_ids)
    whole = stream(chunk(" the", token_ids=[checkpoint().tokenizer.encode(" the")[0]]), end(), usage(n, 1, 0))
    with scripted(*[whole] * len(asked)) as server:
        through = client(server.url, flavour=flavour)
        for one in asked:
            through.run(one, unheard)
        told = server.asked
    assert [(one["temperature"], one["top_p"]) for one in told] == [(0.5, 0.9)] * len(asked)
    assert [one.get("top_k") for one in told] == ([None] if all_tokens is None else [all_tokens, 7])
    assert [one.get("min_p") for one in told] == ([None] if all_tokens is None else [0, 0])


def test_requests_that_arrive_are_said_to_wait_for_a_client_that_asks_one_at_a_time(server: LocalServer) -> None:
    """Of a server that batches, its own queue would be shorter."""
    through = client(server.url, model=None)
    through.run(request(1), unheard)
    assert ONE_CLIENT not in through.take_remarks()
    through.run(request(1, arrival_s=0.5), unheard)
    assert ONE_CLIENT in through.take_remarks()
    assert ONE_CLIENT not in through.take_remarks()


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
    burn = "import time\nwhile time.process_time() < 600: pass"
    # It keeps no pipe of ours (-3 is DEVNULL), for whose end we would wait.
    start = (
        f"import subprocess, sys\nprint(subprocess.Popen([sys.executable, '-c', {burn!r}], stdout=-3, stderr=-3).pid)"
    )

    def others_s() -> float:
        """Of programs that we or tests before this one have run, and of that process."""
        return own_cpu_seconds() - time.process_time()

    earlier_s = others_s()
    pid = int(subprocess.run([sys.executable, "-c", start], capture_output=True, text=True, check=True).stdout)
    try:
        with counted_as_ours([pid]):
            outer_s, before_s, inner_s = own_cpu_seconds(), host_cpu_seconds().ours_s, own_cpu_seconds()
            begun_s = others_s()
            assert eventually(lambda: others_s() - begun_s >= 0.3)
            inner_s = own_cpu_seconds() - inner_s
            ours_s = host_cpu_seconds().ours_s - before_s
            outer_s = own_cpu_seconds() - outer_s
            # It goes on between two looks. Ticks of 10 ms.
            assert inner_s - 0.05 <= ours_s <= outer_s + 0.05
        assert others_s() == pytest.approx(earlier_s, abs=0.05)
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
