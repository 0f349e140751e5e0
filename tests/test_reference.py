from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.answers import StopStrings
from engines.base import EngineError
from engines.dispatch import DispatchPlan
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.oracle import OracleParameters
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.records import Request, Sampling
from tests.fakes.random_models import BUNDLED, write_random_model
from tests.techniques import NpumoeT

pytestmark = pytest.mark.numbers

PROMPT = "The engineer measured the voltage twice, wrote 12 numbers down, and asked a question."


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)


@pytest.fixture(scope="module")
def theirs() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


class TickingClock:
    """Every reading is one second after the last."""

    def __init__(self) -> None:
        self.readings = 0

    def now_s(self) -> float:
        self.readings += 1
        return float(self.readings)


class Steps:
    """Records what the engine tells its observer."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, str, int]] = []
        self.plans: list[Sequence[DispatchPlan | None]] = []

    def step(self, n_tokens: int, kv_length: int, phase: str, plans: Sequence[DispatchPlan | None]) -> None:
        self.seen.append((n_tokens, kv_length, phase, len(plans)))
        self.plans.append(plans)


def ignore(event: str, at_s: float) -> None:
    """A listener that does nothing."""


def generate(checkpoint: Checkpoint, prompt: str = PROMPT, **fields: Any) -> Request:
    settings = {"request_id": "r", "sample_id": "s", "kind": "generate", "max_new_tokens": 12, **fields}
    return Request(prompt_ids=tuple(checkpoint.tokenizer.encode(prompt)), **settings)


def loglikelihood(prompt_ids: Sequence[int], continuation_ids: Sequence[int]) -> Request:
    return Request(
        request_id="r",
        sample_id="s",
        kind="loglikelihood",
        prompt_ids=tuple(prompt_ids),
        continuation_ids=tuple(continuation_ids),
    )


def calibrated(engine: ReferenceEngine, checkpoint: Checkpoint) -> ReferenceEngine:
    engine.calibrate([checkpoint.tokenizer.encode(f"{PROMPT} {n} apples and {n} pears.") for n in range(4)])
    return engine


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [512, 5])
@pytest.mark.parametrize("technique", [DroplessParameters(), OracleParameters()], ids=["dropless", "oracle"])
def test_greedy_answer_is_that_of_transformers(
    checkpoint: Checkpoint, theirs: Any, technique: DroplessParameters | OracleParameters, chunk: int
) -> None:
    request = generate(checkpoint, max_new_tokens=64)
    prompt = torch.tensor([request.prompt_ids])
    expected = theirs.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=64, pad_token_id=0
    )[0, prompt.shape[1] :].tolist()
    completion = ReferenceEngine(checkpoint, technique, prefill_chunk=chunk).run(request, ignore)
    assert list(completion.token_ids) == expected
    assert completion.text == checkpoint.tokenizer.decode(expected)


def test_unlimited_capacity_answers_as_dropless_does(checkpoint: Checkpoint) -> None:
    request = generate(checkpoint, max_new_tokens=32)
    unlimited = ReferenceEngine(checkpoint, NpumoeT(multiples=(1e6,)), prefill_chunk=16)
    completion = calibrated(unlimited, checkpoint).run(request, ignore)
    assert unlimited.take_counters().dropped_pairs == 0
    assert completion.token_ids == ReferenceEngine(checkpoint, DroplessParameters()).run(request, ignore).token_ids


def test_generation_ends_with_the_end_token_which_is_counted_but_not_shown(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen3-moe")
    plain = load_checkpoint(str(tmp_path), torch.float32)
    tokens = ReferenceEngine(plain, DroplessParameters()).run(generate(plain), ignore).token_ids
    end = next(n for n, token in enumerate(tokens) if token not in tokens[:n] and n >= 3)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{tokens[end]}]}}')
    ending = load_checkpoint(str(tmp_path), torch.float32)
    completion = ReferenceEngine(ending, DroplessParameters()).run(generate(ending), ignore)
    assert completion.token_ids == tokens[: end + 1]
    assert len(completion.token_times_s) == end + 1


def test_stop_string_ends_the_generation_and_is_cut_off(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    free = engine.run(generate(checkpoint, max_new_tokens=40), ignore)
    # A stop string that begins inside one token and ends inside a later one.
    pieces = [checkpoint.tokenizer.decode(free.token_ids[:n]) for n in (9, 10, 11)]
    stop = pieces[2][len(pieces[0]) - 1 : len(pieces[1]) + 1]
    assert free.text.index(stop) == len(pieces[0]) - 1, "the prompt must give a stop string that is not there earlier"
    stopped = engine.run(generate(checkpoint, max_new_tokens=40, stop=("never there", stop)), ignore)
    assert stopped.token_ids == free.token_ids[:11]
    assert stopped.text == free.text.split(stop)[0]


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (("\n\n",), "one two\nthree"),
        (("Q:", "\n"), "one two"),
        (("",), "one two\nthree\n\nQ: four"),
        ((), "one two\nthree\n\nQ: four"),
        (("four", "two"), "one "),
    ],
)
def test_text_is_cut_before_stop_strings_as_lm_eval_cuts_it(stops: tuple[str, ...], expected: str) -> None:
    from lm_eval.models.utils import postprocess_generated_text

    text = "one two\nthree\n\nQ: four"
    assert StopStrings(stops, lambda ids: "").cut(text) == expected
    assert postprocess_generated_text(text, list(stops), None) == expected


def test_empty_stop_string_stops_nothing(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    free = engine.run(generate(checkpoint), ignore)
    assert engine.run(generate(checkpoint, stop=("",)), ignore).token_ids == free.token_ids


def test_stop_string_is_found_however_long_the_answer_is() -> None:
    letters = [*"x" * 500, *"the end", *"y" * 5]
    decoded_lengths = []

    def decode(token_ids: Sequence[int]) -> str:
        decoded_lengths.append(len(token_ids))
        return "".join(letters[i] for i in token_ids)

    stops = StopStrings(("the end",), decode)
    reached = [n for n in range(1, 513) if stops.reached(range(n))]
    assert reached[0] == 507
    assert max(decoded_lengths) < 20, "each step must cost the same"


def test_sampling_repeats_with_its_seed_and_varies_with_another(checkpoint: Checkpoint) -> None:
    engine = ReferenceEngine(checkpoint, DroplessParameters())

    def sampled(seed: int) -> tuple[int, ...]:
        sampling = Sampling(temperature=1.0, top_p=0.95, seed=seed)
        return engine.run(generate(checkpoint, sampling=sampling), ignore).token_ids

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) == 4


# --- log-likelihood --------------------------------------------------------------------------------------------------


def test_loglikelihood_is_the_sum_over_transformers_log_probabilities(checkpoint: Checkpoint, theirs: Any) -> None:
    """lm-eval's definition (`_loglikelihood_tokens`): logits of (context + continuation)[:-1], last rows, summed."""
    ids = checkpoint.tokenizer.encode(PROMPT)
    greedy = ReferenceEngine(checkpoint, DroplessParameters()).run(generate(checkpoint), ignore).token_ids
    pairs = [(ids[:1], ids[1:]), (ids[:10], ids[10:]), (ids, [5]), (ids, list(greedy[:4])), (ids, [*greedy[:3], 9])]
    expected = []
    for prompt, continuation in pairs:
        with torch.inference_mode():
            logits = theirs(torch.tensor([[*prompt, *continuation][:-1]])).logits[0, -len(continuation) :]
        picked = logits.log_softmax(-1)[range(len(continuation)), continuation]
        expected.append((float(picked.sum()), logits.argmax(-1).tolist() == list(continuation)))
    assert [is_greedy for _, is_greedy in expected] == [False, False, False, True, False]
    for chunk in (512, 4):
        engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=chunk)
        for (prompt, continuation), (total, is_greedy) in zip(pairs, expected, strict=True):
            completion = engine.run(loglikelihood(prompt, continuation), ignore)
            assert completion.loglikelihood == pytest.approx(total, abs=1e-4)
            assert completion.is_greedy == is_greedy


def test_loglikelihood_is_all_prefill_and_counts_the_tokens_it_pushed(checkpoint: Checkpoint) -> None:
    completion = ReferenceEngine(checkpoint, DroplessParameters()).run(loglikelihood(range(5, 15), range(3)), ignore)
    # The last continuation token is asked about, not read.
    assert completion.n_prompt_tokens == 10 + 3 - 1
    assert completion.prefill_end_s == completion.end_s
    assert (completion.token_ids, completion.token_times_s, completion.ttft_s) == ((), (), None)


# --- stamps, counters, observer --------------------------------------------------------------------------------------


def test_stamps_are_the_clocks_and_the_listener_hears_those_very_stamps(checkpoint: Checkpoint) -> None:
    heard: list[tuple[str, float]] = []
    engine = ReferenceEngine(checkpoint, DroplessParameters(), now_s=TickingClock().now_s)
    completion = engine.run(generate(checkpoint, max_new_tokens=3), lambda event, at_s: heard.append((event, at_s)))
    # One reading at the start, one for each of three tokens, one at the end.
    assert (completion.start_s, completion.token_times_s, completion.end_s) == (1.0, (2.0, 3.0, 4.0), 5.0)
    assert heard == [("request start", 1.0), ("prefill end", 2.0), ("request end", 5.0)]
    assert (completion.ttft_s, completion.tpot_s) == (1.0, 1.0)

    heard.clear()
    engine.run(loglikelihood([1, 2], [3]), lambda event, at_s: heard.append((event, at_s)))
    assert heard == [("request start", 6.0), ("prefill end", 7.0), ("request end", 7.0)]


def test_observer_hears_every_chunk_with_the_length_of_the_cache(checkpoint: Checkpoint) -> None:
    engine, steps = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=8), Steps()
    engine.observer = steps
    request = generate(checkpoint, max_new_tokens=4).model_copy(
        update={"prompt_ids": tuple(range(10, 29)), "ignore_end_tokens": True}
    )
    engine.run(request, ignore)
    assert steps.seen == [
        (8, 8, "prefill", 4),
        (8, 16, "prefill", 4),
        (3, 19, "prefill", 4),
        (1, 20, "decode", 4),
        (1, 21, "decode", 4),
        (1, 22, "decode", 4),
    ]


def test_one_token_tail_of_a_prompt_is_prefill(checkpoint: Checkpoint) -> None:
    engine, steps = ReferenceEngine(checkpoint, NpumoeT(decode_rows=8), prefill_chunk=256), Steps()
    calibrated(engine, checkpoint).observer = steps
    request = generate(checkpoint, max_new_tokens=2).model_copy(update={"prompt_ids": tuple(range(10, 267))})
    engine.run(request, ignore)
    assert [phase for _, _, phase, _ in steps.seen] == ["prefill", "prefill", "decode"]
    rows = [{n for plan in plans if plan for call in plan.calls for n in call.rows_per_expert} for plans in steps.plans]
    # Base 256 * 2 / 16 = 32 rows: the tail pays for a full chunk's shape, a decode step for its own.
    assert min(rows[1]) >= 32
    assert rows[2] == {8}


def test_counters_add_up_to_what_the_observer_saw_and_start_anew(checkpoint: Checkpoint) -> None:
    engine = calibrated(ReferenceEngine(checkpoint, NpumoeT(base="B/E"), prefill_chunk=64), checkpoint)
    steps = Steps()
    engine.observer = steps
    request = generate(checkpoint, prompt=PROMPT * 6, max_new_tokens=5)
    engine.run(request, ignore)
    counters = engine.take_counters()
    plans = [plan for step in steps.plans for plan in step if plan is not None]
    assert counters.routed_pairs == (len(request.prompt_ids) + 4) * 2 * 4  # tokens read, top-2, four layers
    assert counters.computed_rows == sum(plan.token_R.shape[0] for plan in plans)
    assert counters.padded_rows == sum(int((plan.token_R < 0).sum()) for plan in plans)
    assert counters.dropped_pairs == counters.routed_pairs - (counters.computed_rows - counters.padded_rows)
    assert counters.dropped_pairs > 0
    assert counters.expert_calls == sum(len(plan.calls) for plan in plans)
    assert engine.take_counters().routed_pairs == 0


def test_dense_model_routes_nothing(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen2")
    dense = load_checkpoint(str(tmp_path), torch.float32)
    engine = ReferenceEngine(dense, DroplessParameters())
    assert engine.run(generate(dense), ignore).n_generated == 12
    assert engine.take_counters().drop_rate is None
    with pytest.raises(EngineError, match=r"npumoe-t places experts, and .* is dense"):
        ReferenceEngine(dense, NpumoeT())


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_freezes_shapes_and_leaves_no_trace_in_counters_or_observer(checkpoint: Checkpoint) -> None:
    engine, steps = ReferenceEngine(checkpoint, NpumoeT()), Steps()
    engine.observer = steps
    assert engine.needs_calibration
    calibrated(engine, checkpoint)
    assert not engine.needs_calibration
    assert steps.seen == []
    assert engine.take_counters().routed_pairs == 0
    with pytest.raises(EngineError, match="complete; calibrate only while needed"):
        calibrated(engine, checkpoint)


def test_run_before_calibration_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match="npumoe-t is not calibrated; call calibrate first"):
        ReferenceEngine(checkpoint, NpumoeT()).run(generate(checkpoint), ignore)


def test_calibration_without_prompts_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match="calibration needs prompts, got 0"):
        ReferenceEngine(checkpoint, NpumoeT()).calibrate([])


def test_techniques_that_learn_nothing_need_no_calibration(checkpoint: Checkpoint) -> None:
    assert not ReferenceEngine(checkpoint, DroplessParameters()).needs_calibration
    assert not ReferenceEngine(checkpoint, OracleParameters()).needs_calibration


# --- requests that cannot be taken -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": ()}, "prompt is empty"),
        ({"prompt_ids": (1, 2048)}, r"prompt holds token id 2048, outside 0\.\.2047"),
        ({"prompt_ids": (-1,)}, "prompt holds token id -1"),
        ({"prompt_ids": (1,) * 8193}, "prompt of 8193 tokens exceeds max_length 8192"),
        ({"prompt_ids": (1,) * 8190}, r"8190 prompt tokens \+ 12 new ones exceed max_length 8192"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 must be at least 1"),
        ({"sampling": Sampling(temperature=-1.0)}, r"temperature -1\.0 is no finite number"),
        ({"kind": "loglikelihood"}, "continuation is empty"),
        ({"kind": "loglikelihood", "continuation_ids": (9999,)}, "continuation holds token id 9999"),
        ({"kind": "loglikelihood", "continuation_ids": (1,) * 8192}, r"exceed max_length 8192 \+ 1"),
    ],
)
def test_request_that_cannot_be_taken_says_why_before_any_work(
    checkpoint: Checkpoint, changes: dict[str, Any], message: str
) -> None:
    heard: list[str] = []
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    with pytest.raises(EngineError, match=message):
        engine.run(generate(checkpoint).model_copy(update=changes), lambda event, at_s: heard.append(event))
    assert heard == []


def test_requests_fill_the_length_to_the_last_token_and_not_beyond(tmp_path: Path) -> None:
    write_random_model(tmp_path, "qwen2")
    model = load_checkpoint(str(tmp_path), torch.float32)
    engine = ReferenceEngine(model, DroplessParameters())
    assert engine.max_length == 512
    full = generate(model).model_copy(update={"prompt_ids": (5,) * 500})
    assert engine.run(full, ignore).n_generated == 12
    # 512 tokens are read and the 513th is only asked about.
    assert engine.run(loglikelihood((5,) * 500, (6,) * 13), ignore).n_prompt_tokens == 512
    for beyond in (full.model_copy(update={"prompt_ids": (5,) * 501}), loglikelihood((5,) * 500, (6,) * 14)):
        with pytest.raises(EngineError, match="exceed max_length 512"):
            engine.run(beyond, ignore)


def test_prefill_chunk_below_one_token_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(EngineError, match="prefill_chunk 0"):
        ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=0)


def test_each_engine_computes_on_its_own_number_of_threads() -> None:
    """torch keeps one number for the process: an engine must not inherit that of the arm before it."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=(5, 6, 7), max_new_tokens=2)
    seen: list[int] = []
    for threads in (2, 1, 2):
        engine = ReferenceEngine(checkpoint, DroplessParameters(), threads=threads)
        engine.run(request, lambda event, at_s: seen.append(torch.get_num_threads()))
    assert seen == [2] * 3 + [1] * 3 + [2] * 3
