"""Memory of a process whose experts go through slots: that of the plan, and no page of the files stays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from engines.model.quantised import Form
from tests.fakes.random_models import copy_tokenizer

MIB = 1 << 20
Grown = Callable[..., tuple[int, int, int]]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 experts in each of 3 layers: 144 MiB of bf16 in the file, 288 in fp32; all else is 2 MiB."""
    import transformers

    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 4}
    config = transformers.Qwen3MoeConfig(
        vocab_size=2048, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, eos_token_id=0, bos_token_id=None, **sizes,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def grown() -> Iterator[Grown]:
    """Bytes that a process has grown by, private and of files, and experts that were copied into slots."""
    command = [sys.executable, "-m", "tests.resident"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        write, answers = process.stdin, process.stdout

        @cache
        def measured(
            folder: Path, name: str, budget: int, form: Form = "fp32", dtype: str = "float32"
        ) -> tuple[int, int, int]:
            write.write(json.dumps([str(folder), name, budget, form, dtype]) + "\n")
            write.flush()
            private, in_files, misses = json.loads(answers.readline())
            return private, in_files, misses

        yield measured


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is resident")
@pytest.mark.parametrize(("name", "form"), [("lru", "fp32"), ("static", "fp32"), ("lru", "int8")])
def test_the_process_keeps_to_the_memory_of_the_plan(name: str, form: Form, large: Path, grown: Grown) -> None:
    """Of 24 MiB of slots, beside what everything else takes: and no page of an expert in the file stays either.

    Everything else: 10 MiB for the other weights, the cache and what torch keeps, 64 MiB of what an allocator may hold
    back. All experts in memory, as a yardstick of the measurement, are 288 MiB.
    """
    private, in_files, misses = grown(large, name, 24 * MIB, form)
    assert misses > 0
    assert private < (24 + 10 + 64) * MIB
    assert in_files < 4 * MIB
    assert grown(large, "dropless", 0)[0] > 288 * MIB


@pytest.fixture(scope="module")
def large_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-OSS of 64 experts in each of 3 layers, 144 MiB in bf16."""
    import transformers

    folder = tmp_path_factory.mktemp("made")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_local_experts": 64, "num_experts_per_tok": 4}
    config = transformers.GptOssConfig(
        vocab_size=2048, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, eos_token_id=0, bos_token_id=None, pad_token_id=None, **sizes,
    )  # fmt: skip
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="only Linux says what is resident")
@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_experts_that_are_made_keep_to_it_too(form: Form, large_made: Path, grown: Grown) -> None:
    """Private memory as above, and neither the file that experts are made into nor the checkpoint's stacks stay. The
    rest of the checkpoint, which is mapped, is 3 MiB."""
    private, in_files, misses = grown(large_made, "lru", 24 * MIB, form, "bfloat16")
    assert misses > 0
    assert private < (24 + 10 + 64) * MIB
    assert in_files < (3 + 4) * MIB
    assert grown(large_made, "dropless", 0, "bf16", "bfloat16")[0] > 144 * MIB
