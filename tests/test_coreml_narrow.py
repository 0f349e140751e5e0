"""The bundled model as int8 and int4 packages, against torch with the same weights rounded the same way.

What a package holds is q * s: q whole numbers of 8 or 4 bits, s an fp16 scale of a row (int8) or of 32 columns of it
(int4), (largest / 127) or (largest / 7) of what it covers. Here that is computed again, in torch, and put into the
checkpoint that torch computes. In fp32 the two readers then differ by the order of sums alone. In fp16 the interpreter
rounds the products q * s too, as a Mac does: 4 of the 16 roundings of a block's longest chain (the other 12:
`tests.test_coreml_model`), of 8 blocks.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engines.coreml.manifest import Weights
from engines.model.checkpoints import Checkpoint
from engines.model.weights import SparseWeights
from engines.techniques.presets import preset_parameters
from tests.coreml import Converted, converted, engine_of, generation, model_of, prompt, recorded
from tests.test_coreml_half import same_as_torch_in_fp16, same_as_torch_in_fp32_or_undecided
from tests.test_coreml_model import GREEDY_PROMPT, U

pytest.importorskip("coremltools", reason="reads and writes packages (pip install joulebench[coreml])")
pytestmark = pytest.mark.numbers

ROUNDINGS = 8 * 16


class Narrow(NamedTuple):
    """packages: with the narrow weights. rounded: what torch computes with."""

    packages: Converted
    rounded: Converted


def stepped(matrix: Tensor, most: int, block: int) -> Tensor:
    """w as the nearest whole number of steps, at most `most`, of its block's scale."""
    wide = matrix.float().unflatten(1, (-1, block))
    scale = (wide.abs().amax(dim=2, keepdim=True) / most).half().float()
    return ((wide / scale).round().clamp(-most, most) * scale).flatten(1)


def with_steps(record: Any, most: int, block: int | None) -> Any:
    """Matrices of a record rounded; everything else as it is."""
    changed = {
        field.name: stepped(value, most, block or value.shape[1])
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), Tensor) and value.dim() == 2
    }
    return replace(record, **changed)


def rounded(checkpoint: Checkpoint, most: int, block: int | None) -> Checkpoint:
    layers = []
    for layer in checkpoint.weights.layers:
        mlp = layer.mlp
        assert isinstance(mlp, SparseWeights)
        experts = replace(mlp.experts, experts=[with_steps(one, most, block) for one in mlp.experts.experts])
        layers.append(
            replace(layer, attention=with_steps(layer.attention, most, block), mlp=replace(mlp, experts=experts))
        )
    return replace(checkpoint, weights=replace(checkpoint.weights, layers=tuple(layers)))


@pytest.fixture(scope="module", params=[("int8", 127, None), ("int4", 7, 32)], ids=["int8", "int4"])
def narrow(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Narrow:
    weights: Weights
    weights, most, block = request.param
    found = converted("npumoe-tg", tmp_path_factory.mktemp(weights) / "packages", weights)
    return Narrow(found, found._replace(checkpoint=rounded(found.checkpoint, most, block)))


def test_the_weights_are_others_than_fp16s(narrow: Narrow) -> None:
    """Or the tests below would pass with packages of fp16 weights."""
    technique, tokens = preset_parameters("npumoe-tg")(), prompt(narrow.packages.checkpoint, 130)
    wide, own = (recorded(engine_of(one, technique), tokens).logits_TL for one in narrow)
    assert float((own - wide).norm() / wide.norm()) > 2e-3


def test_fp32_equals_torch_to_rounding(narrow: Narrow) -> None:
    technique, tokens = preset_parameters("npumoe-tg")(), prompt(narrow.packages.checkpoint, 130)
    ours = recorded(engine_of(narrow.rounded, technique), tokens)
    theirs = recorded(engine_of(narrow.packages, technique, model_of(narrow.packages, "float32")), tokens)
    torch.testing.assert_close(theirs.logits_TL, ours.logits_TL, rtol=1e-4, atol=3e-4)
    assert [p.counters() for p in theirs.plans] == [p.counters() for p in ours.plans]
    assert sum(p.dropped_pairs for p in ours.plans) > 0


def test_fp16_equals_torch_within_fp16(narrow: Narrow) -> None:
    technique, tokens = preset_parameters("npumoe-tg")(), prompt(narrow.packages.checkpoint, 130)
    ours = recorded(engine_of(narrow.rounded, technique), tokens)
    model = model_of(narrow.packages, "float16", "stateful")
    theirs = recorded(engine_of(narrow.packages, technique, model), tokens, ours.plans)
    error_T = (theirs.logits_TL - ours.logits_TL).norm(dim=1) / ours.logits_TL.norm(dim=1)
    assert 0 < float(error_T.square().mean().sqrt()) < ROUNDINGS**0.5 * U
    assert float(error_T.max()) < ROUNDINGS * U


def test_64_greedy_tokens_and_all_counts_are_equal_in_fp32(narrow: Narrow) -> None:
    technique = preset_parameters("npumoe-tg")()
    request = generation(prompt(narrow.packages.checkpoint, GREEDY_PROMPT), 64)
    ours = engine_of(narrow.rounded, technique)
    theirs = engine_of(narrow.packages, technique, model_of(narrow.packages, "float32"))
    answers = [engine.run(request, lambda *_: None).token_ids for engine in (ours, theirs)]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 64
    assert ours.take_counters() == theirs.take_counters()


@pytest.mark.parametrize(
    "asked", [80, pytest.param(110, marks=pytest.mark.slow), pytest.param("drawn 1", marks=pytest.mark.slow)]
)
def test_64_greedy_tokens_in_fp16(narrow: Narrow, asked: int | str) -> None:
    """By the rules of fp16's own packages."""
    same_as_torch_in_fp16(narrow.packages, narrow.rounded, "npumoe-tg", asked)
    same_as_torch_in_fp32_or_undecided(narrow.packages, narrow.rounded, "npumoe-tg", asked)


def test_a_package_holds_a_byte_or_half_a_byte_a_weight(narrow: Narrow) -> None:
    folder, manifest = narrow.packages.folder, narrow.packages.manifest
    for package in manifest.packages:
        held = sum(path.stat().st_size for path in Path(folder / package.path).rglob("weight.bin"))
        assert package.weight_bytes <= held <= 1.2 * package.weight_bytes + 4096
