"""Logits that are no numbers, of weights that were damaged after they were read: an error, and never an answer."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engines.base import EngineError
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.quantised import Quantisation
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.records import Sampling
from tests.fakes.random_models import write_random_model
from tests.test_reference import generate, ignore, loglikelihood

pytestmark = pytest.mark.numbers


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[Checkpoint, tuple[int, ...]]:
    """A model that loaded soundly and has NaN for one token now: the second that it answered with before."""
    write_random_model(tmp_path, "qwen3-moe")
    sound = load_checkpoint(str(tmp_path), torch.float32)
    answer = ReferenceEngine(sound, DroplessParameters()).run(generate(sound), ignore).token_ids
    embedding_LH = sound.weights.embedding_LH.clone()
    embedding_LH[answer[1]] = math.nan
    return replace(sound, weights=replace(sound.weights, embedding_LH=embedding_LH)), answer


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1e-4)], ids=["greedy", "sampled"])
def test_logits_that_are_no_numbers_are_an_error_of_that_token_and_no_answer(
    damaged: tuple[Checkpoint, tuple[int, ...]], sampling: Sampling
) -> None:
    checkpoint, answer = damaged
    assert answer[0] != answer[1]
    request = generate(checkpoint, sampling=sampling).model_copy(update={"request_id": "second"})
    assert answer[1] not in request.prompt_ids
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    assert engine.run(generate(checkpoint, max_new_tokens=2), ignore).token_ids == answer[:2]
    with pytest.raises(EngineError, match="request second, token 3: largest logit is nan"):
        engine.run(request, ignore)
    with pytest.raises(EngineError, match="request second, token 3: largest logit is nan"):
        engine.run_batch([generate(checkpoint, prompt="Sound."), request], ignore)


@pytest.mark.parametrize(
    ("dtype", "quantise", "helps"),
    [
        (torch.float32, Quantisation(), ": fetch the model again"),
        (torch.bfloat16, Quantisation(), ": fetch the model again"),
        (torch.float32, Quantisation(experts="int8", arithmetic="int8"), ": leave arithmetic int8 out, or fetch the"),
        (
            torch.float32,
            Quantisation(cache="fp16"),
            ": keep the cache in bf16 or fp32, for fp16 ends at 65504, or fetch",
        ),
        (torch.float32, Quantisation(cache="bf16"), ": fetch the model again"),
        (
            torch.float16,
            Quantisation(experts="int8", arithmetic="int8"),
            ": hold weights in bfloat16 or float32, for float16 ends at 65504, or leave arithmetic int8 out, or fetch",
        ),
    ],
)
def test_no_number_is_told_with_what_could_be_wider_here(
    dtype: torch.dtype, quantise: Quantisation, helps: str
) -> None:
    sound = load_checkpoint("bundled:tiny-qwen3-moe", dtype, quantise)
    broken = replace(sound.weights, embedding_LH=torch.full_like(sound.weights.embedding_LH, math.nan))
    engine = ReferenceEngine(replace(sound, weights=broken), DroplessParameters())
    for request in (generate(sound), loglikelihood(range(40, 50), [3, 4])):
        with pytest.raises(EngineError, match=f"or weights are damaged{helps}"):
            engine.run(request, ignore)


def test_loglikelihood_that_is_no_number_is_an_error(damaged: tuple[Checkpoint, tuple[int, ...]]) -> None:
    checkpoint, answer = damaged
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=4)
    sound = loglikelihood(range(40, 50), [3, 4, answer[1]])
    value = engine.run(sound, ignore).loglikelihood
    assert value is not None
    assert value < 0
    beyond = loglikelihood(range(40, 50), [3, answer[1], 5])
    with pytest.raises(EngineError, match="request r, continuation token 3 or before: log-likelihood is nan"):
        engine.run_batch([sound, beyond], ignore)


def test_the_engine_answers_on_after_an_error(damaged: tuple[Checkpoint, tuple[int, ...]]) -> None:
    checkpoint, answer = damaged
    engine = ReferenceEngine(checkpoint, DroplessParameters(), reuse_prefix=True)
    with pytest.raises(EngineError, match="token 3"):
        engine.run(generate(checkpoint), ignore)
    assert engine.run(generate(checkpoint, max_new_tokens=2), ignore).token_ids == answer[:2]
