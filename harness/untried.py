"""What of joulebench was never tried on a Mac: nobody who works on it has one. Told where such a Mac is examined."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from results.environments import Environment
from results.self_tests import Check

MAC = "Darwin"
"""How macOS calls itself."""
COLLECT = "python -m tests.mac.collect"
UNTRIED_ON_A_MAC: dict[str, str] = {
    "macOS itself": "the whole program was tried on Linux only",
    "Core ML execution": "packages were converted, read back and computed by an interpreter on Linux; Core ML ran none",
    "Core ML state": "keys and values in MLState: converted only; decoding with it failed for others (error -14)",
    "Core ML placement": "what MLComputePlan says was never seen; the rules of `coreml lint` are reports of others",
    "Zeus's Apple counters": "read through Zeus from a stand-in for its Mac library, never from a chip",
    "powermetrics": "its text was parsed from logs of others (M1, M4 Max), never read live",
    "torch on MPS": "the reference engine on Apple's GPU was never run",
}
"""What, and how far it was tried."""


def untried_checks(environment: Environment) -> Iterator[Check]:
    """Notes for a Mac; none elsewhere."""
    if not environment.os.startswith(MAC):
        return
    for name, found in UNTRIED_ON_A_MAC.items():
        yield Check(name=name, ok=None, found=f"never tried on a Mac: {found}")
    if environment.machine != "arm64":
        yield Check(
            name="Neural Engine",
            ok=None,
            found=f"{environment.machine}: no Apple silicon, or Python under Rosetta",
            remedy="use a native arm64 Python",
        )
    if importlib.util.find_spec("coremltools") is None:
        from engines.coreml.toolkit import REMEDY

        yield Check(name="coremltools", ok=None, found="is not installed, and Core ML needs it here", remedy=REMEDY)
    yield Check(
        name="help us",
        ok=None,
        found="one command in a checkout tries all of these, and gathers what they say in one folder",
        remedy=f"{COLLECT} --out mac-report",
    )
