"""An asyncio loop on a thread of its own, for a program that is not asynchronous: every call has a limit."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any, TypeVar

from devices.base import TransientDeviceError

T = TypeVar("T")

log = logging.getLogger(__name__)

GRACE_S = 1.0
"""How much longer than its limit a call is waited for: it ends by itself, unless something blocks the loop."""
CLOSE_TIMEOUT_S = 5.0


class EventLoopThread:
    """Runs coroutines from any thread. The thread is a daemon: one that hangs does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # What a task of a library leaves behind that nobody waits for, once its link broke.
        self._loop.set_exception_handler(lambda _, context: log.debug("%s: %s", name, context.get("message")))
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], limit_s: float, what: str) -> T:
        """The coroutine's result, or what it raised. Raises `TransientDeviceError` at the limit, after cancelling it.

        what: for the message, such as "iPhone: its battery".
        """
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, limit_s), self._loop)
        try:
            return future.result(limit_s + GRACE_S)
        except TimeoutError as error:
            future.cancel()
            detail = f" ({error})" if str(error) else ""
            raise TransientDeviceError(
                f"{what}: no answer in {limit_s:g} s{detail}; is the phone asleep, or the link gone?"
            ) from error
        except CancelledError as error:
            raise TransientDeviceError(f"{what}: the link was closed meanwhile") from error
        except BaseException:
            # Also Ctrl-C: what was begun is not left running.
            future.cancel()
            raise

    def close(self) -> None:
        """Cancels what still runs, and ends the thread."""
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result(CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {task for task in (asyncio.current_task(),) if task is not None}
    for task in others:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), CLOSE_TIMEOUT_S / 2)
