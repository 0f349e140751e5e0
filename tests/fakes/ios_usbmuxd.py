"""A fake usbmuxd with a phone on its cable: lists it, and connects to its lockdown and to the tunnel behind that.

Requests are property lists behind four numbers (length, version, kind, tag), little endian. After `Connect` the same
socket carries the phone's port.
"""

from __future__ import annotations

import asyncio
import plistlib
import socket
import struct
from typing import Any

from tests.fakes.ios_phone import Plist, ServedIphone, receive_plist, send_plist
from tests.fakes.ios_tunnel import TunnelEnd

LOCKDOWN_PORT, PROXY_PORT = 62078, 50001
PROXY = "com.apple.internal.devicecompute.CoreDeviceProxy"
_HEADER = struct.Struct("<IIII")
_PLIST = 8
_OK, _REFUSED = 0, 3


class FakeUsbmuxd:
    """Runs on the phone's own loop. `trusted`: whether this computer has a pairing record of the phone."""

    def __init__(self, served: ServedIphone, trusted: bool = True) -> None:
        self.trusted = trusted
        self._served = served
        self._port = 0

    @property
    def address(self) -> str:
        """For USBMUXD_SOCKET_ADDRESS."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> FakeUsbmuxd:
        self._port = self._served.run(self._served.listen(self._answer, on_host=True))
        return self

    def __exit__(self, *exc_info: object) -> None:
        """The phone closes its ports."""

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            n_bytes, version, _, tag = _HEADER.unpack(await reader.readexactly(_HEADER.size))
            request = plistlib.loads(await reader.readexactly(n_bytes - _HEADER.size))
            answer = self._reply(request)
            payload = plistlib.dumps(answer)
            writer.write(_HEADER.pack(_HEADER.size + len(payload), version, _PLIST, tag) + payload)
            if request["MessageType"] == "Connect" and answer["Number"] == _OK:
                break
        if socket.ntohs(request["PortNumber"]) == LOCKDOWN_PORT:
            await self._lockdown(reader, writer)
        await TunnelEnd(reader, writer, self._served.rsd_port).serve()

    def _reply(self, request: Plist) -> Plist:
        udid = self._served.phone.udid
        kind = request["MessageType"]
        if kind == "ReadBUID":
            return {"BUID": "00000000-0000-0000-0000-000000000000"}
        if kind == "ListDevices":
            attached = {
                "MessageType": "Attached",
                "DeviceID": 1,
                "Properties": {"SerialNumber": udid, "ConnectionType": "USB"},
            }
            return {"DeviceList": [attached]}
        if kind == "ReadPairRecord":
            record = plistlib.dumps({"HostID": "fake-host", "SystemBUID": "fake-buid"})
            return {"PairRecordData": record} if self.trusted else {"MessageType": "Result", "Number": 2}
        known = kind == "Connect" and socket.ntohs(request["PortNumber"]) in (LOCKDOWN_PORT, PROXY_PORT)
        return {"MessageType": "Result", "Number": _OK if known else _REFUSED}

    async def _lockdown(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers: dict[str, dict[str, Any]] = {
            "QueryType": {"Type": "com.apple.mobile.lockdown"},
            "GetValue": {"Value": {"UniqueDeviceID": self._served.phone.udid, "ProductVersion": "18.5"}},
            "StartSession": {"SessionID": "1", "EnableSessionSSL": False},
            "StartService": {"Service": PROXY, "Port": PROXY_PORT, "EnableServiceSSL": False},
        }
        while True:
            request = await receive_plist(reader)
            send_plist(writer, {"Request": request["Request"]} | answers[request["Request"]])
