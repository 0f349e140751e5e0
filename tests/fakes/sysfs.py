"""Folders like those of sysfs: files that stand still, and files that a thread renews as a driver would."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

RENEWAL_S = 2e-3


class Sysfs:
    """Between `__enter__` and `__exit__` the moving files follow the clock (seconds since it was made).

    Outside they stand as `show` has them: what a thread renews is late where a machine holds it up.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._moving: dict[Path, Callable[[float], object]] = {}
        self._started_s = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        root.mkdir(parents=True, exist_ok=True)

    def add(self, folder: str, files: Mapping[str, object]) -> Path:
        """files: contents by name; a function is called with the seconds that have passed."""
        path = self.root / folder
        path.mkdir(parents=True, exist_ok=True)
        with self._lock:
            for name, content in files.items():
                if callable(content):
                    self._moving[path / name] = content
                    content = content(time.monotonic() - self._started_s)
                _write(path / name, content)
        return path

    def unplug(self, file: Path) -> None:
        """The file goes, as when its driver is unbound."""
        with self._lock:
            self._moving.pop(file, None)
            file.unlink()

    def show(self, passed_s: float) -> None:
        """The moving files as they are after so many seconds."""
        with self._lock:
            for path, content in self._moving.items():
                _write(path, content(passed_s))

    def __enter__(self) -> Sysfs:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(RENEWAL_S):
            self.show(time.monotonic() - self._started_s)


def _write(path: Path, content: object) -> None:
    """sysfs never shows half a number: written beside, then renamed."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(f"{content}\n")
    beside.replace(path)
