"""A checkpoint of ours written as GGUF, the file that llama.cpp reads, with the Python package gguf.

Tokens go in and out by their ids. A tokenizer that GGUF knows is in the file too, for programs that show text.
As in llama.cpp's own conversion, vectors and routers stay f32 in every form; the head of a q4_0 file is q8_0 (its own
quantiser takes q6_K, which the package reads and does not write).

What a family of llama.cpp computes that our config asks for otherwise is refused, not written: a benchmark of almost
the right model is worth nothing.

Legend: E experts, H hidden, I expert width, L vocabulary rows, N heads, D features of a head, Q = query heads * D, M =
key/value heads * D.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from engines.errors import EngineError, NotSupportedError
from engines.external.base import Form
from engines.external.gguf_vocabulary import add_vocabulary
from engines.model.architecture import SWIGLU, GatedUnit, ModelConfig
from engines.model.attention import AttentionWeights
from engines.model.checkpoints import CheckpointFacts, decisive_files_of, load_checkpoint
from engines.model.experts import GatedWeights
from engines.model.quantised import Matrix
from engines.model.weights import LayerWeights, ModelWeights, SparseWeights
from results.disk_errors import remedy_of

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

PACKAGE = "gguf"
WRITER = 3
"""Raised where the same checkpoint is written otherwise: files of before are not taken up again."""
BLOCK = 32
"""Columns that share a scale in the narrow forms."""


@dataclass(frozen=True)
class Known:
    """What llama.cpp computes under an architecture's name. normalises: the weights of a token's experts add up to 1.
    turns_neighbours: queries and keys are turned in pairs of neighbours, so that rows of halves are put in turn."""

    name: str
    normalises: bool | None = None
    turns_neighbours: bool = False
    qk_norm: Literal["head", "all heads"] | None = None
    shared_gate: bool = False


KNOWN = {
    "Qwen3MoeForCausalLM": Known("qwen3moe", normalises=True, qk_norm="head"),
    "Qwen3ForCausalLM": Known("qwen3", qk_norm="head"),
    "Qwen2ForCausalLM": Known("qwen2"),
    "Qwen2MoeForCausalLM": Known("qwen2moe", normalises=False, shared_gate=True),
    "LlamaForCausalLM": Known("llama", turns_neighbours=True),
    "MixtralForCausalLM": Known("llama", normalises=True, turns_neighbours=True),
    "OlmoeForCausalLM": Known("olmoe", normalises=False, qk_norm="all heads"),
}
"""Families that are written, each compared with our engine on a small checkpoint (tests/test_llama_cpp.py)."""


def why_not_written(config: ModelConfig, form: Form) -> str | None:
    """Why a model has no such file, or None."""
    known = KNOWN.get(config.architecture)
    if known is None:
        return (
            f"{config.architecture} is not written as GGUF here; convert it with llama.cpp's own converter and name the"
            f" file as model_file, or take one of {', '.join(KNOWN)}"
        )
    reasons = [text for is_so, text in _differences(config, known) if is_so]
    widths = [config.hidden, config.n_heads * config.head_dim, *([config.dense_width] if config.dense_width else [])]
    widths += [config.moe.expert_width] if config.moe is not None else []
    odd = [width for width in widths if width % BLOCK]
    if form in ("q8_0", "q4_0") and odd:
        reasons.append(f"{form} shares scales among {BLOCK} columns, and a matrix has {odd[0]}")
    return f"llama.cpp's {known.name} is not this model: {'; '.join(reasons)}" if reasons else None


def _differences(config: ModelConfig, known: Known) -> Iterator[tuple[bool, str]]:
    attention, moe = config.attention, config.moe
    yield config.rope.scaling is not None, f"{type(config.rope.scaling).__name__} of rope is not written"
    yield config.rope.dim != config.head_dim or not all(attention.rope_layers), "it turns a part of each head only"
    yield any(span is not None for span in attention.spans), "its attention has a window"
    yield attention.qk_norm != known.qk_norm, f"its norm of queries and keys is {attention.qk_norm}"
    grouped = config.n_kv_heads != config.n_heads
    yield known.qk_norm == "all heads" and grouped, "several of its heads share keys, and are normed together"
    yield attention.out_bias, "its attention has a bias behind it"
    yield attention.qkv_bias and known.qk_norm is not None, "its queries have a bias"
    yield attention.clip is not None or attention.softcap is not None or attention.sinks, "its scores are limited"
    yield config.norm.kind != "rms" or config.head_bias, "it has biases in norms or head"
    yield config.unit != SWIGLU or config.embedding_scale != 1.0 or config.logit_softcap is not None, "it is no SwiGLU"
    if moe is None:
        return
    normalises = moe.router.normalise
    yield normalises != known.normalises, f"weights of its experts add up to 1: {normalises}"
    yield moe.router.scoring != "softmax" or moe.router.n_groups > 1 or moe.router.scale != 1.0, "its router is another"
    yield len(moe.sparse_layers) < config.n_layers, "some of its layers are dense"
    yield (moe.shared is not None) != known.shared_gate, "its shared expert is another"
    yield moe.unit != GatedUnit() or moe.expert_bias or moe.weights_input, "its experts are others"


def stored_form(name: str, n_dimensions: int, form: Form) -> Form:
    """How a tensor of a file of this form is stored."""
    if n_dimensions == 1 or "gate_inp" in name:
        return "f32"
    return "q8_0" if form == "q4_0" and name == "output.weight" else form


# --- files -----------------------------------------------------------------------------------------------------------


def gguf_of(facts: CheckpointFacts, form: Form, folder: Path, on_note: Callable[[str], None]) -> Path:
    """The file of a checkpoint in a folder that keeps such files, written where it is not there yet.

    Raises `NotSupportedError` for a model that llama.cpp computes otherwise, `EngineError` where it cannot be written.
    """
    reason = why_not_written(facts.config, form)
    if reason is not None:
        raise NotSupportedError(reason)
    if importlib.util.find_spec(PACKAGE) is None:
        raise EngineError(
            f"the Python package {PACKAGE} writes models for llama.cpp and is not here; install it with"
            " `pip install 'joulebench[llama-cpp]'`, or name a file of your own as model_file"
        )
    path = folder / f"{facts.folder.name}-{form}-{_identity(facts)}.gguf"
    if path.is_file():
        return path
    on_note(f"writing {facts.source} as GGUF, {form}: {path}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".gguf", dir=folder)
        os.close(descriptor)
        try:
            write_gguf(facts, Path(name), form)
            Path(name).replace(path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise EngineError(
            f"{path}: cannot be written ({error}); {remedy_of(error)}, or set JOULEBENCH_STATE"
        ) from error
    return path


def _identity(facts: CheckpointFacts) -> str:
    """Of what the file is made from: names, sizes and times of the checkpoint's files, and the writer."""
    whole = hashlib.sha256(f"{WRITER} {importlib.metadata.version(PACKAGE)} {facts.revision}".encode())
    for path in decisive_files_of(facts.folder):
        found = path.stat()
        whole.update(f"\n{path.resolve()} {found.st_size} {found.st_mtime_ns}".encode())
    return whole.hexdigest()[:12]


def write_gguf(facts: CheckpointFacts, path: Path, form: Form) -> None:
    """One tensor at a time is held in its new form. Raises `EngineError`, `OSError`."""
    import gguf

    weights = load_checkpoint(facts.source, facts.config.weight_dtype).weights
    writer = gguf.GGUFWriter(path, KNOWN[facts.config.architecture].name)
    _add_sizes(writer, facts.config)
    add_vocabulary(writer, facts)
    for name, tensor in _tensors(facts.config, weights):
        kind = _kind(name, len(tensor.shape), form)
        shape = gguf.quants.quant_shape_to_byte_shape(tensor.shape, kind) if kind.name[0] == "Q" else tensor.shape
        n_bytes = _n_bytes(tensor, kind)
        writer.add_tensor_info(name, shape, _numpy_type(kind), n_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in _tensors(facts.config, weights):
        kind = _kind(name, len(tensor.shape), form)
        writer.write_tensor_data(gguf.quants.quantize(_plain(tensor).numpy(), kind))
    writer.close()


def _kind(name: str, n_dimensions: int, form: Form) -> GGMLQuantizationType:
    import gguf

    return gguf.GGMLQuantizationType[stored_form(name, n_dimensions, form).upper()]


def _numpy_type(kind: GGMLQuantizationType) -> Any:
    import numpy as np

    return np.dtype({"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8))


def _n_bytes(tensor: _Stack | Matrix, kind: GGMLQuantizationType) -> int:
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    return tensor.shape.numel() // block * size


def _add_sizes(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_block_count(config.n_layers)
    writer.add_context_length(config.max_length)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.dense_width or (config.moe.expert_width if config.moe else 0))
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm.eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.rope.dim)
    writer.add_vocab_size(config.vocabulary_size)
    if config.moe is not None:
        writer.add_expert_count(config.moe.n_experts)
        writer.add_expert_used_count(config.moe.top_k)
        writer.add_expert_feed_forward_length(config.moe.expert_width)
        if config.moe.shared is not None:
            writer.add_expert_shared_feed_forward_length(config.moe.shared.width)


# --- tensors ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Stack:
    """Matrices of all experts, put together when they are written."""

    parts: tuple[Matrix, ...]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.parts), *self.parts[0].shape))


def _plain(tensor: _Stack | Matrix) -> Tensor:
    """In fp32, row after row."""
    if isinstance(tensor, _Stack):
        return torch.stack([_plain(part) for part in tensor.parts])
    assert isinstance(tensor, Tensor)  # the checkpoint was loaded in a plain form
    return tensor.detach().float().contiguous()


def _tensors(config: ModelConfig, weights: ModelWeights) -> Iterator[tuple[str, _Stack | Matrix]]:
    yield "token_embd.weight", weights.embedding_LH
    yield "output_norm.weight", weights.norm.weight
    if not config.tie_embeddings:
        yield "output.weight", weights.head_LH
    for number, layer in enumerate(weights.layers):
        for name, tensor in _of_layer(config, layer):
            yield f"blk.{number}.{name}", tensor


def _of_layer(config: ModelConfig, layer: LayerWeights) -> Iterator[tuple[str, _Stack | Matrix]]:
    yield "attn_norm.weight", layer.attention_norm.weight
    yield "ffn_norm.weight", layer.mlp_norm.weight
    assert isinstance(layer.attention, AttentionWeights)  # families with latent attention are not `KNOWN`
    yield from _of_attention(config, layer.attention)
    if isinstance(layer.mlp, GatedWeights):
        yield from _of_unit("ffn_{}.weight", layer.mlp)
        return
    yield from _of_experts(layer.mlp)


def _of_attention(config: ModelConfig, attention: AttentionWeights) -> Iterator[tuple[str, Matrix]]:
    turned = KNOWN[config.architecture].turns_neighbours
    heads = {"q": config.n_heads, "k": config.n_kv_heads}
    for name, matrix, bias in (
        ("q", attention.q_QH, attention.q_bias_Q),
        ("k", attention.k_MH, attention.k_bias_M),
        ("v", attention.v_MH, attention.v_bias_M),
    ):
        in_turn = turned and name in heads
        yield f"attn_{name}.weight", _neighbours(matrix, heads[name]) if in_turn else matrix
        if bias is not None:
            yield f"attn_{name}.bias", _neighbours(bias, heads[name]) if in_turn else bias
    yield "attn_output.weight", attention.out_HQ
    for name, norm in (("q", attention.q_norm), ("k", attention.k_norm)):
        if norm is not None:
            yield f"attn_{name}_norm.weight", norm.weight


def _neighbours(rows: Matrix, n_heads: int) -> Tensor:
    """Of each head's rows, those of the two halves in turn: row i of one half is turned with row i of the other, and
    llama.cpp turns neighbours."""
    assert isinstance(rows, Tensor)
    by_head = rows.view(n_heads, 2, -1, *rows.shape[1:])
    return by_head.transpose(1, 2).reshape(rows.shape)


def _of_unit(name: str, unit: GatedWeights) -> Iterator[tuple[str, Matrix]]:
    for part, matrix in (("gate", unit.gate_IH), ("up", unit.up_IH), ("down", unit.down_HI)):
        yield name.format(part), matrix


def _of_experts(sparse: SparseWeights) -> Iterator[tuple[str, _Stack | Matrix]]:
    yield "ffn_gate_inp.weight", sparse.router.weight_EH
    experts = tuple(sparse.experts.experts)
    yield "ffn_gate_exps.weight", _Stack(tuple(one.gate_IH for one in experts))
    yield "ffn_up_exps.weight", _Stack(tuple(one.up_IH for one in experts))
    yield "ffn_down_exps.weight", _Stack(tuple(one.down_HI for one in experts))
    if sparse.shared is not None:
        yield from _of_unit("ffn_{}_shexp.weight", sparse.shared)
    if sparse.shared_gate_1H is not None:
        yield "ffn_gate_inp_shexp.weight", sparse.shared_gate_1H.flatten()
