"""A phone behind a fake adb server: a real shell runs its commands in a folder that stands for the phone's root.

/sys, /data, /proc/sys and a few files of /proc are looked up in that folder; `dumpsys`, `cmd`, `getprop` and `settings`
answer with the file that has the words of the call as its name. mksh, the shell of Android, is taken where it is
installed, else bash, which has what the gauge's loop needs: `read -t` with fractions, and EPOCHREALTIME.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from tests.fakes.libraries import compile_library

SHELL = shutil.which("mksh") or shutil.which("bash") or "/bin/bash"
CLOCK_FILE = "FAKE_CLOCK"
"""The variable that names it (`tests.fakes.held_clock`)."""
STDIN, STDOUT, STDERR, EXIT, CLOSE_STDIN = 0, 1, 2, 3, 4
_ROOTED = re.compile(r"(?<![\w.])/(?=(?:sys|data|system)/|proc/(?:stat|cpuinfo|meminfo|loadavg|sys)\b)")
_ANSWERING = ("dumpsys", "cmd", "getprop", "settings")
_ANSWER_SCRIPT = """#!/bin/sh
answer="$PHONE/answers/${0##*/}${1:+ $*}"
[ -r "$answer" ] || { echo "Can't find service: $1"; exit 1; }
cat "$answer"
"""

DISCHARGING = """Current Battery Service state:
  AC powered: false
  USB powered: false
  Wireless powered: false
  Dock powered: false
  Max charging current: 0
  Max charging voltage: 0
  Charge counter: 3456000
  status: 3
  health: 2
  present: true
  level: 82
  scale: 100
  voltage: 4012
  temperature: 312
  technology: Li-ion
"""
THERMAL = """IsStatusOverride: false
ThermalEventListeners:
\tcallbacks: 1
Thermal Status: 0
Cached temperatures:
\tTemperature{mValue=80.0, mType=0, mName=CPU0, mStatus=3}
HAL Ready: true
HAL connection:
\tThermalHAL 2.0 connected: yes
Current temperatures from HAL:
\tTemperature{mValue=45.5, mType=0, mName=CPU0, mStatus=0}
\tTemperature{mValue=41.0, mType=0, mName=CPU4, mStatus=0}
\tTemperature{mValue=31.2, mType=2, mName=battery, mStatus=0}
Current cooling devices from HAL:
\tCoolingDevice{mValue=0, mType=2, mName=thermal-cpufreq-0}
"""
PROPERTIES = {
    "ro.product.manufacturer": "Example",
    "ro.product.model": "Phone One",
    "ro.soc.model": "SM8650",
    "ro.build.version.release": "15",
    "ro.build.version.sdk": "35",
    "ro.build.id": "AP4A.250105.002",
    "ro.build.version.incremental": "12701944",
    "ro.product.cpu.abi": "arm64-v8a",
}


class FakePhone:
    """state: as the server lists it. link_jitter_s: each packet is held up to this long, in each direction."""

    rooted = _ROOTED
    """What of a command becomes a path in the folder."""

    def __init__(self, root: Path, serial: str = "FAKE0001", link_jitter_s: float = 0.0) -> None:
        self.root = root
        self.serial = serial
        self.state = "device"
        self.features = ["shell_v2", "cmd", "stat_v2"]
        self.on_network = ":" in serial
        self.attached = not self.on_network
        self.reachable = True
        self.link_jitter_s = link_jitter_s
        self.silent = False
        """True: the link stays up and nothing comes through it, as when Wi-Fi goes."""
        self.speaks: Callable[[socket.socket], None] | None = None
        """Writes what it likes to whoever asks for a shell or for files."""
        self.before_libc = library() if CLOCK_FILE in os.environ else None
        """What its processes load first (LD_PRELOAD). None: its clock is ours, and it has no gauge."""
        self.on_processes: Callable[[], None] | None = None
        """Told, before any other process begins or ends, that one did."""
        self.input_to_cut = 0
        """So many pieces of input lose their first byte, as in a shell whose `read -t` times out after it."""
        self._delays = random.Random(1)
        self._links: set[socket.socket] = set()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        for folder in ("bin", "answers", "data/local/tmp"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        for name in _ANSWERING:
            script = root / "bin" / name
            script.write_text(_ANSWER_SCRIPT)
            script.chmod(0o755)
        self.answer("dumpsys battery", DISCHARGING)
        self.answer("dumpsys thermalservice", THERMAL)
        self.answer(
            "dumpsys power", "POWER MANAGER (dumpsys power)\n  mWakefulness=Awake\n  mWakefulnessChanging=false\n"
        )
        self.file("/proc/sys/kernel/random/boot_id", "2b1ab1f3-5c6e-4b0d-9a52-1d9f6c0c7a11\n")
        self.answer("getprop", "".join(f"[{k}]: [{v}]\n" for k, v in PROPERTIES.items()))

    def answer(self, call: str, text: str | None) -> None:
        """What a call such as "dumpsys battery" prints; None: the phone has no such service."""
        if text is None:
            (self.root / "answers" / call).unlink(missing_ok=True)
        else:
            put(self.root / "answers" / call, text)

    def file(self, path: str, text: str) -> Path:
        """A file of the phone, by its absolute path there."""
        local = self.local(path)
        local.parent.mkdir(parents=True, exist_ok=True)
        put(local, text)
        return local

    def local(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def pull_cable(self) -> None:
        """The link breaks, and the server lists the phone no more."""
        self.attached = False
        self.drop_link()

    def plug_in(self) -> None:
        self.attached = True

    def drop_link(self) -> None:
        with self._lock:
            for link in self._links:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)

    def shut_down(self) -> None:
        """Nothing that was started here is left running."""
        self.drop_link()
        with self._lock:
            for process in self._processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def serve(self, link: socket.socket, service: str) -> None:
        """One service of the phone, on a socket that the server hands over."""
        with self._lock:
            self._links.add(link)
        try:
            kind, _, argument = service.partition(":")
            if self.speaks is not None:
                link.sendall(b"OKAY")
                self.speaks(link)
            elif kind.startswith("shell,v2"):
                link.sendall(b"OKAY")
                self._shell(link, argument)
            elif kind == "sync":
                link.sendall(b"OKAY")
                self._sync(link)
            else:
                link.sendall(b"FAIL0006closed")
        finally:
            with self._lock:
                self._links.discard(link)

    def _hold(self) -> None:
        time.sleep(self._delays.uniform(0.0, self.link_jitter_s))
        while self.silent:
            time.sleep(0.01)

    # --- shell -------------------------------------------------------------------------------------------------------

    def _shell(self, link: socket.socket, command: str) -> None:
        preloaded = {} if self.before_libc is None else {"LD_PRELOAD": str(self.before_libc)}
        preloaded |= {name: path for name, path in os.environ.items() if name == CLOCK_FILE}
        process = subprocess.Popen(
            # A shell cannot trap what was ignored when it began, and tests may run under nohup.
            ["env", "--default-signal=HUP", SHELL, "-c", self.rooted.sub(f"{self.root}/", command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.root,
            env={"PATH": f"{self.root}/bin:/usr/bin:/bin", "PHONE": str(self.root)} | preloaded,
            start_new_session=True,
        )
        with self._lock:
            self._processes.add(process)
            if self.on_processes is not None:
                self.on_processes()
        assert process.stdin
        assert process.stdout
        assert process.stderr
        sending = threading.Lock()
        pumps = [
            threading.Thread(target=self._pump, args=(link, sending, stream, packet_id), daemon=True)
            for stream, packet_id in ((process.stdout, STDOUT), (process.stderr, STDERR))
        ]
        feeder = threading.Thread(target=self._feed, args=(link, process), daemon=True)
        for thread in (*pumps, feeder):
            thread.start()
        for pump in pumps:
            pump.join()
        code = process.wait()
        with suppress(OSError), sending:
            link.sendall(struct.pack("<BIB", EXIT, 1, code & 0xFF if code >= 0 else 128 - code))
        with self._lock:
            self._processes.discard(process)
            if self.on_processes is not None:
                self.on_processes()

    def _pump(self, link: socket.socket, sending: threading.Lock, stream: IO[bytes], packet_id: int) -> None:
        """By whole lines, so that the folder's own path can be taken out of them."""
        with suppress(OSError):
            while line := stream.readline():
                payload = line.replace(str(self.root).encode(), b"")
                self._hold()
                with sending:
                    link.sendall(struct.pack("<BI", packet_id, len(payload)) + payload)

    def _feed(self, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
        """The command's input. When the client goes, adbd hangs up on the shell, and on nothing that it started."""
        assert process.stdin
        with suppress(OSError, EOFError, ValueError):
            while True:
                packet_id, n_bytes = struct.unpack("<BI", receive_exactly(link, 5))
                payload = receive_exactly(link, n_bytes)
                self._hold()
                if packet_id == STDIN and self.input_to_cut > 0:
                    self.input_to_cut -= 1
                    payload = payload[1:]
                if packet_id == STDIN:
                    process.stdin.write(payload)
                    process.stdin.flush()
                elif packet_id == CLOSE_STDIN:
                    process.stdin.close()
        with suppress(OSError):
            process.stdin.close()
        with suppress(ProcessLookupError):
            if process.poll() is None:
                os.kill(process.pid, signal.SIGHUP)

    # --- files -------------------------------------------------------------------------------------------------------

    def _sync(self, link: socket.socket) -> None:
        while True:
            request, n_bytes = struct.unpack("<4sI", receive_exactly(link, 8))
            path = receive_exactly(link, n_bytes).decode()
            if request == b"SEND":
                self._take(link, path)
            elif request == b"RECV":
                self._give(link, path)
            else:
                return

    def _take(self, link: socket.socket, target: str) -> None:
        path, _, mode = target.rpartition(",")
        content = b""
        while True:
            kind, n = struct.unpack("<4sI", receive_exactly(link, 8))
            if kind == b"DONE":
                break
            content += receive_exactly(link, n)
        if not self.local(path).parent.is_dir():
            reason = b"couldn't create file: Permission denied"
            link.sendall(b"FAIL" + struct.pack("<I", len(reason)) + reason)
            return
        self.local(path).write_bytes(content)
        self.local(path).chmod(int(mode) & 0o777)
        link.sendall(b"OKAY" + struct.pack("<I", 0))

    def _give(self, link: socket.socket, path: str) -> None:
        if not self.local(path).is_file():
            reason = b"open failed: No such file or directory"
            link.sendall(b"FAIL" + struct.pack("<I", len(reason)) + reason)
            return
        content = self.local(path).read_bytes()
        for start in range(0, len(content), 1 << 16):
            chunk = content[start : start + (1 << 16)]
            link.sendall(b"DATA" + struct.pack("<I", len(chunk)) + chunk)
        link.sendall(b"DONE" + struct.pack("<I", 0))


def library() -> Path:
    """`phone.c`, compiled once."""
    return Path(_compiled().name) / "phone.so"


@cache
def _compiled() -> TemporaryDirectory[str]:
    folder = TemporaryDirectory()
    compile_library(Path(__file__).with_suffix(".c"), Path(folder.name) / "phone.so")
    return folder


def put(path: Path, text: str) -> None:
    """sysfs never shows half a number: write beside, then rename."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(text)
    beside.replace(path)


def receive_exactly(connection: socket.socket, n_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < n_bytes:
        chunk = connection.recv(n_bytes - len(received))
        if not chunk:
            raise EOFError
        received += chunk
    return bytes(received)
