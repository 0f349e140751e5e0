"""Prompts that grow across LongRoPE's original length: our way, and transformers' by its own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from devices.models.timeline import Timeline
from engines.model.checkpoints import load_checkpoint
from engines.model.rope_config import LongScaling
from engines.pricing.modelled import ModelledEngine
from engines.pricing.shapes import own_shape
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.records import Completion, Request
from tests.fakes.families import CASES, LONG_FACTORS, PHI_MOE, PHI_MOE_ROPE, FamilyCase, write_family
from tests.toy_sheet import toy_sheet

pytestmark = pytest.mark.numbers

ORIGINAL = 16
PHI_MOE_OF_UNLIKE_FACTORS = FamilyCase(
    "Phimoe",
    {**PHI_MOE, "rope_parameters": {**PHI_MOE_ROPE, **LONG_FACTORS, "original_max_position_embeddings": ORIGINAL}},
)
MODELS = {"phi3": CASES["phi3-long-rope"], "phi-moe": PHI_MOE_OF_UNLIKE_FACTORS}
N_NEW = 24


@pytest.fixture(scope="module", params=MODELS)
def folder_and_theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, write_family(folder, MODELS[request.param])


def tokens(n: int) -> list[int]:
    return torch.randint(1, 2048, (n,), generator=torch.Generator().manual_seed(3)).tolist()


def built(
    folder: Path, long_rope: Literal["at_once", "when_reached"], chunk: int = 512, reuse_prefix: bool = False
) -> ReferenceEngine:
    checkpoint = load_checkpoint(str(folder), torch.float32)
    return ReferenceEngine(checkpoint, DroplessParameters(), chunk, reuse_prefix=reuse_prefix, long_rope=long_rope)


def generation(prompt: list[int], name: str = "r") -> Request:
    return Request(
        request_id=name,
        sample_id=name,
        kind="generate",
        prompt_ids=tuple(prompt),
        max_new_tokens=N_NEW,
        ignore_end_tokens=True,
    )


def loglikelihood(prompt: list[int], continuation: list[int]) -> Request:
    return Request(
        request_id="l",
        sample_id="l",
        kind="loglikelihood",
        prompt_ids=tuple(prompt),
        continuation_ids=tuple(continuation),
    )


def answered(engine: ReferenceEngine, request: Request) -> Completion:
    return engine.run(request, lambda event, at_s: None)


def generated_there(theirs: Any, prompt: list[int]) -> tuple[int, ...]:
    found = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        do_sample=False,
        max_new_tokens=N_NEW,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(found[0, len(prompt) :].tolist())


@pytest.mark.parametrize("n_prompt", [1, 10, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 30])
def test_prompts_continue_as_they_do_in_transformers(folder_and_theirs: tuple[Path, Any], n_prompt: int) -> None:
    folder, theirs = folder_and_theirs
    prompt = tokens(n_prompt)
    wanted = generated_there(theirs, prompt)
    assert len(set(wanted)) > 2, "a loop of few tokens would agree by chance"
    for chunk in (512, 7):
        assert answered(built(folder, "when_reached", chunk), generation(prompt)).token_ids == wanted


def test_our_way_differs_where_a_short_prompt_grows(tmp_path: Path) -> None:
    """Or the two would not need names."""
    theirs = write_family(tmp_path, MODELS["phi3"])
    assert answered(built(tmp_path, "at_once"), generation(tokens(10))).token_ids != generated_there(theirs, tokens(10))


def test_likelihoods_are_those_of_one_forward_pass(folder_and_theirs: tuple[Path, Any]) -> None:
    folder, theirs = folder_and_theirs
    for n_prompt, n_continuation in ((8, 6), (10, 20), (30, 5)):
        prompt, continuation = (
            tokens(n_prompt + n_continuation)[:n_prompt],
            tokens(n_prompt + n_continuation)[n_prompt:],
        )
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + continuation[:-1]])).logits[0, n_prompt - 1 :]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum()
        found = answered(built(folder, "when_reached", 7), loglikelihood(prompt, continuation))
        assert found.loglikelihood == pytest.approx(float(wanted), abs=1e-3)


def test_sequences_of_a_batch_reach_the_length_one_by_one(folder_and_theirs: tuple[Path, Any]) -> None:
    folder, theirs = folder_and_theirs
    prompts = [tokens(30)[-n:] for n in (5, 14, 25)]
    requests = [generation(prompt, str(i)) for i, prompt in enumerate(prompts)]
    found = built(folder, "when_reached").run_batch(requests, lambda event, at_s: None)
    assert [one.token_ids for one in found] == [generated_there(theirs, prompt) for prompt in prompts]


def test_a_kept_prefix_is_one_that_is_turned_alike(folder_and_theirs: tuple[Path, Any]) -> None:
    """After a request that grew long, a short one starts anew, and one that starts long keeps what it shares."""
    folder, _ = folder_and_theirs
    engine = built(folder, "when_reached", reuse_prefix=True)
    first = answered(engine, generation(tokens(12)))
    grown = [*tokens(12), *first.token_ids][:30]
    for prompt, is_kept in ((grown, True), (tokens(12), False), ([*tokens(12), 7], True), (grown, False)):
        alone = answered(built(folder, "when_reached"), loglikelihood(prompt, [5, 6]))
        kept = answered(engine, loglikelihood(prompt, [5, 6]))
        assert kept.loglikelihood == pytest.approx(alone.loglikelihood, abs=1e-3)
        assert bool(kept.n_cached_tokens) == is_kept


def test_modelled_hardware_is_charged_in_the_answer_for_what_is_computed_again(tmp_path: Path) -> None:
    """A prompt of just the original length: its prefill takes as long either way, its second token does not."""
    write_family(tmp_path, MODELS["phi-moe"])
    found = []
    for way in ("at_once", "when_reached"):
        reference = built(tmp_path, way)  # type: ignore[arg-type]
        shape = own_shape("phi", load_checkpoint(str(tmp_path), torch.float32).config)
        engine = ModelledEngine(reference, Timeline(toy_sheet()), "cpu", shape)
        found.append(engine.run(generation(tokens(ORIGINAL)), lambda event, at_s: None))
    at_once, when_reached = found
    assert when_reached.prefill_end_s == pytest.approx(at_once.prefill_end_s)
    prefill_s = at_once.prefill_end_s - at_once.start_s
    gaps_s = [one.token_times_s[1] - one.token_times_s[0] for one in found]
    assert gaps_s[1] - gaps_s[0] > prefill_s / 2
    assert when_reached.e2e_s - at_once.e2e_s == pytest.approx(gaps_s[1] - gaps_s[0], rel=0.2)


def test_what_is_computed_again_is_counted(folder_and_theirs: tuple[Path, Any]) -> None:
    """Of 10 + 24 tokens the last is never read; at the seventeenth the sixteen before it are read again."""
    folder, _ = folder_and_theirs
    rows = []
    for way in ("at_once", "when_reached"):
        engine = built(folder, way)  # type: ignore[arg-type]
        answered(engine, generation(tokens(10)))
        rows.append(engine.take_counters().routed_pairs)
    config = load_checkpoint(str(folder), torch.float32).config
    assert isinstance(config.rope.scaling, LongScaling)
    per_token = 0 if config.moe is None else config.moe.top_k * config.n_layers
    assert rows == [33 * per_token, (33 + ORIGINAL) * per_token]
