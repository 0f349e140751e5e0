"""Where the baselines of GPU-NDP scheduling compute the same routing, and what they fetch, on the bundled model.

python -m tests.benchmarks.host_units

Prompts of 1024 tokens in chunks of 256, and 32 decoded tokens each; profiles come from other prompts. Decisions are by
the prices of sheet rtx5080-ndp, at the size of Phi-3.5-MoE. Draws a small figure a technique, for its page in
docs/techniques.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from engines.base import unheard
from engines.dispatch import DispatchPlan
from engines.expert_memory import ExpertMemory
from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from tests.benchmarks.measurement import Measurement, measured, write_page
from tests.benchmarks.technique_rows import CHUNK, MODEL, N_DECODED, N_PROMPTS, PAGES, prompts_of
from tests.run_builders import generation

PRICED: Mapping[str, object] = {"as_shape": "phi-3.5-moe"}
ARMS: Mapping[str, Mapping[str, tuple[str, Mapping[str, object]]]] = {
    "moe-ondemand": {
        "8 stay": ("moe-ondemand", {"slots": 8}),
        "4 stay": ("moe-ondemand", {"slots": 4}),
        "1 stays": ("moe-ondemand", {"slots": 1}),
    },
    "fiddler": {
        "sum": ("fiddler", PRICED),
        "max": ("fiddler", PRICED | {"objective": "max"}),
        "sum, 16 on the GPU": ("fiddler", PRICED | {"gpu_slots": 16}),
        "max, 16 on the GPU": ("fiddler", PRICED | {"objective": "max", "gpu_slots": 16}),
    },
    "monde": {
        "6 units": ("monde", PRICED),
        "2 units": ("monde", PRICED | {"ndps": 2}),
        "6 units, factor": ("monde", PRICED | {"h": "factor"}),
        "6 units, 16 on the GPU": ("monde", PRICED | {"gpu_slots": 16}),
    },
    "duplex": {"2 units": ("duplex", PRICED)},
}
PARTS = ("where it lay", "fetched", "on the CPU", "on NDP units")
"""Of the experts that a layer called. The first two: on the GPU, or where moe-ondemand computes."""


class Called:
    """A `StepObserver` that counts the experts of plans, by phase and part."""

    def __init__(self) -> None:
        self.found: dict[str, Counter[str]] = {"prefill": Counter(), "decode": Counter()}

    def step(self, n_tokens: int, kv_length: int, phase: str, plans: Sequence[DispatchPlan | None]) -> None:
        for plan in plans:
            if plan is None:
                continue
            fetched = {transfer.expert for transfer in plan.transfers}
            alone = plan.calls.kinds[0].unit == "cpu" and len(plan.calls.kinds) == 1
            for call in plan.calls:
                (expert,) = call.experts
                if call.unit.startswith("ndp"):
                    part = "on NDP units"
                elif call.unit == "cpu" and not alone:
                    part = "on the CPU"
                else:
                    part = "fetched" if expert in fetched else "where it lay"
                self.found[phase][part] += 1


def called_of(
    name: str, parameters: Mapping[str, object], asked: Sequence[list[int]], learnt: Sequence[list[int]]
) -> dict[str, Counter[str]]:
    technique = preset_parameters(name).model_validate(parameters)
    checkpoint = load_checkpoint(MODEL, torch.float32, experts_as_filed=technique.loads_from_file)
    engine = ReferenceEngine(checkpoint, technique, CHUNK, threads=1, expert_memory=ExpertMemory())
    if engine.needs_calibration:
        engine.calibrate(learnt)
    observer = Called()
    engine.observer = observer
    for number, prompt in enumerate(asked):
        engine.run(generation(str(number), prompt, 1 + N_DECODED), unheard)
    return observer.found


def measurements(name: str, arm: str, found: Mapping[str, Counter[str]]) -> list[Measurement]:
    return [
        measured(f"experts called {part}", 100 * counted[part] / counted.total(), "%", f"{name}, {arm}; {phase}")
        for phase, counted in found.items()
        for part in PARTS
        if counted[part]
    ]


def draw(name: str, arms: Mapping[str, Mapping[str, Counter[str]]], path: Path) -> None:
    """A bar for each arm and phase: where the experts were computed that layers called."""
    import altair as alt

    values = [
        {"arm": f"{arm}, {phase}", "part": part, "share": 100 * counted[part] / counted.total(), "order": order}
        for arm, found in arms.items()
        for phase, counted in found.items()
        for order, part in enumerate(PARTS)
    ]
    shown = [part for part in PARTS if any(v["share"] for v in values if v["part"] == part)]
    colours = dict(zip(PARTS, ("#4878a8", "#e0a060", "#d0d0d0", "#80b080"), strict=True))
    bars = alt.Chart(alt.Data(values=[v for v in values if v["part"] in shown]), width=480, height=alt.Step(18))
    chart = bars.mark_bar(stroke="black", strokeWidth=0.5).encode(
        x=alt.X("share:Q", title="% of the experts that a layer called in a step", scale=alt.Scale(domain=[0, 100])),
        y=alt.Y("arm:N", title=None, sort=list(dict.fromkeys(str(v["arm"]) for v in values))),
        color=alt.Color("part:N", title=None, scale=alt.Scale(domain=shown, range=[colours[part] for part in shown])),
        order="order:Q",
    )
    chart.properties(title=name).save(path)


def main() -> None:
    asked, learnt = prompts_of(load_checkpoint(MODEL, torch.float32))
    found: list[Measurement] = []
    for name, arms in ARMS.items():
        counted = {arm: called_of(preset, own, asked, learnt) for arm, (preset, own) in arms.items()}
        for arm, own in counted.items():
            found += measurements(name, arm, own)
        draw(name, counted, PAGES / f"{name}.svg")
    remarks = (
        f"The bundled model (16 experts in each of 4 layers, top 2) on {N_PROMPTS} prompts of RULER's multi-key"
        f" needles, 1024 tokens in chunks of {CHUNK}, and {N_DECODED} decoded tokens each. Counted, so the same on"
        " every machine. Where experts run is decided by the prices of sheet rtx5080-ndp at the size of Phi-3.5-MoE;"
        " moe-ondemand asks no price. Of `moe-ondemand`, experts that stay are of each layer; of the others, those on"
        " the GPU are of all layers."
    )
    write_page("host-units", "Where the baselines of GPU-NDP scheduling compute", found, remarks)


if __name__ == "__main__":
    main()
