"""Sizes of models that decide what they cost: of the one that computes, and of published ones by name."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from engines.errors import EngineError
from engines.model.model_config import CONFIG_FILE, ModelConfig, config_in, read_json
from engines.model.quantised import Quantisation, bits_of_value
from engines.model.spans import Span
from engines.pricing.model_shape import LatentShape, WeightBits
from engines.pricing.model_shape import ModelShape as ModelShape
from engines.pricing.published_shapes import NAMED_SHAPES as NAMED_SHAPES
from engines.techniques.context import ModelSizes


def own_shape(name: str, config: ModelConfig) -> ModelShape:
    """The shape of the model that computes, or of a published config."""
    moe, latent = config.moe, config.attention.latent
    mixes = moe is not None and len(moe.sparse_layers) < config.n_layers
    return ModelShape(
        name=name,
        n_dense_layers=config.n_layers - len(moe.sparse_layers) if moe is not None and mixes else None,
        n_layers=config.n_layers,
        hidden=config.hidden,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        dense_width=config.dense_width if moe is None or len(moe.sparse_layers) < config.n_layers else 0,
        n_experts=moe.n_experts if moe is not None else 0,
        top_k=moe.top_k if moe is not None else 0,
        expert_width=moe.expert_width if moe is not None else 0,
        vocabulary=config.vocabulary_size,
        shared_width=moe.shared.width if moe is not None and moe.shared is not None else 0,
        ties_embedding=config.tie_embeddings,
        max_length=config.max_length,
        spans=_period(config.attention.spans),
        latent=None
        if latent is None
        else LatentShape(latent.q_rank, latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.value_dim),
    )


def _period(spans: tuple[Span | None, ...]) -> tuple[Span | None, ...]:
    """The fewest layers that say it of all, in turn."""
    n = next(n for n in range(1, len(spans) + 1) if all(one == spans[i % n] for i, one in enumerate(spans)))
    return spans[:n]


def config_of_shape(name: str) -> Path | None:
    """The file that a shape is read from; None of a published model by name, and of what is no file."""
    if name in NAMED_SHAPES:
        return None
    path = Path(name).expanduser()
    if path.is_dir():
        return path / CONFIG_FILE
    return path if path.name == CONFIG_FILE or path.is_file() else None


def label_of_shape(name: str) -> str:
    """What tables call it: the folder of a config.json, or the name of another file."""
    if name in NAMED_SHAPES:
        return name
    path = Path(name).expanduser().absolute()
    return (path.parent.name if path.name == CONFIG_FILE else path.name.removesuffix(".json")) or name


def shape_named(name: str) -> ModelShape:
    """Of a published model by name; or of a `config.json`, whatever its name, by its path or folder.

    Raises `EngineError`.
    """
    if name in NAMED_SHAPES:
        return NAMED_SHAPES[name]
    path = config_of_shape(name)
    if path is None:
        raise EngineError(
            f"no shape {name!r}; name a published model ({', '.join(NAMED_SHAPES)}), or the path of its config.json"
        )
    # How wide its weights are is asked, and no weights are read: any form of them will do.
    raw = {key: value for key, value in read_json(path).items() if key != "quantization_config"}
    return own_shape(label_of_shape(name), config_in(path, raw, None))


def quantised(shape: ModelShape, forms: Quantisation) -> ModelShape:
    """With weights stored as an arm would store them; what it leaves alone is as wide as before."""
    before = shape.bits or WeightBits(*4 * (8.0 * shape.bytes_per_value,))
    hidden, width = shape.hidden, shape.expert_width
    columns = {
        # Gate and up read the model's width, down the block's own.
        "experts": (hidden, hidden, width),
        "dense": (hidden, hidden, shape.dense_width or shape.shared_width),
        "attention": (hidden,),
        "head": (hidden,),
    }
    narrow = {
        component: sum(bits_of_value(form, n or hidden) for n in columns[component]) / len(columns[component])
        for component, form in forms.asked.items()
    }
    return replace(shape, bits=before._replace(**narrow))


def sizes_of(shape: ModelShape) -> ModelSizes | None:
    """What a technique is told of a model that is priced at this shape; None of a dense one.

    Raises as `ModelShape.n_sparse_layers`.
    """
    if shape.n_experts == 0:
        return None
    expert_bytes = math.ceil(shape.expert_bytes)
    n_layers, hidden = shape.n_layers, shape.hidden
    experts = shape.n_experts, shape.top_k, hidden, shape.expert_width, expert_bytes
    return ModelSizes(*experts, n_layers, shape.n_sparse_layers, activation_bytes=shape.bytes_per_value)


def priced_shape(name: str, config: ModelConfig) -> ModelShape:
    """A named shape at which the routing of `config`'s model is priced.

    Routing carries over only between models that choose K of E alike: raises `EngineError` when E or K differ, or when
    the name is not known.
    """
    shape = shape_named(name)
    found = (config.moe.n_experts, config.moe.top_k) if config.moe is not None else (0, 0)
    if found != (shape.n_experts, shape.top_k):
        raise EngineError(
            f"cannot price this model as {name}: it has {found[0]} experts, top-{found[1]}, {name} has "
            f"{shape.n_experts}, top-{shape.top_k}; route with a model of the same E and K"
        )
    return shape
