"""Where a decoded token's time goes: kernels that time their own parts, and what Python adds.

python -m tests.benchmarks.decode_parts [MODEL ...] [--forms f32 int4 ...] [--turns 5]

The kernels are built with the parts' clocks for this alone. RACE_MODELS names a folder where models are kept, as for
tests.benchmarks.engine_speed. Run it on a machine that has nothing else to do: the fastest turn counts.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from engines.kernels.compile import FLAGS_VARIABLE, NATIVE
from engines.kernels.library import library
from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from tests.benchmarks.engine_speed import folder_of, instructions_here, written
from tests.benchmarks.measurement import Measurement, measured, merged, read_json, write_page
from tests.benchmarks.race_forms import BF16_ATTENTION, FORMS, INT8_ATTENTION, N_NEW
from tests.benchmarks.race_models import MODELS, random_request

PAGE = "decode-parts"
N_PROMPT = 512
PARTS = (
    "queries, keys and values projected", "heads normed, turned and cached", "attention over the cache",
    "output projected", "router", "gate and up", "down", "norms and sums", "waiting for the other threads",
    "input laid out", "head",
)  # fmt: skip
"""The order is that of `Part` in engines/kernels/parts.h."""
OF_MANY_TOKENS = ("input laid out",)
OUTSIDE = "choice of the token and Python"
WHOLE = "whole token"


def turn(engine: ReferenceEngine, n_prompt: int) -> Mapping[str, float]:
    """Seconds of each part of a decoded token, and of all of it."""
    kernels = library()
    assert kernels is not None
    parts = (ctypes.c_double * len(PARTS))()
    edges: list[float] = []

    def heard(event: object, at_s: float) -> None:
        edges.append(at_s)
        kernels.joulebench_parts(parts)  # and begins anew: those of the prompt are dropped

    engine.run(random_request(n_prompt, N_NEW), heard)
    whole_s = (edges[2] - edges[1]) / (N_NEW - 1)
    timed = zip(PARTS, parts, strict=True)
    found = {name: seconds / (N_NEW - 1) for name, seconds in timed if name not in OF_MANY_TOKENS}
    return found | {OUTSIDE: whole_s - sum(found.values()), WHOLE: whole_s}


def rows(name: str, folder: Path, form: str, n_turns: int) -> Iterator[Measurement]:
    checkpoint = load_checkpoint(str(folder), FORMS[form].dtype, FORMS[form].quantise)
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=1024)
    turns = [turn(engine, N_PROMPT) for _ in range(n_turns + 1)][1:]  # the first warms up
    fastest = min(turns, key=lambda found: found[WHOLE])
    slowest = max(found[WHOLE] for found in turns)
    here = f"{name}, {form}, prompt {N_PROMPT}, {torch.get_num_threads()} threads, {instructions_here()}"
    note = f"fastest of {n_turns} turns; the slowest took {slowest / fastest[WHOLE]:.2f} times as long"
    for part, seconds in fastest.items():
        whole = (None, None) if part == WHOLE else (fastest[WHOLE] * 1e6, WHOLE)
        yield measured(part, seconds * 1e6, "us", here, *whole, note=note)


REMARKS = f"""A token of batch 1 behind {N_PROMPT} others, {N_NEW} new ones. The thread that calls the kernels is timed.
While it computes a part, the others compute other pieces of the same one. What it then waits for them is a part of its
own. A ratio is the part's share of the whole token. What no part of the kernels covers is told as one: the choice of
the token, and what Python does between two steps; in older rows the head too, which Python called then. A clock
inside the kernels costs about 50 ns each time.

Run 1 is of kernels that did not ask ahead for what they read, run 2 of some that did not ask for beginnings of places
([what that gained](../decisions/0007-kernels-for-many-tokens.md)). In runs of 26 November memory waited at every fourth
row of a matrix ([why](../decisions/0005-kernels-for-decoding.md)). Rows of one run may be compared with each other, but
for how fast memory was just then: gate and up of 128 experts are 101 MB in 16 bits, which were read at 48 GB/s in bf16
and at 68 in bf16 by bf16."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS), help="; ".join(MODELS))
    forms = [form for form in FORMS if form not in (BF16_ATTENTION, INT8_ATTENTION)]  # of prompts alone
    parser.add_argument("--forms", nargs="+", choices=forms, default=forms, help="how weights are held")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    os.environ[FLAGS_VARIABLE] = f"{os.environ.get(FLAGS_VARIABLE, NATIVE)} -DJOULEBENCH_PARTS"
    for name in arguments.models:
        with folder_of(name) as folder:
            written(name, folder, ())
            for form in arguments.forms:
                found = list(rows(name, folder, form, arguments.turns))
                print(form, *(f"{m.metric} {m.ours:.0f};" for m in found), flush=True)
                page = merged(read_json(PAGE), found)
                write_page(PAGE, "Where does a decoded token's time go?", page, REMARKS)


if __name__ == "__main__":
    main()
