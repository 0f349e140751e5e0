"""Experts that no file holds as they compute (stacked, packed, in FP8 blocks), most with biases, loaded as a plan asks:
bit for bit what all of them in memory give, and every byte of them counted.

Legend: H hidden, I expert width.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.errors import EngineError
from engines.expert_memory import ExpertMemory, expert_layers
from engines.model.checkpoints import load_checkpoint
from engines.model.made_experts import tensors_of
from engines.model.quantised import PLAIN_DTYPES, Form, Quantisation
from engines.model.slots import slot_bytes
from engines.model.tensor_files import is_mapped
from engines.oracle import OracleParameters
from engines.reference import ReferenceEngine
from engines.techniques.parameters import CustomParameters
from tests.cases import marked
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import copy_tokenizer
from tests.test_compositions import MOVES, ROUTES
from tests.test_copies import engine as copying
from tests.test_expert_slots import all_logits, arm, counted, engine, request
from tests.test_preflight import checked, problems

pytestmark = pytest.mark.numbers

H, I, N_LAYERS = 64, 128, 3  # noqa: E741
"""Of the made GPT-OSS checkpoints, which have 8 experts in each layer, top 3."""
BIASES = 4 * (I + I + H)
"""Bytes, in fp32."""
ARMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("lru", {"slots": 1}),
    ("lru", {"slots": 4}),
    ("lfu", {"slots": 3}),
    ("static", {"slots": 4}),
    ("moe-ondemand", {"slots": 4}),
)
FORMS: tuple[Form, ...] = ("fp32", "bf16", "int8", "mxfp4")
FAMILIES = ("gpt-oss", "gpt-oss-mxfp4", "llama4")


def expert_bytes(form: Form) -> int:
    """Of a GPT-OSS expert: two matrices [I, H] and one [H, I], their scales, and its biases."""
    bits, group, scale = {"fp32": (32, 0, 0), "bf16": (16, 0, 0), "int8": (8, 0, 4), "mxfp4": (4, 32, 1)}[form]
    return BIASES + sum(
        rows * columns * bits // 8 + rows * (columns // group if group else 1) * scale
        for rows, columns in ((I, H), (I, H), (H, I))
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """As published in bf16 (stacked), in MXFP4 blocks, and Llama 4, whose experts are stacked and have no biases."""
    found = {}
    for family in FAMILIES:
        found[family] = folder = tmp_path_factory.mktemp(family)
        write_family(folder, replace(CASES[family], changes=CASES[family].changes | {"intermediate_size": I}))
        copy_tokenizer(folder)
    return found


def asked_as(form: Form) -> tuple[torch.dtype, Quantisation]:
    """The model's dtype and what the plan narrows, of experts in a form."""
    plain = PLAIN_DTYPES.get(form)
    return (torch.float32, Quantisation(experts=form)) if plain is None else (plain, Quantisation())


@pytest.mark.parametrize("family", marked(FAMILIES, pytest.mark.slow, but=["gpt-oss-mxfp4", "llama4"]))
@pytest.mark.parametrize("form", FORMS)
def test_caches_answer_bit_for_bit_as_all_experts_in_memory(family: str, form: Form, folders: dict[str, Path]) -> None:
    """Prefill and decode, with misses in the middle of steps. What moved is the experts that were missed, whole."""
    dtype, quantise = asked_as(form)
    expected = all_logits(engine(folders[family], "dropless", dtype, quantise=quantise))
    for name, parameters in ARMS:
        memory = ExpertMemory(None, form)
        made = engine(
            folders[family], name, dtype, quantise=quantise, parameters=dict(parameters), expert_memory=memory
        )
        made.take_counters()
        assert torch.equal(all_logits(made), expected), (name, parameters)
        found = made.take_counters()
        assert found.misses
        assert found.hits or parameters["slots"] == 1
        if family != "llama4":
            assert found.bytes_moved == found.bytes_copied == found.misses * expert_bytes(form), (name, parameters)


@pytest.mark.parametrize("name", ["on-demand", "prefetch-hint"])
@pytest.mark.parametrize("family", marked(FAMILIES[:2], pytest.mark.slow, but=["gpt-oss-mxfp4"]))
@pytest.mark.parametrize("form", FORMS)
def test_two_buffers_answer_bit_for_bit_as_all_experts_in_memory(
    name: str, family: str, form: Form, folders: dict[str, Path]
) -> None:
    """Buffers for the 3 experts of a token each, so that a prefill is computed in parts."""
    dtype, quantise = asked_as(form)
    asked = {"form": quantise.experts} if quantise.experts is not None else {}
    expected = all_logits(copying(folders[family], "dropless", None, dtype, **asked))
    room = 2 * 3 * slot_bytes(H, I, form, biased=True)
    made = copying(folders[family], name, room, dtype, **asked)
    made.take_counters()
    assert torch.equal(all_logits(made), expected)
    found = made.take_counters()
    assert found.misses
    assert found.bytes_copied == (found.misses + (found.prefetched or 0)) * expert_bytes(form)


TOLD = ("two buffers", "lru, prefetch", "static, prefetch")
"""Moves that fetch what is told beforehand."""


@pytest.mark.parametrize(
    ("route", "move"),
    [*(("router", move) for move in ("nothing", "on demand", "lru")), *(("hints", move) for move in TOLD)],
)
@pytest.mark.parametrize("form", ["fp32", "mxfp4"])
def test_moves_of_experts_with_biases_give_what_the_oracle_gives(
    route: str, move: str, form: Form, folders: dict[str, Path]
) -> None:
    """Two buffers with and without real copies."""
    quantise = Quantisation(experts=None if form == "fp32" else form)
    filled = (None, 8 * slot_bytes(H, I, form, biased=True)) if "cache" not in str(MOVES[move]) else (None,)
    whole = load_checkpoint(str(folders["gpt-oss-mxfp4"]), torch.float32, quantise)
    expected = all_logits(ReferenceEngine(whole, OracleParameters(), 32))
    for n_bytes in filled:
        technique = CustomParameters.model_validate(ROUTES[route] | MOVES[move])
        memory = ExpertMemory(n_bytes, form)
        checkpoint = load_checkpoint(
            str(folders["gpt-oss-mxfp4"]), torch.float32, quantise, experts_as_filed=memory.loads(technique)
        )
        made = ReferenceEngine(checkpoint, technique, 32, expert_memory=memory)
        if made.needs_calibration:
            made.calibrate([list(range(10, 74))])
        found = all_logits(made)
        assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_fp8_blocks_go_through_slots_as_they_are_widened(tmp_path: Path) -> None:
    """DeepSeek-V3's own storage: e4m3 with a scale for each block of 128 x 128, here one for a matrix."""
    write_family(tmp_path, CASES["deepseek-v3"])
    copy_tokenizer(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    for name in [name for name in stored if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))]:
        stored[name + "_scale_inv"] = torch.full([-(-n // 128) for n in stored[name].shape], 0.25)
        stored[name] = (4 * stored[name]).to(torch.float8_e4m3fn)
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = engine(tmp_path, "lru", parameters={"slots": 3})
    made.take_counters()
    assert torch.equal(all_logits(made), all_logits(engine(tmp_path, "dropless")))
    assert made.take_counters().misses


def test_biases_are_of_the_budget(folders: dict[str, Path]) -> None:
    """Every slot has room for them, and what all slots take is within what the plan gives."""
    for form in FORMS:
        one = slot_bytes(H, I, form, biased=True)
        assert one == expert_bytes(form)  # whose parts are all multiples of 64 bytes here
        assert one - slot_bytes(H, I, form) == BIASES
        dtype, quantise = asked_as(form)
        for given, n_slots in ((N_LAYERS * 2 * one, N_LAYERS * 2), (N_LAYERS * 3 * one - 1, N_LAYERS * 2)):
            memory = ExpertMemory(given, form)
            made = engine(folders["gpt-oss"], "lru", dtype, quantise=quantise, expert_memory=memory)
            assert made._shown.slots is not None
            assert made._shown.slots.n_bytes == n_slots * one <= given


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_are_made_lie_in_a_file_with_their_biases(form: Form, folders: dict[str, Path]) -> None:
    dtype, quantise = asked_as(form)
    weights = load_checkpoint(str(folders["gpt-oss-mxfp4"]), dtype, quantise, experts_as_filed=True).weights
    whole = load_checkpoint(str(folders["gpt-oss-mxfp4"]), dtype, quantise).weights
    for layer, like in zip(expert_layers(weights), expert_layers(whole), strict=True):
        assert layer is not None
        assert like is not None
        for expert, expected in zip(layer.experts, like.experts, strict=True):
            assert expert.n_bytes == expert_bytes(form)
            parts = list(zip(tensors_of(expert), tensors_of(expected), strict=True))
            assert len(parts) == (9 if form in ("int8", "mxfp4") else 6)
            assert all(is_mapped(one) and torch.equal(one, other) for one, other in parts)


def test_a_step_after_a_reset_counts_every_byte_anew(folders: dict[str, Path]) -> None:
    """Slots for all experts: a request asked again moves nothing, and after a reset what it moved at first."""
    made = engine(folders["gpt-oss"], "lru", parameters={"slots": 8})
    first, again = counted(made, request(20, 4)), counted(made, request(20, 4))
    assert first.misses
    assert first.bytes_moved == first.misses * expert_bytes("fp32")
    assert (again.misses, again.bytes_moved) == (0, 0)
    made.reset()
    assert counted(made, request(20, 4)).bytes_moved == first.bytes_moved


def test_slots_are_filled_from_files_alone(folders: dict[str, Path]) -> None:
    checkpoint = load_checkpoint(str(folders["gpt-oss"]), torch.float32)
    technique = CustomParameters.model_validate({"move": MOVES["lru"]["move"]})
    with pytest.raises(EngineError, match="experts lie in memory; load them experts_as_filed"):
        ReferenceEngine(checkpoint, technique, 32)


# --- in a plan -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt-oss", "gpt-oss-mxfp4", "llama4"])
@pytest.mark.parametrize("quantise", [{}, {"experts": "int8"}])
def test_a_plan_takes_them(family: str, quantise: dict[str, str], folders: dict[str, Path]) -> None:
    arms = [arm("lru", expert_memory="2MB"), arm("moe-ondemand", parameters={"slots": 2})]
    arms += [arm("on-demand", expert_memory="2MB"), arm("prefetch-hint", expert_memory="2MB")]
    cells = checked(
        engine=[one | {"quantise": quantise} for one in arms],
        model={"source": str(folders[family]), "dtype": "bfloat16"},
    ).cells
    assert [cell.engine.technique.technique for cell in cells] == [one["name"] for one in arms]


def test_a_budget_that_holds_the_matrices_and_not_the_biases_is_one_line(folders: dict[str, Path]) -> None:
    """A cache of 1 in each layer."""
    given = N_LAYERS * (expert_bytes("int8") - BIASES)
    quantised = arm("lru", expert_memory=f"{given}B", quantise={"experts": "int8"})
    (found,) = problems(engine=[quantised], model={"source": str(folders["gpt-oss"])})
    assert re.search(r"in slots of int8: the memory for experts holds 2, and a cache of 1 in each of 3 layers", found)
    assert checked(
        engine=[quantised | {"expert_memory": f"{given + N_LAYERS * BIASES}B"}],
        model={"source": str(folders["gpt-oss"])},
    ).cells


def test_a_disk_without_room_for_made_experts_is_told_with_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 layers of 16 experts in int8, 60 have room: 4 of 75,520 bytes lack it."""
    one = 2 * (128 * 192 + 128 * 4) + 192 * 128 + 192 * 4
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 60 * one))  # type: ignore[attr-defined]
    with pytest.raises(
        EngineError, match=r"they need 4\.83 MB there, and 4\.53 MB are free; give it room, or set TMPDIR"
    ):
        load_checkpoint("bundled:tiny-qwen3-moe", torch.float32, Quantisation(experts="int8"), experts_as_filed=True)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10**9, 10**9, 64 * one))  # type: ignore[attr-defined]
    load_checkpoint("bundled:tiny-qwen3-moe", torch.float32, Quantisation(experts="int8"), experts_as_filed=True)
