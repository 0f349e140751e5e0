"""Memory and traffic on a modelled device are those of the model that is priced, and not of the small one that runs.

Phi-3.5-MoE: 32 layers of 16 experts, top-2, rows of 4096 values; an expert has 3 x 4096 x 6400 weights of two bytes,
157,286,400 bytes. The GPU of rtx5080-ndp holds 16 GiB. The model that runs has 4 layers of 16 experts, rows of 192.
"""

from __future__ import annotations

import pytest
import torch

from devices.models.sheet import load_sheet
from engines.base import unheard
from engines.errors import EngineError
from engines.expert_memory import ExpertMemory
from engines.model.checkpoints import load_checkpoint
from engines.pricing.cells import Cell, lacks_room_for, parameters
from engines.pricing.published_shapes import DEEPSEEK_MOE_16B, PHI_3_5_MOE
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import sizes_of
from engines.reference import ReferenceEngine
from engines.sizes import own_sizes
from engines.techniques.move.caches import CacheParameters
from engines.techniques.parameters import Composed
from engines.techniques.place.ranks import EplbParameters
from engines.techniques.presets import preset_parameters
from harness.plan import PlanError
from tests.ndp_units import generation
from tests.plans import M2_ULTRA
from tests.test_preflight import checked, problems

PHI = {"name": "model:rtx5080-ndp", "priced_as": "phi-3.5-moe"}
EXPERT_BYTES = 157_286_400
HOST = {"name": "host"}


def prefetching(memory: str | None = None, **technique: object) -> dict[str, object]:
    arm: dict[str, object] = {"name": "arm", "technique": {"name": "ndp-tp-pre", **technique}}
    return arm if memory is None else arm | {"expert_memory": memory}


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        (prefetching(slots=17), "slots = 17 in each layer, and a layer has 16 experts; lower it"),
        # 4 x 32 x 157,286,400 are 20.1 GB; 3 x 32 of them are 15.1.
        (
            prefetching(slots=4),
            "slots = 4 in each of 32 layers are 128 experts, 20.1 GB, and the GPU of model:rtx5080-ndp holds 17.2 GB;"
            " lower it",
        ),
        # 32 x 157,286,400 = 5,033,164,800
        (
            prefetching("5033164799"),
            "expert_memory 5033164799 bytes on model:rtx5080-ndp as phi-3.5-moe, at two bytes a weight: the memory for"
            " experts holds 31, and 1 in each of 32 layers need 32; write expert_memory = 5033164800 (5.03 GB) or more",
        ),
        # 16 GiB and one byte
        (
            prefetching("17179869185"),
            "expert_memory 17179869185 bytes are 17.17986919 GB, and the GPU of model:rtx5080-ndp holds"
            " 17.17986918 GB; lower it",
        ),
        (
            prefetching("6GB", slots=2),
            "expert_memory 6000000000 bytes on model:rtx5080-ndp as phi-3.5-moe, at two bytes a weight: the memory for"
            " experts holds 38, and 2 in each of 32 layers need 64; write expert_memory = 10066329600 (10.1 GB) or"
            " more",
        ),
    ],
)
def test_experts_kept_on_a_modelled_gpu_are_those_of_the_priced_model(arm: dict[str, object], words: str) -> None:
    assert problems(engine=[arm], device=[PHI]) == [f"engine arm: {words}"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        # 32 x 157,286,400 x 4 are 20.1 GB; static has two more that all share.
        (
            {"name": "lru", "slots": 4},
            "slots = 4 in each of 32 layers are 128 experts, 20.1 GB, and the GPU of model:rtx5080-ndp holds 17.2 GB;"
            " lower it",
        ),
        (
            {"name": "static", "slots": 4},
            "slots = 4 in each of 32 layers are 130 experts, 20.4 GB, and the GPU of model:rtx5080-ndp holds 17.2 GB;"
            " lower it",
        ),
        ({"name": "lru"}, "the cache has no slots in the GPU's memory; write technique.slots"),
    ],
)
def test_a_cache_in_a_modelled_gpu_has_slots_that_fit_there(given: dict[str, object], words: str) -> None:
    def on_gpu(**more: object) -> dict[str, object]:
        return {"name": "arm", "technique": {"unit": "gpu", "backbone": "gpu", **given, **more}}

    assert problems(engine=[on_gpu()], device=[PHI]) == [f"engine arm: {words}"]
    assert checked(engine=[on_gpu(slots=3)], device=[PHI]).cells
    (told,) = problems(engine=[on_gpu(slots=None) | {"expert_memory": "6GB"}], device=[PHI])
    assert "in a GPU's memory takes slots in the place of expert_memory; write technique.slots" in told


@pytest.mark.parametrize("arm", [prefetching(slots=3), prefetching("5033164800"), prefetching("17179869184")])
def test_experts_that_just_fit_there_are_taken(arm: dict[str, object]) -> None:
    assert checked(engine=[arm], device=[PHI]).cells


KEPT = (
    # Experts of Phi-3.5-MoE that lie in the GPU's memory, of 32 layers together. The fetched ones of fiddler are of the
    # 4 layers that run, each of which stands for 8.
    ({"name": "ndp-tp-pre", "slots": 2}, None, 64),
    ({"name": "ndp-tp-pre", "slots": 3}, None, 96),
    ({"name": "ndp"}, "15.2GB", 96),
    ({"name": "ndp-tp-lb"}, None, 0),
    ({"name": "lru", "unit": "gpu", "backbone": "gpu", "slots": 3}, None, 96),
    ({"name": "static", "unit": "gpu", "backbone": "gpu", "slots": 2, "stay": "first"}, None, 66),
    ({"name": "fiddler", "gpu_slots": 11, "stay": "first"}, None, 88),
    ({"name": "monde", "gpu_slots": 12, "stay": "first"}, None, 96),
)


@pytest.mark.parametrize(("technique", "memory", "n_kept"), KEPT)
def test_experts_that_stay_lie_beside_what_every_token_passes_through(
    technique: dict[str, object], memory: str | None, n_kept: int
) -> None:
    """By hand, in bf16. Attention of a layer: 4096 x 128 x 2 x (32 + 8) values; routers: 4096 x 16; embedding and
    head: 32064 x 4096 each. 3.21 GB in all, beside which 13.96 GB of the GPU's 17.18 are left: 88 experts."""
    others_bytes = 2 * (32 * (4096 * 128 * 2 * 40 + 4096 * 16) + 2 * 32064 * 4096)
    assert PHI_3_5_MOE.others_bytes == others_bytes
    fits = others_bytes + n_kept * EXPERT_BYTES <= 2**34
    assert fits == (n_kept <= 88)
    arm = {"name": "arm", "technique": technique} | ({} if memory is None else {"expert_memory": memory})
    told = checked(engine=[arm], device=[PHI]).warnings
    slots = None if memory is None else 15_200_000_000 // EXPERT_BYTES
    cell = Cell(
        load_sheet("rtx5080-ndp"), PHI_3_5_MOE, _parameters(technique, 8), UniformRouting(), 1, expert_slots=slots
    )
    lacks = lacks_room_for(cell)
    if fits:
        assert told == ()
        assert lacks is None
        return
    (line,) = told
    assert line == f"engine arm: its cells will say {lacks}"
    assert "oom: 2.99 GiB of what every token of phi-3.5-moe passes through beside 14.1 GiB of experts that lie" in line
    assert "use narrower weights, more units, fewer of these experts, or a smaller model" in line


@pytest.mark.parametrize("name", ["on-demand", "prefetch-hint", "router-pf"])
@pytest.mark.parametrize(("n_slots", "n_kept"), [(None, 32), (200, 32), (30, 30), (31, 30), (4, 4)])
def test_two_buffers_lie_beside_what_every_token_passes_through(name: str, n_slots: int | None, n_kept: int) -> None:
    """Each holds the 16 experts of a layer, or half of the memory that a plan gives: whole experts, one layer at a
    time, so 32 layers take no more than one."""
    needed_bytes = PHI_3_5_MOE.others_bytes + n_kept * EXPERT_BYTES
    one_tokens_keys_bytes = 32 * 2 * 8 * 128 * 2
    sheet = load_sheet("rtx5080-ndp")
    for capacity_bytes, fits in ((needed_bytes + one_tokens_keys_bytes, True), (needed_bytes - 1, False)):
        gpu = sheet.memories["gpu"].model_copy(update={"value": capacity_bytes})
        small = sheet.model_copy(update={"memories": {**sheet.memories, "gpu": gpu}})
        recall = None if name == "on-demand" else 0.9
        cell = Cell(small, PHI_3_5_MOE, parameters(name), UniformRouting(), 1, 0, recall=recall, expert_slots=n_slots)
        lacks = lacks_room_for(cell)
        assert (lacks is None) == fits
        if lacks is not None:
            assert "of experts that lie there" in str(lacks)
            assert "fewer of these experts" in str(lacks)


def _parameters(technique: dict[str, object], n_for_one: int) -> Composed:
    """Of the priced model alone, which has n_for_one layers for each that runs."""
    given = {key: value for key, value in technique.items() if key != "name"}
    if "gpu_slots" in given:
        given["gpu_slots"] = n_for_one * int(str(given["gpu_slots"]))
    return parameters(str(technique["name"]), **given)


def test_the_host_counts_the_model_that_runs() -> None:
    """8 slots in each layer are too many for the sheet's GPU, and not here."""
    assert checked(engine=[prefetching(slots=8)], device=[HOST]).cells
    (told,) = problems(engine=[prefetching(slots=8)], device=[HOST, PHI])
    assert "slots = 8 in each of 32 layers are 256 experts, 40.3 GB" in told


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        (
            {"technique": {"name": "lru", "slots": 17}},
            "slots = 17 in each layer, and a layer has 16 experts; lower it",
        ),
        (
            {"technique": {"name": "eplb", "spare_slots": 9, "calibration_prompts": 1}, "ranks": 2},
            "spare_slots = 9: a rank has 8 of 16 experts, and there are 8 others; lower it",
        ),
        (
            {
                "technique": {"name": "eplb", "spare_slots": 5, "calibration_prompts": 1, "nodes": 2, "groups": 2},
                "ranks": 4,
            },
            "spare_slots = 5: a rank has 4 of the 8 experts of its node, and there are 4 others; lower it",
        ),
    ],
)
def test_slots_above_the_experts_of_a_layer_are_refused(arm: dict[str, object], words: str) -> None:
    (told,) = problems(engine=[{"name": "arm"} | arm])
    assert words in told


def test_as_many_slots_as_experts_are_taken() -> None:
    sizes = own_sizes(load_checkpoint("bundled:tiny-qwen3-moe", torch.float32).config)
    assert sizes is not None
    assert CacheParameters(slots=16).slots_of_model(sizes, None) == 4 * 16
    with pytest.raises(EngineError, match="slots = 17 in each layer"):
        CacheParameters(slots=17).slots_of_model(sizes, None)
    assert EplbParameters(spare_slots=8).problem(2, sizes) is None
    assert EplbParameters().problem(1, sizes) is None
    assert EplbParameters(spare_slots=4, nodes=2, groups=2).problem(4, sizes) is None


@pytest.mark.numbers
def test_memory_holds_experts_of_the_priced_model_in_each_of_its_layers() -> None:
    """floor(16e9 / 157,286,400) = 101 experts, of 32 layers 3 each. The layers that run are 4; what comes ahead is for
    the 3 after the first."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    memory, sizes = ExpertMemory(16_000_000_000), sizes_of(PHI_3_5_MOE)
    technique = preset_parameters("ndp-tp-pre")()
    engine = ReferenceEngine(checkpoint, technique, 16, sizes=sizes, expert_memory=memory)
    engine.run(generation(range(10, 50)), unheard)
    counted = engine.take_counters()
    assert (counted.bytes_moved, counted.prefetched) == (4 * 3 * EXPERT_BYTES, 3 * 3)


@pytest.mark.numbers
@pytest.mark.parametrize(("priced", "width", "value_bytes"), [(PHI_3_5_MOE, 4096, 2), (None, 192, 4)])
def test_units_exchange_rows_of_the_priced_model(priced: object, width: int, value_bytes: int) -> None:
    """A token's row goes to 6 units, and a result comes back from each, in each of the 4 layers that run."""
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    sizes = None if priced is None else sizes_of(PHI_3_5_MOE)
    engine = ReferenceEngine(checkpoint, preset_parameters("ndp-tp")(), 16, sizes=sizes)
    engine.run(generation(range(10, 50)), unheard)
    n_tokens = engine.take_counters().routed_pairs // (4 * 2)
    engine.run(generation(range(10, 50)), unheard)
    assert engine.take_counters().bytes_exchanged == n_tokens * 4 * 2 * 6 * width * value_bytes


def test_layers_without_experts_share_no_memory() -> None:
    """DeepSeek-MoE-16B: 28 layers, the first dense."""
    sizes = sizes_of(DEEPSEEK_MOE_16B)
    assert sizes is not None
    assert (sizes.n_layers, sizes.n_sparse_layers) == (28, 27)


@pytest.mark.parametrize("name", ["gpu", "dropless"])
def test_a_unit_that_holds_no_such_model_is_told_when_the_plan_is_checked(name: str) -> None:
    """75.0 GiB of Phi's experts, and the GPU of the sheet holds 16.0; its CPU's memory holds them."""
    arm: dict[str, object] = {"name": "arm", "technique": {"name": name}, "devices": [PHI["name"]]}
    told = checked(engine=[arm], device=[PHI]).warnings
    if name == "dropless":
        assert told == ()
        return
    (line,) = told
    assert line.startswith("engine arm: its cells will say oom: 75.0 GiB of experts of phi-3.5-moe, and gpu of sheet")
    assert "rtx5080-ndp holds 16.0 GiB" in line


def test_requests_beyond_the_context_of_the_priced_shape_are_told() -> None:
    """The bundled model holds 8192 tokens, phi-tiny-moe 4096 (`tests.fakes.published`), phi-3.5-moe 131,072."""

    def told_of(workload: dict[str, object], shape: str = "phi-tiny-moe") -> tuple[str, ...]:
        arm = {"name": "arm", "technique": {"name": "coreml-cpu"}}
        return checked(engine=[arm], device=[M2_ULTRA | {"priced_as": shape}], workload=[workload]).warnings

    def told(shape: str, n_prompt: int, **more: object) -> tuple[str, ...]:
        lengths = {"name": "fixed_lengths", "prompt_tokens": n_prompt, "new_tokens": 6, "limit": 1} | more
        return told_of(lengths, shape)

    assert told("phi-tiny-moe", 4090) == told("phi-3.5-moe", 4091) == ()
    warning = (
        "device model:m2-ultra: workload {} asks more than the 4,096 tokens that phi-tiny-moe holds by its"
        " config.json; such a model would refuse what is priced here"
    )
    of_lengths = (warning.format("fixed_lengths"),)
    assert told("phi-tiny-moe", 4091) == told("phi-tiny-moe", 4091, too_long="skip") == of_lengths
    # What the model that runs does not hold itself is told of that model alone.
    with pytest.raises(PlanError, match="longer than 8192 tokens"):
        told("phi-tiny-moe", 9000, too_long="skip")
    # The last token of a text is asked about and never read.
    assert told_of({"name": "fidelity", "length": 4097, "limit": 1}) == ()
    assert told_of({"name": "fidelity", "length": 4098, "limit": 1}) == (warning.format("fidelity"),)


def test_a_tier_larger_than_a_chunk_is_told() -> None:
    """16 experts, top 2, chunks of 512: 64 rows a multiple, so that 8 of them are a chunk."""

    def told(multiples: list[float]) -> tuple[str, ...]:
        arm = {"name": "arm", "technique": {"name": "npumoe-t", "multiples": multiples}}
        return checked(engine=[arm], device=[HOST]).warnings

    assert told([8, 1]) == ()
    (line,) = told([1e9, 1])
    assert "multiples begin with 1e+09, and so many times the 64 rows of BK/E are more than a chunk of 512" in line
    assert line.endswith("8 is as much")
