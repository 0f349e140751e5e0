"""Several processes compute what one does, each with its part of the checkpoint, and send what the plans say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from engines.dispatch import Routing
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.model.transformer import Transformer
from engines.parallel.running import Running
from engines.techniques.presets import CustomParameters, dropless, preset_parameters
from tests.fakes.families import CASES, write_family

pytestmark = pytest.mark.numbers

BUNDLED = "bundled:tiny-qwen3-moe"
CHUNKS = [37, 2, 50] + [1] * 11
"""Prefill in steps of which one has fewer tokens than some ranks, then decoding."""
TOLERANCE = 1e-5


def technique(name: str, **parameters: object) -> Any:
    kind = CustomParameters if name == "custom" else preset_parameters(name)
    return kind.model_validate(parameters)


def logits(
    model: Transformer, technique: Any, on_routing: Callable[[int, Routing], None] | None = None
) -> torch.Tensor:
    tokens = torch.randint(0, 2048, (sum(CHUNKS),), generator=torch.Generator().manual_seed(3))
    cache = model.new_cache()
    with torch.inference_mode():
        cache.start(len(tokens))
        return model.logits(
            torch.cat(
                [
                    model.forward(
                        chunk, cache, technique, "decode" if len(chunk) == 1 else "prefill", None, on_routing
                    )[0]
                    for chunk in tokens.split(CHUNKS)
                ]
            )
        )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


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
def test_several_processes_equal_one(case: Case, tmp_path: Path) -> None:
    write_family(tmp_path, CASES[case.family])
    expected = logits(Transformer(load_checkpoint(str(tmp_path), torch.float32)), dropless())
    running = Running(inspect_checkpoint(str(tmp_path)), case.technique, case.n_ranks, threads=1)
    try:
        assert relative_error(logits(running.model, running.technique), expected) < TOLERANCE
    finally:
        running.close()
