"""The bundled model's saved packages, run by the interpreter, against the torch reader of the same plans.

The tolerance of fp16, derived: each operation rounds its result by at most u = 2^-11, relatively. A residual stream of
4 layers takes 2 blocks a layer, and a block is a chain of at most 12 rounded operations from its input to its output
(attention: x, projection, 3 of a norm, 2 of the turning, scale, score, softmax, mix, out), whose sums are fp32. So what
8 blocks add is off by up to 8 * 12 u = 4.7 %, relatively, if no error cancels, and by sqrt(96) u = 0.5 % where they are
independent. Logits are a fp32 product of the normed stream, so that their error in norm is that of the stream. Asserted
is the norm of the difference over the norm of the logits: below 0.5 % over all positions, below 4.7 % at each.
"""

from __future__ import annotations

import pytest
import torch

from engines.coreml.interpreter import Arithmetic
from engines.coreml.transformer import CoremlTransformer, Variant
from engines.errors import EngineError
from engines.techniques.presets import preset_parameters
from results.counters import EngineCounters
from tests.cases import marked
from tests.coreml import CHUNK, CONTEXT, Converted, converted, engine_of, generation, model_of, prompt, recorded
from tests.half_reader import PlannedReader
from tests.test_coreml_half import (
    largest,
    logits_of_router,
    same_as_torch_in_fp16,
    same_as_torch_in_fp32_or_undecided,
)

pytest.importorskip("coremltools", reason="reads and writes packages (pip install joulebench[coreml])")
pytestmark = pytest.mark.numbers

U = 2.0**-11
GREEDY_PROMPT = 100
"""Tokens. No router's choice hangs on the order of fp32's sums, neither in them nor in the 64 steps after: a test
says so. fp16 moves a router's logits by more than some choices lead, so that it is held to torch that rounds alike."""


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return converted("npumoe-tg", tmp_path_factory.mktemp("grouped") / "packages")


@pytest.mark.parametrize("variant", ["stateless", "stateful"])
def test_fp32_equals_torch_to_rounding(grouped: Converted, variant: Variant) -> None:
    """130 tokens: two whole chunks and a short one. Weights are the same fp16 numbers in both."""
    technique, tokens = preset_parameters("npumoe-tg")(), prompt(grouped.checkpoint, 130)
    ours = recorded(engine_of(grouped, technique), tokens)
    theirs = recorded(engine_of(grouped, technique, model_of(grouped, "float32", variant)), tokens)
    torch.testing.assert_close(theirs.logits_TL, ours.logits_TL, rtol=1e-4, atol=2e-4)
    assert [p.counters() for p in theirs.plans] == [p.counters() for p in ours.plans]
    assert sum(p.dropped_pairs for p in ours.plans) > 0, "tiers drop here, or their drops are not tested"


@pytest.mark.parametrize("variant", ["stateless", "stateful"])
def test_fp16_equals_torch_within_fp16(grouped: Converted, variant: Variant) -> None:
    technique, tokens = preset_parameters("npumoe-tg")(), prompt(grouped.checkpoint, 130)
    ours = recorded(engine_of(grouped, technique), tokens)
    theirs = recorded(engine_of(grouped, technique, model_of(grouped, "float16", variant)), tokens, ours.plans)
    error_T = (theirs.logits_TL - ours.logits_TL).norm(dim=1) / ours.logits_TL.norm(dim=1)
    assert 0 < float(error_T.square().mean().sqrt()) < 96**0.5 * U
    assert float(error_T.max()) < 96 * U


@pytest.mark.parametrize(("arithmetic", "variant"), [("float32", "stateless"), ("float16", "stateful")])
def test_64_greedy_tokens_and_all_counts_are_equal(
    grouped: Converted, arithmetic: Arithmetic, variant: Variant
) -> None:
    if arithmetic == "float32":
        counted, model = same_as_torch_in_fp32(grouped, variant)
    else:
        counted, model = same_as_torch_in_fp16(grouped, grouped, "npumoe-tg", GREEDY_PROMPT, variant)
    # One call is one prediction, and attention is one a layer and step: 2 chunks, and 63 tokens after the first.
    n_steps, n_layers = 2 + 63, grouped.checkpoint.config.n_layers
    assert model.ran.predictions == counted.expert_calls + n_layers * n_steps
    # Chunk 64 has tiers of 16 rows, whose graphs of 4 experts have 32. Decoding has 32.
    n_groups = sum(n for (_, function), n in model.not_placed.items() if function == "group_32")
    assert model.ran.filled_rows == 16 * 4 * n_groups > 0


@pytest.mark.parametrize("asked", marked([GREEDY_PROMPT, 110, "drawn 1"], pytest.mark.slow, but=[GREEDY_PROMPT]))
def test_fp16_in_states_chooses_torchs_tokens_or_that_is_undecided(grouped: Converted, asked: int | str) -> None:
    same_as_torch_in_fp32_or_undecided(grouped, grouped, "npumoe-tg", asked, "stateful")


def test_no_routers_choice_hangs_on_the_order_of_sums(grouped: Converted) -> None:
    """Or equal counts in fp32 are luck. The leads against what the order of sums moves a logit by."""
    technique, read = preset_parameters("npumoe-tg")(), prompt(grouped.checkpoint, GREEDY_PROMPT)
    answer = engine_of(grouped, technique).run(generation(read, 64), lambda *_: None).token_ids[:-1]
    ours = recorded(engine_of(grouped, technique, PlannedReader(grouped.checkpoint)), read, decoded=answer)
    theirs = recorded(engine_of(grouped, technique, model_of(grouped, "float32")), read, ours.plans, decoded=answer)
    places, top_k = range(len(ours.plans)), ours.seen[0].routing.expert_ids_TK.shape[1]
    moved = largest([logits_of_router(one, place, grouped) for one in (ours, theirs)] for place in places)
    for place in places:
        best_TE = logits_of_router(ours, place, grouped).sort(dim=1, descending=True).values
        assert float((best_TE[:, top_k - 1] - best_TE[:, top_k]).min()) > 2 * moved


def same_as_torch_in_fp32(found: Converted, variant: Variant) -> tuple[EngineCounters, CoremlTransformer]:
    """What both readers counted, drops and pads among it, and the model that predicted."""
    technique, request = preset_parameters("npumoe-tg")(), generation(prompt(found.checkpoint, GREEDY_PROMPT), 64)
    model = model_of(found, "float32", variant)
    ours, theirs = engine_of(found, technique), engine_of(found, technique, model)
    answers = [engine.run(request, lambda *_: None).token_ids for engine in (ours, theirs)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 64
    counted = theirs.take_counters()
    assert counted == ours.take_counters()
    assert isinstance(counted, EngineCounters)
    return counted, model


def test_a_request_longer_than_the_graphs_is_refused(grouped: Converted) -> None:
    technique = preset_parameters("npumoe-tg")()
    engine = engine_of(grouped, technique, model_of(grouped, "float32"))
    with pytest.raises(EngineError, match=f"{CONTEXT} positions"):
        engine.run(generation(prompt(grouped.checkpoint, 10), CONTEXT), lambda *_: None)


def test_other_graphs_than_the_plans_are_named(grouped: Converted) -> None:
    technique = preset_parameters("npumoe-base")(factor=8.0)
    engine = engine_of(grouped, technique, model_of(grouped, "float32"))
    with pytest.raises(EngineError, match=r"no graph does; convert with this technique"):
        engine.run(generation(prompt(grouped.checkpoint, CHUNK), 1), lambda *_: None)


@pytest.mark.parametrize("kept_bytes", [0, 100_000])
def test_constants_that_are_not_kept_wide_are_widened_in_each_step(
    grouped: Converted, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """As those of a model too large for it. 0: all of them; else: what is beyond."""
    technique, tokens = preset_parameters("npumoe-tg")(), prompt(grouped.checkpoint, CHUNK + 1)
    wide = recorded(engine_of(grouped, technique, model_of(grouped, "float16")), tokens)
    monkeypatch.setattr("engines.coreml.interpreter.WIDE_BYTES", kept_bytes)
    anew = grouped._replace(interpreters={})
    narrow = recorded(engine_of(anew, technique, model_of(anew, "float16")), tokens)
    assert torch.equal(wide.logits_TL, narrow.logits_TL)
