"""Routing of models that do not run: recorded, counted, drawn."""

from __future__ import annotations

import gzip
import json
from math import comb, log2
from pathlib import Path

import numpy as np
import pytest

from engines.errors import EngineError
from engines.pricing.counted_routing import counted_routing
from engines.pricing.generated_routing import (
    chances_of,
    entropy_bits,
    figures_of,
    fitted_to,
    generated,
    residuals,
)
from engines.pricing.routing_sources import RecordedRouting, UniformRouting, read_trace
from engines.pricing.routing_specs import parse_routing, routing_of_spec
from engines.pricing.shapes import NAMED_SHAPES, sizes_of
from engines.techniques.context import ModelSizes
from tests.data_folder import data_folder

SMALL = ModelSizes(6, 3, 8, 8, 384, 2, 2)
QWEN3 = sizes_of(NAMED_SHAPES["qwen3-30b-a3b"])
GPT_OSS = sizes_of(NAMED_SHAPES["gpt-oss-20b"])
assert QWEN3 is not None
assert GPT_OSS is not None


def all_distinct(ids_LTK: np.ndarray) -> bool:
    return bool((np.diff(np.sort(ids_LTK, axis=2), axis=2) > 0).all())


# --- all alike -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [SMALL, SMALL._replace(top_k=2), SMALL._replace(top_k=6)])
def test_uniform_choices_are_all_sets_of_k_alike(sizes: ModelSizes) -> None:
    ids_LTK = UniformRouting().ids_LTK(sizes, 6000)
    assert ids_LTK.shape == (2, 6000, sizes.top_k)
    assert all_distinct(ids_LTK)
    sets = np.sort(ids_LTK.reshape(-1, sizes.top_k), axis=1)
    _, counts = np.unique(sets, axis=0, return_counts=True)
    n_sets = comb(6, sizes.top_k)
    assert len(counts) == n_sets
    assert np.abs(counts / 12000 - 1 / n_sets).max() < 5 * (1 / n_sets / 12000) ** 0.5


def test_the_same_source_draws_the_same_and_calibration_draws_apart() -> None:
    for source in (UniformRouting(3), generated(SMALL, 1.5, reuse=0.7, seed=3)):
        one = source.ids_LTK(SMALL, 50)
        assert np.array_equal(one, source.ids_LTK(SMALL, 50))
        assert not np.array_equal(one, source.ids_LTK(SMALL, 50, "calibration"))
        assert not np.array_equal(one, source.ids_LTK(SMALL, 50, "run", 1))


# --- generated -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("imbalance", "bits"), [(1.0, None), (2.0, None), (2.0, 6.8), (4.0, 6.5), (10.0, 6.0), (16.0, 4.0)]
)
def test_chances_have_the_imbalance_and_the_entropy_that_were_asked(imbalance: float, bits: float | None) -> None:
    chances_E = chances_of(imbalance, bits, 128, 8)
    assert chances_E.sum() == pytest.approx(8)
    assert chances_E.max() <= 1 + 1e-12
    assert chances_E.max() / chances_E.mean() == pytest.approx(imbalance)
    if bits is not None:
        assert entropy_bits(chances_E) == pytest.approx(bits, abs=1e-6)


def test_without_entropy_all_but_the_first_are_alike() -> None:
    """Of 4 experts, one of which each token chooses: the first half of the time, the others a sixth each."""
    chances_E = chances_of(2.0, None, 4, 1)
    assert chances_E == pytest.approx([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    assert entropy_bits(chances_E) == pytest.approx(0.5 + 0.5 * log2(6))


def test_what_is_drawn_has_these_figures() -> None:
    source = generated(QWEN3, 4.0, 6.5, 0.4)
    ids_LTK = source.ids_LTK(QWEN3._replace(n_layers=48), 4000)
    assert all_distinct(ids_LTK)
    figures = np.mean([figures_of(ids_TK, 128) for ids_TK in ids_LTK], axis=0)
    assert figures[0] == pytest.approx(4.0, rel=0.03)
    assert figures[1] == pytest.approx(6.5, abs=0.02)
    assert figures[2] == pytest.approx(0.4, abs=0.01)


def test_each_expert_is_chosen_as_often_as_its_chance_says() -> None:
    """Also where it lies over the border of two places: 3 of 5 experts, each three fifths of the time."""
    sizes = ModelSizes(5, 3, 8, 8, 384, 1, 1)
    ids_LTK = generated(sizes).ids_LTK(sizes, 40_000)
    assert all_distinct(ids_LTK)
    shares_E = np.bincount(ids_LTK.reshape(-1), minlength=5) / 40_000
    assert shares_E == pytest.approx([0.6] * 5, abs=5 * (0.24 / 40_000) ** 0.5)


def test_figures_by_hand() -> None:
    """Three tokens of two of four experts: two shared of four, counts 3, 2, 1, 0."""
    figures = figures_of(np.array([[0, 1], [1, 0], [2, 0]]), 4)
    assert figures.imbalance == 3 / 1.5
    assert figures.reuse == 3 / 4
    assert figures.entropy_bits == pytest.approx(0.5 * log2(2) + log2(3) / 3 + log2(6) / 6)


def test_figures_that_no_routing_has_are_told() -> None:
    with pytest.raises(EngineError, match="imbalance = 20 of 8 of 128 experts must be 1 to 16"):
        generated(QWEN3, 20.0)
    with pytest.raises(EngineError, match=r"entropy_bits = 7\.1 with imbalance = 4 .* must be"):
        generated(QWEN3, 4.0, 7.1)
    with pytest.raises(EngineError, match=r"reuse = 0\.01 in layer 0: tokens that choose apart share 0\.0625"):
        generated(QWEN3, reuse=0.01)


# --- recorded --------------------------------------------------------------------------------------------------------


def trace_file(path: Path, experts: object, offsets: object) -> Path:
    np.savez(path, experts=np.array(experts, dtype=np.uint8), offsets=np.array(offsets))
    return path


def test_a_trace_of_another_model_is_one_clear_line() -> None:
    trace = RecordedRouting("tiny", 4, [np.zeros((3, 2, 1), dtype=np.int64)])
    with pytest.raises(EngineError) as told:
        trace.ids_LTK(QWEN3, 5)
    assert str(told.value) == (
        "the trace of tiny has 2 layers of 4 experts, top-1, and the model that is priced has 48 layers of 128 experts,"
        " top-8; take a trace of that model, or a generator"
    )


def test_runs_are_told_other_sequences_than_calibration(tmp_path: Path) -> None:
    experts = [[[n % 4]] for n in range(11)]
    trace = read_trace(trace_file(tmp_path / "t.npz", experts, range(12)), "tiny", 4)
    sizes = ModelSizes(4, 1, 8, 8, 384, 1, 1)
    assert trace.ids_LTK(sizes, 3).reshape(-1).tolist() == [1, 2, 3]
    assert trace.ids_LTK(sizes, 2, "calibration").reshape(-1).tolist() == [0, 10 % 4]
    assert trace.ids_LTK(sizes, 10).reshape(-1).tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 1, 1], "and again from the first"


@pytest.mark.parametrize(
    ("experts", "offsets", "told"),
    [
        ([[[0]]], [0, 2], "where sequences begin"),
        ([[0]], [0, 1], "where sequences begin"),
        ([[[9]]], [0, 1], "numbers from 0 to 3"),
        ([[[1, 1]]], [0, 1], "the same expert twice"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, experts: object, offsets: object, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        read_trace(trace_file(tmp_path / "t.npz", experts, offsets), "tiny", 4)
    with pytest.raises(EngineError, match="no trace of routing"):
        read_trace(tmp_path / "absent.npz", "tiny", 4)


def test_a_generator_is_fitted_to_a_recorded_trace() -> None:
    """gpt-oss-20b: in each of 24 layers entropy within 0.5 %, imbalance within 3 %, and reuse within 4 %, mostly below:
    of experts over a border of two places a kept place does not always keep them."""
    trace = read_trace(data_folder() / "traces" / "moe" / "gpt-oss-20b_decode_trace.npz", "gpt-oss-20b", 32)
    found = residuals(trace, fitted_to(trace), GPT_OSS, 26_355)
    off = np.array([[b / a - 1 for a, b in zip(one.trace, one.drawn, strict=True)] for one in found])
    assert np.abs(off[:, 1]).max() < 0.005
    assert np.abs(off[:, 2]).max() < 0.04
    assert np.abs(off[:, 0]).max() < 0.03


# --- counted ---------------------------------------------------------------------------------------------------------


def counts_file(path: Path, **changes: object) -> Path:
    told = {
        "model": "m",
        "num_experts": 4,
        "top_k": 2,
        "num_layers": 3,
        "counts": {"a": {"0": [4, 2, 1, 1]}, "b": {"2": [1, 1, 1, 1]}},
    }
    path.write_bytes(gzip.compress(json.dumps(told | changes).encode()))
    return path


def test_published_counts_are_chances(tmp_path: Path) -> None:
    """A layer that was not counted is as the nearest; nobody is chosen more than once by a token."""
    source = counted_routing(counts_file(tmp_path / "c.json.gz"))
    assert source.chances_LE.tolist() == [[1, 0.5, 0.25, 0.25], [1, 0.5, 0.25, 0.25], [0.5] * 4]
    assert source.name == "published counts of m, counted in layers 0, 2, others as the nearest, seed 0"
    (only,) = {tuple(row) for row in counted_routing(counts_file(tmp_path / "c.json.gz"), "b").chances_LE.tolist()}
    assert only == (0.5,) * 4
    most = counted_routing(counts_file(tmp_path / "d.json.gz", counts={"a": {"0": [18, 2, 2, 2]}}))
    assert most.chances_LE[0] == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"counts": {"a": {"0": [1, 2]}}}, r"layers \[0\] have no counts of 4 experts"),
        ({"counts": {"a": {"7": [1, 1, 1, 1]}}}, r"layers \[7\]"),
        ({"counts": {"a": {"0": [0, 0, 0, 0]}}}, r"layers \[0\]"),
        ({"counts": "none"}, "no counts of experts"),
        ({"top_k": 0}, "no counts of experts"),
    ],
)
def test_what_is_no_count_is_refused(tmp_path: Path, changes: dict[str, object], told: str) -> None:
    with pytest.raises(EngineError, match=told):
        counted_routing(counts_file(tmp_path / "c.json.gz", **changes))


def test_counts_of_the_data_folder_are_those_of_their_model() -> None:
    folder = data_folder() / "traces" / "moe"
    for name, shape in (
        ("olmoe_expert_counts.json.gz", "olmoe-1b-7b"),
        ("mixtral-8x7b_expert_counts.json.gz", "mixtral-8x7b"),
    ):
        sizes = sizes_of(NAMED_SHAPES[shape])
        assert sizes is not None
        ids_LTK = counted_routing(folder / name).ids_LTK(sizes, 100)
        assert all_distinct(ids_LTK)
    with pytest.raises(EngineError, match="give chances of that model"):
        counted_routing(folder / name).ids_LTK(GPT_OSS, 100)


# --- as a user names them --------------------------------------------------------------------------------------------


def test_a_user_names_a_source_in_a_line_of_toml(tmp_path: Path) -> None:
    def name(text: str) -> str:
        return routing_of_spec(parse_routing(text), SMALL).name

    assert name("uniform") == "generated, all experts alike, seed 0"
    assert name('{ kind = "generated", imbalance = 1.5, seed = 3 }') == "generated, imbalance 1.5, seed 3"
    trace_file(tmp_path / "t.npz", np.tile([[[0, 1, 2], [3, 4, 5]]], (20, 1, 1)), [0, 10, 20])
    assert name(f'{{ kind = "trace", path = "{tmp_path}/t.npz", of = "m" }}') == "recorded, m, 20 tokens of 2 sequences"
    assert name(f'{{ kind = "fitted", path = "{tmp_path}/t.npz", of = "m" }}').startswith("generated with imbalance")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("often", "^often: kind: must be one of 'uniform', 'generated', 'counts', 'trace', 'fitted'$"),
        ("{ imbalance = 4 }", "kind: missing; add it$"),
        ("{ kind = ", "no table of TOML"),
        (
            '{ kind = "generated", imbalance = 0.5, reuse = 2, seeds = 1 }',
            "imbalance: must be greater than or equal to 1, found 0.5; "
            + "reuse: must be less than or equal to 1, found 2; seeds: unknown key; remove it$",
        ),
        ('{ kind = "trace" }', "path: missing; add it; of: missing; add it"),
    ],
)
def test_every_problem_of_a_named_source_is_told_at_once(text: str, told: str) -> None:
    with pytest.raises(EngineError, match=told):
        parse_routing(text)


def test_a_named_source_of_another_model_is_told() -> None:
    path = data_folder() / "traces" / "moe" / "gpt-oss-20b_decode_trace.npz"
    spec = parse_routing(f'{{ kind = "trace", path = "{path}", of = "gpt-oss-20b" }}')
    with pytest.raises(EngineError, match="gpt-oss-20b has 24 layers of 32 experts, top-4, and the model that"):
        routing_of_spec(spec, QWEN3)


def test_a_trace_that_numbers_alone_do_not_tell_is_told_by_its_models_name(tmp_path: Path) -> None:
    """gpt-oss-20b has 32 experts in 24 layers and chooses 4: nothing in a trace of 32 experts says that there are not
    128 of them."""
    trace_file(tmp_path / "t.npz", np.tile([[[0, 1, 2], [3, 4, 5]]], (20, 1, 1)), [0, 10, 20])
    for kind in ("trace", "fitted"):
        named = f'{{ kind = "{kind}", path = "{tmp_path}/t.npz", of = "gpt-oss-20b" }}'
        with pytest.raises(EngineError, match="gpt-oss-20b has 24 layers of 32 experts, top-4, and the model that is"):
            routing_of_spec(parse_routing(named), SMALL)
        of_none = f'{{ kind = "{kind}", path = "{tmp_path}/t.npz", of = "qwen2.5-1.5b" }}'
        with pytest.raises(EngineError, match=r"qwen2\.5-1\.5b has no experts"):
            routing_of_spec(parse_routing(of_none), SMALL)


def test_a_trace_of_more_experts_says_how_many(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t.npz", [[[0, 9], [1, 2]]], [0, 1])
    with pytest.raises(EngineError, match=r"from 0 to 3, as the model .* and the trace has 9 \(2 layers, top-2\)"):
        read_trace(path, "m", 4)
