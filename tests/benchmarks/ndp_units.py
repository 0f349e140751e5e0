"""What of the experts a GPU beside NDP units computes, and how often what a prompt chose is chosen again.

python -m tests.benchmarks.ndp_units

The bundled model on prompts of 1024 tokens in chunks of 256, and 32 decoded tokens each. Decisions are by the prices of
sheet rtx5080-ndp, at the size of Phi-3.5-MoE. Draws the figure of docs/techniques/ndp.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from tests.benchmarks.host_units import PRICED, draw, measurements
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.benchmarks.technique_rows import CHUNK, MODEL, N_DECODED, N_PROMPTS, PAGES, prompts_of
from tests.run_builders import generation

ARMS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "ndp-tp": ("ndp-tp", {}),
    "ndp-tp-lb": ("ndp-tp-lb", PRICED),
    "ndp-tp-lb, 2 units": ("ndp-tp-lb", PRICED | {"ndps": 2}),
    "ndp-tp-pre, 2 slots": ("ndp-tp-pre", PRICED | {"slots": 2}),
    "ndp, 1 slot": ("ndp", PRICED | {"slots": 1}),
    "ndp, 2 slots": ("ndp", PRICED | {"slots": 2}),
    "ndp, 4 slots": ("ndp", PRICED | {"slots": 4}),
    "ndp, 8 slots": ("ndp", PRICED | {"slots": 8}),
}


class Columns:
    """A `StepObserver` that counts columns of the experts of plans, by phase and part."""

    def __init__(self, width: int) -> None:
        self._width = width
        self.found: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}

    def step(self, n_tokens: int, kv_length: int, phase: str, plans: Sequence[DispatchPlan | None]) -> None:
        for plan in plans:
            if plan is None:
                continue
            passing = {transfer.expert for transfer in plan.transfers if not transfer.stays}
            for call in plan.calls:
                first, end = call.kind.width or (0, self._width)
                part = "fetched" if call.experts[0] in passing else "where it lay"
                self.found[phase][part if call.unit == "gpu" else "on NDP units"] += end - first


def ran(name: str, parameters: Mapping[str, object], checkpoint: Checkpoint, asked: Sequence[list[int]]) -> tuple[
    Mapping[str, Counter[str]], float | None
]:  # fmt: skip
    """What was computed where, and of the experts that decoding chose, %, those that lay on the GPU."""
    engine = ReferenceEngine(checkpoint, preset_parameters(name).model_validate(parameters), CHUNK, threads=1)
    assert checkpoint.config.moe is not None
    observer = Columns(checkpoint.config.moe.expert_width)
    engine.observer = observer
    for number, prompt in enumerate(asked):
        engine.run(generation(str(number), prompt, 1 + N_DECODED), unheard)
    counted = engine.take_counters()
    if counted.hits is None or counted.misses is None:
        return observer.found, None
    return observer.found, 100 * counted.hits / (counted.hits + counted.misses)


def main() -> None:
    checkpoint = load_checkpoint(MODEL, torch.float32)
    asked, _ = prompts_of(checkpoint)
    found: list[Measurement] = []
    drawn: dict[str, Mapping[str, Counter[str]]] = {}
    for arm, (name, parameters) in ARMS.items():
        drawn[arm], hit = ran(name, parameters, checkpoint, asked)
        found += measurements(name, arm.removeprefix(f"{name}, ").replace(name, "6 units"), drawn[arm])
        if hit is not None:
            found.append(measured("experts that decoding chose and that lay on the GPU", hit, "%", arm))
    draw("columns of experts", drawn, PAGES / "ndp.svg")
    remarks = (
        f"The bundled model (16 experts in each of 4 layers, top 2) on {N_PROMPTS} prompts of RULER's multi-key"
        f" needles, 1024 tokens in chunks of {CHUNK}, and {N_DECODED} decoded tokens each; 6 units where none are"
        " named. Counted in columns of experts, so the same on every machine. What the GPU computes is decided by the"
        " prices of sheet rtx5080-ndp at the size of Phi-3.5-MoE. Slots are experts of each layer that the GPU keeps;"
        " by chance x of 16 would be found there."
    )
    write_page("ndp-units", "What a GPU beside NDP units computes", found, remarks)


if __name__ == "__main__":
    main()
