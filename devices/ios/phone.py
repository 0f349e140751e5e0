"""One iPhone: its link, kept open and found again, and what it is asked. Callable from any thread; every wait ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from devices.base import DeviceError, TransientDeviceError
from devices.ios.errors import ios_errors, require_library
from devices.ios.event_loop import EventLoopThread
from devices.ios.link import CLOSE_TIMEOUT_S, DEVICE_PREFIX, Link, open_link
from devices.ios.state import BatteryState, PhoneFacts, parse_battery, parse_core_count, parse_facts
from devices.ios.tunneld import TUNNELD, TunneldAddress

T = TypeVar("T")

LINK_TIMEOUT_S = 30.0
"""To open a tunnel: without root it takes a few seconds."""
ANSWER_TIMEOUT_S = 8.0
"""The longest wait for one answer of the phone; below the limit at which a sampler is taken for hung."""

log = logging.getLogger(__name__)


class Phone:
    """A phone by its plan name (`ios:UDID`, `ios:` for the only one). It may go away and come back: see `reach`."""

    def __init__(
        self, name: str, tunneld: TunneldAddress = TUNNELD, answer_timeout_s: float = ANSWER_TIMEOUT_S
    ) -> None:
        self._name = name
        self._answer_timeout_s = answer_timeout_s
        self._tunneld = tunneld
        self._loop: EventLoopThread | None = None
        self._link: Link | None = None
        self._changing = threading.RLock()

    @property
    def udid(self) -> str:
        return self._linked().udid

    @property
    def way(self) -> str:
        """How the phone was reached, such as `root-free tunnel`."""
        return self._linked().way

    def reach(self, limit_s: float = 0.0, every_s: float = 1.0) -> None:
        """Opens a link where there is none, trying again for `limit_s` while the failure may pass.

        Raises `DeviceError`.
        """
        require_library()
        deadline_s = time.monotonic() + limit_s
        with self._changing:
            while self._link is None:
                try:
                    with ios_errors(self._name):
                        self._link = self._run(open_link(self._name, self._tunneld), LINK_TIMEOUT_S, self._name)
                    # `ios:` is the only phone in reach at the first link; from then on it is that one.
                    self._name = DEVICE_PREFIX + self._link.udid
                except TransientDeviceError:
                    if time.monotonic() + every_s > deadline_s:
                        raise
                    time.sleep(every_s)

    def ask(self, question: Callable[[Link], Coroutine[Any, Any, T]], what: str, limit_s: float | None = None) -> T:
        """The answer of the phone. A link that failed is given up, and opened again by the next `reach` or `ask`.

        what: for messages, such as "battery". limit_s: of an answer that takes longer. Raises `DeviceError`.
        """
        link = self._linked()
        subject = f"ios: {link.udid}: {what}"
        try:
            with ios_errors(subject):
                return self._run(question(link), limit_s or self._answer_timeout_s, subject)
        except TransientDeviceError as error:
            if link.broke_by is not None:
                # Another question gave it up, and took it from this one.
                raise TransientDeviceError(f"{subject}: its link was given up: {link.broke_by}") from error
            link.broke_by = str(error).removeprefix(f"ios: {link.udid}: ")
            self._give_up(link)
            raise

    def is_on(self, link: Link | None) -> bool:
        """Whether this link is still the one that is used."""
        return link is not None and self._link is link

    def battery(self) -> BatteryState | None:
        """The battery now; None where the phone shows none. Raises `DeviceError`."""
        return self.ask(_read_battery, "battery")

    def facts(self) -> PhoneFacts:
        """What the phone is. Raises `DeviceError`, not where its instruments alone are broken."""
        facts = self.ask(_read_facts, "device information")
        try:
            return replace(facts, n_cores=self.ask(_count_cores, "hardware information"))
        except DeviceError as error:
            # A battery is measured without them.
            log.info("the number of cores is not known: %s", error)
            return facts

    def launch(self, app: str) -> int:
        """Starts an installed app anew by its bundle identifier: its process id. Raises `DeviceError`."""

        async def start(link: Link) -> int:
            from pymobiledevice3.services.dvt.instruments.process_control import ProcessControl

            async with ProcessControl(await link.instruments()) as control:
                try:
                    return int(await control.launch(app))
                except AssertionError as error:  # the library's way to say that the answer was no process id
                    raise DeviceError(
                        f"ios: {link.udid}: {app} did not start; is it installed, and its developer trusted?"
                    ) from error

        return self.ask(start, f"starting {app}")

    def find_process(self, app: str) -> int | None:
        """The process id of a running app by its bundle identifier; None where it does not run."""

        async def find(link: Link) -> int:
            from pymobiledevice3.services.dvt.instruments.process_control import ProcessControl

            async with ProcessControl(await link.instruments()) as control:
                return int(await control.process_identifier_for_bundle_identifier(app) or 0)

        return self.ask(find, f"looking for {app}") or None

    def end(self, app: str) -> None:
        """Ends an app by its bundle identifier, where it runs. Raises `DeviceError`."""

        async def end(link: Link) -> None:
            from pymobiledevice3.services.dvt.instruments.process_control import ProcessControl

            async with ProcessControl(await link.instruments()) as control:
                if process_id := int(await control.process_identifier_for_bundle_identifier(app) or 0):
                    await control.kill(process_id)

        self.ask(end, f"ending {app}")

    def why_no_instruments(self) -> str | None:
        """What the phone lacks for its energy gauge and for starting apps, with the remedy; None where it has all.

        Raises `DeviceError` where they are offered and do not answer.
        """
        return self.ask(_why_no_instruments, "prerequisites")

    def close(self) -> None:
        with self._changing:
            if self._link is not None:
                self._give_up(self._link)
            if self._loop is not None:
                self._loop.close()
                self._loop = None

    def _linked(self) -> Link:
        with self._changing:
            if self._link is None:
                self.reach()
            assert self._link is not None
            return self._link

    def _run(self, coroutine: Coroutine[Any, Any, T], limit_s: float, what: str) -> T:
        with self._changing:
            if self._loop is None:
                self._loop = EventLoopThread("ios")
            loop = self._loop
        return loop.run(coroutine, limit_s, what)

    def _give_up(self, link: Link) -> None:
        """Another thread may have done so already, and opened a new one."""
        with self._changing:
            if self._link is link:
                self._link = None
                with suppress(DeviceError):
                    self._run(link.close(), 2 * CLOSE_TIMEOUT_S, f"ios: {link.udid}: closing its link")


async def _read_battery(link: Link) -> BatteryState | None:
    from pymobiledevice3.services.diagnostics import DiagnosticsService

    # The phone closes a connection on which nothing is asked for a while: each reading has one of its own.
    async with DiagnosticsService(link.services) as diagnostics:
        return parse_battery(await diagnostics.get_battery())


async def _read_facts(link: Link) -> PhoneFacts:
    services = link.services
    return parse_facts(services.peer_info["Properties"], services.all_values or {})


async def _count_cores(link: Link) -> int | None:
    from pymobiledevice3.services.dvt.instruments.device_info import DeviceInfo

    if not link.has_instruments():
        return None
    async with DeviceInfo(await link.instruments()) as information:
        return parse_core_count(await information.hardware_information())


async def _why_no_instruments(link: Link) -> str | None:
    lacks = await link.why_no_instruments()
    if lacks is None:
        await link.instruments()  # offered, but do they answer?
    return lacks
