"""One small real run, through the command line, shared by all tests that look at a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.command import Finished, joulebench
from tests.plans import two_device_plan, write_plan


class FinishedRun(NamedTuple):
    plan: Path
    directory: Path
    process: Finished


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two arms on the host and two on a modelled device, with a scored and an unscored workload."""
    folder = tmp_path_factory.mktemp("finished")
    plan = write_plan(folder / "plan.toml", two_device_plan())
    process = joulebench("run", str(plan), "--out", str(folder / "run"))
    assert process.code == 0, process.stderr
    return FinishedRun(plan, folder / "run", process)
