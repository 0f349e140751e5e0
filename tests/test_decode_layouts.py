"""A fused decode step computes the calls of the technique's plan, whatever they are, and gives what they give."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engines.base import unheard
from engines.calls import CallKind, Calls, ExpertCall, Width
from engines.decode_layout import PLAIN, DecodeLayout
from engines.dispatch import DispatchPlan
from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Quantisation
from engines.model.step_plans import Computed, StepPlans
from engines.model.transformer import KeyValueCache, Transformer
from engines.observers import SparseLayerStep
from engines.oracle import Oracle
from engines.profile import Profile
from engines.reference import ReferenceEngine
from engines.techniques.base import Technique
from engines.techniques.context import LayerInput
from engines.techniques.presets import dropless
from results.records import Request
from tests.cases import marked
from tests.fakes import deepseek_v1
from tests.fakes.families import CASES, write_family
from tests.fakes.published import PUBLISHED
from tests.fakes.random_models import copy_tokenizer
from tests.techniques import NpumoeT, built

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything"),
]

N_EXPERTS = 16
CONFIG: dict[str, Any] = {
    **PUBLISHED["deepseek-moe-16b-base"].config,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": N_EXPERTS,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
"""A dense layer, then two sparse ones with shared experts."""
SPARSE = (1, 2)
FORMS: dict[str, tuple[torch.dtype, Quantisation]] = {
    "f32": (torch.float32, Quantisation()),
    "bf16": (torch.bfloat16, Quantisation()),
    "f16": (torch.float16, Quantisation()),
    **{
        form: (torch.float32, Quantisation(experts=form, dense=form))  # type: ignore[arg-type]
        for form in ("int8", "fp8", "int4-g32")
    },
}


class Laid:
    """Decodes by given layouts; plans one group after the other, the last first, as the layout's docstring says it, and
    one slice after the other."""

    name = "laid"
    needs_saliency = True
    couples_tokens = False
    guesses = None
    batches_exactly = False

    def __init__(self, layouts: dict[int, DecodeLayout], told: dict[int, DecodeLayout | None] | None = None) -> None:
        """told: what it says of its layouts, where that is not what it plans."""
        self._layouts = layouts
        self._told = layouts if told is None else told

    def decode_layout(self, layer: int) -> DecodeLayout | None:
        return self._told[layer]

    def plan(self, seen: LayerInput) -> DispatchPlan:
        if seen.phase == "prefill":
            return dropless().plan(seen)
        routing, layout = seen.routing, self._layouts[seen.layer]
        rows_of = layout.rows_E or [1] * routing.n_experts
        group_of = layout.group_of_E or range(routing.n_experts)
        weight_of = dict(zip(routing.expert_ids_TK[0].tolist(), routing.weights_TK[0].tolist(), strict=True))
        kinds = [CallKind(static=True, width=w) for w in layout.widths]
        kinds += [CallKind(static=True, hidden=w) for w in layout.hidden]
        calls, tokens, weights = list[ExpertCall](), list[int](), list[float]()
        for group in sorted({group_of[expert] for expert in weight_of}, reverse=True):
            members = tuple(expert for expert in range(routing.n_experts) if group_of[expert] == group)
            rows = tuple(rows_of[expert] for expert in members)
            valid = tuple(int(expert in weight_of) for expert in members)
            calls += [ExpertCall(members, rows, valid, len(tokens), k) for k in kinds or [CallKind(static=True)]]
            for expert, n_rows in zip(members, rows, strict=True):
                tokens += [0 if expert in weight_of else -1] + [-1] * (n_rows - 1)
                weights += [weight_of.get(expert, 0.0)] + [0.0] * (n_rows - 1)
        last = routing.n_experts - 1
        for _ in range(layout.n_padding_calls):
            calls += [
                ExpertCall((last,), (rows_of[last],), (0,), len(tokens), k) for k in kinds or [CallKind(static=True)]
            ]
            tokens += [-1] * rows_of[last]
            weights += [0.0] * rows_of[last]
        return DispatchPlan(1, torch.tensor(tokens), torch.tensor(weights), Calls.of(calls), len(weight_of), 0)


class Watcher:
    """Has each layer computed by itself."""

    def layer(self, seen: SparseLayerStep) -> None: ...


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By the number of experts that a token is routed to; the weights are the same."""
    tensors = deepseek_v1.random_tensors(deepseek_v1.published_shapes(CONFIG))
    made = {}
    for top_k in range(1, 9):
        made[top_k] = tmp_path_factory.mktemp(f"top-{top_k}")
        save_file(tensors, made[top_k] / "model.safetensors")
        (made[top_k] / "config.json").write_text(json.dumps({**CONFIG, "num_experts_per_tok": top_k}))
        copy_tokenizer(made[top_k])
    return made


def model_of(folder: Path, form: str = "f32") -> Transformer:
    return Transformer(load_checkpoint(str(folder), *FORMS[form]))


def decoded(
    model: Transformer, technique: Technique, watcher: Watcher | None = None, n_tokens: int = 6
) -> tuple[Tensor, list[StepPlans]]:
    """Hidden states and plans of some tokens, one at a time behind a prompt of five."""
    tokens = torch.randint(1, 2048, (5 + n_tokens,), generator=torch.Generator().manual_seed(11))
    cache = KeyValueCache(model.config)
    cache.start(len(tokens))
    hidden, plans = [], []
    with torch.inference_mode():
        model.forward(tokens[:5], cache, dropless(), "prefill")
        for token in tokens[5:]:
            one, of_step = model.forward(token[None], cache, technique, "decode", watcher)
            hidden.append(one)
            plans.append(of_step)
    return torch.cat(hidden), plans


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


def rows_by_expert(plan: DispatchPlan) -> dict[int, int]:
    """Slices share the rows of the first."""
    found: dict[int, int] = {}
    for call in plan.calls:
        for expert, n_rows in zip(call.experts, call.rows_per_expert, strict=True):
            found[expert] = found.get(expert, 0) + n_rows * call.kind.is_first_slice
    return found


def drawn_slices(draw: random.Random, columns: int, n: int) -> tuple[Width, ...]:
    ends = [*sorted(draw.sample(range(1, columns), n - 1)), columns]
    return tuple(map(Width, [0, *ends], ends))


def drawn_layouts(
    seed: int, n_experts: int = N_EXPERTS, hidden: int = 64, expert_width: int = 64
) -> list[DecodeLayout]:
    draw = random.Random(seed)
    rows = tuple(draw.choice((1, 2, 5, 8, 9, 16, 32, 40)) for _ in range(n_experts))
    few = tuple(draw.choice((1, 3, 4)) for _ in range(n_experts))
    groups = tuple(draw.randrange(5) for _ in range(n_experts))
    return [
        DecodeLayout(rows),
        DecodeLayout(few),
        DecodeLayout(None, groups),
        DecodeLayout(rows, groups),
        DecodeLayout(few, (0,) * n_experts),
        DecodeLayout((1,) * n_experts),
        DecodeLayout(rows, n_padding_calls=draw.randrange(1, 9)),
        DecodeLayout(n_padding_calls=1),
        DecodeLayout(widths=drawn_slices(draw, expert_width, 3)),
        DecodeLayout(hidden=drawn_slices(draw, hidden, 2)),
        DecodeLayout(rows, groups, 2, drawn_slices(draw, expert_width, 2)),
        DecodeLayout(few, groups, 3, hidden=drawn_slices(draw, hidden, 4)),
    ]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("top_k", marked(range(1, 9), pytest.mark.slow, but=[1, 2, 6]))
def test_one_call_a_step_computes_the_rows_of_the_plan(form: str, top_k: int, folders: dict[int, Path]) -> None:
    """Rows by the rule; hidden states as layer by layer, and as the sum over experts by its definition."""
    model = model_of(folders[top_k], form)
    by_definition, _ = decoded(model, Oracle())
    for of_one, of_other in zip(drawn_layouts(top_k), drawn_layouts(100 + top_k), strict=True):
        technique = Laid(dict(zip(SPARSE, (of_one, of_other), strict=True)))
        hidden, steps = decoded(model, technique)
        expected, one_by_one = decoded(model, technique, Watcher())
        assert relative_error(hidden, expected) < 1e-5
        assert relative_error(hidden, by_definition) < 1e-5
        for plans, theirs in zip(steps, one_by_one, strict=True):
            assert plans.is_fused
            assert not theirs.is_fused
            for computed, its_plan, plan in zip(plans.computed, plans, theirs, strict=True):
                assert (computed is None) == (its_plan is None) == (plan is None)
                if plan is None or its_plan is None:
                    continue
                assert isinstance(computed, Computed)
                assert computed.rows_of_calls() == rows_by_expert(plan) == rows_by_expert(its_plan)
                assert its_plan.token_R.tolist() == plan.token_R.tolist()
                torch.testing.assert_close(its_plan.weight_R, plan.weight_R, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_threads", [1, 2])
def test_plain_layers_are_bit_for_bit_what_dropless_computes(n_threads: int, folders: dict[int, Path]) -> None:
    model = model_of(folders[4])
    torch.set_num_threads(n_threads)
    expected, _ = decoded(model, dropless())
    for plain in (PLAIN, DecodeLayout((1,) * N_EXPERTS), DecodeLayout(None, tuple(reversed(range(N_EXPERTS))))):
        assert torch.equal(decoded(model, Laid({1: plain, 2: PLAIN}))[0], expected)
    # Beside a layer that is not: the first sparse layer's part is the same, and the rest close.
    mixed, steps = decoded(model, Laid({1: PLAIN, 2: DecodeLayout((16,) * N_EXPERTS)}))
    assert relative_error(mixed, expected) < 1e-5
    for plans in steps:
        first, second = (plan for plan in plans if plan is not None)
        assert set(rows_by_expert(first).values()) == {1}
        assert set(rows_by_expert(second).values()) == {16}


def test_a_technique_that_comes_back_is_asked_again(folders: dict[int, Path]) -> None:
    """Two arms share one model, and take turns."""
    model = model_of(folders[2])
    wide, narrow = (Laid(dict.fromkeys(SPARSE, DecodeLayout((n,) * N_EXPERTS))) for n in (32, 2))
    for technique, n_rows in ((wide, 32), (narrow, 2), (wide, 32), (dropless(), 1)):
        _, steps = decoded(model, technique, n_tokens=1)
        plans = [plan for plan in steps[0] if plan is not None]
        assert {n for plan in plans for n in rows_by_expert(plan).values()} == {n_rows}


@pytest.mark.parametrize("told", [PLAIN, DecodeLayout((8,) * N_EXPERTS), DecodeLayout((16,) * N_EXPERTS, (0,) * 16)])
def test_a_plan_that_is_not_what_ran_is_refused(told: DecodeLayout, folders: dict[int, Path]) -> None:
    layouts = dict.fromkeys(SPARSE, DecodeLayout((16,) * N_EXPERTS))
    _, (plans, *_) = decoded(model_of(folders[2]), Laid(layouts, {1: layouts[1], 2: told}))
    assert plans[1] is not None
    with pytest.raises(EngineError, match=r"laid decoded layer 2 with rows \{.*\} by expert and planned \{"):
        plans[2]


HALVES, THIRDS = (Width(0, 32), Width(32, 64)), (Width(0, 24), Width(24, 40), Width(40, 64))


@pytest.mark.parametrize(
    ("planned", "told", "words"),
    [
        ({"widths": HALVES}, {"widths": THIRDS}, r"and planned \{\} in columns 0 to 24;"),
        ({"widths": HALVES}, {"hidden": HALVES}, r"and planned \{\} in columns 0 to 32 of the model width;"),
        ({"widths": HALVES}, {}, r"and planned \{\};"),
        ({}, {"hidden": HALVES}, r"and planned \{\} in columns 0 to 32 of the model width;"),
    ],
)
def test_a_plan_of_other_slices_than_ran_is_refused(
    planned: dict[str, Any], told: dict[str, Any], words: str, folders: dict[int, Path]
) -> None:
    said = dict.fromkeys(SPARSE, DecodeLayout(**told))
    _, (plans, *_) = decoded(model_of(folders[2]), Laid(dict.fromkeys(SPARSE, DecodeLayout(**planned)), said))
    with pytest.raises(EngineError, match=words):
        plans[1]


def test_what_is_decided_between_router_and_experts_goes_layer_by_layer(folders: dict[int, Path]) -> None:
    technique = Laid(dict.fromkeys(SPARSE, PLAIN), {1: PLAIN, 2: None})
    _, steps = decoded(model_of(folders[2]), technique)
    assert not any(plans.is_fused for plans in steps)
    assert not any(isinstance(computed, Computed) for plans in steps for computed in plans.computed)


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({"rows_E": (4, 0, 4)}, "leave an expert none"),
        ({"group_of_E": (0, 3, 0)}, "numbers from 0 to 2"),
        ({"group_of_E": (0, -1, 0)}, "numbers from 0 to 2"),
        ({"rows_E": (1, 1), "group_of_E": (0, 1, 1)}, "rows of 2 experts and groups of 3"),
        ({"n_padding_calls": -1}, "-1 calls of padding"),
        ({"widths": (Width(0, 8), Width(9, 16))}, "must follow one another from column 0 on"),
        ({"hidden": (Width(8, 16),)}, "must follow one another from column 0 on"),
        ({"widths": (Width(0, 8), Width(8, 8))}, "must follow one another from column 0 on"),
        ({"widths": (Width(0, 8),), "hidden": (Width(0, 8),)}, "give one of them"),
    ],
)
def test_layouts_that_no_token_fits_are_refused(layout: dict[str, Any], told: str) -> None:
    with pytest.raises(EngineError, match=told):
        DecodeLayout(**layout)


# --- families whose layers the kernels do not know whole --------------------------------------------------------------


@pytest.mark.parametrize("family", ["phi-moe", "deepseek-v2", "deepseek-v3", "olmoe", "gpt-oss", "llama4"])
def test_layer_by_layer_too_experts_are_computed_before_anybody_plans(family: str, tmp_path: Path) -> None:
    """Of biased experts, and of those whose input is weighted, the plan is what is computed."""
    write_family(tmp_path, CASES[family])
    copy_tokenizer(tmp_path)
    model = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    moe = model.config.moe
    assert moe is not None
    sparse = [layer for layer in range(model.config.n_layers) if model.config.is_sparse(layer)]
    expected, _ = decoded(model, dropless(), Watcher())
    assert torch.equal(decoded(model, dropless())[0], expected)
    for layout in drawn_layouts(5, moe.n_experts, model.config.hidden, moe.expert_width):
        technique = Laid(dict.fromkeys(sparse, layout))
        hidden, steps = decoded(model, technique)
        by_plan, one_by_one = decoded(model, technique, Watcher())
        assert relative_error(hidden, by_plan) < 1e-5
        assert relative_error(hidden, expected) < 1e-5
        for plans, theirs in zip(steps, one_by_one, strict=True):
            assert not plans.is_fused
            for layer in sparse:
                computed, plan, its_plan = plans.computed[layer], theirs[layer], plans[layer]
                assert plan is not None
                assert its_plan is not None
                assert isinstance(computed, Computed) == (family not in ("gpt-oss", "llama4"))
                if isinstance(computed, Computed):
                    assert computed.rows_of_calls() == rows_by_expert(plan)
                assert its_plan.counters() == plan.counters()


# --- capacity tiers --------------------------------------------------------------------------------------------------


def tiers(**parameters: object) -> Technique:
    """Chunks of 64 with four experts a token: an expert's mean load is 16. Expert e < 8 expects 2^e * 256 / 263 rows,
    so 0.97 to 15.6 below e = 5, then 31.1, 62.3, 124.6; all others expect 0.97. Tiers, of a chunk at most: 64, 32, 16.
    """
    counts = tuple(2**e if e < 8 else 1 for e in range(N_EXPERTS))
    profile = Profile(dict.fromkeys(SPARSE, counts), top_k=4, n_prompts=1)
    preset = "npumoe-tg" if parameters.pop("grouped", False) else "npumoe-t"
    return built(preset, 64, profile, multiples=(8, 4, 2, 1), **parameters)


def tier_of(expert: int, align: int) -> int:
    rows = {5: 32, 6: 64, 7: 64}.get(expert, 16)
    return -(-rows // align) * align


GROUPS = ((7, 6), (5,), (4, 3, 2, 1), (0, 8, 9, 10), (11, 12, 13, 14), (15,))
"""Of one tier, the most chosen first and of equals the first, four at most."""


def rows_of_graphs(graphs: str, grouped: bool, align: int, chosen: Sequence[int]) -> dict[int, int]:
    """Rows by expert that a token with these experts makes a layer compute."""
    if graphs == "cpu":
        return dict.fromkeys(chosen, 1)
    if graphs == "single":
        return dict.fromkeys(chosen, 32)
    called = [group for group in GROUPS if set(group) & set(chosen)] if grouped else [chosen]
    return {expert: tier_of(expert, align) for group in called for expert in group}


@pytest.mark.parametrize("align", [2, 24])
@pytest.mark.parametrize(
    ("graphs", "grouped", "renormalise"),
    [("single", True, False), ("same", False, True), ("same", True, False), ("cpu", False, False)],
)
def test_tiers_decode_in_one_call_a_step(
    graphs: str, grouped: bool, renormalise: bool, align: int, folders: dict[int, Path]
) -> None:
    """No pair of one token can be dropped, so no layer waits for what its overflow would be ranked by."""
    technique = tiers(align=align, renormalise_survivors=renormalise, decode_graphs=graphs, grouped=grouped)
    model = model_of(folders[4])
    hidden, steps = decoded(model, technique)
    expected, one_by_one = decoded(model, technique, Watcher())
    assert relative_error(hidden, expected) < 1e-5
    for plans, theirs in zip(steps, one_by_one, strict=True):
        assert plans.is_fused
        for layer in SPARSE:
            computed, plan, its_plan = plans.computed[layer], theirs[layer], plans[layer]
            assert isinstance(computed, Computed)
            assert plan is not None
            assert its_plan is not None
            chosen = computed.routing.expert_ids_TK[0].tolist()
            assert computed.rows_of_calls() == rows_of_graphs(graphs, grouped, align, chosen)
            assert its_plan.counters() == plan.counters()
            assert (plan.dropped_pairs, plan.routed_pairs) == (0, 4)


def test_an_engine_of_tiers_says_that_it_decoded_in_one_call_a_step(folders: dict[int, Path]) -> None:
    checkpoint = load_checkpoint(str(folders[4]), torch.float32)
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=(5, 6, 7), max_new_tokens=5)
    counters = []
    for watcher, road in ((None, "fused"), (Watcher(), "plan by plan")):
        engine = ReferenceEngine(checkpoint, NpumoeT(calibration_prompts=1), threads=1)
        engine.calibrate([[5, 6, 7, 8]])
        engine.layer_observer = watcher
        engine.run(request, unheard)
        assert engine.take_road().decoding == road
        counters.append(engine.take_counters())
    assert counters[0] == counters[1]
    # Three prompt tokens, then four of the five new ones, through two layers with four experts a token.
    assert counters[0].routed_pairs == (3 + 4) * 2 * 4
    assert counters[0].padded_rows >= 4 * 2 * 4 * 15
