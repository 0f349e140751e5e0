"""Whether the arms of a workload were asked the same: by the hash that each trial keeps of its requests.

They are not where tokenizers differ, where turns stand on each arm's own answers, or where data changed under a run.
Figures of such arms stand side by side, marked; what they are divided by may differ as much as the arms.
"""

from __future__ import annotations

from results.cells import trials_of
from results.runs import SHOWN_DIGITS, RunData


def hashes_by_cell(run: RunData) -> dict[str, tuple[str, ...]]:
    """The hashes of each cell's trials, each once; none where no trial was completed, or none kept a hash."""
    return {
        cell_id: tuple(dict.fromkeys(t.requests_sha256 for t in trials if t.requests_sha256))
        for cell_id, trials in trials_of(run).items()
    }


def asked_alike(run: RunData) -> dict[str, bool]:
    """By workload: whether all arms of whom it is known were asked the same, in all of their trials."""
    hashes = hashes_by_cell(run)
    found: dict[str, set[str]] = {cell.workload: set() for cell in run.cells}
    for cell in run.cells:
        found[cell.workload] |= set(hashes[cell.cell_id])
    return {workload: len(own) <= 1 for workload, own in found.items()}


def shown(hashes: tuple[str, ...]) -> str:
    """For people: "requests 3fa94c127f01"."""
    return f"requests {', '.join(digits[:SHOWN_DIGITS] for digits in hashes) or 'not recorded'}"


def unlike_notes(run: RunData) -> list[str]:
    """What a reader must know of workloads whose arms were asked different requests."""
    return [
        f"{workload}: the arms were not asked the same requests (their hashes differ); compare them with care."
        for workload, alike in asked_alike(run).items()
        if not alike
    ]
