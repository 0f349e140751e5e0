"""Where a file goes that cannot be written where it was asked for."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from harness.elsewhere import places, written_somewhere


def gone() -> Path:
    raise FileNotFoundError(errno.ENOENT, "No such file or directory")


def test_each_place_is_told_once_and_a_folder_that_is_gone_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    temporary = Path(tempfile.gettempdir()) / "a"
    assert places("a", tmp_path) == (tmp_path / "a", temporary)
    monkeypatch.setattr(Path, "cwd", gone)
    assert places("a") == (temporary,)
    monkeypatch.setattr(tempfile, "gettempdir", gone)
    assert places("a") == ()


def test_what_was_asked_for_is_tried_though_no_other_place_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "cwd", gone)
    monkeypatch.setattr(tempfile, "gettempdir", gone)
    out = tmp_path / "out"
    assert written_somewhere(out, "a", lambda path: path.write_text("it")) == (out, "")
    target, trouble = written_somewhere(tmp_path / "no" / "out", "a", lambda path: path.write_text("it"))
    assert target is None
    assert trouble == f"--out {tmp_path / 'no' / 'out'}: cannot be written (No such file or directory)"
