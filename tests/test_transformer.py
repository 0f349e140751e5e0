"""Every expected value comes from transformers, or from the definition."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import KeyValueCache, Transformer
from engines.techniques.context import LayerInput
from engines.techniques.presets import dropless
from tests.fakes.random_models import BUNDLED, KINDS, write_random_model
from tests.techniques import AsDropless

pytestmark = pytest.mark.numbers

N_TOKENS = 100


def chunked_logits(model: Transformer, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    cache = KeyValueCache(model.config)
    cache.start(len(tokens))
    with torch.inference_mode():
        hidden = [
            model.forward(chunk, cache, dropless(), "decode" if len(chunk) == 1 else "prefill")[0]
            for chunk in tokens.split(chunks)
        ]
        return model.logits(torch.cat(hidden))


def random_tokens(n: int = N_TOKENS) -> torch.Tensor:
    return torch.randint(0, 2048, (n,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=[*KINDS, "bundled"])
def peers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Transformer]:
    """The same weights in transformers and here."""
    import transformers

    if request.param == "bundled":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
        return theirs, Transformer(load_checkpoint("bundled:tiny-qwen3-moe", torch.float32))
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_random_model(folder, request.param, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return theirs, Transformer(load_checkpoint(str(folder), torch.float32))


@pytest.mark.parametrize("chunks", [[N_TOKENS], [7, 64, 1, 28], [90] + [1] * 10], ids=["whole", "uneven", "decode"])
def test_logits_agree_with_transformers_however_the_prompt_is_cut(
    peers: tuple[Any, Transformer], chunks: list[int]
) -> None:
    theirs, ours = peers
    tokens = random_tokens()
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert expected.std() > 0.5, "logits this flat would agree whatever we computed"
    torch.testing.assert_close(chunked_logits(ours, tokens, chunks), expected, atol=1e-4, rtol=1e-4)


def test_greedy_tokens_agree_with_transformers(peers: tuple[Any, Transformer]) -> None:
    theirs, ours = peers
    prompt = random_tokens(20)
    expected = theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, 20),
        do_sample=False,
        max_new_tokens=64,
        eos_token_id=None,
        pad_token_id=0,
    )[0, 20:].tolist()
    cache = KeyValueCache(ours.config)
    cache.start(84)
    got: list[int] = []
    chunk, phase = prompt, "prefill"
    with torch.inference_mode():
        while len(got) < 64:
            hidden, _ = ours.forward(chunk, cache, dropless(), phase)
            got.append(int(ours.logits(hidden[-1:]).argmax()))
            chunk, phase = torch.tensor(got[-1:]), "decode"
    assert got == expected


def test_weights_stored_in_bf16_compute_as_if_they_were_wide() -> None:
    tokens = random_tokens(30)
    narrow = Transformer(load_checkpoint("bundled:tiny-qwen3-moe", torch.bfloat16))
    wide = Transformer(load_checkpoint("bundled:tiny-qwen3-moe", torch.float32))
    assert torch.equal(chunked_logits(narrow, tokens, [30]), chunked_logits(wide, tokens, [30]))


class SaliencyRecorder(AsDropless):
    needs_saliency = True

    def __init__(self) -> None:
        self.seen: list[torch.Tensor | None] = []

    def plan(self, seen: LayerInput) -> DispatchPlan:
        self.seen.append(seen.saliency_T)
        return super().plan(seen)


def test_saliency_is_the_norm_of_the_attention_blocks_output(tmp_path: Path) -> None:
    theirs = write_random_model(tmp_path, "qwen3-moe")
    outputs: list[torch.Tensor] = []
    for layer in theirs.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: outputs.append(output[0][0]))
    ours = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    tokens, recorder = random_tokens(25), SaliencyRecorder()
    cache = KeyValueCache(ours.config)
    cache.start(25)
    with torch.inference_mode():
        theirs(tokens[None])
        ours.forward(tokens, cache, recorder, "prefill")
    assert len(recorder.seen) == len(outputs) == 3
    for seen, output in zip(recorder.seen, outputs, strict=True):
        assert seen is not None
        torch.testing.assert_close(seen, output.square().sum(-1).sqrt(), atol=1e-4, rtol=1e-4)


def test_saliency_is_not_computed_for_a_technique_that_does_not_read_it(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3-moe")
    ours = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    recorder = SaliencyRecorder()
    recorder.needs_saliency = False
    cache = KeyValueCache(ours.config)
    cache.start(5)
    ours.forward(random_tokens(5), cache, recorder, "prefill")
    assert recorder.seen == [None, None, None]


def test_dense_layers_have_no_plan(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3-moe-some-dense")
    ours = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    cache = KeyValueCache(ours.config)
    cache.start(5)
    _, plans = ours.forward(random_tokens(5), cache, dropless(), "prefill")
    assert [plan is None for plan in plans] == [False, True, False]
    assert [plan.routed_pairs for plan in plans if plan is not None] == [15, 15]


def test_chunk_beyond_the_cache_is_refused_not_wrapped() -> None:
    ours = Transformer(load_checkpoint("bundled:tiny-qwen3-moe", torch.float32))
    cache = KeyValueCache(ours.config)
    cache.start(4)
    with pytest.raises(EngineError, match="position 5, beyond the cache"):
        ours.forward(random_tokens(5), cache, dropless(), "prefill")


def test_cache_that_is_used_again_forgets_the_sequence_before() -> None:
    ours = Transformer(load_checkpoint("bundled:tiny-qwen3-moe", torch.float32))
    cache, tokens = KeyValueCache(ours.config), random_tokens(12)
    with torch.inference_mode():
        cache.start(12)
        fresh, _ = ours.forward(tokens, cache, dropless(), "prefill")
        cache.start(40)
        ours.forward(random_tokens(40).flip(0), cache, dropless(), "prefill")
        cache.start(12)
        again, _ = ours.forward(tokens, cache, dropless(), "prefill")
    assert torch.equal(fresh, again)
