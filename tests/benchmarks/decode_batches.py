"""Batches of sequences decoded together: our engine beside llama.cpp's batched bench and transformers, same weights.

python -m tests.benchmarks.decode_batches [MODEL ...] [--forms f32 int8 ...] [--sequences 8 32] [--turns 3]

As in engine_speed: llama.cpp takes part where LLAMA_BENCH names its llama-bench, with llama-batched-bench beside it,
and the package gguf is installed; contenders take turns; RACE_MODELS names a folder where models are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from engines.model.checkpoints import load_checkpoint
from engines.reference import ReferenceEngine
from engines.techniques.presets import DroplessParameters
from tests.benchmarks.engine_speed import folder_of, instructions_here, written
from tests.benchmarks.llama_cpp import LlamaBench, find_llama_bench
from tests.benchmarks.measurement import Measurement, all_threads, beside, merged, read_json, write_page
from tests.benchmarks.race_forms import FORMS, conditions
from tests.benchmarks.race_models import add_models, is_sparse, random_request
from tests.benchmarks.timing import Instant, Timed, Turns, between, instant, timed
from tests.benchmarks.transformers_peer import EXPERT_KINDS, TransformersPeer

PAGE = "decode-batches"
N_PROMPT, N_NEW = 128, 33
SEQUENCES = (8, 32)
TARGETS = {"llama.cpp": 1.0, "transformers": 2.0}

Contender = Callable[[int], Timed]
"""Decodes so many sequences; the time of all their tokens but the first ones."""


def ours(folder: Path, form: str) -> Contender:
    checkpoint = load_checkpoint(str(folder), FORMS[form].dtype, FORMS[form].quantise)
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=1024)

    def turn(n_sequences: int) -> Timed:
        requests = [random_request(N_PROMPT, N_NEW, str(n)) for n in range(n_sequences)]
        edges: list[Instant] = []
        engine.run_batch(requests, lambda event, at_s: edges.append(instant(at_s)))
        # Prefill of all comes first, and all end with the same step: decoding lies between the last two of the edges.
        return between(edges[-2], edges[-1])

    return turn


def transformers(peer: TransformersPeer, n_sequences: Sequence[int]) -> Contender:
    """Experts as they decode the largest batch fastest."""
    kinds: Sequence[str | None] = EXPERT_KINDS if peer.is_sparse else (None,)

    def turn(n: int, kind: str | None) -> Timed:
        return peer.turn(N_PROMPT, N_NEW, kind, kind, n)[1]

    best = min(kinds, key=lambda kind: turn(max(n_sequences), kind).seconds)
    return lambda n: turn(n, best)


def llama_cpp(llama: LlamaBench, gguf: Path) -> Contender:
    def turn(n_sequences: int) -> Timed:
        rates: list[float] = []
        work = timed(lambda: rates.append(llama.decode_batch(gguf, N_PROMPT, N_NEW - 1, n_sequences)))
        return Timed(n_sequences * (N_NEW - 1) / rates[0], work.is_quiet)

    return turn


def compared(
    name: str, folder: Path, forms: Sequence[str], sizes: Sequence[int], n_turns: int, llama: LlamaBench | str
) -> Iterator[list[Measurement]]:
    written(name, folder, forms if isinstance(llama, LlamaBench) else ())
    for kind, group in groupby(forms, key=lambda form: FORMS[form].peer):
        together = list(group)
        contenders = {form: ours(folder, form) for form in together}
        peer = TransformersPeer(folder, is_sparse(name)) if kind == "f32" else None
        if peer is not None:
            contenders["transformers"] = transformers(peer, sizes)
        if isinstance(llama, LlamaBench):
            contenders["llama.cpp"] = llama_cpp(llama, folder / f"{kind}.gguf")
        for n_sequences in sizes:
            rates = {who: Turns() for who in contenders}
            for turn in contenders.values():
                turn(n_sequences)  # warm-up
            for _ in range(n_turns):
                for who, turn in contenders.items():
                    took = turn(n_sequences)
                    rates[who].add(n_sequences * (N_NEW - 1) / took.seconds, took.is_quiet)
            print(f"{name}, {kind}, {n_sequences} sequences: {rates}", flush=True)
            yield [
                beside(
                    f"decode, {n_sequences} sequences",
                    "token/s",
                    f"{n_sequences} sequences, {conditions(name, form, N_PROMPT, instructions_here())}",
                    rates[form].figure(n_turns),
                    rates[who].figure(n_turns),
                    f"llama.cpp {kind}" if who == "llama.cpp" else who,
                    TARGETS[who],
                    () if isinstance(llama, LlamaBench) else (f"llama.cpp left out: {llama}",),
                )
                for form in together
                for who in contenders
                if who in TARGETS
            ]
        contenders.clear()  # before the weights of the next form are read
        if peer is not None:
            peer.close()


def remarks() -> str:
    return (
        f"The models of [engine speed](engine-speed.md), {all_threads()} threads. So many prompts of "
        f"{N_PROMPT} tokens are read, then {N_NEW - 1} tokens of each are decoded, all sequences in one step; the rate "
        "is of all sequences together, without the first tokens, which come with the prompts. Ours: `run_batch`, "
        "which is `max_batch` of an arm. llama.cpp: llama-batched-bench, which works with keys and values in f16. "
        "transformers: fp32, one tensor of all prompts, its fastest expert implementation. Forms are those of engine "
        "speed. Beside transformers the aim is 2. On the Emerald Rapids memory does not allow it with models of "
        "experts, but for 32 sequences of 16: by chance a step of 8 sequences in f32 reads 1.17 GB of 16 experts and "
        "2.05 GB of 128, and one of 32 sequences 4.3 GB of 128. At 30 to 34 GB/s that takes 34 to 39, 60 to 69 and 127 "
        "to 144 ms, and transformers took 64, 99 and 222."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="how weights are held")
    parser.add_argument("--sequences", nargs="+", type=int, default=SEQUENCES)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    forms = [form for form in FORMS if form in arguments.forms]
    bench, missing = find_llama_bench()
    for name in arguments.models:
        with folder_of(name) as folder:
            for found in compared(name, folder, forms, arguments.sequences, arguments.turns, bench or str(missing)):
                # Each is kept at once, should the next be interrupted.
                write_page(PAGE, "Sequences decoded together", merged(read_json(PAGE), found), remarks())


if __name__ == "__main__":
    main()
