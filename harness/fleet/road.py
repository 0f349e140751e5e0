"""The coordinator's end of the way to its workers: what may come along it, and the way over Dask."""

from __future__ import annotations

import queue
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple, Protocol

from harness.fleet.dask_scheduler import READY, SchedulerAsked
from harness.fleet.dask_settings import SERIAL, TOPIC, device_of, resource_of, settle_dask
from harness.fleet.security import Address, Tls, security_of
from harness.fleet.worker_side import SAY_EVERY_S
from results.own_python import own_module

if TYPE_CHECKING:
    from distributed.client import Client, Future

LOOK_EVERY_S = 1.0
BEGINS_WITHIN_S = 5.0
"""The scheduler of a coordinator that was killed may need a moment to leave the port."""
STARTS_WITHIN_S = 30.0
"""Where one was lost."""
TRY_EVERY_S = 0.5
ENDS_WITHIN_S = 1.0
"""Once it has nothing more to say."""
ANSWERS_WITHIN_S = 10.0
FETCHED_WITHIN_S = 3600.0
"""An answer of hours of traces has 100 MB. A worker that goes meanwhile ends it at once."""
FETCHING = "sends its answer"
STATE_KEY = "joulebench"


class FleetError(Exception):
    """The way to the workers cannot be opened: what, the value, the remedy."""


class _KilledAtStartError(FleetError):
    """A scheduler that somebody killed before it listened: nothing is known of the address."""


class Came(NamedTuple):
    """An answer. key: the lease, or of a description what `describe` returned."""

    key: str
    content: object


class Lost(NamedTuple):
    """Nothing will come under this key. is_its_own: its worker died, and may have died of it."""

    key: str
    reason: str
    is_its_own: bool


class Said(NamedTuple):
    key: str
    words: str


class Down(NamedTuple):
    """The scheduler was lost; nothing will come of what was sent before."""

    reason: str


Event = Came | Lost | Said | Down


class Road(Protocol):
    """How tasks reach the devices' workers."""

    def devices(self) -> Mapping[str, int]:
        """How many workers offer each device now."""
        ...

    def send(self, key: str, device: str, content: bytes) -> None: ...
    def forget(self, key: str) -> None:
        """Nobody waits for it any more."""
        ...

    def events(self, timeout_s: float) -> Sequence[Event]:
        """What came, at once where something did. Waits for it at most so long."""
        ...


class DaskRoad:
    """Dask's scheduler in a process of its own, started again where it dies, and a client of it."""

    def __init__(self, address: Address, tls: Tls | None) -> None:
        self._address = address
        self._tls = tls
        self._scheduler: subprocess.Popen[str] | None = None
        self._client: Client | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._futures: dict[str, Future] = {}
        self._fetching: dict[str, float] = {}
        """When something was last said of an answer that is on its way."""
        self._devices: dict[str, int] = {}
        self._looked_s = float("-inf")
        self.n_schedulers = 0
        """How often the scheduler was started."""

    @property
    def address(self) -> Address:
        """With the port that it really has."""
        return self._address

    @property
    def scheduler_pid(self) -> int | None:
        return None if self._scheduler is None else self._scheduler.pid

    def open(self) -> None:
        """Raises `FleetError`."""
        settle_dask()
        self._reach(BEGINS_WITHIN_S)

    def _reach(self, within_s: float) -> None:
        """A scheduler that runs, and a client of it. within_s: while it cannot listen; one that is killed first, or
        is lost before it answers, is started again for longer. Raises `FleetError`."""
        begin_s = time.monotonic()
        while True:
            is_refused = True
            try:
                if self._scheduler is None or self._scheduler.poll() is not None:
                    self._start_scheduler()
                is_refused = False
                self._connect()
                return
            except FleetError as error:
                is_refused = is_refused and not isinstance(error, _KilledAtStartError)
                if time.monotonic() > begin_s + (within_s if is_refused else STARTS_WITHIN_S):
                    raise
                time.sleep(TRY_EVERY_S)

    def _start_scheduler(self) -> None:
        """Raises `FleetError`."""
        asked = SchedulerAsked(host=self._address.host, port=self._address.port, tls=self._tls)
        command = [*own_module("harness.fleet.dask_scheduler"), asked.model_dump_json()]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert started.stdout is not None
        said = started.stdout.readline().strip()
        if not said.startswith(READY):
            with suppress(subprocess.TimeoutExpired):
                started.wait(ENDS_WITHIN_S)
            started.kill()
            code = started.wait()
            if not said and code < 0:
                raise _KilledAtStartError(
                    f"{self._address}: the scheduler was ended by signal {-code} before it listened"
                )
            raise FleetError(
                f"cannot listen on {self._address} ({said or 'Dask did not start'}); name another address with --listen"
            )
        self._scheduler = started
        self._address = self._address._replace(port=int(said.removeprefix(READY)))
        self.n_schedulers += 1

    def _connect(self) -> None:
        """Raises `FleetError`."""
        from distributed.client import Client

        try:
            self._client = Client(
                str(self._address), security=security_of(self._tls), set_as_default=False, timeout=ANSWERS_WITHIN_S
            )
            self._client.subscribe_topic(TOPIC, self._heard)
        except (OSError, TimeoutError, ValueError, RuntimeError) as error:
            raise FleetError(f"{self._address}: the scheduler does not answer ({error})") from error

    def _heard(self, event: tuple[float, Mapping[str, object]]) -> None:
        said = event[1]
        self._events.put(Said(str(said.get("lease_id")), str(said.get("words"))))

    def devices(self) -> Mapping[str, int]:
        if time.monotonic() - self._looked_s >= LOOK_EVERY_S:
            self._look()
        return self._devices

    def _look(self) -> None:
        """At the scheduler, and at who is there."""
        assert self._client is not None
        assert self._scheduler is not None
        if self._scheduler.poll() is not None or self._client.status != "running":
            self._again()
        found: dict[str, int] = {}
        try:
            for worker in self._client.scheduler_info()["workers"].values():
                for device in filter(None, map(device_of, worker["resources"])):
                    found[device] = found.get(device, 0) + 1
        except (OSError, TimeoutError, AttributeError, RuntimeError):
            self._again()  # nobody is known to be there until the next look
        self._devices = found
        self._looked_s = time.monotonic()

    def _again(self) -> None:
        """A new client, of a new scheduler where the old one is dead. What was sent is lost. Raises `FleetError`."""
        assert self._client is not None
        assert self._scheduler is not None
        code = self._scheduler.poll()
        reason = "the connection to the scheduler broke" if code is None else f"the scheduler ended (code {code})"
        self._futures.clear()
        self._fetching.clear()
        self._close_client()
        self._reach(STARTS_WITHIN_S)
        self._events.put(Down(reason))

    def send(self, key: str, device: str, content: bytes) -> None:
        from harness.fleet.dask_worker import run_task

        assert self._client is not None
        try:
            future = self._client.submit(
                run_task, content, key, key=key, resources={SERIAL: 1, resource_of(device): 1}, pure=False, retries=0
            )
        except (OSError, RuntimeError, AttributeError) as error:  # the scheduler went this very moment
            self._events.put(Lost(key, str(error), False))
            return
        self._futures[key] = future
        future.add_done_callback(lambda done: self._done(key, done))

    def _done(self, key: str, future: Future) -> None:
        """Called by the one thread of Dask's that is there for this."""
        if future.status == "finished":
            self._fetching[key] = time.monotonic()
            Thread(target=self._fetch, args=(key, future), name=f"fetches {key}", daemon=True).start()
            return
        if future.status == "error":
            raised = future.exception(timeout=ANSWERS_WITHIN_S)
            name = type(raised).__name__
            if name == "KilledWorker":
                self._events.put(Lost(key, "its worker was lost", True))
            elif name == "NoValidWorkerError":
                self._events.put(Lost(key, "its worker left before it began", False))
            else:
                self._events.put(Lost(key, f"{name}: {raised}", True))
            return
        self._events.put(Lost(key, "the scheduler was lost", False))

    def _fetch(self, key: str, future: Future) -> None:
        try:
            self._events.put(Came(key, future.result(timeout=FETCHED_WITHIN_S)))
        except Exception as error:  # noqa: BLE001 - whatever Dask raises when the result's worker has just gone
            self._events.put(Lost(key, f"its answer was lost ({type(error).__name__})", True))

    def _on_their_way(self) -> Iterator[Said]:
        """A worker whose answer takes minutes says nothing itself, and is not lost."""
        now_s = time.monotonic()
        for key, said_s in list(self._fetching.items()):
            if now_s - said_s >= SAY_EVERY_S:
                self._fetching[key] = now_s
                yield Said(key, FETCHING)

    def forget(self, key: str) -> None:
        future = self._futures.pop(key, None)
        if future is not None:
            future.release()

    def events(self, timeout_s: float) -> Sequence[Event]:
        found: list[Event] = [*self._on_their_way()]
        with suppress(queue.Empty):
            found.append(self._events.get(timeout=timeout_s))
            while True:
                found.append(self._events.get_nowait())
        for event in found:
            if isinstance(event, Came | Lost):
                self._fetching.pop(event.key, None)
        return found

    def publish(self, text: str) -> None:
        """For `fleet status ADDRESS`; where nobody can be told now, the next one is."""
        if self._client is not None and self._client.status == "running":
            with suppress(OSError, TimeoutError, RuntimeError):
                self._client.set_metadata([STATE_KEY], text)

    def close(self, is_over: bool) -> None:
        """is_over: workers are told that they may leave; else they wait for the next coordinator."""
        if self._client is not None:
            if is_over:
                from harness.fleet.dask_worker import leave

                with suppress(OSError, TimeoutError, RuntimeError, AttributeError):
                    self._client.run(leave, on_error="ignore")  # who is not there any more need not be told
            self._close_client()
        if self._scheduler is not None:
            self._scheduler.kill()
            self._scheduler.wait()
            self._scheduler = None

    def _close_client(self) -> None:
        assert self._client is not None
        with suppress(OSError, TimeoutError, RuntimeError):
            self._client.close(timeout=1)  # it may have nobody to say goodbye to
        self._client = None


def published_state(address: Address, tls: Tls | None) -> str | None:
    """What the coordinator there published last. Raises `FleetError` where nobody answers."""
    settle_dask()
    from distributed.client import Client

    try:
        client = Client(str(address), security=security_of(tls), set_as_default=False, timeout=ANSWERS_WITHIN_S)
        try:
            found = client.get_metadata([STATE_KEY], default=None)
        finally:
            client.close(timeout=1)
    except (OSError, TimeoutError, ValueError, RuntimeError) as error:
        raise FleetError(
            f"no fleet answers at {address} ({(str(error).splitlines() or [type(error).__name__])[0][:120]}); give the"
            " address that `joulebench fleet start` prints, or the folder of the run, which is made when every device"
            " has joined"
        ) from error
    return found if isinstance(found, str) else None
