"""The folder of real data sets, for tests that want one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_OF_TESTS = "JOULEBENCH_TESTS_DATA"
"""Where pytest's workers find it."""
_FOLDER = Path(
    os.environ.pop("JOULEBENCH_DATA", "") or os.environ.get(_OF_TESTS) or Path(__file__).parents[2] / "shared" / "data"
)
"""Taken out of the environment: what is tested would read it too, and then find data where a test means none."""
os.environ[_OF_TESTS] = str(_FOLDER)


def data_folder() -> Path:
    """JOULEBENCH_DATA, or shared/data beside the repository. Skips the test where neither is there."""
    if not _FOLDER.is_dir():
        pytest.skip(f"no data folder at {_FOLDER}; set JOULEBENCH_DATA")
    return _FOLDER
