"""What a request frees stays with the process, for the next one takes as much."""

from __future__ import annotations

import ctypes
import functools
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h: how much free memory at the heap's end goes back to the system, and how large a piece comes from
the system by itself."""
KEPT = 256 << 20
LARGE = 32 << 20
"""As far as glibc raises it alone."""


@functools.cache
def keep_freed_memory() -> None:
    """By default glibc gives back what a prompt's keys, values and states took. The next prompt gets new pages, which
    the system clears one by one as they are first written: 5 % of its time (docs/decisions/0007). What a user has set
    stands, and other allocators are left alone."""
    is_set = any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ)
    mallopt = None if is_set or os.name != "posix" else getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(TRIM_THRESHOLD, KEPT)
        mallopt(MMAP_THRESHOLD, LARGE)
