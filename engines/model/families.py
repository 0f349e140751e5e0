"""What a model family's name says and its `config.json` does not: one line of differences for each architecture.

The names are those of published checkpoints' `architectures`. Which keys of its config a family reads, and what the
absence of one means, stands in `engines.model.config_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from engines.model.architecture import Activation, TensorNames


@dataclass(frozen=True)
class RouterFamily:
    """n_experts_key, width_key: config names of the number of experts and of one expert's width.

    normalise: "config" where norm_topk_prob says. normalises_one: the weight of a single choice
    too. groups: chosen by group where the config has n_group.
    """

    scoring: Literal["softmax", "sigmoid", "softmax of chosen", "sigmoid of chosen", "sparsemixer"]
    n_experts_key: str
    width_key: str
    normalise: bool | Literal["config"] = "config"
    normalises_one: bool = True
    group_score: Literal["best", "two best"] = "best"
    has_bias: bool = False
    has_correction: bool = False
    shared: Literal["gated", "plain", "one plain"] | None = None
    """Shared experts: one with a gate of its own, n_shared_experts of expert width, or one of expert width."""
    expert_bias: bool = False
    weights_input: bool = False


_LLAMA_NAMES = TensorNames()


@dataclass(frozen=True)
class Family:
    """None of qkv_bias and out_bias: `attention_bias` of the config says; where a family has a key `qkv_bias`, that."""

    router: RouterFamily | None = None
    names: TensorNames = _LLAMA_NAMES
    qkv_bias: bool | None = None
    out_bias: bool | None = None
    qk_norm: Literal["head", "all heads", "l2"] | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_from_one: bool = False
    rope_pairs: Literal["halves", "neighbours"] = "halves"
    rope_amplitudes: bool = False
    """LongRoPE's config gives both amplitudes itself (Phi-3.5-MoE)."""
    is_latent: bool = False
    sinks: bool = False
    activation: Activation = "silu"
    scales_embedding: bool = False
    window_layers: Literal["all", "even"] | None = None
    """Which layers `sliding_window` is for where the config has no layer_types; None: the family has no such key."""


_SOFTMAX = RouterFamily("softmax", "num_experts", "moe_intermediate_size")
_BLOCK_SPARSE = TensorNames(mlp="block_sparse_moe", experts=("w1", "w3", "w2"))
_DEEPSEEK_V3 = RouterFamily(
    "sigmoid",
    "n_routed_experts",
    "moe_intermediate_size",
    group_score="two best",
    has_correction=True,
    shared="plain",
)
_LLAMA4 = Family(
    RouterFamily(
        "sigmoid of chosen",
        "num_local_experts",
        "intermediate_size",
        normalise=False,
        shared="one plain",
        weights_input=True,
    ),
    TensorNames(mlp="feed_forward", router="router", stacked_experts="halves", shared="shared_expert"),
    qk_norm="l2",
    rope_pairs="neighbours",
)
_PHI_MOE = Family(
    RouterFamily("sparsemixer", "num_local_experts", "intermediate_size", normalise=False),
    _BLOCK_SPARSE,
    norm="layer",
    rope_amplitudes=True,
    window_layers="all",
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(qkv_bias=False, out_bias=False),
    "Qwen2ForCausalLM": Family(qkv_bias=True, out_bias=False),
    "Qwen3ForCausalLM": Family(qk_norm="head"),
    "Gemma2ForCausalLM": Family(
        names=TensorNames(
            mlp_norm="pre_feedforward_layernorm",
            after_attention_norm="post_attention_layernorm",
            after_mlp_norm="post_feedforward_layernorm",
        ),
        norm_from_one=True,
        activation="gelu_tanh",
        scales_embedding=True,
        window_layers="even",
    ),
    "Phi3ForCausalLM": Family(
        names=TensorNames(fused_qkv=True, fused_dense=True), qkv_bias=False, out_bias=False, window_layers="all"
    ),
    "Qwen3MoeForCausalLM": Family(_SOFTMAX, qk_norm="head"),
    "Qwen2MoeForCausalLM": Family(
        RouterFamily("softmax", "num_experts", "moe_intermediate_size", shared="gated"),
        TensorNames(shared="shared_expert"),
        qkv_bias=True,
        out_bias=False,
    ),
    "MixtralForCausalLM": Family(
        RouterFamily("softmax", "num_local_experts", "intermediate_size", normalise=True),
        _BLOCK_SPARSE,
        window_layers="all",
    ),
    "OlmoeForCausalLM": Family(RouterFamily("softmax", "num_experts", "intermediate_size"), qk_norm="all heads"),
    "PhimoeForCausalLM": _PHI_MOE,
    "PhiMoEForCausalLM": _PHI_MOE,
    "GptOssForCausalLM": Family(
        RouterFamily(
            "softmax of chosen",
            "num_local_experts",
            "intermediate_size",
            normalise=False,
            has_bias=True,
            expert_bias=True,
        ),
        TensorNames(router="router", stacked_experts="interleaved"),
        sinks=True,
        window_layers="even",
    ),
    "DeepseekForCausalLM": Family(
        RouterFamily("softmax", "n_routed_experts", "moe_intermediate_size", normalises_one=False, shared="plain")
    ),
    "DeepseekV2ForCausalLM": Family(
        RouterFamily("softmax", "n_routed_experts", "moe_intermediate_size", normalise=False, shared="plain"),
        rope_pairs="neighbours",
        is_latent=True,
    ),
    "DeepseekV3ForCausalLM": Family(_DEEPSEEK_V3, rope_pairs="neighbours", is_latent=True),
    "Glm4MoeForCausalLM": Family(_DEEPSEEK_V3, out_bias=False, qk_norm="head"),
    "Glm4MoeLiteForCausalLM": Family(_DEEPSEEK_V3, rope_pairs="neighbours", is_latent=True),
    "Llama4ForCausalLM": _LLAMA4,
    # The text half of a model that also sees: its config and its tensors lie one level deeper.
    "Llama4ForConditionalGeneration": replace(
        _LLAMA4,
        names=replace(
            _LLAMA4.names, root="language_model.", ignored_prefixes=("vision_model.", "multi_modal_projector.")
        ),
    ),
}
