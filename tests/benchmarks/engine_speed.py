"""The reference engine beside transformers, llama.cpp and the machine's limits: same weights, same threads, batch 1.

python -m tests.benchmarks.engine_speed [MODEL ...] [--forms f32 int8 ...] [--prompts 512 ...] [--turns 5]

llama.cpp takes part where LLAMA_BENCH names its llama-bench and the package gguf is installed. All contenders take
turns; a turn during which other processes took more than a tenth of the machine is repeated. A part of the race
replaces its own rows of docs/measurements/engine-speed.json and leaves the others. RACE_MODELS names a folder
where models are kept from one part to the next.

A processor with AVX-512 can run the race of those without it. Everybody is held to AVX2 then: our kernels by
JOULEBENCH_KERNEL_FLAGS=-march=x86-64-v3, torch and its libraries by ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
MKL_ENABLE_INSTRUCTIONS=AVX2, and llama.cpp by a build of its own (-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON
-DGGML_F16C=ON). Such rows say "AVX2 held".
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch

from engines.kernels import tables
from engines.kernels.compile import has
from engines.kernels.library import loaded
from engines.model.checkpoints import load_checkpoint
from engines.model.quantised import Arithmetic
from engines.reference import LastLayer, ReferenceEngine
from engines.techniques.presets import DroplessParameters
from tests.benchmarks import llama_cpp
from tests.benchmarks.limits import DensePrefill, Limits, gemm_ways
from tests.benchmarks.llama_cpp import LlamaBench, find_llama_bench
from tests.benchmarks.measurement import Measurement, all_threads, beside, merged, read_json, was_quiet, write_page
from tests.benchmarks.processors import generation
from tests.benchmarks.race_forms import (
    FORMS,
    INT8_ATTENTION,
    MULTIPLY_BF16,
    N_NEW,
    PHASES,
    PROMPTS,
    Form,
    conditions,
    context_of,
    place,
)
from tests.benchmarks.race_models import (
    MODELS,
    REAL,
    active_weights,
    add_models,
    decode_bytes,
    is_sparse,
    prefill_flop,
    random_request,
    reads_more,
    write_model,
)
from tests.benchmarks.speed_summary import by_model, not_taken
from tests.benchmarks.timing import Figure, Instant, Timed, Turns, between, instant, timed
from tests.benchmarks.transformers_peer import EXPERT_KINDS, TransformersPeer

PAGE = "engine-speed"
TRIAL_PROMPT = 512
WARM_UP_PROMPT = 1024
PREFILL_SHARE = 0.85
DECODE_SHARE = {32: 0.85, 16: 0.75, 8: 0.6}
"""By the bits of a weight. Of the machine's limits, that this engine is to reach."""
HELD = "held"
"""Behind the instruction set of a row whose processor has more."""
HELD_BY = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
DENSE = next(name for name in MODELS if not is_sparse(name))
LLAMA_ARITHMETIC: dict[llama_cpp.Form, Arithmetic] = {
    "f32": "fp32",
    "f16": "fp32",
    "bf16": "bf16",
    "q8_0": "int8",
    "q4_0": "int8",
}
"""What llama.cpp multiplies a file's weights in. f16: its inputs are rounded to 16 bits, and multiplied in fp32."""

Contender = Callable[[int], tuple[Timed, Timed]]
"""Reads a prompt of so many tokens and writes N_NEW: the time to the first token, and the time of the others."""

Result = Mapping[str, Mapping[str, Turns]]
"""By contender, then by phase."""


# --- who takes part --------------------------------------------------------------------------------------------------


def ours(source: Path | str, form: str) -> Contender:
    return engine_of(source, FORMS[form])


def engine_of(source: Path | str, held: Form, last_layer: LastLayer | None = None) -> Contender:
    checkpoint = load_checkpoint(str(source), held.dtype, held.quantise)
    engine = ReferenceEngine(checkpoint, DroplessParameters(), prefill_chunk=1024, last_layer=last_layer)

    def turn(n_prompt: int) -> tuple[Timed, Timed]:
        edges: list[Instant] = []
        engine.run(random_request(n_prompt, N_NEW), lambda event, at_s: edges.append(instant(at_s)))
        return between(edges[0], edges[1]), between(edges[1], edges[2])

    return turn


def transformers_contender(peer: TransformersPeer) -> tuple[str, Contender]:
    """Its name too: each phase runs the expert implementation that was fastest in a trial of that phase."""
    if not peer.is_sparse:
        return "transformers", lambda n_prompt: peer.turn(n_prompt, N_NEW, None, None)
    seconds = {}
    for kind in EXPERT_KINDS:
        for _ in ("warm-up", "trial"):
            seconds[kind] = [phase.seconds for phase in peer.turn(TRIAL_PROMPT, N_NEW, kind, kind)]
        print(f"transformers {kind}: {seconds[kind]} s for {TRIAL_PROMPT} + {N_NEW - 1} tokens", flush=True)
    prefill, decode = (min(seconds, key=lambda kind: seconds[kind][phase]) for phase in range(len(PHASES)))
    who = f"transformers {prefill}" if prefill == decode else f"transformers {prefill}, in decode {decode}"
    return who, lambda n_prompt: peer.turn(n_prompt, N_NEW, prefill, decode)


def llama_contender(llama: LlamaBench, gguf: Path) -> Contender:
    def turn(n_prompt: int) -> tuple[Timed, Timed]:
        seconds: list[float] = []
        # llama-bench also loads and warms up; what disturbs that is counted too, so its turns are judged harder.
        prefill = timed(lambda: seconds.append(n_prompt / llama.prefill(gguf, n_prompt)))
        decode = timed(lambda: seconds.append((N_NEW - 1) / llama.decode(gguf, n_prompt, N_NEW)))
        return Timed(seconds[0], prefill.is_quiet), Timed(seconds[1], decode.is_quiet)

    return turn


# --- the race --------------------------------------------------------------------------------------------------------


def default_turns(n_prompt: int) -> int:
    """A turn of a long prompt takes as long as several of a short one; the whole race is to end in half an hour."""
    return 3 if n_prompt <= 512 else 2 if n_prompt <= 1024 else 1


def race(contenders: Mapping[str, Contender], limits: Limits, n_prompt: int, n_turns: int) -> Result:
    """Turns until every contender has n_turns quiet ones of each phase, or half as many more are over."""
    rates = {name: {phase: Turns() for phase in PHASES} for name in contenders}
    for name, turn in contenders.items():
        if name != "llama.cpp":  # which warms up in every turn
            turn(min(n_prompt, WARM_UP_PROMPT))
    for _ in range(n_turns + (n_turns + 1) // 2):
        limits.turn()
        for name, turn in contenders.items():
            prefill, decode = turn(n_prompt)
            rates[name]["prefill"].add(n_prompt / prefill.seconds, prefill.is_quiet)
            rates[name]["decode"].add((N_NEW - 1) / decode.seconds, decode.is_quiet)
        if all(len(phase.quiet) >= n_turns for mine in rates.values() for phase in mine.values()):
            break
    return rates


@contextmanager
def folder_of(name: str) -> Iterator[Path]:
    """Of a model's files. RACE_MODELS names a place where they are kept for the next part of a race."""
    kept = os.environ.get("RACE_MODELS")
    if kept is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        yield Path(kept) / name.replace(",", "").replace(
            " ", "-"
        )  # llama-bench takes a comma for the end of a file's name


def written(name: str, folder: Path, forms: Sequence[str]) -> None:
    """The model's files, and those of llama.cpp for these forms, where the folder lacks them."""
    peers = {FORMS[form].peer for form in forms}
    lacking = [peer for peer in sorted(peers) if not (folder / f"{peer}.gguf").exists()]
    if (folder / "config.json").exists() and not lacking:
        return
    model = write_model(name, folder, torch.bfloat16 if name in REAL else torch.float32)
    for peer in lacking:
        part = folder / f"{peer}.part"
        llama_cpp.write_gguf(model, part, peer)
        part.rename(folder / f"{peer}.gguf")


def compared(
    name: str, forms: Sequence[str], prompts: Sequence[int], turns: int | None, llama: LlamaBench | str
) -> Iterator[list[Measurement]]:
    """The rows of one race after the other. llama: or why it takes no part."""
    with folder_of(name) as folder, nullcontext(folder) if name == DENSE else folder_of(DENSE) as dense:
        written(name, folder, forms if isinstance(llama, LlamaBench) else ())
        if isinstance(llama, LlamaBench):
            written(DENSE, dense, forms)  # whichever races: llama.cpp's prefill of it is a large product
        yield from raced(name, folder, dense, forms, prompts, turns, llama)


def raced(
    name: str,
    folder: Path,
    dense: Path,
    forms: Sequence[str],
    prompts: Sequence[int],
    turns: int | None,
    llama: LlamaBench | str,
) -> Iterator[list[Measurement]]:
    """folder: of the model; dense: of the dense one."""
    for peer, group in groupby(forms, key=lambda form: FORMS[form].peer):
        together = list(group)
        contenders = {form: ours(folder, form) for form in together}
        transformers = TransformersPeer(folder, is_sparse(name)) if peer == "f32" else None
        if transformers is not None:
            who, contender = transformers_contender(transformers)
            contenders[who] = contender
        left_out = [] if isinstance(llama, LlamaBench) else [f"llama.cpp left out: {llama}"]
        if isinstance(llama, LlamaBench):
            contenders["llama.cpp"] = llama_contender(llama, folder / f"{peer}.gguf")
        arithmetics = {FORMS[form].arithmetic for form in together}
        prefill = DensePrefill(llama, dense / f"{peer}.gguf", DENSE) if isinstance(llama, LlamaBench) else None
        gemms = {one: gemm_ways(one, prefill if LLAMA_ARITHMETIC[peer] == one else None) for one in arithmetics}
        for n_prompt in prompts:
            n_turns = turns or default_turns(n_prompt)
            limits = Limits(n_turns, gemms)
            result = race(contenders, limits, n_prompt, n_turns)
            print(f"{name}, {peer}, prompt {n_prompt}: {result}", flush=True)
            yield [m for form in together for m in rows(name, form, n_prompt, result, limits, n_turns, left_out)]
        contenders.clear()  # before the weights of the next form are read
        if transformers is not None:
            transformers.close()


# --- the rows --------------------------------------------------------------------------------------------------------


def is_held() -> bool:
    """Whether our kernels were built for less than the processor has."""
    built_for = loaded().instruction_set
    return built_for is not None and not built_for.startswith("AVX-512") and has("AVX-512")


def instructions_here() -> str:
    """What our kernels were built for, and on which processor."""
    built_for = loaded().instruction_set or "torch alone"
    return f"{built_for}{f' {HELD}' if is_held() else ''} ({generation()})"


def unheld() -> list[str]:
    """The settings that the rest of this process lacks where our kernels are held to less than the processor has."""
    if not is_held():
        return []
    return [f"{name}={value}" for name, value in HELD_BY.items() if os.environ.get(name) != value]


def rows(
    name: str, form: str, n_prompt: int, result: Result, limits: Limits, n_turns: int, left_out: Sequence[str]
) -> Iterator[Measurement]:
    """Of one form: each phase beside each peer, and beside the machine's limit."""
    here = conditions(name, form, n_prompt, instructions_here())
    for phase in PHASES:
        our_figure = result[form][phase].figure(n_turns)
        for who, theirs in result.items():
            if who in FORMS:
                continue
            peer_form = f" {FORMS[form].peer}" if who == "llama.cpp" else ""
            peer = theirs[phase].figure(n_turns)
            yield beside(phase, "token/s", here, our_figure, peer, who + peer_form, target_ratio(who, phase, name))
        limit, kind, how = limit_of(name, form, n_prompt, phase, limits)
        yield beside(phase, "token/s", here, our_figure, limit, kind, limit_share(phase, form), (how, *left_out))


def limit_of(name: str, form: str, n_prompt: int, phase: str, limits: Limits) -> tuple[Figure, str, str]:
    """token/s at the machine's limit, the kind of limit, and how it was found."""
    if phase == "prefill":
        limit = limits.flop_per_s(FORMS[form].arithmetic)
        tokens = n_prompt / prefill_flop(name, n_prompt)
        kind, how = "large GEMM", f"{limit.figure.median / 1e9:.0f} GFLOP/s ({limit.way})"
    else:
        limit = limits.bytes_per_s
        tokens = 1 / decode_bytes(name, FORMS[form].weight_bits, context_of(n_prompt))
        kind, how = "streaming read", f"{limit.figure.median / 1e9:.1f} GB/s ({limit.way})"
    return replace(limit.figure, median=limit.figure.median * tokens), kind, how


def limit_share(phase: str, form: str) -> float | None:
    """Of the machine's limit, that this engine is to reach; None where no share was set."""
    return PREFILL_SHARE if phase == "prefill" else DECODE_SHARE.get(round(FORMS[form].weight_bits))


def target_ratio(who: str, phase: str, name: str) -> float:
    """The ratio to a peer that this engine is to reach."""
    if who == "llama.cpp":
        return 1.0
    if is_sparse(name):
        return 2.0 if phase == "decode" else 1.15
    return 1.5 if phase == "decode" else 1.1


def remarks(found: Sequence[Measurement]) -> str:
    active = "; ".join(f"{name}: {active_weights(name) / 1e6:.1f} M" for name in MODELS)
    return (
        "Random weights, hidden 1024, 8 layers, 16 query and 8 key/value heads of 64, vocabulary 2048; batch 1, "
        f"{all_threads()} threads, {N_NEW} new tokens. "
        f"Weights that a token meets in the layers: {active}.\n\n"
        "Medians of turns, taken by all contenders of a row in turn; a turn is disturbed when other processes took "
        "more than a tenth of the machine, and with too few quiet ones there is no ratio. transformers and llama.cpp "
        "run in processes of their own, without our setting of OpenMP's threads. transformers computes in fp32, each "
        "phase with its fastest expert implementation. bf16, f16, int8 (one scale a row) and int4 (groups of 32, the "
        'head int8) are how our weights are stored; arithmetic is fp32, in rows "by int8" int8, with inputs rounded to '
        '8 bits, in rows "by bf16" with inputs rounded to bf16. llama.cpp: llama-bench -ub 1024, '
        "else its defaults, so keys and values in f16; q8_0 and q4_0 files with fp32 norms and routers, the head of a "
        "q4_0 file in q8_0. It multiplies q8_0 and q4_0 with activations rounded to 8 bits. From 28 November on it "
        "is commit 0c1e570, which llama_cpp_python 0.3.36 carries, built by cmake's defaults and GGML_NATIVE: OpenMP, "
        "llamafile's and repacked products, no BLAS. Each row names the instruction set that our "
        "kernels were built for, and the processor; llama.cpp was built on the same machine, so with its own. *AVX2 "
        "held*: a processor with AVX-512 on which our kernels, torch's libraries and llama.cpp's build had AVX2 "
        "alone.\n\n"
        "The limit of prefill is the work of the matrices and of causal attention at the rate of the fastest large "
        "product of the same arithmetic, which the row names. Taken in each turn: torch's, oneDNN's, that of our own "
        "kernels and, where it multiplies so, llama.cpp's prefill of the dense model, attention and all. Rows of "
        "before, which name no library, had torch's alone. torch computes with our setting of OpenMP's threads there. "
        "The limit of decode is the bytes of the active weights, the head, and keys and values of 16 bits, at the rate "
        "of the fastest way to read memory once: 1 GiB on the Emerald Rapids, whose third cache has 260 MB, and in "
        "rows of December, and 256 MiB in the others. int4 counts 4.5 bits a weight, a scale of 16 bits for 32. "
        "Ours keeps keys and values in fp32: a token of ours reads "
        f"{least_and_most(PROMPTS[0])} times as much as the limit counts behind {PROMPTS[0]} tokens, and "
        f"{least_and_most(PROMPTS[-1])} times behind {PROMPTS[-1]}, least in f32 and most in int4: its share of the "
        "rate is so much higher than the ratio says.\n\n"
        "Until 28 November an end token could end one of our answers, and its decoding then looked faster than it was. "
        "Of after that are the rows of the Emerald Rapids, those from 30 November on of the Zen 4, those of AVX-512 of "
        "the Zen 5, and those of 512 tokens in int8 arithmetic on the Zen 3. We do not know of a row that it hastened. "
        "One is a sign of it, or of faster memory in its run: 128 experts in f32 held to AVX2 decode faster behind "
        "4096 tokens than behind 512.\n\n"
        "Which kernels each row has. Rows of models of experts from before 29 November may be older than the kernels "
        "that [experts with few rows](../decisions/0007-kernels-for-many-tokens.md) have in prompts; rows of the Zen 3 "
        "are newer, and those of AVX-512 of the Zen 4 and the Zen 5. Kernels [ask into the second "
        "cache](../decisions/0007-kernels-for-many-tokens.md) since 30 November: so do the rows of the Zen 4, but for "
        "some of narrow weights behind 4096 tokens. Decoding of the way before is slower on a Zen 4. With AVX-512 a "
        "Zen 5 asks into the first cache, and for keys and values too, since 1 December: so do its rows of that day. "
        "A processor with VNNI multiplies bytes in decoding int4 [in fp32 arithmetic "
        "too](../decisions/0005-kernels-for-decoding.md): so in rows of AVX-512 of the Zen 4 and the Zen 5. "
        "With int8 attention, shares and values are whole numbers since 30 November. All rows of the Emerald Rapids "
        "are of two or three turns and of 30 November, those of AVX-512 of the Zen 4 and the Zen 5 of two to seven and "
        "of 1 December. Of AMD's others, most rows behind 4096 tokens and held to AVX2 are of one turn.\n\n"
        "Ratios in short, prefill / decode: to llama.cpp, and to the limits. Not taken yet: "
        f"{not_taken(found)}.\n\n{by_model(found)}\n\nAll rows:"
    )


def least_and_most(n_prompt: int) -> str:
    """What a token of ours reads, as a multiple of what the limit of decode counts: from the least to the most."""
    n_context = context_of(n_prompt)
    factors = [reads_more(name, form.weight_bits, n_context) for name in MODELS for form in FORMS.values()]
    return f"{min(factors):.2f} to {max(factors):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="how weights are held")
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, help="lengths, in tokens")
    parser.add_argument("--turns", type=int, help="of each contender; by default 3, 2 beyond 512 tokens, 1 beyond 1024")
    parser.add_argument("--write-only", action="store_true", help="write the models, and race another time")
    arguments = parser.parse_args()
    forms = [form for form in FORMS if form in arguments.forms]
    for needing, why in ((MULTIPLY_BF16, tables.why_not_bf16()), ((INT8_ATTENTION,), tables.why_no_byte_attention())):
        for form in filter(forms.__contains__, needing if why is not None else ()):
            print(f"{form}: left out, {why}", flush=True)
            forms.remove(form)
    if lacking := unheld():
        parser.error(f"the kernels are held to {loaded().instruction_set}; set {' '.join(lacking)} too")
    bench, missing = find_llama_bench()
    for name in arguments.models:
        if arguments.write_only:
            with folder_of(name) as folder:
                written(name, folder, forms if bench else ())
            continue
        # Each race is kept at once, should the next be interrupted.
        for found in compared(name, forms, arguments.prompts, arguments.turns, bench or str(missing)):
            before = read_json(PAGE)
            if was_quiet(before, found):
                print("DISTURBED: the page keeps the quiet rows that it has", flush=True)
                continue
            page = sorted(merged(before, found), key=place)
            write_page(PAGE, "How fast the reference engine is", page, remarks(page))


if __name__ == "__main__":
    main()
