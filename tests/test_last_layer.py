"""`last_layer = "asked"`: the last layer leaves out a prompt's tokens that nobody asks about, and no answer changes.

What all tokens give is held to transformers elsewhere (`test_architectures`). Legend: T tokens, H hidden.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.errors import EngineError
from engines.kernels import tables
from engines.model import transformer
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Quantisation
from engines.oracle import OracleParameters
from engines.reference import LastLayer, ReferenceEngine
from engines.techniques.base import TechniqueParameters, stands_alone
from engines.techniques.parameters import Composed, CustomParameters
from engines.techniques.presets import PRESETS, DroplessParameters, preset_parameters
from harness.plan import build_plan
from harness.schema import EngineSpec
from results.records import Completion, Request
from tests.fakes.families import CASES, write_family
from tests.plans import DROPLESS, HERE, HOST, M2_ULTRA, TIERS, raw_plan
from tests.test_prefix import ask, assert_same_answers, generate, tokens
from tests.test_preflight import problems

pytestmark = pytest.mark.numbers

MODEL = "bundled:tiny-qwen3-moe"
N_LAYERS, TOP_K, CHUNK = 4, 2, 16
ASKED: LastLayer = "asked"
REQUESTS = (
    generate(tokens(50, 1)),
    generate(tokens(1, 2)),
    generate(tokens(16, 3)),
    generate(tokens(17, 4)),
    ask(tokens(40, 5), tokens(1, 6)),
    ask(tokens(21, 7), tokens(30, 8)),
    ask(tokens(1, 9), tokens(5, 10)),
)
"""Prompts that end inside a chunk, at its end and one behind it; continuations in one chunk and in three."""


def engine(
    source: Path | str = MODEL,
    last_layer: LastLayer | None = ASKED,
    quantise: Quantisation | None = None,
    technique: TechniqueParameters | None = None,
    **settings: Any,
) -> ReferenceEngine:
    checkpoint = load_checkpoint(str(source), torch.float32, quantise or Quantisation())
    return ReferenceEngine(checkpoint, technique or DroplessParameters(), CHUNK, last_layer=last_layer, **settings)


def answers(one: ReferenceEngine) -> list[Completion]:
    return [one.run(request, unheard) for request in REQUESTS]


@pytest.mark.parametrize("family", CASES)
def test_every_family_answers_as_with_all_tokens(family: str, tmp_path: Path) -> None:
    write_family(tmp_path, CASES[family])
    assert_same_answers(answers(engine(tmp_path)), answers(engine(tmp_path, last_layer=None)))


NARROW = {
    "int8 by int8": Quantisation(
        experts="int8", dense="int8", attention="int8", head="int8", arithmetic="int8", cache="fp16"
    ),
    "int4": Quantisation(experts="int4-g32", dense="int4-g32", attention="int4-g32", head="int8", cache="bf16"),
}


@pytest.mark.parametrize("form", NARROW)
def test_narrow_weights_and_caches_answer_as_with_all_tokens(form: str) -> None:
    """Few rows of 4 bits are multiplied as whole numbers of 24 bits, and many as floats."""
    whole, asked = (answers(engine(last_layer=how, quantise=NARROW[form])) for how in (None, ASKED))
    for ours, theirs in zip(asked, whole, strict=True):
        assert ours.token_ids == theirs.token_ids
        if theirs.loglikelihood is not None:
            assert ours.loglikelihood == pytest.approx(theirs.loglikelihood, rel=1e-4)


def test_torch_answers_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(engine(last_layer=None))
    monkeypatch.setattr(tables, "serves", lambda *_: False)
    assert_same_answers(answers(engine()), expected)


def test_a_batch_answers_as_each_request_alone() -> None:
    assert_same_answers(engine().run_batch(REQUESTS, unheard), answers(engine(last_layer=None)))


def test_what_a_prompt_shares_with_the_one_before_serves_both() -> None:
    """Keys and values of the last layer lie in the cache for tokens that were left out there."""
    context = tokens(40, 11)
    requests = [generate(context + tokens(n, 12 + n)) for n in (3, 5, 4)]
    kept, alone = engine(reuse_prefix=True), engine(last_layer=None)
    found = [kept.run(request, unheard) for request in requests]
    assert [one.n_cached_tokens for one in found] == [0, 40, 40]
    assert_same_answers(found, [alone.run(request, unheard) for request in requests])


def test_tokens_that_nobody_asks_about_reach_no_expert_of_the_last_layer() -> None:
    one = engine()
    n_prompt, n_more = 50, 30
    one.run(ask(tokens(n_prompt), tokens(n_more)), unheard)
    n_read = n_prompt + n_more - 1
    assert one.take_counters().routed_pairs == ((N_LAYERS - 1) * n_read + n_more) * TOP_K
    heat = one.take_heat()
    assert heat is not None
    assert [sum(chosen_E) for chosen_E in heat.chosen] == [n_read * TOP_K] * (N_LAYERS - 1) + [n_more * TOP_K]


def test_an_early_chunk_attends_nowhere_in_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    attend = transformer.attend

    def counting(x_TH: torch.Tensor, weights: Any, config: Any, layer: int, *others: Any) -> torch.Tensor:
        seen.append((layer, len(x_TH)))
        return attend(x_TH, weights, config, layer, *others)

    monkeypatch.setattr(transformer, "attend", counting)
    engine().run(
        Request(request_id="r", sample_id="s", kind="generate", prompt_ids=tokens(40), max_new_tokens=1), unheard
    )
    assert [n for layer, n in seen if layer == N_LAYERS - 1] == [1]
    assert [n for layer, n in seen if layer == 0] == [16, 16, 8]


# --- what can have it ------------------------------------------------------------------------------------------------


def test_what_a_plan_allows_is_what_the_engine_takes() -> None:
    """Of all techniques that can be built from a model alone."""
    checkpoint = load_checkpoint(MODEL, torch.float32)
    tried = {True: 0, False: 0}
    for name in PRESETS:
        try:
            technique = preset_parameters(name)()
        except ValueError:
            continue  # it wants to be told more
        assert isinstance(technique, Composed)
        try:
            one = ReferenceEngine(checkpoint, technique, CHUNK)
            if one.needs_calibration:
                one.calibrate([tokens(60, seed) for seed in range(4)])
        except EngineError:
            continue  # it wants a machine, ranks or an estimator
        assert one._technique is not None
        allowed = technique.choices.tokens_stand_alone
        assert allowed <= stands_alone(one._technique), technique.technique
        tried[allowed] += 1
    assert min(tried.values()) >= 3


def test_a_technique_that_plans_tokens_together_is_refused() -> None:
    coupled = CustomParameters.model_validate({"layout": {"kind": "capacity", "rows": 8}})
    with pytest.raises(
        EngineError, match=r"technique custom plans a prompt's tokens together, .* leave last_layer out"
    ):
        engine(technique=coupled)


def test_who_observes_layers_is_refused() -> None:
    one = engine(technique=OracleParameters())
    one.layer_observer = object()  # type: ignore[assignment]
    with pytest.raises(EngineError, match="an observer is told of all tokens in every layer; leave last_layer out"):
        one.run(REQUESTS[0], unheard)


def test_a_plan_names_what_leaves_nothing_out() -> None:
    arms = [arm | HERE | {"last_layer": "asked"} for arm in (DROPLESS, TIERS)]
    assert problems(engine=arms, device=[HOST]) == [
        'engine tiers: last_layer = "asked" leaves tokens of a prompt out, and npumoe-t plans them together or with'
        " other layers; remove last_layer"
    ]
    assert problems(engine=[DROPLESS | {"last_layer": "asked"}], device=[HOST, M2_ULTRA]) == [
        'engine dropless: last_layer = "asked" leaves tokens of a prompt out, and model:m2-ultra prices all; name other'
        " devices in the engine, or remove last_layer"
    ]


def test_it_is_a_choice_of_the_plan_that_makes_another_cell() -> None:
    silent, told = build_plan(raw_plan(engine=[DROPLESS, DROPLESS | {"name": "asked", "last_layer": "asked"}])).cells
    assert "last_layer" not in silent.cell.engine_parameters
    assert told.cell.engine_parameters["last_layer"] == "asked"
    assert EngineSpec.model_validate(DROPLESS).last_layer is None
