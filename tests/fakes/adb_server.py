"""An adb server at its socket: the host services that clients ask for, in front of `tests.fakes.phone.FakePhone`s.

A request is four hexadecimal digits of length and its text; the answer is OKAY, or FAIL with a length and the reason
(packages/modules/adb/OVERVIEW.TXT and SERVICES.TXT). After `host:tport:...` the socket belongs to a service of the
phone. The server can be killed and started again on its port, as `adb kill-server` does.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from tests.fakes.phone import FakePhone, receive_exactly

VERSION = 41


class FakeAdbServer:
    """`with FakeAdbServer(phone, ...) as server:` listens on `server.port` of 127.0.0.1."""

    def __init__(self, *phones: FakePhone) -> None:
        self.phones = list(phones)
        self.port = 0
        self.requests: list[str] = []
        """Every host request, in order."""
        self.speaks: Callable[[socket.socket], None] | None = None
        """Writes what it likes to whoever asks anything."""
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> FakeAdbServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for phone in self.phones:
            phone.shut_down()

    def start(self) -> None:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen()
        self.port = listener.getsockname()[1]
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def stop(self) -> None:
        """As `adb kill-server`: every connection ends, and phones on the network are forgotten."""
        if self._listener is not None:
            # Closing alone leaves a thread that waits in accept, and the port with it.
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for phone in self.phones:
            phone.drop_link()
            if phone.on_network:
                phone.attached = False

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                # As the real server does: a marker's echo shall not wait for more to send.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            with suppress(OSError, EOFError):
                self._answer(connection, self._request(connection))
        finally:
            with self._lock:
                self._connections.discard(connection)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _request(self, connection: socket.socket) -> str:
        n_bytes = int(receive_exactly(connection, 4), 16)
        request = receive_exactly(connection, n_bytes).decode()
        self.requests.append(request)
        return request

    def _answer(self, connection: socket.socket, request: str) -> None:
        if self.speaks is not None:
            self.speaks(connection)
        elif request == "host:version":
            okay(connection, f"{VERSION:04x}")
        elif request in ("host:devices", "host:devices-l"):
            okay(connection, "".join(f"{p.serial}\t{p.state}\n" for p in self.phones if p.attached))
        elif request.startswith("host:connect:"):
            okay(connection, self._connect(request.removeprefix("host:connect:")))
        elif request.startswith("host:tport:serial:"):
            phone = self._phone_or_fail(connection, request.removeprefix("host:tport:serial:"))
            if phone is not None:
                connection.sendall(b"OKAY" + struct.pack("<Q", 1 + self.phones.index(phone)))
                phone.serve(connection, self._request(connection))
        elif request.startswith("host-serial:") and request.endswith(":features"):
            phone = self._phone_or_fail(connection, request.removeprefix("host-serial:").removesuffix(":features"))
            if phone is not None:
                okay(connection, ",".join(phone.features))
        else:
            fail(connection, f"unknown host service '{request}'")

    def _connect(self, serial: str) -> str:
        for phone in self.phones:
            if phone.serial == serial and phone.reachable:
                already = phone.attached
                phone.attached = True
                return f"already connected to {serial}" if already else f"connected to {serial}"
        return f"failed to connect to '{serial}': Connection refused"

    def _phone_or_fail(self, connection: socket.socket, serial: str) -> FakePhone | None:
        """The phone, or adb's own words for why there is none."""
        for phone in self.phones:
            if phone.serial == serial and phone.attached:
                if phone.state == "device":
                    return phone
                fail(connection, _REFUSALS.get(phone.state, f"device {phone.state}"))
                return None
        fail(connection, f"device '{serial}' not found")
        return None


_REFUSALS = {
    "unauthorized": "device unauthorized.\nThis adb server's $ADB_VENDOR_KEYS is not set\n"
    "Try 'adb kill-server' if that seems wrong.\nOtherwise check for a confirmation dialog on your device.",
    "authorizing": "device still authorizing",
    "connecting": "device still connecting",
}


def okay(connection: socket.socket, text: str) -> None:
    connection.sendall(f"OKAY{len(text.encode()):04x}{text}".encode())


def fail(connection: socket.socket, reason: str) -> None:
    connection.sendall(f"FAIL{len(reason.encode()):04x}{reason}".encode())
