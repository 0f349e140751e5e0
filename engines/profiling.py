"""Counts a profile: prompts are read as a prefill without any technique, and each sparse layer is watched.

Legend: T tokens, K experts per token, E experts, H hidden, P = T * K pairs, C tokens that chose one expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engines.answers import Limits, check_prompt
from engines.errors import EngineError
from engines.model.experts import ExpertWeights, gated_ffn
from engines.model.transformer import KeyValueCache, Transformer
from engines.model.weights import ModelWeights, SparseWeights
from engines.observers import LayerObserver, SparseLayerStep
from engines.profile import Profile
from engines.techniques.base import Technique
from engines.techniques.presets import dropless


class ChoiceCounts:
    """A layer observer that counts how often each expert is chosen, and by how salient tokens."""

    def __init__(self, weights: ModelWeights | None = None) -> None:
        """weights: of the model that is watched, to compute each expert's own output for its default vector."""
        self._weights = weights
        self._counts: dict[int, Tensor] = {}
        self._saliency: dict[int, Tensor] = {}
        self._outputs: dict[int, Tensor] = {}

    def layer(self, seen: SparseLayerStep) -> None:
        routing = seen.routing
        counts_E = routing.tokens_per_expert_E()
        self._counts[seen.layer] = self._counts.get(seen.layer, 0) + counts_E
        norm_P = seen.attention_norm_T.cpu().double().repeat_interleave(routing.expert_ids_TK.shape[1])
        saliency_E = torch.zeros(routing.n_experts, dtype=torch.float64)
        saliency_E.index_add_(0, routing.expert_ids_TK.reshape(-1).cpu(), norm_P)
        self._saliency[seen.layer] = self._saliency.get(seen.layer, 0) + saliency_E
        if self._weights is not None:
            mlp = self._weights.layers[seen.layer].mlp
            assert isinstance(mlp, SparseWeights)  # only sparse layers are told
            self._outputs[seen.layer] = self._outputs.get(seen.layer, 0) + _summed_outputs_EH(seen, mlp.experts)

    def profile(self, top_k: int, n_prompts: int) -> Profile:
        layers = sorted(self._counts)
        vectors = {
            layer: (self._outputs[layer] / self._counts[layer].cpu().clamp_min(1)[:, None]).float() for layer in layers
        } if self._weights is not None else None  # fmt: skip
        return Profile(
            {layer: tuple(self._counts[layer].tolist()) for layer in layers},
            top_k,
            n_prompts,
            {layer: tuple(self._saliency[layer].tolist()) for layer in layers},
            vectors,
        )


def _summed_outputs_EH(seen: SparseLayerStep, experts: ExpertWeights) -> Tensor:
    """Each expert's own output, summed over the tokens that chose it, in fp64."""
    ids_TK, weights_TK = seen.routing.expert_ids_TK, seen.routing.weights_TK
    sums_EH = torch.zeros(seen.routing.n_experts, seen.router_input_TH.shape[1], dtype=torch.float64)
    for expert in seen.routing.tokens_per_expert_E().nonzero()[:, 0].tolist():
        token_C, choice_C = (ids_TK == expert).nonzero(as_tuple=True)
        rows_CH = seen.router_input_TH[token_C]
        if experts.weights_input:
            rows_CH = (rows_CH * weights_TK[token_C, choice_C, None]).to(rows_CH.dtype)
        outputs_CH = gated_ffn(rows_CH.contiguous(), experts.experts[expert], experts.unit)
        sums_EH[expert] = outputs_CH.cpu().double().sum(dim=0)
    return sums_EH


def profile_of(
    model: Transformer,
    cache: KeyValueCache,
    prompts: Sequence[Sequence[int]],
    prefill_chunk: int,
    default_vectors: bool = False,
    on_prompt: Callable[[], object] = lambda: None,
    also: LayerObserver | None = None,
    technique: Technique | None = None,
) -> Profile:
    """The true choices over the prompts' prefill. on_prompt: told after each. Raises `EngineError`.

    cache: what the prompts are read into. default_vectors: compute them too, which costs as much as the experts again.
    also: is shown each layer before it is counted.
    technique: one that drops nothing; None: `dropless`.
    """
    config = model.config
    if config.moe is None or not prompts:
        raise EngineError(f"calibration needs prompts, got {len(prompts)}; take some that no window asks")
    counts = ChoiceCounts(model.weights if default_vectors else None)
    observers = [counts] if also is None else [also, counts]
    read_prompts(model, cache, prompts, prefill_chunk, observers, on_prompt, technique)
    return counts.profile(config.moe.top_k, len(prompts))


@torch.inference_mode()
def read_prompts(
    model: Transformer,
    cache: KeyValueCache,
    prompts: Sequence[Sequence[int]],
    prefill_chunk: int,
    observers: Sequence[LayerObserver],
    on_prompt: Callable[[], object] = lambda: None,
    technique: Technique | None = None,
) -> None:
    """Prefills prompts without any technique, or with one that drops nothing, for who looks on. on_prompt: told after
    each. Raises `EngineError`."""
    limits = Limits(model.config.max_length, model.config.vocabulary_size)
    for number, prompt in enumerate(prompts, 1):
        check_prompt(prompt, limits, f"calibration prompt {number}")
        cache.start(len(prompt))
        for chunk_T in torch.split(torch.tensor(prompt), prefill_chunk):
            model.forward(chunk_T, cache, technique or dropless(), "prefill", _All(observers))
        on_prompt()


class _All:
    """Several observers as one."""

    def __init__(self, observers: Sequence[LayerObserver]) -> None:
        self._observers = observers

    def layer(self, seen: SparseLayerStep) -> None:
        for observer in self._observers:
            observer.layer(seen)
