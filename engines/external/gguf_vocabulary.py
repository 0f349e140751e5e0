"""A tokenizer of ours in a GGUF file, so that programs which show text can use the file.

Only byte-level BPE (GPT-2's kind: Llama 3, Qwen, OLMoE) is written; a file without tokenizer still takes and gives ids.
GGUF has no place for the pattern that splits a text into words: it names one of llama.cpp's. Where the tokenizer's is
none of those that are known here, "default" is named, and a text that is sent as text may be split otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engines.model.checkpoints import CheckpointFacts
from engines.model.model_config import read_json
from engines.model.tokenizer import TOKENIZER_FILE

if TYPE_CHECKING:
    from gguf import GGUFWriter

SPLITS = (
    ("llama-bpe", r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"),
    ("qwen2", r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"),
)
"""What tells the patterns of llama.cpp's names apart."""
DEFAULT_SPLIT = "default"


def add_vocabulary(writer: GGUFWriter, facts: CheckpointFacts) -> None:
    """Raises `EngineError` where the tokenizer's file cannot be read."""
    import gguf

    told = read_json(facts.folder / TOKENIZER_FILE)
    model = told.get("model")
    if not _is_byte_level_bpe(told) or not isinstance(model, dict):
        writer.add_tokenizer_model("no_vocab")
        return
    rows = facts.config.vocabulary_size
    texts, kinds = [f"[PAD{i}]" for i in range(rows)], [int(gguf.TokenType.UNUSED)] * rows
    for text, token_id in model["vocab"].items():
        texts[token_id], kinds[token_id] = text, int(gguf.TokenType.NORMAL)
    tokenizer = facts.tokenizer
    for token_id, (text, is_special) in tokenizer.added_tokens.items():
        kind = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
        texts[token_id], kinds[token_id] = text, int(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split_name(told))
    writer.add_token_list(texts)
    writer.add_token_types(kinds)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    if tokenizer.eos_token_ids:
        writer.add_eos_token_id(tokenizer.eos_token_ids[0])
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    begins = tokenizer.bos_token_id is not None and tokenizer.encode_prompt("")[:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(begins)


def _is_byte_level_bpe(told: dict[str, Any]) -> bool:
    model, decoder = told.get("model"), told.get("decoder")
    has_merges = isinstance(model, dict) and model.get("type") == "BPE" and bool(model.get("merges"))
    return has_merges and isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"


def split_name(told: dict[str, Any]) -> str:
    """llama.cpp's name for the pattern by which a tokenizer splits texts into words."""
    first = told.get("pre_tokenizer") or {}
    parts = first.get("pretokenizers", [first])
    if any(part.get("type") == "ByteLevel" and part.get("use_regex", True) for part in parts):
        return "gpt-2"
    patterns = [p.get("Regex", "") for part in parts if isinstance(p := part.get("pattern"), dict)]
    return next((name for name, sign in SPLITS if any(sign in pattern for pattern in patterns)), DEFAULT_SPLIT)
