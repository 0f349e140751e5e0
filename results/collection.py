"""Python's collector of objects that hold each other, kept still while it would look through many for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection(stay: bool = True) -> Iterator[None]:
    """Around work that makes many objects which all stay until its end: they are not looked through again and again.

    stay: they stay for long after it, and hold no cycles: no later collection looks through them either.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if stay:
            gc.freeze()
        if enabled:
            gc.enable()
