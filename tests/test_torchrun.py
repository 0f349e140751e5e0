"""A run whose ranks torchrun started, and ranks that do not come."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineError
from engines.parallel.torchrun import Launch, Meeting, launch, serve
from results.store import Store
from tests.command import environment
from tests.plans import DROPLESS, raw_plan, write_plan
from tests.ranks import LINKS

EP: dict[str, Any] = {"name": "ep", "technique": {"name": "expert-parallel"}, "ranks": 2, "threads": 1}
TP: dict[str, Any] = {"name": "tp", "technique": {"name": "tensor-parallel"}, "ranks": 2, "threads": 1}


def torchrun(n: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-port", "0"]
    return subprocess.run(
        [*command, "-m", "joulebench", *arguments],
        capture_output=True, text=True, timeout=240, env=environment() | variables, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_the_first_rank_runs_the_plan_and_the_others_compute_their_part(tmp_path: Path) -> None:
    """Two arms of ranks, one after the other, and one of none: the answers are those of one process."""
    plan = write_plan(tmp_path / "p.toml", raw_plan(engine=[DROPLESS, EP, TP]))
    out = tmp_path / "out"
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        done = torchrun(2, "run", str(plan), "--out", str(out), TMPDIR=folder)
        left = [path.name for path in Path(folder).glob("joulebench-*")]
    assert done.returncode == 0, done.stderr
    with Store.view(out) as store:
        run = store.data()
        trials = list(store.trials())
    assert [t.status for t in trials] == ["ok"] * 3
    by_arm = {cell.engine: cell.cell_id for cell in run.cells}
    told = {t.cell_id: t for t in trials}
    road = told[by_arm["ep"]].road
    assert road is not None
    assert (road.n_processes, road.links) == (2, LINKS)
    answers = {
        arm: [(c.is_greedy, pytest.approx(c.loglikelihood, rel=1e-5)) for c in told[cell].completions]
        for arm, cell in by_arm.items()
    }
    assert answers["ep"] == answers["tp"] == answers["dropless"]
    assert done.stdout.count("report.html") == 1, "one rank writes"
    assert not left, "no socket and no file"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "words"),
    [
        (EP | {"ranks": 3}, "error: engine ep: ranks = 3, and torchrun started 2 processes; start it with"),
        (DROPLESS, "error: torchrun started 2 processes, and no engine of the plan has ranks; run it without torchrun"),
    ],
)
def test_another_number_of_processes_is_one_line(engine: dict[str, Any], words: str, tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "p.toml", raw_plan(engine=[engine]))
    done = torchrun(2, "run", str(plan), "--out", str(tmp_path / "out"))
    assert done.returncode != 0
    assert len(re.findall(r"^error: .*$", done.stderr, re.MULTILINE)) == 1
    assert words in done.stderr
    assert not (tmp_path / "out").exists()


def test_what_torchrun_says_is_read_and_several_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path is short, wherever temporary files lie."""
    said = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    assert launch({}) is None
    found = launch(said)
    assert found is not None
    assert (found.rank, found.n_ranks) == (1, 2)
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 100)
    away = launch(said)
    assert away is not None
    assert away.folder == Path("/tmp") / found.folder.name
    with pytest.raises(EngineError, match="started 2 ranks, 1 of them on this machine; ranks share one machine"):
        launch(said | {"LOCAL_WORLD_SIZE": "1"})


def test_a_rank_that_does_not_come_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"started 2 processes, and rank 1 did not come within 0.1 s; is it stopped"):
        Meeting(Launch(0, 2, tmp_path / "m"), meet_s=0.1)
    assert not (tmp_path / "m").exists()
    with pytest.raises(EngineError, match=r"rank 1 of 2: rank 0 did not come within 0.1 s; is it stopped"):
        serve(Launch(1, 2, tmp_path / "m"), meet_s=0.1)


def test_a_folder_that_others_may_read_is_no_place_to_meet(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m").chmod(0o755)
    with pytest.raises(EngineError, match="is not a folder of this user alone"):
        Meeting(Launch(0, 2, tmp_path / "m"), meet_s=0.1)


def test_ranks_that_wait_are_let_go_when_the_first_one_ends(tmp_path: Path) -> None:
    waiting = threading.Thread(target=serve, args=(Launch(1, 2, tmp_path / "m"), 20.0), daemon=True)
    waiting.start()
    meeting = Meeting(Launch(0, 2, tmp_path / "m"), 20.0)
    channel, guest = meeting.take(1)
    assert (guest.pid, guest.poll()) == (os.getpid(), None)
    channel.close()
    meeting.close()
    waiting.join(60)
    assert not waiting.is_alive()
