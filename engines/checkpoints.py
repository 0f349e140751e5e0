"""Weights from a Hugging Face folder, a hub id, or the bundled model: safetensors only, every tensor accounted for.

Legend: H hidden, Q = heads * head_dim, M = kv heads * head_dim, D head_dim, W dense width, I expert width, J = 2I,
E experts, L vocabulary rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.errors import EngineError
from engines.experts import ExpertWeights
from engines.model_config import ModelConfig, read_json, read_model_config
from engines.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

BUNDLED_PREFIX = "bundled:"
BUNDLED_FOLDER = Path(__file__).parent / "bundled"
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
TOKENIZER_FILES = ["*.json", "*.jinja"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AttentionWeights:
    """Projections as [out, in]; biases where the architecture has them; norms over one head's features."""

    q_QH: Tensor
    k_MH: Tensor
    v_MH: Tensor
    out_HQ: Tensor
    q_bias_Q: Tensor | None
    k_bias_M: Tensor | None
    v_bias_M: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None


@dataclass(frozen=True)
class DenseWeights:
    """SwiGLU of a dense layer. gate_up: rows 0..W-1 gate, W..2W-1 up."""

    gate_up: Tensor
    down_HW: Tensor


@dataclass(frozen=True)
class SparseWeights:
    router_EH: Tensor
    experts: ExpertWeights


@dataclass(frozen=True)
class LayerWeights:
    attention_norm_H: Tensor
    attention: AttentionWeights
    mlp_norm_H: Tensor
    mlp: DenseWeights | SparseWeights


@dataclass(frozen=True)
class ModelWeights:
    """head_LH is the embedding itself where the model ties them."""

    embedding_LH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_H: Tensor
    head_LH: Tensor


@dataclass(frozen=True)
class CheckpointFacts:
    """What can be known without reading weights."""

    source: str
    folder: Path
    revision: str | None
    """Commit of a hub snapshot; None for a folder."""
    config: ModelConfig
    tokenizer: Tokenizer

    @property
    def note(self) -> str | None:
        """For the tables, such as "random weights"."""
        return self.config.note


@dataclass(frozen=True)
class Checkpoint(CheckpointFacts):
    weights: ModelWeights


def inspect_checkpoint(source: str) -> CheckpointFacts:
    """Config, tokenizer, and the names and shapes of all tensors; no weights are read. Raises `EngineError`.

    For a hub id whose weights are not in the local cache, only the JSON files are fetched, and the tensors are left to
    `load_checkpoint`: checking a plan must not download gigabytes.
    """
    facts = _read_facts(source, weights=False)
    local_weights = any(facts.folder.glob("*.safetensors"))
    if local_weights or facts.revision is None:
        _check_tensors(facts.config, _locate_tensors(facts.folder))
    return facts


def load_checkpoint(source: str, dtype: torch.dtype) -> Checkpoint:
    """Reads everything. Raises `EngineError` naming the tensor that is missing, misshapen, left over or not finite.

    dtype: how matrices are stored in memory. Vectors (norms, biases) and routers are always fp32; arithmetic is fp32.
    """
    facts = _read_facts(source, weights=True)
    located = _locate_tensors(facts.folder)
    _check_tensors(facts.config, located)
    read = _tensor_reader(located)
    if facts.config.tie_embeddings and "lm_head.weight" in located:
        _check_tied_head(read)
    weights = _read_weights(facts.config, read, dtype)
    return Checkpoint(facts.source, facts.folder, facts.revision, facts.config, facts.tokenizer, weights)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this architecture holds, by its Hugging Face name."""
    hidden = config.hidden
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocabulary_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocabulary_size, hidden)
    for layer in range(config.n_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, width in (("q", q_width), ("k", kv_width), ("v", kv_width)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (width, hidden)
            if config.qkv_bias:
                shapes[f"{prefix}self_attn.{name}_proj.bias"] = (width,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_width)
        if config.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
        if config.moe is not None and config.is_sparse(layer):
            shapes[prefix + "mlp.gate.weight"] = (config.moe.n_experts, hidden)
            for expert in range(config.moe.n_experts):
                shapes |= _swiglu_shapes(f"{prefix}mlp.experts.{expert}.", hidden, config.moe.expert_width)
        else:
            shapes |= _swiglu_shapes(prefix + "mlp.", hidden, config.dense_width)
    return shapes


def _swiglu_shapes(prefix: str, hidden: int, width: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }


# --- where the files are ---------------------------------------------------------------------------------------------


def _read_facts(source: str, weights: bool) -> CheckpointFacts:
    folder, revision = _find_folder(source, weights)
    config = read_model_config(folder)
    name = source if revision is not None or source.startswith(BUNDLED_PREFIX) else folder.resolve().name
    tokenizer = Tokenizer(folder, name.removeprefix(BUNDLED_PREFIX), config.eos_token_ids, config.vocabulary_size)
    return CheckpointFacts(source, folder, revision, config, tokenizer)


def _find_folder(source: str, weights: bool) -> tuple[Path, str | None]:
    """The folder of a source, and the commit if it came from the hub ("owner/name" or "owner/name@revision")."""
    if source.startswith(BUNDLED_PREFIX):
        name = source.removeprefix(BUNDLED_PREFIX)
        bundled = sorted(path.name for path in BUNDLED_FOLDER.iterdir() if path.is_dir())
        if name not in bundled:
            raise EngineError(f"{source}: no such bundled model; there is {', '.join(bundled)}")
        return BUNDLED_FOLDER / name, None
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder, None
    return _fetch_from_hub(source, folder, weights)


def _fetch_from_hub(source: str, folder: Path, weights: bool) -> tuple[Path, str]:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository, _, revision = source.partition("@")
    patterns = [*TOKENIZER_FILES, "*.safetensors"] if weights else TOKENIZER_FILES
    try:
        snapshot = Path(
            huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=patterns)
        )
    except HFValidationError as error:
        raise EngineError(f"{source}: no folder {folder.absolute()}, and not a hub id like owner/name") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(
            f"{source}: no folder {folder.absolute()}, and the Hugging Face hub did not give {repository!r} "
            f"({type(error).__name__}: {reason}); check the path, or download the model while online"
        ) from error
    logger.info("%s: hub snapshot %s", repository, snapshot.name)
    return snapshot, snapshot.name


# --- the tensors in them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Located:
    path: Path
    shape: Shape


def _locate_tensors(folder: Path) -> dict[str, _Located]:
    """File and shape of each tensor, from the headers alone."""
    return {name: _Located(path, shape) for path in _weight_files(folder) for name, shape in _read_header(path).items()}


def _weight_files(folder: Path) -> list[Path]:
    index_path, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index_path.is_file():
        names = sorted(set(read_json(index_path).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing or not names:
            raise EngineError(f"{index_path}: files {missing or 'none'} of the index are not in the folder; fetch them")
        return [folder / name for name in names]
    if single.is_file():
        return [single]
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
    if pickles:
        raise EngineError(
            f"{folder}: only {', '.join(pickles)}; pickle checkpoints are never loaded; convert to safetensors"
        )
    raise EngineError(f"{folder}: no model.safetensors and no model.safetensors.index.json; fetch the weights")


def _read_header(path: Path) -> dict[str, Shape]:
    try:
        with safe_open(path, framework="pt") as tensors:
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise EngineError(f"{path}: truncated or not safetensors ({error}); fetch the file again") from error


def _check_tensors(config: ModelConfig, located: dict[str, _Located]) -> None:
    wanted = tensor_shapes(config)
    optional = {"lm_head.weight"} if config.tie_embeddings else set()
    missing = sorted(wanted.keys() - located.keys())
    if missing:
        raise EngineError(
            f"tensor {missing[0]!r} missing ({len(missing)} in all); config.json and weights do not belong together"
        )
    # Llama exports of old hold the rotary frequencies, which follow from the config.
    left_over = sorted(
        name for name in located.keys() - wanted.keys() - optional if not name.endswith(".rotary_emb.inv_freq")
    )
    if left_over:
        raise EngineError(
            f"tensor {left_over[0]!r} left over ({len(left_over)} in all): {config.architecture} does not use it; "
            "config.json and weights do not belong together"
        )
    for name, shape in wanted.items():
        if located[name].shape != shape:
            raise EngineError(f"tensor {name!r} has shape {located[name].shape}, config.json asks for {shape}")


def _tensor_reader(located: dict[str, _Located]) -> Callable[[str], Tensor]:
    def read(name: str) -> Tensor:
        path = located[name].path
        try:
            with safe_open(path, framework="pt") as tensors:
                tensor: Tensor = tensors.get_tensor(name)
        except SafetensorError as error:
            raise EngineError(f"{path}: tensor {name!r} unreadable ({error}); fetch the file again") from error
        if not tensor.is_floating_point():
            raise EngineError(f"{path}: tensor {name!r} holds {tensor.dtype}; quantised weights are not supported")
        if not torch.isfinite(tensor).all():
            raise EngineError(f"{path}: tensor {name!r} holds NaN or infinity; the file is damaged or badly converted")
        return tensor

    return read


def _read_weights(config: ModelConfig, read: Callable[[str], Tensor], dtype: torch.dtype) -> ModelWeights:
    embedding_LH = read("model.embed_tokens.weight").to(dtype)
    return ModelWeights(
        embedding_LH=embedding_LH,
        layers=tuple(_read_layer(config, layer, read, dtype) for layer in range(config.n_layers)),
        norm_H=read("model.norm.weight").float(),
        head_LH=embedding_LH if config.tie_embeddings else read("lm_head.weight").to(dtype),
    )


def _check_tied_head(read: Callable[[str], Tensor]) -> None:
    """Some exports store the head beside the embedding that it is tied to; then there must be no choice to make."""
    if not torch.equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
        raise EngineError(
            "tensor 'lm_head.weight' differs from the embedding although config.json says tie_word_embeddings; "
            "config.json and weights do not belong together"
        )


def _read_layer(config: ModelConfig, layer: int, read: Callable[[str], Tensor], dtype: torch.dtype) -> LayerWeights:
    prefix = f"model.layers.{layer}."
    attention = prefix + "self_attn."

    def vector(name: str, present: bool) -> Tensor | None:
        return read(attention + name).float() if present else None

    return LayerWeights(
        attention_norm_H=read(prefix + "input_layernorm.weight").float(),
        attention=AttentionWeights(
            q_QH=read(attention + "q_proj.weight").to(dtype),
            k_MH=read(attention + "k_proj.weight").to(dtype),
            v_MH=read(attention + "v_proj.weight").to(dtype),
            out_HQ=read(attention + "o_proj.weight").to(dtype),
            q_bias_Q=vector("q_proj.bias", config.qkv_bias),
            k_bias_M=vector("k_proj.bias", config.qkv_bias),
            v_bias_M=vector("v_proj.bias", config.qkv_bias),
            q_norm_D=vector("q_norm.weight", config.qk_norm),
            k_norm_D=vector("k_norm.weight", config.qk_norm),
        ),
        mlp_norm_H=read(prefix + "post_attention_layernorm.weight").float(),
        mlp=_read_mlp(config, layer, prefix + "mlp.", read, dtype),
    )


def _read_mlp(
    config: ModelConfig, layer: int, prefix: str, read: Callable[[str], Tensor], dtype: torch.dtype
) -> DenseWeights | SparseWeights:
    moe, hidden = config.moe, config.hidden
    if moe is None or not config.is_sparse(layer):
        gate_up = torch.cat([read(prefix + "gate_proj.weight"), read(prefix + "up_proj.weight")])
        return DenseWeights(gate_up.to(dtype), read(prefix + "down_proj.weight").to(dtype))
    # Filled in place: a stack made from a list would hold all experts of the layer twice.
    gate_up_EJH = torch.empty(moe.n_experts, 2 * moe.expert_width, hidden, dtype=dtype)
    down_EHI = torch.empty(moe.n_experts, hidden, moe.expert_width, dtype=dtype)
    for expert in range(moe.n_experts):
        gate_up_EJH[expert, : moe.expert_width] = read(f"{prefix}experts.{expert}.gate_proj.weight")
        gate_up_EJH[expert, moe.expert_width :] = read(f"{prefix}experts.{expert}.up_proj.weight")
        down_EHI[expert] = read(f"{prefix}experts.{expert}.down_proj.weight")
    return SparseWeights(read(prefix + "gate.weight").float(), ExpertWeights(gate_up_EJH, down_EHI))
