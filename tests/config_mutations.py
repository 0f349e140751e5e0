"""One key of a config changed, added or removed, and what transformers and this engine make of the same file.

The keys to try are those of transformers' own config classes: what it learns to read tomorrow is tried tomorrow.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.config_keys import FAMILY_KEYS
from engines.model.idle_keys import CHANGES_NO_NUMBER
from engines.model.model_config import ModelConfig, parse_model_config
from engines.model.rope_config import as_transformers
from engines.model.transformer import KeyValueCache, Transformer
from engines.techniques.presets import dropless
from tests.fakes.families import CASES, LONG_FACTORS, PHI_MOE, PHI_MOE_ROPE, FamilyCase, randomise
from tests.fakes.random_models import LLAMA3_ROPE, MOE, SIZES, copy_tokenizer

Raw = dict[str, Any]
N_TOKENS = 40
"""More than the windows, chunks and scales of the cases below."""

LARGEST = 130
LARGEST_OF = {"num_hidden_layers": 7, "attention_factor": 2}
"""More layers, or scores sharpened more, than those would spread what rounding leaves beyond the tolerance."""
TAKEN = {"cache_implementation": "hybrid", "return_dict": True, "_attn_implementation": "eager"}
"""Keys of which transformers takes few values, or only one."""

BASES: dict[str, FamilyCase] = {
    "llama": FamilyCase("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": FamilyCase("Qwen2", {"tie_word_embeddings": True}),
    "qwen3-moe": FamilyCase("Qwen3Moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "phi-moe": FamilyCase(
        "Phimoe",
        {**PHI_MOE, "rope_parameters": {**PHI_MOE_ROPE, **LONG_FACTORS, "original_max_position_embeddings": 16}},
    ),
    "phi3": CASES["phi3-long-rope"],
    "mixtral": CASES["mixtral-sliding"],
    "olmoe": CASES["olmoe-clip"],
    "qwen2-moe": CASES["qwen2-moe-some-dense"],
    **{name: CASES[name] for name in ("qwen3", "gemma2", "deepseek-v2", "deepseek-v2-groups", "deepseek-v3")},
    **{name: CASES[name] for name in ("glm4-moe", "glm4-moe-air", "glm4-moe-lite", "gpt-oss", "gpt-oss-yarn")},
    **{name: CASES[name] for name in ("llama4", "llama4-top2")},
}


def config_class(case: FamilyCase) -> Any:
    import transformers

    return getattr(transformers, case.family + ("TextConfig" if case.family == "Llama4" else "Config"))


def raw_of(case: FamilyCase) -> Raw:
    """The config.json that transformers writes, with every key of the family."""
    raw: Raw = json.loads(config_class(case)(**{**SIZES, "pad_token_id": None, **case.changes}).to_json_string(False))
    return {**raw, "architectures": [case.family + "ForCausalLM"]}


@cache
def values_by_key() -> dict[str, list[Any]]:
    """Every key that any family's config class has, with the values that any of them gives it."""
    values: dict[str, list[Any]] = {key: [] for key in CHANGES_NO_NUMBER}
    for case in BASES.values():
        for raw in (raw_of(case), {f.name: f.default for f in fields(config_class(case))}):
            for key, value in raw.items():
                if key not in ("architectures", "model_type", "dtype"):
                    known = values.setdefault(key, [])
                    if isinstance(value, bool | int | float | str | list | dict) and value not in known:
                        known.append(value)
    return values


def other_values(key: str, said: Any) -> list[Any]:
    """Values that a key might have in the place of this one: some of its own making, and what other families say."""
    found: list[Any] = [None]
    if isinstance(said, bool):
        found.append(not said)
    elif isinstance(said, int):
        found += [said + 1, 2 * said, said // 2, 0]
    elif isinstance(said, float):
        found += [1.5 * said, 0.5 * said, 1]
    elif isinstance(said, list):
        found += [said[::-1], []]
    for value in values_by_key().get(key) or [True, 2]:
        found.append(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            found.append(type(value)(1.5 * value + 1))
    unlike: list[Any] = []
    for value in found:
        # A model of the published sizes would take hours.
        is_large = type(value) is int and value > LARGEST_OF.get(key, LARGEST)
        if not is_large and (type(value), value) not in [(type(v), v) for v in [*unlike, said]]:
            unlike.append(value)
    return unlike


@dataclass(frozen=True)
class Mutation:
    """keys: an error has to name one of them."""

    keys: tuple[str, ...]
    told: str
    raw: Raw


NOT_MUTATED = frozenset({"architectures", "model_type", "dtype", "rope_parameters"})


def mutations(raw: Raw) -> Iterator[Mutation]:
    """One key at a time; `harmless` has those that change no number."""
    keys = {*values_by_key(), *raw} - CHANGES_NO_NUMBER - NOT_MUTATED
    aliases = FAMILY_KEYS[raw["architectures"][0]].aliases
    for key in sorted(keys):
        names = (key, aliases.get(key, key), *(["n_group"] if key == "topk_method" else []))
        if key in raw:
            yield Mutation(names, f"without {key}", {k: v for k, v in raw.items() if k != key})
        for value in other_values(key, raw.get(key)):
            yield Mutation(names, f"{key} {value!r:.60}", {**raw, key: value})
    rope = raw["rope_parameters"]
    for key in rope:
        yield Mutation(
            _rope_names(key), f"rope without {key}", _with_rope(raw, {k: v for k, v in rope.items() if k != key})
        )
    known = {key for case in BASES.values() for key in raw_of(case)["rope_parameters"]}
    for key in sorted(known | {"attention_factor", "beta_slow", "low_freq_factor", "short_mscale", "type"}):
        for value in [*other_values(key, rope.get(key)), "linear", "yarn"][:6]:
            yield Mutation(_rope_names(key), f"rope {key} {value!r:.60}", _with_rope(raw, {**rope, key: value}))
    for told, value in (("null", None), ("empty", {}), ("linear", {"rope_type": "linear", "factor": 2.0})):
        yield Mutation(("rope", "factor"), f"rope_parameters {told}", _with_rope(raw, value))
        yield Mutation(("rope", "factor"), f"rope_scaling {told}", {**raw, "rope_scaling": value})


def _rope_names(key: str) -> tuple[str, ...]:
    """Of another type, other parameters are missing or too many."""
    return ("rope_type", "factor", "mscale", "original_max") if key in ("rope_type", "type") else (key,)


def _with_rope(raw: Raw, rope: Raw | None) -> Raw:
    return {**raw, "rope_parameters": rope}


def absent(raw: Raw, case: FamilyCase) -> Raw:
    """Only what gives the model its size, or it would have the published one; all else means what absence means."""
    sizes = {key for key in case.changes if key.endswith(("_rank", "_dim", "_size", "_experts", "_per_tok"))}
    # The published padding token lies beyond these vocabularies.
    sizes |= {"intermediate_size_mlp", "num_local_experts", "pad_token_id"}
    return {key: value for key, value in raw.items() if key in {*SIZES, *sizes, "architectures"}}


def harmless(raw: Raw, case: FamilyCase, round_: int) -> Raw:
    """Every key that changes no number, with a value of its own each that transformers takes."""
    import transformers

    for key in sorted(CHANGES_NO_NUMBER | FAMILY_KEYS[raw["architectures"][0]].unread):
        values = [value for value in other_values(key, raw.get(key)) if value is not None]
        value = TAKEN.get(key) or (values[round_ % len(values)] if values else True)
        try:
            transformers.GenerationConfig.from_model_config(config_class(case)(**copy.deepcopy({**raw, key: value})))
        except Exception:  # noqa: BLE001 - of a type that it does not take
            continue
        raw = {**raw, key: value}
    return raw


class Peers:
    """Both sides of one family, with weights kept for configs of the same shapes."""

    def __init__(self, case: FamilyCase, folder: Path) -> None:
        self._case = case
        self._folder = folder
        self._weights: dict[tuple[Any, ...], tuple[Path, dict[str, torch.Tensor]]] = {}
        self._ours: dict[tuple[Any, ...], torch.Tensor] = {}
        self.tokens = torch.randint(0, SIZES["vocab_size"], (N_TOKENS,), generator=torch.Generator().manual_seed(3))

    def refusal(self, raw: Raw) -> str | None:
        """Our words on a config that we refuse by itself, or None."""
        try:
            self.parsed(raw)
        except EngineError as error:
            return str(error)
        return None

    def parsed(self, raw: Raw) -> ModelConfig:
        return parse_model_config(raw, raw.get("eos_token_id"))

    def theirs(self, raw: Raw) -> tuple[torch.Tensor, Path] | None:
        """transformers' logits, and a folder with the weights that they came from; None where it takes no such file."""
        try:
            model = self._their_model(raw)
            shapes = (
                model.config.tie_word_embeddings,
                *((name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()),
            )
            if shapes not in self._weights:
                randomise(model)
                folder = self._folder / str(len(self._weights))
                model.save_pretrained(folder)
                copy_tokenizer(folder)
                self._weights[shapes] = folder, model.state_dict()
            folder, state = self._weights[shapes]
            model.load_state_dict(state)
            logits = self._their_logits(model)
        except Exception:  # noqa: BLE001 - whatever it raises, it has no logits to compare with
            return None
        return logits, folder

    def in_doubles(self, raw: Raw, folder: Path) -> torch.Tensor:
        """transformers' logits with the weights of this folder, in float64: what rounding is held against."""
        model = self._their_model(raw, experts="eager")  # the others take no doubles
        model.load_state_dict(next(state for where, state in self._weights.values() if where == folder))
        return self._their_logits(model.double())

    def _their_model(self, raw: Raw, experts: str | None = None) -> Any:
        import transformers

        config = config_class(self._case)(**copy.deepcopy(raw))
        config._attn_implementation = "eager" if self._case.eager else "sdpa"
        if experts is not None:
            config._experts_implementation = experts
        return getattr(transformers, self._case.family + "ForCausalLM")(config).eval()

    def _their_logits(self, model: Any) -> torch.Tensor:
        with torch.inference_mode():
            out = model(self.tokens[None])
        # A tuple where the config says so.
        parts = [out.logits] if hasattr(out, "logits") else out
        return next(part[0] for part in parts if isinstance(part, torch.Tensor) and part.ndim == 3)

    def ours(self, raw: Raw, folder: Path) -> torch.Tensor:
        """Raises `EngineError`."""
        config = self.parsed(raw)
        known = (folder, repr(config))
        if known not in self._ours:
            (folder / "config.json").write_text(json.dumps(raw))
            checkpoint = load_checkpoint(str(folder), torch.float32)
            rope = as_transformers(checkpoint.config.rope)
            model = Transformer(replace(checkpoint, config=replace(checkpoint.config, rope=rope)))
            cache_ = KeyValueCache(model.config)
            cache_.start(N_TOKENS)
            with torch.inference_mode():
                self._ours[known] = model.logits(model.forward(self.tokens, cache_, dropless(), "prefill")[0])
        return self._ours[known]
