"""An app that is started with arguments, and its console until it says that it is done.

What an app prints comes through the instruments' connection that started it, so that stays open meanwhile. `NSLog` is
among it only with OS_ACTIVITY_DT_MODE set. The phone does not stamp it on a clock of ours: times are those of arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from devices.base import Clock, DeviceError, UnendedProgramError
from devices.ios.link import Link
from devices.ios.phone import Phone

LOOK_EVERY_S = 5.0
"""Whether a silent app still runs."""
MAX_CONSOLE = 1 << 20
LINK_GRACE_S = 10.0
TRIPS = 5


class AppRun(NamedTuple):
    """begun_s, ended_s: on the run's clock, when the app was started and when its last word arrived here. trip_s: how
    long the link took there and back before that, at most."""

    console: str
    begun_s: float
    ended_s: float
    trip_s: float


def run_app(
    phone: Phone, app: str, arguments: Sequence[str], last_words: Sequence[str], limit_s: float, clock: Clock
) -> AppRun:
    """See `IosDevice.run_app`."""

    async def follow(link: Link) -> AppRun:
        from pymobiledevice3.services.dvt.instruments.process_control import ProcessControl

        async with ProcessControl(await link.instruments()) as control:
            trip_s = await _trip_s(control, app, clock)
            begun_s = clock.now_s()
            try:
                process_id = await control.launch(
                    app, list(arguments), environment={"OS_ACTIVITY_DT_MODE": "YES", "NSUnbufferedIO": "YES"}
                )
            except AssertionError as error:  # the library's way to say that the answer was no process id
                raise DeviceError(
                    f"ios: {link.udid}: {app} did not start; is it installed, and its developer trusted?"
                ) from error
            try:
                console = await asyncio.wait_for(_console(control, app, process_id, last_words), limit_s)
                return AppRun(console, begun_s, clock.now_s(), trip_s)
            except TimeoutError as error:
                raise UnendedProgramError(
                    f"ios: {link.udid}: {app} has not said that it is done after {limit_s:g} s; it was ended"
                ) from error
            finally:
                with suppress(Exception):  # of a link that broke; the first error is the one to tell
                    await control.kill(process_id)

    return phone.ask(follow, f"running {app}", limit_s + LINK_GRACE_S)


async def _trip_s(control: Any, app: str, clock: Clock) -> float:
    """Of a question that the phone answers at once: the longest of some trips, without the first, which opens a
    channel."""
    trips_s = []
    for _ in range(1 + TRIPS):
        asked_s = clock.now_s()
        await control.process_identifier_for_bundle_identifier(app)
        trips_s.append(clock.now_s() - asked_s)
    return max(trips_s[1:])


async def _console(control: Any, app: str, process_id: int, last_words: Sequence[str]) -> str:
    console, events = "", aiter(control)
    coming = asyncio.ensure_future(anext(events))
    try:
        while True:
            done, _ = await asyncio.wait({coming}, timeout=LOOK_EVERY_S)
            if not done:
                if await control.process_identifier_for_bundle_identifier(app) != process_id:
                    raise UnendedProgramError(
                        f"{app} is gone before it said that it was done: it crashed, or the phone ended it, as it does"
                        " when memory runs short; its last words: " + (console[-200:] or "none")
                    )
                continue
            event = coming.result()
            if event.pid == process_id:
                console += event.message if event.message.endswith("\n") else f"{event.message}\n"
            if len(console) > MAX_CONSOLE:
                raise DeviceError(f"{app} has printed {len(console)} characters, {MAX_CONSOLE} are the most")
            if any(word in console for word in last_words):
                return console
            coming = asyncio.ensure_future(anext(events))
    finally:
        coming.cancel()
