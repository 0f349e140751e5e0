"""The process in which Dask's scheduler runs: `python -m harness.fleet.dask_scheduler JSON`.

It ends with its coordinator. It knows nothing that cannot be lost: queue and leases are the coordinator's.
"""

from __future__ import annotations

import asyncio
import os
import sys

from harness.fleet.dask_settings import PAGES, settle_dask, when_parent_ends
from harness.fleet.security import Tls, security_of
from results.records import Record

EXIT_CANNOT_LISTEN = 3
READY = "listens on "


class SchedulerAsked(Record):
    host: str
    port: int
    tls: Tls | None = None


async def serve(asked: SchedulerAsked) -> None:
    from distributed.scheduler import Scheduler

    scheduler = Scheduler(
        host=asked.host,
        port=asked.port,
        protocol="tcp" if asked.tls is None else "tls",
        security=security_of(asked.tls),
        dashboard=False,
        dashboard_address=PAGES,
    )
    try:
        await scheduler
    except (OSError, RuntimeError) as error:
        cause = error.__cause__ or error  # Dask tells an address that is taken as a RuntimeError of its own.
        sys.stdout.write(f"{getattr(cause, 'strerror', None) or cause}\n")
        sys.stdout.flush()
        os._exit(EXIT_CANNOT_LISTEN)
    sys.stdout.write(f"{READY}{scheduler.port}\n")
    sys.stdout.flush()
    await scheduler.finished()


def main() -> None:
    asked = SchedulerAsked.model_validate_json(sys.argv[1])
    settle_dask()
    when_parent_ends(lambda: os._exit(0))
    asyncio.run(serve(asked))


if __name__ == "__main__":
    main()
