"""What a forked command does is what a new process does, but for the time of imports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import joulebench, run_python
from tests.histories import made_trial, write_run
from tests.run_builders import cell


def test_the_page_of_a_forked_command_is_that_of_a_new_process(tmp_path: Path) -> None:
    """The first forked one keeps the script of the charts, the second takes it."""
    write_run(tmp_path / "run", [cell("c1")], [made_trial("c1", 0, 1.0)])
    pages = []
    for fresh in (True, False, False):
        page = tmp_path / f"page{len(pages)}.html"
        assert joulebench("history", str(tmp_path), "--html", str(page), fresh=fresh).code == 0
        pages.append(page.read_bytes())
    assert b"vegaEmbed" in pages[0]
    assert pages[1:] == pages[:1] * 2


@pytest.mark.parametrize(
    ("code", "ends", "output", "errors"),
    [
        ("print('done')", 0, "done\n", ""),
        ("raise SystemExit", 0, "", ""),
        ("raise SystemExit(7)", 7, "", ""),
        ("raise SystemExit(256 + 3)", 3, "", ""),
        ("raise SystemExit('words')", 1, "", "words\n"),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("import atexit; atexit.register(print, 'at the end'); raise SystemExit(2)", 2, "at the end\n", ""),
        (
            "import threading; threading.Timer(0.01, print, ['a thread']).start(); raise SystemExit(2)",
            2,
            "a thread\n",
            "",
        ),
        ("import sys; sys.stdout = open('/dev/full', 'w'); print('lost')", 120, "", "No space left on device\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, "", ""),
    ],
)
def test_a_forked_process_ends_as_python_does(code: str, ends: int, output: str, errors: str) -> None:
    found = run_python(code)
    assert (found.code, found.stdout) == (ends, output)
    assert found.stderr.endswith(errors)
    assert bool(found.stderr) == bool(errors)
