"""Rotary position embedding: how far each pair of features is turned at each position, and the turning.

Legend: P pairs of features, T tokens, S positions, N heads, D head_dim.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from engines.model.rope_config import LinearScaling, Llama3Scaling, LongScaling, RopeConfig, YarnScaling


@lru_cache(maxsize=16)
def rope_frequencies(config: RopeConfig, n_positions: int) -> tuple[Tensor, float]:
    """Angle per position of each feature pair, in radian: theta^(-2i/dim), scaled where the config says so; and the
    amplitude that multiplies cosine and sine.

    Every step is rounded in the order in which transformers computes it: at position 100 000 the last bit of a
    frequency is a hundredth of a radian.

    n_positions: the length that decides between LongRoPE's two sets, once for a whole sequence (`LongRope`).
    """
    exponent_P = torch.arange(0, config.dim, 2, dtype=torch.int64).float() / config.dim
    radix_P = config.theta**exponent_P
    scaling = config.scaling
    if isinstance(scaling, LinearScaling):
        return 1.0 / radix_P / scaling.factor, 1.0
    if isinstance(scaling, Llama3Scaling):
        return _llama3_scaled(1.0 / radix_P, scaling), 1.0
    if isinstance(scaling, YarnScaling):
        return _yarn_scaled(radix_P, scaling, config), scaling.amplitude
    if isinstance(scaling, LongScaling):
        is_long = n_positions > scaling.original_max_length
        factors_P = torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
        return 1.0 / (factors_P * radix_P), scaling.long_amplitude if is_long else scaling.short_amplitude
    return 1.0 / radix_P, 1.0


def _llama3_scaled(frequency_P: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1: divide by `factor` the frequencies that turn less than `low_freq_factor` times over the original
    length, keep those that turn more than `high_freq_factor` times, and interpolate linearly between."""
    turns_P = scaling.original_max_length / (2 * math.pi / frequency_P)
    ramp_P = (turns_P - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_P = ramp_P.clamp(0.0, 1.0)
    return (1.0 - kept_P) * frequency_P / scaling.factor + kept_P * frequency_P


def _yarn_scaled(radix_P: Tensor, scaling: YarnScaling, config: RopeConfig) -> Tensor:
    """radix_P: theta^(2i/dim), one over which is the frequency as it is without scaling."""

    def pair_that_turns(n_turns: float) -> float:
        """Index of the pair that turns n times over the original length: theta^(-2i/dim) * length = 2 pi n."""
        return (
            config.dim * math.log(scaling.original_max_length / (2 * math.pi * n_turns)) / (2 * math.log(config.theta))
        )

    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.dim - 1)
    if first == last:  # they would divide by zero; the published code widens them by this much
        last += 0.001
    ramp_P = ((torch.arange(radix_P.shape[0], dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    kept_P = 1.0 - ramp_P
    return 1.0 / (scaling.factor * radix_P) * (1.0 - kept_P) + 1.0 / radix_P * kept_P


def rotation(frequency_P: Tensor, amplitude: float, position: int, n_tokens: int) -> tuple[Tensor, Tensor]:
    """cos_TP and sin_TP of n_tokens from `position` on."""
    positions_T = torch.arange(position, position + n_tokens, dtype=torch.float32)
    angle_TP = torch.outer(positions_T, frequency_P)
    return angle_TP.cos() * amplitude, angle_TP.sin() * amplitude


BLOCK = 64
"""Positions whose rotations are computed at once, at least."""


class Rotations:
    """cos_SP and sin_SP of all positions from 0 on, as far as anybody asked.

    Kept, for torch computes them on all its threads, which would be woken in each prompt.
    """

    def __init__(self, frequency_P: Tensor, amplitude: float) -> None:
        self._frequency_P, self._amplitude = frequency_P, amplitude
        self._made = rotation(frequency_P, amplitude, 0, BLOCK)

    def up_to(self, end: int) -> tuple[Tensor, Tensor]:
        """With `end` rows or more. What was given once stays as it is."""
        cos_SP, sin_SP = self._made
        n_made = len(cos_SP)
        if n_made < end:
            n_wanted = 1 << (end - 1).bit_length()
            cos_TP, sin_TP = rotation(self._frequency_P, self._amplitude, n_made, n_wanted - n_made)
            self._made = torch.cat([cos_SP, cos_TP]), torch.cat([sin_SP, sin_TP])
        return self._made


@lru_cache(maxsize=16)
def _rotations(config: RopeConfig, n_positions: int) -> Rotations:
    return Rotations(*rope_frequencies(config, n_positions))


class Turns:
    """How the tokens of one sequence are turned. It holds what it was given last: looking that up by its configuration
    takes a microsecond."""

    def __init__(self, config: RopeConfig, n_positions: int) -> None:
        """n_positions: of `rope_frequencies`."""
        scaling = config.scaling
        original = scaling.original_max_length if isinstance(scaling, LongScaling) else 0
        # All lengths on one side of the original one have the same rotations.
        self._rotations = _rotations(config, original + (n_positions > original))
        self._made = self._rotations.up_to(1)

    def up_to(self, end: int) -> tuple[Tensor, Tensor]:
        """cos_SP and sin_SP of the tokens before `end`, and of more."""
        if end > len(self._made[0]):
            self._made = self._rotations.up_to(end)
        return self._made

    def at(self, position: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """cos_TP and sin_TP of the tokens from `position` on."""
        cos_SP, sin_SP = self.up_to(position + n_tokens)
        return cos_SP[position : position + n_tokens], sin_SP[position : position + n_tokens]


def turn(x_NTD: Tensor, cos_TP: Tensor, sin_TP: Tensor, pairs: Literal["halves", "neighbours"]) -> Tensor:
    """Turns the first 2P features of each head and leaves the rest.

    Neighbours come out un-interleaved, first members before second ones: queries and keys are permuted alike, so that
    their products are the same.
    """
    n_turned = 2 * cos_TP.shape[-1]
    turned_NTD = x_NTD[..., :n_turned]
    first, second = turned_NTD.chunk(2, dim=-1) if pairs == "halves" else (turned_NTD[..., 0::2], turned_NTD[..., 1::2])
    parts = [first * cos_TP - second * sin_TP, second * cos_TP + first * sin_TP]
    return torch.cat([*parts, x_NTD[..., n_turned:]], dim=-1)
