"""Requests answered together: the answers are those of each alone, the stamps those of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.answers import packed
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.transformer import KeyValueCache, Transformer
from engines.profile import Learnt
from engines.reference import ReferenceEngine
from engines.techniques.context import BuildContext, LayerInput
from engines.techniques.presets import DroplessParameters, dropless
from results.records import Completion, Record, Request, Sampling
from tests.techniques import AsDropless, NpumoeT

pytestmark = pytest.mark.numbers

PROMPT = "The engineer measured the voltage twice, wrote 12 numbers down, and asked a question."


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


class RecordingParameters(Record):
    """Dropless, noting phase and rows of each plan of the first layer."""

    technique: ClassVar[str] = "recording"
    lossless: ClassVar[bool] = True
    wanted_prompts: ClassVar[int] = 0
    loads_from_file: ClassVar[bool] = False
    learns: ClassVar[frozenset[Learnt]] = frozenset()
    units: ClassVar[tuple[str, ...]] = ("cpu",)
    backbone: ClassVar[str] = "cpu"

    def build(self, context: BuildContext) -> Recording:
        return Recording()


class Recording(AsDropless):
    couples_tokens = True
    steps: ClassVar[list[tuple[str, int]]] = []

    def plan(self, seen: LayerInput) -> DispatchPlan:
        if seen.layer == 0:
            self.steps.append((seen.phase, len(seen.routing.expert_ids_TK)))
        return super().plan(seen)


@pytest.fixture
def steps() -> list[tuple[str, int]]:
    Recording.steps.clear()
    return Recording.steps


class TickingClock:
    """Every reading is one second after the last."""

    def __init__(self) -> None:
        self.readings = 0

    def now_s(self) -> float:
        self.readings += 1
        return float(self.readings)


def ignore(event: str, at_s: float) -> None:
    """A listener that does nothing."""


def generate(name: str, n_prompt: int, n_new: int, **fields: Any) -> Request:
    # Token ids from 8 on: those below are special.
    prompt = tuple(8 + (37 * i + 11 * n_prompt) % 2000 for i in range(n_prompt))
    return Request(request_id=name, sample_id=name, kind="generate", prompt_ids=prompt, max_new_tokens=n_new, **fields)


def loglikelihood(name: str, n_prompt: int, continuation: Sequence[int]) -> Request:
    asked = generate(name, n_prompt, 1)
    return asked.model_copy(
        update={"kind": "loglikelihood", "continuation_ids": tuple(continuation), "max_new_tokens": 0}
    )


MIXED = (
    generate("short", 3, 9),
    loglikelihood("answer", 21, range(50, 57)),
    generate("long", 45, 5),
    generate("sampled", 12, 9, sampling=Sampling(temperature=1.0, top_p=0.9, seed=4)),
    loglikelihood("one", 1, [77]),
    generate("single", 30, 1),
)


def assert_same_answers(got: Sequence[Completion], alone: Sequence[Completion]) -> None:
    for ours, theirs in zip(got, alone, strict=True):
        assert (ours.request_id, ours.sample_id) == (theirs.request_id, theirs.sample_id)
        assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
        assert (ours.n_prompt_tokens, ours.n_cached_tokens) == (theirs.n_prompt_tokens, 0)
        assert ours.is_greedy == theirs.is_greedy
        assert ours.loglikelihood == pytest.approx(theirs.loglikelihood, abs=1e-4)


@pytest.mark.parametrize("chunk", [512, 16, 1])
def test_a_batch_answers_as_each_request_alone_however_prefill_is_cut(checkpoint: Checkpoint, chunk: int) -> None:
    alone = ReferenceEngine(checkpoint, DroplessParameters())
    expected = [alone.run(request, ignore) for request in MIXED]
    assert len({c.token_ids for c in expected}) == 5, "answers this alike would agree by chance"
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=chunk)
    assert_same_answers(engine.run_batch(MIXED, ignore), expected)
    assert_same_answers(engine.run_batch(MIXED[::-1], ignore), expected[::-1])


def test_stop_string_ends_its_own_request_only(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    free = engine.run_batch(MIXED[:4], ignore)
    stop = checkpoint.tokenizer.decode(free[0].token_ids[:5])[-2:]
    stopped = engine.run_batch([MIXED[0].model_copy(update={"stop": (stop,)}), *MIXED[1:4]], ignore)
    assert stopped[0].text == free[0].text.split(stop)[0]
    assert stopped[0].n_generated < free[0].n_generated
    assert [c.token_ids for c in stopped[1:]] == [c.token_ids for c in free[1:]]


def test_a_batch_of_one_is_the_request(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=16)
    for request in MIXED:
        (together,) = engine.run_batch([request], ignore)
        alone = engine.run(request, ignore)
        assert (together.token_ids, together.loglikelihood) == (alone.token_ids, alone.loglikelihood)


def test_no_requests_have_no_answers_and_no_edges(checkpoint: Checkpoint) -> None:
    heard: list[str] = []
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    assert engine.run_batch([], lambda event, at_s: heard.append(event)) == []
    assert heard == []


# --- steps -----------------------------------------------------------------------------------------------------------


def test_prompts_share_prefill_steps_and_finished_sequences_leave(
    checkpoint: Checkpoint, steps: list[tuple[str, int]]
) -> None:
    engine = ReferenceEngine(checkpoint, RecordingParameters(), prefill_chunk=16)
    requests = [generate("a", 10, 2), loglikelihood("b", 8, [5, 6, 7]), generate("c", 15, 4, ignore_end_tokens=True)]
    completions = engine.run_batch(requests, ignore)
    assert [c.n_generated for c in completions] == [2, 0, 4], "no end token may cut these answers short"
    # 10 + (8 + 3 - 1) + 15 = 35 tokens in steps of 16; then the tokens of a and c, of which a leaves after its second.
    assert steps == [("prefill", 16), ("prefill", 16), ("prefill", 3), ("decode", 2), ("decode", 1), ("decode", 1)]


def test_a_technique_plans_over_the_rows_of_all_sequences(checkpoint: Checkpoint) -> None:
    """One row for each expert: two equal prompts of one token choose the same experts, and the second is dropped."""
    parameters = NpumoeT(multiples=(1e-6,), align=1, calibration_prompts=1)
    engine = ReferenceEngine(checkpoint, parameters, prefill_chunk=8)
    engine.calibrate([list(range(40, 60))])
    asked = loglikelihood("a", 1, [9])
    engine.run(asked, ignore)
    assert engine.take_counters().dropped_pairs == 0
    engine.run_batch([asked, asked.model_copy(update={"request_id": "b"})], ignore)
    counters = engine.take_counters()
    assert counters.routed_pairs == 2 * 2 * 4  # rows, top-2, layers
    # In the first layer at least both tokens are alike; below it the dropped one is another.
    assert counters.dropped_pairs >= 2


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 20))
def test_packed_steps_are_full_in_order_and_lose_nothing(n_tokens: list[int], n_rows: int) -> None:
    steps = packed(n_tokens, n_rows)
    rows = [sum(n for _, n in step) for step in steps]
    assert all(n == n_rows for n in rows[:-1])
    assert all(0 < n <= n_rows for n in rows)
    flat = list(itertools.chain.from_iterable(steps))
    assert all(n > 0 for _, n in flat)
    assert [index for index, _ in flat] == sorted(index for index, _ in flat)
    assert [sum(n for i, n in flat if i == index) for index in range(len(n_tokens))] == n_tokens


def test_two_sequences_may_not_share_a_cache(checkpoint: Checkpoint) -> None:
    model, cache = Transformer(checkpoint), KeyValueCache(checkpoint.config)
    cache.start(8)
    with pytest.raises(EngineError, match="2 sequences in fewer caches"):
        model.forward_batch([torch.tensor([9]), torch.tensor([8])], [cache, cache], dropless(), "prefill")


def test_a_token_for_two_sequences_is_refused_and_changes_neither(checkpoint: Checkpoint) -> None:
    model, caches = Transformer(checkpoint), [KeyValueCache(checkpoint.config) for _ in range(2)]
    for cache in caches:
        cache.start(8)
        model.forward(torch.tensor([5, 6]), cache, dropless(), "prefill")
    with pytest.raises(ValueError, match="longer"):
        model.forward_batch([torch.tensor([1])], caches, dropless(), "decode")
    assert [cache.length for cache in caches] == [2, 2]


# --- stamps ----------------------------------------------------------------------------------------------------------


def test_stamps_are_those_of_the_step_that_gave_the_token(checkpoint: Checkpoint) -> None:
    heard: list[tuple[str, float]] = []
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=16, now_s=TickingClock().now_s)
    requests = [generate("a", 10, 2), loglikelihood("b", 8, [5, 6, 7]), generate("c", 15, 4, ignore_end_tokens=True)]
    a, b, c = engine.run_batch(requests, lambda event, at_s: heard.append((event, at_s)))
    # 1: start. 2: a's prompt ends in the first step. 3: b's in the second. 4: c's in the third. 5: the first decode
    # step, whose end a has for itself: 6. Then two more of c alone, 7 and 8, and its end.
    assert {a.start_s, b.start_s, c.start_s} == {1.0}
    assert (a.token_times_s, a.prefill_end_s, a.end_s) == ((2.0, 5.0), 2.0, 6.0)
    assert (b.token_times_s, b.prefill_end_s, b.end_s) == ((), 3.0, 3.0)
    assert (c.token_times_s, c.prefill_end_s, c.end_s) == ((4.0, 5.0, 7.0, 8.0), 4.0, 9.0)
    assert heard == [
        ("request start", 1.0),
        ("prefill end", 2.0),
        ("prefill end", 3.0),
        ("request end", 3.0),
        ("prefill end", 4.0),
        ("request end", 6.0),
        ("request end", 9.0),
    ]


def test_requests_that_end_their_prefill_in_one_step_share_its_stamp(checkpoint: Checkpoint) -> None:
    heard: list[str] = []
    engine = ReferenceEngine(checkpoint, DroplessParameters(), now_s=TickingClock().now_s)
    completions = engine.run_batch(
        [generate("a", 4, 1), loglikelihood("b", 4, [9])], lambda event, at_s: heard.append(event)
    )
    assert [c.prefill_end_s for c in completions] == [2.0, 2.0]
    assert heard == ["request start", "prefill end", "request end", "request end"]


# --- what a batch leaves alone, and refuses --------------------------------------------------------------------------


def test_a_batch_neither_uses_nor_disturbs_the_kept_prefix(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters(), reuse_prefix=True)
    asked = loglikelihood("a", 20, [9, 10])
    first = engine.run(asked, ignore)
    together = engine.run_batch([asked, generate("b", 30, 3)], ignore)
    again = engine.run(asked, ignore)
    assert [first.n_cached_tokens, *(c.n_cached_tokens for c in together), again.n_cached_tokens] == [0, 0, 0, 19]
    assert again.loglikelihood == pytest.approx(first.loglikelihood, abs=1e-5)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (generate("bad", 0, 4), "request bad: prompt is empty"),
        (generate("bad", 2, 4).model_copy(update={"prompt_ids": (9, 2048)}), "request bad: prompt holds token id 2048"),
        (generate("bad", 2, 4).model_copy(update={"prompt_ids": (-1,)}), "request bad: prompt holds token id -1"),
        (generate("bad", 8193, 4), "request bad: prompt of 8193 tokens exceeds max_length 8192"),
        (generate("bad", 8190, 4), r"request bad: 8190 prompt tokens \+ 4 new ones exceed max_length 8192"),
        (generate("bad", 2, 0), "request bad: max_new_tokens 0 must be at least 1"),
        (generate("bad", 2, 4, sampling=Sampling(top_p=0.0)), r"request bad: top_p 0\.0 is outside"),
        (generate("bad", 2, 4, sampling=Sampling(temperature=float("nan"))), "request bad: temperature nan"),
        (loglikelihood("bad", 2, []), "request bad: continuation is empty"),
        (loglikelihood("bad", 2, [5000]), "request bad: continuation holds token id 5000"),
        (loglikelihood("bad", 2, [9] * 8192), r"request bad: .* exceed max_length 8192 \+ 1"),
    ],
    ids=lambda value: "" if isinstance(value, Request) else value,
)
def test_one_bad_request_is_named_before_any_work(checkpoint: Checkpoint, bad: Request, message: str) -> None:
    clock, heard = TickingClock(), list[str]()
    engine = ReferenceEngine(checkpoint, DroplessParameters(), now_s=clock.now_s)
    with pytest.raises(EngineError, match=message):
        engine.run_batch([*MIXED, bad], lambda event, at_s: heard.append(event))
    assert (clock.readings, heard, engine.take_counters().routed_pairs) == (0, [], 0)


def test_an_uncalibrated_engine_and_an_observed_one_take_no_batch(checkpoint: Checkpoint) -> None:
    class Nobody:
        def step(self, n_tokens: int, kv_length: int, phase: str, plans: object) -> None: ...

    with pytest.raises(EngineError, match="npumoe-t is not calibrated"):
        ReferenceEngine(checkpoint, NpumoeT()).run_batch(MIXED, ignore)
    observed = ReferenceEngine(checkpoint, DroplessParameters())
    observed.observer = Nobody()
    with pytest.raises(EngineError, match="a batch cannot be observed"):
        observed.run_batch(MIXED, ignore)
