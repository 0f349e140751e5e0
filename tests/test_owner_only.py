"""Files of a run that hold prompts, answers or traces are readable by their owner alone, whatever the umask."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest

from results.database import DATABASE, StoreError
from results.records import PowerTrace
from results.report.files import replace_text
from results.store import Store
from results.trace_files import WINDOW, write_traces
from tests.store_checks import CELLS, INFO


def test_a_trace_is_for_its_owner(tmp_path: Path) -> None:
    trace = PowerTrace(
        meter="m", method="counter", component="cpu", kind="counter",
        times_s=np.array([0.0, 1.0]), values=np.array([0.0, 2.0]),
        sample_interval_s=1.0,
    )  # fmt: skip
    before = os.umask(0)
    try:
        write_traces(tmp_path / "t.parquet", {WINDOW: [trace]}, (0.0, 1.0), ())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "t.parquet").stat().st_mode) == 0o600


def test_a_table_that_cannot_be_written_names_itself_and_leaves_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.csv"

    def parts() -> list[str]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device") as caught:
        replace_text(path, (part for _ in range(1) for part in parts()))
    assert caught.value.filename == str(path)
    assert not path.parent.exists()


@pytest.mark.parametrize("closed", [DATABASE, "."])
def test_a_run_that_only_its_owner_may_read_is_no_damaged_one(closed: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        others = Path(name)
        others.chmod(0o755)
        Store.create(others / "run", INFO, CELLS).close()
        (others / "run" / closed).chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(65534)  # nobody's
        try:
            for opened in (Store.view, Store.holds_run):
                with pytest.raises(StoreError, match=r"cannot be read \(Permission denied\); .* chmod") as caught:
                    opened(others / "run")
                assert "recover" not in str(caught.value)
        finally:
            if is_root:
                os.seteuid(0)
            (others / "run").chmod(0o700)
