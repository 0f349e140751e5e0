"""The coordinator: gives out trials under leases, and alone writes the store.

A trial is committed under the lease that has it at that moment; what comes under another one is thrown away. Trials
that came together are committed in one transaction.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence

from harness.fleet.members import Member, Members
from harness.fleet.messages import Answer, Description, MessageError, unpacked
from harness.fleet.queue import Lease, StaleLeaseError, TrialQueue
from harness.fleet.road import Came, Down, Event, Lost, Road, Said
from harness.fleet.state import DeviceState
from harness.fleet.work import Work
from results.printable import with_colon
from results.records import PowerTrace
from results.store import Store
from results.trials import Trial

WAIT_S = 0.5
AWAY_S = 600.0
"""A device that comes back later than this is in another sitting: as long as a trial waits for its phone within one,
where a plan says nothing (`gate_wait_s`)."""
Finished = tuple[Lease, Answer, dict[str, Sequence[PowerTrace]]]


class Coordinator:
    """One pass over the work, with whoever is there to do it."""

    def __init__(
        self,
        work: Work,
        members: Members,
        road: Road,
        say: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
        on_trial: Callable[[str, Trial], None] = lambda label, trial: None,
    ) -> None:
        """say: a line for people. now_s: the clock of leases. on_trial: told of each that is committed."""
        self._work = work
        self._members = members
        self._road = road
        self._say = say
        self._now_s = now_s
        self._on_trial = on_trial
        self._by_key: dict[str, Member] = {}
        """Descriptions that are asked for."""
        self._queue: TrialQueue | None = None
        self._store: Store | None = None
        self._known_samples: set[tuple[str, str]] = set()
        self._sittings: dict[str, int] = {}
        """By device, and `_last_sitting` of them all."""
        self._last_sitting = 0
        self._worked_s: dict[str, float] = {}
        """When each device's last trial ended, or was lost."""
        self._free: set[str] = set()
        """Devices that may have a trial, and have none."""
        self._since_s: dict[str, float] = {}
        self._told_wrong: set[str] = set()
        """Devices that are offered, and to nothing: twice, or by a name that the plan does not have."""
        self.n_done_of: dict[str, int] = {}
        self.n_trials = work.n_trials
        self.n_done = 0
        self.n_failed = 0
        self.n_late = 0
        """Answers under a lease that had ended."""

    # --- before the run ---

    def all_described(self) -> bool:
        return all(member.description is not None for member in self._members.all())

    def step_before(self) -> None:
        """Looks who is there, before the run is begun."""
        self._look()
        for event in self._road.events(WAIT_S):
            self._took(event, [])

    # --- the run ---

    def begin(self, store: Store, queue: TrialQueue) -> None:
        self._store, self._queue = store, queue
        self._known_samples = set(store.samples())
        self._last_sitting = store.next_sitting()
        self._sittings = {member.device: self._last_sitting for member in self._members.all()}
        self.n_done = len(queue.finished)
        self._free = {m.device for m in self._members.all() if m.description is not None}

    @property
    def is_done(self) -> bool:
        return self._queue is not None and self._queue.is_done

    def step(self, wait_s: float = WAIT_S) -> None:
        """Gives out what can be given out, and takes in what came. Raises `StoreError`, `FleetError`."""
        assert self._queue is not None
        self._look()
        self._give_out(self._queue)
        came: list[Finished] = []
        for event in self._road.events(0.0 if self._free & self._queue.working else wait_s):
            if isinstance(event, Lost | Down):  # it ends leases, and what came before was under them
                self._commit(came)
                came = []
            self._took(event, came)
        self._commit(came)
        for lease in self._queue.silent(self._now_s()):
            self._road.forget(lease.lease_id)
            self._lose(lease.lease_id, "nothing was heard of its worker", True)

    def _look(self) -> None:
        asked = self._members.look(self._road.devices(), self._now_s())
        self._tell_wrong_offers()
        for member in asked:
            member.key, member.state = f"describe-{member.device}-{uuid.uuid4().hex[:8]}", "describing"
            self._by_key[member.key] = member
            self._road.send(member.key, member.device, self._work.description_asked(member.device))

    def _tell_wrong_offers(self) -> None:
        """Each once, and again where it was mended meanwhile: a log has no table in which to see them."""
        named = ", ".join(member.device for member in self._members.all())
        lacking = f"the plan has no such device (it has {named}); end this worker"
        wrong = dict.fromkeys(self._members.strangers, lacking)
        wrong |= {m.device: str(m.words) for m in self._members.all() if m.state == "offered twice"}
        for device, words in wrong.items():
            if device not in self._told_wrong:
                self._say(f"{with_colon(device)} {words}")
        self._told_wrong = set(wrong)

    def _give_out(self, queue: TrialQueue) -> None:
        for device in sorted(self._free):
            self._free.discard(device)
            description = self._members[device].description
            lease = None if description is None else queue.take(device, self._now_s())
            if lease is None or description is None:
                continue
            self._members[device].words = None
            self._since_s[device] = now_s = self._now_s()
            if now_s - self._worked_s.get(device, now_s) > AWAY_S:
                self._begin_sitting(device)
            wants_samples = self._work.asks(lease.cell_id) not in self._known_samples
            self._road.send(lease.lease_id, device, self._work.task(lease, description.process_id, wants_samples))

    def _begin_sitting(self, device: str) -> None:
        """It was away, and may be cooler or emptier than the trials before found it."""
        assert self._store is not None
        self._last_sitting += 1
        self._store.note_sitting(self._last_sitting)
        self._sittings[device] = self._last_sitting

    def _took(self, event: Event, came: list[Finished]) -> None:
        match event:
            case Said(key, words):
                self._heard(key, words)
            case Down(reason):
                self._say(f"{reason}; all that was given out waits again")
                self._by_key.clear()
                for member in self._members.all():
                    self._members.forget(member.device, None)
                for lease in () if self._queue is None else self._queue.leases():
                    self._lose(lease.lease_id, reason, False)
            case Lost(key, reason, is_its_own) if key in self._by_key:
                self._members.refuse(self._by_key.pop(key).device, [reason], self._now_s())
            case Lost(key, reason, is_its_own):
                self._lose(key, reason, is_its_own, is_worker_gone=True)
            case Came(key, content) if key in self._by_key:
                self._road.forget(key)
                member = self._by_key.pop(key)
                if member.key == key:  # else it has left meanwhile
                    self._described(member, content)
            case Came(key, content):
                self._answered(key, content, came)

    def _heard(self, key: str, words: str) -> None:
        if self._queue is None:
            return
        self._queue.renew(key, self._now_s())
        try:
            self._members[self._queue.current(key).device].words = words
        except StaleLeaseError:
            return

    def _described(self, member: Member, content: object) -> None:
        before = member.words
        try:
            description, _ = unpacked(Description, content)
        except MessageError as error:
            self._members.refuse(member.device, [str(error)], self._now_s())
        else:
            self._members.described(member, description, self._now_s())
        if member.state == "refused" and member.words != before:
            self._say(f"{with_colon(member.device)} refused: {member.words}")
        elif member.description is not None:
            self._say(f"{with_colon(member.device)} ready on {member.description.host}")
            self._free.add(member.device)

    def _answered(self, key: str, content: object, came: list[Finished]) -> None:
        assert self._queue is not None
        self._road.forget(key)
        try:
            lease = self._queue.current(key)
        except StaleLeaseError:
            self.n_late += 1
            return
        if any(other.lease_id == key for other, _, _ in came):
            self.n_late += 1
            return
        try:
            answer, traces = unpacked(Answer, content)
        except MessageError as error:
            self._lose(key, f"its answer is damaged: {error}", True)
            return
        trial, described = answer.trial, self._members[lease.device].description
        if described is not None and answer.process_id != described.process_id:
            self._lose(key, "its worker was started again", False, is_worker_gone=True)
        elif trial is None:
            self._members.refuse(lease.device, answer.refused or ["it gave no trial and no reason"], self._now_s())
            self._say(f"{with_colon(lease.device)} refused: {self._members[lease.device].words}")
            self._lose(key, "its worker refused", False)
        elif (answer.lease_id, trial.cell_id, trial.repeat) != (key, lease.cell_id, lease.repeat):
            self._lose(key, "its answer is of another trial", True)
        elif answer.device_lost:
            why = trial.failure.error if trial.failure is not None else "the device was lost"
            self._members.refuse(lease.device, [why], self._now_s())
            self._lose(key, why, True)
        else:
            # A file is named after it: no name comes from outside.
            given = {"trial_id": uuid.uuid4().hex, "heat": answer.heat, "sitting": self._sittings[lease.device]}
            own = trial.model_copy(update=given)
            came.append((lease, answer.model_copy(update={"trial": own}), dict(traces)))

    def _commit(self, came: Sequence[Finished]) -> None:
        """Raises `StoreError`: nothing of it is committed then."""
        assert self._store is not None
        assert self._queue is not None
        if not came:
            return
        for _, answer, _ in came:
            for asked in answer.samples:
                if (asked.workload, asked.model) not in self._known_samples:
                    self._store.add_samples(asked.workload, asked.model, asked.samples)
                    self._known_samples.add((asked.workload, asked.model))
        self._store.add_trials([(answer.trial, traces) for _, answer, traces in came if answer.trial is not None])
        for lease, answer, _ in came:
            if answer.trial is not None:
                self._finished(lease, answer.trial)

    def _finished(self, lease: Lease, trial: Trial) -> None:
        assert self._queue is not None
        self.n_trials -= self._work.seen(trial)
        self._queue.finish(lease.lease_id)
        self._members[lease.device].words = None
        self._free.add(lease.device)
        self._worked_s[lease.device] = self._now_s()
        self.n_done += 1
        self.n_failed += trial.has_failed
        self.n_done_of[lease.device] = self.n_done_of.get(lease.device, 0) + 1
        self._on_trial(self._work.label(lease.cell_id), trial)

    def _lose(self, lease_id: str, reason: str, is_its_own: bool, is_worker_gone: bool = False) -> None:
        assert self._queue is not None
        assert self._store is not None
        try:
            lease = self._queue.current(lease_id)
        except StaleLeaseError:
            return
        self._members[lease.device].n_lost += 1
        if is_worker_gone:
            self._members.forget(lease.device, None)  # whoever offers the device next is described first
        if self._queue.lose(lease_id, reason, is_its_own):
            self._say(f"{self._work.label(lease.cell_id)} · trial {lease.repeat + 1} · waits again: {reason}")
            self._free.add(lease.device)
            self._worked_s[lease.device] = self._now_s()
            return
        given = {"sitting": self._sittings[lease.device]}
        trial = self._work.failed(lease, self._queue.losses(lease)).model_copy(update=given)
        self._store.add_trial(trial, {})
        self._finished(lease, trial)

    # --- told ---

    def device_states(self) -> tuple[DeviceState, ...]:
        strangers = (DeviceState(device=device, state="not in the plan") for device in self._members.strangers)
        return (*map(self._state_of, self._members.all()), *strangers)

    def _state_of(self, member: Member) -> DeviceState:
        lease = None if self._queue is None else self._queue.lease_of(member.device)
        is_finished = self._queue is not None and member.device not in self._queue.working
        state = "working" if lease is not None else "finished" if is_finished else member.state
        return DeviceState(
            device=member.device,
            state=state,
            host=None if member.description is None else member.description.host,
            cell=None if lease is None else self._work.label(lease.cell_id),
            repeat=None if lease is None else lease.repeat,
            attempt=None if lease is None else lease.attempt,
            since_s=None if lease is None else self._now_s() - self._since_s[member.device],
            words=member.words,
            n_done=self.n_done_of.get(member.device, 0),
            n_lost=member.n_lost,
        )
