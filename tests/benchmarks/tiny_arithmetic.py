"""What rounded arithmetic does to the answers of the bundled model, beside the same weights in fp32 arithmetic.

python -m tests.benchmarks.tiny_arithmetic [--out runs/tiny-arithmetic]

Runs plans/tiny-arithmetic.toml with the command line; what is there already is not run again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from results.accuracy_energy import accuracy_energy
from results.tables import tidy
from tests.benchmarks.measurement import write_page
from tests.benchmarks.tiny_arms import arm_rows, arms_table, run_plan

NAME = "tiny-arithmetic"
PLAN = Path(__file__).parents[2] / "plans" / "tiny-arithmetic.toml"

REMARKS = """The bundled model, trained on generated text (`joulebench train-tiny`), asked items that it was never
trained on: the tasks of [tiny-arms](tiny-arms.md). An arm is named by the form of all its matrices. In an arm "by int8"
or "by bf16" products took inputs rounded so (`quantise.arithmetic`). In bf16 attention of prompts did too, as it does
"with bf16 attention" (`quantise.attention_arithmetic`). "With int8 attention" queries and keys were rounded to 8 bits
there, and shares and values to bf16; since 30 November these are whole numbers, [which round
less](../decisions/0029-int8-arithmetic.md). The others computed in fp32, two of them with keys and values that are kept
in 16 bits (`quantise.cache`). Reference: dropless in fp32. Bold: differs from it by a paired test
(McNemar's exact test, p < 0.05). KL and top 1 are against the reference on generated prose. The checkpoint's weights
are bf16 already, so the arm bf16 holds the same numbers as the reference.

{arms}

Every figure:"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("runs") / NAME)
    run = run_plan(PLAN, parser.parse_args(arguments).out)
    table = accuracy_energy(run, tidy(run))
    write_page(
        NAME,
        "What rounded arithmetic does to the bundled model",
        arm_rows(table),
        REMARKS.format(arms=arms_table(table)),
    )


if __name__ == "__main__":
    main()
