"""Who may talk to a fleet: the address that it listens on, and TLS.

Dask's own messages are Python pickles: whoever may connect can run any code on the coordinator and on every worker, as
the user who started it. So a fleet listens on this machine alone, unless TLS proves who connects.
"""

from __future__ import annotations

import ipaddress
import platform
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from results.records import Record

if TYPE_CHECKING:
    from distributed.security import Security

PORT = 8786
HOST = "127.0.0.1"
PICKLE_TOLD = "Dask carries Python pickles: whoever can connect can run code here and on every worker"


class AddressError(Exception):
    """An address or a certificate that cannot be used: what, the value, the remedy."""


class Tls(Record):
    """Files in PEM form. One certificate may serve all: each side accepts what `ca` signed, and nobody else."""

    ca: str
    certificate: str
    key: str


class Address(NamedTuple):
    host: str
    port: int
    is_tls: bool = False

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def for_workers(self) -> Address:
        """Where others reach it: who listens everywhere has the name of this machine."""
        return self._replace(host=platform.node()) if self.host in ("0.0.0.0", "::") else self

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tls' if self.is_tls else 'tcp'}://{host}:{self.port}"


def read_address(text: str, tls: Tls | None) -> Address:
    """HOST, HOST:PORT, tcp://HOST:PORT. Raises `AddressError`."""
    kind, found, rest = text.partition("://")
    if found and kind not in ("tcp", "tls"):
        raise AddressError(f"{text}: an address is HOST:PORT, such as {HOST}:{PORT}")
    if kind == "tls" and found and tls is None:
        raise AddressError(f"{text}: needs the certificates of the fleet; add --tls-ca, --tls-cert and --tls-key")
    if kind == "tcp" and found and tls is not None:
        raise AddressError(f"{text}: with certificates the address is tls://{rest}")
    host, colon, port = (rest if found else text).rpartition(":")
    if not colon or port.endswith("]"):
        host, port = rest if found else text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16 or set(host) & set(" /"):
        raise AddressError(f"{text}: an address is HOST:PORT, such as {HOST}:{PORT}")
    return Address(host, int(port), tls is not None)


def read_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> Tls | None:
    """None where none is given. Raises `AddressError` for files that do not fit."""
    given = {"--tls-ca": ca, "--tls-cert": certificate, "--tls-key": key}
    missing = [name for name, path in given.items() if path is None]
    if len(missing) == len(given):
        return None
    if missing:
        raise AddressError(f"{' and '.join(missing)}: missing; TLS needs all of {', '.join(given)}")
    for name, path in given.items():
        if path is not None and not path.is_file():
            raise AddressError(f"{name} {path}: no such file")
    tls = Tls(ca=str(ca), certificate=str(certificate), key=str(key))
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.certificate, tls.key)
    except (ssl.SSLError, OSError) as error:
        raise AddressError(f"the certificates cannot be used ({error}); --tls-ca, --tls-cert, --tls-key") from error
    return tls


def security_of(tls: Tls | None) -> Security | None:
    """Dask's form of it. Connections without encryption, or without a certificate that `ca` signed, are refused."""
    if tls is None:
        return None
    from distributed.security import Security

    files = {
        f"tls_{who}_{what}": path
        for who in ("client", "scheduler", "worker")
        for what, path in (("cert", tls.certificate), ("key", tls.key))
    }
    return Security(tls_ca_file=tls.ca, require_encryption=True, **files)
