"""Decoding with keys and values in 16 bits beside the same engine with them in fp32, llama.cpp, and the memory's rate.

python -m tests.benchmarks.kept_cache [MODEL ...] [--forms f32 bf16 ...] [--prompts 512 4096] [--turns 2]

llama.cpp takes part where LLAMA_BENCH names its llama-bench. RACE_MODELS names a folder where models are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.engine_speed import (
    N_NEW,
    Contender,
    engine_of,
    folder_of,
    instructions_here,
    limit_share,
    llama_contender,
    race,
    written,
)
from tests.benchmarks.limits import Limits
from tests.benchmarks.llama_cpp import LlamaBench, find_llama_bench
from tests.benchmarks.measurement import Measurement, all_threads, beside, merged, read_json, write_page
from tests.benchmarks.race_forms import FORMS, PROMPTS, conditions
from tests.benchmarks.race_models import add_models, decode_bytes

PAGE = "kept-cache"
IN_FP32, IN_FP16 = "cache in fp32", "cache in fp16"
LLAMA = "llama.cpp"

REMARKS = """The models and forms of [engine speed](engine-speed.md), {threads} threads, batch 1, {n_new} new tokens.
Our engine with `quantise.cache = "fp16"`, and without it, took turns in one process. llama.cpp keeps keys and values in
halves, as it does on its own. The limit is the bytes of the active weights, the head, and keys and values of 16 bits,
at the rate of the fastest way to read memory once. A turn that other processes disturbed gives no ratio."""


def measurements(
    name: str, folder: Path, forms: Sequence[str], prompts: Sequence[int], n_turns: int, llama: LlamaBench | None
) -> Iterator[list[Measurement]]:
    written(name, folder, forms if llama is not None else ())
    for form in forms:
        held = FORMS[form]
        narrow = replace(held, quantise=held.quantise.model_copy(update={"cache": "fp16"}))
        contenders: dict[str, Contender] = {
            IN_FP32: engine_of(folder, held),
            IN_FP16: engine_of(folder, narrow),
        }
        if llama is not None:
            contenders[LLAMA] = llama_contender(llama, folder / f"{held.peer}.gguf")
        for n_prompt in prompts:
            limits = Limits(n_turns, {})
            result = race(contenders, limits, n_prompt, n_turns)
            print(f"{name}, {form}, prompt {n_prompt}: {result}", flush=True)
            here = conditions(name, f"{form}, {IN_FP16}", n_prompt, instructions_here())
            figures = {who: phases["decode"].figure(n_turns) for who, phases in result.items()}
            ours = figures.pop(IN_FP16)
            found = [beside("decode", "token/s", here, ours, peer, who, 1.0) for who, peer in figures.items()]
            limit, tokens = limits.bytes_per_s, 1 / decode_bytes(name, held.weight_bits, n_prompt + N_NEW // 2)
            told = f"{limit.figure.median / 1e9:.1f} GB/s ({limit.way})"
            rate = replace(limit.figure, median=limit.figure.median * tokens)
            share = limit_share("decode", form)
            yield [*found, beside("decode", "token/s", here, ours, rate, "streaming read", share, (told,))]
        contenders.clear()  # before the weights of the next form are read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["f32", "f16", "int8 by int8"])
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, help="lengths, in tokens")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    remarks = REMARKS.format(threads=all_threads(), n_new=N_NEW)
    llama, why_not = find_llama_bench()
    remarks += "" if why_not is None else f" llama.cpp: {why_not}."
    for name in arguments.models:
        with folder_of(name) as folder:
            for found in measurements(name, folder, arguments.forms, arguments.prompts, arguments.turns, llama):
                write_page(PAGE, "What a cache in 16 bits gives", merged(read_json(PAGE), found), remarks)


if __name__ == "__main__":
    main()
