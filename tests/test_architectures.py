"""Each family against the model that transformers computes from the same folder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines.dispatch import DispatchPlan
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint, tensor_shapes
from engines.model.transformer import KeyValueCache, Transformer
from engines.oracle import Oracle
from engines.techniques.base import Technique
from engines.techniques.context import ChunkPhase
from engines.techniques.presets import dropless
from tests.fakes.families import CASES, FamilyCase, write_family

pytestmark = pytest.mark.numbers

N_TOKENS = 100
N_PROMPT, N_GREEDY = 20, 64
PROMPT_LENGTHS = (23, 60, 41)
"""Of a batch. All beyond 16 tokens, where the long rotary factors of some cases begin: transformers chooses them by the
longest prompt of a batch, we for each sequence."""


def random_tokens(n: int = N_TOKENS) -> torch.Tensor:
    return torch.randint(0, 2048, (n,), generator=torch.Generator().manual_seed(3))


def chunked_logits(
    model: Transformer, tokens: torch.Tensor, chunks: list[int], technique: Technique | None = None
) -> torch.Tensor:
    cache = KeyValueCache(model.config)
    cache.start(len(tokens))
    with torch.inference_mode():
        hidden = [
            model.forward(chunk, cache, technique or dropless(), "decode" if len(chunk) == 1 else "prefill")[0]
            for chunk in tokens.split(chunks)
        ]
        return model.logits(torch.cat(hidden))


Peers = tuple[FamilyCase, Any, Transformer]
N_BATCH_GREEDY = 16


@pytest.fixture(scope="module", params=CASES)
def peers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peers:
    """The same weights in transformers and here."""
    case, folder = CASES[request.param], tmp_path_factory.mktemp(request.param)
    theirs = write_family(folder, case)
    written = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    assert tensor_shapes(inspect_checkpoint(str(folder)).config) == written
    return case, theirs, Transformer(load_checkpoint(str(folder), torch.float32))


@pytest.mark.parametrize("chunks", [[N_TOKENS], [7, 64, 1, 28], [90] + [1] * 10], ids=["whole", "uneven", "decode"])
def test_logits_agree_with_transformers_however_the_prompt_is_cut(peers: Peers, chunks: list[int]) -> None:
    _, theirs, ours = peers
    tokens = random_tokens()
    with torch.inference_mode():
        expected = theirs(tokens[None]).logits[0]
    assert expected.std() > 0.5, "logits this flat would agree whatever we computed"
    assert (chunked_logits(ours, tokens, chunks) - expected).abs().max() < 1e-4


def test_batched_logits_of_unequal_prompts_agree_with_transformers(peers: Peers) -> None:
    """A padded batch there; here chunks of unlike length in one step, then steps that shorter sequences leave."""
    _, theirs, ours = peers
    prompts = [random_tokens(sum(PROMPT_LENGTHS))[-n:] for n in PROMPT_LENGTHS]
    padded = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in prompts], batch_first=True)
    with torch.inference_mode():
        expected = theirs(padded, attention_mask=mask).logits
    caches = [KeyValueCache(ours.config) for _ in prompts]
    for cache, prompt in zip(caches, prompts, strict=True):
        cache.start(len(prompt))
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in ([(0, 20), (1, 7)], [(2, 40), (1, 50)], [(0, 1), (1, 1), (2, 1)], [(1, 1), (0, 1)], [(1, 1), (0, 1)]):
        chunks = [prompts[i][caches[i].length :][:n] for i, n in step]
        with torch.inference_mode():
            phase: ChunkPhase = "decode" if {n for _, n in step} == {1} else "prefill"
            hidden, _ = ours.forward_batch(chunks, [caches[i] for i, _ in step], dropless(), phase)
            parts = ours.logits(hidden).split([n for _, n in step])
        for (i, _), part in zip(step, parts, strict=True):
            logits[i].append(part)
    for i, n in enumerate(PROMPT_LENGTHS):
        assert caches[i].length == n
        assert (torch.cat(logits[i]) - expected[i, :n]).abs().max() < 1e-4


def test_greedy_tokens_agree_with_transformers(peers: Peers) -> None:
    _, theirs, ours = peers
    prompt = random_tokens(N_PROMPT)
    expected = theirs.generate(
        prompt[None],
        attention_mask=torch.ones(1, N_PROMPT),
        do_sample=False,
        max_new_tokens=N_GREEDY,
        eos_token_id=None,
        pad_token_id=0,
    )[0, N_PROMPT:].tolist()
    cache = KeyValueCache(ours.config)
    cache.start(N_PROMPT + N_GREEDY)
    got: list[int] = []
    chunk = prompt
    with torch.inference_mode():
        while len(got) < N_GREEDY:
            hidden, _ = ours.forward(chunk, cache, dropless(), "decode" if got else "prefill")
            got.append(int(ours.logits(hidden[-1:]).argmax()))
            chunk = torch.tensor(got[-1:])
    assert got == expected
    assert len(set(got)) > 4, "a loop of few tokens would agree by chance"


def test_greedy_tokens_of_a_batch_agree_with_transformers(peers: Peers) -> None:
    """Each prompt alone there, all of them together here."""
    _, theirs, ours = peers
    prompts = [random_tokens(sum(PROMPT_LENGTHS))[-n:] for n in PROMPT_LENGTHS]
    expected = [
        theirs.generate(
            prompt[None],
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=N_BATCH_GREEDY,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    caches = [KeyValueCache(ours.config) for _ in prompts]
    for cache, prompt in zip(caches, prompts, strict=True):
        cache.start(len(prompt) + N_BATCH_GREEDY)
    got: list[list[int]] = [[] for _ in prompts]
    chunks = prompts
    with torch.inference_mode():
        for step in range(N_BATCH_GREEDY):
            hidden, _ = ours.forward_batch(chunks, caches, dropless(), "decode" if step else "prefill")
            last = torch.tensor([len(chunk) for chunk in chunks]).cumsum(0) - 1
            chunks = list(ours.logits(hidden[last]).argmax(dim=-1).split(1))
            for tokens, chunk in zip(got, chunks, strict=True):
                tokens += chunk.tolist()
    assert got == expected


def test_dropless_plans_equal_the_oracle(peers: Peers) -> None:
    _, _, ours = peers
    if ours.config.moe is None:
        pytest.skip("dense")
    tokens = random_tokens(12)
    logits, oracle = (chunked_logits(ours, tokens, [12], technique) for technique in (dropless(), Oracle()))
    torch.testing.assert_close(logits, oracle, atol=1e-4, rtol=1e-4)


def test_every_sparse_layer_has_a_plan_and_every_dense_one_none(peers: Peers) -> None:
    _, theirs, ours = peers
    cache = KeyValueCache(ours.config)
    cache.start(5)
    plans: list[DispatchPlan | None] = ours.forward(random_tokens(5), cache, dropless(), "prefill")[1]
    has_experts = [any(".experts." in name for name, _ in layer.named_parameters()) for layer in theirs.model.layers]
    assert [plan is not None for plan in plans] == has_experts
