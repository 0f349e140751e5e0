"""Whether memory that was freed is taken from the system again, by the pages that the system clears."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PAGES_OF_A_ROUND = """
import ctypes, resource
import torch
from engines.freed_memory import keep_freed_memory
NO_HUGE_PAGES = 41  # PR_SET_THP_DISABLE: one huge page would count as one
ctypes.CDLL(None).prctl(NO_HUGE_PAGES, 1, 0, 0, 0)
keep_freed_memory()
def round():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.empty(4 << 20).fill_(1.0) for _ in range(8)]  # 16 MiB each
    del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min([round() for _ in range(4)][1:]))
"""


def pages_of_a_round(**setting: str) -> int:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    found = subprocess.run(
        [sys.executable, "-c", PAGES_OF_A_ROUND],
        env=others | setting,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(found.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_what_is_freed_is_used_again() -> None:
    """The least of the rounds behind the first: by how addresses fall, one of them may take a block more."""
    n_pages = 8 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")
    assert pages_of_a_round() < n_pages / 10
    # What a user has set stands: 0 gives all of it back.
    assert pages_of_a_round(MALLOC_TRIM_THRESHOLD_="0") > n_pages / 2
