"""How fast a checkpoint of 4 GB is ready, and how much memory that takes, beside transformers.

python -m tests.benchmarks.loading [--turns 3] [--gigabytes 4]

Each load is a process of its own, which this one watches. The files were read before, so that the disk takes no part.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.kernels.library import library
from tests.benchmarks.measurement import Measurement, beside, measured, write_page
from tests.benchmarks.timing import Figure, Turns, timed

REPOSITORY = Path(__file__).parents[2]
HIDDEN, WIDTH, N_EXPERTS, VOCABULARY = 1024, 1024, 16, 2048
N_HEADS, N_KV_HEADS, HEAD_DIM = 16, 8, 64
LAYERS_PER_SHARD = 2
ITEMSIZE = {"float32": 4, "bfloat16": 2}
N_PROMPT, N_NEW = 16, 4
SAMPLE_S = 0.005
PEAK_TARGET = 1.15
START_TARGET = 0.5
LIMIT_SHARE = 0.5
"""Of the checkpoint's size: the private memory that the last process may have."""


# --- the checkpoint --------------------------------------------------------------------------------------------------


def layer_shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of one layer, as a published Qwen3-MoE names them."""
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (N_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (N_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (N_KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, N_HEADS * HEAD_DIM),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate.weight": (N_EXPERTS, HIDDEN),
    }
    for expert in range(N_EXPERTS):
        shapes[f"mlp.experts.{expert}.gate_proj.weight"] = (WIDTH, HIDDEN)
        shapes[f"mlp.experts.{expert}.up_proj.weight"] = (WIDTH, HIDDEN)
        shapes[f"mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, WIDTH)
    return shapes


def write_checkpoint(folder: Path, dtype: str, n_layers: int) -> int:
    """A random Qwen3-MoE in shards, written with no more than one shard in memory. Returns the bytes of its tensors."""
    import torch
    import transformers
    from safetensors.torch import save_file

    from tests.fakes.random_models import copy_tokenizer

    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        noise = 0.02 * torch.randn(shape, generator=generator)
        return (noise if len(shape) > 1 else 1 + noise).to(getattr(torch, dtype))

    # Every layer holds the same numbers: it is their place and size that loading depends on.
    layer = {name: random(shape) for name, shape in layer_shapes().items()}
    outer = {
        "model.embed_tokens.weight": random((VOCABULARY, HIDDEN)),
        "model.norm.weight": random((HIDDEN,)),
        "lm_head.weight": random((VOCABULARY, HIDDEN)),
    }
    starts = range(0, n_layers, LAYERS_PER_SHARD)
    n_shards, n_bytes = len(starts) + 1, 0
    weight_map: dict[str, str] = {}

    def write_shard(number: int, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal n_bytes
        file = f"model-{number:05d}-of-{n_shards:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        n_bytes += sum(tensor.nbytes for tensor in tensors.values())

    write_shard(1, outer)
    for number, first in enumerate(starts, 2):
        numbers = range(first, min(first + LAYERS_PER_SHARD, n_layers))
        write_shard(
            number, {f"model.layers.{n}.{name}": tensor.clone() for n in numbers for name, tensor in layer.items()}
        )
    index = {"metadata": {"total_size": n_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=n_layers,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        head_dim=HEAD_DIM,
        moe_intermediate_size=WIDTH,
        num_experts=N_EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        eos_token_id=None,
        bos_token_id=None,
        architectures=["Qwen3MoeForCausalLM"],
        dtype=dtype,
    )
    config.save_pretrained(folder)
    copy_tokenizer(folder)
    return n_bytes


def layers_of(gigabytes: float, dtype: str) -> int:
    """Layers that make a checkpoint of about this size."""
    weights = sum(_count(shape) for shape in layer_shapes().values())
    return max(1, round(gigabytes * 1e9 / (weights * ITEMSIZE[dtype])))


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def read_once(folder: Path) -> None:
    """Brings the files into the page cache."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


# --- in the process that loads ---------------------------------------------------------------------------------------


def load_ours(folder: str, dtype: str) -> None:
    import torch

    from engines.model.checkpoints import load_checkpoint
    from engines.reference import ReferenceEngine
    from engines.techniques.presets import DroplessParameters
    from results.records import Request

    prompt = tuple(range(1, N_PROMPT + 1))
    started_s = time.perf_counter()
    engine = ReferenceEngine(load_checkpoint(folder, getattr(torch, dtype)), DroplessParameters())
    ready_s = time.perf_counter()
    request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=prompt, max_new_tokens=N_NEW)
    answer = engine.run(request, lambda event, at_s: None)
    _tell(ready_s - started_s, answer.token_times_s[0] - started_s, answer.token_ids)


def load_transformers(folder: str, dtype: str) -> None:
    import torch
    import transformers
    from transformers.models.qwen3_moe import modeling_qwen3_moe  # imported on first use otherwise, inside the window

    prompt_1T = torch.arange(1, N_PROMPT + 1)[None]
    started_s = time.perf_counter()
    model = modeling_qwen3_moe.Qwen3MoeForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ready_s = time.perf_counter()
    assert isinstance(model, transformers.PreTrainedModel)
    with torch.inference_mode():
        token = int(model(prompt_1T, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
    _tell(ready_s - started_s, time.perf_counter() - started_s, (token,))


LOADERS = {"joulebench": load_ours, "transformers": load_transformers}


def limit_private_memory(n_bytes: int) -> None:
    """Linux counts private writable memory against RLIMIT_DATA, touched or not; read-only and shared maps are free."""
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (n_bytes, n_bytes))


def _tell(ready_s: float, first_token_s: float, token_ids: Sequence[int]) -> None:
    print(json.dumps({"ready_s": ready_s, "first_token_s": first_token_s, "token_ids": list(token_ids)}))


# --- in the process that watches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """Bytes are of the whole process, interpreter and libraries included."""

    ready_s: float
    first_token_s: float
    token_ids: tuple[int, ...]
    peak_private_bytes: int
    peak_resident_bytes: int
    is_quiet: bool


class LoadFailedError(Exception):
    """The last words of the process that loaded."""


def load(who: str, folder: Path, dtype: str, limit_bytes: int | None = None) -> Load:
    arguments = [who, str(folder), dtype] + ([str(limit_bytes)] if limit_bytes is not None else [])
    command = [sys.executable, "-m", "tests.benchmarks.loading", "--load", *arguments]
    peaks = {"RssAnon": 0, "VmHWM": 0}
    output: list[str] = []

    def watch() -> None:
        with (
            tempfile.TemporaryFile("w+") as complaints,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, cwd=REPOSITORY) as process,
        ):
            while process.poll() is None:
                status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8")
                for name, n_bytes in resident_bytes(status).items():
                    peaks[name] = max(peaks[name], n_bytes)
                time.sleep(SAMPLE_S)
            assert process.stdout is not None  # asked for above
            complaints.seek(0)
            output.extend([process.stdout.read(), complaints.read()])

    turn = timed(watch)
    lines = output[0].splitlines()
    if not lines:
        last_words = (output[1].strip().splitlines() or ["no word, killed by a signal"])[-1]
        raise LoadFailedError(last_words.replace(f"{folder}/", ""))
    told: dict[str, Any] = json.loads(lines[-1])
    return Load(
        told["ready_s"],
        told["first_token_s"],
        tuple(told["token_ids"]),
        peaks["RssAnon"],
        peaks["VmHWM"],
        turn.is_quiet,
    )


def resident_bytes(status: str) -> dict[str, int]:
    """RssAnon (private pages) and VmHWM (the most that was ever resident, mapped files too) of /proc/PID/status.

    A process that has just ended has neither.
    """
    found = {}
    for line in status.splitlines():
        name, _, amount = line.partition(":")
        if name in ("RssAnon", "VmHWM"):
            found[name] = int(amount.removesuffix("kB")) * 1024
    return found


def times(loads: Sequence[Load], figure: str, n_turns: int) -> Figure:
    turns = Turns()
    for one in loads:
        turns.add(getattr(one, figure), one.is_quiet)
    return turns.figure(n_turns)


def medians(loads: Sequence[Load], figure: str) -> float:
    """Of all loads: a neighbour takes time, not another process's memory."""
    return float(statistics.median(getattr(one, figure) for one in loads))


def compared(folder: Path, dtype: str, gigabytes: float, n_turns: int) -> Iterator[Measurement]:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < 1.1 * gigabytes:
        raise SystemExit(
            f"{folder}: {free_gb:.1f} GB free for a checkpoint of {gigabytes} GB; set TMPDIR to another disk"
        )
    n_bytes = write_checkpoint(folder, dtype, layers_of(gigabytes, dtype))
    read_once(folder)
    loads: dict[str, list[Load]] = {who: [] for who in LOADERS}
    for _ in range(n_turns + (n_turns + 1) // 2):
        for who in LOADERS:
            loads[who].append(load(who, folder, dtype))
            print(f"{dtype}, {who}: {loads[who][-1]}", flush=True)
        if all(sum(one.is_quiet for one in mine) >= n_turns for mine in loads.values()):
            break
    ours, theirs = loads["joulebench"], loads["transformers"]
    here = f"{n_bytes / 1e9:.2f} GB of {dtype}, loaded as {dtype}"
    for figure, metric in (("ready_s", "weights ready"), ("first_token_s", "first token")):
        our_time, their_time = (times(mine, figure, n_turns) for mine in (ours, theirs))
        yield beside(metric, "s", here, our_time, their_time, "transformers", START_TARGET)
    for figure, metric in (("peak_resident_bytes", "peak resident"), ("peak_private_bytes", "peak private")):
        yield measured(
            f"{metric} / checkpoint", medians(ours, figure) / n_bytes, "x", here, medians(theirs, figure) / n_bytes,
            "transformers", PEAK_TARGET, f"{len(ours)} loads",
        )  # fmt: skip
    yield from limited(folder, dtype, here, n_bytes, ours)


def limited(folder: Path, dtype: str, here: str, n_bytes: int, unlimited: Sequence[Load]) -> Iterator[Measurement]:
    """Under a limit of private memory below the model's size."""
    limit_bytes = int(LIMIT_SHARE * n_bytes)
    conditions = f"{here}, private memory limited to {limit_bytes / 1e9:.2f} GB"
    try:
        fate = f"transformers answers in {load('transformers', folder, dtype, limit_bytes).first_token_s:.1f} s"
    except LoadFailedError as last_words:
        fate = f"transformers ends with {str(last_words)!r}"
    try:
        ours = load("joulebench", folder, dtype, limit_bytes)
    except LoadFailedError as last_words:
        note = f"ours ends with {str(last_words)!r}; {fate}"
        yield measured("answers under the limit", 0, "of 1", conditions, target=1, note=note)
        return
    print(f"{conditions}: {ours}; {fate}", flush=True)
    same = "same tokens as without the limit" if ours.token_ids == unlimited[0].token_ids else "OTHER TOKENS"
    yield measured("answers under the limit", 1, "of 1", conditions, target=1, note=f"{same}; {fate}")
    free = medians([one for one in unlimited if one.is_quiet] or unlimited, "first_token_s")
    yield measured("first token", ours.first_token_s, "s", conditions, free, "ours without the limit", note="1 load")
    private_gb, limit_gb = ours.peak_private_bytes / 1e9, limit_bytes / 1e9
    yield measured("peak private", private_gb, "GB", conditions, target=limit_gb, note="1 load")


REMARKS = f"""Lower is better for seconds and for memory; targets are upper bounds. A random Qwen3-MoE in shards of
{LAYERS_PER_SHARD} layers, in the page cache before it is loaded; a new process for each load, in turns. Seconds start
when all imports are done; the first token follows a prompt of {N_PROMPT}. Memory is that of the whole process,
interpreter and libraries included, from its start to its answer, over the bytes of the checkpoint's tensors. Resident
memory counts pages of mapped files, which the kernel can take back at any time; private memory cannot be taken back.
It is sampled every {SAMPLE_S * 1e3:.0f} ms, the resident peak is the kernel's own.

The limit is RLIMIT_DATA: Linux counts private writable memory against it, touched or not, and no read-only or shared
mapping; so a file mapped private and writable, as safetensors maps it for torch, counts in whole. It is no limit of the
page cache: how slow a model beyond physical memory is depends on the disk, and is not measured here."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="loads of each contender")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint")
    parser.add_argument("--load", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        who, folder, dtype, *limit = arguments.load
        if limit:
            limit_private_memory(int(limit[0]))
        LOADERS[who](folder, dtype)
        return
    library()  # built once on a machine, and not in the first load of this run
    found: list[Measurement] = []
    for dtype in ITEMSIZE:
        with tempfile.TemporaryDirectory() as scratch:
            found += compared(Path(scratch), dtype, arguments.gigabytes, arguments.turns)
    write_page("loading", "How a checkpoint gets into memory", found, REMARKS)


if __name__ == "__main__":
    main()
