"""What each technique makes of the same routing: rows computed, padding, drops, calls and loads, on the bundled model.

python -m tests.benchmarks.technique_rows

Prompts of 1024 tokens in chunks of 256, and 32 decoded tokens each; profiles come from other prompts. Draws a small
figure a technique, for its page in docs/techniques. The last rows price the prompts as Phi-3.5-MoE on sheet m2-ultra:
what the parameters of residency come to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from devices.models.sheet import load_sheet
from devices.models.timeline import Timeline
from engines.base import unheard
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.pricing.costs import SheetCosts
from engines.pricing.modelled import ModelledEngine
from engines.pricing.published_shapes import PHI_3_5_MOE
from engines.pricing.shapes import sizes_of
from engines.reference import ReferenceEngine
from engines.techniques.presets import preset_parameters
from harness.schema import WORKLOAD
from results.counters import EngineCounters
from tests.benchmarks.measurement import FOLDER, Measurement, measured, write_page
from tests.run_builders import generation
from tests.techniques import that_plan_alone

MODEL = "bundled:tiny-qwen3-moe"
PAGES = FOLDER.parent / "techniques"
CHUNK, N_PROMPTS, N_DECODED = 256, 4, 32
PARAMETERS: Mapping[str, Mapping[str, object]] = {"blockwise": {"block_size": 64}}
"""Where the defaults are meant for larger steps."""


DRAWN_ELSEWHERE = ("duplex",)
"""By `host_units`: its rows are those of dropless, on two units."""
PRICED: Sequence[tuple[str, Mapping[str, object]]] = (
    ("npumoe-tg", {}),
    ("npumoe", {}),
    ("npumoe", {"objective": "joules"}),
    ("npumoe", {"overlap": True}),
)
SHEET = "m2-ultra"
PRICED_CHUNKS = (256, 64)
"""At the smaller one, cold graphs are worth no launch on the NPU."""
PARTS = ("kept", "padding", "dropped")


class Rows(NamedTuple):
    """What a technique did in the two phases."""

    prefill: EngineCounters
    decode: EngineCounters


def prompts_of(checkpoint: Checkpoint) -> tuple[list[list[int]], list[list[int]]]:
    """(asked, for calibration)."""
    spec = WORKLOAD.read({"name": "ruler_niah_multikey_1", "length": 1024, "limit": N_PROMPTS})
    workload = spec.build(None, allow_code=False)
    length = checkpoint.config.max_length
    asked = [list(request.prompt_ids) for request in workload.requests(checkpoint.tokenizer, length)]
    return asked[:N_PROMPTS], [list(p) for p in workload.calibration_prompts(checkpoint.tokenizer, length, 8)]


def rows_of(name: str, checkpoint: Checkpoint, asked: Sequence[list[int]], learnt: Sequence[list[int]]) -> Rows:
    parameters = preset_parameters(name).model_validate(PARAMETERS.get(name, {}))
    engine = ReferenceEngine(checkpoint, parameters, CHUNK, threads=1)
    if engine.needs_calibration:
        engine.calibrate(learnt)
    found = []
    for n_new in (1, 1 + N_DECODED):
        for number, prompt in enumerate(asked):
            engine.run(generation(str(number), prompt, n_new), unheard)
        found.append(engine.take_counters())
    prefill, both = found
    fields = EngineCounters.model_fields
    decode = {f: getattr(both, f) - getattr(prefill, f) for f in fields if isinstance(getattr(both, f), int)}
    return Rows(prefill, EngineCounters(**decode))


def measurements(name: str, rows: Rows) -> list[Measurement]:
    found = []
    for phase, counters in rows._asdict().items():
        pairs = counters.routed_pairs
        shares = (
            ("rows computed", counters.computed_rows / pairs, "a routed pair"),
            ("of the rows, padding", 100 * counters.padded_rows / counters.computed_rows, "%"),
            ("pairs dropped", 100 * counters.dropped_pairs / pairs, "%"),
            ("calls", 1000 * counters.expert_calls / pairs, "a thousand pairs"),
            ("loads of an expert's weights", 1000 * counters.weight_loads / pairs, "a thousand pairs"),
        )
        found += [measured(metric, value, unit, f"{name}, {phase}") for metric, value, unit in shares]
    return found


def priced(
    checkpoint: Checkpoint, asked: Sequence[list[int]], learnt: Sequence[list[int]], chunk: int
) -> list[Measurement]:
    """Prefill of all prompts, at the sheet's prices."""
    sheet, sizes, found = load_sheet(SHEET), sizes_of(PHI_3_5_MOE), list[Measurement]()
    assert sizes is not None
    for name, changed in PRICED:
        parameters = preset_parameters(name).model_validate(changed)
        reference = ReferenceEngine(checkpoint, parameters, chunk, sizes=sizes, costs=SheetCosts(sheet, sizes))
        timeline = Timeline(sheet)
        engine = ModelledEngine(reference, timeline, parameters.backbone, PHI_3_5_MOE)
        engine.calibrate(learnt)
        for number, prompt in enumerate(asked):
            engine.run(generation(str(number), prompt, 1), unheard)
        n_tokens = sum(map(len, asked))
        joules = sum(timeline.energy_j(component) for component in sheet.components)
        arm = ", ".join([name, *(f"{key} = {json.dumps(value)}" for key, value in changed.items())])
        conditions = f"{arm}; chunk {chunk}, phi-3.5-moe on {SHEET}"
        found += [
            measured("prefill, modelled", timeline.now_s() / len(asked), "s a prompt", conditions),
            measured("energy of prefill, modelled", 1e3 * joules / n_tokens, "mJ a token", conditions),
        ]
    return found


def draw(name: str, rows: Rows, path: Path) -> None:
    """Two bars: what became of the routed pairs, by phase, and the padding beside them."""
    import altair as alt

    values = []
    for phase, counters in rows._asdict().items():
        pairs = counters.routed_pairs
        parts = (pairs - counters.dropped_pairs, counters.padded_rows, counters.dropped_pairs)
        for order, (part, n_rows) in enumerate(zip(PARTS, parts, strict=True)):
            values.append({"phase": phase, "part": part, "rows": n_rows / pairs, "order": order})
    bars = alt.Chart(alt.Data(values=values), width=480, height=60).mark_bar(stroke="black", strokeWidth=0.5)
    chart = bars.encode(
        x=alt.X("rows:Q", title="rows for each routed pair; dropped pairs have none"),
        y=alt.Y("phase:N", title=None, sort=["prefill", "decode"]),
        color=alt.Color(
            "part:N", title=None, scale=alt.Scale(domain=list(PARTS), range=["#4878a8", "#d0d0d0", "#ffffff"])
        ),
        order="order:Q",
    )
    chart.properties(title=name).save(path)


def main() -> None:
    checkpoint = load_checkpoint(MODEL, torch.float32)
    asked, learnt = prompts_of(checkpoint)
    found: list[Measurement] = []
    PAGES.mkdir(exist_ok=True)
    for name in that_plan_alone():
        if name in DRAWN_ELSEWHERE:
            continue
        rows = rows_of(name, checkpoint, asked, learnt)
        found += measurements(name, rows)
        draw(name, rows, PAGES / f"{name}.svg")
    for chunk in PRICED_CHUNKS:
        found += priced(checkpoint, asked, learnt, chunk)
    remarks = (
        f"The bundled model on {N_PROMPTS} prompts of RULER's multi-key needles, 1024 tokens in chunks of {CHUNK}, and"
        f" {N_DECODED} decoded tokens each. Counted, so the same on every machine. `blockwise` has blocks of 64 rows"
        f" here; everything else is as it comes. What is modelled is priced on {SHEET}, which is no machine of"
        " ours; the sheet states no error of its times and joules."
    )
    write_page("technique-rows", "What techniques compute", found, remarks)


if __name__ == "__main__":
    main()
