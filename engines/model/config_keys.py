"""Which keys of a `config.json` each family reads, and what it means when one is absent.

What a family does not read is either known to change no number, or an error: obeyed, it would be another model, and
left out in silence, it might be. A value that only switches off what the family does not do is no error
(`engines.model.idle_keys`).

Defaults are those of the family's config class in transformers, or of its published code where transformers has none:
whoever wrote the file left out what that class says anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.model.config_values import ConfigError, told
from engines.model.idle_keys import CHANGES_NO_NUMBER, is_off

GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What GPT-OSS turns by where the config has no rope."""

READ_OF_EVERY_FILE = frozenset(
    {"architectures", "model_type", "dtype", "torch_dtype", "eos_token_id", "quantization_config", "joulebench_note"}
)


@dataclass(frozen=True)
class FamilyKeys:
    """model_types: those of transformers for the architecture; another one would be another model there.

    absent: every key that is read, with what its absence means. only: keys that may say only what the family computes
    anyway. aliases: other names of keys. unread: keys that stand in published files of this family, and that its code
    does not look at. ropes: the types of rotary embedding it has.
    """

    model_types: tuple[str, ...]
    absent: Mapping[str, Any]
    only: Mapping[str, tuple[Any, ...]]
    aliases: Mapping[str, str] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    ropes: tuple[str, ...] = ("default", "linear", "llama3", "yarn", "longrope")

    def stated(self, raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
        """What the config says to this family, absent keys filled in. Raises `ConfigError` naming a key that it does
        not read, or one whose value it does not compute."""
        stated = dict(self.absent)
        said_as: dict[str, str] = {}
        for name, value in raw.items():
            key = self.aliases.get(name, name)
            if key in self.only and not _is_any_of(value, self.only[key]):
                words = f"{name} {told(value)} not supported; this engine computes {self.only[key][0]!r}"
                raise ConfigError(words, key)
            if key in self.absent:
                if key in said_as and stated[key] != value:
                    raise ConfigError(
                        f"{name} {told(value)} contradicts {said_as[key]} {told(stated[key])}, which {architecture}"
                        " takes for the same; keep the one that the model was trained with",
                        key,
                    )
                stated[key], said_as[key] = value, name
        for name, value in raw.items():
            key = self.aliases.get(name, name)
            is_known = key in self.absent or key in self.only or self._is_harmless(key)
            if value is not None and not is_known and not is_off(key, value, stated, self.only):
                raise ConfigError(
                    f"{told(name)} is {told(value)}, but {architecture} has no such key; it might change what the model"
                    " computes: remove it if the model was trained without it",
                    name,
                )
        if stated.get("rope_parameters", {}) is None:
            stated["rope_parameters"] = self.absent["rope_parameters"]
        model_type = raw.get("model_type")
        if model_type is not None and model_type not in self.model_types:
            raise ConfigError(
                f"model_type {told(model_type)} does not belong to {architecture}; it should be"
                f" {' or '.join(self.model_types)}",
                "model_type",
            )
        return stated

    def _is_harmless(self, key: str) -> bool:
        return key in self.unread or key in CHANGES_NO_NUMBER or key in READ_OF_EVERY_FILE


def _is_any_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    return any(value == one for one in accepted)


def _sizes(
    vocabulary: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    context: int,
    eps: float,
    **others: Any,
) -> dict[str, Any]:
    """The keys of every family; kv_heads None: as many as queries."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": eps,
        "tie_word_embeddings": False,
        "rope_parameters": None,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": None,
        **others,
    }


_SILU: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",)}
_WHOLE_HEADS: dict[str, tuple[Any, ...]] = {**_SILU, "partial_rotary_factor": (1.0, None)}
"""Rotary embedding turns all of a head."""
_QK_NORM: dict[str, tuple[Any, ...]] = {"use_qk_norm": (True, None)}
_NORMALISES: dict[str, tuple[Any, ...]] = {"norm_topk_prob": (True, None)}
_NEIGHBOURS: dict[str, tuple[Any, ...]] = {"rope_interleave": (True, None)}
_NO_BIAS: dict[str, tuple[Any, ...]] = {"attention_bias": (False, None), "mlp_bias": (False, None)}
_NO_WINDOW: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False, None)}
_WINDOW_KEYS = frozenset({"sliding_window", "max_window_layers"})
"""What they say counts only with use_sliding_window."""
_NOAUX: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid", None),
    "topk_method": ("noaux_tc", None),
    "moe_layer_freq": (1, None),
}
_QWEN2_MOE = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False, "head_dim": None}

_LLAMA4 = FamilyKeys(
    ("llama4_text",),
    _sizes(202048, 5120, 8192, 48, 40, 8, 131072, 1e-5, rope_theta=500000.0, head_dim=128, attention_bias=False)
    | {"num_local_experts": 16, "num_experts_per_tok": 1, "moe_layers": None, "interleave_moe_layer_step": 1}
    | {"intermediate_size_mlp": 16384, "use_qk_norm": True, "layer_types": None, "attention_chunk_size": 8192}
    | {"no_rope_layers": None, "no_rope_layer_interval": 4}
    | {"attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
    _WHOLE_HEADS | _NEIGHBOURS | {"n_shared_experts": (1, None)},
    unread=frozenset({"router_jitter_noise", "for_llm_compressor"}),
)
_PHI_MOE = FamilyKeys(
    ("phimoe",),
    _sizes(32064, 4096, 6400, 32, 32, 8, 131072, 1e-5, rope_theta=1000000.0, head_dim=None, attention_bias=False)
    | {"num_local_experts": 16, "num_experts_per_tok": 2, "router_jitter_noise": 0.01}
    | {"sliding_window": None, "lm_head_bias": False},
    _WHOLE_HEADS,
    unread=frozenset({"input_jitter_noise"}),
    ropes=("default", "longrope"),
)

FAMILY_KEYS: dict[str, FamilyKeys] = {
    "LlamaForCausalLM": FamilyKeys(
        ("llama",), _sizes(32000, 4096, 11008, 32, 32, None, 2048, 1e-6, head_dim=None), _WHOLE_HEADS | _NO_BIAS
    ),
    "Qwen2ForCausalLM": FamilyKeys(
        ("qwen2",),
        _sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6, head_dim=None, layer_types=None),
        _WHOLE_HEADS | _NO_WINDOW | {"use_mrope": (False,), "qkv_bias": (True, None)},
        unread=_WINDOW_KEYS,
    ),
    "Qwen3ForCausalLM": FamilyKeys(
        ("qwen3",),
        _sizes(151936, 4096, 22016, 32, 32, 32, 32768, 1e-6, head_dim=128, layer_types=None, attention_bias=False),
        _WHOLE_HEADS | _NO_WINDOW | _QK_NORM,
        unread=_WINDOW_KEYS,
    ),
    "Gemma2ForCausalLM": FamilyKeys(
        ("gemma2",),
        _sizes(256000, 2304, 9216, 26, 8, 4, 8192, 1e-6, head_dim=256, layer_types=None, attention_bias=False)
        | {"tie_word_embeddings": True, "sliding_window": 4096, "query_pre_attn_scalar": 256}
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        {
            **_WHOLE_HEADS,
            "hidden_act": ("gelu_pytorch_tanh",),
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "use_bidirectional_attention": (False, None),
            "scale_embedding": (True, None),
        },
        unread=frozenset({"sliding_window_size"}),
    ),
    "Phi3ForCausalLM": FamilyKeys(
        ("phi3",),
        _sizes(32064, 3072, 8192, 32, 32, None, 4096, 1e-5, head_dim=None, sliding_window=None)
        | {"original_max_position_embeddings": 4096, "partial_rotary_factor": None},
        {**_SILU, **_NO_BIAS, "lm_head_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,)},
        ropes=("default", "longrope", "su"),
    ),
    "Qwen3MoeForCausalLM": FamilyKeys(
        ("qwen3_moe",),
        _sizes(151936, 2048, 6144, 24, 32, 4, 32768, 1e-6, attention_bias=False)
        | {**_QWEN2_MOE, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        # The last three stand in Qwen3-Coder's file.
        _WHOLE_HEADS
        | _NO_WINDOW
        | {"use_qk_norm": (True,), "qkv_bias": (False,), "shared_expert_intermediate_size": (0, None)},
        aliases={"num_local_experts": "num_experts"},
        unread=_WINDOW_KEYS,
    ),
    "Qwen2MoeForCausalLM": FamilyKeys(
        ("qwen2_moe",),
        _sizes(151936, 2048, 5632, 24, 16, 16, 32768, 1e-6, layer_types=None, qkv_bias=True)
        | {**_QWEN2_MOE, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632},
        _WHOLE_HEADS | _NO_WINDOW,
        unread=_WINDOW_KEYS,
    ),
    "MixtralForCausalLM": FamilyKeys(
        ("mixtral",),
        _sizes(32000, 4096, 14336, 32, 32, 8, 131072, 1e-5, rope_theta=1000000.0, head_dim=None, sliding_window=None)
        | {"num_local_experts": 8, "num_experts_per_tok": 2},
        _WHOLE_HEADS | _NORMALISES,
        aliases={"num_experts": "num_local_experts"},
        unread=frozenset({"router_jitter_noise"}),
    ),
    "OlmoeForCausalLM": FamilyKeys(
        ("olmoe",),
        _sizes(50304, 2048, 2048, 16, 16, None, 4096, 1e-5, attention_bias=False, clip_qkv=None)
        | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        _WHOLE_HEADS | _QK_NORM,
        aliases={"num_local_experts": "num_experts"},
    ),
    "PhimoeForCausalLM": _PHI_MOE,
    "PhiMoEForCausalLM": _PHI_MOE,
    "GptOssForCausalLM": FamilyKeys(
        ("gpt_oss",),
        _sizes(201088, 2880, 2880, 36, 64, 8, 131072, 1e-5, rope_theta=150000.0, head_dim=64, attention_bias=True)
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128, "layer_types": None}
        | {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rope_parameters": GPT_OSS_ROPE},
        _WHOLE_HEADS | _NORMALISES | {"mlp_bias": (True, None)},
        aliases={"num_experts": "num_local_experts"},
        unread=frozenset({"experts_per_token", "initial_context_length"}),
    ),
    # Not in transformers; its published code takes these.
    "DeepseekForCausalLM": FamilyKeys(
        ("deepseek",),
        _sizes(102400, 4096, 11008, 30, 32, None, 2048, 1e-6, attention_bias=False)
        | {"n_routed_experts": None, "n_shared_experts": None, "num_experts_per_tok": None}
        | {"moe_intermediate_size": 1407, "first_k_dense_replace": 0, "moe_layer_freq": 1, "norm_topk_prob": False},
        _WHOLE_HEADS | {"scoring_func": ("softmax", None)},
        ropes=("default", "linear"),
    ),
    "DeepseekV2ForCausalLM": FamilyKeys(
        ("deepseek_v2",),
        _sizes(102400, 4096, 11008, 32, 32, None, 2048, 1e-6)
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None, "moe_intermediate_size": 1407}
        | {"first_k_dense_replace": 0, "n_group": None, "topk_group": None, "topk_method": "greedy"}
        | {"routed_scaling_factor": 1.0},
        {
            **_WHOLE_HEADS,
            **_NO_BIAS,
            **_NEIGHBOURS,
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax", None),
            "topk_method": ("greedy", "group_limited_greedy"),
            "moe_layer_freq": (1, None),
        },
        aliases={"num_experts": "n_routed_experts"},
        unread=frozenset({"head_dim", "qk_head_dim"}),
    ),
    "DeepseekV3ForCausalLM": FamilyKeys(
        ("deepseek_v3", "kimi_k2"),
        _sizes(129280, 7168, 18432, 61, 128, 128, 4096, 1e-6, rope_interleave=True, num_nextn_predict_layers=1)
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
        | {"first_k_dense_replace": 3, "n_group": 8, "topk_group": 4}
        | {"routed_scaling_factor": 2.5, "norm_topk_prob": True},
        _WHOLE_HEADS | _NOAUX | {"attention_bias": (False,)},
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        unread=frozenset({"head_dim", "qk_head_dim"}),
    ),
    "Glm4MoeForCausalLM": FamilyKeys(
        ("glm4_moe",),
        _sizes(151552, 4096, 10944, 46, 96, 8, 131072, 1e-5, head_dim=None, num_nextn_predict_layers=1)
        | {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 1408}
        | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 1.0, "norm_topk_prob": True}
        | {"attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 0.5},
        _SILU | _NOAUX,
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    ),
    "Glm4MoeLiteForCausalLM": FamilyKeys(
        ("glm4_moe_lite",),
        _sizes(154880, 2048, 10240, 47, 20, 20, 202752, 1e-5, rope_interleave=True, num_nextn_predict_layers=0)
        | {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
        | {"n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 4, "moe_intermediate_size": 1536}
        | {"mlp_layer_types": None, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
        | {"routed_scaling_factor": 1.8, "norm_topk_prob": True},
        _WHOLE_HEADS | _NOAUX | {"attention_bias": (False,), "first_k_dense_replace": (1,)},
        aliases={"num_local_experts": "n_routed_experts", "head_dim": "qk_rope_head_dim"},
        unread=frozenset({"qk_head_dim"}),
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": _LLAMA4,
}

AROUND_TEXT = FamilyKeys(
    ("llama4",),
    {"text_config": None},
    {"tie_word_embeddings": (False,)},
    unread=frozenset(
        {"vision_config"} | {f"{of}_token_{what}" for of in ("boi", "eoi", "image") for what in ("id", "index")}
    ),
)
"""Of a model that also sees, the file around the config of its text half."""
