"""What the workloads of one run share: values of a sweep ask other items of the same rows, which are read once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Kept(dict[Hashable, Any]):
    """Lives as long as the run that holds it."""


_kept: ContextVar[weakref.ref[Kept] | None] = ContextVar("what the workloads of a run share", default=None)


def keep_in(found: Kept) -> None:
    """From now on, what workloads can share is kept there."""
    _kept.set(weakref.ref(found))


def once(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` gives, made once a run; outside of runs, each time. Nobody may change it."""
    held = _kept.get()
    found = held() if held is not None else None
    if found is None:
        return make()
    if key not in found:
        found[key] = make()
    made: T = found[key]
    return made
