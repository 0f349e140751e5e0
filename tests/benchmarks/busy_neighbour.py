"""What is left of the engine's speed, and of llama.cpp's, beside a process that keeps one core busy.

python -m tests.benchmarks.busy_neighbour [--turns 3]

The neighbour computes without a pause: once wherever the system puts it, once on the last core alone. Each turn takes
all contenders quiet and beside each neighbour. llama.cpp takes part where LLAMA_BENCH names its llama-bench and the
package gguf is installed. Run it on a machine that has nothing else to do: what others take is not told apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from tests.benchmarks import llama_cpp
from tests.benchmarks.engine_speed import ours
from tests.benchmarks.llama_cpp import find_llama_bench
from tests.benchmarks.measurement import Measurement, beside_other_machines, measured, write_page
from tests.benchmarks.race_forms import N_NEW
from tests.benchmarks.race_models import MODELS, write_model

NAME = "busy-neighbour"
BUNDLED = "bundled:tiny-qwen3-moe"
FORM = "f32"
N_PROMPT = 256
TARGET = 0.4
PHASES = ("prefill", "decode")
BUSY = """
import os, sys
if sys.argv[1]:
    os.sched_setaffinity(0, {int(sys.argv[1])})
print("busy", flush=True)
while True:
    pass
"""
Rates = Mapping[str, float]
"""token/s by phase."""


@contextlib.contextmanager
def neighbour(core: int | None) -> Iterator[None]:
    """Computes meanwhile, on that core or on any."""
    arguments = [sys.executable, "-c", BUSY, "" if core is None else str(core)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"busy\n"
        try:
            yield
        finally:
            running.kill()


def neighbours() -> Mapping[str, Callable[[], contextlib.AbstractContextManager[None]]]:
    last = max(os.sched_getaffinity(0))
    return {
        "alone": contextlib.nullcontext,
        "a busy process": lambda: neighbour(None),
        "a busy process bound to one core": lambda: neighbour(last),
    }


def our_rates(source: Path | str) -> Callable[[], Rates]:
    turn = ours(source, FORM)

    def rates() -> Rates:
        seconds = [[phase.seconds for phase in turn(N_PROMPT)] for _ in range(3)]
        prefill_s, decode_s = (statistics.median(of) for of in zip(*seconds, strict=True))
        return {"prefill": N_PROMPT / prefill_s, "decode": (N_NEW - 1) / decode_s}

    rates()
    return rates


def rows(model: str, who: str, found: Mapping[str, list[Rates]]) -> list[Measurement]:
    made = []
    quiet = found["alone"]
    for beside, turns in found.items():
        if beside == "alone":
            continue
        for phase in PHASES:
            ratios = [now[phase] / before[phase] for now, before in zip(turns, quiet, strict=True)]
            row = measured(
                f"{phase}, {who}",
                statistics.median(turn[phase] for turn in turns),
                "token/s",
                f"{model}, {FORM}, prompt {N_PROMPT}, {torch.get_num_threads()} threads, beside {beside}",
                statistics.median(turn[phase] for turn in quiet),
                "alone",
                TARGET * statistics.median(turn[phase] for turn in quiet) if who == "ours" else None,
                f"median of {len(turns)} turns, from {min(ratios):.2f} to {max(ratios):.2f}",
            )
            made.append(row.model_copy(update={"ratio": statistics.median(ratios)}))
    return made


def compared(model: str, contenders: Mapping[str, Callable[[], Rates]], n_turns: int) -> list[Measurement]:
    found: dict[str, dict[str, list[Rates]]] = {who: {beside: [] for beside in neighbours()} for who in contenders}
    for _ in range(n_turns):
        for who, rates in contenders.items():
            for beside, start in neighbours().items():
                with start():
                    found[who][beside].append(rates())
                print(model, who, beside, found[who][beside][-1], flush=True)
    return [row for who, of in found.items() for row in rows(model, who, of)]


REMARKS = f"""Each row: the rate beside a neighbour that computes without a pause, over the rate alone in the same turn.
The neighbour runs wherever the system puts it, or is bound to the last core, which it then shares with one of our
threads; half of one core is gone either way, so 0.75 is a fair share of two. Ours is to keep {TARGET}. `f32` weights,
prompt of {N_PROMPT} tokens, {N_NEW} new ones.

llama.cpp is llama-bench with the same number of threads; its row says whether it was built with OpenMP, whose threads
wait at a barrier for one that is not running. What other programs take meanwhile is not told apart.

In rows of 27 November an end token could end one of our answers, whose decoding then looked faster than it was."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    n_turns = parser.parse_args().turns
    llama, missing = find_llama_bench()
    found = compared(BUNDLED, {"ours": our_rates(BUNDLED)}, n_turns)
    with tempfile.TemporaryDirectory() as folder:
        name, gguf = next(iter(MODELS)), Path(folder) / "f32.gguf"
        model = write_model(name, Path(folder))
        contenders = {"ours": our_rates(Path(folder))}
        if llama is not None:
            llama_cpp.write_gguf(model, gguf, "f32")
            bench = llama
            name_of_peer = f"llama.cpp {'with' if bench.has_openmp else 'without'} OpenMP"
            contenders[name_of_peer] = lambda: {
                "prefill": bench.prefill(gguf, N_PROMPT),
                "decode": bench.decode(gguf, N_PROMPT, N_NEW),
            }
        else:
            print("llama.cpp:", missing)
        del model
        found += compared(name, contenders, n_turns)
    title = "How much speed is left beside a busy neighbour?"
    write_page(NAME, title, beside_other_machines(NAME, found), REMARKS)


if __name__ == "__main__":
    main()
