"""Commands on a phone: one shell stream a command (the shell_v2 protocol, Android 7 and newer), files, and limits.

A stream carries packets of one byte id, four bytes length (little endian), and that many bytes: 0 is its input, 1 and 2
its output and errors, 3 its exit code, 4 the end of its input (packages/modules/adb/shell_protocol.h). Every wait has a
limit.
"""

from __future__ import annotations

import logging
import re
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from adbutils import AdbDevice
from adbutils._adb import AdbConnection

from devices.android.server import (
    ANSWER_TIMEOUT_S,
    DEVICE_PREFIX,
    ServerAddress,
    adb_errors,
    find_phone,
    is_address,
)
from devices.base import DeviceError, TransientDeviceError
from devices.timed_text import TimedText

COMMAND_TIMEOUT_S = 20.0
SERIAL_PROPERTY = "ro.serialno"
SHARED_SERIALS = re.compile(r"EMULATOR.*|unknown|0123456789ABCDEF|0+", re.IGNORECASE)
"""That emulators say, and phones whose maker gave them none of their own."""
RECONNECT_S = 30.0
"""How long a window's start waits for a phone or a server that went away."""
_STDIN, STDOUT, STDERR, EXIT, _CLOSE_STDIN = 0, 1, 2, 3, 4
_HEADER = struct.Struct("<BI")
_SYNC = struct.Struct("<4sI")
_SYNC_CHUNK_BYTES = 64 * 1024
"""The most that one DATA of the sync protocol may carry."""
MAX_PACKET_BYTES = 4 << 20
"""adb itself sends no more than 1 MiB at once (MAX_PAYLOAD)."""
MAX_OUTPUT_BYTES = 16 << 20
"""Of a command, output and errors together, while it is waited for."""
MAX_REASON_BYTES = 4096
_ANSWER_OF_PUSH_S = 60.0
"""The phone has written a large file by then."""

UNTIL_INPUT_ENDS = """n=0
while kill -0 $p && [ $n -lt 20 ]; do
read -r a x </proc/uptime
read -r -t 0.5 m
read -r b x </proc/uptime
[ "$a" = "$b" ] && n=$((n+1)) || n=0
done 2>/dev/null"""
"""Shell that waits for the end of its input, or of its child p. `read -t` that comes back at once, time and again, is
the end of the input: shells differ in its status. mksh, which is Android's, says when a child's end interrupts it."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class CommandResult(NamedTuple):
    stdout: str
    stderr: str
    exit_code: int


class ShellStream:
    """One running command. Closing it ends its input; a command that ignores that goes on: kill it by its id."""

    def __init__(self, device: AdbDevice, command: str, timeout_s: float) -> None:
        self._subject = f"adb: {device.serial}"
        self._received = bytearray()
        self.written = {STDOUT: TimedText(), STDERR: TimedText()}
        """What `await_line` and `finish` have taken in so far, by `time.monotonic`."""
        with adb_errors(self._subject), ExitStack() as on_error:
            self._connection = device.open_transport(timeout=timeout_s)
            on_error.callback(self._connection.close)
            self._connection.conn.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.send_command(f"shell,v2,raw:{command}")
            self._connection.check_okay()
            on_error.pop_all()

    def send(self, text: str) -> None:
        """To the command's input."""
        payload = text.encode()
        with adb_errors(self._subject):
            self._connection.conn.sendall(_HEADER.pack(_STDIN, len(payload)) + payload)

    def end_input(self) -> None:
        """Of the command, which goes on and may still write. A line may be lost in a `read -t`; this is not."""
        with adb_errors(self._subject):
            self._connection.conn.sendall(_HEADER.pack(_CLOSE_STDIN, 0))

    def receive(self, timeout_s: float) -> tuple[int, bytes]:
        """The next packet: (id, payload). Raises `TransientDeviceError` at the limit, or when the link breaks."""
        with adb_errors(self._subject):
            self._connection.conn.settimeout(max(timeout_s, 1e-3))
            while True:
                if len(self._received) >= _HEADER.size:
                    packet_id, n_bytes = _HEADER.unpack_from(self._received)
                    if n_bytes > MAX_PACKET_BYTES:
                        raise TransientDeviceError(
                            f"{self._subject}: a packet of {n_bytes} bytes, {MAX_PACKET_BYTES} are the most; what came"
                            " is no output of a shell: restart the server (adb kill-server; adb start-server)"
                        )
                    end = _HEADER.size + n_bytes
                    if len(self._received) >= end:
                        payload = bytes(self._received[_HEADER.size : end])
                        del self._received[:end]
                        return packet_id, payload
                chunk = self._connection.conn.recv(_SYNC_CHUNK_BYTES)
                if not chunk:
                    raise EOFError("the phone or the adb server went away")
                self._received += chunk

    def await_line(self, source: int, timeout_s: float) -> str:
        """The first line of the output or the errors, which is taken out of them."""
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self.written[source].text:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:  # packets may come without end
                raise TransientDeviceError(f"{self._subject}: the command has not written a line after {timeout_s:g} s")
            packet_id, payload = self.receive(left_s)
            if packet_id == EXIT:
                raise DeviceError(f"{self._subject}: the command ended early (exit code {_exit_code(payload)})")
            self._take(packet_id, payload, MAX_OUTPUT_BYTES)
        return _text(self.written[source].take_line())

    def _take(self, packet_id: int, payload: bytes, max_bytes: int) -> None:
        if packet_id in self.written:
            self.written[packet_id].add(payload, time.monotonic())
            n_bytes = sum(len(one.text) for one in self.written.values())
            if n_bytes > max_bytes:
                raise DeviceError(
                    f"{self._subject}: the command has written {n_bytes} bytes, {max_bytes} are the most that is"
                    " taken; let it write less, or to a file"
                )

    def finish(self, timeout_s: float, max_bytes: int = MAX_OUTPUT_BYTES) -> CommandResult:
        """All that is still to come, to the exit code."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TransientDeviceError(f"{self._subject}: the command has not ended after {timeout_s:g} s")
            packet_id, payload = self.receive(left_s)
            if packet_id == EXIT:
                out, err = (_text(self.written[i].text) for i in (STDOUT, STDERR))
                return CommandResult(out, err, _exit_code(payload))
            self._take(packet_id, payload, max_bytes)

    def close(self) -> None:
        """Also wakes a thread that waits in `receive`. May be called again."""
        if not self._connection.closed:
            with suppress(OSError):
                self._connection.conn.shutdown(socket.SHUT_RDWR)
            self._connection.close()


class Phone:
    """A phone by its plan name. The adb server may be restarted and the cable pulled: `reach` finds it again."""

    def __init__(self, name: str, address: ServerAddress | None = None) -> None:
        self._name = name
        self._address = address
        self._device: AdbDevice | None = None
        self._told_serial = ""
        """What the phone itself said at the first time, where its name is an address of the network."""

    @property
    def name(self) -> str:
        """As the plan names it; of `adb:` with the serial, once it was found. It asks the phone nothing."""
        return self._name

    @property
    def serial(self) -> str:
        return str(self._found().serial)

    def own_serial(self) -> str | None:
        """What the phone says, whatever way leads to it; None where that may be another's too. Raises `DeviceError`."""
        told = (self.read(f"getprop {SERIAL_PROPERTY}") or "").strip()
        return None if not told or SHARED_SERIALS.fullmatch(told) else told

    def reach(self, limit_s: float = 0.0, every_s: float = 0.5) -> None:
        """Finds the phone, trying again for `limit_s` while the failure may pass. Raises `DeviceError`."""
        self._reached_device(limit_s, every_s)

    def _reached_device(self, limit_s: float, every_s: float) -> AdbDevice:
        deadline_s = time.monotonic() + limit_s
        while True:
            try:
                device = find_phone(self._name, self._address)
                with adb_errors(f"adb: {device.serial}"):
                    features = str(device.get_features()).split(",")
                if "shell_v2" not in features:
                    raise DeviceError(f"adb: {device.serial} has no shell_v2 (Android 6 or older); Android 7 is needed")
                if is_address(device.serial):
                    self._refuse_another(device)
                # `adb:` is the only phone in reach at the first time; from then on it is that one.
                self._device, self._name = device, DEVICE_PREFIX + device.serial
                return device
            except TransientDeviceError:
                self._device = None
                if time.monotonic() + every_s > deadline_s:
                    raise
                time.sleep(every_s)

    def _refuse_another(self, device: AdbDevice) -> None:
        """A router gives the address of a phone that left to the next one. Raises `DeviceError`."""
        stream = ShellStream(device, f"getprop {SERIAL_PROPERTY}", COMMAND_TIMEOUT_S)
        try:
            told = stream.finish(COMMAND_TIMEOUT_S).stdout.strip()
        finally:
            stream.close()
        if told and self._told_serial and told != self._told_serial:
            raise DeviceError(
                f"adb: {device.serial} leads to another phone now (serial number {told}, it was {self._told_serial});"
                " let the router keep one address for each phone, and connect the first one again"
            )
        self._told_serial = told or self._told_serial

    def reached(self, begin: Callable[[], T], limit_s: float) -> T:
        """What `begin` starts; where the phone went away, it is looked for and `begin` called again."""
        try:
            return begin()
        except TransientDeviceError as error:
            log.info("%s; looking for it", error)
            self.reach(limit_s)
            return begin()

    def _found(self) -> AdbDevice:
        # Another thread may lose and find it meanwhile.
        return self._device or self._reached_device(0.0, 0.0)

    def stream(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> ShellStream:
        """Starts a command and hands over its stream."""
        return ShellStream(self._found(), command, timeout_s)

    def run(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> CommandResult:
        """Output, errors and exit code of a command that ends by itself."""
        stream = self.stream(command, timeout_s)
        try:
            return stream.finish(timeout_s)
        finally:
            stream.close()

    def read(self, command: str, timeout_s: float = COMMAND_TIMEOUT_S) -> str | None:
        """Output of a command; None where it fails or says nothing."""
        result = self.run(command, timeout_s)
        if result.exit_code != 0 or not result.stdout.strip():
            log.debug("%s: exit %d, %s", command, result.exit_code, result.stderr.strip())
            return None
        return result.stdout

    def read_files(self, patterns: Iterable[str]) -> Mapping[str, str]:
        """Text of every readable file that matches a shell pattern, in one round trip and one process."""
        result = self.run(f"grep -sH '' {' '.join(patterns)}")
        return split_grep(result.stdout)

    def push(self, local: Path, remote: str, mode: int = 0o755) -> None:
        """Copies a file to the phone (adb's sync protocol).

        Not through adbutils: its sender ignores how much the socket took, and a large file arrives garbled.
        """
        subject = f"adb: {self.serial}: push {local} to {remote}"
        with local.open("rb") as source, adb_errors(subject), self._found().open_transport() as connection:
            connection.send_command("sync:")
            connection.check_okay()
            target = f"{remote},{stat.S_IFREG | mode}".encode()
            connection.conn.sendall(b"SEND" + struct.pack("<I", len(target)) + target)
            connection.conn.settimeout(ANSWER_TIMEOUT_S)
            while chunk := source.read(_SYNC_CHUNK_BYTES):
                connection.conn.sendall(b"DATA" + struct.pack("<I", len(chunk)) + chunk)
            connection.conn.sendall(b"DONE" + struct.pack("<I", int(local.stat().st_mtime)))
            connection.conn.settimeout(_ANSWER_OF_PUSH_S)
            answer, n_bytes = _SYNC.unpack(connection.read_exact(_SYNC.size))
            if answer != b"OKAY":
                reason = _reason(connection, n_bytes)
                raise DeviceError(
                    f"{subject}: {reason}; is there room, and may the shell write there (/data/local/tmp)?"
                )

    def pull(self, remote: str, local: Path) -> None:
        """Copies a file from the phone: each piece has its limit of size and of time."""
        subject = f"adb: {self.serial}: pull {remote}"
        with local.open("wb") as target, adb_errors(subject), self._found().open_transport() as connection:
            connection.send_command("sync:")
            connection.check_okay()
            path = remote.encode()
            connection.conn.sendall(b"RECV" + struct.pack("<I", len(path)) + path)
            while True:
                connection.conn.settimeout(ANSWER_TIMEOUT_S)
                kind, n_bytes = _SYNC.unpack(connection.read_exact(_SYNC.size))
                if kind == b"DONE":
                    return
                if kind == b"FAIL":
                    raise DeviceError(f"{subject}: {_reason(connection, n_bytes)}")
                if kind != b"DATA" or n_bytes > _SYNC_CHUNK_BYTES:
                    raise TransientDeviceError(f"{subject}: {n_bytes} bytes of {kind!r} are no piece of a file")
                target.write(connection.read_exact(n_bytes))


def _reason(connection: AdbConnection, n_bytes: int) -> str:
    text: str = connection.read_exact(min(n_bytes, MAX_REASON_BYTES)).decode(errors="replace")
    return text


def _text(written: bytes | bytearray) -> str:
    """Some phones end lines as terminals do."""
    return written.decode(errors="replace").replace("\r\n", "\n").rstrip("\r")


def _exit_code(payload: bytes) -> int:
    return payload[0] if payload else 255


def split_grep(text: str) -> dict[str, str]:
    """`grep -H ''` of several files, back to {path: content}."""
    contents: dict[str, list[str]] = {}
    for line in text.splitlines():
        path, colon, content = line.partition(":")
        if colon and path.startswith("/"):
            contents.setdefault(path, []).append(content)
    return {path: "\n".join(lines) + "\n" for path, lines in contents.items()}
