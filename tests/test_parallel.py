"""Several processes compute what one does, each with its part of the checkpoint, and send what the plans say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engines.base import unheard
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.quantised import Quantisation
from engines.model.transformer import Transformer
from engines.model.weights import SparseWeights
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked, Running
from engines.reference import ReferenceEngine
from engines.sizes import own_sizes
from engines.techniques.context import BuildContext
from engines.techniques.presets import DroplessParameters, dropless
from tests.command import names_of_modules
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import copy_tokenizer
from tests.forked_ranks import ranks_forked
from tests.kernel_forms import needs_bf16
from tests.ranks import (
    BUNDLED,
    CHUNK,
    GENERATE,
    LINKS,
    LOGLIKELIHOOD,
    TOLERANCE,
    assert_same_answers,
    logits,
    one_process,
    relative_error,
    technique,
)

pytestmark = pytest.mark.numbers


class Case(NamedTuple):
    family: str
    n_ranks: int
    technique: Any


BLOCKS = {"place": {"kind": "expert_parallel"}, "layout": {"kind": "blocks", "block_size": 16}}
FAMILIES = [
    Case("qwen2-moe-some-dense", 2, technique("expert-parallel")),
    Case("gpt-oss-mxfp4", 2, technique("tensor-parallel")),
    Case("deepseek-v3-halves", 3, technique("expert-parallel", router_gather="logits")),
    Case("phi-moe", 4, technique("tp-ep", exchange="all_gather")),
    Case("llama4-top2", 2, technique("tensor-parallel", sequence_parallel=False)),
    Case("gpt-oss", 2, technique("tensor-parallel")),
    Case("mixtral-sliding", 2, technique("custom", **BLOCKS)),
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=f"{c.family}-{c.n_ranks}", marks=[pytest.mark.slow] if i > 3 else [])
        for i, c in enumerate(FAMILIES)
    ],
)  # fmt: skip
def test_several_processes_equal_one(case: Case, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Of the first family started beside a user's files, of the others forked."""
    if case is FAMILIES[0]:
        request.getfixturevalue("monkeypatch").chdir(names_of_modules(tmp_path))
    else:
        request.getfixturevalue("forked_ranks")
    write_family(tmp_path, CASES[case.family])
    expected = logits(Transformer(load_checkpoint(str(tmp_path), torch.float32)), dropless())
    running = Running(RanksAsked(inspect_checkpoint(str(tmp_path)), case.technique, case.n_ranks, threads=1))
    try:
        assert relative_error(logits(running.model, running.technique), expected) < TOLERANCE
    finally:
        running.close()


def test_one_rank_is_one_process() -> None:
    expected = logits(Transformer(load_checkpoint(BUNDLED, torch.float32)), dropless())
    running = Running(RanksAsked(inspect_checkpoint(BUNDLED), technique("tp-ep", tensor_ranks=1), 1, threads=1))
    assert relative_error(logits(running.model, running.technique), expected) < TOLERANCE
    assert not running.workers.processes
    running.close()


def test_one_rank_decodes_on_the_road_of_one_process(one: ReferenceEngine) -> None:
    for name in ("expert-parallel", "tensor-parallel"):
        alone = ParallelEngine(
            RanksAsked(inspect_checkpoint(BUNDLED), technique(name), 1, prefill_chunk=CHUNK, threads=1)
        )
        alone.run(GENERATE[0], unheard)
        assert alone.take_road().decoding == "fused"
        assert_same_answers(one, alone)
        alone.close()


# --- answers of an engine --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one() -> ReferenceEngine:
    return one_process()


@pytest.fixture(scope="module")
def two() -> Iterator[ParallelEngine]:
    engine = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), technique("expert-parallel"), 2, prefill_chunk=CHUNK, threads=1)
    )
    with ranks_forked():
        engine.reset()
    yield engine
    engine.close()


def test_shown_probabilities_are_those_of_one_process_and_count_as_no_request(
    one: ReferenceEngine, two: ParallelEngine
) -> None:
    """As `fidelity` asks for them, between requests that are counted and before the counters are read."""
    shown: dict[int, list[torch.Tensor]] = {}
    two.take_counters()
    two.run(GENERATE[0], unheard)
    alone = two.take_counters()
    two.run(GENERATE[0], unheard)
    for key, engine in enumerate((one, two)):
        shown[key] = []
        engine.show_log_probabilities(LOGLIKELIHOOD, lambda part, key=key: shown[key].append(part.clone()))  # type: ignore[misc]
    assert (alone.bytes_exchanged or 0) > 0
    assert two.take_counters() == alone
    torch.testing.assert_close(torch.cat(shown[1]), torch.cat(shown[0]), rtol=1e-4, atol=1e-4)
    assert two.take_heat() is not None  # of the two requests, which no other test is to find


def test_answers_are_those_of_one_process_alone_and_in_a_batch(one: ReferenceEngine, two: ParallelEngine) -> None:
    for engine in (one, two):  # what other tests asked of them counts as well
        engine.take_heat()
        engine.take_counters()
    assert_same_answers(one, two)
    heat, expected = two.take_heat(), one.take_heat()
    assert heat is not None
    assert heat == expected, "rank 0 is told the routing of all tokens"
    road = two.take_road()
    assert (road.n_processes, road.links, road.n_threads) == (2, LINKS, 1)
    assert road.decoding == "both", "one token in one call of the kernels; a batch plan by plan"
    ours, theirs = two.take_counters(), one.take_counters()
    assert (ours.routed_pairs, ours.computed_rows, ours.dropped_pairs) == (
        theirs.routed_pairs, theirs.computed_rows, 0,
    )  # fmt: skip
    assert two.held_weights().n_parameters == one.held_weights().n_parameters


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
@pytest.mark.parametrize("chosen", [technique("tensor-parallel"), technique("expert-parallel")], ids=["tp", "ep"])
@pytest.mark.parametrize(
    ("form", "arithmetic"), [("int8", "int8"), ("int4-g32", "int8"), pytest.param("bf16", "bf16", marks=needs_bf16)]
)
def test_rounded_inputs_over_ranks_give_what_one_process_gives(chosen: Any, form: Any, arithmetic: Any) -> None:
    """Slices are whole blocks of 32 columns, so that each rank rounds as one process does. Sums are added in another
    order, which may bring a level near a tie to the other side, and a token of this small model to another expert.
    Where that does not happen, log-likelihoods stay where rounding put them: in two texts of six at least."""
    asked = [LOGLIKELIHOOD.model_copy(update={"prompt_ids": tuple(range(20 + 7 * i, 60 + 9 * i))}) for i in range(6)]
    quantise = Quantisation(experts=form, arithmetic=arithmetic)
    one, unrounded = (
        ReferenceEngine(load_checkpoint(BUNDLED, torch.float32, asked), DroplessParameters(), CHUNK, threads=1)
        for asked in (quantise, Quantisation(experts=form))
    )
    several = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), chosen, 2, quantise=quantise, prefill_chunk=CHUNK, threads=1)
    )
    try:
        found_N, exact_N, plain_N = (
            torch.tensor([engine.run(one_of, unheard).loglikelihood for one_of in asked])
            for engine in (several, one, unrounded)
        )
        moved_N = (found_N - exact_N).abs() / (plain_N - exact_N).abs()  # 1 where ranks would not round
        assert float(moved_N.sort().values[1]) < 0.2
        assert several.take_road().rounded_to == arithmetic
        several.take_counters()  # raises where bytes are not what the plans say
    finally:
        several.close()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        technique("tensor-parallel"),
        technique("tp-ep", tensor_ranks=1),
        technique("eplb", calibration_prompts=1),
        technique("custom", **BLOCKS, decode={"kind": "selective"}),
        technique("custom", place={"kind": "expert_parallel"}, layout={"kind": "all_experts"}),
    ],
    ids=["tp", "tp-ep", "eplb", "ep-blockwise", "ep-all-experts"],
)
@pytest.mark.parametrize("form", ["int8", "mxfp4"])
def test_narrow_experts_over_ranks_give_what_one_process_gives(chosen: Any, form: Any) -> None:
    quantise = Quantisation(experts=form)
    checkpoint = load_checkpoint(BUNDLED, torch.float32, quantise)
    one = ReferenceEngine(checkpoint, DroplessParameters(), CHUNK, threads=1)
    several = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), chosen, 2, quantise=quantise, prefill_chunk=CHUNK, threads=1)
    )
    try:
        if several.needs_calibration:
            several.calibrate([list(range(10, 74))])
        assert_same_answers(one, several)
        several.take_counters()  # raises where bytes are not what the plans say
    finally:
        several.close()


@pytest.mark.usefixtures("forked_ranks")
def test_slices_are_counted_where_a_layer_is_left_to_wait_for_others(tmp_path: Path) -> None:
    """A family whose layers the kernels do not know whole: each layer's sum is waited for, and its plan counted."""
    write_family(tmp_path, CASES["qwen2-moe"])
    copy_tokenizer(tmp_path)
    one = ReferenceEngine(load_checkpoint(str(tmp_path), torch.float32), DroplessParameters(), CHUNK, threads=1)
    several = ParallelEngine(
        RanksAsked(inspect_checkpoint(str(tmp_path)), technique("tensor-parallel"), 2, prefill_chunk=CHUNK, threads=1)
    )
    try:
        assert_same_answers(one, several)
        assert several.take_counters().routed_pairs == one.take_counters().routed_pairs
        assert several.take_road().decoding not in (None, "fused")
    finally:
        several.close()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.slow
@pytest.mark.parametrize("where", [{}, {"nodes": 2, "groups": 4}, {"exchange": "all_gather"}], ids=str)
def test_experts_dealt_by_load_give_what_one_process_gives(where: dict[str, Any], one: ReferenceEngine) -> None:
    """Flat and hierarchical, rows to whom they belong or to all; bytes are what the plans say, or an error."""
    chosen = technique("eplb", calibration_prompts=1, spare_slots=2, **where)
    several = ParallelEngine(RanksAsked(inspect_checkpoint(BUNDLED), chosen, 4, prefill_chunk=CHUNK, threads=1))
    try:
        several.calibrate([list(range(10, 74))])
        assert_same_answers(one, several)
        assert several.take_counters().bytes_exchanged
    finally:
        several.close()


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("spare_slots", [0, 2])
def test_experts_dealt_by_load_decode_in_one_call(spare_slots: int, one: ReferenceEngine) -> None:
    chosen = technique("eplb", calibration_prompts=1, spare_slots=spare_slots)
    several = ParallelEngine(RanksAsked(inspect_checkpoint(BUNDLED), chosen, 2, prefill_chunk=CHUNK, threads=1))
    try:
        several.calibrate([list(range(10, 74))])
        held = [set(several.held(0, rank).experts) for rank in range(2)]
        assert held[0] != set(range(8))
        assert held[0] | held[1] == set(range(16))
        assert [len(own) for own in held] == [8 + spare_slots, 8 + spare_slots]
        assert_same_answers(one, several)
        several.take_road()
        several.run(GENERATE[0], unheard)
        assert several.take_road().decoding == "fused"
        assert several.take_counters().bytes_exchanged
    finally:
        several.close()


def test_each_process_reads_its_own_experts_and_no_others(two: ParallelEngine) -> None:
    sizes: dict[str, int] = {}
    load_checkpoint(BUNDLED, torch.float32, on_read=lambda name, n_bytes: sizes.update({name: n_bytes}))
    own = [range(8), range(8, 16)]
    for rank, read in enumerate(two.read_bytes()):
        expected = {
            name: n for name, n in sizes.items() if ".experts." not in name or int(name.split(".")[5]) in own[rank]
        }
        assert read == expected
        assert sum(read.values()) < 0.6 * sum(sizes.values())


def test_slices_of_experts_are_read_by_columns() -> None:
    """A rank of four reads a quarter of every matrix: rows of gate and up, columns of down."""
    sizes: dict[str, int] = {}
    part: dict[str, int] = {}
    load_checkpoint(BUNDLED, torch.float32, on_read=lambda name, n_bytes: sizes.update({name: n_bytes}))
    built = technique("tensor-parallel").build(context(4))
    checkpoint = load_checkpoint(
        BUNDLED, torch.float32, held=lambda layer: built.held(layer, 3),
        on_read=lambda name, n_bytes: part.update({name: n_bytes}),
    )  # fmt: skip
    assert {name for name in sizes if ".experts." in name} == {name for name in part if ".experts." in name}
    assert all(4 * part[name] == n for name, n in sizes.items() if ".experts." in name)
    mlps = [c.weights.layers[1].mlp for c in (load_checkpoint(BUNDLED, torch.float32), checkpoint)]
    whole, own = (mlp.experts.experts[5] for mlp in mlps if isinstance(mlp, SparseWeights))
    assert isinstance(whole.down_HI, torch.Tensor)
    assert isinstance(own.down_HI, torch.Tensor)
    width = whole.gate_IH.shape[0]
    columns = slice(3 * width // 4, width)
    assert torch.equal(own.gate_IH.to(torch.float32), whole.gate_IH[columns].to(torch.float32))
    assert torch.equal(own.down_HI, whole.down_HI[:, columns])


def context(n_ranks: int) -> BuildContext:
    return BuildContext(CHUNK, own_sizes(inspect_checkpoint(BUNDLED).config), ranks=n_ranks)
