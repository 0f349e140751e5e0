from __future__ import annotations

from itertools import islice

import torch

from engines.dispatch import DispatchPlan
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import KeyValueCache, Transformer
from engines.techniques.presets import dropless
from engines.tiny.text import training_text

# English that the tokenizer was not trained on.
PROSE = (
    "A student asks whether 48 clips sold in April and half as many in May make 72 in all. Explain your reasoning, "
    "then give the result. In a triangle with sides 3, 4 and 5, which angle is the largest? Name the law for that. "
) * 6


def plans_over_prose() -> tuple[list[DispatchPlan], torch.Tensor]:
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    tokens = torch.tensor(checkpoint.tokenizer.encode(PROSE))
    model, cache = Transformer(checkpoint), KeyValueCache(checkpoint.config)
    cache.start(len(tokens))
    with torch.inference_mode():
        hidden, plans = model.forward(tokens, cache, dropless(), "prefill")
        return [plan for plan in plans if plan is not None], model.logits(hidden)


def test_routing_is_skewed_as_in_trained_models_but_not_degenerate() -> None:
    plans, _ = plans_over_prose()
    assert len(plans) == 4
    for plan in plans:
        rows = [call.n_rows for call in plan.calls]
        assert 1.5 < max(rows) / (sum(rows) / 16) < 6
        assert len(rows) >= 12, "most experts are chosen by something"


def test_predictions_vary_with_the_context() -> None:
    _, logits = plans_over_prose()
    # Standard deviation about 2 in logits: neither uniform nor certain.
    assert 1 < logits.std() < 4
    assert logits.argmax(-1).unique().numel() > 100


def test_each_digit_is_a_token_of_its_own() -> None:
    tokenizer = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32).tokenizer
    for number in ("7", "42", "1234567890", "2026-11-21"):
        assert [tokenizer.decode([i]) for i in tokenizer.encode(number)] == list(number)


def test_any_text_round_trips() -> None:
    tokenizer = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32).tokenizer
    assert tokenizer.vocabulary_size == 2048
    for text in (*islice(training_text(), 200), PROSE, "naïve café — ½ 東京 🦊\n\t x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_english_takes_far_fewer_tokens_than_bytes() -> None:
    tokenizer = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32).tokenizer
    assert len(PROSE.encode()) / len(tokenizer.encode(PROSE)) > 2
