"""A file system of its own, small enough to be full."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, n_bytes: int) -> Iterator[Path]:
    folder.mkdir()
    mount = shutil.which("mount")
    asked = ["-t", "tmpfs", "-o", f"size={n_bytes}", "none", folder]
    if mount is None or subprocess.run([mount, *asked], check=False).returncode:
        pytest.skip("cannot mount a small tmpfs here (needs root on Linux)")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
