"""What capacity, tiers and narrow weights do to the answers of the bundled model, and how it routes.

python -m tests.benchmarks.tiny_arms [--out runs/tiny-arms]

Runs plans/tiny-arms.toml with the command line, so the folder holds the whole run with its report, and what is there
already is not run again. Then long contexts without any technique, and the routing of each task.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd
import torch

from engines.base import unheard
from engines.model.checkpoints import Checkpoint, load_checkpoint
from engines.profile import Profile
from engines.profiling import ChoiceCounts
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from harness.schema import WORKLOAD
from results.accuracy_energy import accuracy_energy
from results.popularity import overlap_at_k
from results.runs import RunData
from results.store import Store
from results.tables import tidy
from results.units import format_number
from tests.benchmarks.measurement import FOLDER, Measurement, measured, write_page
from workloads.base import Workload

NAME = "tiny-arms"
MODEL = "bundled:tiny-qwen3-moe"
PLAN = Path(__file__).parents[2] / "plans" / "tiny-arms.toml"
REFERENCE = "dropless"
SCORES = {
    "ruler_niah_single_2": ("string_match_all", "one needle, 2048"),
    "ruler_niah_multikey_1": ("string_match_all", "four needles, 1024"),
    "boolq": ("acc", "yes or no"),
    "hellaswag": ("acc", "endings"),
}
"""Workload -> its metric, and what the tables call it."""
ROUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "one needle": ("ruler_niah_single_2", {"length": 1024, "limit": 24}),
    "four needles": ("ruler_niah_multikey_1", {"length": 1024, "limit": 24}),
    "yes or no": ("boolq", {"data": "generated", "limit": 48}),
    "endings": ("hellaswag", {"data": "generated", "limit": 24, "num_fewshot": 2}),
    "chat": ("sharegpt", {"data": "generated", "limit": 24, "max_new_tokens": 32}),
}
N_PROFILED = 16
"""Prompts of the train split, or of another seed, that the offline profile is made of."""
TOP = 4
"""K of Overlap@K: a quarter of the experts, and as many as two tokens choose."""
LENGTHS = (512, 1024, 2048, 4096)
N_LONG = 50
SIGNIFICANT = 0.05
ONE_TIER = "one tier, "
"""Begins the names of arms in which all experts hold as much; the multiple of their mean load follows."""


# --- the arms ---------------------------------------------------------------------------------------------------------


def run_plan(plan: Path, out: Path) -> RunData:
    """The run of a plan in `out`, made or completed."""
    joulebench = Path(sys.executable).with_name("joulebench")
    resume = ["--resume"] if Store.holds_run(out) else []
    subprocess.run([joulebench, "run", plan, "--out", out, *resume], check=True)
    with Store.view(out) as store:
        return store.data()


def arm_rows(table: pd.DataFrame) -> list[Measurement]:
    """Accuracy of each arm and task beside the reference's, with the paired test."""
    found = []
    for workload, (metric, what) in SCORES.items():
        own = table[(table["workload"] == workload) & (table["quantity"] == metric)]
        reference = float(own[own["engine"] == REFERENCE]["value"].iloc[0])
        for row in own.to_dict("records"):
            change = ""
            if row["engine"] != REFERENCE:
                change = f", {row['n_changed']} of {row['n_pairs']} samples changed, {row['test']} p = {row['p']:.2g}"
            found.append(
                measured(
                    what,
                    100 * row["value"],
                    "%",
                    row["engine"],
                    100 * reference,
                    REFERENCE,
                    note=f"standard error {100 * row['standard_error']:.1f} %{change}",
                )
            )
    return found


def arms_table(table: pd.DataFrame) -> str:
    """Markdown: a row per arm, a column per task; what differs from the reference by a paired test is bold."""
    header = ["arm", "dropped %", "padded %", *(f"{what} %" for _, what in SCORES.values())]
    header += ["perplexity", "KL, nat", "same top 1, %"]
    lines = [_row(header), "|" + "---|" * len(header)]
    for engine in dict.fromkeys(table["engine"]):
        own = table[table["engine"] == engine]
        asked = own[own["workload"].isin(SCORES)]
        drops, pads = (asked[asked["quantity"] == name]["value"].dropna() for name in ("drop_rate", "pad_rate"))
        cells = [engine, *(format_number(rates.mean()) if len(rates) else "" for rates in (drops, pads))]
        for workload, (metric, _) in SCORES.items():
            row = own[(own["workload"] == workload) & (own["quantity"] == metric)].iloc[0]
            text = f"{100 * row['value']:.1f} ± {100 * row['standard_error']:.1f}"
            cells.append(f"**{text}**" if pd.notna(row["p"]) and row["p"] < SIGNIFICANT else text)
        for metric, scale in (("perplexity", 1), ("kl_nats", 1), ("same_top1", 100)):
            values = own[(own["workload"] == "fidelity") & (own["quantity"] == metric)]["value"].dropna()
            cells.append(format_number(scale * float(values.iloc[0])) if len(values) else "")
        lines.append(_row(cells))
    return "\n".join(lines)


def curves(table: pd.DataFrame, path: Path) -> None:
    """SVG: accuracy of each task against the capacity of one tier, and against what any arm dropped in it."""
    import altair as alt

    points = []
    for (engine, workload), own in table.groupby(["engine", "workload"]):
        if workload not in SCORES:
            continue
        metric, what = SCORES[str(workload)]
        values = own.set_index("quantity")["value"]
        dropped = values.get("drop_rate")
        if metric in values and dropped is not None and pd.notna(dropped):
            multiple = str(engine).removeprefix(ONE_TIER).removesuffix("x")
            capacity = float(multiple) if str(engine).startswith(ONE_TIER) else None
            point = {"task": what, "capacity": capacity, "dropped %": dropped, "accuracy %": 100 * values[metric]}
            points.append(point)
    base = alt.Chart(pd.DataFrame(points)).encode(
        y=alt.Y("accuracy %:Q", scale=alt.Scale(domain=[0, 100])), color=alt.Color("task:N", title=None)
    )
    axes = (
        alt.X("capacity:Q", title="capacity of an expert, x its mean load", scale=alt.Scale(type="log", base=2)),
        alt.X("dropped %:Q", title="routed pairs dropped, %"),
    )
    halves = []
    for x, drawn in zip(axes, (base.transform_filter("datum.capacity != null"), base), strict=True):
        marks = drawn.encode(x=x)
        points_drawn = marks.mark_point(filled=True, size=60).encode(shape=alt.Shape("task:N", title=None))
        halves.append((marks.mark_line(opacity=0.4) + points_drawn).properties(width=330, height=300))
    alt.hconcat(*halves, title="What capacity does to the bundled model").save(path)


# --- long contexts ----------------------------------------------------------------------------------------------------


def long_rows(checkpoint: Checkpoint) -> Iterator[Measurement]:
    """Needles found at several lengths without any technique; the model saw 1024 tokens at most."""
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    for task, what in (("ruler_niah_single_2", "one needle"), ("ruler_niah_multikey_1", "four needles")):
        for length in LENGTHS:
            workload = _workload(task, {"length": length, "limit": N_LONG, "seed": 1})
            requests = workload.requests(checkpoint.tokenizer, engine.max_length)
            completions = [engine.run(request, unheard) for request in requests]
            score = next(s for s in workload.score(requests, completions) if s.sample_id is None)
            yield measured(what, 100 * score.value, "%", f"{length} tokens", note=f"{N_LONG} samples")


# --- routing ----------------------------------------------------------------------------------------------------------


def routings(checkpoint: Checkpoint) -> dict[str, tuple[Profile, Profile]]:
    """Task -> (profiled offline, seen at run time)."""
    engine = ReferenceEngine(checkpoint, DroplessParameters())
    found = {}
    for task, (name, parameters) in ROUTED.items():
        workload = _workload(name, parameters)
        profiled, seen = ChoiceCounts(), ChoiceCounts()
        requests = list(workload.requests(checkpoint.tokenizer, engine.max_length))
        prompts = workload.calibration_prompts(checkpoint.tokenizer, engine.max_length, N_PROFILED)
        template = requests[0].model_copy(update={"kind": "generate", "continuation_ids": (), "max_new_tokens": 1})
        offline = [template.model_copy(update={"prompt_ids": tuple(prompt)}) for prompt in prompts]
        for counts, asked in ((profiled, offline), (seen, requests)):
            engine.layer_observer = counts
            for request in asked:
                engine.run(request, unheard)
        assert checkpoint.config.moe is not None
        top_k = checkpoint.config.moe.top_k
        found[task] = (profiled.profile(top_k, len(offline)), seen.profile(top_k, len(requests)))
    return found


def imbalance_rows(found: Mapping[str, tuple[Profile, Profile]]) -> Iterator[Measurement]:
    for task, (_, seen) in found.items():
        for layer in seen.tokens_per_expert:
            yield measured("imbalance", seen.imbalance(layer), "x mean", f"{task}, layer {layer}")


def overlap_rows(found: Mapping[str, tuple[Profile, Profile]]) -> Iterator[Measurement]:
    """Median over layers, of the profile of one task with what another was seen to choose."""
    for one, (profiled, _) in found.items():
        for other, (_, seen) in found.items():
            before = profiled.tokens_per_expert
            overlaps = [overlap_at_k(before[layer], own, TOP) for layer, own in seen.tokens_per_expert.items()]
            yield measured(f"Overlap@{TOP}", median(overlaps), "", f"profiled on {one}, seen in {other}")


def _workload(name: str, parameters: Mapping[str, Any]) -> Workload:
    spec = WORKLOAD.read({"name": name, **parameters})
    return spec.build(None, allow_code=False)


# --- the page ---------------------------------------------------------------------------------------------------------


def matrix(rows: Sequence[Measurement], corner: str) -> str:
    """Markdown of rows whose conditions are "row, column"."""
    names = [tuple(m.conditions.split(", ")) for m in rows]
    columns = list(dict.fromkeys(column for _, column in names))
    values = dict(zip(names, rows, strict=True))
    lines = [_row([corner, *columns]), "|" + "---|" * (1 + len(columns))]
    for own in dict.fromkeys(row for row, _ in names):
        lines.append(_row([own, *(format_number(values[own, column].ours) for column in columns)]))
    return "\n".join(lines)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


REMARKS = """The bundled model, six million parameters trained on generated text (`joulebench train-tiny`), asked items
that it was never trained on. Reference: dropless in fp32, which equals the oracle. Bold: differs from it by a paired
test (McNemar's exact test, p < 0.05). Dropped and padded: means over the tasks. KL and top 1 are against the reference
on generated prose. The base of a tier is the mean load of an expert, 32 rows of a chunk of 256; capacities are
multiples of 4. One needle is asked at twice the length that training showed.

{arms}

![Accuracy against capacity and dropped pairs](tiny-arms.svg)

Routing imbalance, r = the most chosen expert's tokens over the mean's, per task and layer:

{imbalance}

Overlap@{top}: of the {top} experts that an offline profile of one task found most chosen, the share that is among the
{top} most chosen of another task at run time; median over layers:

{overlap}

Every figure, and needles at other lengths (trained on 1024 tokens at most):"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs") / NAME)
    parsed = parser.parse_args(arguments)
    run = run_plan(PLAN, parsed.out)
    table = accuracy_energy(run, tidy(run))
    checkpoint = load_checkpoint(MODEL, torch.float32)
    found = routings(checkpoint)
    arms, long = arm_rows(table), list(long_rows(checkpoint))
    imbalance, overlap = list(imbalance_rows(found)), list(overlap_rows(found))
    curves(table, FOLDER / f"{NAME}.svg")
    remarks = REMARKS.format(
        arms=arms_table(table),
        imbalance=matrix(imbalance, "task"),
        overlap=matrix(overlap, "profile, task"),
        top=TOP,
    )
    write_page(NAME, "What the arms do to the bundled model", [*arms, *long, *imbalance, *overlap], remarks)


if __name__ == "__main__":
    main()
