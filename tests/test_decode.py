from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.attention import kernel_table
from engines.model.checkpoints import load_checkpoint
from engines.model.decode import fused_decoder
from engines.model.transformer import KeyValueCache, Transformer
from engines.observers import SparseLayerStep
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.context import NOTHING, BuildContext
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import DroplessParameters, dropless
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import BUNDLED, KINDS, copy_tokenizer, write_random_model

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything"),
]

FUSED = (
    "qwen2", "llama", "qwen3-moe", "qwen3-moe-some-dense", "mixtral", "mixtral-sliding", "qwen3", "phi3", "qwen2-moe",
)  # fmt: skip
"""Of families without sinks, latents, clamps, soft caps or layer norms."""
LAYER_BY_LAYER = ("gpt-oss", "gemma2", "phi-moe", "deepseek-v2", "deepseek-v3", "llama4", "olmoe")


class Watcher:
    """Has each layer computed by itself."""

    def layer(self, seen: SparseLayerStep) -> None: ...


def model_of(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Transformer, bool]:
    """The model, and whether its decode steps are one call."""
    if kind in KINDS:
        write_random_model(folder, kind)
    else:
        write_family(folder, CASES[kind])
        copy_tokenizer(folder)
    checkpoint = load_checkpoint(str(folder), dtype)
    config, weights = checkpoint.config, checkpoint.weights
    tables = [kernel_table(layer.attention, config, number) for number, layer in enumerate(weights.layers)]
    return Transformer(checkpoint), fused_decoder(config, weights, tables) is not None


def asked_tokens() -> torch.Tensor:
    return torch.randint(1, 2048, (41,), generator=torch.Generator().manual_seed(3))


def decoded(
    model: Transformer, watcher: Watcher | None, technique: Technique | None = None, shown: Shown | None = None
) -> tuple[torch.Tensor, list[DispatchPlan | None], KeyValueCache]:
    """The hidden states and plans of 30 tokens, one at a time behind a prompt of 11."""
    tokens = asked_tokens()
    cache = KeyValueCache(model.config)
    cache.start(41)
    hidden, plans = [], []
    technique, shown = technique or dropless(), shown or Shown(NOTHING, None)
    with torch.inference_mode():
        model.forward(tokens[:11], cache, dropless(), "prefill")
        for token in tokens[11:]:
            shown.start_step(0)
            one, of_step = model.forward(token[None], cache, technique, "decode", watcher, shown=shown)
            hidden.append(one)
            plans += of_step
    return torch.cat(hidden), plans, cache


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_call_a_step_gives_what_layer_by_layer_gives(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, is_fused = model_of(kind, tmp_path, dtype)
    assert is_fused
    (hidden, plans, cache), (expected, one_by_one, other) = decoded(model, None), decoded(model, Watcher())
    torch.testing.assert_close(hidden, expected, atol=2e-5, rtol=2e-5)
    for mine, theirs in zip([*cache.keys, *cache.values], [*other.keys, *other.values], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=2e-5)
    assert cache.length == other.length == 41
    assert len(plans) == len(one_by_one) == 30 * model.config.n_layers
    for plan, theirs_too in zip(plans, one_by_one, strict=True):
        assert (plan is None) == (theirs_too is None)
        if plan is not None and theirs_too is not None:
            assert (plan.calls, plan.token_R.tolist()) == (theirs_too.calls, theirs_too.token_R.tolist())
            torch.testing.assert_close(plan.weight_R, theirs_too.weight_R, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_from_an_id_to_logits_is_that_between_both_bit_for_bit(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, _ = model_of(kind, tmp_path, dtype)
    hidden, plans, cache = decoded(model, None)
    tokens = asked_tokens()
    other = KeyValueCache(model.config)
    other.start(41)
    found, of_steps = [], list[DispatchPlan | None]()
    with torch.inference_mode():
        expected = [model.logits(one[None]) for one in hidden]
        model.forward(tokens[:11], other, dropless(), "prefill")
        for token in tokens[11:].tolist():
            step = model.decode(token, other, dropless(), Shown(NOTHING, None))
            assert step is not None
            assert step.logits_AL is not None
            assert step.largest == tuple(most.item() for most in step.logits_AL[-1].max(dim=-1))
            found.append(step.logits_AL)
            of_steps += step.plans
    assert torch.equal(torch.cat(found), torch.cat(expected))
    assert cache.length == other.length
    assert all(torch.equal(*pair) for pair in zip(cache.values, other.values, strict=True))
    assert [plan and plan.calls for plan in of_steps] == [plan and plan.calls for plan in plans]
    with pytest.raises(EngineError, match="beyond the cache"):
        model.decode(1, other, dropless(), Shown(NOTHING, None))


def test_the_largest_logit_is_not_told_where_logits_are_capped_behind_it(tmp_path: Path) -> None:
    model, _ = model_of("mixtral", tmp_path, torch.float32)
    cache = KeyValueCache(model.config)
    cache.start(3)
    model.config = replace(model.config, logit_softcap=1e-3)
    with torch.inference_mode():
        model.forward(torch.tensor([5, 6]), cache, dropless(), "prefill")
        step = model.decode(7, cache, dropless(), Shown(NOTHING, None))
    assert step is not None
    assert step.logits_AL is not None
    assert step.logits_AL.max() <= torch.tensor(1e-3)
    assert step.largest is None


def test_an_engine_decodes_from_ids_to_logits_unless_layers_are_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ReferenceEngine(load_checkpoint(str(BUNDLED), torch.float32), DroplessParameters())
    prompt = tuple(range(5, 40))
    request = Request(request_id="a", sample_id="a", kind="generate", prompt_ids=prompt, max_new_tokens=12)
    engine.layer_observer = Watcher()
    expected = engine.run(request, unheard).token_ids
    engine.layer_observer, forward_batch = None, engine._model.forward_batch

    def of_prompts(chunks: list[torch.Tensor], *others: Any) -> Any:
        assert len(chunks[0]) == len(prompt), "a token took another way"
        return forward_batch(chunks, *others)

    monkeypatch.setattr(engine._model, "forward_batch", of_prompts)
    assert engine.run(request, unheard).token_ids == expected


def without_decoding(model: Transformer) -> Callable[..., torch.Tensor]:
    """The transformer's own layers, but for a decoded token."""
    layers = model._layers

    def of_prompts(hidden_TH: torch.Tensor, *others: Any) -> torch.Tensor:
        assert len(hidden_TH) > 1, "a token is decoded layer by layer"
        return layers(hidden_TH, *others)

    return of_prompts


@pytest.mark.parametrize("kind", ["qwen3-moe", "qwen3-moe-some-dense", "mixtral"])
@pytest.mark.parametrize("executes", ["prediction", "router"])
@pytest.mark.parametrize("stops", [True, False])
def test_a_step_that_guesses_or_stops_for_every_guess_is_layer_by_layer_bit_for_bit(
    stops: bool, kind: str, executes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts of the next layer are guessed from states that the kernels write over afterwards."""
    model, _ = model_of(kind, tmp_path)
    route, move = {"kind": "predicted", "source": "s", "executes": executes}, {"kind": "two_buffers"}
    parameters = CustomParameters.model_validate({"route": route, "move": move})
    sizes = own_sizes(model.config)
    technique = parameters.build(BuildContext(512, sizes, model=model, routers_order=True))
    expected, shown = Shown(technique.asks, sizes), Shown(technique.asks, sizes, plans_first=stops)
    one_by_one = decoded(model, Watcher(), technique, expected)
    monkeypatch.setattr(model, "_layers", without_decoding(model))
    found = decoded(model, None, technique, shown)
    assert torch.equal(found[0], one_by_one[0])
    assert [plan and (plan.calls, plan.foretold, plan.hits) for plan in found[1]] == [
        plan and (plan.calls, plan.foretold, plan.hits) for plan in one_by_one[1]
    ]
    assert all(torch.equal(*pair) for pair in zip(found[2].keys, one_by_one[2].keys, strict=True))
    guessed = shown.likeness.take()
    assert guessed == expected.likeness.take()
    assert guessed


@pytest.mark.parametrize("kind", LAYER_BY_LAYER)
def test_what_the_kernels_do_not_know_is_left_to_the_transformer(kind: str, tmp_path: Path) -> None:
    assert not model_of(kind, tmp_path)[1]
