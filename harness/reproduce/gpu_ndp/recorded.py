"""How much of what is fetched ahead is used, on routing that was recorded: counted anew where the trace is there.

The trace (openai/gpt-oss-20b, 26,355 generated tokens of 142 answers) lies in the data folder and comes with no wheel;
what was counted of it does, in utilisation.csv: `python -m harness.reproduce.gpu_ndp.recorded` writes it.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from engines.pricing.routing_sources import read_trace
from engines.pricing.shapes import NAMED_SHAPES
from harness.reproduce.gpu_ndp.stage import Spread
from harness.reproduce.gpu_ndp.utilisation import Utilisation, utilisations
from harness.run_parts import DATA_FOLDER_VARIABLE, data_root

KEPT = (1, 2, 4, 8, 16)
"""Experts of each layer; 4 is TopK there, as in the source's ablation."""
SHAPE = NAMED_SHAPES["gpt-oss-20b"]
TRACE = Path("traces") / "moe" / "gpt-oss-20b_decode_trace.npz"
COUNTED = Path(__file__).with_name("utilisation.csv")
KEYS = ("kept", "own", "own_error", "others", "others_error", "chance")


def counted_now(folder: Path) -> list[Utilisation]:
    """Raises `EngineError` where the trace is not whole."""
    routing = read_trace(folder / TRACE, SHAPE.name, SHAPE.n_experts)
    return utilisations(routing.sequences, SHAPE.n_experts, KEPT)


def counted_before() -> list[Utilisation]:
    """Of the file that comes with joulebench."""
    with COUNTED.open(newline="", encoding="utf-8") as file:
        rows = [{key: float(row[key]) for key in KEYS} for row in csv.DictReader(file)]
    return [
        Utilisation(
            int(row["kept"]), Spread(row["own"], row["own_error"]), Spread(row["others"], row["others_error"]),
            row["chance"],
        )
        for row in rows
    ]  # fmt: skip


def recorded() -> list[Utilisation]:
    """Counted now where JOULEBENCH_DATA has the trace. Raises `EngineError` where that is not whole."""
    folder = data_root()
    return counted_now(folder) if folder is not None and (folder / TRACE).is_file() else counted_before()


def write(found: Sequence[Utilisation]) -> None:
    with COUNTED.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(KEYS)
        for one in found:
            figures = (*one.own, *one.others, one.chance)
            writer.writerow([one.kept, *(f"{figure:.6f}" for figure in figures)])


if __name__ == "__main__":
    root = data_root()
    if root is None:
        raise SystemExit(f"set {DATA_FOLDER_VARIABLE} to the folder that has {TRACE}")
    write(counted_now(root))
