"""Scores of an arm's next-token distributions against the reference arm's, computed once a cell, outside any window.

The reference answers each request once; what it says of every next token is kept in files, and each arm is then held
against them. Distributions are a function of the request, so repeats would only compute the same again.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from engines.base import Engine, ShowsLogProbabilities
from engines.errors import EngineError
from engines.fidelity import divergence, keep_log_probabilities
from harness.session import ArmScores
from results.records import Request
from results.scratch import ScratchFolder
from results.units import told_apart
from workloads.base import ComparesDistributions


class KeptDistributions:
    """Log-probabilities of reference arms, by reference, in a folder that `close` removes."""

    def __init__(self) -> None:
        self._folder: ScratchFolder | None = None
        self._files: dict[str, list[Path]] = {}

    def files(
        self, key: str, requests: Sequence[Request], build: Callable[[], ShowsLogProbabilities], vocabulary_rows: int
    ) -> list[Path]:
        """A file for each request. build: makes the reference's engine, the first time. Raises `EngineError`."""
        if key not in self._files:
            if self._folder is None:
                self._folder = ScratchFolder("distributions")
            folder = self._folder.path
            needed = 4 * vocabulary_rows * sum(len(r.continuation_ids) for r in requests)
            free = shutil.disk_usage(folder).free
            if needed > free:
                needs, has = told_apart(needed, free)
                raise EngineError(
                    f"the reference's distributions need {needs} in {folder}, {has} are free; lower limit or"
                    " length, or name a larger folder in TMPDIR"
                )
            engine = build()
            files = [folder / f"{len(self._files)}-{i}" for i in range(len(requests))]
            try:
                for request, path in zip(requests, files, strict=True):
                    keep_log_probabilities(engine, request, path)
            except OSError as error:
                raise EngineError(f"the reference's distributions cannot be kept in {folder} ({error})") from error
            self._files[key] = files
        return self._files[key]

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
        self._folder = None
        self._files.clear()


def distribution_scores(
    engine: Engine,
    workload: ComparesDistributions,
    requests: Sequence[Request],
    files: Sequence[Path],
    reference: str,
) -> ArmScores:
    """files: the reference's, one for each request. reference: what it is, for readers. Raises `EngineError`."""
    if not isinstance(engine, ShowsLogProbabilities):
        return ArmScores((), (f"the engine shows no distributions: not compared with {reference}",))
    found = [divergence(engine, request, path) for request, path in zip(requests, files, strict=True)]
    return ArmScores(
        tuple(workload.score_divergences(found)), (f"distributions are compared with those of {reference}",)
    )
