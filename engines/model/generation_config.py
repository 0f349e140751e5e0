"""Rules of a model's own files by which answers are made, and which no engine here follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines.model.model_config import CONFIG_FILE, GENERATION_CONFIG, read_json
from results.records import TOP_K_OF_TRANSFORMERS, Request

OFF: Mapping[str, Any] = {
    "repetition_penalty": 1,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "watermarking_config": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1,
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "force_words_ids": None,
    "constraints": None,
    "num_return_sequences": 1,
    "token_healing": False,
    "stop_strings": None,
    "max_time": None,
    "max_new_tokens": None,
    "use_mtp": False,
    "return_dict_in_generate": False,
    "is_assistant": False,
    "compile_config": None,
    "cache_implementation": None,
}
"""Rules that make greedy answers others, with the values that do nothing. Temperature, top_k and top_p change none.

max_new_tokens stands over the number that lm-eval asks of transformers: an answer without an end is longer. Some of
them transformers follows only where it is given a tokenizer, or code of others: lm-eval's call ends with an error.
"""


OTHERWISE_OFF: Mapping[str, tuple[Any, ...]] = {
    "cache_implementation": ("dynamic", "static", "paged", "hybrid", "hybrid_chunked", "sliding_window")
}
"""Other values that do nothing. A quantized cache makes answers others, an offloaded one needs a GPU, and one that
transformers does not know ends with an error."""


OF_DRAWS: Mapping[str, Any] = {
    "top_k": TOP_K_OF_TRANSFORMERS,
    "top_p": 1,
    "min_p": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "top_h": None,
}
"""Which tokens a draw is made from, with transformers' own values: a model's stand where a task says nothing. lm-eval
always says the temperature."""


def notes_on_choices(folder: Path, requests: Sequence[Request], asks_to_clean: bool = False) -> tuple[str, ...]:
    """Of rules that transformers follows by itself (and so do lm-eval's `hf` model and vLLM), and no engine here.

    They stand in generation_config.json. Where a model brings none, those in its config.json count, as in older files.
    asks_to_clean: of its tokenizer.
    """
    if not any(request.kind == "generate" and not request.ignore_end_tokens for request in requests):
        return ()
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        path = folder / CONFIG_FILE
    off = {**OFF, **{key: OF_DRAWS[key] for key in _left_to_the_model(requests)}}
    asked = {key: value for key, value in read_json(path).items() if key in off}
    rules = [
        f"{key} = {value!r:.40}"
        for key, value in asked.items()
        if value not in (None, [], off[key], *OTHERWISE_OFF.get(key, ()))
    ]
    notes = (
        (
            "tokenizer_config.json asks for clean_up_tokenization_spaces; texts here keep their blanks, and those of"
            " lm-eval's hf model may be others",
        )
        if asks_to_clean
        else ()
    )
    if not rules:
        return notes
    return (
        *notes,
        f"{path.name} asks for {', '.join(rules)}; answers here do not follow it, and lm-eval's hf model"
        " may give others, or none",
    )


def _left_to_the_model(requests: Sequence[Request]) -> frozenset[str]:
    """Of requests that draw, the keys of which their task says nothing: a value of its own stands over the model's."""
    said = [one.sampling for one in requests if one.sampling.temperature > 0]
    own: dict[str, set[float]] = {"top_k": {one.top_k for one in said}, "top_p": {one.top_p for one in said}}
    return frozenset(key for key, default in OF_DRAWS.items() if said and default in own.get(key, {default}))
