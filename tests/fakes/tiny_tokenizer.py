"""A byte-level BPE of 2000 tokens, trained in a moment on the bundled samples: lossless on any text."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from workloads.datasets import SAMPLES


class TinyTokenizer:
    def __init__(self, vocabulary_size: int = 2000) -> None:
        self.name = f"tiny-{vocabulary_size}"
        self.eos_token_ids: tuple[int, ...] = (0,)
        self.bos_token_id: int | None = None
        self.has_chat_template = True
        self.vocabulary_size = vocabulary_size
        self._bpe = _train(vocabulary_size)

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text).ids

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        return self._bpe.decode(list(token_ids))

    def chat(self, messages: list[dict[str, str]]) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


@cache
def _train(vocabulary_size: int) -> Tokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([p.read_text(encoding="utf-8") for p in sorted(SAMPLES.glob("*.jsonl"))], trainer)
    return bpe
