"""How large a model is as an engine holds it: parameters, and bytes in the form in which they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import NamedTuple

import torch

from engines.base import HeldWeights
from engines.model.attention import AttentionWeights, LatentWeights
from engines.model.experts import ExpertWeights
from engines.model.quantised import Arithmetic, AttentionArithmetic, CacheForm, QuantisedMatrix
from engines.model.weights import LayerWeights, ModelWeights, SparseWeights
from results.records import ActiveWeights


def held_weights(weights: object) -> HeldWeights:
    """Of every tensor in a tree of dataclasses and tuples. One that stands in two places (tied embeddings) counts once.

    A narrowed matrix has as many parameters as the matrix that it stands for; its bytes include its scales. A tied head
    that is narrowed has bytes of its own, but its parameters are the embedding's.
    """
    copy = weights.head_LH if isinstance(weights, ModelWeights) and weights.head_is_copy else None
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for matrix in _matrices(weights):
        data = matrix.values if isinstance(matrix, QuantisedMatrix) else matrix
        seen[data.data_ptr(), data.nbytes] = 0 if matrix is copy else matrix.shape.numel(), matrix.nbytes
    return HeldWeights(sum(n for n, _ in seen.values()), sum(b for _, b in seen.values()))


def rounds_inputs(weights: object) -> Arithmetic | None:
    """The arithmetic of products with some of them that round their inputs; None where none does."""
    found = (matrix.arithmetic for matrix in _matrices(weights) if isinstance(matrix, QuantisedMatrix))
    return next((arithmetic for arithmetic in found if arithmetic != "fp32"), None)


class Rounding(NamedTuple):
    """What is rounded of an engine, and to what; None: nothing."""

    products: Arithmetic | None
    """Inputs of products with some matrices."""
    attention: AttentionArithmetic | None
    """What attention of more than one token multiplies, where that is not as products: "fp32" beside those in bf16."""
    cache: CacheForm | None
    """Keys and values as they are kept."""


def rounding_of(weights: ModelWeights) -> Rounding:
    products = rounds_inputs(weights)
    layers = [one.attention for one in weights.layers if isinstance(one.attention, AttentionWeights)]
    found = (attention.arithmetic for attention in layers if attention.arithmetic != "fp32")
    attention: AttentionArithmetic | None = next(found, "fp32" if products == "bf16" else None)
    forms: dict[torch.dtype, CacheForm] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    return Rounding(products, attention, forms.get(weights.kept))


def remedy(weights: object) -> str:
    """What may help where logits are no numbers: what is narrow here, held wider; then the damage."""
    found = []
    if any(isinstance(matrix, torch.Tensor) and matrix.dtype is torch.float16 for matrix in _matrices(weights)):
        found.append("hold weights in bfloat16 or float32, for float16 ends at 65504")
    if (arithmetic := rounds_inputs(weights)) is not None:
        found.append(f"leave arithmetic {arithmetic} out")
    if isinstance(weights, ModelWeights) and weights.kept is torch.float16:
        found.append("keep the cache in bf16 or fp32, for fp16 ends at 65504")
    return ", or ".join([*found, "fetch the model again"])


def active_weights(weights: ModelWeights, top_k: int, leaves_out: bool = False) -> ActiveWeights:
    """Those that one token needs. top_k: experts that a layer's router chooses. leaves_out: whether the last layer
    computes keys and values alone of a prompt's tokens that nobody asks about."""
    n_parameters, n_bytes = held_weights(weights.norm)
    before_last = 0
    for layer in weights.layers:
        before_last = n_parameters
        experts = layer.mlp.experts if isinstance(layer.mlp, SparseWeights) else None
        own = held_weights(layer)
        n_parameters, n_bytes = n_parameters + own.n_parameters, n_bytes + own.n_bytes
        if experts is not None:
            # All experts of a layer are of one size.
            all_of_them, n_left_out = held_weights(experts), len(experts.experts) - top_k
            n_parameters -= all_of_them.n_parameters * n_left_out // len(experts.experts)
            n_bytes -= all_of_them.n_bytes * n_left_out // len(experts.experts)
    head = held_weights((weights.head_LH, weights.head_bias_L))
    return ActiveWeights(
        n_parameters=n_parameters,
        n_bytes=n_bytes,
        head_parameters=head.n_parameters,
        head_bytes=head.n_bytes,
        prompt_parameters=before_last + _of_keys_and_values(weights.layers[-1]) if leaves_out else None,
    )


def _of_keys_and_values(layer: LayerWeights) -> int:
    """Parameters that they need, with the norm before them."""
    own = layer.attention
    if isinstance(own, LatentWeights):
        needed: tuple[object, ...] = (own.kv_down_RH, own.kv_norm)
    else:
        needed = (own.k_MH, own.v_MH, own.k_bias_M, own.v_bias_M, own.k_norm)
    return held_weights((layer.attention_norm, needed)).n_parameters


def _matrices(held: object) -> Iterator[torch.Tensor | QuantisedMatrix]:
    if isinstance(held, torch.Tensor | QuantisedMatrix):
        if held.shape.numel():
            yield held
    elif isinstance(held, list | tuple):
        for one in held:
            yield from _matrices(one)
    elif isinstance(held, ExpertWeights):
        # Where they are moved to an accelerator, they are parts of stacks, which count no second time.
        yield from _matrices(held.experts)
    elif is_dataclass(held):
        for field in fields(held):
            yield from _matrices(getattr(held, field.name))
