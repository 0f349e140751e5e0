"""What cells cost that are priced without a model: one of each technique, and a thousand on two cores.

python -m tests.benchmarks.cells

A cell has 48 layers of 128 experts, top 8 (Qwen3-30B-A3B), a prompt of 4096 tokens in chunks of 256, and 512 decode
steps. One thread each. CPU seconds, so that neighbours count little; the second time in a process, as in a table.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from devices.models.sheet import load_sheet
from engines.pricing.cells import Cell, parameters, price_cell
from engines.pricing.generated_routing import generated
from engines.pricing.routing_sources import RoutingSource, UniformRouting
from engines.pricing.shapes import NAMED_SHAPES, sizes_of
from tests.benchmarks.measurement import Measurement, measured, write_page

SHAPE = NAMED_SHAPES["qwen3-30b-a3b"]
PROMPT, STEPS, CHUNK = 4096, 512, 256
CASES: tuple[tuple[str, str, float | None], ...] = (
    ("m2-ultra", "dropless", None),
    ("m2-ultra", "npumoe", None),
    ("m2-ultra", "coreml-naive", None),
    ("m2-ultra", "blockwise", None),
    ("a6000", "on-demand", None),
    ("a6000", "prefetch-hint", 0.9),
    ("rtx5080-ndp", "fiddler", None),
    ("rtx5080-ndp", "monde", None),
    ("rtx5080-ndp", "ndp-tp", None),
    ("rtx5080-ndp", "ndp", None),
)
IN_A_TABLE = ("dropless", "npumoe", "coreml-naive", "on-demand")
"""Those of the thousand, in turn."""
N_CELLS, N_PROCESSES = 1000, 2


def cell(sheet: str, preset: str, recall: float | None, routing: RoutingSource) -> Cell:
    return Cell(load_sheet(sheet), SHAPE, parameters(preset), routing, PROMPT, STEPS, CHUNK, recall=recall)


def each() -> Iterator[Measurement]:
    for sheet, preset, recall in CASES:
        price_cell(cell(sheet, preset, recall, UniformRouting()))
        began_s = time.process_time()
        price_cell(cell(sheet, preset, recall, UniformRouting(1)))
        spent_s = time.process_time() - began_s
        yield measured("one cell", spent_s, "CPU s", f"{preset} on {sheet}", target=1.0)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    yield measured("memory at most", most, "GB", "all of these in one process", target=1.0)


def some(first: int) -> None:
    """One process's part of the thousand, each of another routing."""
    torch.set_num_threads(1)
    sizes = sizes_of(SHAPE)
    assert sizes is not None
    cases = [case for case in CASES if case[1] in IN_A_TABLE]
    for number in range(first, N_CELLS, N_PROCESSES):
        sheet, preset, recall = cases[number // N_PROCESSES % len(cases)]
        routing = generated(sizes, 1 + number % 7, seed=number)
        price_cell(cell(sheet, preset, recall, routing))


def thousand() -> Measurement:
    began_s = time.perf_counter()
    parts = [
        subprocess.Popen([sys.executable, "-m", "tests.benchmarks.cells", str(first)]) for first in range(N_PROCESSES)
    ]
    failed = [part.args for part in parts if part.wait()]
    assert not failed, failed
    spent_s = time.perf_counter() - began_s
    told = f"{', '.join(IN_A_TABLE)} in turn, each of another routing, {N_PROCESSES} processes"
    return measured(f"{N_CELLS} cells", spent_s, "s", told, target=300.0)


def main() -> None:
    torch.set_num_threads(1)
    found = [*each(), thousand()]
    write_page(
        "cells",
        "Cells that are priced without a model",
        found,
        "Plans are the techniques' own. Where what a token does hangs on its experts, or on what lies in caches, a plan"
        " is made for every token and layer: there plans cost most. Targets are upper bounds.",
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        some(int(sys.argv[1]))
    else:
        main()
