"""How other processes of ours are started."""

from __future__ import annotations

import sys


def own_module(name: str) -> tuple[str, ...]:
    """What runs a module of ours in a process of its own. -P: Python would look for it, and for all that it imports, in
    the current folder first, where a user's `results.py` or `queue.py` may lie."""
    return sys.executable, "-P", "-m", name
