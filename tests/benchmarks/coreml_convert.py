"""How long a layer of Phi-3.5-MoE's size takes to become Core ML packages, and how much memory.

python -m tests.benchmarks.coreml_convert [--hidden 4096 --width 6400 --turns 2]

A made model of one layer (16 experts, bf16) and an uneven made profile. Each conversion is a process of its own, whose
peak of resident memory is the kernel's own and holds the interpreter, the libraries and the mapped pages of the
checkpoint, which the kernel can take back. The checkpoint was read before.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engines.coreml.conversion import Asked, Conversion
from engines.made_models import MadeSizes, write_made_model
from engines.profile import Profile
from engines.techniques.presets import preset_parameters
from harness.coreml_convert import convert_all
from tests.benchmarks.loading import read_once
from tests.benchmarks.measurement import Measurement, beside_other_machines, measured, write_page
from tests.benchmarks.timing import Turns, timed

N_EXPERTS, TOP_K, CHUNK, CONTEXT = 16, 2, 256, 2048
PAGE, LIMIT_BYTES = "coreml-convert", 8e9
UNEVEN = tuple(100 * (N_EXPERTS - e) for e in range(N_EXPERTS))
"""Counts of a made profile: tiers of 64, 32 and 16 rows at chunk 256."""
TITLE = "What converting a layer to Core ML packages costs"
PREAMBLE = (
    "Lower is better. One layer of 16 experts, bf16 in the checkpoint, of a made model with random weights and made"
    " counts; attention with and without a state at 256 and 32 tokens beside it. Packages are written to a disk. Peak"
    " memory is the process's largest resident set, with libraries and mapped pages of the checkpoint, the largest of"
    " the turns. Seconds are the median of the turns. Rows of 24 and 26 November are of before a hundred checks"
    " of each program, which could change nothing, were left out."
)


class Case(NamedTuple):
    technique: str
    parameters: dict[str, Any]
    weights: str

    @property
    def words(self) -> str:
        return " ".join([self.technique, *(f"{k}={v}" for k, v in self.parameters.items()), self.weights])


CASES = (
    Case("npumoe-t", {}, "float16"),
    Case("npumoe-tg", {"group_size": 4}, "float16"),
    Case("npumoe-tg", {"group_size": 8}, "float16"),
    Case("npumoe-tg", {"group_size": 4}, "int8"),
)


def convert(model: Path, case: Case, out: Path) -> None:
    """In the process that is watched; prints what it found."""
    technique = preset_parameters(case.technique)(**case.parameters)
    profile = Profile({0: UNEVEN}, TOP_K, 1)
    asked = Asked(technique, CHUNK, CONTEXT, case.weights)  # type: ignore[arg-type]
    conversion = Conversion(str(model), asked, profile, "0" * 64)
    took = timed(lambda: convert_all(conversion, out))
    told = {
        "seconds": took.seconds,
        "is_quiet": took.is_quiet,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "packages": len(conversion.packages),
        "graphs": sum(len(package.functions) for package in conversion.packages),
        "weight_bytes": conversion.manifest.weight_bytes,
        "largest_bytes": max(package.weight_bytes for package in conversion.packages),
    }
    print(json.dumps(told))


def watched(model: Path, case: Case, out: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.coreml_convert", "--child", str(model), str(out)]
    found = subprocess.run(
        [*command, json.dumps(case)], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    told: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    on_disk = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    shutil.rmtree(out)
    return told | {"disk_bytes": on_disk}


def rows_of(case: Case, turns: list[dict[str, Any]], sizes: MadeSizes) -> list[Measurement]:
    told, took = turns[0], Turns()
    for turn in turns:
        took.add(turn["seconds"], turn["is_quiet"])
    seconds = took.figure(len(turns))
    shape = f"H {sizes.hidden}, I {sizes.expert_width}"
    conditions = f"{case.words}; {shape}; {told['packages']} packages of {told['graphs']} graphs, the largest"
    conditions += f" {told['largest_bytes'] / 1e6:.0f} MB of weights"
    peak_bytes = max(turn["peak_bytes"] for turn in turns)
    return [
        measured("a layer", seconds.median, "s", conditions, note=seconds.turns),
        measured("peak memory", peak_bytes / 1e9, "GB", conditions, target=LIMIT_BYTES / 1e9),
        measured("on disk / weights", told["disk_bytes"] / told["weight_bytes"], "x", conditions),
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--width", type=int, default=6400)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        model, out, case = asked.child
        convert(Path(model), Case(*json.loads(case)), Path(out))
        return
    n_heads = max(asked.hidden // 128, 1)
    sizes = MadeSizes(asked.hidden, asked.width, N_EXPERTS, TOP_K, 1, n_heads, max(n_heads // 4, 1), head_dim=128)
    found: list[Measurement] = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_made_model(Path(folder) / "model", sizes, torch.bfloat16)
        read_once(model)
        for case in CASES:
            turns = [watched(model, case, Path(folder) / "packages") for _ in range(asked.turns)]
            found += rows_of(case, turns, sizes)
            took = ", ".join(f"{turn['seconds']:.1f} s" for turn in turns)
            print(f"{case.words}: {took}, {turns[0]['peak_bytes'] / 1e9:.2f} GB", flush=True)
    write_page(PAGE, TITLE, beside_other_machines(PAGE, found), PREAMBLE)


if __name__ == "__main__":
    main()
