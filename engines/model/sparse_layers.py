"""Which layers of a `config.json` have experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from engines.model.config_values import ConfigError, per_layer, positive_whole, told, whole, wholes

N_LAYERS = "num_hidden_layers"
FIRST_DENSE, FREQUENCY = "first_k_dense_replace", "moe_layer_freq"
STEPS = ("decoder_sparse_step", "interleave_moe_layer_step")
LISTED_DENSE, LISTED_SPARSE, KINDS = "mlp_only_layers", "moe_layers", "mlp_layer_types"


def sparse_layers(raw: Mapping[str, Any], n_layers: int, said: Collection[str]) -> tuple[int, ...]:
    """Families count dense layers in their own ways: a list of kinds, a list of layers, the first few, or a step.

    `said`: keys that the file has. A family's own value may lie beyond a small model, which is dense then. None need be
    left with experts: transformers computes such a model too.
    """
    return tuple(_sparse(raw, n_layers, said))


def _sparse(raw: Mapping[str, Any], n_layers: int, said: Collection[str]) -> Iterator[int]:
    if raw.get(KINDS) is not None:
        kinds = per_layer(raw[KINDS], KINDS, n_layers)
        if others := [kind for kind in kinds if kind not in ("sparse", "dense")]:
            raise ConfigError(f"{KINDS} must be sparse or dense, found {told(others[0])}", KINDS)
        yield from (layer for layer, kind in enumerate(kinds) if kind == "sparse")
        return
    if raw.get(LISTED_SPARSE) is not None:
        yield from sorted(_own_layers(raw, LISTED_SPARSE, n_layers))
        return
    first_sparse = whole(raw, FIRST_DENSE, 0)
    frequency = positive_whole(raw, FREQUENCY) if FREQUENCY in raw else 1
    step_key = next((key for key in STEPS if key in raw), None)
    step = 1 if step_key is None else positive_whole(raw, step_key)
    for key, value in ((FIRST_DENSE, first_sparse), (FREQUENCY, frequency), (step_key, step)):
        if key is not None and key in said and value > n_layers:
            raise ConfigError(f"{key} {value} is more than num_hidden_layers {n_layers}", key, N_LAYERS)
    dense = _own_layers(raw, LISTED_DENSE, n_layers)
    for layer in range(first_sparse, n_layers):
        if layer not in dense and layer % frequency == 0 and (layer + 1) % step == 0:
            yield layer


def _own_layers(raw: Mapping[str, Any], key: str, n_layers: int) -> set[int]:
    """Listed by their numbers."""
    listed = wholes(raw, key)
    if beyond := [layer for layer in listed if layer >= n_layers]:
        words = f"{key} names layer {beyond[0]}, and num_hidden_layers {n_layers} ends at {n_layers - 1}"
        raise ConfigError(words, key, N_LAYERS)
    if twice := [layer for layer, n in Counter(listed).items() if n > 1]:
        raise ConfigError(f"{key} names layer {twice[0]} more than once; name it once", key)
    return set(listed)
