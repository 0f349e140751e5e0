"""Tasks in several processes: what ends them, and that rows of the cross table come back as from one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from devices.models.sheet import load_sheet
from engines.pricing.routing_sources import UniformRouting
from engines.pricing.shapes import NAMED_SHAPES
from harness.cross.pricing import pricing, wanted_processes
from harness.cross.table import Question, cross_table
from harness.processes import processes


def test_rows_of_two_processes_are_those_of_one() -> None:
    question = Question(NAMED_SHAPES["mixtral-8x7b"], UniformRouting(1), 16, 2, 8)
    asked = [load_sheet("a100"), load_sheet("m2-ultra")], ("gpu", "npumoe", "monde", "router-pf")
    with pricing(question, 2) as price:
        found = cross_table(question, *asked, price=price)
    assert {row.result for row in found} >= {"ok", "not priced"}
    assert found == cross_table(question, *asked)


@pytest.mark.parametrize(("jobs", "n_rows", "wanted"), [(None, 5, 1), (3, 2, 2), (1, 500, 1), (3, 500, 3)])
def test_few_rows_start_no_processes(jobs: int | None, n_rows: int, wanted: int) -> None:
    assert wanted_processes(jobs, n_rows, False) == wanted


def test_an_error_of_a_task_is_raised_here_and_ends_the_others() -> None:
    def divide_while_another_sleeps() -> None:
        with processes(2) as pool:
            pool.submit(signal.pause)  # for ever: that we come back at all says that it was not waited for
            pool.submit(divmod, 1, 0).result()

    with pytest.raises(ZeroDivisionError):
        divide_while_another_sleeps()


SLEEPING = """
import time
from harness.processes import processes
if __name__ == "__main__":
    with processes(2) as pool:
        waiting = [pool.submit(time.sleep, 600) for _ in range(2)]
        print("began", flush=True)
        waiting[0].result()
"""


DEAF = """
import signal
from harness.processes import processes
if __name__ == "__main__":
    with processes(2) as pool:
        blocked = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
    print(signal.SIGINT in blocked, signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
"""


def test_ctrl_c_is_for_the_first_process_alone_from_the_start_of_the_others(tmp_path: Path) -> None:
    """One that heard it while it imported torch printed 80 lines of traceback."""
    script = tmp_path / "deaf.py"
    script.write_text(DEAF, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_a_kill_leave_no_process(number: signal.Signals, tmp_path: Path) -> None:
    """Ctrl-C comes to the whole group, a kill to the first process alone."""
    script = tmp_path / "sleeping.py"
    script.write_text(SLEEPING, encoding="utf-8")
    first = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "began\n"
    (os.killpg if number == signal.SIGINT else os.kill)(first.pid, number)
    # Its children hold the same pipe: it ends when the last of them does.
    _, errors = first.communicate(timeout=60)
    assert errors.count("KeyboardInterrupt\n") == (number == signal.SIGINT), errors
