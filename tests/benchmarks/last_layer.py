"""Prompts whose last layer computes only what somebody asks about, beside all their tokens, and beside llama.cpp.

python -m tests.benchmarks.last_layer [MODEL ...] [--forms f32 int8 ...] [--prompts 512 4096] [--turns 2]

llama.cpp takes part where LLAMA_BENCH names its llama-bench. RACE_MODELS names a folder where models are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.engine_speed import (
    Contender,
    engine_of,
    folder_of,
    instructions_here,
    llama_contender,
    race,
    written,
)
from tests.benchmarks.limits import Limits
from tests.benchmarks.llama_cpp import LlamaBench, find_llama_bench
from tests.benchmarks.measurement import Measurement, all_threads, beside, merged, read_json, write_page
from tests.benchmarks.race_forms import FORMS, PROMPTS, conditions
from tests.benchmarks.race_models import BASE, add_models, asked_flop, prefill_flop

PAGE = "last-layer"
ALL, ASKED = "all tokens", "asked tokens"
LLAMA = "llama.cpp"

REMARKS = """The models and forms of [engine speed](engine-speed.md), {threads} threads, batch 1. Our engine with
`last_layer = "asked"`, and without it, took turns in one process. Of a prompt that is followed by an answer, "asked"
computes the last token alone in the last layer, and keys and values of the others. The target of a row beside all
tokens is what is saved if time follows operations (derived): these models have {layers} layers, so an eighth of most
work. A model of 32 layers saves a quarter of that. llama.cpp leaves most of it out too: it computes attention of all
tokens in the last layer, and experts of the last token alone. A turn that other processes disturbed gives no ratio."""


def measurements(
    name: str, folder: Path, forms: Sequence[str], prompts: Sequence[int], n_turns: int, llama: LlamaBench | None
) -> Iterator[list[Measurement]]:
    written(name, folder, forms if llama is not None else ())
    for form in forms:
        held = FORMS[form]
        contenders: dict[str, Contender] = {ALL: engine_of(folder, held), ASKED: engine_of(folder, held, "asked")}
        if llama is not None:
            contenders[LLAMA] = llama_contender(llama, folder / f"{held.peer}.gguf")
        for n_prompt in prompts:
            result = race(contenders, Limits(n_turns, {}), n_prompt, n_turns)
            print(f"{name}, {form}, prompt {n_prompt}: {result}", flush=True)
            here = conditions(name, f"{form}, {ASKED}", n_prompt, instructions_here())
            figures = {who: phases["prefill"].figure(n_turns) for who, phases in result.items()}
            ours = figures.pop(ASKED)
            fewer = prefill_flop(name, n_prompt) / asked_flop(name, n_prompt)
            yield [
                beside("prefill", "token/s", here, ours, peer, who, fewer if who == ALL else 1.0)
                for who, peer in figures.items()
            ]
        contenders.clear()  # before the weights of the next form are read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["f32", "int8", "int4", "int8 by int8"])
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, help="lengths, in tokens")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    remarks = REMARKS.format(threads=all_threads(), layers=BASE["num_hidden_layers"])
    llama, why_not = find_llama_bench()
    remarks += "" if why_not is None else f" llama.cpp: {why_not}."
    for name in arguments.models:
        with folder_of(name) as folder:
            for found in measurements(name, folder, arguments.forms, arguments.prompts, arguments.turns, llama):
                title = "What it saves to leave tokens of a prompt out of the last layer"
                write_page(PAGE, title, merged(read_json(PAGE), found), remarks)


if __name__ == "__main__":
    main()
