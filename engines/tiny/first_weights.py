"""First weights with which a small model can copy from the beginning: heads that look back, and one induction head.

From random weights, heads that match a key with an earlier one and copy what follows it form late or never in the few
million tokens that two cores see in an hour. So the first layers begin as attention that looks a fixed number of
tokens back, and one later layer begins by matching what two positions have seen (Olsson et al. 2022, "In-context
learning and induction heads"; setting first weights to the shape that training finds: Trockman and Kolter 2023,
"Mimetic initialization of self-attention layers"). Everything stays trainable, and nothing is known yet: neither which
words are keys nor what a question asks.
"""

# H width, D width of a head, F = D / 2 planes that the rotary embedding turns, R rows, C columns.

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

OUTPUT_SCALE = 0.15
"""Of the random outputs of attention and experts: else they drown the embeddings, which are small."""
CONSTANT = 4.0
"""Of every embedding's first number, in standard deviations of the others: what heads that look back read."""
CONTENT_SCALE = 0.3
"""Of the other inputs of heads that look back."""
PLANE_RATIO = 0.75
"""Of the share that a plane has in looking back to that of the next faster one. At 0.75 and gain 1.5 such a head puts
0.9 of its attention on one token, up to 1000 tokens."""
SLOW_TURN = 2e-3
"""Radians a token: planes that turn slower hold what is matched, wherever it stands; the others hardly count."""
BACK = {0: (1, 2, 3, 4), 1: (1, 2, None, None), 3: (4, 5, None, None)}
"""Layer -> for each head the number of tokens it looks back; None: a random head. In the last layer from where a
prompt asks for its answer to the end of the question, at which the layer before has matched something."""
CARRIER, MATCHER = 1, 2
"""The layer whose first head carries what the token before has seen, and the layer whose first heads match it."""


def set_copying_weights(model: Any, seed: int) -> None:
    """Changes the weights of a new Qwen3-MoE model of transformers in place, in fp32.

    ValueError: the model has not four query heads on two key heads, or fewer than four layers.
    """
    config = model.config
    shape = (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers)
    if shape[:2] != (4, 2) or config.num_hidden_layers <= max(BACK):
        raise ValueError(
            "copying weights are for 4 query heads on 2 key heads in 4 layers or more, not for {} on {} in {}".format(
                *shape
            )
        )
    random = torch.Generator().manual_seed(seed)
    embedding_std = config.initializer_range
    layers = model.model.layers
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = CONSTANT * embedding_std
        for layer in layers:
            layer.self_attn.o_proj.weight.mul_(OUTPUT_SCALE)
            layer.mlp.experts.down_proj.mul_(OUTPUT_SCALE)
        for index, distances in BACK.items():
            _carry(layers[index].self_attn, config, random)
            _look_back(layers[index].self_attn, distances, config)
        _match(layers[CARRIER].self_attn, layers[MATCHER].self_attn, config, random)


def _look_back(attention: Any, distances: tuple[int | None, ...], config: Any) -> None:
    """Queries and keys that are constant: the rotary embedding alone decides, and is largest at the distance."""
    width = config.head_dim
    turn_F = _turns(config)
    share_F = PLANE_RATIO ** torch.arange(width // 2)
    size_F = torch.sqrt(share_F / share_F.sum() * width) / 2
    group = config.num_attention_heads // config.num_key_value_heads
    for head, distance in enumerate(distances):
        if distance is None:
            continue
        key_DH = _rows(attention.k_proj, head // group, width)
        query_DH = _rows(attention.q_proj, head, width)
        if head % group == 0:
            key_DH.mul_(CONTENT_SCALE)
            key_DH[:, 0] = torch.cat([size_F, torch.zeros_like(size_F)])
        query_DH.mul_(CONTENT_SCALE)
        query_DH[:, 0] = torch.cat([size_F * torch.cos(distance * turn_F), -size_F * torch.sin(distance * turn_F)])


def _carry(attention: Any, config: Any, random: torch.Generator) -> None:
    """Every head adds a random projection of what it reads, as large as an embedding."""
    width = config.head_dim
    for head in range(config.num_key_value_heads):
        _rows(attention.v_proj, head, width).copy_(_orthonormal(config.hidden_size, width, random).T)
    for head in range(config.num_attention_heads):
        _columns(attention.o_proj, head, width).copy_(
            config.initializer_range * _orthonormal(config.hidden_size, width, random)
        )


def _match(carrier: Any, matcher: Any, config: Any, random: torch.Generator) -> None:
    """Queries read what the carrier's first head reads, keys what it wrote: a position is matched with the one after
    an equal one, whose content is added to the output."""
    width = config.head_dim
    slow_D = torch.where(_turns(config) < SLOW_TURN, 1.0, CONTENT_SCALE).repeat(2)
    read_DH = _rows(carrier.v_proj, 0, width)
    written_DH = _columns(carrier.o_proj, 0, width).T / config.initializer_range
    query_DH, key_DH = slow_D[:, None] * read_DH, slow_D[:, None] * written_DH
    # The constant of all embeddings would match everywhere.
    query_DH[:, 0] = key_DH[:, 0] = 0
    _rows(matcher.k_proj, 0, width).copy_(key_DH)
    copied_HD = _orthonormal(config.hidden_size, width, random)
    _rows(matcher.v_proj, 0, width).copy_(copied_HD.T)
    for head in range(config.num_attention_heads // config.num_key_value_heads):
        _rows(matcher.q_proj, head, width).copy_(query_DH)
        _columns(matcher.o_proj, head, width).copy_(2 * config.initializer_range * copied_HD)


def _turns(config: Any) -> Tensor:
    """[F] radians by which the rotary embedding turns each plane from one token to the next."""
    n_planes = config.head_dim // 2
    base = config.rope_parameters["rope_theta"]
    return torch.exp(-math.log(base) * torch.arange(n_planes) / n_planes)


def _orthonormal(rows: int, columns: int, random: torch.Generator) -> Tensor:
    columns_RC: Tensor = torch.linalg.qr(torch.randn(rows, columns, generator=random)).Q
    return columns_RC


def _rows(linear: Any, head: int, width: int) -> Tensor:
    block: Tensor = linear.weight[head * width : (head + 1) * width]
    return block


def _columns(linear: Any, head: int, width: int) -> Tensor:
    block: Tensor = linear.weight[:, head * width : (head + 1) * width]
    return block
