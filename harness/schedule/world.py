"""The world that a pass meets: the wall clock, `joulebench run` as a process, devices behind locks, the owner."""

from __future__ import annotations

import os
import signal
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from devices.base import DeviceError
from devices.device_lock import DeviceLock, handed_over
from devices.gates import Gates
from engines import environment_for_others
from harness.only_devices import put_on_devices
from harness.schedule.due import Ended, NotNowError, sha256_of
from harness.schedule.entries import Book, Entry
from harness.schedule.phones import make_ready, reach, run_program, switch
from harness.schema import PROTOCOL
from harness.stopping import lost_and_needed, rule_of_cell
from harness.sweep import PathError, set_value
from harness.terminal import EXIT_BAD_PLAN, EXIT_NOT_WRITTEN
from harness.variables import is_carried
from results.cells import trials_of
from results.database import DATABASE, StoreError
from results.own_python import own_module
from results.records import MODEL_PREFIX
from results.run_folders import check_free_space
from results.store import Store

PHONES = ("adb:", "ios:")
MESSAGE_VARIABLE = "JOULEBENCH_MESSAGE"
MESSAGE_PLACE = "{}"
"""In the arguments of `--notify`."""
ERROR = "error: "
LOOK_EVERY_S = 0.3
LAST_WORDS_BYTES = 20_000


class RealWorld:
    """echo: shown what a run says, as it says it."""

    def __init__(self, state: Path, book: Book, echo: Callable[[str], None]) -> None:
        self._state = state
        self._book = book
        self._echo = echo
        self._locks: list[DeviceLock] = []

    def now(self) -> datetime:
        return datetime.now(UTC)

    def plan_sha256(self, entry: Entry) -> str | None:
        return sha256_of(Path(entry.plan))

    def holds_run(self, folder: Path) -> bool:
        return (folder / DATABASE).exists()

    def has_lost(self, folder: Path) -> bool:
        try:
            with Store.view(folder) as store:
                run = store.data()
        except StoreError:
            return False
        protocol = PROTOCOL.read(run.info.plan.get("protocol", {}))
        return any(
            lost_and_needed(rule_of_cell(protocol, cell.device.startswith(MODEL_PREFIX)), own)
            for cell, own in zip(run.cells, trials_of(run).values(), strict=True)
        )

    @contextmanager
    def devices(self, entry: Entry) -> Iterator[None]:
        """Raises `NotNowError`."""
        names, gates = asked_devices(entry)
        with ExitStack() as closing:
            closing.callback(self._locks.clear)
            try:
                for name in sorted(name for name in names if not name.startswith(MODEL_PREFIX)):
                    self._make_ready(entry, name, gates, closing)
            except DeviceError as error:
                raise NotNowError(str(error), is_fault=True) from error
            yield

    def _make_ready(self, entry: Entry, name: str, gates: Gates, closing: ExitStack) -> None:
        is_phone = name.startswith(PHONES)
        phone = reach(name, self._state) if is_phone else None
        lock = DeviceLock(self._state, name) if phone is None else phone.lock
        try:
            lock.take()
        except DeviceError as error:
            raise NotNowError(str(error)) from error
        closing.callback(lock.release)
        self._locks.append(lock)
        if phone is None:
            return
        make_ready(name, phone, gates, entry.charging)
        if entry.charging is not None and entry.charging.on is not None:
            closing.callback(self._charge_again, name, entry.charging.on)

    def _charge_again(self, name: str, command: tuple[str, ...]) -> None:
        try:
            switch(name, command)
        except DeviceError as error:
            self._echo(f"{error}; it is on no charger now\n")

    def run(self, entry: Entry, folder: Path, resume: bool) -> Ended:
        """KeyboardInterrupt passes through, once the run has kept what it finished."""
        if (why := _no_room(folder, resume)) is not None:
            return Ended(EXIT_NOT_WRITTEN, why)
        # Not behind the run: what it missed, such as a server after a restart, may be there by then.
        if resume and (why := _refused(entry)) is not None:
            return Ended(EXIT_BAD_PLAN, why, of_plan=True)
        descriptors, handed = handed_over(self._locks)
        log = self._book.log(entry.name)
        with log.open("ab" if resume else "wb") as output:
            start = output.tell()
            try:
                process = subprocess.Popen(
                    command_of(entry, folder, resume),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=entry.folder,
                    env=environment_of(entry) | handed,
                    # A run that outlives this process keeps its entry and its devices locked.
                    pass_fds=[*descriptors, self._book.held[entry.name]],
                )
            except OSError as error:
                # Its folder may be on a disk that is not there now.
                return Ended(EXIT_NOT_WRITTEN, f"the run cannot be started ({error})")
        try:
            self._follow(process, log, start)
        except KeyboardInterrupt:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            process.wait()
            raise
        if process.returncode == EXIT_BAD_PLAN and (why := _no_room(folder, True)) is not None:
            return Ended(EXIT_NOT_WRITTEN, why)  # it ended as one that is refused does, and can go on
        return Ended(process.returncode, _last_error(log, start, process.returncode))

    def _follow(self, process: subprocess.Popen[bytes], log: Path, start: int) -> None:
        """The run writes into its file, so that it outlives this process."""
        with log.open("rb") as written:
            written.seek(start)
            ended, rest = False, b""
            while not ended:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_EVERY_S)
                    ended = True
                whole, line_end, rest = (rest + written.read()).rpartition(b"\n")
                if text := (whole + line_end + (rest if ended else b"")).decode(errors="replace"):
                    self._echo(text)

    def tell(self, entry: Entry, message: str) -> str | None:
        if entry.notify is None:
            return None
        argv = [message if argument == MESSAGE_PLACE else argument for argument in entry.notify]
        return run_program(argv, message + "\n", environment_of(entry) | {MESSAGE_VARIABLE: message})


def _no_room(folder: Path, is_begun: bool) -> str | None:
    """Why no run can go on there now, in words."""
    try:
        check_free_space(folder, is_begun)
    except StoreError as error:
        return str(error)
    return None


def environment_of(entry: Entry) -> dict[str, str]:
    """That of this pass; of what decides a run, all and only what was there when the entry was added.

    Of names that were not looked at then nothing is known: they are those of the pass.
    """
    now = environment_for_others()
    kept = {key: value for key, value in now.items() if key == "PATH" or not is_carried(key, entry.carried)}
    return kept | entry.environment


def command_of(entry: Entry, folder: Path, resume: bool) -> list[str]:
    resuming = ["--resume"] if resume else []
    return [*own_module("joulebench"), "run", *_plan_words(entry), f"--out={folder}", *resuming]


def _plan_words(entry: Entry) -> list[str]:
    return [
        entry.plan,
        *(f"--set={setting}" for setting in entry.settings),
        *(f"--device={name}" for name in entry.devices),
        *(["--allow-code"] if entry.allow_code else []),
    ]


def _refused(entry: Entry) -> str | None:
    """What is wrong with the plan itself now, as where a server is away. A run says no more of it than its code."""
    checked = subprocess.run(
        [*own_module("joulebench"), "plan", "check", *_plan_words(entry)],
        stdin=subprocess.DEVNULL, capture_output=True, cwd=entry.folder, env=environment_of(entry), check=False,
    )  # fmt: skip
    said = checked.stderr.decode(errors="replace")
    return _error_of(said, EXIT_BAD_PLAN) or "it is refused" if checked.returncode == EXIT_BAD_PLAN else None


def asked_devices(entry: Entry) -> tuple[list[str], Gates]:
    """What the plan names now, and when its phones may be measured. A plan that is none names nothing: its run says
    what is wrong."""
    try:
        raw: dict[str, Any] = tomllib.loads(Path(entry.plan).read_text(encoding="utf-8-sig"))
        for setting in entry.settings:
            set_value(raw, setting)
        put_on_devices(raw, entry.devices)
    except (OSError, ValueError, RecursionError, PathError):
        return [], Gates()
    devices = raw.get("device")
    found = [one.get("name") for one in devices if isinstance(one, dict)] if isinstance(devices, list) else []
    protocol = raw.get("protocol")
    own = protocol if isinstance(protocol, dict) else {}
    limits = {
        key: own[key] for key in ("max_temperature_c", "min_charge_percent") if type(own.get(key)) in (int, float)
    }
    return [name for name in dict.fromkeys(found) if isinstance(name, str)], Gates(**limits)


def _error_of(said: str, code: int, log: Path | None = None) -> str | None:
    """The first problem of a plan, of others the last. log: where all stand."""
    errors = [line.removeprefix(ERROR) for line in said.splitlines() if line.startswith(ERROR)]
    where = "" if log is None else f": {log}"
    more = f" (and {len(errors) - 1} more{where})" if len(errors) > 1 else ""
    return f"{errors[0 if code == EXIT_BAD_PLAN else -1]}{more}" if errors else None


def _last_error(log: Path, start: int, code: int) -> str:
    """What a run said last of why it failed."""
    with log.open("rb") as written:
        written.seek(0, os.SEEK_END)
        written.seek(max(start, written.tell() - LAST_WORDS_BYTES))
        said = written.read().decode(errors="replace")
    if (error := _error_of(said, code, log)) is not None:
        return error
    if code < 0:
        with suppress(ValueError):
            return f"it was ended by {signal.Signals(-code).name}"
    return f"it ended with code {code}; what it said: {log}" if code else ""
