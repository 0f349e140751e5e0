"""The folder of real data sets, for tests that want one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def data_folder() -> Path:
    """JOULEBENCH_DATA, or shared/data beside the repository. Skips the test where neither is there."""
    folder = Path(os.environ.get("JOULEBENCH_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}; set JOULEBENCH_DATA")
    return folder
