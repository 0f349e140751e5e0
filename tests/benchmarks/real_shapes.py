"""Shapes of models that people run, beside llama.cpp: do the ratios of the small made models hold for them?

python -m tests.benchmarks.real_shapes [MODEL ...] [--forms bf16 int8 ...] [--prompts 512] [--turns 2]

llama.cpp takes part where LLAMA_BENCH names its llama-bench. RACE_MODELS names a folder where models are kept: a model
takes 4 to 24 GB there.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.engine_speed import (
    Contender,
    folder_of,
    instructions_here,
    limit_of,
    limit_share,
    llama_contender,
    ours,
    race,
    written,
)
from tests.benchmarks.limits import Limits, gemm_ways
from tests.benchmarks.llama_cpp import LlamaBench, find_llama_bench
from tests.benchmarks.measurement import Measurement, all_threads, beside, merged, read_json, write_page
from tests.benchmarks.race_forms import FORMS, N_NEW, PHASES, conditions
from tests.benchmarks.race_models import REAL, active_weights, add_models, shape

PAGE = "real-shapes"
OURS, LLAMA = "ours", "llama.cpp"

REMARKS = """The models of [engine speed](engine-speed.md) are small: 1024 wide, 8 layers, 2048 words. These have the
shapes of models that people run, with random weights, {threads} threads, batch 1, {n_new} new tokens. {shapes}.
Heads are matrices of their own, where Qwen3-0.6B and 4B share theirs with the embedding: as much is read. Forms are
those of engine speed, and so are the limits. A turn that other processes disturbed gives no ratio."""


def measurements(
    name: str, folder: Path, forms: Sequence[str], prompts: Sequence[int], n_turns: int, llama: LlamaBench | None
) -> Iterator[list[Measurement]]:
    written(name, folder, forms if llama is not None else ())
    for form in forms:
        held = FORMS[form]
        contenders: dict[str, Contender] = {OURS: ours(folder, form)}
        if llama is not None:
            contenders[LLAMA] = llama_contender(llama, folder / f"{held.peer}.gguf")
        for n_prompt in prompts:
            limits = Limits(n_turns, {held.arithmetic: gemm_ways(held.arithmetic, None)})
            result = race(contenders, limits, n_prompt, n_turns)
            print(f"{name}, {form}, prompt {n_prompt}: {result}", flush=True)
            here = conditions(name, form, n_prompt, instructions_here())
            found = []
            for phase in PHASES:
                figures = {who: phases[phase].figure(n_turns) for who, phases in result.items()}
                mine = figures.pop(OURS)
                found += [
                    beside(phase, "token/s", here, mine, theirs, f"{who} {held.peer}", 1.0)
                    for who, theirs in figures.items()
                ]
                limit, kind, how = limit_of(name, form, n_prompt, phase, limits)
                found.append(beside(phase, "token/s", here, mine, limit, kind, limit_share(phase, form), (how,)))
            yield found
        contenders.clear()  # before the weights of the next form are read


def told_shape(name: str) -> str:
    told, weights = shape(name), active_weights(name) / 1e6
    return f"{name}: {told['hidden_size']} wide, {told['num_hidden_layers']} layers, {weights:.0f} M weights a token"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, REAL)
    parser.add_argument(
        "--forms", nargs="+", choices=FORMS, default=["bf16", "int8", "int8 by int8", "int4", "int4 by int8"]
    )
    parser.add_argument("--prompts", nargs="+", type=int, default=[512], help="lengths, in tokens")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    remarks = REMARKS.format(threads=all_threads(), n_new=N_NEW, shapes="; ".join(map(told_shape, REAL)))
    llama, why_not = find_llama_bench()
    remarks += "" if why_not is None else f" llama.cpp: {why_not}."
    for name in arguments.models:
        with folder_of(name) as folder:
            for found in measurements(name, folder, arguments.forms, arguments.prompts, arguments.turns, llama):
                title = "Is the engine as fast with models of real shapes?"
                write_page(PAGE, title, merged(read_json(PAGE), found), remarks)


if __name__ == "__main__":
    main()
