"""Keys of a `config.json` that change no number: those that never do, and the values at which others do not.

Exporters write what their own config class has, whatever the family. In a family that lacks a key, a value at which
that key computes nothing says what is true anyway; any other value would be another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHANGES_NO_NUMBER = frozenset(
    # Names and versions
    {"_name_or_path", "name_or_path", "_commit_hash", "auto_map", "tokenizer_class", "transformers_version"}
    | {"transformers.js_config", "unsloth_fixed", "unsloth_version", "is_llama_config"}
    # Tokens that no layer knows of
    | {"bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "prefix"}
    # What is returned, kept or compiled
    | {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "output_scores"}
    | {
        "return_dict",
        "use_return_dict",
        "return_dict_in_generate",
        "torchscript",
        "use_bfloat16",
        "tf_legacy_loss",
        "cache_implementation",
    }
    | {"chunk_size_feed_forward", "pretraining_tp", "ep_size"}
    # Another road to the same attention
    | {"_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "_flash_attn_2_enabled"}
    | {"use_flash_attn"}
    # Lengths that no layer looks at; requests are held to max_position_embeddings
    | {"model_max_length", "max_sequence_length", "seq_length"}
    # Training
    | {"gradient_checkpointing", "ignore_index", "neftune_noise_alpha", "attn_pdrop", "hidden_dropout_prob"}
    | {"attention_probs_dropout_prob", "activation_dropout", "unsloth_tiled_mlp"}
    | {"initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "classifier_dropout"}
    | {"router_aux_loss_coef", "aux_loss_alpha", "seq_aux"}
    # Labels of classifiers
    | {"id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"}
    # Parts that a decoder does not have
    | {"is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder"}
    | {"pruned_heads"}
    # How tokens are drawn: requests say, and `engines.model.generation_config` tells what is not followed
    | {"do_sample", "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_beam_groups", "diversity_penalty"}
    | {"early_stopping", "length_penalty", "repetition_penalty", "no_repeat_ngram_size", "num_return_sequences"}
    | {"encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "remove_invalid_values", "bad_words_ids"}
    | {"suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"}
    | {"max_length", "min_length"}
)
"""Whatever they say."""

OFF: Mapping[str, Any] = {
    # Nothing is added
    "attention_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "bias": False,
    "use_bias": False,
    "add_bias": False,
    # Nothing is multiplied
    "routed_scaling_factor": 1.0,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "embedding_multiplier": 1.0,
    "embedding_scale": 1.0,
    "scale_emb": 1.0,
    "scale_embedding": False,
    "residual_multiplier": 1.0,
    "attn_temperature_tuning": False,
    "mup": False,
    # Nothing is normalised
    "norm_topk_prob": False,
    "use_qk_norm": False,
    "qk_norm": False,
    # All of a head is turned, halves against each other
    "partial_rotary_factor": 1.0,
    "rope_interleave": False,
    "rope_interleaved": False,
    "use_mrope": False,
    "alibi": False,
    # A token sees all before it
    "use_sliding_window": False,
    "use_bidirectional_attention": False,
    "is_causal": True,
    # Layers follow each other and are all alike
    "parallel_attn": False,
    "use_parallel_residual": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "interleave_moe_layer_step": 1,
    "mlp_only_layers": [],
    "num_nextn_predict_layers": 0,
    # Experts are chosen from all, and no other is added
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 0,
    "shared_expert_intermediate_size": 0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
"""The value at which a key computes nothing. `attention_multiplier` has none: it is the scale itself."""

SAME_SUBJECT: tuple[frozenset[str], ...] = (
    frozenset({"attention_bias", "qkv_bias", "bias", "use_bias", "add_bias"}),
    frozenset({"mlp_bias", "bias", "use_bias", "add_bias"}),
    frozenset({"lm_head_bias", "bias", "use_bias", "add_bias"}),
    frozenset({"embedding_multiplier", "embedding_scale", "scale_emb", "scale_embedding"}),
    frozenset({"use_qk_norm", "qk_norm"}),
    frozenset({"rope_interleave", "rope_interleaved"}),
    frozenset({"use_sliding_window", "sliding_window"}),
    frozenset({"moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step"}),
    frozenset({"n_shared_experts", "shared_expert_intermediate_size"}),
)
"""Names of families for one thing: off says nothing true of a family that does it under another name."""


def is_off(key: str, value: Any, stated: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> bool:
    """Whether a key that the family lacks computes nothing. stated: what the family reads; only: what it computes
    whatever is said."""
    if key not in OFF or not _is_same(value, OFF[key]):
        return False
    others = {other for subject in SAME_SUBJECT if key in subject for other in subject} - {key}
    return all(_is_left_off(other, stated, only) for other in others)


def _is_left_off(key: str, stated: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]]) -> bool:
    if key in stated:
        return stated[key] is None or (key in OFF and _is_same(stated[key], OFF[key]))
    return key not in only or any(_is_same(value, OFF.get(key)) for value in only[key])


def _is_same(value: Any, off: Any) -> bool:
    """Python takes false for 0."""
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)
