"""tunneld's list of tunnels: a small JSON over HTTP, asked for in a time and a size that have limits.

pymobiledevice3 asks on a thread that the end of the program waits for, and with a limit for each byte alone: a tunneld
that drips would keep `joulebench` for ever. What tunneld says of a phone is checked before anything is opened:

    {"00008140-...": [{"tunnel-address": "fd00::1", "tunnel-port": 50001, "interface": "tun3"}]}
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

LIST_TIMEOUT_S = 4.0
"""For the whole answer. tunneld is on this machine, and answers from memory."""
MAX_ANSWER_BYTES = 1 << 20
_UDID = re.compile(r"[0-9A-Za-z-]{1,64}")


class TunneldAddress(NamedTuple):
    host: str
    port: int


TUNNELD = TunneldAddress("127.0.0.1", 49151)
"""Where tunneld listens unless it was told otherwise."""
START_TUNNELD = "sudo python3 -m pymobiledevice3 remote tunneld"


class Tunnel(NamedTuple):
    """The near end of a tunnel to a phone."""

    host: str
    port: int
    interface: str | None


Tunnels = Mapping[str, Sequence[Tunnel]]
"""By UDID."""


class NoTunnelsError(Exception):
    """Why tunneld cannot be asked, with the remedy."""


async def list_tunnels(tunneld: TunneldAddress, limit_s: float = LIST_TIMEOUT_S) -> Tunnels:
    """Tunnels that tunneld holds. Raises `NoTunnelsError` where it does not run, or answers something else."""
    where = f"{tunneld.host}:{tunneld.port}"
    try:
        answer = await asyncio.wait_for(_get(tunneld), limit_s)
    except TimeoutError as error:
        raise NoTunnelsError(
            f"tunneld at {where} has not answered in {limit_s:g} s; end it, and start it anew with: {START_TUNNELD}"
        ) from error
    except OSError as error:
        raise NoTunnelsError(f"tunneld does not run at {where} (start it with: {START_TUNNELD})") from error
    try:
        return dict(_parsed(_body(answer)))
    except ValueError as error:
        raise NoTunnelsError(
            f"what listens at {where} is no tunneld, or another release of it ({error}); start it with: {START_TUNNELD}"
        ) from error


async def _get(tunneld: TunneldAddress) -> bytes:
    """All that is sent until the connection ends, or one byte more than may be."""
    reader, writer = await asyncio.open_connection(*tunneld)
    try:
        # HTTP 1.0: the end of the answer is the end of the connection.
        writer.write(b"GET / HTTP/1.0\r\nHost: tunneld\r\nAccept: application/json\r\n\r\n")
        await writer.drain()
        answer = bytearray()
        while len(answer) <= MAX_ANSWER_BYTES and (chunk := await reader.read(1 << 16)):
            answer += chunk
        return bytes(answer)
    finally:
        writer.transport.abort()


def _body(answer: bytes) -> object:
    """Raises `ValueError`."""
    if len(answer) > MAX_ANSWER_BYTES:
        raise ValueError(f"its answer is longer than {MAX_ANSWER_BYTES} bytes")
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].split(maxsplit=2)
    if len(status) < 2 or not status[0].startswith(b"HTTP/") or status[1] != b"200":
        raise ValueError(f"its answer begins {answer[:40]!r}")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON: {type(error).__name__}") from error


def _parsed(listed: object) -> Iterator[tuple[str, Sequence[Tunnel]]]:
    """Raises `ValueError` for what is no list of tunnels; one bad entry costs its phone only."""
    if not isinstance(listed, Mapping):
        raise ValueError(f"a {type(listed).__name__} in the place of an object by UDID")  # noqa: TRY004 - its text is bad
    for udid, entries in listed.items():
        if not _UDID.fullmatch(udid) or not isinstance(entries, Sequence) or isinstance(entries, str):
            continue
        tunnels = [tunnel for entry in entries if (tunnel := _tunnel(entry)) is not None]
        if tunnels:
            yield udid, tunnels
    if listed and not any(_UDID.fullmatch(udid) for udid in listed):
        raise ValueError("its keys are no UDIDs")


def _tunnel(entry: Any) -> Tunnel | None:
    """None for an entry without an address and a port."""
    if not isinstance(entry, Mapping):
        return None
    host, port, interface = (entry.get(key) for key in ("tunnel-address", "tunnel-port", "interface"))
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 1 << 16 or not isinstance(host, str):
        return None
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return None  # a name would be looked up, on a thread that the end of the program waits for
    return Tunnel(host, port, interface if isinstance(interface, str) else None)
