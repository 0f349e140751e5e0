from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import KeyValueCache, Transformer
from engines.techniques.presets import dropless
from engines.tiny.training import Batch, Recipe, Stage, train
from harness.train_tiny import train_tiny

pytestmark = pytest.mark.numbers

SHAPE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
    "decoder_sparse_step": 1,
}
SIX_STEPS = Recipe(
    stages=(Stage(n_steps=4, n_rows=4, length=16), Stage(n_steps=2, n_rows=2, length=32)), warmup_steps=2
)


class StoppedError(Exception):
    """In the place of a kill."""


def counting(step: int, stage: Stage) -> Batch:
    """Rows that count upwards from a random start: learnable, and another batch for every step."""
    starts = np.random.default_rng(step).integers(1, 30, size=(stage.n_rows, 1))
    ids = (starts + np.arange(stage.length)) % 64
    return Batch(ids.astype(np.int64), np.ones(ids.shape, np.float32), np.ones(ids.shape, np.bool_))


def stopping_at(stop: int) -> Any:
    def draw(step: int, stage: Stage) -> Batch:
        if step == stop:
            raise StoppedError
        return counting(step, stage)

    return draw


def log_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_rate_rises_stays_and_falls_to_zero() -> None:
    stage = Stage(n_steps=100, n_rows=1, length=8)
    recipe = Recipe(stages=(stage,), peak_rate=1.0, warmup_steps=10, decay_share=0.5)
    assert recipe.rate(0) == pytest.approx(0.1)
    assert recipe.rate(9) == recipe.rate(50) == 1.0
    assert recipe.rate(75) == pytest.approx(0.5)
    assert recipe.rate(99) == pytest.approx(0.02)


def test_rate_falls_with_the_tokens_not_with_the_steps() -> None:
    stages = (Stage(n_steps=10, n_rows=1, length=8), Stage(n_steps=10, n_rows=3, length=8))
    recipe = Recipe(stages=stages, peak_rate=1.0, warmup_steps=0, decay_share=1.0)
    # 80 of 320 tokens are done when the second stage begins.
    assert recipe.rate(10) == pytest.approx(0.75)


def test_stages_follow_each_other() -> None:
    assert [SIX_STEPS.stage(step)[0].length for step in range(6)] == [16, 16, 16, 16, 32, 32]
    assert SIX_STEPS.n_tokens == 6 * 64
    with pytest.raises(ValueError, match="no step 6"):
        SIX_STEPS.stage(6)


def test_a_stopped_training_ends_with_the_weights_of_an_unbroken_one(tmp_path: Path) -> None:
    whole = train(SHAPE, SIX_STEPS, counting, tmp_path / "whole")
    with pytest.raises(StoppedError):
        train(SHAPE, SIX_STEPS, stopping_at(3), tmp_path / "broken", state_every_s=0)
    again = train(SHAPE, SIX_STEPS, counting, tmp_path / "broken")
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    losses = [[row["answer_loss"] for row in log_rows(tmp_path / name)] for name in ("whole", "broken")]
    assert losses[0] == losses[1]


def test_steps_after_the_last_state_are_logged_once(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        train(SHAPE, SIX_STEPS, stopping_at(3), tmp_path)  # No state was written: it begins anew.
    assert len(log_rows(tmp_path)) == 3
    train(SHAPE, SIX_STEPS, counting, tmp_path)
    assert [row["step"] for row in log_rows(tmp_path)] == list("012345")


def test_it_learns_what_can_be_learnt(tmp_path: Path) -> None:
    train(SHAPE, Recipe(stages=(Stage(n_steps=150, n_rows=4, length=16),), warmup_steps=5), counting, tmp_path)
    losses = [float(row["answer_loss"]) for row in log_rows(tmp_path)]
    # Of 64 tokens one follows: at first ln 64, at last next to nothing.
    assert losses[0] == pytest.approx(np.log(64), rel=0.05)
    assert np.mean(losses[-10:]) < 0.3


def test_padding_teaches_nothing(tmp_path: Path) -> None:
    def padded(filler: int) -> dict[str, Tensor]:
        def draw(step: int, stage: Stage) -> Batch:
            batch, half = counting(step, stage), stage.length // 2
            batch.valid_NL[:, half:] = False
            batch.answer_NL[:, half:] = 0.0
            batch.ids_NL[:, half:] = filler
            return batch

        recipe = Recipe(stages=(Stage(n_steps=2, n_rows=4, length=16),), balance_weight=0.0)
        return train(SHAPE, recipe, draw, tmp_path / str(filler))

    one, other = padded(5), padded(60)
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_an_answer_that_weighs_twice_counts_as_two(tmp_path: Path) -> None:
    def row(weights: list[float], name: str) -> dict[str, Tensor]:
        def draw(step: int, stage: Stage) -> Batch:
            ids = np.arange(8, dtype=np.int64)[None]
            return Batch(ids, np.array([[0.0, *weights]], np.float32), np.ones((1, 8), np.bool_))

        recipe = Recipe(stages=(Stage(n_steps=1, n_rows=1, length=8),), balance_weight=0.0, weight_decay=0.0)
        return train(SHAPE, recipe, draw, tmp_path / name)

    # The loss is a weighted mean: all weights doubled, it is the same; one of them doubled, it is another.
    plain, doubled = row([1.0] * 7, "plain"), row([2.0] * 7, "doubled")
    assert all(torch.allclose(plain[name], doubled[name], atol=1e-6) for name in plain)
    uneven = row([2.0, *[1.0] * 6], "uneven")
    assert any(not torch.allclose(plain[name], uneven[name], atol=1e-6) for name in plain)


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    train(SHAPE, SIX_STEPS, counting, tmp_path)
    with pytest.raises(EngineError, match="another model"):
        train(SHAPE | {"hidden_size": 48}, SIX_STEPS, counting, tmp_path)


def test_the_state_of_another_recipe_is_refused(tmp_path: Path) -> None:
    train(SHAPE, SIX_STEPS, counting, tmp_path)
    with pytest.raises(EngineError, match="another recipe"):
        train(SHAPE, SIX_STEPS.model_copy(update={"seed": 1}), counting, tmp_path)


def test_a_model_from_elsewhere_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="not trained here"):
        train_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    """The folder of a run got a tokenizer and a model beside its tables."""
    (tmp_path / "run.sqlite").write_text("")
    with pytest.raises(
        EngineError, match=r"holds files of something else \(run\.sqlite\); name a new or an empty folder"
    ):
        train_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.sqlite"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_torch_does_not_see_is_told_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cuda"):
        train_tiny(tmp_path / "new", device="cuda")
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="lower peak_rate"):
        train(
            SHAPE,
            Recipe(stages=(Stage(n_steps=50, n_rows=4, length=16),), peak_rate=1e30, warmup_steps=0),
            counting,
            tmp_path,
        )


def test_what_is_written_is_read_by_transformers_and_by_us_alike(tmp_path: Path) -> None:
    import transformers

    train_tiny(tmp_path, recipe=Recipe(stages=(Stage(n_steps=1, n_rows=1, length=64, lessons="copying"),)))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    checkpoint = load_checkpoint(str(tmp_path), torch.float32)
    tokens = torch.tensor(checkpoint.tokenizer.encode("The kettle began to sing before anyone was awake."))
    cache = KeyValueCache(checkpoint.config)
    cache.start(len(tokens))
    with torch.inference_mode():
        model = Transformer(checkpoint)
        hidden, _ = model.forward(tokens, cache, dropless(), "prefill")
        torch.testing.assert_close(model.logits(hidden), theirs(tokens[None]).logits[0], atol=1e-4, rtol=0)
    assert (tmp_path / "training.csv").read_text().count("\n") == 2
