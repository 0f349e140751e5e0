"""What a technique's calls cost a decoded token, and what the road costs that computes them.

python -m tests.benchmarks.decode_roads [--turns 7]

Every arm decodes the same tokens of one set of weights. In each turn dropless decodes them right before each arm, and
every other turn right after it, so that a busy neighbour slows both alike. A turn's figure is the median of its
inter-token times. A row's ratio is the median over turns of the arm's rate over that of dropless beside it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as cache_calls
from itertools import pairwise
from pathlib import Path

import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan
from engines.expert_memory import ExpertMemory
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.model.quantised import Form
from engines.observers import SparseLayerStep, StepPhase
from engines.profile_files import profile_folder, read_profile
from engines.reference import ReferenceEngine
from engines.techniques.base import TechniqueParameters
from engines.techniques.parameters import CustomParameters
from engines.techniques.presets import DroplessParameters, preset_parameters
from results.records import Request
from tests.benchmarks.measurement import Measurement, beside_other_machines, measured, write_page
from tests.benchmarks.race_models import MODELS, VOCABULARY, write_model
from tests.fakes.families import CASES, write_family
from tests.fakes.random_models import copy_tokenizer
from tests.techniques import NpumoeT

PAGE, TITLE = "decode-roads", "What a technique's calls cost a decoded token"
BUNDLED = "bundled:tiny-qwen3-moe"
MADE = next(iter(MODELS))
OLMOE = "OLMoE of 3 layers, width 64"
N_PROMPT, N_NEW = 32, 65
TURNS = 7
N_WARM = 12
"""Requests that fill a cache before anything is timed."""
BASELINE, AGAIN = "dropless", "dropless again"
SAME_CALLS = "static calls of 1 row"
PLANNED = ", each layer planned first"
TARGET, HITS_TARGET = 1 / 1.05, 1 / 1.03
"""Of dropless' rate: for the same calls, and for a cache that holds all that is called."""


Loads = Callable[[bool], Checkpoint]
"""Asked whether experts stay in their file."""


def of_rows(n_rows: int) -> TechniqueParameters:
    """A graph of n rows for each chosen expert."""
    return NpumoeT(decode_rows=n_rows, calibration_prompts=1)


@dataclass(frozen=True)
class Arm:
    """planned: each layer's plan is made before it is computed, as for an observer of layers, who costs a norm of each
    layer's attention output besides."""

    technique: TechniqueParameters
    planned: bool = False
    target: float | None = None
    profile: str | None = None
    """Of which it is frozen; None: it learns from a prompt what it needs."""


def shards(shard: str, cores: int) -> TechniqueParameters:
    return CustomParameters.model_validate({"place": {"kind": "shards", "shard": shard, "cores": cores}})


def blocks(count: str) -> TechniqueParameters:
    """Of one row, provisioned for any routing, those of padding computed."""
    own = {"kind": "blocks", "block_size": 1, "block_count": count, "skip_padding_blocks": False}
    return CustomParameters.model_validate({"layout": own})


def cache(slots: int, **rule: str) -> TechniqueParameters:
    return CustomParameters.model_validate({"move": {"kind": "cache", "slots": slots} | rule})


ALL_HITS = "lru cache that holds all experts"
HITS = [
    ALL_HITS,
    "lfu cache that holds all experts",
    "static cache that holds all experts",
    "moe-ondemand that holds all experts",
]
FEW_SLOTS = "lru cache of half of them"


ON_DEMAND = "on-demand, copies counted"
HINTED = "experts of the next layer guessed (s) as a hint, copies counted"
PREDICTED = "experts of the next layer guessed (s) and executed, copies counted"
PREDICTED_Q = "experts of the next layer guessed (q) and executed, copies counted"
ESTIMATED = "experts of the next layer guessed by the estimator and executed, copies counted"


def predicted(executes: str, **how: str) -> TechniqueParameters:
    route = {"kind": "predicted", "executes": executes} | how
    return CustomParameters.model_validate({"route": route, "move": {"kind": "two_buffers", "prefetch": True}})


def arms_of(n_experts: int, profile: str | None) -> Mapping[str, Arm]:
    """profile: of the model, where there is one with an estimator."""
    estimated = {}
    if profile is not None:
        estimated = {ESTIMATED: Arm(predicted("prediction", predictor="estimator"), target=TARGET, profile=profile)}
    return {
        AGAIN: Arm(DroplessParameters()),
        SAME_CALLS: Arm(of_rows(1), target=TARGET),
        "static calls of 4 rows": Arm(of_rows(4)),
        "static calls of 32 rows": Arm(of_rows(32)),
        "blocks of 1 row, tight": Arm(blocks("tight"), target=TARGET),
        "blocks of 1 row, sufficient": Arm(blocks("sufficient")),
        "calls dealt to 2 cores": Arm(shards("blocks", 2), target=TARGET),
        "slices of the intermediate dimension for 2 cores": Arm(shards("intermediate", 2)),
        "slices of the intermediate dimension for 4 cores": Arm(shards("intermediate", 4)),
        "slices of the model width for 2 cores": Arm(shards("hidden", 2)),
        ALL_HITS: Arm(cache(n_experts), target=HITS_TARGET),
        HITS[1]: Arm(cache(n_experts, evict="lfu"), target=HITS_TARGET),
        HITS[2]: Arm(cache(n_experts, evict="static"), target=HITS_TARGET),
        HITS[3]: Arm(cache(n_experts, evict="static", stay="first"), target=HITS_TARGET),
        FEW_SLOTS: Arm(cache(n_experts // 2)),
        ON_DEMAND: Arm(preset_parameters("on-demand")()),
        HINTED: Arm(predicted("router", source="s"), target=TARGET),
        PREDICTED: Arm(predicted("prediction", source="s"), target=TARGET),
        PREDICTED_Q: Arm(predicted("prediction", source="q"), target=TARGET),
        **estimated,
        HINTED + PLANNED: Arm(predicted("router", source="s"), planned=True),
        BASELINE + PLANNED: Arm(DroplessParameters(), planned=True),
        SAME_CALLS + PLANNED: Arm(of_rows(1), planned=True),
        ALL_HITS + PLANNED: Arm(cache(n_experts), planned=True),
    }


class Watcher:
    """Has each layer computed by itself."""

    def layer(self, seen: SparseLayerStep) -> None: ...


@dataclass
class DecodedRows:
    """Observes how many rows each decode step's plans have, layers and experts together."""

    rows: list[int] = field(default_factory=list)

    def step(self, n_tokens: int, kv_length: int, phase: StepPhase, plans: Sequence[DispatchPlan | None]) -> None:
        if phase == "decode":
            self.rows.append(sum(plan.counters().computed_rows for plan in plans if plan is not None))


def request(seed: int) -> Request:
    ids = torch.randint(1, VOCABULARY, (N_PROMPT,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Request(
        request_id="r", sample_id="s", kind="generate", prompt_ids=tuple(ids), max_new_tokens=N_NEW,
        ignore_end_tokens=True,
    )  # fmt: skip


def readied(load: Loads, form: Form, arm: Arm) -> tuple[ReferenceEngine, float, str]:
    """A warm engine, the rows that it computes for a token, and its road."""
    technique = arm.technique
    memory = ExpertMemory(None, form)
    engine = ReferenceEngine(load(technique.loads_from_file), technique, threads=1, expert_memory=memory)
    if arm.profile is not None:
        engine.use_profile(read_profile(profile_folder(arm.profile)))
    elif engine.needs_calibration:
        engine.calibrate([request(0).prompt_ids])
    engine.layer_observer = Watcher() if arm.planned else None
    engine.observer = seen = DecodedRows()
    for seed in range(N_WARM if technique.loads_from_file else 1):
        engine.run(request(seed), unheard)
    engine.observer = None
    engine.take_counters()
    return engine, statistics.mean(seen.rows), str(engine.take_road().decoding)


def compared(where: str, load: Loads, form: Form, n_turns: int) -> list[Measurement]:
    moe = load(False).config.moe
    assert moe is not None
    arms = arms_of(moe.n_experts, BUNDLED if where.startswith(BUNDLED) else None)
    base = readied(load, form, Arm(DroplessParameters()))
    engines = {name: readied(load, form, arm) for name, arm in arms.items()}
    assert base[1] == engines[SAME_CALLS][1], "the calls are the same"
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for turn in range(n_turns):
        for name, (engine, *_) in engines.items():
            pair = (engine, base[0]) if turn % 2 else (base[0], engine)
            found = [rate(one, request(N_WARM + turn)) for one in pair]
            rates[name].append((found[1 - turn % 2], found[turn % 2]))
    return [row(name, where, rates[name], arms[name], *engines[name]) for name in engines]


def rate(engine: ReferenceEngine, asked: Request) -> float:
    completion = engine.run(asked, unheard)
    return 1 / statistics.median(b - a for a, b in pairwise(completion.token_times_s))


def row(
    name: str,
    where: str,
    rates: Sequence[tuple[float, float]],
    arm: Arm,
    engine: ReferenceEngine,
    rows_per_token: float,
    road: str,
) -> Measurement:
    """One arm beside the baseline. rates: of both, turn by turn."""
    own, base = ([pair[i] for pair in rates] for i in (0, 1))
    counters, told = engine.take_counters(), ""
    if counters.misses is not None:
        missed = counters.misses / (counters.misses + (counters.hits or 0))
        told = f", {100 * missed:.0f} % of experts missed"
    found = measured(
        name,
        statistics.median(own),
        "token/s",
        where,
        statistics.median(base),
        BASELINE,
        arm.target * statistics.median(base) if arm.target is not None else None,
        f"decoding {road}, {rows_per_token:g} rows a token{told}, median of {len(rates)} turns",
    )
    return found.model_copy(update={"ratio": ratio_of_turns(own, base)})


def ratio_of_turns(rates: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(own / other for own, other in zip(rates, base, strict=True))


def lost(found: Sequence[Measurement], arms: Sequence[str]) -> str:
    """What these arms lose on the bundled model, in the first run of the page that has them."""
    first = {m.metric: m for m in reversed(found) if m.metric in arms and m.conditions.startswith(BUNDLED)}
    assert set(first) == set(arms)
    rows = [(m.ratio, m.target / m.peer) for m in first.values() if m.ratio and m.target and m.peer]
    assert len(rows) == len(arms)
    most = max(100 * (1 - ratio) for ratio, _ in rows)
    n_missed = sum(ratio < target for ratio, target in rows)
    told = f"at most {most:.1f} %" if len(rows) > 1 else f"{most:.1f} %"
    told = told if most > 0 else "nothing"
    missed = (
        f"{n_missed} of {len(rows)} rows miss the target"
        if len(rows) > 1
        else f"target {'missed' if n_missed else 'met'}"
    )
    return f"{told} ({missed})"


def remarks(found: Sequence[Measurement]) -> str:
    """found: all rows of the page."""
    return f"""What decodes beside `dropless`, on one thread. Each row's ratio is the median over turns of its rate over
that of dropless, which decodes the same tokens right before it or right after it in each turn; `{AGAIN}` is a
second engine of the same kind, and its distance from 1 is what this way of measuring leaves to chance. Prompts of
{N_PROMPT} random tokens, {N_NEW} new ones.

A technique that says beforehand what a choice leads to decodes in one call of the kernels (*fused*), as dropless does,
and with the same calls it is to lose no more than 5 %. What more rows or more calls cost is their own price: padding is
computed, and so is each slice, with sums that are as much shorter. Where the kernels do not know the layers whole, as
those of {OLMOE}, each layer's experts are one call (*layer by layer*).

A cache decodes on the same roads: the step stops only where an expert must be brought, and plans are made when the
request has ended. Where all are hits it is to lose no more than 3 % against all experts in memory, which is what
dropless has. On the bundled model, in the first run, it loses {lost(found, HITS)}.

"Each layer planned first" (*plan by plan*) is what the same calls take where Python makes the plan before the layer is
computed, as it does for an observer of layers; it holds a norm of each layer's attention output besides.

A prediction is made between router and experts, from the state of that layer. With all experts in memory, and copies
that are only counted, it is part of the step, which stays one call (*fused*). It is to lose no more than 5 % too:
"guessed" by the next router from this layer's own input (s) or from the quasi-hidden state (q), or by the estimator
of the bundled model's profile. A guess that is executed may lead to other tokens. On the bundled model, in the first
run, routers lose {lost(found, [HINTED, PREDICTED, PREDICTED_Q])}, and the
estimator {lost(found, [ESTIMATED])}. Its three guesses read 0.34 MB of weights in
fp16, and read 0.68 MB in fp32 before, beside 6.3 MB that the model reads for a token; they add a tenth to its
multiplications.

Where the kernels do not know the layers whole (*plan by plan*), as where each layer is planned first, torch guesses
on the state of each layer, and times of one token hold the making of that guess and of the plan. So did all guesses
in the run on the Intel processor, which is older. Where experts are copied, the step stops in each layer too, and the
kernels guess before it does."""


def loader(source: str, dtype: torch.dtype) -> Loads:
    """Loads once each way."""
    return cache_calls(lambda as_filed: load_checkpoint(source, dtype, experts_as_filed=as_filed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "of each arm on the large model; small ones take five times as many"
    parser.add_argument("--turns", type=int, default=TURNS, help=words)
    n_turns = parser.parse_args().turns
    torch.set_num_threads(1)
    found = compared(f"{BUNDLED}, f32", loader(BUNDLED, torch.float32), "fp32", 5 * n_turns)
    with tempfile.TemporaryDirectory() as folder:
        write_model(MADE, Path(folder))
        found += compared(f"{MADE}, bf16", loader(folder, torch.bfloat16), "bf16", n_turns)
    with tempfile.TemporaryDirectory() as folder:
        write_family(Path(folder), CASES["olmoe"])
        copy_tokenizer(Path(folder))
        found += compared(f"{OLMOE}, f32", loader(folder, torch.float32), "fp32", 5 * n_turns)
    rows = beside_other_machines(PAGE, found)
    write_page(PAGE, TITLE, rows, remarks(rows))


if __name__ == "__main__":
    main()
