"""What a technique's calls cost a decoded token, and what the road costs that computes them.

python -m tests.benchmarks.decode_roads [--turns 21]

Every arm decodes the same tokens of one set of weights, one turn after the other, so that a busy neighbour slows all
alike; the order of arms moves on by one each turn. A turn's figure is the median of its inter-token times. A row's
ratio is the median over turns of the arm's rate over dropless' in the same turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.observers import SparseLayerStep, StepPhase
from engines.reference import ReferenceEngine
from engines.techniques.base import TechniqueParameters
from engines.techniques.presets import DroplessParameters
from results.records import Request
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.benchmarks.race_models import MODELS, VOCABULARY, write_model
from tests.fakes.families import CASES, write_family
from tests.techniques import NpumoeT

PAGE = "decode-roads"
BUNDLED = "bundled:tiny-qwen3-moe"
MADE = next(iter(MODELS))
OLMOE = "OLMoE of 3 layers, width 64"
N_PROMPT, N_NEW = 32, 65
TURNS = 21
BASELINE, AGAIN = "dropless", "dropless again"
SAME_CALLS = "static calls of 1 row"
PLANNED = ", each layer planned first"
TARGET = 1 / 1.05
"""Of dropless' rate, for the same calls."""


def of_rows(n_rows: int) -> TechniqueParameters:
    """A graph of n rows for each chosen expert."""
    return NpumoeT(decode_rows=n_rows, calibration_prompts=1)


@dataclass(frozen=True)
class Arm:
    """planned: each layer's plan is made before it is computed, as for an observer of layers, who costs a norm of each
    layer's attention output besides."""

    technique: TechniqueParameters
    planned: bool = False


ARMS: Mapping[str, Arm] = {
    BASELINE: Arm(DroplessParameters()),
    AGAIN: Arm(DroplessParameters()),
    SAME_CALLS: Arm(of_rows(1)),
    "static calls of 4 rows": Arm(of_rows(4)),
    "static calls of 32 rows": Arm(of_rows(32)),
    BASELINE + PLANNED: Arm(DroplessParameters(), planned=True),
    SAME_CALLS + PLANNED: Arm(of_rows(1), planned=True),
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


def readied(checkpoint: Checkpoint, arm: Arm) -> tuple[ReferenceEngine, float, str]:
    """A warm engine, the rows that it computes for a token, and its road."""
    engine = ReferenceEngine(checkpoint, arm.technique, threads=1)
    if engine.needs_calibration:
        engine.calibrate([request(0).prompt_ids])
    engine.layer_observer = Watcher() if arm.planned else None
    engine.observer = seen = DecodedRows()
    engine.run(request(0), unheard)
    engine.observer = None
    return engine, statistics.mean(seen.rows), str(engine.take_road().decoding)


def compared(where: str, checkpoint: Checkpoint, n_turns: int) -> list[Measurement]:
    engines = {name: readied(checkpoint, arm) for name, arm in ARMS.items()}
    assert engines[BASELINE][1] == engines[SAME_CALLS][1], "the calls are the same"
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(n_turns):
        asked, names = request(1 + turn), list(engines)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            completion = engines[name][0].run(asked, unheard)
            rates[name].append(1 / statistics.median(b - a for a, b in pairwise(completion.token_times_s)))
    return [row(name, where, rates[name], rates[BASELINE], *engines[name][1:]) for name in engines if name != BASELINE]


def row(
    name: str, where: str, rates: Sequence[float], base: Sequence[float], rows_per_token: float, road: str
) -> Measurement:
    """One arm beside the baseline; a target where the calls and the road are the same."""
    found = measured(
        name,
        statistics.median(rates),
        "token/s",
        where,
        statistics.median(base),
        BASELINE,
        TARGET * statistics.median(base) if name == SAME_CALLS else None,
        f"decoding {road}, {rows_per_token:g} rows a token, median of {len(rates)} turns",
    )
    return found.model_copy(update={"ratio": ratio_of_turns(rates, base)})


def ratio_of_turns(rates: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(own / other for own, other in zip(rates, base, strict=True))


REMARKS = f"""What decodes beside `dropless`, on one thread. Each row's ratio is the median over turns of its rate over
that of dropless in the same turn; `{AGAIN}` is a second engine of the same kind, and its distance from 1 is what
this way of measuring leaves to chance. Prompts of {N_PROMPT} random tokens, {N_NEW} new ones.

A technique that says beforehand what a choice leads to decodes in one call of the kernels, as dropless does, and with
the same calls it is to lose no more than 5 %. What more rows cost is their own price: padding is computed. Where the
kernels do not know the layers whole, as those of {OLMOE}, each layer's experts are one call. "Each layer planned
first" is what the same calls take where Python makes the plan before the layer is computed, as it once did for every
technique but dropless, and does for an observer of layers; it holds a norm of each layer's attention output besides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS, help="of each arm")
    n_turns = parser.parse_args().turns
    torch.set_num_threads(1)
    found = compared(f"{BUNDLED}, f32", load_checkpoint(BUNDLED, torch.float32), n_turns)
    with tempfile.TemporaryDirectory() as folder:
        write_model(MADE, Path(folder))
        made = load_checkpoint(folder, torch.bfloat16)
        found += compared(f"{MADE}, bf16", made, n_turns)
    with tempfile.TemporaryDirectory() as folder:
        write_family(Path(folder), CASES["olmoe"])
        found += compared(f"{OLMOE}, f32", load_checkpoint(folder, torch.float32), n_turns)
    write_page(PAGE, "What a technique's calls cost a decoded token", found, REMARKS)


if __name__ == "__main__":
    main()
