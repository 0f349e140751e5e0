"""`joulebench serve`: the engine's own answers over real sockets, for programs of this machine only."""

from __future__ import annotations

import http.client
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from engines.base import unheard
from engines.errors import EngineError
from engines.model.checkpoints import BUNDLED_FOLDER, BUNDLED_PREFIX, load_checkpoint
from engines.model.quantised import FORMS, Arithmetic, Quantisation
from engines.reference import ReferenceEngine
from engines.road import build
from engines.serving.http import LocalServer
from engines.serving.pieces import TextPieces
from harness import weights_option
from harness.commands import app
from harness.inputs import ranges
from harness.serve_command import served_digest, what_computes
from harness.weights_option import Weights
from results.environments import Build
from results.records import Request, Sampling
from tests.fakes.random_models import copy_bundled
from tests.protocol_server import JSON, MODEL, checkpoint, dropless, engine, events, post, served
from tests.test_lm_eval_settings import begin_with_a_token

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The miller came home. The key is"


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def own() -> ReferenceEngine:
    return engine()


def request(prompt_ids: list[int], n: int, **changes: object) -> Request:
    fields = {"request_id": "r", "sample_id": "s", "kind": "generate", "prompt_ids": prompt_ids, "max_new_tokens": n}
    return Request.model_validate(fields | changes)


def test_stream_gives_the_engines_tokens_one_a_chunk(server: LocalServer, own: ReferenceEngine) -> None:
    prompt_ids = own.tokenizer.encode_prompt(PROMPT)
    expected = own.run(request(prompt_ids, 24, ignore_end_tokens=True), unheard)
    asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    *chunks, last, usage, done = events(server, COMPLETIONS, asked | {"stream_options": {"include_usage": True}})
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[token] for token in expected.token_ids]
    assert chunks[0]["choices"][0]["prompt_token_ids"] == prompt_ids
    assert "".join(chunk["choices"][0]["text"] for chunk in [*chunks, last]) == expected.text
    assert last["choices"][0]["finish_reason"] == "length"
    counts = {"prompt_tokens": len(prompt_ids), "completion_tokens": 24, "total_tokens": len(prompt_ids) + 24}
    assert usage["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert done == "[DONE]"


def test_seeded_draws_and_stop_strings_are_the_engines(server: LocalServer, own: ReferenceEngine) -> None:
    prompt_ids = own.tokenizer.encode(PROMPT)
    drawn = own.run(request(prompt_ids, 40, sampling=Sampling(temperature=0.9, top_p=0.9, seed=5)), unheard)
    stop = drawn.text[9:13]
    expected = own.run(
        request(prompt_ids, 40, sampling=Sampling(temperature=0.9, top_p=0.9, seed=5), stop=[stop]), unheard
    )
    assert expected.text != drawn.text
    asked = {"prompt": prompt_ids, "max_tokens": 40, "temperature": 0.9, "top_p": 0.9, "seed": 5, "stop": stop}
    status, whole = post(server, COMPLETIONS, asked)
    assert (status, whole["choices"][0]["text"]) == (200, expected.text)
    assert whole["choices"][0]["finish_reason"] == "stop"
    streamed = events(server, COMPLETIONS, asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed[:-1]) == expected.text


def test_echo_gives_the_log_likelihood_of_a_continuation(own: ReferenceEngine) -> None:
    prompt_ids, continuation_ids = own.tokenizer.encode(PROMPT), own.tokenizer.encode(" in the old mill.")
    likelihood = {"kind": "loglikelihood", "continuation_ids": continuation_ids}
    expected = own.run(request(prompt_ids, 0, **likelihood), unheard)
    asked = {"prompt": [*prompt_ids, *continuation_ids], "echo": True, "logprobs": 1, "temperature": 0}
    with served(prefill_chunk=4) as in_small_steps:
        for n in (0, 1):
            status, found = post(in_small_steps, COMPLETIONS, asked | {"max_tokens": n})
            assert status == 200
            told = found["choices"][0]["logprobs"]
            assert len(told["tokens"]) == len(prompt_ids) + len(continuation_ids) + n
            assert told["token_logprobs"][0] is None
            values = told["token_logprobs"][len(prompt_ids) : len(prompt_ids) + len(continuation_ids)]
            assert sum(values) == pytest.approx(expected.loglikelihood, abs=1e-4)
            assert found["usage"]["completion_tokens"] == n


@pytest.mark.parametrize(
    "prompt", ["Zürich, 東京 🦊 and a\u0301", "<|user|>Where is the 🦊?<|end|> It is", "plain words"], ids=ascii
)
def test_places_of_tokens_are_those_in_the_text_which_begins_with_the_prompt_as_sent(
    server: LocalServer, prompt: str
) -> None:
    asked = {"prompt": prompt, "max_tokens": 6, "temperature": 1.0, "seed": 3, "echo": True, "logprobs": 2}
    _, told = post(server, COMPLETIONS, asked)
    (choice,) = told["choices"]
    text, tokens, places = choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert text.startswith(prompt)
    assert len(places) == len(tokens) == told["usage"]["total_tokens"]
    whole = [(token, at) for token, at in zip(tokens, places, strict=True) if "\ufffd" not in token]
    assert len(whole) > 4
    assert [text[at : at + len(token)] for token, at in whole] == [token for token, _ in whole]
    assert sum(len(token) for token, _ in whole) <= len(text)
    assert places == sorted(places)
    _, alone = post(server, COMPLETIONS, asked | {"echo": False})
    n_new = told["usage"]["completion_tokens"]
    assert [at + len(prompt) for at in alone["choices"][0]["logprobs"]["text_offset"]] == places[-n_new:]
    *chunks, _, _ = events(server, COMPLETIONS, {key: value for key, value in asked.items() if key != "echo"})
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [at for part in streamed for at in part["text_offset"]] == alone["choices"][0]["logprobs"]["text_offset"]


def test_what_is_null_was_left_out(server: LocalServer) -> None:
    nothing = dict.fromkeys(("max_tokens", "top_p", "n", "stop", "logprobs", "echo", "stream", "presence_penalty"))
    asked = {"prompt": PROMPT, "temperature": 0}
    assert post(server, COMPLETIONS, asked | nothing)[1]["choices"] == post(server, COMPLETIONS, asked)[1]["choices"]
    assert post(server, COMPLETIONS, asked | {"prompt": None})[1]["error"]["message"] == "prompt: is missing"


def test_chat_asks_with_the_models_template(server: LocalServer, own: ReferenceEngine) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt_ids = own.tokenizer.encode_prompt(own.tokenizer.chat(messages))
    expected = own.run(request(prompt_ids, 12), unheard)
    asked = {"messages": messages, "max_tokens": 12, "temperature": 0}
    _, whole = post(server, CHAT, asked)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert whole["usage"]["prompt_tokens"] == len(prompt_ids)
    first, *chunks, done = events(server, CHAT, asked)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == expected.text
    assert done == "[DONE]"


def test_a_chat_has_the_tokens_that_transformers_gives_its_template(tmp_path: Path) -> None:
    """The tokenizer sets a begin token before a text, and the template sets none."""
    from transformers import AutoTokenizer

    folder = copy_bundled(tmp_path / "model")
    begin_with_a_token(folder)
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where is the key?"}]
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    own = ReferenceEngine(load_checkpoint(str(folder), torch.float32), dropless(), threads=1)
    assert own.tokenizer.encode_prompt("Where")[0] == 1
    asked = {"messages": messages, "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    with served(own) as server:
        _, first, *_ = events(server, CHAT, asked)
    assert first["choices"][0]["prompt_token_ids"] == expected


def test_a_held_prefix_is_told_and_can_be_declined() -> None:
    asked = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    with served(reuse_prefix=True) as holding:
        for declined, n_cached in (({}, 0), ({}, None), ({"cache_prompt": False}, 0), ({"cache_salt": "a"}, 0)):
            _, found = post(holding, COMPLETIONS, asked | declined)
            n_prompt = found["usage"]["prompt_tokens"]
            told = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            # The last token of a prompt is always computed.
            assert told == (n_prompt - 1 if n_cached is None else n_cached)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", ["no JSON"]),
        ({}, ["prompt: is missing"]),
        ({"prompt": ""}, ["prompt", "empty"]),
        ({"prompt": [1, 10**9]}, ["token id 1000000000", "2047"]),
        ({"prompt": [1, "a"]}, ["prompt: must be"]),
        ({"prompt": "a", "max_tokens": "x", "tempratur": 0}, ["max_tokens", "'x'", "tempratur"]),
        ({"prompt": "a", "max_tokens": 9000}, ["9000", "8192"]),
        ({"prompt": "a", "temperature": 1e999}, ["temperature"]),
        ({"prompt": "a", "min_tokens": 4}, ["ignore_eos"]),
        ({"prompt": "a", "model": "another\x1b[2J"}, ["another", MODEL]),
        ({"prompt": "a", "n": 2}, ["n:"]),
        ({"prompt": ["a"] * 257, "max_tokens": 1}, ["prompt: 257", "at most 256"]),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value)[:24],
)
def test_bad_requests_get_one_clear_line(server: LocalServer, body: object, words: list[str]) -> None:
    status, found = post(server, COMPLETIONS, body)
    message = found["error"]["message"]
    assert status == 400
    assert message.isprintable()
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ([], "the body: "),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is missing"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "name": "c"}]},
            "messages[1].name: this server does not know the key",
        ),
    ],
    ids=("no object", "no content", "a key inside"),
)
def test_a_bad_request_says_which_part_of_it_is_wrong(server: LocalServer, body: object, place: str) -> None:
    status, found = post(server, CHAT, body)
    assert status == 400
    assert found["error"]["message"].startswith(place)


def test_a_chats_limit_has_two_names_and_one_value(server: LocalServer) -> None:
    """OpenAI's API takes either, and refuses both. Clients that know other servers give both alike."""
    asked = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0, "ignore_eos": True}
    for limits in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        assert post(server, CHAT, asked | limits)[1]["usage"]["completion_tokens"] == 3
    status, found = post(server, CHAT, asked | {"max_tokens": 3, "max_completion_tokens": 4})
    assert status == 400
    assert found["error"]["message"].startswith("max_tokens 3 and max_completion_tokens 4 are two names of one limit")


def test_only_programs_of_this_machine_are_answered(server: LocalServer) -> None:
    asked = json.dumps({"prompt": "a", "max_tokens": 1})
    for headers, status in (
        (JSON | {"Host": f"rebound.example:{server.port}"}, 403),
        (JSON | {"Host": f"localhost:{server.port}"}, 200),
        ({"Content-Type": "text/plain"}, 415),
        (JSON | {"Content-Length": str(1 << 40)}, 413),
    ):
        assert post(server, COMPLETIONS, asked.encode(), headers)[0] == status
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("OPTIONS", COMPLETIONS, headers={"Origin": "https://page.example"})
    response = connection.getresponse()
    assert response.status == 405
    assert not [name for name, _ in response.getheaders() if name.lower().startswith("access-control")]
    with pytest.raises(ValueError, match="other machines reach it"):
        LocalServer(server.computing, MODEL, "0.0.0.0")


def raw(server: LocalServer, sent: bytes) -> bytes:
    """All that comes until the connection ends."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(sent)
        found = b""
        while part := connection.recv(1 << 12):
            found += part
    return found


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        ("PUT /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}", 405, "PUT /v1/completions: GET and POST"),
        ("TRACE / HTTP/1.1\r\n\r\n", 405, "TRACE /: GET and POST"),
        ("GET /health HTTP/9.9\r\n\r\n", 505, "HTTP"),
        ("GET /" + "a" * 70_000 + " HTTP/1.1\r\n\r\n", 414, "Too Long"),
        ("GET /health HTTP/1.1\r\nX: " + "a" * 70_000 + "\r\n\r\n", 431, "Line too long"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_http_refuses_is_an_error_of_the_protocol(server: LocalServer, sent: str, status: int, words: str) -> None:
    head, _, body = raw(server, sent.encode()).partition(b"\r\n\r\n")
    assert f" {status} ".encode() in head.splitlines()[0]
    assert b"content-type: application/json" in head.lower()
    assert (b"\r\nallow: get, post" in head.lower()) == (status == 405)
    told = json.loads(body)["error"]
    assert words in told["message"]
    assert (told["code"], told["type"]) == (status, "server_error" if status == 505 else "invalid_request_error")


def test_a_head_has_no_body(server: LocalServer) -> None:
    found = raw(server, b"HEAD /health HTTP/1.1\r\n\r\n")
    assert found.startswith(b"HTTP/1.1 405 ")
    assert found.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(
    server: LocalServer, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """8000 tokens, each sooner than a client is looked at."""
    caplog.set_level(logging.INFO, logger="engines.serving.computing")
    asked = {"prompt": "a", "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    body = json.dumps(asked)
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
        leaving.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        if stream:
            assert b"200 OK" in leaving.recv(1 << 12)
        else:
            time.sleep(0.5)  # until it is computed
    # Computed behind the other, and so once that has ended.
    status, _ = post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 2})
    assert status == 200
    assert "a client went away; its request is ended" in caplog.messages


@given(st.data())
def test_pieces_make_the_whole_text(data: st.DataObject) -> None:
    decode = checkpoint().tokenizer.decode
    token_ids = data.draw(st.lists(st.integers(0, checkpoint().tokenizer.vocabulary_size - 1), max_size=30))
    text = decode(token_ids)
    stop = data.draw(st.sampled_from(["", *{text[i : i + 3] for i in range(len(text))}]))
    whole = text.split(stop)[0] if stop else text
    pieces = TextPieces(decode, [stop])
    told = "".join(map(pieces.add, token_ids))
    assert whole.startswith(told)
    assert told + pieces.rest(whole) == whole


def test_a_server_with_another_default_of_threads_is_another_server() -> None:
    script = "from harness.serve_command import where_it_computes as at; print(at(None)['threads'], at(3)['threads'])"
    command = [sys.executable, "-c", script]
    told = {
        n: subprocess.run(
            command, env=os.environ | {"OMP_NUM_THREADS": n}, stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        for n in ("1", "2")
    }
    assert told == {"1": "1 3\n", "2": "2 3\n"}


def test_a_server_without_kernels_is_another_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.road.build", lambda: Build(road="torch", reason="none", torch_instruction_set="AVX2"))
    assert what_computes() == {"torch alone": "AVX2"}


def test_the_command_says_where_and_which_weights_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    """A server that was started again with other weights of the same name is another server."""
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_FOLDER / MODEL.removeprefix(BUNDLED_PREFIX), model)
    first = served_digest(str(model), None)
    quantise = Quantisation(experts="int8", attention="int8", head="int8", arithmetic="int8")
    checkpoint = load_checkpoint(MODEL, torch.float32, quantise)
    narrow = ReferenceEngine(checkpoint, dropless(), threads=1, last_layer="asked")
    expected = narrow.run(request(narrow.tokenizer.encode_prompt(PROMPT), 24, ignore_end_tokens=True), unheard)
    command = [sys.executable, "-c", "from harness.cli import main; main()", "serve", str(model), "--threads", "1"]
    command += ["--weights", "int8", "--arithmetic", "int8", "--last-layer", "asked"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line.startswith("http://127.0.0.1:")
        forms = "experts int8, attention int8, head int8, arithmetic int8"
        assert f"with dropless, {forms}, at most" in line
        port = int(line.split("/v1")[0].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["data"][0]["id"] == str(model)
        connection.request("GET", "/version")
        version = json.loads(connection.getresponse().read())["version"]
        asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        connection.request("POST", COMPLETIONS, json.dumps(asked), JSON)
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == expected.text
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
        assert process.stderr.read() == "interrupted; no longer served\n"
    cpus = ranges(os.sched_getaffinity(0))
    built = build()
    assert built.sha256 is not None
    by = f"kernels {built.instruction_set} build {built.sha256[:12]}"
    assert f"{first}: dropless, float32, {forms}, threads 1, CPUs {cpus}, {by}, chunk 512, last-layer asked" in version
    [weights] = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert served_digest(str(model), None) != first


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--weights", "int7"], "--weights int7: no such form; take one of fp32, bf16"),
        (["--weights", "{ experts = 1 }"], "--weights { experts = 1 }: experts: must be"),
        (["--weights", "{ experts = "], "--weights { experts = : Invalid value"),
        (["--weights", "{ dense = 'int8' }"], "--weights { dense = 'int8' }: dense has no effect: no layer is dense"),
        (["--weights", "fp16", "--arithmetic", "int8"], 'arithmetic "int8" multiplies weights of int8'),
        (["--arithmetic", "int8"], '--arithmetic int8: arithmetic "int8" multiplies'),
        (["--weights", "{ experts = 'int8', arithmetic = 'int8' }", "--arithmetic", "fp32"], "its arithmetic is int8"),
        (["--technique", "coreml-naive", "--last-layer", "asked"], "coreml-naive plans a prompt's tokens together"),
    ],
)
def test_weights_that_cannot_be_served_end_the_command_with_one_line(options: list[str], words: str) -> None:
    told = CliRunner().invoke(app, ["serve", MODEL, *options])
    assert told.exit_code == 2
    assert words in told.output
    assert len(told.output.splitlines()) == 1


@pytest.mark.parametrize("command", [["serve", MODEL, "--weights", "int7"], ["model", "fit"], ["train-tiny"]])
def test_more_threads_than_cores_are_warned_of(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """900 threads on two cores were taken without a word."""
    monkeypatch.setattr("harness.rank_problems.usable_cores", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
    monkeypatch.setattr("harness.train_tiny.train_tiny", unable)
    monkeypatch.setattr("engines.curves.machine.fit_machine", unable)
    where = {"model": ["--out", str(tmp_path / "sheet.toml")], "train-tiny": [str(tmp_path / "model")]}
    for n, is_warned in ((2, False), (900, True)):
        told = CliRunner().invoke(app, [*command, *where.get(command[0], []), "--threads", str(n)])
        warning = f"warning: --threads: {n} threads on 2 cores wait for each other"
        assert (warning in told.stderr, told.exit_code != 0) == (is_warned, True), told.output


def unable(*arguments: object) -> None:
    raise EngineError("no figure is asked for here")


def test_forms_of_the_options_are_those_of_the_engine() -> None:
    assert get_args(Weights) == FORMS
    assert get_args(weights_option.Arithmetic) == get_args(Arithmetic)


@pytest.mark.parametrize(
    ("weights", "options", "key"),
    [
        ("bf16", ["--arithmetic", "bf16"], "arithmetic"),
        ("{ attention_arithmetic = 'bf16' }", [], "attention_arithmetic"),
    ],
)
def test_bf16_arithmetic_is_not_served_where_the_processor_has_none(
    weights: str, options: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engines.kernels.compile.lacking", list)
    told = CliRunner().invoke(app, ["serve", MODEL, "--weights", weights, *options])
    assert told.exit_code == 2
    assert f"--weights {weights}: this processor lacks AVX-512 BF16; leave {key} out" in told.output
