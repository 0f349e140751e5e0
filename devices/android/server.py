"""The adb server and the phones it sees: finding one, and saying in plain words why it cannot be used.

The server is the one that `adb` itself would use: ADB_SERVER_SOCKET (tcp:HOST:PORT), else ANDROID_ADB_SERVER_ADDRESS
and ANDROID_ADB_SERVER_PORT, else 127.0.0.1:5037. A server is never started from here: adbutils would start one on port
5037 whatever port was asked for, and a measurement should not change what else is attached to the machine.
"""

from __future__ import annotations

import logging
import math
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from adbutils import AdbClient, AdbDevice, AdbError, AdbTimeout
from adbutils._adb import AdbConnection
from adbutils.errors import AdbConnectionError

from devices.base import DeviceError, GoneError, TransientDeviceError

DEVICE_PREFIX = "adb:"
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 5037
ANSWER_TIMEOUT_S = 10.0
"""The longest wait for one answer of the server."""
MAX_PIECE_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 15.0
"""adbd on Wi-Fi: the server itself gives up after about 10 s."""

_NETWORK_SERIAL = re.compile(r"^(\[[0-9a-fA-F:]+\]|[\w.-]+):\d+$")
_STATES = {
    "offline": "it is attached but does not answer; unplug and plug it in again, or: adb reconnect offline",
    "unauthorized": "unlock the phone and accept 'Allow USB debugging' for this computer's key",
    "authorizing": "the phone is still checking this computer's key; unlock it, and try again",
    "connecting": "the link is still coming up; try again in a few seconds",
    "no": "this user may not open the USB device; install udev rules for the phone (package android-sdk-platform-tools)"
    " or add the user to group plugdev",
    "recovery": "it is in recovery mode; start Android",
    "sideload": "it is in sideload mode; start Android",
    "bootloader": "it is in the bootloader; start Android",
}
"""What to do about a phone that is not in state `device`."""
_PASSING = ("offline", "authorizing", "connecting")
_NO_SERVER = "is it an adb server that listens there? Restart it: adb kill-server; adb start-server"

log = logging.getLogger(__name__)


class ServerAddress(NamedTuple):
    host: str
    port: int


class ListedPhone(NamedTuple):
    """A phone the server knows. `remedy` is None where it is ready."""

    serial: str
    state: str
    remedy: str | None

    @property
    def name(self) -> str:
        """As a plan names it."""
        return DEVICE_PREFIX + self.serial


class DeadlineSocket:
    """A socket on which a limit is one for all that follows it, and not for each piece.

    Else a link that gives a byte now and then holds whoever waits for a whole answer, for hours.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._deadline_s = math.inf

    def settimeout(self, limit_s: float | None) -> None:
        """From now on, for everything that is received until it is called again; for each piece that is sent."""
        self._deadline_s = math.inf if limit_s is None else time.monotonic() + limit_s
        self._socket.settimeout(limit_s)

    def recv(self, n_bytes: int) -> bytes:
        if self._deadline_s < math.inf:
            left_s = self._deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left_s)
        # A length that the other end claims is not memory that is taken here.
        return self._socket.recv(min(n_bytes, MAX_PIECE_BYTES))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class _Connection(AdbConnection):  # type: ignore[misc]  # adbutils ships no types
    """A connection that fails where no server listens, instead of starting one."""

    def _safe_connect(self) -> DeadlineSocket:
        return DeadlineSocket(self._create_socket())

    def read(self, n: int) -> bytes:
        """All of it: an answer that was cut is no answer."""
        whole: bytes = self.read_exact(n)
        return whole


class _Client(AdbClient):  # type: ignore[misc]
    def make_connection(self, timeout: float | None = None) -> AdbConnection:
        try:
            connection = _Connection(self.host, self.port)
        except (AdbConnectionError, AdbTimeout) as error:
            raise TransientDeviceError(
                f"adb: no server answers at {self.host}:{self.port} ({error}); start one with: adb start-server"
                " (ANDROID_ADB_SERVER_PORT names another port)"
            ) from error
        connection.conn.settimeout(timeout or ANSWER_TIMEOUT_S)
        return connection


def server_address(environment: Mapping[str, str] = os.environ) -> ServerAddress:
    """Where the adb server listens. Raises `DeviceError` for a variable that is no address."""
    spec = environment.get("ADB_SERVER_SOCKET")
    if spec:
        kind, _, rest = spec.partition(":")
        host, _, port = rest.rpartition(":")
        if kind != "tcp" or not port.isdigit():
            raise DeviceError(f"ADB_SERVER_SOCKET={spec}: only tcp:HOST:PORT is understood; correct or unset it")
        return ServerAddress(host or DEFAULT_HOST, int(port))
    host = environment.get("ANDROID_ADB_SERVER_ADDRESS") or environment.get("ANDROID_ADB_SERVER_HOST") or DEFAULT_HOST
    port = environment.get("ANDROID_ADB_SERVER_PORT") or str(DEFAULT_PORT)
    if not port.isdigit():
        raise DeviceError(f"ANDROID_ADB_SERVER_PORT={port} is no port number; correct or unset it")
    return ServerAddress(host, int(port))


def list_phones(address: ServerAddress | None = None) -> list[ListedPhone]:
    """Phones the server knows, ready or not. Raises `TransientDeviceError` where no server answers."""
    address = address or server_address()
    with adb_errors("adb"), _Client(*address).make_connection() as connection:
        connection.send_command("host:devices")
        connection.check_okay()
        listed: str = connection.read_string_block()
    return list(_listed(listed))


def _listed(text: str) -> Iterator[ListedPhone]:
    """Lines of a serial, a tab and a state (`no permissions; see ...` is one); what is none of them is no phone."""
    for line in text.splitlines():
        serial, _, told = line.partition("\t")
        state = next(iter(told.split()), None)
        if not serial.strip() or state is None:
            log.info("adb: the server lists %r, which is no phone and its state", line[:200])
            continue
        yield ListedPhone(serial.strip(), state, _remedy(state))


def is_address(serial: str) -> bool:
    """Whether this is HOST:PORT: where a phone is, and not which."""
    return _NETWORK_SERIAL.match(serial) is not None


def find_phone(name: str, address: ServerAddress | None = None) -> AdbDevice:
    """The phone that a plan names: `adb:SERIAL`, `adb:HOST:PORT` (connected first), or `adb:` for the only one.

    Raises `TransientDeviceError` where trying again may help (no server, not attached, offline), else `DeviceError`.
    """
    address = address or server_address()
    serial = name.removeprefix(DEVICE_PREFIX).strip()
    client = _Client(*address)
    phones = list_phones(address)
    if is_address(serial) and not any(p.serial == serial and p.state == "device" for p in phones):
        _connect(client, serial)
        phones = list_phones(address)
    phone = _choose(phones, serial)
    if phone.remedy is not None:
        error = TransientDeviceError if phone.state in _PASSING else GoneError
        raise error(f"adb: {phone.serial} is {_spoken(phone.state)}: {phone.remedy}")
    return AdbDevice(client, serial=phone.serial)


@contextmanager
def adb_errors(subject: str) -> Iterator[None]:
    """Says what adb's own errors mean. Nothing is swallowed: each comes out as a `DeviceError`."""
    try:
        yield
    except DeviceError:
        raise
    except (AdbTimeout, TimeoutError) as error:
        raise TransientDeviceError(
            f"{subject}: no answer in time ({error}); is the phone asleep, or the link gone?"
        ) from error
    except (EOFError, OSError) as error:
        raise TransientDeviceError(f"{subject}: the link broke ({error or 'end of stream'})") from error
    except AdbError as error:
        raise _translated(subject, str(error)) from error
    except Exception as error:
        # Whatever the library makes of an answer that is none: a length that is no number, a line without a state.
        raise TransientDeviceError(
            f"{subject}: an answer that makes no sense ({type(error).__name__}: {error}); {_NO_SERVER}"
        ) from error


def _translated(subject: str, message: str) -> DeviceError:
    """adb's FAIL messages, and adbutils' own."""
    if message.startswith("Unknown data"):
        return TransientDeviceError(f"{subject}: an answer that makes no sense ({message}); {_NO_SERVER}")
    if "unauthorized" in message:
        return GoneError(f"{subject} is unauthorised: {_STATES['unauthorized']}")
    if "not found" in message or "no devices" in message:
        return TransientDeviceError(f"{subject} is not attached ({message}); is the cable in, and USB debugging on?")
    for state in _PASSING:
        if state in message:
            return TransientDeviceError(f"{subject} is {state}: {_STATES[state]}")
    if "closed" in message:
        return TransientDeviceError(f"{subject}: the link broke ({message})")
    return DeviceError(f"{subject}: adb refused ({message})")


def _connect(client: AdbClient, serial: str) -> None:
    with adb_errors(f"adb: {serial}"):
        answer = client.connect(serial, timeout=CONNECT_TIMEOUT_S)
    if "connected to" not in answer:
        raise TransientDeviceError(
            f"adb: {serial} cannot be reached ({answer.strip()});"
            " is wireless debugging on, and the phone in this network?"
        )


def _choose(phones: Sequence[ListedPhone], serial: str) -> ListedPhone:
    listed = ", ".join(p.serial for p in phones) or "none"
    if serial:
        for phone in phones:
            if phone.serial == serial:
                return phone
        raise TransientDeviceError(
            f"adb: {serial} is not attached (attached: {listed}); is the cable in, and USB debugging on?"
        )
    if not phones:
        raise TransientDeviceError("adb: no phone is attached; plug one in and turn USB debugging on")
    if len(phones) > 1:
        raise DeviceError(f"adb: {len(phones)} devices attached; name one with adb:SERIAL ({listed})")
    return phones[0]


def _remedy(state: str) -> str | None:
    return None if state == "device" else _STATES.get(state, "bring it to state device (see: adb devices)")


def _spoken(state: str) -> str:
    return {"no": "not accessible", "unauthorized": "unauthorised"}.get(state, state)
