"""Techniques that compute experts in slices, on several cores or in blocks, decode on the road of dropless."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from engines.base import unheard
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.oracle import Oracle
from engines.reference import ReferenceEngine
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext
from engines.techniques.parameters import CustomParameters
from results.counters import EngineCounters
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import copy_tokenizer
from tests.test_decode_layouts import Watcher, decoded, relative_error

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler: torch computes everything"),
]

FAMILIES = ("mixtral", "deepseek-v2", "deepseek-v3", "glm4-moe", "qwen2-moe", "phi-moe", "olmoe")
EXACT, ROWS_8 = {"kind": "exact"}, {"kind": "blocks", "block_size": 8}
ONE_ROW = {"kind": "blocks", "block_size": 1, "skip_padding_blocks": False}
SYSTEMS: dict[str, dict[str, Any]] = {
    **{f"{shard} {n}": {"place": {"kind": "shards", "shard": shard, "cores": n}, "layout": EXACT}
       for shard in ("intermediate", "hidden", "blocks") for n in (1, 2, 3, 5)},
    **{f"{shard} of blocks": {"place": {"kind": "shards", "shard": shard, "cores": 3}, "layout": ROWS_8}
       for shard in ("intermediate", "hidden", "blocks")},
    "tight": {"layout": ONE_ROW | {"block_count": "tight"}},
    "sufficient": {"layout": ONE_ROW | {"block_count": "sufficient"}},
    "sufficient, sliced": {"place": {"kind": "shards", "cores": 2},
                           "layout": ONE_ROW | {"block_count": "sufficient", "block_size": 4}},
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        write_family(folder, CASES[family])
        copy_tokenizer(folder)
        found[family] = load_checkpoint(str(folder), torch.float32)
    return found


def technique_of(system: str, checkpoint: Checkpoint) -> Technique:
    return parameters(system).build(BuildContext(64, own_sizes(checkpoint.config)))


def parameters(system: str) -> CustomParameters:
    return CustomParameters.model_validate(SYSTEMS[system])


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_slices_are_the_oracle_and_the_plan(family: str, system: str, checkpoints: dict[str, Checkpoint]) -> None:
    """Computed before anybody plans; what is planned afterwards is what the plan-by-plan road plans."""
    model = ReferenceEngine(checkpoints[family], CustomParameters())._model
    technique = technique_of(system, checkpoints[family])
    hidden, steps = decoded(model, technique, n_tokens=3)
    assert relative_error(hidden, decoded(model, Oracle(), n_tokens=3)[0]) < 1e-5
    by_plan, one_by_one = decoded(model, technique, Watcher(), n_tokens=3)
    assert relative_error(hidden, by_plan) < 1e-5
    for plans, theirs in zip(steps, one_by_one, strict=True):
        assert not plans.waited
        assert theirs.waited
        assert [plan and plan.counters() for plan in plans] == [plan and plan.counters() for plan in theirs]


def counted(system: str, checkpoint: Checkpoint, watcher: Watcher | None) -> tuple[EngineCounters, str | None]:
    engine = ReferenceEngine(checkpoint, parameters(system), threads=1)
    engine.layer_observer = watcher
    asked = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=(5, 6, 7), max_new_tokens=5)
    engine.run(asked, unheard)
    return engine.take_counters(), engine.take_road().decoding


@pytest.mark.parametrize(
    ("system", "calls"),
    [("intermediate 3", 3 * 2), ("hidden 2", 2 * 2), ("blocks 2", 2), ("tight", 2), ("sufficient", 17)],
)
def test_the_bundled_model_decodes_them_in_one_call_a_step(system: str, calls: int) -> None:
    """16 experts, top 2, in 4 layers: n slices are n times the calls; blocks of one row that suffice are 2 + 16 - 1."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    found, road = counted(system, checkpoint, None)
    assert (found, road) == (counted(system, checkpoint, Watcher())[0], "fused")
    engine = ReferenceEngine(checkpoint, parameters(system), threads=1)
    first = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=(5, 6, 7), max_new_tokens=1)
    engine.run(first, unheard)
    assert found.expert_calls - engine.take_counters().expert_calls == 4 * 4 * calls


def test_slices_of_a_model_on_a_sheet_are_those_of_the_model_that_computes() -> None:
    """The larger model's experts are priced; here those that there are, are cut, by the kernels too; answers stay."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    own = own_sizes(checkpoint.config)
    assert own is not None
    engine = ReferenceEngine(checkpoint, parameters("intermediate 2"), sizes=own._replace(expert_width=6400))
    asked = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=(5, 6, 7), max_new_tokens=5)
    text = engine.run(asked, unheard).text
    assert engine.take_road().decoding == "fused"
    assert text == ReferenceEngine(checkpoint, CustomParameters()).run(asked, unheard).text
