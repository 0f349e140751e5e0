"""How the bundled model was trained, from the log beside it, and what it can do on items that it was never trained on.

python -m tests.benchmarks.tiny_training
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from engines.base import unheard
from engines.model.checkpoints import BUNDLED_FOLDER, load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from harness.schema import WORKLOAD
from tests.benchmarks.measurement import FOLDER, Measurement, measured, write_page

NAME = "tiny-training"
LOG = BUNDLED_FOLDER / "tiny-qwen3-moe" / "training.csv"
ASKED: tuple[tuple[str, str, dict[str, Any], float | None], ...] = (
    ("ruler_niah_single_2", "string_match_all", {"length": 1024, "limit": 200}, 99),
    ("ruler_niah_multikey_1", "string_match_all", {"length": 1024, "limit": 200}, 90),
    ("ruler_niah_single_2", "string_match_all", {"length": 4096, "limit": 50}, None),
    ("ruler_niah_multikey_1", "string_match_all", {"length": 4096, "limit": 50}, None),
    ("boolq", "acc", {"data": "generated", "num_fewshot": 2, "limit": 400}, 85),
    ("boolq", "acc", {"data": "generated", "num_fewshot": 0, "limit": 400}, 85),
    ("hellaswag", "acc", {"data": "generated", "num_fewshot": 2, "limit": 400}, 85),
    ("hellaswag", "acc", {"data": "generated", "num_fewshot": 0, "limit": 400}, 85),
)
"""(workload, its metric, parameters, least percent aimed at)."""
SEED = 7
"""Of the samples: another one than plans use by default."""


def curve(log: pd.DataFrame, path: Path) -> None:
    """SVG: both losses against the tokens seen."""
    import altair as alt

    losses = {"answer_loss": "answers", "other_loss": "other tokens"}
    points = log.rename(columns=losses).melt(["tokens", "length"], list(losses.values()), "of", "nat")
    points["tokens"] /= 1e6
    chart = alt.Chart(points).encode(x=alt.X("tokens:Q", title="tokens seen, millions"))
    lines = chart.mark_line().encode(
        y=alt.Y("nat:Q", title="cross-entropy, nat a token", scale=alt.Scale(type="log")),
        color=alt.Color("of:N", title=None),
    )
    starts = log[log["length"].diff().fillna(1) != 0].assign(tokens=lambda rows: rows["tokens"] / 1e6)
    marks = alt.Chart(starts).encode(x="tokens:Q")
    rules = marks.mark_rule(strokeDash=[4, 4], opacity=0.5)
    words = marks.mark_text(align="left", dx=4, dy=-140).encode(text=alt.Text("length:Q"))
    title = "Training of the bundled model (dashed: longer sequences begin)"
    (lines + rules + words).properties(width=640, height=300, title=title).save(path)


def training_rows(log: pd.DataFrame) -> Iterator[Measurement]:
    last = log.iloc[-1]
    hours = float(last["seconds"]) / 3600
    yield measured("tokens", float(last["tokens"]) / 1e6, "million", "training")
    yield measured("time", hours, "h", "training", target=3, note="two threads, at times beside other work")
    for metric in ("answer_loss", "other_loss"):
        yield measured(metric, float(log[metric].tail(5).mean()), "nat", "training, last steps")


def accuracy_rows() -> Iterator[Measurement]:
    checkpoint = load_checkpoint("bundled:tiny-qwen3-moe", torch.float32)
    engine = ReferenceEngine(checkpoint, DroplessParameters(), threads=1, reuse_prefix=True)
    for name, metric, parameters, target in ASKED:
        spec = WORKLOAD.read({"name": name, **parameters, "seed": SEED})
        workload = spec.build(None, allow_code=False)
        requests = workload.requests(checkpoint.tokenizer, engine.max_length)
        completions = [engine.run(request, unheard) for request in requests]
        score = next(s for s in workload.score(requests, completions) if s.sample_id is None and s.metric == metric)
        shots = f", {parameters['num_fewshot']}-shot" if "num_fewshot" in parameters else f", {parameters['length']}"
        error = "" if score.stderr is None else f"standard error {100 * score.stderr:.1f} %"
        yield measured(metric, 100 * score.value, "%", f"{name}{shots}", target=target, note=error)


REMARKS = """`joulebench train-tiny` wrote the bundled model from a seed: tokenizer, generated lessons, {steps} steps. A
log beside it (`engines/tiny/bundled/tiny-qwen3-moe/training.csv`) holds means of twenty steps. Accuracy in fp32,
dropless, on items from streams that training never draws; everything that it was taught is in
`harness/training_text.py`. It saw 1024 tokens at most.

![Losses](tiny-training.svg)"""


def main() -> None:
    log = pd.read_csv(LOG)
    curve(log, FOLDER / f"{NAME}.svg")
    rows = [*training_rows(log), *accuracy_rows()]
    remarks = REMARKS.format(steps=int(log["step"].iloc[-1]) + 1)
    write_page(NAME, "The bundled model: its training", rows, remarks)


if __name__ == "__main__":
    main()
