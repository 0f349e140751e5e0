"""The phone's end of a CoreDevice tunnel: IPv6 packets on a stream, and as much TCP as a link without loss needs.

The host's end is pymobiledevice3's own TCP/IP stack. Here a SYN to a port opens a connection to the same port of this
machine, where a fake phone listens, and bytes go to and fro: RFC 9293 without retransmission, since a stream neither
loses nor reorders, and with a window far below the buffers of both sides.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import struct
from contextlib import suppress
from dataclasses import dataclass, field

PHONE, HOST = (ipaddress.IPv6Address(a).packed for a in ("fd00:1::1", "fd00:1::2"))
MTU = 16000
TCP = 6
FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16
SEGMENT_BYTES = 1220
"""What every host takes: 1280 bytes, less the headers of IPv6 and TCP."""
WINDOW_BYTES = 32_768
_IP = struct.Struct(">IHBB16s16s")
_TCP = struct.Struct(">HHIIHHHH")
_SYN_OPTIONS = struct.pack(">BBHBBBB", 2, 4, MTU - _IP.size - _TCP.size, 1, 3, 3, 7)
"""Maximum segment size, and a window scale: the host's stack, which offers one, relies on an answer."""
_MAGIC = b"CDTunnel"


@dataclass
class _Connection:
    host_port: int
    port: int
    expected: int
    """The next sequence number of the host's."""
    sent: int = 1000
    acknowledged: int = 1000
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    local: asyncio.StreamWriter | None = None
    pump: asyncio.Task[None] | None = None


class TunnelEnd:
    """One tunnel on a stream: `serve` runs until the stream ends."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rsd_port: int) -> None:
        self._reader = reader
        self._writer = writer
        self._rsd_port = rsd_port
        self._connections: dict[tuple[int, int], _Connection] = {}

    async def serve(self) -> None:
        await self._handshake()
        try:
            while True:
                header = await self._reader.readexactly(_IP.size)
                _, n_bytes, next_header, _, _, _ = _IP.unpack(header)
                payload = await self._reader.readexactly(n_bytes)
                # Neighbour discovery and the like need no answer on a link of two.
                if next_header == TCP:
                    await self._receive(payload)
        finally:
            for connection in self._connections.values():
                self._end(connection)

    async def _handshake(self) -> None:
        assert await self._reader.readexactly(len(_MAGIC)) == _MAGIC
        (n_bytes,) = struct.unpack(">H", await self._reader.readexactly(2))
        assert json.loads(await self._reader.readexactly(n_bytes))["type"] == "clientHandshakeRequest"
        answer = json.dumps(
            {
                "type": "serverHandshakeResponse",
                "clientParameters": {"address": str(ipaddress.IPv6Address(HOST)), "mtu": MTU, "netmask": "ffff:ffff::"},
                "serverAddress": str(ipaddress.IPv6Address(PHONE)),
                "serverRSDPort": self._rsd_port,
            }
        ).encode()
        self._writer.write(_MAGIC + struct.pack(">H", len(answer)) + answer)
        await self._writer.drain()

    async def _receive(self, segment: bytes) -> None:
        host_port, port, sequence, acknowledged, offset_flags, _, _, _ = _TCP.unpack_from(segment)
        payload, flags = segment[(offset_flags >> 12) * 4 :], offset_flags & 0x3F
        key = (host_port, port)
        if flags & SYN:
            self._connections[key] = _Connection(host_port, port, expected=(sequence + 1) % 2**32)
            await self._open(self._connections[key])
            return
        connection = self._connections.get(key)
        if connection is None:
            return
        if flags & RST:
            self._end(self._connections.pop(key))
            return
        if flags & ACK:
            connection.acknowledged = acknowledged
            connection.moved.set()
        if sequence == connection.expected and connection.local is not None:
            connection.expected = (sequence + len(payload) + bool(flags & FIN)) % 2**32
            if payload:
                connection.local.write(payload)
            if flags & FIN:
                with suppress(OSError):
                    connection.local.write_eof()
        if payload or flags & FIN:
            self._send(connection, ACK)

    async def _open(self, connection: _Connection) -> None:
        try:
            reader, connection.local = await asyncio.open_connection("127.0.0.1", connection.port)
        except OSError:
            self._send(connection, RST | ACK)
            return
        self._send(connection, SYN | ACK, options=_SYN_OPTIONS)
        connection.sent += 1
        connection.pump = asyncio.ensure_future(self._pump(connection, reader))

    async def _pump(self, connection: _Connection, reader: asyncio.StreamReader) -> None:
        """What the phone's service says, to the host."""
        with suppress(OSError):
            while payload := await reader.read(SEGMENT_BYTES):
                while connection.sent - connection.acknowledged > WINDOW_BYTES:
                    connection.moved.clear()
                    await connection.moved.wait()
                self._send(connection, PSH | ACK, payload)
                connection.sent += len(payload)
        self._send(connection, FIN | ACK)
        connection.sent += 1

    def _end(self, connection: _Connection) -> None:
        if connection.pump is not None:
            connection.pump.cancel()
        if connection.local is not None:
            connection.local.close()

    def _send(self, connection: _Connection, flags: int, payload: bytes = b"", options: bytes = b"") -> None:
        ports, numbers = (connection.port, connection.host_port), (connection.sent, connection.expected)
        offset_words = (_TCP.size + len(options)) // 4
        fields = (*ports, *numbers, offset_words << 12 | flags, 65_535)
        checksum = _checksum(_TCP.pack(*fields, 0, 0) + options + payload)
        segment = _TCP.pack(*fields, checksum, 0) + options + payload
        self._writer.write(_IP.pack(6 << 28, len(segment), TCP, 64, PHONE, HOST) + segment)


def _checksum(segment: bytes) -> int:
    """RFC 9293 §3.1, with the pseudo-header of RFC 8200 §8.1."""
    pseudo = PHONE + HOST + struct.pack(">II", len(segment), TCP) + segment
    padded = pseudo + b"\0" * (len(pseudo) % 2)
    total: int = sum(word for (word,) in struct.iter_unpack(">H", padded))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
