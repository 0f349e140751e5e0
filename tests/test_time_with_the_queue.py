"""Where requests arrive by themselves the time with the queue is judged, and the engine's own is not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from results.history.index import open_history
from results.history.marks import mark
from results.history.regress import Asked, regress
from results.trials import Trial
from tests.compared_runs import between
from tests.histories import ASKED, write_run
from tests.run_builders import cell, completion, trial

WAIT_S = 3.0


def arrived(repeat: int, own_s: float, waited_s: float) -> Trial:
    """A request that waited, and then took so long."""
    asked = completion("s1", waited_s, token_times_s=(waited_s + own_s / 2, waited_s + own_s))
    waiting = asked.model_copy(update={"arrival_s": 0.0})
    return trial("c1", repeat, completions=[waiting], requests_sha256=ASKED)


def batching(folder: Path, batches: bool, seed: int, day: int = 0) -> Path:
    """Requests that are answered together take longer by themselves, 1.4 for 1 s, and wait less, 0.5 for 3 s."""
    own_s, waited_s = (1.4, 0.5) if batches else (1.0, WAIT_S)
    near = 1 + 0.002 * np.random.default_rng(seed).standard_normal(6)
    trials = [arrived(i, own_s * float(one), waited_s * float(one)) for i, one in enumerate(near)]
    return write_run(folder, [cell("c1", engine="dropless")], trials, day)


def test_an_arm_that_keeps_requests_waiting_less_is_no_regression(tmp_path: Path) -> None:
    for day in range(16):
        batching(tmp_path / f"run{day:03d}", day >= 8, day, day)
    with open_history(tmp_path) as found:
        mark(found, "good", ["run000", "run001", "run002"], add=False)
        verdicts = {one.figure.metric: one for one in regress(found, "good", Asked()).judged}
    assert not {"e2e", "ttft"} & verdicts.keys()
    with_queue = verdicts["e2e_from_arrival"]
    assert with_queue.verdict == "IMPROVED"
    assert with_queue.series.size(with_queue.change or 0.0) == pytest.approx(1.9 / 4.0 - 1, abs=0.01)
    assert verdicts["tpot"].verdict == "REGRESSION", "tokens of a batch do come more slowly"


def test_of_two_runs_the_engines_own_time_is_different_and_not_worse(tmp_path: Path) -> None:
    found = between(batching(tmp_path / "a", False, 1), batching(tmp_path / "b", True, 2))
    verdicts = {row.first.metric: row.verdict for row in found.rows}
    assert (verdicts["e2e_from_arrival"], verdicts["ttft_from_arrival"]) == ("better", "better")
    assert (verdicts["e2e"], verdicts["ttft"]) == ("different", "different")
