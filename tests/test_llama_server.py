"""A real llama-server, that of the wheel xllamacpp, on GGUF written here: its tokens are ours."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.external.gguf_file import write_gguf
from engines.external.gguf_vocabulary import split_name
from engines.external.openai import OpenAIEngine, ServerOptions
from engines.model.checkpoints import inspect_checkpoint
from engines.sampling import token_probabilities
from results.records import Request, Sampling
from tests.protocol_server import MODEL, engine

pytest.importorskip("gguf", reason="the package gguf writes the model")
xllamacpp: Any = pytest.importorskip("xllamacpp", reason="xllamacpp has a llama-server")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    model = tmp_path_factory.mktemp("llama-server") / "tiny.gguf"
    write_gguf(inspect_checkpoint(MODEL), model, "f32")
    asked = xllamacpp.CommonParams()
    asked.model.path = str(model)
    asked.n_parallel, asked.n_ctx, asked.warmup, asked.port = 1, 512, False, 0
    asked.cpuparams.n_threads = asked.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(asked)
    yield f"{server.listening_address}/v1"
    del server


def asked_for(prompt_ids: list[int], n: int, **changes: Any) -> Request:
    fields = {"request_id": "r", "sample_id": "s", "kind": "generate", "prompt_ids": prompt_ids, "max_new_tokens": n}
    return Request.model_validate(fields | changes)


def test_answers_are_ours_and_their_counts_proven(url: str) -> None:
    own = engine()
    client = OpenAIEngine(ServerOptions(url, flavour="llama-server"), own.tokenizer, 512, time.perf_counter)
    prompt_ids = own.tokenizer.encode("The miller came home. The key is")
    for request in (
        asked_for(prompt_ids, 24, ignore_end_tokens=True),
        asked_for(prompt_ids, 24, stop=(" the r",)),
        asked_for(own.tokenizer.encode("hello"), 24),
    ):
        ours, theirs = own.run(request, unheard), client.run(request, unheard)
        assert theirs.token_ids == ours.token_ids
        assert theirs.text == ours.text
    assert client.take_marks() == ()
    client.close()


def test_draws_are_from_all_tokens_where_no_top_k_is_asked(url: str) -> None:
    """The server's own default is the 40 likeliest."""
    own, n = engine(), 300
    client = OpenAIEngine(ServerOptions(url, flavour="llama-server"), own.tokenizer, 512, time.perf_counter)
    prompt_ids = own.tokenizer.encode("The miller came home. The key is")
    shown: list[torch.Tensor] = []
    asked = asked_for(prompt_ids, 0, kind="loglikelihood", continuation_ids=[9])
    own.show_log_probabilities(asked, shown.append)
    probability = token_probabilities(shown[0][0], Sampling(temperature=2.5))
    whole = [i for i in range(len(probability)) if (text := own.tokenizer.decode([i])) and "\ufffd" not in text]
    likeliest = set(probability.topk(40).indices.tolist())
    beyond = sum(float(probability[i]) for i in whole if i not in likeliest) / float(probability[whole].sum())
    assert 0.1 < beyond < 0.9
    drawn = [
        answer[0]
        for seed in range(n)
        if isinstance(
            answer := client.answer_aside(asked_for(prompt_ids, 1, sampling=Sampling(temperature=2.5, seed=seed))),
            tuple,
        )
        and answer[0] in whole
    ]
    client.close()
    # Four standard errors of a share of n draws.
    share = sum(token not in likeliest for token in drawn) / len(drawn)
    assert share == pytest.approx(beyond, abs=4 * (beyond * (1 - beyond) / len(drawn)) ** 0.5)


@pytest.mark.parametrize(
    ("split", "name"),
    [
        ({"type": "ByteLevel", "use_regex": True}, "gpt-2"),
        ({"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"}}, "llama-bpe"),
        ({"type": "Split", "pattern": {"Regex": r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"}}, "qwen2"),
        ({"type": "Split", "pattern": {"Regex": r"\p{L}+"}}, "default"),
        (None, "default"),
    ],
)
def test_a_pattern_has_the_name_that_llama_cpp_gives_it(split: dict[str, Any] | None, name: str) -> None:
    assert split_name({"pre_tokenizer": split}) == name
