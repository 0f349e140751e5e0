"""The way to an iPhone's services: a tunnel that tunneld holds, else one without root in this process.

Since iOS 17 the services for developers are reached through an IPv6 tunnel alone. Two ways lead there:

    tunneld     a daemon of pymobiledevice3, run as root; it also finds phones on Wi-Fi, so the cable can be off
    root-free   CoreDeviceProxy over usbmuxd, with a TCP/IP stack in this process: iOS 17.4 and newer, one at a time

tunneld is asked first. Discovery at the far end of the tunnel then names every service of the phone with its port.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

from devices.base import DeviceError, NotReadyError, TransientDeviceError
from devices.ios.errors import DEVELOPER_IMAGE, DEVELOPER_MODE, ios_errors
from devices.ios.tunneld import NoTunnelsError, Tunnel, TunneldAddress, Tunnels, list_tunnels

log = logging.getLogger(__name__)

DEVICE_PREFIX = "ios:"
INSTRUMENTS = "com.apple.instruments.dtservicehub"
CLOSE_TIMEOUT_S = 5.0
USBMUXD_TIMEOUT_S = 3.0


class Reachable(NamedTuple):
    """Phones that tunneld (with its tunnels) and usbmuxd know, by UDID; and why one of the two knows none."""

    tunnels: Tunnels
    attached: tuple[str, ...]
    remarks: tuple[str, ...]

    @property
    def udids(self) -> list[str]:
        return sorted({*self.tunnels, *self.attached})


async def find_phones(tunneld: TunneldAddress) -> Reachable:
    """Asks both. Neither has to run: what is amiss is in the remarks."""
    from pymobiledevice3.usbmux import list_devices

    remarks = []
    tunnels: Tunnels = {}
    attached: tuple[str, ...] = ()
    try:
        tunnels = await list_tunnels(tunneld)
        if not tunnels:
            remarks.append("tunneld has no tunnel to a phone (one shows up some seconds after it is plugged in)")
    except NoTunnelsError as error:
        remarks.append(str(error))
    try:
        with ios_errors("usbmuxd"):
            attached = tuple(device.serial for device in await asyncio.wait_for(list_devices(), USBMUXD_TIMEOUT_S))
        if not attached:
            remarks.append("usbmuxd sees none either (plug the phone in, unlock it, tap Trust)")
    except DeviceError as error:
        remarks.append(f"usbmuxd does not answer, so a tunnel without root cannot be built ({error})")
    return Reachable(tunnels, attached, tuple(remarks))


def choose(reachable: Reachable, name: str) -> str:
    """The UDID that a plan names: `ios:UDID`, or `ios:` for the only phone. Dashes do not count.

    Raises `TransientDeviceError` where it is not there, `DeviceError` where the name leaves several.
    """
    wanted = name.removeprefix(DEVICE_PREFIX).strip()
    udids = reachable.udids
    why = "; ".join(reachable.remarks)
    if wanted:
        for udid in udids:
            if _is_same(udid, wanted):
                return udid
        raise TransientDeviceError(
            f"ios: {wanted} is not in reach (in reach: {', '.join(udids) or 'none'})" + (f"; {why}" if why else "")
        )
    if not udids:
        raise TransientDeviceError(f"ios: no phone is in reach: {why}")
    if len(udids) > 1:
        raise DeviceError(f"ios: {len(udids)} devices are in reach; name one with ios:UDID ({', '.join(udids)})")
    return udids[0]


def _is_same(udid: str, other: str) -> bool:
    return udid.replace("-", "").lower() == other.replace("-", "").lower()


class Link:
    """An open tunnel with the services behind it. `services` is pymobiledevice3's discovery service (an RSD)."""

    def __init__(self, udid: str, way: str, services: Any, closing: AsyncExitStack) -> None:
        self.udid = udid
        self.way = way
        self.broke_by: str | None = None
        """What was said of the question that failed on it first."""
        self.services = services
        self._closing = closing
        self._instruments: Any = None
        self._opening = asyncio.Lock()

    async def instruments(self) -> Any:
        """The connection of the instruments, opened at the first use. Raises `DeviceError` with what it lacks."""
        from pymobiledevice3.exceptions import InvalidServiceError
        from pymobiledevice3.services.dvt.instruments.dvt_provider import DvtProvider

        async with self._opening:
            if self._instruments is None:
                provider = DvtProvider(self.services)
                try:
                    await provider.connect()
                except InvalidServiceError as error:
                    raise NotReadyError(await self.why_no_instruments() or str(error)) from error
                self._closing.push_async_callback(provider.close)
                self._instruments = provider
            return self._instruments

    async def developer_mode(self) -> bool | None:
        """Whether it is on; None where the phone does not say."""
        from pymobiledevice3.exceptions import LockdownError

        try:
            return bool(await self.services.get_developer_mode_status())
        except LockdownError:
            return None

    def has_instruments(self) -> bool:
        """Whether the phone offers them: it does with Developer Mode on and a developer image mounted."""
        return INSTRUMENTS in self.services.peer_info["Services"]

    async def why_no_instruments(self) -> str | None:
        """Which of its two prerequisites is missing, with the remedy; None where the phone offers them."""
        if self.has_instruments():
            return None
        if await self.developer_mode() is False:
            return f"ios: {self.udid}: Developer Mode is off; {DEVELOPER_MODE}"
        return f"ios: {self.udid}: no developer image is mounted (it offers no instruments); {DEVELOPER_IMAGE}"

    async def close(self) -> None:
        """Never raises: what is left of a broken link is let go."""
        try:
            with ios_errors(self.udid):
                await asyncio.wait_for(self._closing.aclose(), CLOSE_TIMEOUT_S)
        except DeviceError as error:
            log.debug("ios: %s: while closing its link: %s", self.udid, error)


async def open_link(name: str, tunneld: TunneldAddress) -> Link:
    """To the phone that a plan names. Raises `DeviceError`."""
    reachable = await find_phones(tunneld)
    udid = choose(reachable, name)
    subject = f"ios: {udid}"
    failures = []
    for tunnel in reachable.tunnels.get(udid, ()):
        # A tunnel that died is still listed for a while; another one may live.
        try:
            with ios_errors(subject):
                return await _through_tunneld(udid, tunnel, tunneld)
        except TransientDeviceError as error:
            failures.append(str(error).removeprefix(subject).lstrip(": "))
    if udid in reachable.attached:
        with ios_errors(subject):
            return await _without_root(udid)
    raise TransientDeviceError(
        f"{subject}: the tunnel that tunneld lists does not answer as it should: {'; '.join(failures)};"
        " is the phone awake and unlocked? (restart tunneld if it is)"
    )


async def _through_tunneld(udid: str, tunnel: Tunnel, tunneld: TunneldAddress) -> Link:
    from pymobiledevice3.remote.remote_service_discovery import RemoteServiceDiscoveryService

    services = RemoteServiceDiscoveryService((tunnel.host, tunnel.port), name=tunnel.interface)
    closing = AsyncExitStack()
    closing.push_async_callback(services.close)
    await services.connect()
    return await _checked(Link(udid, f"tunneld at {tunneld.host}:{tunneld.port}", services, closing))


async def _without_root(udid: str) -> Link:
    from pymobiledevice3.remote.rsd_tunnel import PreferredRsdTunnel

    # Pairing asks its user on the phone's screen, and waits without a limit: it is done beforehand.
    tunnel = PreferredRsdTunnel(serial=udid, autopair=False)
    closing = AsyncExitStack()
    closing.push_async_callback(tunnel.aclose)
    return await _checked(Link(udid, "root-free tunnel", await tunnel.aopen(), closing))


async def _checked(link: Link) -> Link:
    """A tunnel's port may have gone to another phone meanwhile: what answers says who it is.

    Raises `TransientDeviceError` after closing the link.
    """
    answers = str(link.services.peer_info["Properties"].get("UniqueDeviceID", "nobody"))
    if not _is_same(answers, link.udid):
        await link.close()
        raise TransientDeviceError(
            f"ios: {link.udid}: the {link.way} leads to another phone ({answers}), whose joules are not its own;"
            " restart tunneld, or connect the phone again"
        )
    return link
