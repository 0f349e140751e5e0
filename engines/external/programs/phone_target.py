"""An Android phone as a place for programs: /data/local/tmp/joulebench, where each set of files has a folder.

A folder is named after the SHA-256 of what it holds, so files are pushed once, and two builds never mix. A manifest is
written when all of them are there and their digests agree; from then on the sizes are compared. Only files that are
named here are taken away, and only programs that lie in these folders are killed.
"""

from __future__ import annotations

import hashlib
import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from devices.android.device import AndroidDevice
from devices.android.processes import WORK_FOLDER, FewerCoresError
from devices.android.stamps import burst, phone_times
from devices.base import DeviceError, TransientDeviceError
from engines.errors import EngineError
from engines.external.programs.edges import Edge, last_edge
from engines.external.programs.program import ProgramCall, ProgramOutput
from engines.external.programs.target import MAX_FILE_BYTES, ProgramRun, file_sha256
from results.printable import with_colon

ROOT = f"{WORK_FOLDER}/joulebench"
MANIFEST = "joulebench.manifest"
FOLDER_DIGITS = 16
DIGEST_TIMEOUT_S = 300.0
SWEEP_TIMEOUT_S = 60.0
_NO_SUCH_COMMAND = 127
_LEFT_OVER = """for p in /proc/[0-9]*; do
case "$(readlink $p/exe 2>/dev/null)" in {root}/*) kill -9 "${{p#/proc/}}" 2>/dev/null;; esac
done; :"""

log = logging.getLogger(__name__)


class PhoneTarget:
    """device: opened. Its lock keeps other runs away."""

    def __init__(self, device: AndroidDevice, now_s: Callable[[], float]) -> None:
        self._device = device
        self._phone = device.phone
        self._now_s = now_s
        self._folder: str | None = None
        self._for_single_runs: set[str] = set()

    def prepare(self, files: Mapping[str, Path]) -> None:
        digests = {name: file_sha256(path) for name, path in sorted(files.items())}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        manifest = "".join(f"{digest} {sizes[name]} {name}\n" for name, digest in digests.items())
        if any("\n" in name or name.startswith("/") or ".." in Path(name).parts for name in files):
            raise EngineError(f"names of files for the phone: {', '.join(map(repr, files))}; none may leave its folder")
        folder = f"{ROOT}/{hashlib.sha256(manifest.encode()).hexdigest()[:FOLDER_DIGITS]}"
        self._end_left_over()
        if not self._is_there(folder, manifest, sizes):
            self._push(folder, manifest, files, digests)
        self._folder = folder

    def _is_there(self, folder: str, manifest: str, sizes: Mapping[str, int]) -> bool:
        found = self._phone.run(f"cat {shlex.quote(f'{folder}/{MANIFEST}')}").stdout
        if found != manifest:
            return False
        names = " ".join(shlex.quote(f"{folder}/{name}") for name in sizes)
        told = self._phone.run(f"stat -c %s {names}").stdout.split()
        return told == [str(n) for n in sizes.values()]

    def _push(self, folder: str, manifest: str, files: Mapping[str, Path], digests: Mapping[str, str]) -> None:
        parents = sorted({str(Path(folder, name).parent) for name in files} | {folder})
        made = self._phone.run(f"mkdir -p {' '.join(map(shlex.quote, parents))}")
        if made.exit_code != 0:
            raise DeviceError(
                f"{with_colon(self._device.name)} no folder {folder} can be made there: {made.stderr.strip()}"
            )
        for name, path in files.items():
            log.info("%s: pushing %s (%d bytes)", self._device.name, name, path.stat().st_size)
            self._phone.push(path, f"{folder}/{name}")
        names = " ".join(shlex.quote(f"{folder}/{name}") for name in digests)
        told = self._phone.run(f"sha256sum {names}", DIGEST_TIMEOUT_S)
        if told.exit_code == _NO_SUCH_COMMAND:  # before Android 8: the sync protocol tells of a write that failed
            log.warning("%s has no sha256sum: what was pushed is not read back", self._device.name)
        found = [line.partition(" ")[0].lstrip("\\") for line in told.stdout.splitlines()] + [""] * len(digests)
        wrong = [name for name, own in zip(digests, found, strict=False) if own != digests[name]]
        if told.exit_code == _NO_SUCH_COMMAND:
            wrong = []
        if wrong:
            raise TransientDeviceError(
                f"{with_colon(self._device.name)} {', '.join(wrong)} did not arrive whole; is the phone full? It is"
                " pushed again"
            )
        self._write(f"{folder}/{MANIFEST}", manifest)

    def _write(self, remote: str, text: str) -> None:
        with tempfile.NamedTemporaryFile("w", prefix="joulebench-") as local:
            local.write(text)
            local.flush()
            self._phone.push(Path(local.name), remote, mode=0o644)

    def run(self, call: ProgramCall, texts: Mapping[str, str], timeout_s: float) -> ProgramRun:
        assert self._folder is not None  # `prepare` was called
        self._for_single_runs |= {*call.reads, *texts}
        self._remove(call.reads)  # else a program that fails leaves the result of the run before
        for name, text in texts.items():
            self._write(f"{self._folder}/{name}", text)
        before = burst(self._phone, self._now_s)
        environment = {"LD_LIBRARY_PATH": ".", **call.environment}
        process = self._device.start_program(call.arguments, call.cores, self._folder, environment)
        try:
            result = process.wait(timeout_s)
        except TransientDeviceError as error:
            said = str(error).removeprefix(f"adb: {self._phone.name.removeprefix('adb:')}: ")
            raise type(error)(f"{with_colon(self._device.name)} {call.arguments[0]}: {said}") from error
        except FewerCoresError as error:
            # Other arms may ask for cores that the phone gives.
            raise EngineError(f"{call.arguments[0]}: {error}") from error
        except BaseException:
            with suppress(DeviceError):
                process.kill()
            raise
        times = phone_times([before, burst(self._phone, self._now_s)])
        if result.edges_s is None:
            raise TransientDeviceError(
                f"{with_colon(self._device.name)} when {call.arguments[0]} ran is not known; try again"
            )
        output = ProgramOutput(result.stdout, result.stderr, result.exit_code, self._texts(call.reads))
        begun_s, ended_s = map(times.of_uptime_s, result.edges_s)
        arrived_s, done = process.arrived_s(call.last_words) if call.last_words else None, None
        if arrived_s is not None:
            arrived_s += self._now_s() - time.monotonic()
            done = last_edge(Edge(ended_s, times.uptime_uncertainty_s), arrived_s, times.trip_s)
        return ProgramRun(output, begun_s, ended_s, times.of_wall_s, times.remark, done, times.wall_uncertainty_s)

    def _texts(self, names: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for name in names:
            read = self._phone.run(f"head -c {MAX_FILE_BYTES} {shlex.quote(f'{self._folder}/{name}')}")
            if read.exit_code == 0:
                found[name] = read.stdout
        return found

    def _remove(self, names: tuple[str, ...]) -> None:
        if names:
            self._phone.run(f"rm -f {' '.join(shlex.quote(f'{self._folder}/{name}') for name in names)}")

    def _end_left_over(self) -> None:
        """Of a run before that was cut off with its link."""
        self._phone.run(_LEFT_OVER.format(root=ROOT), SWEEP_TIMEOUT_S)

    def close(self) -> None:
        """What was pushed stays, for the next run. Of a phone that is gone nothing can be taken away."""
        if self._folder is not None:
            with suppress(DeviceError):
                self._remove(tuple(sorted(self._for_single_runs)))
                self._end_left_over()
        self._folder = None
