"""Counts, saliency and default vectors, against separately written loops and the mixture's definition."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engines.dispatch import Routing
from engines.errors import EngineError
from engines.model.checkpoints import BUNDLED_FOLDER, load_checkpoint
from engines.model.transformer import Transformer
from engines.model.weights import SparseWeights
from engines.observers import SparseLayerStep
from engines.oracle import mix_experts
from engines.profile import Profile
from engines.profiling import ChoiceCounts, profile_of
from engines.techniques.presets import dropless
from tests.fakes.families import CASES, write_family

BUNDLED = "bundled:tiny-qwen3-moe"


class Recorder:
    def __init__(self) -> None:
        self.seen: list[SparseLayerStep] = []

    def layer(self, seen: SparseLayerStep) -> None:
        self.seen.append(seen)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 2048, (n,), generator=generator).tolist() for n in lengths]


def test_imbalance_is_the_busiest_expert_over_the_mean() -> None:
    profile = Profile({0: (30, 10, 0, 0), 3: (5, 5, 5, 5)}, top_k=2, n_prompts=1)
    assert profile.imbalance(0) == 3.0
    assert profile.imbalance(3) == 1.0
    assert profile.relative_load(0) == (3.0, 1.0, 0.0, 0.0)
    assert profile.n_tokens == 20


def test_popularity_ranks_by_count_then_by_index() -> None:
    assert Profile({0: (1, 9, 4, 9)}, top_k=1, n_prompts=1).popularity(0) == (1, 3, 2, 0)


def test_choices_and_saliency_are_summed_per_layer_over_all_steps() -> None:
    def step(layer: int, norms: tuple[float, float], *choices: tuple[int, ...]) -> SparseLayerStep:
        ids, nothing = torch.tensor(choices), torch.empty(len(choices), 0)
        norm_T = torch.tensor(norms[: len(choices)])
        return SparseLayerStep(
            layer, "prefill", norm_T, nothing, Routing(ids, torch.ones(ids.shape), 4), nothing, nothing
        )

    counts = ChoiceCounts()
    for seen in (
        step(1, (2.0, 5.0), (0, 1), (1, 2)),
        step(2, (1.0, 0.0), (3, 2)),
        step(1, (0.5, 0.0), (1, 3)),
        step(2, (4.0, 0.0), (3, 0)),
    ):
        counts.layer(seen)
    profile = counts.profile(top_k=2, n_prompts=2)
    assert profile.tokens_per_expert == {1: (1, 3, 1, 1), 2: (1, 0, 1, 2)}
    assert profile.saliency_per_expert == {1: (2.0, 7.5, 5.0, 0.5), 2: (4.0, 0.0, 1.0, 5.0)}
    assert (profile.top_k, profile.n_prompts) == (2, 2)
    assert profile.default_vectors_EH is None


def test_profile_cannot_be_changed() -> None:
    profile = Profile({0: (1, 1)}, top_k=1, n_prompts=1)
    with pytest.raises(AttributeError):
        profile.top_k = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        profile.tokens_per_expert[0] = (2, 2)  # type: ignore[index]


def test_a_profile_of_the_bundled_model_is_what_a_plain_loop_over_its_tensors_gives() -> None:
    """Experts in numpy from the file's own tensors; prompts that end inside a chunk."""
    checkpoint = load_checkpoint(BUNDLED, torch.float32)
    model, asked, recorder = Transformer(checkpoint), prompts(30, 17), Recorder()
    profile = profile_of(model, model.new_cache(), asked, prefill_chunk=16, default_vectors=True)
    cache = model.new_cache()
    with torch.inference_mode():
        for prompt in asked:
            cache.start(len(prompt))
            model.forward(torch.tensor(prompt), cache, dropless(), "prefill", recorder)

    tensors = load_file(BUNDLED_FOLDER / "tiny-qwen3-moe" / "model.safetensors")
    moe = checkpoint.config.moe
    assert moe is not None
    assert profile.default_vectors_EH is not None
    assert profile.saliency_per_expert is not None
    counts, saliency = Counter[tuple[int, int]](), defaultdict[tuple[int, int], float](float)
    outputs: dict[tuple[int, int], np.ndarray] = {}
    for seen in recorder.seen:
        for token, chosen in enumerate(seen.routing.expert_ids_TK.tolist()):
            x_H = seen.router_input_TH[token].double().numpy()
            for expert in chosen:
                root = f"model.layers.{seen.layer}.mlp.experts.{expert}."
                gate, up, down = (tensors[f"{root}{n}_proj.weight"].double().numpy() for n in ("gate", "up", "down"))
                gate_I = gate @ x_H
                key = seen.layer, expert
                outputs[key] = outputs.get(key, 0.0) + down @ (gate_I / (1 + np.exp(-gate_I)) * (up @ x_H))
                counts[key] += 1
                saliency[key] += float(seen.attention_norm_T[token])
    assert profile.n_tokens == 47
    assert sorted(profile.tokens_per_expert) == sorted(moe.sparse_layers)
    for layer, counted in profile.tokens_per_expert.items():
        assert counted == tuple(counts[layer, e] for e in range(moe.n_experts))
        assert profile.saliency_per_expert[layer] == pytest.approx([saliency[layer, e] for e in range(moe.n_experts)])
        for expert in range(moe.n_experts):
            expected = outputs.get((layer, expert), np.zeros(checkpoint.config.hidden)) / max(1, counts[layer, expert])
            got = profile.default_vectors_EH[layer][expert].numpy()
            assert np.abs(got - expected).max() <= 1e-5 * np.abs(expected).max(initial=1e-9)


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss", "llama4", "deepseek-v3"])
def test_default_vectors_of_other_families_follow_the_mixtures_definition(case: str, tmp_path: Path) -> None:
    """Biases, clamps, weights on the input, dense first layers: one token and one expert at a time."""
    write_family(tmp_path, CASES[case])
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    model, asked, recorder = Transformer(checkpoint), prompts(9, 5), Recorder()
    profile = profile_of(model, model.new_cache(), asked, prefill_chunk=64, default_vectors=True)
    cache = model.new_cache()
    with torch.inference_mode():
        for prompt in asked:
            cache.start(len(prompt))
            model.forward(torch.tensor(prompt), cache, dropless(), "prefill", recorder)

    sums: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)
    for seen in recorder.seen:
        mlp = model.weights.layers[seen.layer].mlp
        assert isinstance(mlp, SparseWeights)
        for token, chosen in enumerate(seen.routing.expert_ids_TK.tolist()):
            for choice, expert in enumerate(chosen):
                weight = seen.routing.weights_TK[token, choice] if mlp.experts.weights_input else torch.tensor(1.0)
                alone = Routing(torch.tensor([[expert]]), weight.view(1, 1), seen.routing.n_experts)
                sums[seen.layer, expert].append(mix_experts(seen.router_input_TH[token][None], alone, mlp.experts)[0])
    assert profile.default_vectors_EH is not None
    for layer, vectors_EH in profile.default_vectors_EH.items():
        for expert, vector_H in enumerate(vectors_EH):
            own = sums.get((layer, expert))
            if own is None:
                assert not vector_H.any()
            else:
                expected_H = torch.stack(own).double().mean(dim=0)
                assert (vector_H - expected_H).abs().max() <= 2e-5 * expected_H.abs().max()


def test_there_is_nothing_to_profile_without_prompts() -> None:
    model = Transformer(load_checkpoint(BUNDLED, torch.float32))
    with pytest.raises(EngineError, match="needs prompts"):
        profile_of(model, model.new_cache(), [], 16)
