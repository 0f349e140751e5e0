"""Every family's attention and experts as graphs, by the interpreter in fp32, against the torch reader."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.coreml.conversion import Asked, Conversion
from engines.coreml.interpreter import Interpreter
from engines.coreml.transformer import CoremlTransformer, Variant
from engines.errors import EngineError
from engines.model.architecture import GatedUnit, ModelConfig
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.norms import NormWeights
from engines.model.transformer import Transformer
from engines.model.weights import SparseWeights
from engines.sizes import own_sizes
from engines.techniques.base import Technique
from engines.techniques.context import BuildContext
from engines.techniques.parameters import CustomParameters
from harness.coreml_convert import convert_all
from tests.cases import marked
from tests.fakes.families import CASES, write_family

pytest.importorskip("coremltools", reason="reads and writes packages (pip install joulebench[coreml])")

CHUNK, CONTEXT = 32, 64
VARIANTS: tuple[Variant, Variant] = ("stateless", "stateful")
DENSE = ("qwen3", "phi3", "gemma2")
REFUSED = {
    **{name: "no experts" for name in CASES if name.startswith(DENSE)},
    **{name: "latent attention" for name in CASES if name.startswith("deepseek")},
    "glm4-moe-lite": "latent attention",
    "llama4": "attention temperature by position",
}
"""What no graph computes, by the part that the refusal names."""
USUAL = ("mixtral", "olmoe-clip", "qwen2-moe", "phi-moe-long-rope", "glm4-moe", "gpt-oss-yarn", "llama4-top2")
"""One of each family, with most of its parts."""
ON_NPU = CustomParameters.model_validate(
    {
        "backbone": "npu",
        "place": {"kind": "one_unit", "unit": "npu"},
        "layout": {"kind": "capacity", "rows": CHUNK, "overflow": "order"},
    }
)
"""As many rows as a chunk has tokens, so that nothing is dropped."""


def tokens() -> torch.Tensor:
    return torch.randint(0, 2048, (45,), generator=torch.Generator().manual_seed(5))


@torch.inference_mode()
def logits(model: Transformer, technique: Technique) -> torch.Tensor:
    """A whole chunk, a short one, then three tokens that are decoded."""
    cache = model.new_cache()
    cache.start(45)
    found = []
    for part in tokens().split([32, 10, 1, 1, 1]):
        found.append(model.forward(part, cache, technique, "decode" if len(part) == 1 else "prefill")[0])
    return model.logits(torch.cat(found))


def as_packages_hold(checkpoint: Checkpoint) -> Checkpoint:
    """With the numbers rounded to fp16 that torch keeps in fp32 and graphs have as constants: scales, limits, biases,
    norms of queries and keys, sinks. What is left between the two readers is the order of sums."""
    config, layers = checkpoint.config, []
    assert config.moe is not None
    for layer in checkpoint.weights.layers:
        mlp = layer.mlp
        if isinstance(mlp, SparseWeights):
            experts = replace(
                mlp.experts, experts=[narrowed(one) for one in mlp.experts.experts], unit=config_unit(config)
            )
            mlp = replace(mlp, experts=experts)
        layers.append(replace(layer, attention=narrowed(layer.attention), mlp=mlp))
    attention = replace(config.attention, scale=half(config.attention.scale), clip=half(config.attention.clip))
    narrow = replace(config, attention=attention, moe=replace(config.moe, unit=config_unit(config)))
    return replace(checkpoint, config=narrow, weights=replace(checkpoint.weights, layers=tuple(layers)))


def config_unit(config: ModelConfig) -> GatedUnit:
    assert config.moe is not None
    return replace(config.moe.unit, alpha=half(config.moe.unit.alpha), limit=half(config.moe.unit.limit))


def half(number: Any) -> Any:
    return None if number is None else float(torch.tensor(number).half())


def narrowed(weights: Any) -> Any:
    """Vectors of a record rounded to fp16 and kept in fp32."""
    changed = {}
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, NormWeights):
            changed[field.name] = replace(value, weight=value.weight.half().float())
        elif isinstance(value, torch.Tensor) and value.dim() == 1:
            changed[field.name] = value.half().float()
    return replace(weights, **changed)


@pytest.mark.parametrize("name", marked([name for name in CASES if name not in REFUSED], pytest.mark.slow, but=USUAL))
def test_graphs_equal_torch(name: str, tmp_path: Path) -> None:
    write_family(tmp_path / "model", CASES[name])
    checkpoint = as_packages_hold(load_checkpoint(str(tmp_path / "model"), torch.float16))
    conversion = Conversion("model", Asked(ON_NPU, CHUNK, CONTEXT), None, "0" * 64, checkpoint=checkpoint)
    convert_all(conversion, tmp_path / "packages")
    context = BuildContext(CHUNK, own_sizes(checkpoint.config))
    wanted = logits(Transformer(checkpoint), ON_NPU.build(context))
    assert wanted.std() > 0.1, "logits this flat would agree whatever graphs computed"
    roles = {package.role for package in conversion.packages}
    interpreter = Interpreter(tmp_path / "packages", "float32")
    for variant in VARIANTS:
        model = CoremlTransformer(checkpoint, conversion.manifest, interpreter, variant)
        found = logits(model, ON_NPU.build(context))
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-4)
        used = {path for path, _ in model.ran.used}
        assert {package.role for package in conversion.packages if package.path in used} == roles


@pytest.mark.parametrize("name", REFUSED)
def test_parts_that_no_graph_computes_are_named(name: str, tmp_path: Path) -> None:
    write_family(tmp_path / "model", CASES[name])
    with pytest.raises(EngineError, match=REFUSED[name]):
        Conversion(str(tmp_path / "model"), Asked(ON_NPU, CHUNK, CONTEXT), None, "0" * 64)
