"""A process that is no descendant of ours and keeps a core busy, as another user's program does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_FORK = """
import os, sys, time
pid = os.fork()
if pid:
    print(pid, flush=True)
    sys.exit()
os.setsid()
os.close(1)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    pass
"""


@contextmanager
def busy_stranger(seconds: float) -> Iterator[int]:
    """Its process id. Our child forked it and has ended, so it belongs to whoever adopts orphans.

    It lets go of the pipe to us, or we would wait for its end instead of its parent's.
    """
    code = _FORK.format(seconds=seconds)
    ended = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True, timeout=30)
    pid = int(ended.stdout)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
