"""What an observer is told, against what transformers' own modules read and returned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines.dispatch import Routing
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.transformer import KeyValueCache, Transformer
from engines.observers import SparseLayerStep
from engines.reference import ReferenceEngine
from engines.techniques.context import ChunkPhase
from engines.techniques.presets import DroplessParameters, dropless
from results.records import Request
from tests.fakes.families import FamilyCase, write_family
from tests.fakes.random_models import write_random_model

pytestmark = pytest.mark.numbers

N_TOKENS = 30


class Recorder:
    def __init__(self) -> None:
        self.seen: list[SparseLayerStep] = []

    def layer(self, seen: SparseLayerStep) -> None:
        self.seen.append(seen)


def random_tokens(n: int = N_TOKENS) -> Tensor:
    return torch.randint(0, 2048, (n,), generator=torch.Generator().manual_seed(3))


def observed(model: Transformer, chunks: list[Tensor], phases: list[ChunkPhase]) -> list[SparseLayerStep]:
    recorder, cache = Recorder(), KeyValueCache(model.config)
    cache.start(sum(map(len, chunks)))
    with torch.inference_mode():
        for chunk, phase in zip(chunks, phases, strict=True):
            model.forward(chunk, cache, dropless(), phase, recorder)
    return recorder.seen


def hooked(model: Any, tokens: Tensor) -> dict[tuple[int, str], Any]:
    """(layer, module) -> (inputs, output) of the attention block, the router, and the experts."""
    found: dict[tuple[int, str], Any] = {}
    for number, layer in enumerate(model.model.layers):
        modules = {"attention": layer.self_attn, "router": getattr(layer.mlp, "gate", None)}
        modules["experts"] = getattr(layer.mlp, "experts", None)
        for name, module in modules.items():
            if module is None:
                continue

            def hook(_: Any, inputs: Any, output: Any, key: tuple[int, str] = (number, name)) -> None:
                found[key] = (inputs, output)

            module.register_forward_hook(hook)
    with torch.inference_mode():
        model(tokens[None])
    return found


@pytest.fixture(scope="module")
def theirs_and_ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[tuple[int, str], Any], Transformer]:
    """Layer 1 is dense."""
    folder = tmp_path_factory.mktemp("qwen3-moe")
    theirs = write_random_model(folder, "qwen3-moe-some-dense")
    return hooked(theirs, random_tokens()), Transformer(load_checkpoint(str(folder), torch.float32))


def joined(steps: list[SparseLayerStep], layer: int, name: str) -> Tensor:
    return torch.cat([getattr(step, name) for step in steps if step.layer == layer])


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pieces", [[N_TOKENS], [11, 16, 1, 1, 1]], ids=["prefill", "prefill and decode"])
def test_each_value_is_that_of_transformers_hooks(
    theirs_and_ours: tuple[dict[tuple[int, str], Any], Transformer], pieces: list[int]
) -> None:
    theirs, ours = theirs_and_ours
    phases: list[ChunkPhase] = ["decode" if n == 1 else "prefill" for n in pieces]
    steps = observed(ours, list(torch.split(random_tokens(), pieces)), phases)
    assert [(step.layer, step.phase) for step in steps] == [(n, phase) for phase in phases for n in (0, 2)]
    for layer in (0, 2):
        attention_1TH = theirs[layer, "attention"][1][0]
        router_input_TH = theirs[layer, "router"][0][0].view(N_TOKENS, -1)
        _, weights_TK, ids_TK = theirs[layer, "router"][1]
        experts_TH = theirs[layer, "experts"][1]
        norm_T = attention_1TH[0].square().sum(-1).sqrt()
        assert_close(joined(steps, layer, "attention_norm_T"), norm_T)
        assert_close(joined(steps, layer, "router_input_TH"), router_input_TH)
        assert_close(joined(steps, layer, "expert_output_TH"), experts_TH)
        of_layer = [step.routing for step in steps if step.layer == layer]
        assert torch.equal(torch.cat([routing.expert_ids_TK for routing in of_layer]), ids_TK)
        assert_close(torch.cat([routing.weights_TK for routing in of_layer]), weights_TK)


def test_expert_output_is_without_shared_experts(tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
    theirs = write_family(tmp_path, FamilyCase("Qwen2Moe", {**sizes, "shared_expert_intermediate_size": 80}))
    steps = observed(Transformer(load_checkpoint(str(tmp_path), torch.float32)), [random_tokens()], ["prefill"])
    found = hooked(theirs, random_tokens())
    for step in steps:
        experts_TH = found[step.layer, "experts"][1]
        torch.testing.assert_close(step.expert_output_TH, experts_TH, atol=1e-4, rtol=1e-4)


def test_the_engine_tells_its_layer_observer_of_every_step_and_answers_alike() -> None:
    checkpoint: Checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    asked = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(range(40, 61)), max_new_tokens=4)
    engine, recorder = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=16), Recorder()
    unobserved = engine.run(asked, lambda event, at_s: None)
    counted = engine.take_counters()
    engine.layer_observer = recorder
    completion = engine.run(asked, lambda event, at_s: None)
    assert completion.token_ids == unobserved.token_ids
    assert engine.take_counters() == counted
    rows = [(step.layer, step.phase, len(step.router_input_TH)) for step in recorder.seen]
    steps = [("prefill", 16), ("prefill", 5), ("decode", 1), ("decode", 1), ("decode", 1)]
    assert rows == [(layer, phase, n) for phase, n in steps for layer in range(4)]


def test_what_was_told_is_not_written_to_later() -> None:
    model = Transformer(load_checkpoint("bundled:tiny-qwen3-moe", torch.float32))

    class Copying(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.copies: list[list[Tensor]] = []

        def layer(self, seen: SparseLayerStep) -> None:
            super().layer(seen)
            self.copies.append([tensor.clone() for tensor in tensors(seen)])

    def tensors(seen: SparseLayerStep) -> list[Tensor]:
        routing: Routing = seen.routing
        return [
            seen.attention_norm_T,
            seen.router_input_TH,
            seen.expert_output_TH,
            routing.expert_ids_TK,
            routing.weights_TK,
        ]

    recorder, cache = Copying(), KeyValueCache(model.config)
    cache.start(N_TOKENS)
    with torch.inference_mode():
        for chunk in torch.split(random_tokens(), [20, 9, 1]):
            model.forward(chunk, cache, dropless(), "prefill", recorder)
    for seen, copies in zip(recorder.seen, recorder.copies, strict=True):
        assert all(torch.equal(now, then) for now, then in zip(tensors(seen), copies, strict=True))
