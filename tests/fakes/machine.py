"""A machine on which time passes only when somebody works or waits, with its meter, engine, workload and run_parts.

Its power is piecewise constant, so every joule has a closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from devices.base import Channel, DeviceError
from engines.base import PhaseListener
from harness.matrix import CellPlan
from harness.run_parts import RunParts
from harness.samples import samples_of
from harness.schema import TrialProtocol
from harness.session import PreparedCell
from results.counters import EngineCounters
from results.cpu_time import CpuSeconds
from results.environments import Conditions, Environment
from results.records import Completion, Method, PowerTrace, Request, Sample, Score

IDLE_W, PREFILL_W, DECODE_W = 4.0, 20.0, 10.0
PREFILL_S, TOKEN_S = 0.5, 0.125
"""Binary fractions: sums of them are exact."""


class FakeMachine:
    """A clock (`devices.base.Clock`) that also counts joules."""

    def __init__(self) -> None:
        self.time_s = 100.0
        self.energy_j = 0.0

    def now_s(self) -> float:
        return self.time_s

    def sleep_until_s(self, at_s: float) -> None:
        self.work(max(0.0, at_s - self.time_s), IDLE_W)

    def work(self, seconds: float, watts: float) -> None:
        self.time_s += seconds
        self.energy_j += seconds * watts


class FakeMeter:
    """Reads the machine's counter at start, marks and stop."""

    def __init__(self, machine: FakeMachine, name: str = "fake", method: Method = "counter") -> None:
        self.name = name
        self.method: Method = method
        self.channels: tuple[Channel, ...] = (Channel(component="machine", kind="counter"),)
        self.running = False
        self.start_error: Exception | None = None
        self.stop_error: Exception | None = None
        self._machine = machine
        self._readings: dict[float, float] = {}

    def open(self) -> None:
        """Nothing to acquire."""

    def start(self) -> None:
        if self.running:
            raise DeviceError(f"meter {self.name} is already running")
        self._readings = {}
        self.running = True
        if self.start_error is not None:
            raise self.start_error  # half started, as a meter is whose first reading fails
        self.mark()

    def mark(self) -> None:
        self._readings[self._machine.time_s] = self._machine.energy_j

    def stop(self) -> Sequence[PowerTrace]:
        if not self.running:
            raise DeviceError(f"meter {self.name} is not running")
        self.mark()
        self.running = False
        if self.stop_error is not None:
            raise self.stop_error
        return [
            PowerTrace(
                meter=self.name,
                component="machine",
                kind="counter",
                method=self.method,
                times_s=np.array(list(self._readings)),
                values=np.array(list(self._readings.values())),
                sample_interval_s=0.0,
            )
        ]

    def close(self) -> None:
        self.running = False


class FakeDevice:
    def __init__(self, machine: FakeMachine, meters: Sequence[FakeMeter], name: str = "host") -> None:
        self.name = name
        self.meters = meters
        self.charging: bool | None = None
        self.throttled: bool | None = None
        self.foreign_cores = 0.0
        """Cores that others keep busy, of two; we keep one busy."""
        self._machine = machine

    def open(self) -> None:
        """Always ready."""

    def environment(self) -> Environment:
        return Environment(
            os="none",
            machine="fake",
            cpu_model="fake",
            n_cores=2,
            n_threads=2,
            memory_bytes=1,
            python="3",
            joulebench="0",
            packages={},
        )

    def conditions(self) -> Conditions:
        return Conditions(at_s=self._machine.time_s, charging=self.charging, throttled=self.throttled)

    def cpu_seconds(self) -> CpuSeconds | None:
        t = self._machine.time_s
        return CpuSeconds(busy_s=(1 + self.foreign_cores) * t, ours_s=t, available_s=2 * t)

    def close(self) -> None:
        """Nothing was acquired."""


class SpokenIds:
    """A tokenizer whose words are the ids."""

    eos_token_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class FakeEngine:
    """Prefill at one power, decode at another. `errors`: raised by the next calls, in order (None: no error)."""

    tokenizer: Any = SpokenIds()
    max_length = 512
    time_method: Literal["measured", "modelled"] = "measured"
    needs_calibration = False

    def __init__(self, machine: FakeMachine, device: FakeDevice, name: str = "host") -> None:
        self.device = name
        self.errors: list[BaseException | None] = []
        self.drift_s = 0.0
        """Added to the prefill of every further call."""
        self.n_first = 1
        """Tokens that come with the first one, itself included: as in the first chunk of a server."""
        self.answered: list[tuple[str, bool]] = []
        """(request id, whether a meter ran)."""
        self.resets: list[int] = []
        """How many requests were answered before each."""
        self._machine = machine
        self._device = device
        self._calls = 0

    def calibrate(self, prompts: Sequence[Sequence[int]]) -> None:
        """Learns nothing."""

    def run(self, request: Request, on_phase: PhaseListener) -> Completion:
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            self._machine.work(0.25, PREFILL_W)
            raise error
        self.answered.append((request.request_id, any(m.running for m in self._device.meters)))
        self._calls += 1
        machine = self._machine
        start_s = machine.now_s()
        on_phase("request start", start_s)
        machine.work(PREFILL_S + self.drift_s * len(self.answered), PREFILL_W)
        prefill_end_s = machine.now_s()
        on_phase("prefill end", prefill_end_s)
        times_s = [prefill_end_s] * min(self.n_first, request.max_new_tokens)
        for _ in range(request.max_new_tokens - len(times_s)):
            machine.work(TOKEN_S, DECODE_W)
            times_s.append(machine.now_s())
        on_phase("request end", machine.now_s())
        return Completion(
            request_id=request.request_id,
            sample_id=request.sample_id,
            n_prompt_tokens=len(request.prompt_ids),
            start_s=start_s,
            prefill_end_s=prefill_end_s,
            end_s=machine.now_s(),
            token_ids=tuple(range(len(times_s))),
            token_times_s=tuple(times_s),
            text=request.sample_id,
        )

    def reset(self) -> None:
        self.resets.append(len(self.answered))

    def take_counters(self) -> EngineCounters:
        calls, self._calls = self._calls, 0
        return EngineCounters(routed_pairs=10 * calls)


class FakeWorkload:
    """Scores 1 for each completion that carries its own sample's id."""

    name = "fake"
    data_source = "sample"
    notes: tuple[str, ...] = ("two items",)

    def __init__(self, scored: bool = True) -> None:
        self.scored = scored
        self.score_error: Exception | None = None

    def requests(self, tokenizer: object, max_length: int) -> Sequence[Request]:
        return fake_requests()

    def calibration_prompts(self, tokenizer: object, max_length: int, n: int) -> Sequence[Sequence[int]]:
        return []

    def score(self, requests: Sequence[Request], completions: Sequence[Completion]) -> Sequence[Score]:
        if self.score_error is not None:
            raise self.score_error
        pairs = zip(requests, completions, strict=True)
        return [Score(metric="acc", value=float(r.sample_id == c.text), sample_id=r.sample_id) for r, c in pairs]


def fake_requests() -> tuple[Request, ...]:
    """Two prompts: of 3 tokens with 5 to generate, of 2 tokens with 3 to generate."""
    return (
        Request(request_id="a#0", sample_id="a", kind="generate", prompt_ids=(1, 2, 3), max_new_tokens=5),
        Request(request_id="b#0", sample_id="b", kind="generate", prompt_ids=(1, 2), max_new_tokens=3),
    )


class FakeBench(RunParts):
    """A run_parts whose every arm is the fake one; what fails is told by cell label."""

    def __init__(self, protocol: TrialProtocol | None = None, meters: int = 1, scored: bool = True) -> None:
        super().__init__(protocol or TrialProtocol())
        self.machine = FakeMachine()
        self.fake_device = FakeDevice(self.machine, [FakeMeter(self.machine, f"fake{i}") for i in range(meters)])
        self.engine = FakeEngine(self.machine, self.fake_device)
        self.fake_workload = FakeWorkload(scored)
        self.order: list[str] = []
        """Engine names of the cells asked for, in order."""

    @property
    def meter(self) -> FakeMeter:
        return self.fake_device.meters[0]

    def arm(self, plan: CellPlan) -> PreparedCell:
        self.order.append(plan.cell.engine)
        return self.arm_of(plan.cell.cell_id)

    def requests(self, plan: CellPlan) -> Sequence[Request]:
        return fake_requests()

    def samples(self, plan: CellPlan) -> tuple[Sample, ...]:
        return samples_of(self.fake_workload, self.requests(plan), self.engine.tokenizer)

    def arm_of(self, cell_id: str) -> PreparedCell:
        return PreparedCell(cell_id, self.engine, self.fake_workload, self.fake_device, self.machine, fake_requests())

    def device(self, plan: CellPlan) -> FakeDevice:
        return self.fake_device
