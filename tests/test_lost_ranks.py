"""A process of several that dies is named, its work begins anew, and none outlives the first."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import EngineError
from engines.model.checkpoints import inspect_checkpoint
from engines.parallel.engine import ParallelEngine
from engines.parallel.processes import Workers
from engines.parallel.running import RanksAsked
from engines.reference import ReferenceEngine
from tests.command import environment
from tests.eventually import gone, is_alive
from tests.ranks import (
    BUNDLED,
    CHUNK,
    asked,
    assert_same_answers,
    one_process,
    technique,
)


@pytest.fixture(scope="module")
def one() -> ReferenceEngine:
    return one_process()


def what_is_left() -> tuple[list[str], int]:
    """Folders and shared files of ranks, and sockets that this process listens at or is connected by."""
    gc.collect()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if ".sums" in line]
    folders = [str(path) for path in Path(tempfile.gettempdir()).glob("joulebench-ranks-*")]
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.exists()]
    return [*mapped, *folders], sum(link.startswith("socket:") for link in links)


def killing(pids: Callable[[], list[int]], when: str) -> Callable[..., None]:
    """A listener that kills the second process at an edge of a request."""

    def on_phase(event: str, at_s: float) -> None:
        if event == when:
            os.kill(pids()[1], signal.SIGKILL)

    return on_phase


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("when", ["before", "request start", "prefill end"])
def test_a_rank_that_dies_is_named_and_the_next_request_has_new_ones(
    when: str, one: ReferenceEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it waits, in prefill, and in decoding: by name, before an exchange gives up; nothing is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = what_is_left()
    engine = ParallelEngine(
        RanksAsked(inspect_checkpoint(BUNDLED), technique("expert-parallel"), 2, prefill_chunk=CHUNK, threads=1)
    )
    try:
        engine.reset()
        lost = engine.process_ids()[1]
        if when == "before":
            os.kill(lost, signal.SIGKILL)
        request = asked("generate", 200, 4, max_new_tokens=400, ignore_end_tokens=True)
        with pytest.raises(EngineError, match=rf"rank 1 of 2 \(process {lost}\) ended by signal 9 \(SIGKILL\)"):
            engine.run(request, killing(engine.process_ids, when))
        assert_same_answers(one, engine)
        ranks = engine.process_ids()[1:]
        assert ranks != [lost]
    finally:
        engine.close()
    assert gone([lost, *ranks])
    if when == "before":
        del engine
        assert what_is_left() == before


@pytest.mark.parametrize("before_it_is_told", [False, True])
def test_a_rank_that_dies_while_it_loads_is_named(before_it_is_told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    started = Workers._start_process

    def killed(self: Workers, rank: int) -> None:
        started(self, rank)
        if rank != 1:  # of two that died, either may be seen first
            return
        os.kill(self.processes[-1].pid, signal.SIGKILL)
        if before_it_is_told:
            self.processes[-1].wait()

    monkeypatch.setattr(Workers, "_start_process", killed)
    engine = ParallelEngine(RanksAsked(inspect_checkpoint(BUNDLED), technique("tensor-parallel"), 3, threads=1))
    try:
        with pytest.raises(EngineError, match=r"rank 1 of 3 \(process \d+\) ended by signal 9 \(SIGKILL\)"):
            engine.reset()
    finally:
        engine.close()


ORPHANS = """
import signal, time
from engines.model.checkpoints import inspect_checkpoint
from engines.parallel.engine import ParallelEngine
from engines.parallel.running import RanksAsked
from engines.techniques.presets import preset_parameters
if __name__ == "__main__":
    # Who runs the tests may ignore it, and a child inherits that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    technique = preset_parameters("tensor-parallel")()
    engine = ParallelEngine(RanksAsked(inspect_checkpoint("bundled:tiny-qwen3-moe"), technique, 3, threads=1))
    engine.reset()
    print(*engine.process_ids()[1:], flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_its_parent(how: signal.Signals, tmp_path: Path) -> None:
    script, folder = tmp_path / "orphans.py", tmp_path / "folder"
    script.write_text(ORPHANS)
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment() | {"TMPDIR": str(folder)},
    ) as parent:  # fmt: skip
        assert parent.stdout is not None
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 2
        assert all(map(is_alive, ranks))
        assert list(folder.glob("joulebench-ranks-*"))
        parent.send_signal(how)
        parent.wait(60)
    assert gone(ranks)
    assert not list(folder.glob("joulebench-ranks-*"))
