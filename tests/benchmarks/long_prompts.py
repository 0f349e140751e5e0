"""Prefill of long prompts beside a short one, for each operation that it takes: what length alone costs our engine.

python -m tests.benchmarks.long_prompts [MODEL ...] [--forms f32 int8 ...] [--prompts 4096 16384] [--turns 2]

RACE_MODELS names a folder where models are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.benchmarks.engine_speed import folder_of, instructions_here, ours, written
from tests.benchmarks.measurement import Measurement, all_threads, beside, merged, read_json, write_page
from tests.benchmarks.race_forms import BF16_ATTENTION, BF16_FORM, FORMS, INT8_ATTENTION, conditions
from tests.benchmarks.race_models import MODELS, add_models, attention_flop, prefill_flop
from tests.benchmarks.timing import Turns

PAGE = "long-prompts"
SHORT, PROMPTS = 1024, (4096, 16384)
SHARE = 0.8
"""Of the short prompt's rate, that a long one is to keep."""
FP32_ATTENTION, FP32_PRODUCT, INT8_PRODUCT = 2 * 210, 505, 2022
"""GFLOP/s of two cores of a Zen 5 with AVX-512: what attention reaches (decision 29), and the fastest large products
known."""


def measurements(
    name: str, folder: Path, forms: Sequence[str], prompts: Sequence[int], n_turns: int
) -> Iterator[list[Measurement]]:
    written(name, folder, ())
    for form in forms:
        turn = ours(folder, form)
        turn(SHORT)  # warm-up
        rates = {n: Turns() for n in (SHORT, *prompts)}
        for _ in range(n_turns):
            for n_prompt, turns in rates.items():
                prefill, _ = turn(n_prompt)
                turns.add(prefill_flop(name, n_prompt) / prefill.seconds / 1e9, prefill.is_quiet)
        print(f"{name}, {form}: {rates}", flush=True)
        short = rates[SHORT].figure(n_turns)
        yield [
            beside(
                "prefill",
                "GFLOP/s",
                conditions(name, form, n_prompt, instructions_here()),
                rates[n_prompt].figure(n_turns),
                short,
                f"a prompt of {SHORT}",
                SHARE,
            )
            for n_prompt in prompts
        ]


def remarks() -> str:
    longest = max(PROMPTS)
    shares = {name: attention_flop(name, longest) / prefill_flop(name, longest) for name in MODELS}

    def at_most(share: float, attention: int) -> float:
        return 1 / (share / attention + (1 - share) / INT8_PRODUCT)

    said = "; ".join(
        f"{name}: {share:.2f}, so {at_most(share, FP32_ATTENTION):.0f} and {at_most(share, FP32_PRODUCT):.0f}"
        for name, share in shares.items()
    )
    return (
        f"The models and forms of [engine speed](engine-speed.md), {all_threads()} threads, batch 1. "
        "Operations are those of the matrices and of causal attention, whose part grows with the prompt; attention is "
        f"bf16 in the forms {BF16_FORM} and {BF16_ATTENTION}; in {INT8_ATTENTION} queries and keys have 8 bits, and "
        "shares and values are whole numbers of 16 bits (bf16 in rows of the Zen 4); in others it is fp32. A long "
        f"prompt is to keep {SHARE} of the rate of {SHORT} tokens.\n\n"
        "Faster products do not bring int8 by int8 there while attention is fp32. If s is attention's share "
        "of the operations, A its rate and P that of the products, a prompt runs at 1 / (s / A + (1 - s) / P). With "
        f"{longest} tokens s is as follows, and so is that rate in GFLOP/s on two cores of a Zen 5 with AVX-512, if "
        f"products ran at {INT8_PRODUCT}, the fastest large one known in int8, and attention at the {FP32_ATTENTION} "
        f"that it reaches or at {FP32_PRODUCT}, the fastest large fp32 product known (derived): {said}. [Why attention "
        "is not rounded](../decisions/0029-int8-arithmetic.md) where a plan asks for int8 and nothing more: "
        '`quantise.attention_arithmetic = "bf16"` or `"int8"` asks for it.'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    forms = ["f32", BF16_FORM, "int8 by int8", BF16_ATTENTION, INT8_ATTENTION]
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=forms)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, help="lengths, in tokens")
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    for name in arguments.models:
        with folder_of(name) as folder:
            for found in measurements(name, folder, arguments.forms, arguments.prompts, arguments.turns):
                write_page(PAGE, "What the length of a prompt costs", merged(read_json(PAGE), found), remarks())


if __name__ == "__main__":
    main()
