"""Two processes of one thread against one process of two: what it costs to send instead of to share memory.

python -m tests.benchmarks.parallel

The same requests in turn: one process answers, then each pair of processes, then again, so that a ratio is of one run.
Time above one: the pair is slower. The bundled model is small: there a token takes less than what sending takes. In the
made one the experts are eight ninths of what a token reads. A turn counts as disturbed where other processes took a
tenth of the machine; the pairs' own processes are not others.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from devices.cpu_seconds import host_cpu_seconds, usable_cpus
from engines.base import unheard
from engines.model.checkpoints import inspect_checkpoint, load_checkpoint
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters, preset_parameters
from results.cpu_time import foreign_share
from results.expert_heat import ExpertHeat
from results.records import Completion, Request
from tests.benchmarks.measurement import Measurement, beside, beside_other_machines, write_page
from tests.benchmarks.timing import MAX_FOREIGN_SHARE, Turns

N_PROMPT, N_NEW, N_TURNS = 512, 32, 7
TARGET_LOSS = 1.15
WIDE = {
    "vocab_size": 2048, "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 2048, "eos_token_id": None,
    "bos_token_id": None, "moe_intermediate_size": 2048, "num_experts": 8, "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}  # fmt: skip
PAIRS = {
    "expert-parallel, all to all": ("expert-parallel", {}),
    "expert-parallel, all gather": ("expert-parallel", {"exchange": "all_gather"}),
    "expert-parallel, all tokens everywhere": ("expert-parallel", {"sequence_parallel": False}),
    "experts dealt by load (eplb)": ("eplb", {"spare_slots": 0}),
    "eplb, 2 spare slots": ("eplb", {"spare_slots": 2}),
    "tensor-parallel": ("tensor-parallel", {}),
}
REMARKS = """One process of two threads, `dropless`, is the peer; a ratio above 1 is time lost by two processes of one
thread each. A row whose turns others disturbed has no ratio: it would compare disturbances.

The routers of the made model are random, so its experts are chosen unevenly. "Uneven" tells how much: the rows of
the busier process over the mean of both, all layers together, counted in these requests. Of a single decoded token
it is more: of four different experts out of eight, the busier of two processes has 2.51 on average in place of two
(the larger part of a hypergeometric draw). `eplb` deals experts by load, counted on another prompt; with spare
slots both processes hold the busiest experts. `tensor-parallel` is even.

A process that waits [lends its core](../techniques/parallel.md) to the busier one since 2026-11-26, so that a layer
need not take as long as the busier process alone. Of the made model each process computes half of the attention of
a decoded token since then; before, both computed all of it, a ninth of what a token reads. On the bundled model a
step takes less time than what sending and waking the other process takes. In prefill each process computes the
attention of its tokens with the kernels; in older rows torch did, in twice the time. Spare slots decoded in more
than one call of the kernels in older rows. Rows of earlier days are from before all
this; those of 2026-11-23 are from before [threads of torch slept](../decisions/0028-threads-that-sleep.md) too,
which made one process of two threads faster."""


def write_wide(folder: Path) -> str:
    import transformers

    from tests.fakes.random_models import copy_tokenizer

    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**WIDE)).to(torch.bfloat16).save_pretrained(folder)
    copy_tokenizer(folder)
    return str(folder)


def prompt(seed: int) -> list[int]:
    return torch.randint(10, 2000, (N_PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()


def request() -> Request:
    return Request(
        request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(prompt(1)), max_new_tokens=N_NEW,
        ignore_end_tokens=True,
    )  # fmt: skip


def uneven(heat: ExpertHeat, engine: ParallelEngine, phase: str) -> float:
    """Rows of each layer's busier rank over the mean rank's, all layers together."""
    assert heat.decoded is not None
    busiest = mean = 0.0
    for layer, chosen, decoded in zip(heat.layers, heat.chosen, heat.decoded, strict=True):
        rows_E = decoded if phase == "decode" else [a - b for a, b in zip(chosen, decoded, strict=True)]
        held = [engine.held(layer, rank) for rank in range(engine.n_ranks)]
        # Ranks that hold an expert share its rows, as slices or as replicas.
        n_holders = [sum(e in one.experts for one in held) for e in range(len(rows_E))]
        rows_N = [sum(rows_E[e] / n_holders[e] for e in one.experts) for one in held]
        busiest, mean = busiest + max(rows_N), mean + sum(rows_N) / len(rows_N)
    return busiest / mean


def timed(answer: Callable[[], Completion]) -> tuple[float, float, bool]:
    """Seconds to the first token and of each later one, and whether others left the machine alone."""
    before = host_cpu_seconds(usable_cpus())
    found = answer()
    share = foreign_share(before, host_cpu_seconds(usable_cpus())) or 0.0
    assert found.prefill_end_s is not None
    prefill_s = found.prefill_end_s - found.start_s
    return prefill_s, (found.end_s - found.prefill_end_s) / (N_NEW - 1), share <= MAX_FOREIGN_SHARE


def rows(source: str, name: str, dtype: str) -> list[Measurement]:
    checkpoint = load_checkpoint(source, getattr(torch, dtype))
    one = ReferenceEngine(checkpoint, DroplessParameters(), threads=2)
    facts = inspect_checkpoint(source)
    pairs = {
        label: ParallelEngine(
            RanksAsked(facts, preset_parameters(technique).model_validate(changes), 2, dtype, threads=1)
        )  # type: ignore[arg-type]
        for label, (technique, changes) in PAIRS.items()
    }
    asked = request()
    engines = {"one process, two threads": one, **pairs}
    turns = {(label, phase): Turns() for label in engines for phase in ("prefill", "decode")}
    ratios: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
    try:
        answers = {}
        for label, engine in engines.items():
            if engine.needs_calibration:
                engine.calibrate([prompt(2)])
            engine.reset()
            answers[label] = engine.run(asked, unheard).token_ids
        heat = one.take_heat()
        assert heat is not None
        lost = {(label, phase): uneven(heat, pairs[label], phase) for label in pairs for phase in ("prefill", "decode")}
        for _ in range(N_TURNS):
            of_one: tuple[float, ...] = ()
            for label, engine in engines.items():
                *seconds, is_quiet = timed(lambda engine=engine: engine.run(asked, unheard))  # type: ignore[misc]
                of_one = of_one or tuple(seconds)
                for phase, taken_s, peer_s in zip(("prefill", "decode"), seconds, of_one, strict=True):
                    turns[label, phase].add(1e3 * taken_s, is_quiet)
                    ratios[label, phase].append(taken_s / peer_s)
    finally:
        for engine in pairs.values():
            engine.close()
    found = []
    same = {label: ids == answers["one process, two threads"] for label, ids in answers.items()}
    for label in pairs:
        for phase, what in (("prefill", f"prefill of {N_PROMPT} tokens"), ("decode", "a decoded token")):
            ours, peer = turns[label, phase].figure(3), turns["one process, two threads", phase].figure(3)
            by_turn = ratios[label, phase]
            spread = f"median {statistics.median(by_turn):.2f}, {min(by_turn):.2f} to {max(by_turn):.2f}"
            tokens = "the same" if same[label] else "OTHER"
            notes = [f"uneven {lost[label, phase]:.2f}", f"ratio of the same turn, {spread}", f"{tokens} tokens"]
            conditions = f"{label}; {name}"
            found.append(beside(what, "ms", conditions, ours, peer, "one process, two threads", TARGET_LOSS, notes))
    return found


def main() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("needs two cores")
    with tempfile.TemporaryDirectory() as folder:
        found = rows(write_wide(Path(folder)), "8 experts, top 4, 1024 x 2048, bf16", "bfloat16")
    found += rows("bundled:tiny-qwen3-moe", "bundled", "float32")
    found = beside_other_machines("parallel", found)
    write_page("parallel", "Two processes against two threads", found, REMARKS)


if __name__ == "__main__":
    main()
