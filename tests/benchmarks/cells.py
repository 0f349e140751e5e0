"""What cells cost that are priced without a model: one of each technique, and a thousand on two processes.

python -m tests.benchmarks.cells

A cell has 48 layers of 128 experts, top 8 (Qwen3-30B-A3B), a prompt of 4096 tokens in chunks of 256, and 512 decode
steps. One thread each. CPU seconds, so that neighbours count little; the second time in a process, as in a table. Each
technique has a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, product

from devices.models.sheet import load_sheet
from engines.pricing.cells import Cell, price_cell
from engines.pricing.generated_routing import generated
from engines.pricing.routing_sources import RoutingSource, UniformRouting
from engines.pricing.shapes import NAMED_SHAPES, sizes_of
from engines.techniques.presets import PRESETS
from harness.cross.arms import arms_on
from harness.cross.table import Question
from harness.processes import processes
from tests.benchmarks.measurement import Measurement, measured, write_page

SHAPE = NAMED_SHAPES["qwen3-30b-a3b"]
PROMPT, STEPS, CHUNK = 4096, 512, 256
SHEETS = ("m2-ultra", "a100", "rtx5080-ndp", "a6000", "trn2")
"""A technique stands on the first that can take it."""
PROMPTS, DECODED, IMBALANCES, SEEDS = (128, 512, 1024), (16, 64), (1.0, 2.0, 4.0), range(2)
N_CELLS, N_PROCESSES = 1000, 2
GIB, A_KIB = 2**30, 2**10


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


def one(sheet: str, technique: str) -> tuple[float, float]:
    """(CPU seconds, most bytes of the process)."""
    price_cell(cell(sheet, technique, UniformRouting(), PROMPT, STEPS))
    again = cell(sheet, technique, UniformRouting(1), PROMPT, STEPS)
    began_s = time.process_time()
    assert price_cell(again).result == "ok"
    return time.process_time() - began_s, _most_bytes()


def each() -> Iterator[Measurement]:
    with processes(N_PROCESSES, once=True) as pool:
        waiting = [(case, pool.submit(one, *case)) for case in cases()]
        for (sheet, technique), done in waiting:
            spent_s, most_bytes = done.result()
            told = f"{technique} on {sheet}"
            yield measured("one cell", spent_s, "CPU s", told, target=1.0)
            yield measured("memory at most", most_bytes / GIB, "GiB", f"{told}, its process", target=1.0)


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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * float(A_KIB)


def main() -> None:
    found = [*each(), *thousand()]
    write_page(
        "cells",
        "Cells that are priced without a model",
        found,
        "Plans are the techniques' own. Where what a token does hangs on its experts, or on what lies in caches, a plan"
        " is made for every token and layer: there plans cost most. Each cell is one request, with cold caches. Targets"
        " are upper bounds. Seconds of the clock hang on what else the machine does; CPU seconds hardly do.",
    )


if __name__ == "__main__":
    main()
