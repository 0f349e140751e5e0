"""Ranks whose model computes as on an accelerator, its experts in stacks: in threads, for there is no GPU for each."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engines.model.accelerator import Backend
from engines.model.checkpoints import load_checkpoint
from engines.model.transformer import Transformer
from engines.parallel.links import Links
from engines.parallel.transformer import RankTransformer
from engines.sizes import own_sizes
from engines.techniques.context import BuildContext
from engines.techniques.over_ranks import OverRanks
from engines.techniques.presets import dropless
from tests.ranks import BUNDLED, TOLERANCE, logits, relative_error, technique

pytestmark = pytest.mark.numbers


@pytest.mark.parametrize(
    ("name", "n_ranks", "parameters"),
    [
        ("expert-parallel", 2, {}),
        ("expert-parallel", 3, {"exchange": "all_gather"}),
        ("tensor-parallel", 2, {}),
        ("tp-ep", 2, {"router_gather": "logits", "tensor_ranks": 1}),
    ],
)
def test_ranks_with_stacked_experts_equal_one_process(
    name: str, n_ranks: int, parameters: dict[str, Any], tmp_path: Path
) -> None:
    whole = load_checkpoint(BUNDLED, torch.float32)
    expected = logits(Transformer(whole), dropless())
    built = technique(name, **parameters).build(BuildContext(32, own_sizes(whole.config), ranks=n_ranks))
    assert isinstance(built, OverRanks)
    found: dict[int, torch.Tensor] = {}
    errors: list[BaseException] = []

    def compute(rank: int) -> None:
        try:
            with torch.inference_mode():
                links = Links(str(tmp_path / "store"), rank, n_ranks)
                checkpoint = load_checkpoint(BUNDLED, torch.float32, held=lambda layer: built.held(layer, rank))
                model = RankTransformer(checkpoint, links, Backend(torch.device("cpu"), torch.float32))
                found[rank] = logits(model, built)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=compute, args=(rank,), daemon=True) for rank in range(n_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert relative_error(found[0], expected) < TOLERANCE
