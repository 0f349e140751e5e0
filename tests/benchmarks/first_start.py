"""How long the first start takes, which compiles the kernels, and what a machine without a compiler loses.

python -m tests.benchmarks.first_start [--turns 3]

Each figure is of a process of its own. The first start has an empty cache; a machine without a compiler is a PATH
without one. The two roads answer the same requests in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from engines.kernels.compile import compilers
from tests.benchmarks.measurement import Measurement, beside_other_machines, measured, write_page

NAME = "first-start"
TARGET_S = 20.0
N_PROMPT = 256
FORMS = ("f32", "bf16", "int8", "int4")
BUNDLED = "bundled:tiny-qwen3-moe"
PHASES = ("prefill", "decode")
START = """
import time
begin_s = time.perf_counter()
from engines.kernels.library import loaded
found = loaded()
assert found.kernels is not None, found.reason
print(time.perf_counter() - begin_s)
"""


class Case(NamedTuple):
    """A model, as the children load it."""

    name: str
    source: str
    form: str


Rates = Mapping[str, float]
"""token/s by phase."""


def child(code: Sequence[str], cache: Path, has_compiler: bool = True) -> str:
    """What a process of its own prints last, with that folder as the user's cache."""
    own = os.environ | {"XDG_CACHE_HOME": str(cache)} | ({} if has_compiler else {"PATH": str(cache)})
    done = subprocess.run([sys.executable, *code], env=own, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def start_s(cache: Path) -> float:
    return float(child(["-c", START], cache))


def rates_of(case: Case, cache: Path, has_compiler: bool) -> Rates:
    code = ["-m", "tests.benchmarks.first_start", "--case", case.source, case.form]
    found: Rates = json.loads(child(code, cache, has_compiler))
    return found


def print_rates(source: str, form: str) -> None:
    """In a child: the fastest of a few turns."""
    from engines.kernels.library import library
    from tests.benchmarks.engine_speed import ours
    from tests.benchmarks.race_forms import N_NEW

    turn = ours(source, form)
    turn(N_PROMPT)
    prefill, decode = zip(*((p.seconds, d.seconds) for p, d in (turn(N_PROMPT) for _ in range(3))), strict=True)
    assert (library() is None) is (os.environ["PATH"] == os.environ["XDG_CACHE_HOME"])
    print(json.dumps({"prefill": N_PROMPT / min(prefill), "decode": (N_NEW - 1) / min(decode)}))


def slower(case: Case, n_turns: int, with_kernels: Path, without: Path) -> list[Measurement]:
    turns = [(rates_of(case, without, False), rates_of(case, with_kernels, True)) for _ in range(n_turns)]
    rows = []
    for phase in PHASES:
        alone, kernels = (statistics.median(turn[side][phase] for turn in turns) for side in (0, 1))
        where = f"{case.name}, {case.form}, prompt {N_PROMPT}, batch 1"
        rows.append(measured(f"{phase}, torch alone", alone, "token/s", where, kernels, "kernels"))
    return rows


def factors(found: Sequence[Measurement]) -> list[float]:
    """How many times slower torch alone is: the least and the most with fp32 weights, then with narrower ones."""
    compared = [m for m in found if m.peer_name == "kernels" and m.ratio is not None]
    slower = [
        [1 / (m.ratio or 1) for m in compared if (", f32," in m.conditions) is is_fp32] for is_fp32 in (True, False)
    ]
    return [edge(some) for some in slower for edge in (min, max)]


REMARKS = """The first start on a machine compiles the kernels; later ones check and map the library that it left. Each
start is a process of its own, from before it imports our kernels until they can be called; torch, which takes seconds
more to import, is left out.

On a machine without a C++ compiler torch computes everything. Its rows give token/s beside those of the kernels on the
same weights, processes of both in turn, the median of them; all cores, 64 new tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print_rates(*arguments.case)
        return
    from tests.benchmarks.race_models import MODELS, write_model

    compiler = next(compilers())
    version = subprocess.run([*compiler.command, "--version"], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as scratch:
        caches = [Path(scratch) / str(i) for i in range(arguments.turns)]
        first = [start_s(cache) for cache in caches]
        again = [start_s(caches[0]) for _ in caches]
        note = "one start" if len(caches) == 1 else f"median of {len(caches)} starts"
        conditions = f"empty cache, {version.splitlines()[0]}"
        found = [
            measured("first start", statistics.median(first), "s", conditions, target=TARGET_S, note=note),
            measured("later start", statistics.median(again), "s", conditions.removeprefix("empty cache, "), note=note),
        ]
        name = next(iter(MODELS))
        write_model(name, Path(made))
        without = Path(scratch) / "nothing"
        without.mkdir()
        for form in FORMS:
            for case in (Case(BUNDLED, BUNDLED, form), Case(name, made, form)):
                rows = slower(case, arguments.turns, caches[0], without)
                print(case.name, form, [row.ratio for row in rows], flush=True)
                found += rows
    page = beside_other_machines(NAME, found)
    write_page(
        NAME, "How long does the first start take, and what does a machine without a compiler lose?", page, REMARKS
    )
    print("torch alone is {:.2g} to {:.2g} times slower in fp32, {:.2g} to {:.2g} times else".format(*factors(page)))


if __name__ == "__main__":
    main()
