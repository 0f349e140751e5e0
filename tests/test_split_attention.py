"""Ranks that share out the attention of a decoded token: the same answer, caches that stay whole, bytes by the closed
form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from engines.kernels.library import library
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.transformer import Transformer
from engines.parallel.running import RanksAsked, Running
from engines.techniques.over_ranks import SPLIT_BYTES
from engines.techniques.presets import dropless
from tests.fakes.random_models import copy_tokenizer
from tests.ranks import TOLERANCE, logits, relative_error, technique

pytestmark = [pytest.mark.numbers, pytest.mark.usefixtures("forked_ranks")]

HIDDEN, N_HEADS, N_KV_HEADS, HEAD_DIM, N_LAYERS = 300, 10, 5, 64, 2
MODEL = {
    "vocab_size": 2048, "hidden_size": HIDDEN, "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 512, "eos_token_id": None,
    "bos_token_id": None, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Neither heads nor rows divide evenly."""
    if library() is None:
        pytest.skip("no kernels here")
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MODEL)).save_pretrained(path)
    copy_tokenizer(path)
    return path


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_heads_of_a_decoded_token_over_ranks_give_what_one_process_gives(n_ranks: int, folder: Path) -> None:
    """Also of a step of several tokens behind decoded ones, which reads the keys of all heads."""
    assert 4 * 2 * (N_HEADS + N_KV_HEADS) * HEAD_DIM * HIDDEN >= SPLIT_BYTES, "large enough to be shared out"
    alone = Transformer(load_checkpoint(str(folder), torch.float32))
    running = Running(RanksAsked(inspect_checkpoint(str(folder)), technique("expert-parallel"), n_ranks, threads=1))
    try:
        expected = logits(alone, dropless())
        assert relative_error(logits(running.model, running.technique), expected) < TOLERANCE
        assert relative_error(behind(running.model, running.technique), behind(alone, dropless())) < TOLERANCE
    finally:
        running.close()


def behind(model: Transformer, chosen: object) -> torch.Tensor:
    """Logits of 40 tokens behind 20 that were decoded one by one."""
    tokens = torch.randint(0, 2048, (60,), generator=torch.Generator().manual_seed(5))
    cache = model.new_cache()
    with torch.inference_mode():
        cache.start(len(tokens))
        for token in tokens[:20].split(1):
            model.forward(token, cache, chosen, "decode")  # type: ignore[arg-type]
        return model.logits(model.forward(tokens[20:], cache, chosen, "prefill")[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("n_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_bytes_of_attention_over_ranks_are_those_of_the_closed_form(n_ranks: int, folder: Path) -> None:
    """Of each decoded token and layer, 4 (N - 1) bytes for each value that heads mix, of a new key or value, and of
    what goes back. For the experts the sum as everywhere, 4 H N (N - 1)."""
    running = Running(RanksAsked(inspect_checkpoint(str(folder)), technique("expert-parallel"), n_ranks, threads=1))
    n_tokens = 7
    try:
        cache = running.model.new_cache()
        with torch.inference_mode():
            cache.start(n_tokens)
            for token in torch.arange(n_tokens).split(1):
                running.model.forward(token, cache, running.technique, "decode")
        sent = [dict(running.links.sent_bytes), *(report.sent_bytes for report in running.workers.reports())]
    finally:
        running.close()
    steps = n_tokens * N_LAYERS
    values = (N_HEADS + 2 * N_KV_HEADS) * HEAD_DIM + HIDDEN
    assert sum(one["backbone"] for one in sent) == steps * 4 * (n_ranks - 1) * values
    assert sum(one["experts"] for one in sent) == steps * 4 * HIDDEN * n_ranks * (n_ranks - 1)
