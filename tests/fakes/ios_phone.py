"""A fake iPhone on real sockets, at the far end of its tunnel: discovery, lockdown, diagnostics and instruments.

Discovery speaks RemoteXPC (XPC objects in HTTP/2 frames), lockdown and diagnostics property lists behind a length,
and the instruments DTX, a symmetric protocol: the phone's end of it is the same class as the host's. Messages are
built and parsed by pymobiledevice3's own serialisers, so what is tested is everything above the bytes.
"""

from __future__ import annotations

import asyncio
import plistlib
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hyperframe.frame import DataFrame, Frame, HeadersFrame, SettingsFrame, WindowUpdateFrame
from pymobiledevice3.dtx import DTXConnection, DTXService, dtx_method, dtx_on_invoke
from pymobiledevice3.remote.remotexpc import HTTP2_MAGIC, ROOT_CHANNEL
from pymobiledevice3.remote.xpc_message import (
    XpcUInt64Type,
    XpcWrapper,
    create_xpc_wrapper,
    decode_xpc_object,
)

from devices.clock import MonotonicClock

CLOCK = MonotonicClock()
UDID = "00008140-0001100100000001"
ENGINE_PID = 4242
SIGKILL = 9
T = TypeVar("T")
Plist = dict[str, Any]
_FRAME_HEADER_BYTES = 9

BATTERY: Plist = {
    "InstantAmperage": 2**64 - 520,
    "Voltage": 4012,
    "Temperature": 3120,
    "CurrentCapacity": 82,
    "MaxCapacity": 100,
    "ExternalConnected": False,
    "IsCharging": False,
    "FullyCharged": False,
}
"""A phone that discharges: 520 mA at 4.012 V."""


FAULTS = {
    "instruments garbage": "bytes that are no DTX message, at opening",
    "instruments close": "the connection ends at opening",
    "instruments silent": "taken, and never answered",
    "lockdown drops": "the connection ends before the first answer",
    "lockdown drops later": "the connection ends at the question whether Developer Mode is on",
    "diagnostics bad plist": "an XML property list that breaks off",
    "diagnostics no plist": "bytes that are none",
    "diagnostics no dictionary": "a list in the place of the answer",
    "diagnostics no registry": "a list in the place of the battery's properties",
    "diagnostics refuse": "a status that is no success",
    "locked": "no service starts: PasswordProtected",
}


def gauge_sample(cpu: float = 40.0, gpu: float = 25.0, age: int = 5) -> Plist:
    """One whole sample of the energy gauge, with the arithmetic of real ones: see test_ios_energy_gauge.py."""
    return {
        "energy.version": 1,
        "kIDEGaugeSecondsSinceInitialQueryKey": age,
        "energy.cost": cpu + gpu - 10,
        "energy.overhead": -10.0,
        "energy.cpu.cost": cpu,
        "energy.cpu.overhead": 0,
        "energy.gpu.cost": gpu,
        "energy.gpu.overhead": 0,
        "energy.networking.cost": 0,
        "energy.networkning.overhead": 0,
        "energy.location.cost": 0,
        "energy.location.overhead": 0,
        "energy.display.cost": 0,
        "energy.display.overhead": 0,
        "energy.appstate.cost": 8,
        "energy.appstate.overhead": 0,
        "energy.thermalstate.cost": 0,
        "energy.inducedthermalstate.cost": -1,
    }


@dataclass
class FakeIphone:
    """What the phone is and does; tests change it at any time."""

    udid: str = UDID
    developer_mode: bool = True
    image_mounted: bool = True
    battery: Callable[[], Plist | None] = lambda: BATTERY
    running: dict[str, int] = field(default_factory=lambda: {"com.example.engine": ENGINE_PID})
    gauge: Callable[[float], Plist] = lambda tracing_s: gauge_sample(40.0 + int(tracing_s * 20) % 7)
    """Of seconds since the tracing began: the sample of the process, {} where it is not traced."""
    delay_s: float = 0.0
    """Before each answer of the instruments and of the diagnostics."""
    faults: set[str] = field(default_factory=set)
    """Words of `FAULTS`."""
    answers_as: str | None = None
    """The UDID that its discovery tells, where the tunnel's port has gone to another phone."""
    console: Callable[[tuple[str, ...]], list[tuple[float, str]]] = lambda arguments: []
    """Of the arguments an app was started with: what it prints, each so many seconds after the one before."""
    log: list[tuple[Any, ...]] = field(default_factory=list)
    """What it was told to do."""


class ServedIphone:
    """A fake phone's services, each on a port of its own, on a thread of their own. `rsd_port` is the way in."""

    def __init__(self, phone: FakeIphone) -> None:
        self.phone = phone
        self.rsd_port = 0
        self.ports: dict[str, int] = {}
        self._servers: list[asyncio.Server] = []
        self._host_servers: list[asyncio.Server] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-iphone", daemon=True)

    def __enter__(self) -> ServedIphone:
        self._thread.start()
        self.run(self._serve())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def pull_cable(self) -> None:
        """Every connection ends, and none is taken any more."""
        self.run(self._unplug())

    def plug_in(self) -> None:
        """The phone offers its services again, on other ports."""
        self.run(self._serve())

    async def listen(
        self,
        answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        on_host: bool = False,
    ) -> int:
        """A port on which each connection is answered until it ends. on_host: it stays when the cable is pulled."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            # Cancelled when the fake ends.
            with suppress(OSError, EOFError, asyncio.CancelledError):
                await answer(reader, writer)
            self._writers.discard(writer)
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        (self._host_servers if on_host else self._servers).append(server)
        return int(server.sockets[0].getsockname()[1])

    async def _serve(self) -> None:
        self.ports = {
            "com.apple.mobile.lockdown.remote.trusted": await self.listen(self._checked_in(self._lockdown)),
            "com.apple.mobile.diagnostics_relay.shim.remote": await self.listen(self._checked_in(self._diagnostics)),
            "com.apple.instruments.dtservicehub": await self.listen(self._instruments),
        }
        self.rsd_port = await self.listen(self._discovery)

    async def _unplug(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()
        for writer in self._writers:
            writer.transport.abort()

    async def _close(self) -> None:
        await self._unplug()
        for server in self._host_servers:
            server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    # --- discovery -------------------------------------------------------------------------------------------------

    async def _discovery(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """HTTP/2 as far as a client of RemoteXPC needs it: settings, and its handshake answered on the root channel."""
        assert await reader.readexactly(len(HTTP2_MAGIC)) == HTTP2_MAGIC
        writer.write(SettingsFrame(settings={SettingsFrame.INITIAL_WINDOW_SIZE: 2**20}).serialize())
        writer.write(WindowUpdateFrame(stream_id=0, window_increment=2**20).serialize())
        while True:
            frame, n_bytes = Frame.parse_frame_header(memoryview(await reader.readexactly(_FRAME_HEADER_BYTES)))
            frame.parse_body(memoryview(await reader.readexactly(n_bytes)))
            if isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
                writer.write(SettingsFrame(flags=["ACK"]).serialize())
            elif isinstance(frame, DataFrame) and frame.stream_id == ROOT_CHANNEL:
                payload = XpcWrapper.parse(frame.data).payload
                message = decode_xpc_object(payload) if payload is not None and payload.data else {}
                if message.get("MessageType") == "Handshake":
                    writer.write(HeadersFrame(stream_id=ROOT_CHANNEL, flags=["END_HEADERS"]).serialize())
                    answer = create_xpc_wrapper(self._peer_info(), message_id=2)
                    writer.write(DataFrame(stream_id=ROOT_CHANNEL, data=answer).serialize())
            await writer.drain()

    def _peer_info(self) -> Plist:
        offered = dict(self.ports)
        if not (self.phone.developer_mode and self.phone.image_mounted):
            del offered["com.apple.instruments.dtservicehub"]
        return {
            "MessageType": "Handshake",
            "MessagingProtocolVersion": XpcUInt64Type(7),
            "Properties": {
                "UniqueDeviceID": self.phone.answers_as or self.phone.udid,
                "ProductType": "iPhone17,1",
                "OSVersion": "18.5",
                "BuildVersion": "22F76",
                "UniqueChipID": XpcUInt64Type(1),
            },
            "Services": {name: {"Port": str(port), "Properties": {}} for name, port in offered.items()},
        }

    # --- services of property lists --------------------------------------------------------------------------------

    def _checked_in(self, answer: Callable[[Plist], Plist]) -> Callable[..., Awaitable[None]]:
        """A service behind discovery: its connection is checked in first."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert (await receive_plist(reader))["Request"] == "RSDCheckin"
            send_plist(writer, {"Request": "RSDCheckin"})
            locked = "locked" in self.phone.faults
            send_plist(writer, {"Request": "StartService"} | ({"Error": "PasswordProtected"} if locked else {}))
            while True:
                request = await receive_plist(reader)
                await asyncio.sleep(self.phone.delay_s)
                if (raw := self._broken_answer(request)) is not None:
                    if not raw:
                        return
                    writer.write(struct.pack(">I", len(raw)) + raw)
                    continue
                send_plist(writer, answer(request))

        return serve

    def _broken_answer(self, request: Plist) -> bytes | None:
        """What is sent for a property list: empty where the connection ends, None for the right answer."""
        faults, registry = self.phone.faults, request["Request"] == "IORegistry"
        if "lockdown drops" in faults and not registry:
            return b""
        if "lockdown drops later" in faults and request.get("Key") == "DeveloperModeStatus":
            return b""
        if not registry:
            return None
        if "diagnostics bad plist" in faults:
            return plistlib.dumps({"Status": "Success"})[:-20]
        if "diagnostics no plist" in faults:
            return b"\xde\xad\xbe\xef" * 4
        if "diagnostics no dictionary" in faults:
            return plistlib.dumps(["Success"])
        if "diagnostics no registry" in faults:
            return plistlib.dumps({"Status": "Success", "Diagnostics": {"IORegistry": ["Voltage"]}})
        if "diagnostics refuse" in faults:
            return plistlib.dumps({"Status": "UnknownRequest"})
        return None

    def _lockdown(self, request: Plist) -> Plist:
        answers: dict[tuple[Any, Any], Any] = {
            (None, None): {
                "UniqueDeviceID": self.phone.udid,
                "ProductName": "iPhone OS",
                "ProductType": "iPhone17,1",
                "ProductVersion": "18.5",
                "CPUArchitecture": "arm64e",
            },
            ("com.apple.security.mac.amfi", "DeveloperModeStatus"): self.phone.developer_mode,
        }
        if request["Request"] == "QueryType":
            return {"Request": "QueryType", "Type": "com.apple.mobile.lockdown"}
        value = answers[request.get("Domain"), request.get("Key")]
        return {"Request": request["Request"], "Value": value}

    def _diagnostics(self, request: Plist) -> Plist:
        assert (request["Request"], request["EntryClass"]) == ("IORegistry", "IOPMPowerSource")
        registry = self.phone.battery()
        return {"Status": "Success", "Diagnostics": {} if registry is None else {"IORegistry": registry}}

    # --- instruments -----------------------------------------------------------------------------------------------

    async def _instruments(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "instruments close" in self.phone.faults:
            return
        if "instruments silent" in self.phone.faults:
            await asyncio.sleep(3600)
        if "instruments garbage" in self.phone.faults:
            writer.write(b"\xff\x00garbage" * 64)
            await writer.drain()
            await reader.read()
            return
        connection = DTXConnection(reader, writer)
        for service in (_EnergyGauge, _ProcessControl, _DeviceInformation):
            # One class a connection: it has to know its phone, and the library makes the instances.
            connection.register_service(type(service.__name__, (service,), {"phone": self.phone}))
        await connection.connect()
        await connection.wait_disconnected()


class _EnergyGauge(DTXService):  # type: ignore[misc]
    IDENTIFIER = "com.apple.xcode.debug-gauge-data-providers.Energy"
    phone: FakeIphone
    begun_s = 0.0

    @dtx_on_invoke("startSamplingForPIDs:")  # type: ignore[untyped-decorator]
    async def start(self, process_ids: list[int]) -> None:
        self.phone.log.append(("trace", *process_ids))
        self.begun_s = CLOCK.now_s()

    @dtx_on_invoke("stopSamplingForPIDs:")  # type: ignore[untyped-decorator]
    async def stop(self, process_ids: list[int]) -> None:
        self.phone.log.append(("untrace", *process_ids))

    @dtx_on_invoke("sampleAttributes:forPIDs:")  # type: ignore[untyped-decorator]
    async def sample(self, attributes: Plist, process_ids: list[int]) -> dict[int, Plist]:
        await asyncio.sleep(self.phone.delay_s)
        samples = {int(pid): self.phone.gauge(CLOCK.now_s() - self.begun_s) for pid in process_ids}
        return {pid: sample for pid, sample in samples.items() if sample and pid in self.phone.running.values()}


class _ProcessControl(DTXService):  # type: ignore[misc]
    IDENTIFIER = "com.apple.instruments.server.services.processcontrol"
    phone: FakeIphone

    @dtx_on_invoke("launchSuspendedProcessWithDevicePath:bundleIdentifier:environment:arguments:options:")  # type: ignore[untyped-decorator]
    async def launch(self, path: str, app: str, environment: Plist, arguments: list[str], options: Plist) -> int:
        self.phone.log.append(("launch", app, tuple(arguments), dict(environment), bool(options["KillExisting"])))
        if app == "com.example.missing":
            return 0
        self.phone.running[app] = ENGINE_PID + len(self.phone.running)
        self.printing = asyncio.create_task(self._print(self.phone.running[app], tuple(arguments)))
        return self.phone.running[app]

    async def _print(self, process_id: int, arguments: tuple[str, ...]) -> None:
        for after_s, text in self.phone.console(arguments):
            await asyncio.sleep(after_s)
            await self.output(text, process_id, 0)

    @dtx_method("outputReceived:fromProcess:atTime:", expects_reply=False)  # type: ignore[untyped-decorator]
    async def output(self, message: str, process_id: int, at: int) -> None: ...

    @dtx_on_invoke("processIdentifierForBundleIdentifier:")  # type: ignore[untyped-decorator]
    async def find(self, app: str) -> int:
        await asyncio.sleep(self.phone.delay_s)
        return self.phone.running.get(app, 0)

    @dtx_on_invoke("sendSignal:toPid:")  # type: ignore[untyped-decorator]
    async def signal(self, signal: int, process_id: int) -> None:
        self.phone.log.append(("signal", int(signal), int(process_id)))
        if signal == SIGKILL:
            self.phone.running = {app: pid for app, pid in self.phone.running.items() if pid != process_id}


class _DeviceInformation(DTXService):  # type: ignore[misc]
    IDENTIFIER = "com.apple.instruments.server.services.deviceinfo"

    @dtx_on_invoke("hardwareInformation")  # type: ignore[untyped-decorator]
    async def hardware(self) -> Plist:
        return {"numberOfPhysicalCpus": 6, "numberOfCpus": 6, "hwCPUtype": 16777228, "hwCPU64BitCapable": 1}


async def receive_plist(reader: asyncio.StreamReader) -> Plist:
    """A property list behind its length: 4 bytes, big endian."""
    (n_bytes,) = struct.unpack(">I", await reader.readexactly(4))
    message: Plist = plistlib.loads(await reader.readexactly(n_bytes))
    return message


def send_plist(writer: asyncio.StreamWriter, message: Plist) -> None:
    payload = plistlib.dumps(message)
    writer.write(struct.pack(">I", len(payload)) + payload)
