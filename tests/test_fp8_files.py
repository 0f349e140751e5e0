"""Checkpoints in FP8 with a scale for each block, beside transformers with the weights that these stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.errors import EngineError
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import KeyValueCache, Transformer
from engines.techniques.presets import dropless
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import copy_tokenizer

pytestmark = pytest.mark.numbers

ROWS, COLUMNS = 16, 40
"""Of a block. 40 divides no width of these models: the last block of a row is cut."""
PROJECTIONS = ("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "kv_a_proj_with_mqa.weight")
WIDE = ("layers.1.self_attn.o_proj.weight", "experts.2.down_proj.weight", "experts.2.w2.weight")
"""What files may leave out of FP8 (`modules_to_not_convert`), and then hold without scales."""
TOKENS = torch.randint(0, 2048, (40,), generator=torch.Generator().manual_seed(5))


def narrowed(weight: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, scales of blocks that differ up to 16 times, and the matrix that both stand for, block by block."""
    n_rows, n_columns = weight.shape
    scales = 2.0 ** (torch.rand(-(-n_rows // ROWS), -(-n_columns // COLUMNS), generator=generator) * 4 - 6)
    values, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i, row in enumerate(scales):
        for j, scale in enumerate(row):
            block = slice(i * ROWS, (i + 1) * ROWS), slice(j * COLUMNS, (j + 1) * COLUMNS)
            values[block] = (weight[block] / scale).to(torch.float8_e4m3fn)
            meant[block] = values[block].float() * scale
    return values, scales, meant


@pytest.mark.parametrize(
    ("name", "wide"),
    [(name, ()) for name in ("qwen3", "olmoe", "mixtral", "qwen2-moe", "deepseek-v3", "glm4-moe")]
    + [(name, WIDE) for name in ("qwen3", "mixtral", "deepseek-v3")],
)
def test_blocks_of_fp8_give_the_logits_of_what_they_stand_for(name: str, wide: tuple[str, ...], tmp_path: Path) -> None:
    theirs = write_family(tmp_path, CASES[name])
    copy_tokenizer(tmp_path)
    generator = torch.Generator().manual_seed(11)
    stored, meant = load_file(tmp_path / "model.safetensors"), {}
    for key in [key for key in stored if key.endswith(PROJECTIONS)]:
        if wide and key.endswith(wide):
            stored[key] = stored[key].bfloat16()
            meant[key] = stored[key].float()
            continue
        stored[key], stored[key + "_scale_inv"], meant[key] = narrowed(stored[key], generator)
    assert len(meant) > 20
    assert bool(wide) == any(stored[key].dtype is torch.bfloat16 for key in meant)
    # transformers reads the meant weights from files, by whatever names its modules have.
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(
        {key: meant.get(key, stored[key]) for key in stored if not key.endswith("_scale_inv")},
        plain / "model.safetensors",
    )
    config = json.loads((tmp_path / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    own = type(theirs).from_pretrained(plain, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected, before = own(TOKENS[None]).logits[0], theirs(TOKENS[None]).logits[0]
    save_file(stored, tmp_path / "model.safetensors")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [ROWS, COLUMNS], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    model = Transformer(load_checkpoint(str(tmp_path), torch.float32))
    cache = KeyValueCache(model.config)
    cache.start(len(TOKENS))
    with torch.inference_mode():
        found = model.logits(model.forward(TOKENS, cache, dropless(), "prefill")[0])
    assert (found - expected).abs().max() < 1e-4
    assert (expected - before).abs().max() > 1e-2, "weights that were not rounded would show nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_values_and_scales_that_are_not_both_there_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """Scales beside what was widened already would be multiplied twice; without them FP8 says nothing."""
    write_family(tmp_path, CASES["qwen3"])
    copy_tokenizer(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = next(key for key in stored if key.endswith("q_proj.weight"))
    stored[name] = stored[name].to(dtype)
    if dtype is torch.bfloat16:
        stored[name + "_scale_inv"] = torch.ones([-(-n // 128) for n in stored[name].shape])
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    where = "left over" if dtype is torch.bfloat16 else "missing"
    with pytest.raises(EngineError, match=rf"tensor '{name}_scale_inv' {where} \(1 in all\)"):
        load_checkpoint(str(tmp_path), torch.float32)
