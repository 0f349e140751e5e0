"""llama.cpp as a peer: the weights of a Qwen3 model written as GGUF, and llama-bench on them.

As in llama.cpp's own conversion, vectors and routers stay fp32 in every form. The head of a q4_0 file is q8_0 here; its
own quantiser takes q6_K, which the Python package gguf reads and does not write: 2 M of the weights, a little slower.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from engines import environment_for_others

Form = Literal["f32", "f16", "bf16", "q8_0", "q4_0"]
BATCH = 1024
"""Tokens that llama.cpp takes through the layers at once."""
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def find_llama_bench() -> tuple[LlamaBench | None, str | None]:
    """The binary, or why it takes no part."""
    binary = os.environ.get("LLAMA_BENCH") or shutil.which("llama-bench")
    if binary is None or not Path(binary).is_file():
        return None, "no part: LLAMA_BENCH names no llama-bench"
    if importlib.util.find_spec("gguf") is None:
        return None, "no part: the Python package gguf is not installed"
    return LlamaBench(binary), None


@dataclass(frozen=True)
class LlamaBench:
    binary: str

    @property
    def has_openmp(self) -> bool:
        """Whether it computes with OpenMP's threads, as the dynamic linker tells."""
        linked = subprocess.run(["ldd", self.binary], check=True, capture_output=True, text=True).stdout
        return any(library in linked for library in ("libgomp", "libomp"))

    def prefill(self, gguf: Path, n_prompt: int) -> float:
        """token/s. llama-bench warms up with the whole prompt; for a long one a test of one batch is enough."""
        prompts = ["-p", str(n_prompt)] if n_prompt <= BATCH else ["-p", f"{BATCH},{n_prompt}", "--no-warmup"]
        return self._run(gguf, *prompts, "-n", "0", "-ub", str(BATCH), "-b", "2048")

    def decode(self, gguf: Path, n_prompt: int, n_new: int) -> float:
        """token/s, behind a prompt"""
        return self._run(gguf, "-p", "0", "-n", str(n_new), "-d", str(n_prompt))

    def decode_batch(self, gguf: Path, n_prompt: int, n_new: int, n_sequences: int) -> float:
        """token/s of all sequences together, behind a prompt of each: by llama-batched-bench, which lies beside."""
        binary = Path(self.binary).with_name("llama-batched-bench")
        context = 2 * n_sequences * (n_prompt + n_new)
        sizes = ["-npp", str(n_prompt), "-ntg", str(n_new), "-npl", str(n_sequences), "-c", str(context)]
        return float(_last_line(str(binary), gguf, "--output-format", "jsonl", *sizes)["speed_tg"])

    def _run(self, gguf: Path, *arguments: str) -> float:
        return float(_last_line(self.binary, gguf, "-o", "jsonl", "-r", "1", *arguments)["avg_ts"])


def _last_line(binary: str, gguf: Path, *arguments: str) -> dict[str, Any]:
    command = [binary, "-m", str(gguf), "-t", str(torch.get_num_threads()), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment_for_others())
    found: dict[str, Any] = json.loads([line for line in done.stdout.splitlines() if line][-1])
    return found


def write_gguf(model: Any, path: Path, form: Form) -> None:
    """A GGUF file of a transformers Qwen3 or Qwen3-MoE model."""
    import gguf

    config = model.config
    is_sparse = hasattr(config, "num_experts")
    writer = gguf.GGUFWriter(path, "qwen3moe" if is_sparse else "qwen3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if is_sparse:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    for name, tensor in _tensors(model):
        kind = gguf.GGMLQuantizationType[stored_form(name, tensor.dim(), form).upper()]
        weights = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
        writer.add_tensor(name, weights, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored_form(name: str, n_dimensions: int, form: Form) -> Form:
    """How a tensor of a file of this form is stored."""
    if n_dimensions == 1 or "gate_inp" in name:
        return "f32"
    return "q8_0" if form == "q4_0" and name == "output.weight" else form


def _tensors(model: Any) -> list[tuple[str, torch.Tensor]]:
    found = [
        ("token_embd.weight", model.model.embed_tokens.weight.detach()),
        ("output_norm.weight", model.model.norm.weight.detach()),
        ("output.weight", model.lm_head.weight.detach()),
    ]
    for number, layer in enumerate(model.model.layers):
        for name, parameter in layer.named_parameters():
            prefix, weight = f"blk.{number}.", parameter.detach()
            if name == "mlp.experts.gate_up_proj":
                gate, up = weight.chunk(2, dim=1)
                found += [(prefix + "ffn_gate_exps.weight", gate), (prefix + "ffn_up_exps.weight", up)]
            elif name == "mlp.experts.down_proj":
                found.append((prefix + "ffn_down_exps.weight", weight))
            else:
                found.append((f"{prefix}{NAMES[name.removesuffix('.weight')]}.weight", weight))
    return found
