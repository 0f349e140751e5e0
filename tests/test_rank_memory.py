"""What each process of several holds of a checkpoint: its part, and nothing of the others'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines.base import unheard
from engines.model.checkpoints import inspect_checkpoint
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import DType, RanksAsked
from engines.techniques.presets import preset_parameters
from results.records import Request
from tests.fakes.random_models import copy_tokenizer

pytestmark = [
    pytest.mark.numbers,
    pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is resident"),
]

MIB = 1 << 20
EXPERTS = 3 * 64 * 3 * 256 * 512
"""Values: 72 Mi, in the file 144 MiB of bf16; all else is 2 MiB."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("large")
    config = transformers.Qwen3MoeConfig(
        vocab_size=2048, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, eos_token_id=0, bos_token_id=None, hidden_size=256, moe_intermediate_size=512,
        num_experts=64, num_experts_per_tok=4,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def resident(pid: int, folder: Path) -> tuple[int, int]:
    """Bytes of a process that are private, and those of files in the folder."""
    status = Path(f"/proc/{pid}/status").read_text()
    private = int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1]) * 1024
    in_files, is_own = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            is_own = str(folder) in line
        elif is_own and line.startswith("Rss:"):
            in_files += int(line.split()[1]) * 1024
    return private, in_files


def of_last_rank(folder: Path, technique: str, n_ranks: int, dtype: DType) -> tuple[int, int, int]:
    """Private bytes, bytes of the file, and bytes that it read, once it has seen 128 tokens."""
    engine = ParallelEngine(
        RanksAsked(inspect_checkpoint(str(folder)), preset_parameters(technique)(), n_ranks, dtype, threads=1)
    )
    prompt = torch.randint(10, 2000, (128,), generator=torch.Generator().manual_seed(2)).tolist()
    try:
        engine.run(
            Request(request_id="a", sample_id="a", kind="generate", prompt_ids=prompt, max_new_tokens=2), unheard
        )
        return *resident(engine.process_ids()[-1], folder), sum(engine.read_bytes()[-1].values())
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("technique", ["expert-parallel", "tensor-parallel"])
def test_a_rank_holds_its_part_of_the_experts_in_memory(technique: str, large: Path) -> None:
    """In fp32 all experts are 288 MiB: a rank of two holds 144, one of four 72; each reads so much of the file."""
    half, quarter = (of_last_rank(large, technique, n_ranks, "float32") for n_ranks in (2, 4))
    assert half[0] - quarter[0] == pytest.approx(4 * EXPERTS * (1 / 2 - 1 / 4), abs=32 * MIB)
    for n_ranks, (_, in_files, read) in ((2, half), (4, quarter)):
        assert in_files < 8 * MIB, "what was widened is given back"
        assert read == pytest.approx(2 * EXPERTS / n_ranks, abs=4 * MIB)


@pytest.mark.slow
def test_a_rank_maps_the_file_and_touches_its_own_experts_alone(large: Path) -> None:
    """In bf16 experts stay views of the file, whose pages belong to nobody: those of a rank's own are there."""
    private, in_files, read = of_last_rank(large, "expert-parallel", 2, "bfloat16")
    widened = of_last_rank(large, "expert-parallel", 2, "float32")[0]
    assert in_files <= 2 * EXPERTS / 2 + 8 * MIB
    assert in_files > 2 * EXPERTS / 2 * 0.5, "the prompt calls most of them"
    assert private < widened - 100 * MIB
    assert read == pytest.approx(2 * EXPERTS / 2, abs=4 * MIB)
