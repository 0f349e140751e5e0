"""How Dask is set for a fleet, in each of its processes, before `distributed` is used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from harness.fleet.security import HOST

SERIAL = "SERIAL"
"""Each worker has one of it, and each task takes it: one thing at a time."""
TOPIC = "joulebench"
"""Of what workers say while they work."""
NO_WORKERS_TIMEOUT = "60 s"
PAGES = f"{HOST}:0"
"""Where Dask's pages listen, which are empty."""

SETTINGS: dict[str, Any] = {
    # A trial belongs to its device, and to the lease that it runs under.
    "distributed.scheduler.work-stealing": False,
    # One lost worker, and the coordinator decides what follows: it counts attempts, Dask does not.
    "distributed.scheduler.allowed-failures": 0,
    "distributed.scheduler.no-workers-timeout": NO_WORKERS_TIMEOUT,
    "distributed.scheduler.worker-ttl": "30 s",
    "distributed.comm.timeouts.connect": "10 s",
    "distributed.comm.timeouts.tcp": "30 s",
    "distributed.comm.retry.count": 0,
    # Dask's pages tell what runs here, and ask for no certificate. Their server starts whatever is set.
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    # What Dask looks at while a trial is measured costs CPU time beside it.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.system-monitor.interval": "60 s",
    "distributed.admin.system-monitor.gil.enabled": False,
    "distributed.worker.memory.target": False,
    "distributed.worker.memory.spill": False,
    "distributed.worker.memory.pause": False,
    "distributed.worker.memory.terminate": False,
    "logging": dict.fromkeys(
        ("distributed", "distributed.client", "bokeh", "tornado", "tornado.application", "asyncio"), "critical"
    ),
}
"""`logging`: what Dask says of lost connections is told in our own words."""


def resource_of(device: str) -> str:
    """What a worker advertises of its device."""
    return f"device {device}"


def device_of(resource: str) -> str | None:
    """None of other resources."""
    return resource.removeprefix("device ") if resource.startswith("device ") else None


def settle_dask() -> None:
    """Before `distributed` is imported: it sets up its loggers then."""
    import dask

    dask.config.set(SETTINGS)


def when_parent_ends(call: Callable[[], None]) -> None:
    """When whoever started this process is gone, however it ended: its end of our standard input closes."""

    def watch() -> None:
        while sys.stdin.buffer.read(1 << 16):
            pass
        call()

    threading.Thread(target=watch, name="watches the parent", daemon=True).start()
