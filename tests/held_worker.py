"""A worker whose answer is on its way for as long as a file is not there: `python -m tests.held_worker JSON`.

A task is the path of that file: an empty one, and the answer is there at once.
"""

from __future__ import annotations

import os
import time

from harness.fleet import dask_worker
from harness.fleet.worker_side import Say


class Held:
    """Its bytes, once it has been sent. Dask asks for them when somebody fetches the answer."""

    def __init__(self, until: str, content: bytes) -> None:
        self._until, self._content = until, content

    def __reduce__(self) -> tuple[type[bytes], tuple[bytes]]:
        while self._until and not os.path.exists(self._until):
            time.sleep(0.02)
        return bytes, (self._content,)


class HeldSide:
    """In the place of `harness.fleet.worker_side.WorkerSide`."""

    def answer(self, content: bytes, say: Say) -> Held:
        return Held(content.decode(), b"answer")

    def close(self, is_over: bool) -> None:
        """Nothing is open."""


if __name__ == "__main__":
    dask_worker.UNHEARD_S = 2.0
    from tests import held_worker

    dask_worker.main(held_worker.HeldSide())  # type: ignore[arg-type]
