"""Experts loaded into slots: bit for bit what all of them in memory give, in the memory that the plan allows."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from devices.memory import MemoryHere
from engines.base import unheard
from engines.errors import EngineError
from engines.expert_memory import ExpertMemory
from engines.kernels import native, tables
from engines.model import experts as expert_module
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import AS_THE_MODEL, Arithmetic, Form, Quantisation
from engines.model.slots import slot_bytes
from engines.model.tensor_files import is_mapped
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from harness import memory_checks
from harness.plan import PlanError
from results.counters import EngineCounters
from results.records import Request
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import BUNDLED, copy_tokenizer
from tests.kernel_forms import needs_bf16
from tests.plans import DROPLESS
from tests.test_preflight import checked, problems

pytestmark = pytest.mark.numbers

EXPERT = 3 * 192 * 128
"""Values of an expert of the bundled model, which has 16 in each of 4 layers, top 2."""
ARMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lru", {"slots": 4}),
    ("lru", {"slots": 1}),
    ("lfu", {"slots": 2}),
    ("static", {"slots": 3}),
    ("moe-ondemand", {"slots": 3}),
)


def request(n_prompt: int, n_new: int) -> Request:
    prompt = tuple(5 + 7 * i % 1900 for i in range(n_prompt))
    return Request(request_id="a", sample_id="a", kind="generate", prompt_ids=prompt, max_new_tokens=n_new)


def engine(source: str | Path, name: str, dtype: torch.dtype = torch.float32, **others: Any) -> ReferenceEngine:
    technique = preset_parameters(name)(**others.pop("parameters", {}))
    quantise = others.pop("quantise", AS_THE_MODEL)
    checkpoint = load_checkpoint(str(source), dtype, quantise, experts_as_filed=technique.loads_from_file)
    made = ReferenceEngine(checkpoint, technique, 32, **others)
    if made.needs_calibration:
        made.calibrate([list(range(10, 74))])
    return made


def all_logits(made: ReferenceEngine) -> torch.Tensor:
    """Every step's logits of an answer: a prompt of 70 in chunks of 32, 12 tokens decoded."""
    seen: list[torch.Tensor] = []
    capped = made._model._capped
    made._model._capped = lambda logits_TL: seen.append(capped(logits_TL)) or seen[-1]  # type: ignore[func-returns-value,method-assign]
    made.run(request(70, 12), unheard)
    return torch.cat(seen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "parameters"), ARMS)
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_answers_are_those_of_all_experts_in_memory_bit_for_bit(
    name: str, parameters: dict[str, Any], dtype: torch.dtype, threads: int
) -> None:
    """Prefill and decode, also where a step's experts go through fewer slots one after another."""
    expected = all_logits(engine(BUNDLED, "dropless", dtype, threads=threads))
    memory = ExpertMemory(None, "fp32" if dtype == torch.float32 else "bf16")
    loaded = engine(BUNDLED, name, dtype, threads=threads, parameters=parameters, expert_memory=memory)
    assert torch.equal(all_logits(loaded), expected)


NARROW = [
    *((form, "fp32") for form in ("int8", "int4-g32", "fp8", "mxfp4")),
    *((form, "int8") for form in ("int8", "int4-g32")),
    pytest.param("bf16", "bf16", marks=needs_bf16),
]


@needs_bf16
def test_attention_in_bf16_beside_products_in_int8_is_told_of_the_road() -> None:
    quantise = Quantisation(experts="int8", attention="int8", arithmetic="int8", attention_arithmetic="bf16")
    rounding, plain = (
        engine(BUNDLED, "dropless", quantise=asked).take_road()
        for asked in (quantise, quantise.model_copy(update={"attention_arithmetic": None}))
    )
    assert (plain.rounded_to, plain.attention_rounded_to) == ("int8", None)
    assert (rounding.rounded_to, rounding.attention_rounded_to) == ("int8", "bf16")


@pytest.mark.parametrize(("form", "arithmetic"), NARROW)
@pytest.mark.parametrize("name", ["lru", "static"])
def test_narrow_experts_go_through_slots_as_they_lie_in_memory(form: Form, arithmetic: Arithmetic, name: str) -> None:
    """Bit for bit, in their arithmetic, and the bytes that move are the narrow ones."""
    quantise = Quantisation(experts=form, arithmetic=arithmetic)
    expected = all_logits(engine(BUNDLED, "dropless", quantise=quantise))
    memory = ExpertMemory(None, form)
    loaded = engine(BUNDLED, name, quantise=quantise, parameters={"slots": 3}, expert_memory=memory)
    loaded.take_counters()
    assert torch.equal(all_logits(loaded), expected)
    assert loaded.take_road().rounds_inputs is (arithmetic != "fp32")
    if arithmetic != "fp32":
        plain = engine(BUNDLED, "dropless", quantise=Quantisation(experts=form))
        assert not torch.equal(all_logits(plain), expected), "inputs were not rounded"
    found = loaded.take_counters()
    assert found.misses
    assert found.bytes_moved == found.misses * narrow_bytes(form)


def test_the_bytes_of_a_model_in_slots_are_those_of_the_slots() -> None:
    """Three of sixteen experts in each of four layers, and all that is no expert; the parameters are the model's."""
    whole, loaded = engine(BUNDLED, "dropless"), engine(BUNDLED, "lru", parameters={"slots": 3})
    assert loaded.held_weights().n_parameters == whole.held_weights().n_parameters
    in_file = load_checkpoint(str(BUNDLED), torch.float32)
    others = whole.held_weights().n_bytes - sum(one.n_bytes for n in range(4) for one in experts_of(in_file, n))
    assert loaded.held_weights().n_bytes == others + 4 * 3 * EXPERT * 4


def experts_of(checkpoint: Any, layer: int) -> Any:
    return checkpoint.weights.layers[layer].mlp.experts.experts


def narrow_bytes(form: Form) -> int:
    """Of an expert of the bundled model: two matrices of 128 x 192 and one of 192 x 128."""
    bits, group, scale = {
        "bf16": (16, 0, 0), "int8": (8, 0, 4), "fp8": (8, 0, 4), "int4-g32": (4, 32, 4), "mxfp4": (4, 32, 1)
    }[form]  # fmt: skip
    return sum(
        rows * columns * bits // 8 + rows * (columns // group if group else 1) * scale
        for rows, columns in ((128, 192), (128, 192), (192, 128))
    )


def test_narrow_experts_lie_in_a_file_that_nobody_sees_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    quantise = Quantisation(experts="int8")
    checkpoint = load_checkpoint(str(BUNDLED), torch.float32, quantise, experts_as_filed=True)
    layers: Any = [layer.mlp for layer in checkpoint.weights.layers]
    assert all(is_mapped(one.down_HI.values) for mlp in layers for one in mlp.experts.experts)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(
        EngineError, match=r"experts in another form .* are kept in a file in .*absent, and it cannot be written"
    ):
        load_checkpoint(str(BUNDLED), torch.float32, quantise, experts_as_filed=True)


@pytest.mark.parametrize("family", ["qwen2-moe", "olmoe", "phi-moe", "deepseek-v3"])
@pytest.mark.parametrize("slots", [1, 3])
def test_other_routers_and_torch_alone_give_the_same(
    family: str, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tmp_path, CASES[family])
    copy_tokenizer(tmp_path)
    own = {"parameters": {"slots": slots}}
    assert torch.equal(all_logits(engine(tmp_path, "lru", **own)), all_logits(engine(tmp_path, "dropless")))
    monkeypatch.setattr(expert_module.tables, "serves", lambda *tensors: False)
    monkeypatch.setattr(tables, "expert_table", lambda experts: None)
    # torch's products round by where a matrix begins in memory.
    found, expected = (all_logits(engine(tmp_path, name, **more)) for name, more in (("lru", own), ("dropless", {})))
    assert float((found - expected).norm() / expected.norm()) < 1e-6


def test_parts_of_a_mix_are_the_whole_bit_for_bit() -> None:
    """However calls are cut: with few rows, with many, and with both, whose kernels differ."""
    generator = torch.Generator().manual_seed(1)
    cases = (192, 128, [1, 1, 1]), (96, 200, [4, 2, 1]), (128, 96, [9, 1, 3]), (128, 96, [3, 40, 2])
    for hidden, width, rows in cases:

        def matrix(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

        table = tables.expert_table([(matrix(width, hidden), matrix(width, hidden), matrix(hidden, width))] * 3)
        if table is None:
            pytest.skip("no kernels here")
        tokens = torch.randint(0, 5, (sum(rows),), generator=generator)
        weights, x = torch.rand(sum(rows), generator=generator), matrix(5, hidden)
        given = (x, table, [0, 1, 2], rows, tokens, weights)
        first = native.mix(*given, made=(0, 2))
        assert torch.equal(native.mix(*given, made=(2, 3), onto_TH=first), native.mix(*given))


def counted(made: ReferenceEngine, *asked: Request) -> EngineCounters:
    for one in asked:
        made.run(one, unheard)
    return made.take_counters()


def test_counters_are_of_what_was_copied() -> None:
    """Every expert that was called either lay there or was copied, two bytes a value, as the file has it."""
    made = engine(BUNDLED, "lru", parameters={"slots": 4})
    assert made._shown.slots is not None
    taken = made._shown.slots.take_copied
    copies: list[int] = []
    made._shown.slots.take_copied = lambda: copies.append((found := taken()).waited_for) or found  # type: ignore[func-returns-value,method-assign]
    found = counted(made, request(40, 8))
    assert found.hits is not None
    assert found.misses == sum(copies) > 0
    assert found.bytes_moved == found.misses * EXPERT * 2
    assert found.hits + found.misses == found.expert_calls
    assert found.prefetched is None


def test_what_lies_in_slots_stays_for_the_next_request_and_goes_with_a_reset() -> None:
    """A token a request, asked again: with slots for all that it calls nothing is copied a second time."""
    made = engine(BUNDLED, "lru", parameters={"slots": 16})
    first, again = counted(made, request(20, 4)), counted(made, request(20, 4))
    assert (first.misses, again.misses) == (first.bytes_moved // (EXPERT * 2), 0)
    made.reset()
    assert counted(made, request(20, 4)).misses == first.misses


def test_a_batch_is_served_from_the_same_slots() -> None:
    loaded, whole = engine(BUNDLED, "lfu", parameters={"slots": 3}), engine(BUNDLED, "dropless")
    asked = [request(n, 6) for n in (9, 20, 33)]
    texts = [[answer.text for answer in made.run_batch(asked, unheard)] for made in (loaded, whole)]
    assert texts[0] == texts[1]


def test_experts_in_their_file_stay_views_of_it() -> None:
    """In whatever type the others are held."""
    checkpoint = load_checkpoint(str(BUNDLED), torch.float32, experts_as_filed=True)
    mlp: Any = checkpoint.weights.layers[0].mlp
    assert is_mapped(mlp.experts.experts[3].down_HI)
    assert mlp.experts.experts[3].down_HI.dtype == torch.bfloat16
    whole: Any = load_checkpoint(str(BUNDLED), torch.float32).weights.layers[0].mlp
    assert not is_mapped(whole.experts.experts[3].down_HI)


# --- in a plan -------------------------------------------------------------------------------------------------------


def arm(name: str, **others: Any) -> dict[str, Any]:
    technique = {"name": name} | others.pop("parameters", {})
    return {"name": name, "technique": technique} | others


def test_a_memory_is_read_with_its_unit() -> None:
    (cell,) = checked(engine=[arm("lru", expert_memory="6MB")]).cells
    assert cell.engine.expert_memory == 6_000_000


@pytest.mark.parametrize("given", ["banana", "-1GB", "0"])
def test_a_budget_that_is_none_is_not_said_to_be_missing(given: str) -> None:
    (found,) = problems(engine=[arm("lru", expert_memory=given)])
    assert found.startswith("engine[0].expert_memory: ")


@pytest.mark.parametrize("given", [0, 5, 17])
def test_ranks_that_are_wrong_are_not_said_to_be_missing(given: int) -> None:
    (found,) = problems(engine=[arm("expert-parallel", ranks=given)])
    assert found.startswith("engine[0].ranks: must be ")


@pytest.mark.parametrize(
    ("h", "must_be"),
    [
        (-1, "a whole number of at least 0"),
        (65537, "a whole number less than or equal to 65536"),
        ("foo", "a whole number"),
    ],
)
def test_a_number_or_a_word_that_is_neither_is_one_line(h: object, must_be: str) -> None:
    (found,) = problems(engine=[arm("monde", parameters={"h": h})])
    end = f"found {h!r}"
    assert found == f'engine[0].technique.h: must be {must_be} or "least","factor", {end}'


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (
            arm("lru", expert_memory="250kB"),
            "holds 0, and a cache of 1 in each of 4 layers needs 4; write expert_memory = 1179648 ",
        ),
        (
            arm("lru"),
            "the cache has no expert_memory; write expert_memory = 1179648 (1.18 MB) or more, or give it slots",
        ),
        (
            arm("lru", expert_memory="2MB", parameters={"slots": 2}),
            "slots = 2 and expert_memory both say how many experts lru holds; give one",
        ),
        (arm("dropless", expert_memory="2GB"), "and dropless loads none; use lru, lfu, static"),
        (
            arm("lru", expert_memory="250kB", quantise={"experts": "int8"}),
            "in slots of int8: the memory for experts holds 3,",
        ),
    ],
)
def test_a_budget_that_serves_nothing_is_one_line(engine: dict[str, Any], words: str) -> None:
    assert slot_bytes(192, 128, "fp32") == 4 * EXPERT
    (found,) = problems(engine=[engine])
    assert words in found


ALL = 4 * 16 * slot_bytes(192, 128, "fp32")


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("lru", "each is copied once, and none is missed again; is less meant for lru?"),
        ("on-demand", "but only those of two layers are kept, and each is copied anew; is less meant for on-demand?"),
    ],
)
def test_a_budget_that_holds_all_experts_is_told(name: str, does: str) -> None:
    (found,) = checked(engine=[arm(name, expert_memory=ALL)]).warnings
    assert (
        f"expert_memory {ALL} bytes would hold all 64 experts, which take {ALL} (18.9 MB) in slots of fp32: {does}"
        in found
    )
    assert not checked(engine=[arm(name, expert_memory=ALL - 1)]).warnings


@pytest.mark.parametrize(
    ("engine", "n_experts", "sizes"),
    [
        (arm("lru", expert_memory="6MB"), 20, ("5.89824 MB", "5.898239 MB")),
        (arm("lru", parameters={"slots": 5}), 20, ("5.89824 MB", "5.898239 MB")),
        (arm("on-demand", expert_memory="6MB"), 20, ("5.89824 MB", "5.898239 MB")),
        # Two buffers hold two layers and no more.
        (arm("on-demand", expert_memory=ALL), 32, ("9.437184 MB", "9.437183 MB")),
    ],
)
def test_what_this_machine_cannot_hold_is_refused(
    engine: dict[str, Any], n_experts: int, sizes: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte is missing, and the two sizes show it."""
    taken = n_experts * slot_bytes(192, 128, "fp32")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=taken))
    assert checked(engine=[engine]).cells
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=taken - 1))
    (found,) = problems(engine=[engine])
    assert f" {n_experts} experts take {sizes[0]}, and this machine has {sizes[1]} of memory; give fewer" in found


def warnings_of(engines: list[dict[str, Any]], total: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    return tuple(checked(engine=engines).warnings)


def test_arms_that_only_together_take_more_than_this_machine_has_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 slots in each of 4 layers, and buffers for 10 experts each."""
    arms = [arm("lru", parameters={"slots": 5}), arm("on-demand", expert_memory="6MB")]
    taken = 40 * slot_bytes(192, 128, "fp32")
    assert not warnings_of(arms, taken, monkeypatch)
    (found,) = warnings_of(arms, taken - 1, monkeypatch)
    assert ": their experts together take 11.79648 MB, and this machine has 11.796479 MB of memory; all arms" in found


def test_a_model_that_is_larger_than_this_machine_is_told_of_arms_that_hold_it_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 5,716,160 values of the bundled model its norms, 4 x (2 x 192 + 2 x 64) + 192, are not counted."""
    n_bytes = 4 * (5_716_160 - 2_240)
    whole, cached = DROPLESS, arm("lru", parameters={"slots": 5})
    assert not warnings_of([whole], n_bytes, monkeypatch)
    (found,) = warnings_of([whole, cached], n_bytes - 1, monkeypatch)
    assert found.startswith("engine dropless: its weights take 22.85568 MB, and this machine has 22.855679 MB of")
    assert not warnings_of([whole | {"quantise": {"experts": "int8"}}], n_bytes - 1, monkeypatch)


def test_a_container_holds_what_its_control_group_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine would hold all of it. 20 slots, 40 slots, and a whole model."""
    one, n_whole = slot_bytes(192, 128, "fp32"), 4 * (5_716_160 - 2_240)
    lru, buffers = arm("lru", parameters={"slots": 5}), arm("on-demand", expert_memory="6MB")

    def told(engines: list[dict[str, Any]], n_bytes: int) -> list[str]:
        here = MemoryHere(n_bytes, Path("/sys/fs/cgroup/memory.max"))
        monkeypatch.setattr(memory_checks, "usable_memory", lambda: here)
        try:
            return list(checked(engine=engines).warnings)
        except PlanError as error:
            return list(error.problems)

    for engines, taken in (([lru], 20 * one), ([lru, buffers], 40 * one), ([DROPLESS], n_whole)):
        assert not told(engines, taken)
        (found,) = told(engines, taken - 1)
        assert ", and /sys/fs/cgroup/memory.max leaves this process " in found
