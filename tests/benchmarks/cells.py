"""What cells cost that are priced without a model: one of each technique, and a thousand on two processes.

python -m tests.benchmarks.cells [each] [thousand]

A cell has 48 layers of 128 experts, top 8 (Qwen3-30B-A3B), a prompt of 4096 tokens in chunks of 256, and 512 decode
steps. CPU seconds, so that neighbours count little; in a process that priced others before, as in a table. Memory is
the most that the process had while it priced that cell, torch and all else that it holds included. Linux alone says it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path

from devices.models.sheet import load_sheet
from engines.pricing.cells import Cell, price_cell
from engines.pricing.generated_routing import generated
from engines.pricing.routing_sources import RoutingSource, UniformRouting
from engines.pricing.shapes import NAMED_SHAPES, sizes_of
from engines.techniques.presets import PRESETS
from harness.cross.arms import arms_on
from harness.cross.table import Question
from harness.processes import processes
from results.units import GIB
from tests.benchmarks.measurement import Measurement, measured, merged, read_json, write_page

SHAPE = NAMED_SHAPES["qwen3-30b-a3b"]
PROMPT, STEPS, CHUNK = 4096, 512, 256
SHEETS = ("m2-ultra", "a100", "rtx5080-ndp", "a6000", "trn2")
"""A technique stands on the first that can take it."""
PROMPTS, DECODED, IMBALANCES, SEEDS = (64, 128, 256), (8, 16), (1.0, 2.0, 4.0), range(2)
N_CELLS, N_PROCESSES = 1000, 2
A_KIB = 2**10
STATUS, CLEAR, FORGET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs"), "5"


def cases() -> list[tuple[str, str]]:
    """(sheet, technique) of every technique that some sheet can take."""
    found = []
    for name in PRESETS:
        fit = [sheet for sheet in SHEETS if arms_on(load_sheet(sheet), SHAPE, (name,))[0].why_not is None]
        found += [(fit[0], name)] if fit else []
    return found


def cell(sheet: str, technique: str, routing: RoutingSource, prompt: int, steps: int) -> Cell:
    arm = arms_on(load_sheet(sheet), SHAPE, (technique,))[0]
    asked = Question(SHAPE, routing, prompt, steps, CHUNK).cell(arm, load_sheet(sheet))
    return replace(asked, n_before=0)  # one request


def each() -> Iterator[Measurement]:
    for sheet, technique in cases():
        price_cell(cell(sheet, technique, UniformRouting(), CHUNK, 4))
        asked = cell(sheet, technique, UniformRouting(1), PROMPT, STEPS)
        CLEAR.write_text(FORGET_PEAK)
        began_s = time.process_time()
        assert price_cell(asked).result == "ok"
        spent_s, told = time.process_time() - began_s, f"{technique} on {sheet}"
        yield measured("one cell", spent_s, "CPU s", told, target=1.0)
        yield measured("memory at most", _most_bytes() / GIB, "GiB", told, target=1.0)


def swept() -> list[tuple[int, float, int, int, tuple[str, str]]]:
    """(seed, imbalance, prompt, decoded, sheet and technique) of a thousand cells."""
    return list(islice(product(SEEDS, IMBALANCES, PROMPTS, DECODED, cases()), N_CELLS))


def some(first: int) -> tuple[int, float, float]:
    """One process's part of the thousand: (how many, CPU seconds, most bytes)."""
    sizes = sizes_of(SHAPE)
    assert sizes is not None
    began_s, own = time.process_time(), swept()[first::N_PROCESSES]
    sources = {
        (imbalance, seed): generated(sizes, imbalance, seed=seed) for imbalance, seed in product(IMBALANCES, SEEDS)
    }
    for seed, imbalance, prompt, steps, (sheet, technique) in own:
        price_cell(cell(sheet, technique, sources[imbalance, seed], prompt, steps))
    return len(own), time.process_time() - began_s, _most_bytes()


def thousand() -> Iterator[Measurement]:
    began_s = time.perf_counter()
    with processes(N_PROCESSES) as pool:
        parts = list(pool.map(some, range(N_PROCESSES)))
    spent_s = time.perf_counter() - began_s
    n_cells = sum(n for n, _, _ in parts)
    told = (
        f"{n_cells} cells: techniques, prompts of {_words(PROMPTS)} tokens, {_words(DECODED)} decoded, imbalance"
        f" {_words(IMBALANCES)}; {N_PROCESSES} processes"
    )
    yield measured(f"{n_cells} cells", spent_s, "s", told, target=300.0)
    yield measured("of that, CPU", sum(cpu_s for _, cpu_s, _ in parts), "CPU s", told)
    yield measured("memory at most", max(most for _, _, most in parts) / GIB, "GiB", f"{told}, each", target=1.0)


def _words(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _most_bytes() -> float:
    """Of this process, since the peak was forgotten."""
    (line,) = [one for one in STATUS.read_text().splitlines() if one.startswith("VmHWM:")]
    return A_KIB * float(line.split()[1])


def main() -> None:
    parts = {"each": each, "thousand": thousand}
    found = [one for name in sys.argv[1:] or parts for one in parts[name]()]
    write_page(
        "cells",
        "Cells that are priced without a model",
        merged(read_json("cells"), found),
        "Plans are the techniques' own. Decoded tokens that cost alike share one. Where what a token costs hangs on its"
        " experts, or on what lies in caches, many differ: there plans cost most. Each cell is one request, with cold"
        " caches. Targets are upper bounds. On a machine that other programs share, CPU seconds rise too, by a half at"
        " times. The thousand cells have shorter prompts and answers than the single ones, as their row says, and take"
        " less each.",
    )


if __name__ == "__main__":
    main()
