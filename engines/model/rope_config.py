"""What a config says of rotary position embedding: its parameters under all their names, checked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from engines.model.config_keys import GPT_OSS_ROPE
from engines.model.config_values import (
    ConfigError,
    numbers,
    optional_number,
    positive_number,
    positive_whole,
    switch,
    table,
    told,
)

TABLES = ("rope_parameters", "rope_scaling")
ORIGINAL = "original_max_position_embeddings"
OF_TURNED = ("head_dim", "hidden_size", "num_attention_heads", "partial_rotary_factor", "qk_rope_head_dim")
"""What says how many features of a head are turned."""

KEYS_OF_TYPE: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", ORIGINAL}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"} | {ORIGINAL}
    ),
    "longrope": frozenset({"factor", "attention_factor", "short_factor", "long_factor", ORIGINAL}),
}
KEYS_OF_TYPE["su"] = KEYS_OF_TYPE["longrope"]
GIVEN_AMPLITUDES = frozenset({"short_mscale", "long_mscale"})
"""Of LongRoPE whose config holds them."""
KEYS_OF_ROPE = GIVEN_AMPLITUDES.union(*KEYS_OF_TYPE.values())


@dataclass(frozen=True)
class LinearScaling:
    """Positions are divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rope scaling: long wavelengths are stretched by `factor`, short ones kept, a ramp in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, §3): pairs that turn more than `beta_fast` times over the original length are kept, those
    that turn less than `beta_slow` times are stretched by `factor`, a ramp over the pairs' index in between.

    truncate: the ramp starts and ends at whole indices. amplitude multiplies cosine and sine.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_length: int
    truncate: bool
    amplitude: float


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE as the Phi family has it: each pair's wavelength is stretched by a factor of its own, one set of factors
    for sequences up to the original length and one for longer ones.

    gives_amplitudes: the config holds them, as Phi-3.5-MoE's does. Of that model transformers 5.23 takes the long
    amplitude and the short factors beyond the original length, where its own code takes both long, and so do we:
    `as_transformers` has the other.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    short_amplitude: float
    long_amplitude: float
    original_max_length: int
    gives_amplitudes: bool = False


LongRope = Literal["at_once", "when_reached"]
"""Which length decides between LongRoPE's two sets of factors.

at_once: the most that a sequence may reach, prompt and asked tokens together; so nothing is computed twice, and what a
token gets does not depend on how many came after it. when_reached: as transformers has it, the prompt's length, and
once the sequence grows beyond the original length, everything before is computed again with the long factors. They
agree wherever a sequence does not grow across the original length.
"""


@dataclass(frozen=True)
class RopeConfig:
    """dim: how many features of a head are turned, the first ones. pairs: i with i + dim/2, or with its neighbour."""

    theta: float
    dim: int
    pairs: Literal["halves", "neighbours"]
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongScaling | None


def read_rope(
    raw: Mapping[str, Any],
    head_dim: int,
    pairs: Literal["halves", "neighbours"],
    kinds: Sequence[str],
    gives_amplitudes: bool = False,
) -> RopeConfig:
    """From `rope_parameters` (since transformers 5) or `rope_theta` and `rope_scaling` (before).

    kinds: the types that the family has. gives_amplitudes: LongRoPE's parameters must hold them. A family that turns
    whole heads has no `partial_rotary_factor`.
    """
    rope = rope_table(raw)
    if any(isinstance(value, Mapping) for value in rope.values()):
        words = f"rope_parameters for each of {', '.join(rope)} not supported; this engine turns all layers alike"
        raise ConfigError(words, *TABLES)
    kind = _kind(rope, kinds, gives_amplitudes)
    theta = positive_number(rope, "rope_theta", positive_number(raw, "rope_theta"))
    if theta <= 1:
        raise ConfigError(f"rope_theta {theta} must be above 1; rotary embedding turns by its powers", "rope_theta")
    share = optional_number(rope if "partial_rotary_factor" in rope else raw, "partial_rotary_factor")
    if share not in (None, 1) and "partial_rotary_factor" not in raw:
        words = f"partial_rotary_factor {share} not supported; this family turns all features of a head"
        raise ConfigError(words, "partial_rotary_factor")
    dim = int(head_dim * (1.0 if share is None else min(share, 2.0)))
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(
            f"head_dim {head_dim} and partial_rotary_factor {share} turn {dim} features of a head; rotary embedding"
            f" turns an even number of them, 2 to {head_dim} (where there is no head_dim, it is hidden_size /"
            " num_attention_heads; in latent attention, qk_rope_head_dim)",
            *OF_TURNED,
        )
    return RopeConfig(theta, dim, pairs, _scaling(kind, rope, raw, dim // 2, gives_amplitudes))


def rope_table(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says of rope, by either name."""
    rope, scaling = table(raw, "rope_parameters"), table(raw, "rope_scaling")
    if scaling and rope not in ({}, scaling, GPT_OSS_ROPE):
        raise ConfigError(
            f"rope_scaling {told(scaling)} contradicts rope_parameters {told(rope)}; keep the one that the model was"
            " trained with",
            *TABLES,
        )
    return scaling or rope


def _kind(rope: Mapping[str, Any], kinds: Sequence[str], gives_amplitudes: bool) -> str:
    """The type, once each parameter is known to be one of it: transformers leaves out others with a warning."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in kinds:
        raise ConfigError(
            f"rope type {told(kind)} not supported; this engine has {', '.join(kinds)} for this family (rope_type)",
            *TABLES,
        )
    known = {"rope_type", "type", "rope_theta", "partial_rotary_factor"} | KEYS_OF_TYPE[kind]
    known |= GIVEN_AMPLITUDES if gives_amplitudes and kind != "default" else frozenset()
    for key, value in rope.items():
        if key not in known and value is not None:
            raise ConfigError(
                f"{told(key)} is {told(value)}, but rope of type {kind} (rope_type) has no such parameter; remove it if"
                " the model was trained without it",
                key,
            )
    return kind


def _scaling(
    kind: str, rope: Mapping[str, Any], raw: Mapping[str, Any], n_pairs: int, gives_amplitudes: bool
) -> LinearScaling | Llama3Scaling | YarnScaling | LongScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(positive_number(rope, "factor"))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=positive_number(rope, "factor"),
            low_freq_factor=positive_number(rope, "low_freq_factor"),
            high_freq_factor=positive_number(rope, "high_freq_factor"),
            original_max_length=_original_length(rope, raw),
        )
        if scaling.low_freq_factor > scaling.high_freq_factor:
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            words = f"low_freq_factor {low} must not exceed high_freq_factor {high}"
            raise ConfigError(words, "low_freq_factor", "high_freq_factor")
        return scaling
    return _yarn(rope, raw) if kind == "yarn" else _long(rope, raw, n_pairs, gives_amplitudes)


def _original_length(rope: Mapping[str, Any], raw: Mapping[str, Any], only_inside: bool = False) -> int:
    """The length before stretching, which stands in the parameters, or beside them, or is the model's own.

    only_inside: what stands beside them may only repeat it, for this family's code does not look there.
    """
    key = ORIGINAL
    own = positive_whole(raw, "max_position_embeddings")
    inside = None if rope.get(key) is None and not only_inside else positive_whole(rope, key, own)
    beside = None if raw.get(key) is None else positive_whole(raw, key)
    if inside is not None and beside is not None and inside != beside:
        raise ConfigError(
            f"{key} is {beside}, and {inside} among the parameters of rope; keep the one that the model was trained"
            " with",
            key,
            "max_position_embeddings",
        )
    return inside or beside or own


def _yarn(rope: Mapping[str, Any], raw: Mapping[str, Any]) -> YarnScaling:
    factor = positive_number(rope, "factor")
    amplitude = optional_number(rope, "attention_factor")
    if amplitude is None:
        amplitude = yarn_amplitude(factor)
        # 0 switches either off, and both with it.
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            above, below = positive_number(rope, "mscale"), positive_number(rope, "mscale_all_dim")
            amplitude = yarn_amplitude(factor, above) / yarn_amplitude(factor, below)
    return YarnScaling(
        factor=factor,
        beta_fast=positive_number(rope, "beta_fast", 32.0),
        beta_slow=positive_number(rope, "beta_slow", 1.0),
        original_max_length=_original_length(rope, raw),
        truncate=switch(rope, "truncate", True),
        amplitude=amplitude,
    )


def yarn_amplitude(factor: float, strength: float = 1.0) -> float:
    """YaRN Eq. 22: 0.1 ln(factor) + 1, and DeepSeek's `mscale` as a strength on the logarithm."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def _long(rope: Mapping[str, Any], raw: Mapping[str, Any], n_pairs: int, gives_amplitudes: bool) -> LongScaling:
    original = _original_length(rope, raw, only_inside=gives_amplitudes)
    if original < 2:
        raise ConfigError(f"{ORIGINAL} must be 2 or more, found {original}", ORIGINAL, "max_position_embeddings")
    amplitude = optional_number(rope, "attention_factor")
    if amplitude is None:
        stretch = positive_number(rope, "factor", positive_whole(raw, "max_position_embeddings") / original)
        amplitude = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    whose = "one for each pair of turned features of a head (head_dim, or hidden_size / num_attention_heads; times "
    whose += "partial_rotary_factor)"
    return LongScaling(
        short_factors=numbers(rope, "short_factor", n_pairs, whose, OF_TURNED),
        long_factors=numbers(rope, "long_factor", n_pairs, whose, OF_TURNED),
        short_amplitude=positive_number(rope, "short_mscale") if gives_amplitudes else amplitude,
        long_amplitude=positive_number(rope, "long_mscale") if gives_amplitudes else amplitude,
        original_max_length=original,
        gives_amplitudes=gives_amplitudes,
    )


def as_transformers(rope: RopeConfig) -> RopeConfig:
    """With the factors that transformers takes beyond LongRoPE's original length: see `LongScaling`."""
    scaling = rope.scaling
    if not isinstance(scaling, LongScaling) or not scaling.gives_amplitudes:
        return rope
    return replace(rope, scaling=replace(scaling, long_factors=scaling.short_factors))
