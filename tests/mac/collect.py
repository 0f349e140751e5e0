"""Tries on a Mac what nobody here could, and gathers what came of it in one folder, and a zip of it.

python -m tests.mac.collect --out mac-report [--rehearse]

Each step is a process of its own. Its output is kept whether it fails or not, and the next step follows. Nothing is
sent anywhere. --rehearse: on another system, run what can be run there, to try this script.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from results.report.files import replace_text

REPOSITORY = Path(__file__).parents[2]
MODEL = "bundled:tiny-qwen3-moe"
STEPS_FILE, PLAN = "steps.json", Path(__file__).with_name("plan.toml")
LIMIT_S = 1800
LEFT_OUT = ("packages", "*.lock")
"""Weights of the bundled model, which everybody has."""


class Step(NamedTuple):
    """command: behind the interpreter's path. needs_mac: says nothing elsewhere."""

    name: str
    why: str
    command: Sequence[str]
    needs_mac: bool = False


def steps_of(out: Path) -> list[Step]:
    """In order; later ones read what earlier ones wrote."""
    packages = str(out / "packages")
    ours = ("-m", "joulebench")
    return [
        Step(
            "doctor", "the machine, its meters, and what was never tried", (*ours, "doctor", "--json", "--seconds", "5")
        ),
        Step("versions", "what is installed", ("-m", "pip", "freeze")),
        Step(
            "convert",
            "packages of the bundled model",
            (*ours, "coreml", "convert", MODEL, "--profile", MODEL, "--chunk", "256", "--out", packages),
        ),
        Step("lint", "what reports say of them", (*ours, "coreml", "lint", packages, "--csv", str(out / "lint.csv"))),
        Step(
            "tests",
            "the tests that only a Mac can run",
            ("-m", "pytest", "-m", "macos", "-p", "no:cacheprovider", f"--junitxml={out / 'tests.xml'}"),
            needs_mac=True,
        ),
        Step(
            "placement",
            "where Core ML puts each operation of each graph",
            ("-m", "tests.mac.placement", packages, str(out / "placement.csv")),
            needs_mac=True,
        ),
        Step(
            "run",
            "time, joules and accuracy of a small plan",
            (*ours, "run", str(PLAN), "--out", str(out / "run")),
            needs_mac=True,
        ),
    ]


class Ended(NamedTuple):
    """code: None where it did not run, or ran into the limit; why says so."""

    name: str
    why: str
    command: str
    code: int | None
    took_s: float
    remark: str | None


def run_step(step: Step, number: int, out: Path, on_mac: bool, limit_s: float = LIMIT_S) -> Ended:
    """Its output goes to `NN-name.txt`."""
    command = [sys.executable, *step.command]
    told = " ".join(command)
    if step.needs_mac and not on_mac:
        return Ended(step.name, step.why, told, None, 0.0, f"needs a Mac; this is {platform.system()}")
    began_s = time.monotonic()
    with (out / f"{number:02}-{step.name}.txt").open("w", encoding="utf-8") as output:
        try:
            code: int | None = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, timeout=limit_s, check=False
            ).returncode
            remark = None
        except subprocess.TimeoutExpired:
            code, remark = None, f"ended after {limit_s:g} s"
        except OSError as error:
            code, remark = None, f"did not start: {error}"
    return Ended(step.name, step.why, told, code, round(time.monotonic() - began_s, 1), remark)


def collect(out: Path, steps: Sequence[Step], on_mac: bool, limit_s: float = LIMIT_S) -> list[Ended]:
    """Runs all; what ended is written down after each."""
    ended: list[Ended] = []
    for number, step in enumerate(steps, 1):
        print(f"{number} of {len(steps)}: {step.name} ({step.why})", flush=True)
        ended.append(run_step(step, number, out, on_mac, limit_s))
        told = {"system": platform.platform(), "on_mac": on_mac, "steps": [one._asdict() for one in ended]}
        replace_text(out / STEPS_FILE, json.dumps(told, indent=1) + "\n")
        print(f"   {ended[-1].remark or f'exit code {ended[-1].code}'}, {ended[-1].took_s:g} s", flush=True)
    return ended


def pack(out: Path) -> Path:
    """A zip beside the folder, without weights."""
    packed = out.with_name(f".{out.name}-packed")
    shutil.rmtree(packed, ignore_errors=True)
    shutil.copytree(out, packed / out.name, ignore=shutil.ignore_patterns(*LEFT_OUT))
    manifest = out / "packages" / "manifest.json"
    if manifest.is_file():
        shutil.copy(manifest, packed / out.name / "manifest.json")
    made = shutil.make_archive(str(out), "zip", packed)
    shutil.rmtree(packed)
    return Path(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    on_mac = platform.system() == "Darwin"
    if not on_mac and not given.rehearse:
        parser.error(f"this is {platform.system()}: only a Mac tries this; --rehearse runs what can be run here")
    out = given.out.absolute()
    if out.exists() and any(out.iterdir()):
        parser.error(f"--out {out}: is there already; name a new folder")
    out.mkdir(parents=True, exist_ok=True)
    collect(out, steps_of(out), on_mac)
    print(f"{pack(out)}: written. Read it, then send it; nothing was sent.")


if __name__ == "__main__":
    main()
