"""Cells that are priced without a model, against runs of a real small one on a modelled device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from devices.models.figures import Roofline, SheetFigure
from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.base import PhaseEvent
from engines.calls import Integers
from engines.errors import EngineError
from engines.model.checkpoints import Checkpoint
from engines.observers import SparseLayerStep
from engines.pricing.cells import Cell, PricedCell, build, parameters, price_cell
from engines.pricing.costs import SheetCosts
from engines.pricing.modelled import ModelledEngine
from engines.pricing.played import Foresight, routing_of
from engines.pricing.priced_step import PricedStep
from engines.pricing.routing_sources import Purpose, UniformRouting
from engines.pricing.schedule import lm_head, operations, unit_of_rest
from engines.pricing.shapes import NAMED_SHAPES, own_shape, sizes_of
from engines.pricing.travels import Travels
from engines.reference import ReferenceEngine
from engines.shown import Shown
from engines.techniques.context import ChunkPhase, ModelSizes
from engines.techniques.move.fetch import FetchParameters
from engines.techniques.parameters import CustomParameters
from engines.techniques.place.units import OneUnitParameters
from results.counters import EngineCounters
from results.records import Completion, Request
from tests.fakes.word_models import word_model

VOCABULARY, N_PROMPT, N_NEW, CHUNK = 11, 37, 9, 16
QWEN3 = NAMED_SHAPES["qwen3-30b-a3b"]


# --- on the same plans as a run --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Random weights: three layers, the first dense, 16 experts, top-4, a shared one."""
    folder = tmp_path_factory.mktemp("random-moe")
    raw = {
        "architectures": ["Qwen2MoeForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 3, "intermediate_size": 24, "vocab_size": VOCABULARY,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "num_experts": 16, "num_experts_per_tok": 4,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 16, "mlp_only_layers": [0],
        "decoder_sparse_step": 1, "norm_topk_prob": False,
    }  # fmt: skip
    return word_model(folder, raw)


class Heard:
    """What the routers chose in the requests of an engine."""

    def __init__(self) -> None:
        self.by_layer: dict[int, list[Integers]] = {}

    def layer(self, seen: SparseLayerStep) -> None:
        self.by_layer.setdefault(seen.layer, []).append(seen.routing.expert_ids_TK.numpy().copy())

    @property
    def ids_LTK(self) -> Integers:
        return np.stack([np.concatenate(self.by_layer[layer]) for layer in sorted(self.by_layer)])


class Given:
    """A source of routing that was heard."""

    name = "heard"

    def __init__(self, run_LTK: Integers, calibration_LTK: Integers) -> None:
        self._of = {"run": run_LTK, "calibration": calibration_LTK}

    def ids_LTK(self, sizes: ModelSizes, n_tokens: int, purpose: Purpose = "run", sequence: int = 0) -> Integers:
        assert self._of[purpose].shape[1] == n_tokens
        return self._of[purpose]


def prompt(seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCABULARY, N_PROMPT).tolist())


class Ran(NamedTuple):
    completion: Completion
    joules: dict[str, float]
    spent: dict[tuple[str, str], float]
    counters: EngineCounters


def both(checkpoint: Checkpoint, sheet_name: str, preset: str, **given: object) -> tuple[PricedCell, Ran]:
    """The cell, and what a run on the modelled device came to."""
    sheet, shape = load_sheet(sheet_name), own_shape("random-moe", checkpoint.config)
    sizes, technique = sizes_of(shape), parameters(preset, **given)
    assert sizes is not None
    dropless = ReferenceEngine(checkpoint, parameters("dropless"), CHUNK)
    dropless.layer_observer = counted = Heard()
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=prompt(2), max_new_tokens=1)
    dropless.run(request, unheard)
    reference = ReferenceEngine(checkpoint, technique, CHUNK, sizes=sizes, costs=SheetCosts(sheet, sizes))
    timeline = Timeline(sheet)
    engine = ModelledEngine(reference, timeline, technique.backbone, shape)
    if engine.needs_calibration:
        engine.calibrate([prompt(2)])
    reference.layer_observer = heard = Heard()
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=prompt(1), max_new_tokens=N_NEW)
    completion = engine.run(request, unheard)
    joules = {one: timeline.energy_j(one) for one in sheet.components if sheet.has_watts(one)}
    spent = dict(timeline.seconds_by_operation())
    n_steps = len(completion.token_ids) - 1
    cell = Cell(
        sheet, shape, technique, Given(heard.ids_LTK, counted.ids_LTK), N_PROMPT, n_steps, CHUNK,
        calibration_tokens=N_PROMPT,
    )  # fmt: skip
    return price_cell(cell), Ran(completion, joules, spent, engine.take_counters())


def unheard(event: PhaseEvent, at_s: float) -> None:
    """Nobody listens."""


SAME = (
    ("m2-ultra", "dropless", {}),
    ("m2-ultra", "coreml-naive", {}),
    ("m2-ultra", "npumoe-base", {"align": 1}),
    ("m2-ultra", "npumoe", {"align": 4, "calibration_prompts": 1}),
    ("m2-ultra", "npumoe-tg", {"align": 4, "calibration_prompts": 1, "decode_graphs": "same"}),
    ("m2-ultra", "blockwise", {"block_size": 8}),
    ("m2-ultra", "dropping", {}),
    ("m2-ultra", "all-experts", {}),
    ("rtx5080-ndp", "on-demand", {}),
    ("rtx5080-ndp", "fiddler", {}),
    ("rtx5080-ndp", "monde", {"ndps": 2}),
    ("rtx5080-ndp", "ndp-tp", {"ndps": 2}),
    ("rtx5080-ndp", "ndp-tp-lb", {"ndps": 2}),
    ("rtx5080-ndp", "ndp", {"ndps": 2, "slots": 3}),
)


@pytest.mark.parametrize(("sheet", "preset", "given"), SAME, ids=[f"{preset}-{sheet}" for sheet, preset, _ in SAME])
def test_a_cell_is_priced_as_a_run_with_the_same_routing(
    checkpoint: Checkpoint, sheet: str, preset: str, given: dict[str, object]
) -> None:
    """Seconds, joules, what they were spent on and what was counted, of a small model whose routing was heard."""
    cell, ran = both(checkpoint, sheet, preset, **given)
    assert cell.ttft_s == pytest.approx(ran.completion.ttft_s, rel=1e-12)
    assert cell.tpot_s == pytest.approx(ran.completion.tpot_s, rel=1e-12)
    assert cell.e2e_s == pytest.approx(ran.completion.e2e_s, rel=1e-12)
    assert {one: j for one, j in cell.joules.items() if j is not None} == pytest.approx(ran.joules, rel=1e-12)
    assert cell.counters == ran.counters.model_copy(update={"bytes_copied": None})
    spent: dict[tuple[str, str], float] = {}
    for phase in cell.phases:
        for key, seconds in phase.spent.items():
            spent[key] = spent.get(key, 0.0) + seconds
    assert spent == pytest.approx({key: s for key, s in ran.spent.items() if s}, rel=1e-9)


# --- of itself -------------------------------------------------------------------------------------------------------


def cell_of(preset: str = "dropless", sheet: str = "m2-ultra", **given: object) -> Cell:
    small = replace(QWEN3, n_layers=2)
    return Cell(load_sheet(sheet), small, parameters(preset, **given), UniformRouting(), 64, 4, 32)


def test_times_of_a_resource_add_up_to_the_phase() -> None:
    priced = price_cell(cell_of("on-demand", "a6000"))
    for phase in priced.phases:
        for own in phase.use.by_resource.values():
            assert sum(own) == pytest.approx(phase.seconds)
    assert priced.decode is not None
    assert priced.decode.use.of("gpu").waiting_s > 0, "each layer waits for its experts"


def test_bytes_that_travel_are_those_of_the_experts() -> None:
    """A token of 2 layers fetches 8 experts in each, of 3 x 2048 x 768 values of 2 bytes."""
    priced = price_cell(cell_of("on-demand", "a6000"))
    assert priced.decode is not None
    assert priced.decode.bytes_by_link == {"pcie": pytest.approx(4 * 2 * 8 * 3 * 2048 * 768 * 2)}
    assert priced.decode.counters.bytes_moved == priced.decode.bytes_by_link["pcie"]


def test_missing_watts_are_told_and_no_joule_is_zero() -> None:
    priced = price_cell(cell_of("on-demand", "a6000"))
    assert priced.total_j is None
    assert priced.joules["gpu"] is None
    assert priced.no_joules is not None
    assert "states no power of" in priced.no_joules
    assert price_cell(cell_of()).no_joules is None


def test_a_model_that_fits_nowhere_is_a_result() -> None:
    priced = price_cell(replace(cell_of("ndp-tp", "rtx5080-ndp", ndps=1), shape=NAMED_SHAPES["mixtral-8x7b"]))
    assert priced.result == "N.S."
    assert priced.ttft_s is None
    assert priced.total_j is None
    assert price_cell(replace(cell_of("gpu", "rtx5080-ndp"), shape=QWEN3)).result == "oom"


def test_keys_and_values_of_a_long_context_need_room_too() -> None:
    """By hand: 48 layers x 2 x 4 heads x 128 x 2 bytes = 98,304 bytes a token of Qwen3-30B-A3B. A GPU of 80 GiB holds
    54.0 GiB of experts, 2.9 GiB of the rest and the keys of 252,000 tokens."""
    long = replace(cell_of("gpu", "a100"), shape=QWEN3, cached_tokens=260_000, prompt_tokens=1, decode_steps=0)
    found = str(price_cell(long).lacks)
    assert "23.8 GiB of keys and values of 260001 tokens, and gpu of sheet a100 holds 80.0 GiB" in found
    assert "a shorter context" in found
    assert price_cell(replace(long, cached_tokens=240_000)).result == "ok"
    shared = replace(long, technique=parameters("on-demand"))
    assert price_cell(shared).result == "ok", "the experts lie on the host"
    beyond = price_cell(replace(shared, cached_tokens=900_000)).lacks
    # Two buffers of 128 experts of 3 x 2048 x 768 values of two bytes.
    assert (
        "passes through beside 2.25 GiB of experts that lie there and 82.4 GiB of keys and values of 900001 tokens"
        in str(beyond)
    )


def test_what_every_token_passes_through_needs_room_beside_the_experts() -> None:
    """By hand, in bf16: five layers of mixtral have 5 x 8 x 3 x 4096 x 14336 x 2 = 13.1 GiB of experts, and 0.39 GiB of
    attention (5 x 4096 x 128 x 2 x 40 values); embedding and head of 320,000 tokens are 4.9 GiB. The GPU holds 16."""
    few = replace(NAMED_SHAPES["mixtral-8x7b"], n_layers=5)
    assert price_cell(replace(cell_of("gpu", "rtx5080-ndp"), shape=few)).result == "ok"
    found = price_cell(replace(cell_of("gpu", "rtx5080-ndp"), shape=replace(few, vocabulary=320_000)))
    assert str(found.lacks).startswith(
        "oom: 13.1 GiB of experts of mixtral-8x7b beside 5.27 GiB of the rest, and gpu of"
    )
    large = price_cell(replace(cell_of("on-demand", "a6000"), shape=replace(few, vocabulary=4_000_000)))
    assert str(large.lacks).startswith("oom: 61.4 GiB of what every token of mixtral-8x7b passes through, and gpu of")


@pytest.mark.parametrize("recall", [0.0, 0.5, 0.9, 1.0])
def test_predictions_have_the_recall_that_was_stated(recall: float) -> None:
    cell = replace(cell_of("prefetch-hint", "a6000"), shape=QWEN3, recall=recall, decode_steps=40)
    counters = price_cell(cell).counters
    assert counters.predicted == 40 * 47 * 8
    assert counters.recall == pytest.approx(recall, abs=4 * 0.5 / (40 * 47 * 8) ** 0.5)


def test_requests_before_leave_what_they_fetched() -> None:
    """On GPU-NDP what a prompt chose most is fetched at its end; a second prompt of the same routing finds it there."""
    cell = cell_of("ndp", "rtx5080-ndp", slots=8)
    sizes = sizes_of(cell.shape)
    assert sizes is not None
    ids_LTK = cell.routing.ids_LTK(sizes, 68)
    cell = replace(cell, routing=Given(ids_LTK, ids_LTK))
    assert price_cell(cell).counters.prefetched == 8, "of the layer after the one that fetches"
    assert price_cell(replace(cell, n_before=1)).counters.prefetched == 0


def test_a_dense_model_takes_what_its_layers_take() -> None:
    """Llama-3.2-1B on a GPU of rooflines, decoding 2 tokens after 64: every step reads all weights and the cache."""
    shape, sheet = NAMED_SHAPES["llama-3.2-1b"], load_sheet("a6000")
    cell = Cell(sheet, shape, parameters("gpu"), UniformRouting(), 64, 2, 32)
    priced = price_cell(cell)
    rate = sheet.units["gpu"].roofline
    assert rate is not None
    weights = 16 * (shape.attention_weights + 3 * 2048 * 8192) + 2048 * 128256
    cached = 16 * 2 * 8 * 64 * np.array([65, 66])
    others = 16 * 2048 * (2 * 2 + 2)  # norms read and write, residuals move a row
    by_hand_s = 2 * (weights + cached + others) / rate.bytes_per_s.value
    assert priced.tpot_s == pytest.approx(by_hand_s.mean(), rel=1e-9)
    with pytest.raises(EngineError, match=r"npumoe places experts, and llama-3\.2-1b has none"):
        price_cell(replace(cell, technique=parameters("npumoe")))


def test_bad_cells_are_told_all_at_once() -> None:
    with pytest.raises(EngineError, match=r"prompt_tokens = 0 .*; decode_steps = -1 .*; recall = 2"):
        replace(cell_of(), prompt_tokens=0, decode_steps=-1, recall=2)
    with pytest.raises(EngineError, match="give the recall"):
        price_cell(cell_of("router-pf", "a6000"))
    with pytest.raises(EngineError, match="makes none"):
        price_cell(replace(cell_of(), recall=0.5))


CACHES = ("lru", "lfu", "static")


# --- the slow road ---------------------------------------------------------------------------------------------------


class Slowly(NamedTuple):
    """spent: seconds by operation and unit."""

    ttft_s: float
    tpot_s: float
    counters: EngineCounters
    spent: Mapping[tuple[str, str], float]


def slowly(cell: Cell) -> Slowly:
    """With a plan for every token and layer, and every operation run."""
    sizes = sizes_of(cell.shape)
    assert sizes is not None
    foresight = None if cell.recall is None else Foresight(cell.recall, sizes)
    technique = build(cell, sizes, foresight)
    shown, timeline, travels = Shown(technique.asks, sizes), Timeline(cell.sheet), Travels(cell.sheet)
    limit = cell.sheet.graph_bytes_limit
    ids_LTK = cell.routing.ids_LTK(sizes, cell.prompt_tokens + cell.decode_steps)
    steps = [range(i, min(i + cell.chunk, cell.prompt_tokens)) for i in range(0, cell.prompt_tokens, cell.chunk)]
    steps += [range(i, i + 1) for i in range(cell.prompt_tokens, cell.prompt_tokens + cell.decode_steps)]
    ends_s, counted, n_left = [], [], cell.prompt_tokens
    for tokens in steps:
        phase: ChunkPhase = "prefill" if tokens.start < cell.prompt_tokens else "decode"
        n_left -= len(tokens) if phase == "prefill" else 0
        shown.start_step(n_left)
        if foresight is not None:
            foresight.start_step(ids_LTK[:, tokens.start : tokens.stop])
        plans = []
        for layer, ids_TK in enumerate(ids_LTK[:, tokens.start : tokens.stop]):
            routing = routing_of(np.ascontiguousarray(ids_TK), sizes.n_experts)
            seen = shown.layer(layer, phase, routing, torch.ones(len(tokens)), None)
            plans.append(technique.plan(seen))
            shown.ran(seen, plans[-1])
        counted += [plan.counters() for plan in plans]
        step = PricedStep(len(tokens), tokens.stop, phase)
        most = None if limit is None else limit.value
        timeline.run(operations(step, plans, cell.shape, cell.unit, most, travels, timeline.n_run))
        if tokens.stop >= cell.prompt_tokens:
            timeline.run([lm_head(1, cell.shape, unit_of_rest(cell.sheet, cell.unit))])
            ends_s.append(timeline.now_s())
    counted.append(EngineCounters(prefetched_unused=shown.take_unused()))
    tpot_s = (ends_s[-1] - ends_s[0]) / cell.decode_steps
    return Slowly(ends_s[0], tpot_s, EngineCounters.total(counted), timeline.seconds_by_operation())


def check_priced(cell: Cell) -> EngineCounters:
    """That it is priced as slowly; what it counted."""
    slow, priced = slowly(cell), price_cell(cell)
    assert priced.ttft_s == pytest.approx(slow.ttft_s, rel=1e-12)
    assert priced.tpot_s == pytest.approx(slow.tpot_s, rel=1e-12)
    assert priced.counters == slow.counters
    spent: dict[tuple[str, str], float] = {}
    for phase in priced.phases:
        for key, seconds in phase.spent.items():
            spent[key] = spent.get(key, 0.0) + seconds
    assert spent == pytest.approx({key: seconds for key, seconds in slow.spent.items() if seconds}, rel=1e-9)
    return slow.counters


@pytest.mark.parametrize(
    ("sheet", "preset"),
    [
        *(("m2-ultra", name) for name in ("dropless", "npumoe", "npumoe-tg", "coreml-naive", "blockwise", "selective")),
        *(("rtx5080-ndp", name) for name in ("on-demand", "fiddler", "monde", *CACHES)),
        *(("rtx5080-ndp", name) for name in ("ndp-tp", "ndp-tp-lb", "ndp-tp-pre", "ndp")),
        *(("trn2", name) for name in ("tensor-parallel", "expert-parallel", "tp-ep", "eplb")),
        *(("a6000", name) for name in ("prefetch-hint", "router-pf")),
    ],
)
def test_what_is_priced_once_is_what_each_token_and_layer_would_take(sheet: str, preset: str) -> None:
    """40 tokens after a prompt of 64: nothing that was planned or priced before changes a figure."""
    own = {"slots": 40, "unit": "gpu"} if preset in CACHES else {}
    cell = replace(cell_of(preset, sheet, **own), decode_steps=40)
    if sheet == "trn2":
        cell = replace(cell, ranks=2, backbone="rank:0")
    if cell.technique.choices.route.kind == "predicted":
        cell = replace(cell, recall=0.7)
    check_priced(cell)


def test_experts_that_lie_there_from_the_start_are_priced_once_too() -> None:
    """As of `moe-ondemand` in a table: some of each token's experts are there, and the others pass through."""
    move = FetchParameters(gpu_slots=90, stay="first")
    custom = CustomParameters(backbone="gpu", place=OneUnitParameters(unit="gpu"), move=move)
    counters = check_priced(replace(cell_of("on-demand", "rtx5080-ndp"), technique=custom, decode_steps=40))
    assert counters.hits
    assert counters.misses


@pytest.mark.parametrize("units", ["alike", "one stands in for the others", "one is slower", "one has another link"])
def test_units_side_by_side_are_priced_once_in_whatever_order_they_are_called(units: str) -> None:
    """As of `monde` in a table: some experts lie on the GPU, some are fetched, the others stay on six units.

    Where one unit stands in for the others, calls are one after another, and their order matters. Where one is not as
    the others, it matters which of them are called.
    """
    sheet = load_sheet("rtx5080-ndp")
    names = [f"ndp:{i}" for i in range(6)]
    if units == "one stands in for the others":
        sheet = sheet.model_copy(update={"stands_in": dict.fromkeys(names[1:], names[0])})
    elif units == "one is slower":
        slower = Roofline(
            bytes_per_s=SheetFigure(value=60e9, kind="assumed", origin="of this test"),
            flops_per_s=SheetFigure(value=60e9, kind="assumed", origin="of this test"),
        )
        other = sheet.units["ndp:2"].model_copy(update={"roofline": slower})
        sheet = sheet.model_copy(update={"units": {**sheet.units, "ndp:2": other}})
    elif units == "one has another link":
        pcie = sheet.links["pcie"]
        links = {"pcie": pcie.model_copy(update={"source": ("cpu", *names[:5])})}
        sheet = sheet.model_copy(update={"links": {**links, "own": pcie.model_copy(update={"source": (names[5],)})}})
    assert sheet.are_alike(names) is (units in ("alike", "one stands in for the others"))
    counters = check_priced(
        replace(cell_of("monde", gpu_slots=60, stay="first"), sheet=sheet, decode_steps=200),
    )
    assert counters.hits
    assert counters.misses
