"""Which trial of a fleet is next, and who has it until when.

A trial is waiting, leased or finished. A device has one lease at a time. A lease ends when its trial is committed, when
its worker is lost, or when nothing was heard of it for `lease_s`; then the trial waits again, with the next attempt.
What comes back under a lease that ended is refused: another attempt may be running on the same device.

Nothing here is stored. After the coordinator's death the queue is built again from the finished trials of the store,
and all leases of before are void, because each queue numbers its leases under a name of its own.
"""

from __future__ import annotations

import heapq
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

LEASE_S = 60.0
"""Without a word from its worker. Workers say something every few seconds."""
MOST_LOSSES = 3
"""Workers or devices that a trial may lose before it counts as failed: it may be what kills them."""

Item = tuple[str, int]
"""(cell_id, repeat)."""


class StaleLeaseError(Exception):
    """The lease has ended: nothing that comes under it is kept."""


class Lease(NamedTuple):
    lease_id: str
    device: str
    cell_id: str
    repeat: int
    attempt: int
    """From 1: one more than the workers that were lost with this trial."""


class Finished:
    """Which (cell, repeat) are finished, in a number for each cell: a million of them take little memory."""

    def __init__(self, items: Iterable[Item] = ()) -> None:
        self._bits: dict[str, int] = {}
        self._n = 0
        for cell_id, repeat in items:
            self.add(cell_id, repeat)

    def add(self, cell_id: str, repeat: int) -> None:
        bits = self._bits.get(cell_id, 0)
        if not bits >> repeat & 1:
            self._bits[cell_id] = bits | 1 << repeat
            self._n += 1

    def __contains__(self, item: object) -> bool:
        assert isinstance(item, tuple)
        cell_id, repeat = item
        return bool(self._bits.get(cell_id, 0) >> repeat & 1)

    def __len__(self) -> int:
        return self._n


@dataclass
class _DeviceQueue:
    order: Iterator[Item]
    again: deque[Item] = field(default_factory=deque)
    """Trials whose worker was lost; they come first. At its end, the one that was looked at last."""
    lease: Lease | None = None


class TrialQueue:
    """All trials of a run. Times are seconds on whatever clock the caller has."""

    def __init__(
        self,
        orders: Mapping[str, Iterable[Item]],
        finished: Finished,
        enough: Callable[[str], bool] = lambda _: False,
        lease_s: float = LEASE_S,
        most_losses: int = MOST_LOSSES,
    ) -> None:
        """orders: by device, all that the plan may ask of it, in its order. enough: whether a cell needs no more."""
        self.finished = finished
        self._devices = {device: _DeviceQueue(iter(order)) for device, order in orders.items()}
        self._enough = enough
        self._lease_s = lease_s
        self._most_losses = most_losses
        self._losses: dict[Item, list[str]] = {}
        """Why workers or devices were lost, by trial; forgotten once it is finished."""
        self._leases: dict[str, Lease] = {}
        self._until_s: dict[str, float] = {}
        self._by_end: list[tuple[float, str]] = []
        """A heap; an entry may be of a lease that was renewed or has ended."""
        self._name = uuid.uuid4().hex[:8]
        self._n_leases = 0
        self._working = set(self._devices)
        """Devices that have something to do or are doing it."""
        for device in self._devices:
            self._settle(device)

    @property
    def is_done(self) -> bool:
        return not self._working

    @property
    def working(self) -> frozenset[str]:
        """Devices with trials that are not finished."""
        return frozenset(self._working)

    def lease_of(self, device: str) -> Lease | None:
        return self._devices[device].lease

    def take(self, device: str, now_s: float) -> Lease | None:
        """The device's next trial; None where it has one, or needs no more."""
        own = self._devices[device]
        if own.lease is not None:
            return None
        if not self._settle(device):
            return None
        item = own.again.popleft()
        self._n_leases += 1
        attempt = 1 + len(self._losses.get(item, ()))
        lease = Lease(f"{self._name}-{self._n_leases}", device, *item, attempt)
        own.lease = self._leases[lease.lease_id] = lease
        self._keep_until(lease.lease_id, now_s)
        return lease

    def _settle(self, device: str) -> bool:
        """Whether the device's next trial is known, at the head of `again`; else it has nothing more to do."""
        own = self._devices[device]
        while True:
            if not own.again:
                item = next(own.order, None)
                if item is None:
                    if own.lease is None:
                        self._working.discard(device)
                    return False
                own.again.append(item)
            if own.again[0] not in self.finished and not self._enough(own.again[0][0]):
                return True
            own.again.popleft()

    def renew(self, lease_id: str, now_s: float) -> None:
        """Its worker was heard. Of a lease that has ended nothing happens."""
        if lease_id in self._leases:
            self._until_s[lease_id] = now_s + self._lease_s

    def _keep_until(self, lease_id: str, now_s: float) -> None:
        self._until_s[lease_id] = now_s + self._lease_s
        heapq.heappush(self._by_end, (now_s + self._lease_s, lease_id))

    def current(self, lease_id: str) -> Lease:
        """Raises `StaleLeaseError`."""
        try:
            return self._leases[lease_id]
        except KeyError:
            raise StaleLeaseError(f"lease {lease_id} has ended") from None

    def finish(self, lease_id: str) -> None:
        """Its trial is committed. Raises `StaleLeaseError`."""
        lease = self._end(lease_id)
        self.finished.add(lease.cell_id, lease.repeat)
        self._losses.pop((lease.cell_id, lease.repeat), None)
        self._settle(lease.device)

    def lose(self, lease_id: str, reason: str, is_its_own: bool = True) -> bool:
        """The worker is gone. False where the trial has lost too many: the lease stays, and is to be finished with a
        failed trial. is_its_own: False of a loss that cannot come from the trial. Raises `StaleLeaseError`."""
        lease = self.current(lease_id)
        item = (lease.cell_id, lease.repeat)
        if is_its_own:
            self._losses.setdefault(item, []).append(reason)
            if len(self._losses[item]) >= self._most_losses:
                return False
        self._end(lease_id)
        self._devices[lease.device].again.appendleft(item)
        return True

    def losses(self, lease: Lease) -> tuple[str, ...]:
        """Why workers or devices were lost with a trial."""
        return tuple(self._losses.get((lease.cell_id, lease.repeat), ()))

    def silent(self, now_s: float) -> list[Lease]:
        """Leases of which nothing was heard for too long. Each is told once: the caller loses it."""
        found = []
        while self._by_end and self._by_end[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._by_end)
            until_s = self._until_s.get(lease_id)
            if until_s is None:
                continue
            if until_s > now_s:
                heapq.heappush(self._by_end, (until_s, lease_id))
            else:
                found.append(self._leases[lease_id])
        return found

    def leases(self) -> tuple[Lease, ...]:
        """Those that have not ended."""
        return tuple(self._leases.values())

    def _end(self, lease_id: str) -> Lease:
        lease = self.current(lease_id)
        del self._leases[lease_id], self._until_s[lease_id]
        self._devices[lease.device].lease = None
        return lease
