"""Runs of a history that lie in it more than once: a backup, an unpacked bundle. As runs of their own they would make
the noise between runs look smaller than it is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from results.history.points import RunPoint

MOST_TOLD = 4


class Copy(NamedTuple):
    """Folders: that of a run, and of the one that counts in its place."""

    folder: str
    of: str


def copies_told(copies: Sequence[Copy]) -> Iterator[str]:
    """A sentence, where there are any."""
    if copies:
        own = "; ".join(f"{one.folder} of {one.of}" for one in copies[:MOST_TOLD])
        more = f" and {len(copies) - MOST_TOLD} more" if len(copies) > MOST_TOLD else ""
        yield f"Copies of runs, which count once: {own}{more}."


def without_copies(runs: Sequence[RunPoint], preferred: Collection[str] = ()) -> tuple[list[RunPoint], list[Copy]]:
    """Each run once, in their order: of several folders with one run id a preferred one, else that with most trials,
    else that which has come to its end, else that with fewer failures, else the first."""
    best: dict[str, RunPoint] = {}
    for run in runs:
        other = best.get(run.run_id)
        if other is None or _worth(run, preferred) > _worth(other, preferred):
            best[run.run_id] = run
    kept = [run for run in runs if best[run.run_id] is run]
    copies = [Copy(run.folder, best[run.run_id].folder) for run in runs if best[run.run_id] is not run]
    return kept, copies


def _worth(run: RunPoint, preferred: Collection[str]) -> tuple[bool, int, bool, int]:
    """Of as many trials, a backup from before a resume has more that failed."""
    return run.folder in preferred, run.n_ok + run.n_failed, not run.is_unfinished, run.n_ok
