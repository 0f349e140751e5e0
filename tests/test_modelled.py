"""The modelled engine: the host's answers on virtual time, priced by hand on a sheet of round numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from devices.models.timeline import Timeline
from engines.base import Engine, EngineError, PhaseEvent, PhaseListener
from engines.calls import CallKind, Calls, ExpertCall
from engines.dispatch import DispatchPlan
from engines.model.checkpoints import Checkpoint
from engines.pricing.modelled import ModelledEngine, StepObserver
from engines.pricing.shapes import ModelShape, own_shape
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from results.counters import CountedLayers, EngineCounters
from results.environments import Road
from results.records import Completion, Request
from tests.fakes.word_models import word_model
from tests.techniques import NpumoeT
from tests.toy_sheet import toy_sheet

VOCABULARY = 10

# One dense layer: attention 48 values, FFN 96, head 40; a row is 8 bytes.
DENSE = ModelShape(
    name="dense", n_layers=1, hidden=4, n_heads=2, n_kv_heads=1, head_dim=2, dense_width=8, n_experts=0, top_k=0,
    expert_width=0, vocabulary=VOCABULARY,
)  # fmt: skip


def dense_step_s(n_tokens: int, kv_length: int) -> float:
    """coreml-cpu on the toy sheet: attention 1 ms and FFN 2 ms a FLOP, each norm 1 ms, each residual 50 ms a byte."""
    attention = 2 * n_tokens * 48 + 4 * n_tokens * kv_length * 4
    ffn = 2 * n_tokens * 96
    return 1e-3 * attention + 2e-3 * ffn + 2 * 1e-3 * (2 * 8 * n_tokens) + 2 * 0.05 * 8 * n_tokens


HEAD_S = 1e-3 * 2 * 40
"""One row of logits."""


class ScriptedEngine:
    """Reports the steps it is told to, and stamps of a clock that has nothing to do with the timeline."""

    max_length = 100
    needs_calibration = False
    tokenizer = None

    def __init__(self, steps: Sequence[tuple[int, int, str, Sequence[DispatchPlan | None]]], n_generated: int) -> None:
        self.observer: StepObserver | None = None
        self._steps = steps
        self._n_generated = n_generated

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        raise AssertionError("nothing to calibrate")

    def reset(self) -> None:
        raise AssertionError("nothing to forget")

    def take_counters(self) -> EngineCounters:
        return EngineCounters(routed_pairs=42)

    def take_road(self) -> Road:
        return Road(arithmetic="torch", n_threads=7)

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        on_phase("request start", 1e6)
        for n_tokens, kv_length, phase, plans in self._steps:
            assert self.observer is not None
            self.observer.step(n_tokens, kv_length, phase, plans)
        return Completion(
            request_id=request.request_id, sample_id=request.sample_id, n_prompt_tokens=len(request.prompt_ids),
            start_s=1e6, prefill_end_s=1e6, end_s=1e6, token_ids=tuple(range(self._n_generated)),
            token_times_s=(1e6,) * self._n_generated, text="as computed",
        )  # fmt: skip


def request(kind: str = "generate", continuation: tuple[int, ...] = ()) -> Request:
    return Request(
        request_id="r", sample_id="s", kind=kind, prompt_ids=(1, 2, 3, 4, 5), continuation_ids=continuation,
        max_new_tokens=3 if kind == "generate" else 0,
    )  # fmt: skip


def heard() -> tuple[list[tuple[PhaseEvent, float]], PhaseListener]:
    events: list[tuple[PhaseEvent, float]] = []
    return events, lambda event, at_s: events.append((event, at_s))


def scripted(steps: Sequence[tuple[int, int, str, Sequence[DispatchPlan | None]]], n: int) -> ModelledEngine:
    return ModelledEngine(ScriptedEngine(steps, n), Timeline(toy_sheet()), "cpu", DENSE)


GENERATE = [(4, 4, "prefill", [None]), (1, 5, "prefill", [None]), (1, 6, "decode", [None]), (1, 7, "decode", [None])]


def test_each_token_stands_at_the_end_of_the_step_that_produced_it() -> None:
    completion = scripted(GENERATE, 3).run(request(), lambda event, at_s: None)
    first_s = dense_step_s(4, 4) + dense_step_s(1, 5) + HEAD_S
    second_s = first_s + dense_step_s(1, 6) + HEAD_S
    third_s = second_s + dense_step_s(1, 7) + HEAD_S
    assert completion.start_s == 0
    assert completion.prefill_end_s == pytest.approx(first_s)
    assert completion.token_times_s == pytest.approx((first_s, second_s, third_s))
    assert completion.end_s == pytest.approx(third_s)
    assert completion.text == "as computed"


def test_phase_edges_are_told_once_in_order_with_the_completions_stamps() -> None:
    events, listener = heard()
    completion = scripted(GENERATE, 3).run(request(), listener)
    assert events == [
        ("request start", completion.start_s),
        ("prefill end", completion.prefill_end_s),
        ("request end", completion.end_s),
    ]


def test_an_edge_is_told_when_the_timeline_is_there() -> None:
    """So that a meter that reads at the edge reads the energy of what lies before it, and no more."""
    timeline = Timeline(toy_sheet())
    engine = ModelledEngine(ScriptedEngine(GENERATE, 3), timeline, "cpu", DENSE)
    engine.run(request(), lambda event, at_s: edges.append((at_s, timeline.now_s())))
    assert len(edges) == 3
    assert all(at_s == now_s for at_s, now_s in edges)


edges: list[tuple[float, float]] = []


def test_requests_follow_each_other_on_one_timeline() -> None:
    engine = scripted(GENERATE, 3)
    first = engine.run(request(), lambda event, at_s: None)
    second = engine.run(request(), lambda event, at_s: None)
    assert second.start_s == first.end_s
    assert second.e2e_s == pytest.approx(first.e2e_s)


def test_a_log_likelihood_is_all_prefill_and_pays_the_head_for_its_continuation() -> None:
    events, listener = heard()
    completion = scripted([(7, 7, "prefill", [None])], 0).run(request("loglikelihood", (6, 7, 8)), listener)
    assert completion.prefill_end_s == completion.end_s == pytest.approx(dense_step_s(7, 7) + 3 * HEAD_S)
    assert completion.token_times_s == ()
    assert [event for event, _ in events] == ["request start", "prefill end", "request end"]


def test_the_expert_calls_of_the_plan_are_what_is_priced() -> None:
    """Two static experts on the NPU: twice 0.5 s launch, 144 weight bytes at 1 ms, 8 rows x 72 FLOP at 0.1 ms."""
    calls = Calls.of(ExpertCall((e,), (4,), (4,), 4 * e, CallKind("npu", static=True)) for e in (0, 1))
    plan = DispatchPlan(8, torch.zeros(8), torch.zeros(8), calls, 8, 0)
    shape = ModelShape("moe", 1, 4, 2, 1, 2, 0, 2, 1, 3, VOCABULARY)
    timeline = Timeline(toy_sheet())
    engine = ModelledEngine(ScriptedEngine([(8, 8, "prefill", [plan])], 1), timeline, "npu", shape)
    engine.run(request(), lambda event, at_s: None)
    assert timeline.seconds_by_operation()["expert FFN", "npu"] == pytest.approx(2 * 0.5 + 2 * 0.072 + 8 * 72 * 1e-4)


def test_a_token_without_an_observed_step_is_an_error() -> None:
    with pytest.raises(EngineError, match="3 tokens but 1 decode steps observed"):
        scripted(GENERATE[:3], 3).run(request(), lambda event, at_s: None)


def test_counters_are_the_computing_engines() -> None:
    assert scripted(GENERATE, 3).take_counters() == EngineCounters(routed_pairs=42)


def test_counters_name_the_layers_that_ran_where_others_are_priced() -> None:
    """Steps of one layer, priced as three: its plan is priced three times and counted once."""
    engine = ModelledEngine(ScriptedEngine(GENERATE, 3), Timeline(toy_sheet()), "cpu", replace(DENSE, n_layers=3))
    engine.run(request(), lambda event, at_s: None)
    assert engine.take_counters().counted_layers == CountedLayers(n_run=1, n_priced=3)
    whole = scripted(GENERATE, 3)
    whole.run(request(), lambda event, at_s: None)
    assert whole.take_counters().counted_layers is None


# --- on the reference engine -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Random weights: two layers, 16 experts, top-2."""
    folder = tmp_path_factory.mktemp("random-moe")
    raw = {
        "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 8, "num_attention_heads": 4, "head_dim": 2,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 6, "eos_token_id": 0,
    }  # fmt: skip
    return word_model(folder, raw)


def generate(n_new: int) -> Request:
    prompt = tuple(1 + i % (VOCABULARY - 1) for i in range(11))
    return Request(request_id="r", sample_id="s", kind="generate", prompt_ids=prompt, max_new_tokens=n_new)


def test_the_answer_is_the_reference_engines_and_the_time_is_not(checkpoint: Checkpoint) -> None:
    shape = own_shape("random-moe", checkpoint.config)
    timeline = Timeline(toy_sheet())
    reference = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=4)
    engine: Engine = ModelledEngine(reference, timeline, "cpu", shape)
    asked = generate(3)
    modelled = engine.run(asked, lambda event, at_s: None)
    computed = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=4).run(asked, lambda event, at_s: None)
    assert (modelled.token_ids, modelled.text) == (computed.token_ids, computed.text)

    # Dropless prices every routed row once, whatever the routing: 2 layers x (11 + n - 1) tokens x 2 experts.
    n_tokens = 11 + len(computed.token_ids) - 1
    expert_flops = 2 * (3 * 8 * 6) * 2 * n_tokens * 2
    assert timeline.seconds_by_operation()["expert FFN", "cpu"] == pytest.approx(2e-3 * expert_flops)
    assert modelled.end_s == timeline.now_s()
    assert engine.take_counters().routed_pairs == 2 * 2 * n_tokens


def test_calibration_costs_no_virtual_time(checkpoint: Checkpoint) -> None:
    timeline = Timeline(toy_sheet())
    reference = ReferenceEngine(checkpoint, NpumoeT(calibration_prompts=1), prefill_chunk=4)
    engine = ModelledEngine(reference, timeline, "npu", own_shape("m", checkpoint.config))
    assert engine.needs_calibration
    engine.calibrate([[1, 2, 3, 4, 5]])
    assert not engine.needs_calibration
    assert timeline.now_s() == 0
    assert reference.observer is None


def test_tiers_on_the_npu_are_priced_with_their_padding(checkpoint: Checkpoint) -> None:
    """Each launch has a multiple of 16 rows: 0.5 s, 288 weight bytes at 1 ms, 16 x 288 FLOP at 0.1 ms."""
    timeline = Timeline(toy_sheet())
    reference = ReferenceEngine(checkpoint, NpumoeT(calibration_prompts=1), prefill_chunk=8)
    engine = ModelledEngine(reference, timeline, "npu", own_shape("m", checkpoint.config))
    engine.calibrate([[1, 2, 3, 4, 5]])
    engine.run(generate(1), lambda event, at_s: None)
    counters = engine.take_counters()
    assert counters.computed_rows == 16 * counters.expert_calls, "chunks of 8 tokens fill no more than one 16"
    one_launch_s = 0.5 + 0.288 + 16 * 288 * 1e-4
    npu_s = timeline.seconds_by_operation()["expert FFN", "npu"]
    assert npu_s == pytest.approx(counters.expert_calls * one_launch_s)
    assert ("expert FFN", "cpu") not in timeline.seconds_by_operation()
