"""Reuse of a shared prefix: the same answers as without it, and a record that never claims what the cache lacks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from devices.models.timeline import Timeline
from engines.base import EngineError
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.key_value_cache import KeyValueCache
from engines.model.rope_config import LongScaling, RopeConfig
from engines.oracle import OracleParameters
from engines.prefix import HeldTokens, turned_alike
from engines.pricing.modelled import ModelledEngine
from engines.pricing.shapes import own_shape
from engines.reference import ReferenceEngine
from engines.techniques.base import TechniqueParameters
from engines.techniques.composed import ComposedTechnique
from engines.techniques.presets import DroplessParameters
from harness.plan import build_plan
from harness.run_parts import RunParts
from harness.schema import TrialProtocol
from harness.session import PreparedCell, run_trial
from results.records import Completion, Request
from tests.fakes.families import CASES, LONG_ROPE, FamilyCase, write_family
from tests.fakes.machine import FakeBench, FakeWorkload
from tests.plans import HOST, M2_ULTRA, NPUMOE, TIERS, raw_plan
from tests.techniques import NpumoeT
from tests.toy_sheet import toy_sheet

pytestmark = pytest.mark.numbers

TOLERANCE = 5e-7
"""Of a log-likelihood, relative: eight units in the last place of fp32. Chunks of other sizes sum in another order."""
CHUNK = 16
TECHNIQUES: dict[str, TechniqueParameters] = {
    "dropless": DroplessParameters(),
    "oracle": OracleParameters(),
    "npumoe-t": NpumoeT(multiples=(1.0, 0.5), align=1),
}
"""Tiers so small that a good part of the pairs is dropped."""


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


@pytest.fixture(params=TECHNIQUES)
def technique(request: pytest.FixtureRequest) -> TechniqueParameters:
    return TECHNIQUES[request.param]


def ignore(event: str, at_s: float) -> None:
    """A listener that does nothing."""


def tokens(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(8, 2048), k=n))


def ask(prompt_ids: Sequence[int], continuation_ids: Sequence[int]) -> Request:
    return Request(
        request_id="r",
        sample_id="s",
        kind="loglikelihood",
        prompt_ids=tuple(prompt_ids),
        continuation_ids=tuple(continuation_ids),
    )


def generate(prompt_ids: Sequence[int], n: int = 6) -> Request:
    return Request(request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(prompt_ids), max_new_tokens=n)


def built(checkpoint: Checkpoint, technique: TechniqueParameters, reuse_prefix: bool) -> ReferenceEngine:
    engine = ReferenceEngine(checkpoint, technique, CHUNK, reuse_prefix=reuse_prefix)
    if engine.needs_calibration:
        engine.calibrate([tokens(60, seed) for seed in range(100, 104)])
    return engine


def answers(engine: ReferenceEngine, requests: Sequence[Request], alone: bool = False) -> list[Completion]:
    """alone: as if each were the first."""
    found = []
    for request in requests:
        if alone:
            engine.reset()
        found.append(engine.run(request, ignore))
    return found


def cached(completions: Sequence[Completion]) -> list[int]:
    return [c.n_cached_tokens for c in completions]


def assert_same_answers(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.n_prompt_tokens == theirs.n_prompt_tokens
        assert (ours.token_ids, ours.text, ours.is_greedy) == (theirs.token_ids, theirs.text, theirs.is_greedy)
        if theirs.loglikelihood is not None:
            assert ours.loglikelihood == pytest.approx(theirs.loglikelihood, rel=TOLERANCE)


# --- the same answers ------------------------------------------------------------------------------------------------

CONTEXT = tokens(50, seed=1)
ANSWER = tokens(9, seed=2)
OTHER = tokens(40, seed=3)
MIXED = [
    ask(CONTEXT, tokens(5, seed=4)),
    ask(CONTEXT, tokens(8, seed=5)),
    ask(CONTEXT, tokens(1, seed=6)),
    ask(CONTEXT, tokens(1, seed=6)),  # equal to the one before
    ask(OTHER, tokens(3, seed=7)),  # unrelated
    ask(CONTEXT, tokens(3, seed=8)),  # its context is gone
    generate(CONTEXT),
    generate(CONTEXT),
    ask(CONTEXT[:20], tokens(40, seed=9)),  # shorter context, more asked than the cache had room for
    generate(CONTEXT[:33]),
    generate((*CONTEXT, *ANSWER)),  # the next turn
    generate((*CONTEXT, *ANSWER, *OTHER)),
    ask(CONTEXT[:1], CONTEXT[1:4]),
    generate((*CONTEXT[:30], *OTHER)),  # parts in the middle of a chunk
]


def test_answers_equal_those_without_reuse(checkpoint: Checkpoint, technique: TechniqueParameters) -> None:
    """The order in which the engine sees them changes what it keeps, and nothing else."""
    plain, reusing = built(checkpoint, technique, False), built(checkpoint, technique, True)
    for seed in range(3):
        requests = random.Random(seed).sample(MIXED, len(MIXED)) if seed else MIXED
        expected, got = answers(plain, requests), answers(reusing, requests)
        assert_same_answers(got, expected)
        assert cached(expected) == [0] * len(requests)
        assert sum(n > 0 for n in cached(got)) >= 3, "an order that reuses nothing would show nothing"
    if technique.technique == "npumoe-t":
        assert (plain.take_counters().drop_rate or 0) > 0.05, "tiers that drop nothing would couple nothing"


def test_tiers_that_reused_part_of_a_chunk_would_answer_otherwise(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why whole chunks: the same requests, with tiers taken for a technique that leaves tokens alone."""
    technique = TECHNIQUES["npumoe-t"]
    expected = answers(built(checkpoint, technique, False), MIXED)
    # Set in its constructor, so a class attribute alone would not stand.
    alone = property(lambda self: False, lambda self, value: None)
    monkeypatch.setattr(ComposedTechnique, "couples_tokens", alone, raising=False)
    got = answers(built(checkpoint, technique, True), MIXED)
    with pytest.raises(AssertionError):
        assert_same_answers(got, expected)


@pytest.mark.parametrize("family", ["mixtral-sliding", "gpt-oss", "llama4", "deepseek-v3", "gemma2", "glm4-moe"])
def test_every_layout_of_cache_can_be_cut(family: str, tmp_path: Path) -> None:
    """Sliding windows, attention in blocks, latent keys, sinks: with windows shorter than what is shared."""
    write_family(tmp_path, CASES[family])
    model = load_checkpoint(str(tmp_path), torch.float32)
    plain, reusing = (built(model, DroplessParameters(), reuse) for reuse in (False, True))
    requests = [ask(CONTEXT, ANSWER[:3]), ask(CONTEXT, ANSWER), ask(CONTEXT[:37], OTHER), generate(CONTEXT[:37], 12)]
    got = answers(reusing, requests)
    assert_same_answers(got, answers(plain, requests))
    assert cached(got) == [0, 49, 36, 36]


# --- what is reused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Of 50 tokens of context the last is always computed; whole chunks of 16 are 48.
        ("dropless", [0, 49, 49, 0, 49]),
        ("npumoe-t", [0, 48, 48, 0, 48]),
    ],
)
def test_all_but_the_last_token_of_a_shared_context_is_kept(
    checkpoint: Checkpoint, name: str, expected: list[int]
) -> None:
    asked = [ask(CONTEXT, ANSWER), ask(CONTEXT, OTHER), generate(CONTEXT), generate(OTHER[:1]), ask(CONTEXT, ANSWER)]
    engine = built(checkpoint, TECHNIQUES[name], True)
    assert cached(answers(engine, asked[:4])) == expected[:4]
    engine.run(asked[0], ignore)
    assert engine.run(asked[4], ignore).n_cached_tokens == expected[4]


def test_a_turn_keeps_the_one_before_and_its_answer_where_that_is_the_models_own(checkpoint: Checkpoint) -> None:
    engine = built(checkpoint, DroplessParameters(), True)
    first = engine.run(generate(CONTEXT, 6), ignore)
    # The sixth token was chosen and never read.
    own = engine.run(generate((*CONTEXT, *first.token_ids, *OTHER)), ignore)
    assert (own.n_cached_tokens, own.n_prompt_tokens) == (50 + 5, 50 + 6 + 40)
    engine.reset()
    engine.run(generate(CONTEXT, 6), ignore)
    assert first.token_ids[0] != ANSWER[0]
    assert engine.run(generate((*CONTEXT, *ANSWER)), ignore).n_cached_tokens == 50


def test_tiers_keep_nothing_that_decoding_wrote(checkpoint: Checkpoint) -> None:
    """24 prompt tokens and 8 decoded ones fill two chunks of 16, but prefill plans the second one as a whole."""
    engine = built(checkpoint, TECHNIQUES["npumoe-t"], True)
    first = engine.run(generate(CONTEXT[:24], 9), ignore)
    following = engine.run(generate((*CONTEXT[:24], *first.token_ids, *OTHER)), ignore)
    assert following.n_cached_tokens == CHUNK


def test_counters_and_observer_see_computed_tokens_only(checkpoint: Checkpoint) -> None:
    engine = built(checkpoint, DroplessParameters(), True)
    engine.run(ask(CONTEXT, ANSWER), ignore)
    first = engine.take_counters()
    completion = engine.run(ask(CONTEXT, ANSWER), ignore)
    assert first.routed_pairs == (50 + 9 - 1) * 2 * 4  # top-2, four layers
    assert completion.n_computed_tokens == 1 + 9 - 1
    assert engine.take_counters().routed_pairs == completion.n_computed_tokens * 2 * 4


def test_reset_forgets(checkpoint: Checkpoint) -> None:
    engine = built(checkpoint, DroplessParameters(), True)
    assert cached(answers(engine, [generate(CONTEXT)] * 3, alone=True)) == [0, 0, 0]


def test_an_engine_not_told_to_reuse_computes_everything(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    assert cached(answers(engine, [generate(CONTEXT)] * 2)) == [0, 0]


def test_requests_at_the_models_length_are_reused_to_the_last_position(tmp_path: Path) -> None:
    write_family(tmp_path, CASES["qwen3"])
    model = load_checkpoint(str(tmp_path), torch.float32)
    plain, reusing = (built(model, DroplessParameters(), reuse) for reuse in (False, True))
    full = tokens(plain.max_length, seed=11)
    requests = [
        ask(full, [5]),
        ask(full, [6]),
        ask(full[:-12], full[-12:]),
        generate(full[:-6]),
        generate(full[:-1], 1),
    ]
    got = answers(reusing, requests)
    n = len(full)
    assert_same_answers(got, answers(plain, requests))
    assert cached(got) == [0, n - 1, n - 13, n - 7, n - 6]
    with pytest.raises(EngineError, match="exceed max_length"):
        reusing.run(ask(full, [5, 6]), ignore)
    # Refused before any work: what was held still is.
    assert reusing.run(generate(full[:-1], 1), ignore).n_cached_tokens == n - 2


# --- where keys are turned by the sequence's length ------------------------------------------------------------------


PHI3_LONG = FamilyCase(
    "Phi3",
    {"rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 64},
)


def test_longrope_keeps_nothing_across_its_original_length(tmp_path: Path) -> None:
    """Its keys are turned by other angles in a longer sequence; kept ones would be wrong, not merely rounded."""
    write_family(tmp_path, PHI3_LONG)
    model = load_checkpoint(str(tmp_path), torch.float32)
    scaling = model.config.rope.scaling
    assert isinstance(scaling, LongScaling)
    original = scaling.original_max_length
    context = tokens(original - 10, seed=12)
    requests = [generate(context, 10), generate(context, 11), generate(context, 12), generate(context, 10)]
    plain, reusing = (built(model, DroplessParameters(), reuse) for reuse in (False, True))
    got = answers(reusing, requests)
    assert_same_answers(got, answers(plain, requests))
    assert cached(got) == [0, 0, len(context) - 1, 0]


def test_only_longrope_turns_by_the_sequences_length() -> None:
    plain = RopeConfig(theta=1e4, dim=4, pairs="halves", scaling=None)
    assert turned_alike(plain, 10, 10_000)
    factors = {"short_factors": (1.0, 2.0), "long_factors": (1.0, 2.0), "short_amplitude": 1.0}
    for long_amplitude, alike in ((1.0, True), (1.5, False)):
        scaling = LongScaling(**factors, long_amplitude=long_amplitude, original_max_length=100)  # type: ignore[arg-type]
        rope = RopeConfig(theta=1e4, dim=4, pairs="halves", scaling=scaling)
        assert turned_alike(rope, 100, 101) == alike
        assert turned_alike(rope, 99, 100)


# --- errors in the middle --------------------------------------------------------------------------------------------


class BrokenError(Exception):
    """Stands for anything that stops a request half-way."""


@pytest.mark.parametrize("n_layers_before", [0, 1, 4, 5, 8, 11])
def test_a_request_that_breaks_off_leaves_no_false_claim(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, n_layers_before: int
) -> None:
    """Four layers: it breaks in the first chunk, between chunks, in later ones, each with some layers written."""

    plain, reusing = (built(checkpoint, DroplessParameters(), reuse) for reuse in (False, True))
    reusing.run(ask(CONTEXT, ANSWER), ignore)
    plan, n_left = ComposedTechnique.plan, [n_layers_before]

    def breaking(self: ComposedTechnique, *arguments: object) -> object:
        if n_left[0] == 0:
            raise BrokenError
        n_left[0] -= 1
        return plan(self, *arguments)  # type: ignore[arg-type]

    # Shares 20 tokens, then overwrites what the cache held behind them.
    forking = ask((*CONTEXT[:20], *OTHER), ANSWER)
    with monkeypatch.context() as broken:
        broken.setattr(ComposedTechnique, "plan", breaking)
        with pytest.raises(BrokenError):
            reusing.run(forking, ignore)
    requests = [ask(CONTEXT, ANSWER), forking]
    got = answers(reusing, requests)
    assert_same_answers(got, answers(plain, requests))
    assert got[0].n_cached_tokens == 20


def test_a_listener_that_fails_leaves_no_false_claim(checkpoint: Checkpoint) -> None:
    plain, reusing = (built(checkpoint, DroplessParameters(), reuse) for reuse in (False, True))
    for failing_at in ("request start", "prefill end", "request end"):

        def failing(event: str, at_s: float, failing_at: str = failing_at) -> None:
            if event == failing_at:
                raise BrokenError

        with pytest.raises(BrokenError):
            reusing.run(generate(CONTEXT), failing)
        requests = [generate((*CONTEXT, *ANSWER)), generate(OTHER)]
        assert_same_answers(answers(reusing, requests), answers(plain, requests))


# --- the record and the cache ----------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2), max_size=12)


@given(held=ids, n_decoded=st.integers(0, 12), asked=ids, chunk=st.integers(1, 5))
@settings(max_examples=200)
def test_what_is_shared_is_the_longest_common_prefix(
    held: list[int], n_decoded: int, asked: list[int], chunk: int
) -> None:
    n_prefill = max(0, len(held) - n_decoded)
    record = HeldTokens()
    record.add(held[:n_prefill], "prefill")
    for token in held[n_prefill:]:
        record.add([token], "decode")
    common = max(n for n in range(len(held) + 1) if n <= len(asked) and held[:n] == asked[:n])
    assert record.shared(asked, None) == common
    whole = record.shared(asked, chunk)
    assert whole == max(n for n in range(0, min(common, n_prefill) + 1, chunk))
    record.keep(whole)
    assert len(record) == whole
    assert record.shared(asked, None) == whole
    assert record.shared(asked, chunk) == whole


def test_cache_keeps_its_first_positions_when_it_grows(checkpoint: Checkpoint) -> None:
    cache = KeyValueCache(checkpoint.config)
    cache.start(4)
    for buffer in (*cache.keys, *cache.values):
        buffer.copy_(torch.arange(4.0)[None, :, None].expand_as(buffer))
    cache.length = 4
    cache.start(9, n_kept=3)
    assert (cache.length, cache.n_positions) == (3, 9)
    for buffer in (*cache.keys, *cache.values):
        assert buffer.shape[1] == 9
        assert buffer[0, :3, 0].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(EngineError, match="cache holds 3 positions and cannot keep 4"):
        cache.start(9, n_kept=4)


# --- in a trial ------------------------------------------------------------------------------------------------------


def test_a_window_gains_nothing_from_warm_up_or_from_the_trial_before(checkpoint: Checkpoint) -> None:
    bench = FakeBench()
    engine = ReferenceEngine(checkpoint, DroplessParameters(), CHUNK, now_s=bench.machine.now_s, reuse_prefix=True)
    requests = [ask(CONTEXT, ANSWER).model_copy(update={"request_id": f"s#{i}"}) for i in range(2)]
    arm = PreparedCell("c", engine, FakeWorkload(scored=False), bench.fake_device, bench.machine, requests)
    for _ in range(2):
        trial, _ = run_trial(arm, TrialProtocol(warmup=2, repeats=1, idle_s=0), repeat=0)
        assert cached(trial.completions) == [0, 49]
        assert trial.prefill_tokens == (50 + 8) + (1 + 8)


@pytest.mark.parametrize("device", [HOST, M2_ULTRA], ids=lambda device: device["name"])
def test_the_plans_choice_reaches_the_engine_and_leaves_the_scores_alone(device: dict[str, Any]) -> None:
    """BoolQ: two answers to each question. On both the host and modelled hardware."""
    placed = TIERS if device is HOST else NPUMOE
    engines = [placed | {"prefill_chunk": 64}, placed | {"name": "reusing", "prefill_chunk": 64, "reuse_prefix": True}]
    plan = build_plan(raw_plan(engine=engines, device=[device]))
    run_parts = RunParts(plan.protocol)
    try:
        trials = [run_trial(run_parts.arm(cell), plan.protocol, repeat=0)[0] for cell in plan.cells]
    finally:
        run_parts.close()
    without, reusing = trials
    assert cached(without.completions) == [0] * 4
    kept = cached(reusing.completions)
    assert (kept[0], kept[2]) == (0, 0)
    assert min(kept[1], kept[3]) >= 64
    assert reusing.prefill_tokens == without.prefill_tokens - sum(kept)
    assert reusing.scores == without.scores
    assert [c.loglikelihood for c in reusing.completions] == pytest.approx(
        [c.loglikelihood for c in without.completions], rel=TOLERANCE
    )


def test_modelled_hardware_is_charged_for_computed_tokens_only(checkpoint: Checkpoint) -> None:
    steps: list[tuple[int, int]] = []

    class Recorder:
        def step(self, n_tokens: int, kv_length: int, phase: str, plans: object) -> None:
            steps.append((n_tokens, kv_length))

    reference = built(checkpoint, DroplessParameters(), True)
    request = ask(CONTEXT[: 2 * CHUNK + 1], ANSWER[:4])
    reference.observer = Recorder()
    answers(reference, [request] * 2)
    # The second time the last token of the context and three of the ending, against the same 36.
    assert steps == [(16, 16), (16, 32), (4, 36), (4, 36)]

    shape = own_shape("tiny", checkpoint.config)
    engine = ModelledEngine(reference, Timeline(toy_sheet()), "cpu", shape)
    engine.reset()
    first, second = (engine.run(request, ignore) for _ in range(2))
    engine.reset()
    third = engine.run(request, ignore)
    assert cached([first, second, third]) == [0, 32, 0]
    assert third.e2e_s == pytest.approx(first.e2e_s)
    assert second.e2e_s < first.e2e_s / 3
