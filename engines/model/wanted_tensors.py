"""What a checkpoint must hold, and what its matrices can be made of: names and shapes, without a value."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.architecture import ModelConfig
from engines.model.attention import why_torch_attends
from engines.model.load_weights import load_weights
from engines.model.quantised import Quantisation
from engines.model.single_tensors import Part, Shape

LARGEST_TENSOR = 2**44
"""Values of a tensor beyond which a config lies: 64 TB in fp32."""


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this architecture holds, by its Hugging Face name."""
    shapes: dict[str, Shape] = {}

    def note(name: str, shape: Shape, part: Part = ()) -> Tensor:
        shapes[name] = shape
        return _nothing(name, shape)

    load_weights(config, note, torch.float32)
    return shapes


def components_of(config: ModelConfig) -> list[str]:
    """Those of `Quantisation` that the model has."""
    moe = config.moe
    has_dense = moe is None or moe.shared is not None or len(moe.sparse_layers) < config.n_layers
    return [*(["experts"] if moe is not None else []), *(["dense"] if has_dense else []), "attention", "head"]


def check_quantisation(config: ModelConfig, quantise: Quantisation, where: str = "quantise.") -> None:
    """Raises `EngineError` on a form that a matrix cannot take, or for a component that the model does not have.

    where: the way to a component, in the words in which it was asked.
    """
    there = components_of(config)
    if quantise.experts is not None and "experts" not in there:
        raise EngineError(f"{where}experts has no effect, for the model is dense; name dense instead")
    if quantise.dense is not None and "dense" not in there:
        raise EngineError(f"{where}dense has no effect: no layer is dense and there is no shared expert; remove it")
    reasons = [why_torch_attends(config, layer) for layer in range(config.n_layers)]
    by_torch = f"torch computes this model's attention ({next(filter(None, reasons), None)})"
    if quantise.rounds_attention and all(reasons):
        raise EngineError(f"{where}attention_arithmetic: {by_torch}, and would only imitate it; remove it")
    if quantise.attention_arithmetic == "fp32" and config.attention.latent is not None:
        raise EngineError(f"{where}attention_arithmetic has no effect: latent attention stays fp32; remove it")
    if quantise.cache != "fp32" and any(reasons):
        raise EngineError(f"{where}cache: {by_torch}, and would widen it for each token; remove it")
    load_weights(config, _nothing, torch.float32, quantise)


def _nothing(name: str, shape: Shape, part: Part = ()) -> Tensor:
    """A tensor of this shape without values."""
    if math.prod(shape) > LARGEST_TENSOR:
        raise EngineError(f"config.json asks for a tensor {name!r} of {shape}; no file holds one as large")
    return torch.empty(shape, device="meta")
