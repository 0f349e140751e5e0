"""The reference engine beside transformers, llama.cpp and the machine's limits: same weights, same threads, batch 1.

python -m tests.benchmarks.engine_speed [MODEL ...] [--prompts 512 1024 4096]

llama.cpp takes part where LLAMA_BENCH names its llama-bench and the package gguf is installed. All contenders take
turns, five times at least; a turn during which other processes took more than a tenth of the machine is repeated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.dropless import DroplessParameters
from results.records import Request
from tests.benchmarks.llama_cpp import LlamaBench, find_llama_bench
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.fakes.random_models import copy_tokenizer

N_TURNS = 5
MAX_TURNS = 8
MAX_FOREIGN_SHARE = 0.1
N_NEW = 64
VOCABULARY = 2048
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "eos_token_id": None,
    "bos_token_id": None,
}
MODELS: dict[str, dict[str, Any]] = {
    "16 experts, top 2, width 1024": {
        "moe_intermediate_size": 1024, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True,
    },
    "dense, width 2048": {"intermediate_size": 2048},
    "128 experts, top 8, width 384": {
        "moe_intermediate_size": 384, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


@dataclass
class Rates:
    """token/s of the turns that no neighbour disturbed; `disturbed` keeps the others."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    disturbed_prefill: list[float] = field(default_factory=list)
    disturbed_decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Timed:
    seconds: float
    is_quiet: bool


Contender = Callable[[int], tuple[Timed, Timed]]
"""Reads a prompt of so many tokens and writes N_NEW: the time to the first token, and the time of the others."""


def foreign_share(since: tuple[float, float], until: tuple[float, float]) -> float:
    """CPU time of other processes, as a share of all cores' time between two `cpu_times`."""
    busy_s, own_s = until[0] - since[0], until[1] - since[1]
    return max(0.0, busy_s - own_s)


def cpu_times() -> tuple[float, float]:
    """Busy seconds of the machine, and of this process and its finished children."""
    ticks = [int(field) for field in Path("/proc/stat").read_text(encoding="utf-8").split("\n")[0].split()[1:9]]
    own = os.times()
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK"), sum(own[:4])


def timed(work: Callable[[], object]) -> Timed:
    before, started_s = cpu_times(), time.perf_counter()
    work()
    seconds = time.perf_counter() - started_s
    n_cores = os.cpu_count() or 1
    # A tick of 10 ms is the resolution; it must not condemn a turn of 100 ms.
    foreign_s = foreign_share(before, cpu_times()) - 0.02
    return Timed(seconds, foreign_s <= MAX_FOREIGN_SHARE * seconds * n_cores)


def ours(folder: Path, dtype: torch.dtype) -> Contender:
    engine = ReferenceEngine(load_checkpoint(str(folder), dtype), DroplessParameters(), prefill_chunk=1024)

    def turn(n_prompt: int) -> tuple[Timed, Timed]:
        ids = tuple(torch.randint(1, VOCABULARY, (n_prompt,)).tolist())
        request = Request(request_id="r", sample_id="s", kind="generate", prompt_ids=ids, max_new_tokens=N_NEW)
        edges: list[tuple[float, tuple[float, float]]] = []
        engine.run(request, lambda event, at_s: edges.append((at_s, cpu_times())))
        return _between(edges[0], edges[1]), _between(edges[1], edges[2])

    return turn


def _between(a: tuple[float, tuple[float, float]], b: tuple[float, tuple[float, float]]) -> Timed:
    seconds = b[0] - a[0]
    foreign_s = foreign_share(a[1], b[1]) - 0.02
    return Timed(seconds, foreign_s <= MAX_FOREIGN_SHARE * seconds * (os.cpu_count() or 1))


def transformers_model(folder: Path, experts: str | None) -> Contender:
    import transformers

    keywords = {} if experts is None else {"experts_implementation": experts}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **keywords).eval()

    @torch.inference_mode()
    def turn(n_prompt: int) -> tuple[Timed, Timed]:
        last: Any = None
        cache: Any = None

        def step(ids: torch.Tensor) -> None:
            nonlocal last, cache
            out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            last, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
            int(last)

        prefill = timed(lambda: step(torch.randint(1, VOCABULARY, (1, n_prompt))))
        return prefill, timed(lambda: [step(last) for _ in range(N_NEW - 1)])

    return turn


def best_transformers(folder: Path, kinds: tuple[str | None, ...]) -> tuple[str, Contender]:
    """The expert implementation that is fastest on one turn; the slower ones take no further part."""
    seconds: dict[str | None, float] = {}
    for kind in kinds if len(kinds) > 1 else ():
        turn = transformers_model(folder, kind)
        seconds[kind] = sum(phase.seconds for phase in turn(128))
        print(f"transformers {kind}: {seconds[kind]:.1f} s for 128 + {N_NEW} tokens", flush=True)
    best = min(seconds, key=seconds.__getitem__) if seconds else kinds[0]
    return f"transformers {best or ''}".strip(), transformers_model(folder, best)


def write_model(name: str, folder: Path) -> Any:
    import transformers

    torch.manual_seed(0)
    if "experts" in name:
        config: Any = transformers.Qwen3MoeConfig(**BASE, **MODELS[name])
        model: Any = transformers.Qwen3MoeForCausalLM(config)
    else:
        config = transformers.Qwen3Config(**BASE, **MODELS[name])
        model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    copy_tokenizer(folder)
    return model


def active_weights(name: str) -> int:
    """Weights that one token meets in the layers' matrices; the head is met by the last token of a prompt only."""
    hidden, model = BASE["hidden_size"], MODELS[name]
    attention = hidden * BASE["head_dim"] * 2 * (BASE["num_attention_heads"] + BASE["num_key_value_heads"])
    if "num_experts" not in model:
        return int(BASE["num_hidden_layers"] * (attention + 3 * hidden * model["intermediate_size"]))
    experts = model["num_experts_per_tok"] * 3 * hidden * model["moe_intermediate_size"]
    return int(BASE["num_hidden_layers"] * (attention + experts + hidden * model["num_experts"]))


class Limits:
    """What this machine can do at most, measured in turn with the contenders."""

    def __init__(self) -> None:
        self._a, self._b = torch.randn(2048, 2048), torch.randn(2048, 2048)
        self._long = torch.randn(64 << 20)
        self.flop_per_s: list[float] = []
        self.bytes_per_s: list[float] = []

    def turn(self) -> None:
        gemm = min(timed(lambda: self._a @ self._b).seconds for _ in range(4))
        read = min(timed(self._long.sum).seconds for _ in range(4))
        self.flop_per_s.append(2 * 2048**3 / gemm)
        self.bytes_per_s.append(self._long.nbytes / read)


def race(contenders: Mapping[str, Contender], limits: Limits, n_prompt: int) -> dict[str, Rates]:
    """Turns until every contender has N_TURNS quiet ones of each phase, or MAX_TURNS are over."""
    rates = {name: Rates() for name in contenders}
    for turn in contenders.values():
        turn(n_prompt)  # warm-up
    for _ in range(MAX_TURNS):
        limits.turn()
        for name, turn in contenders.items():
            prefill, decode = turn(n_prompt)
            mine = rates[name]
            (mine.prefill if prefill.is_quiet else mine.disturbed_prefill).append(n_prompt / prefill.seconds)
            (mine.decode if decode.is_quiet else mine.disturbed_decode).append((N_NEW - 1) / decode.seconds)
        if all(min(len(mine.prefill), len(mine.decode)) >= N_TURNS for mine in rates.values()):
            break
    return rates


def summary(quiet: list[float], disturbed: list[float]) -> tuple[float, str]:
    """Median of the quiet turns; of all turns, and the reader is told, where there were too few of them."""
    if len(quiet) >= N_TURNS:
        return statistics.median(quiet), f"{len(quiet)} turns"
    return statistics.median(quiet + disturbed), f"DISTURBED: {len(disturbed)} of {len(quiet) + len(disturbed)} turns"


def compared(name: str, folder: Path, prompts: list[int], llama: LlamaBench | None) -> list[Measurement]:
    model = write_model(name, folder)
    found = []
    for form, dtype in DTYPES.items():
        contenders = {"joulebench": ours(folder, dtype)}
        if form == "f32":
            who, contender = best_transformers(folder, ("grouped_mm", "eager") if "experts" in name else (None,))
            contenders[who] = contender
        if llama is not None and form != "bf16":
            gguf = folder / f"{form}.gguf"
            llama.write(model, gguf, half=form == "f16")
            contenders["llama.cpp"] = llama_contender(llama, gguf)
        for n_prompt in prompts:
            limits = Limits()
            rates = race(contenders, limits, n_prompt)
            print(f"{name}, {form}, prompt {n_prompt}: {rates}", flush=True)
            found += lines(f"{name}, {form}, prompt {n_prompt}", name, dtype, rates, limits, n_prompt)
    return found


def llama_contender(llama: LlamaBench, gguf: Path) -> Contender:
    def turn(n_prompt: int) -> tuple[Timed, Timed]:
        seconds: list[float] = []
        # llama-bench also loads and warms up; what disturbs that is counted too, so its turns are judged harder.
        prefill = timed(lambda: seconds.append(n_prompt / llama.prefill(gguf, n_prompt)))
        decode = timed(lambda: seconds.append((N_NEW - 1) / llama.decode(gguf, n_prompt, N_NEW)))
        return Timed(seconds[0], prefill.is_quiet), Timed(seconds[1], decode.is_quiet)

    return turn


def lines(
    conditions: str, name: str, dtype: torch.dtype, rates: Mapping[str, Rates], limits: Limits, n_prompt: int
) -> list[Measurement]:
    found = []
    for phase in ("prefill", "decode"):
        sums = {who: summary(getattr(mine, phase), getattr(mine, f"disturbed_{phase}")) for who, mine in rates.items()}
        our_rate, our_turns = sums["joulebench"]
        if phase == "prefill":
            limit = statistics.median(limits.flop_per_s) / (2 * active_weights(name))
            what = f"large GEMM, {statistics.median(limits.flop_per_s) / 1e9:.0f} GFLOP/s"
        else:
            weights = active_weights(name) + VOCABULARY * BASE["hidden_size"]
            limit = statistics.median(limits.bytes_per_s) / (weights * dtype.itemsize)
            what = f"streaming read, {statistics.median(limits.bytes_per_s) / 1e9:.1f} GB/s"
        for who, (rate, turns) in sums.items():
            if who != "joulebench":
                target = our_rate_target(who, phase, name) * rate
                found.append(
                    measured(f"{phase}", our_rate, "token/s", f"{conditions}; ours {our_turns}, peer {turns}",
                             rate, who, target)
                )  # fmt: skip
        found.append(measured(phase, our_rate, "token/s", f"{conditions}; ours {our_turns}", limit, what, 0.8 * limit))
    return found


def our_rate_target(who: str, phase: str, name: str) -> float:
    """The ratio to a peer that this engine is to reach."""
    if who == "llama.cpp":
        return 1.0
    if "experts" in name:
        return 2.0 if phase == "decode" else 1.15
    return 1.5 if phase == "decode" else 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--prompts", nargs="+", type=int, default=[512, 1024], help="lengths, in tokens")
    arguments = parser.parse_args()
    llama, missing = find_llama_bench()
    found = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            found += compared(name, Path(folder), arguments.prompts, llama)
        write_page("engine-speed", "How fast the reference engine is", found, remarks(arguments, missing))  # so far


def remarks(arguments: argparse.Namespace, missing: str | None) -> str:
    left_out = [name for name in MODELS if name not in arguments.models]
    return (
        "Random weights, hidden 1024, 8 layers, 16 query and 8 key/value heads of 64, vocabulary 2048; batch 1, "
        f"{torch.get_num_threads()} threads, {N_NEW} new tokens. Medians of {N_TURNS} turns or more, taken by all "
        "contenders in turn. bf16 and f16 are how weights are stored; arithmetic is fp32. The limit of prefill leaves "
        f"attention out; that of decode leaves the cache out. llama.cpp: {missing or 'llama-bench, -ub 1024'}. "
        f"Prompts asked for: {arguments.prompts}. Models left out of this run: {'; '.join(left_out) or 'none'}."
    )


if __name__ == "__main__":
    main()
