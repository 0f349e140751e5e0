"""Where a server computes: in which processes of this machine, or on another one, whose joules are not seen here."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from typing import NamedTuple

import psutil

FORWARDERS = frozenset(
    ("docker-proxy", "rootlessport", "slirp4netns", "pasta", "ssh", "sshd", "socat", "kubectl", "haproxy", "nginx")
)
"""Programs that listen here and pass on what they hear: whoever computes is another one, perhaps elsewhere."""


class Whereabouts(NamedTuple):
    """process_ids: the server's, with all that it started; empty where they are not known. elsewhere: why the meters of
    this machine do not see it; None where they do. note: what a reader must know."""

    process_ids: tuple[int, ...] = ()
    elsewhere: str | None = None
    note: str | None = None


def whereabouts(host: str, port: int) -> Whereabouts:
    """Of what listens at this address."""
    if not is_here(host):
        return Whereabouts(elsewhere=f"the server computes on another machine ({host}), whose meters are not read here")
    listening = _listening(port)
    if listening is None:
        return Whereabouts(
            note=f"the process that listens at port {port} is another user's and not known here: its CPU time counts as"
            " foreign, and its memory is not told"
        )
    names = {name for pid in listening if (name := _name(pid)) is not None}
    if passing := names & FORWARDERS:
        told = ", ".join(sorted(passing))
        return Whereabouts(
            elsewhere=f"port {port} is passed on by {told}: where the server computes is not known, nor its joules"
        )
    return Whereabouts(tuple(_with_children(listening)))


def is_here(host: str) -> bool:
    """Whether all addresses of a name are this machine's."""
    own = {address.address.partition("%")[0] for found in psutil.net_if_addrs().values() for address in found}
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(a.partition("%")[0]).is_loopback or a.partition("%")[0] in own for a in found)


def _listening(port: int) -> list[int] | None:
    """Processes that listen there; None where they are not told."""
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.AccessDenied, OSError):
        return None
    found = [c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port]
    return None if not found or None in found else [pid for pid in dict.fromkeys(found) if pid is not None]


def _name(pid: int) -> str | None:
    with suppress(psutil.Error):
        return psutil.Process(pid).name()
    return None


def _with_children(pids: list[int]) -> list[int]:
    found: dict[int, None] = {}
    for pid in pids:
        found[pid] = None
        with suppress(psutil.Error):
            found |= dict.fromkeys(child.pid for child in psutil.Process(pid).children(recursive=True))
    return list(found)
