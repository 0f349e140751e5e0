"""State of a device, and what computes on it: machine, software, build, and the road that a trial took."""

from __future__ import annotations

from typing import Literal

from pydantic import field_validator

from results.printable import printable
from results.records import Record


class Conditions(Record):
    """State of the device at an instant. What cannot be read is None."""

    at_s: float
    load_average_1m: float | None = None
    cpu_frequency_mhz: float | None = None
    temperature_c: float | None = None
    battery_percent: float | None = None
    charging: bool | None = None
    """The power source: whether a charger is on line, though the battery may give a part of the load."""
    boot_id: str | None = None
    """Another one: the device was restarted, or it is another device."""
    suspended_s: float | None = None
    """How long it has slept since it was started: more than before means that it slept meanwhile."""
    throttled: bool | None = None
    thermal_status: int | None = None
    """Android's: 0 none, 1 light, 2 moderate, 3 severe, 4 critical, 5 emergency, 6 shutdown."""
    frequency_caps: tuple[str, ...] | None = None
    """Limits in force below the highest clock of CPU cores, in words; empty: there are none."""
    cores_online: str | None = None
    """Of a phone, the cores that are not switched off: "0-3,6"."""
    cpu_policy: tuple[str, ...] | None = None
    """By what rules a host sets the clocks of its cores, in words: governor, limits, turbo."""
    gpu_limits: tuple[str, ...] | None = None
    """What power their owner lets the GPUs draw that a meter reads, in words."""
    gpu_others: tuple[str, ...] | None = None
    """Programs besides ours that have one of these GPUs open to compute, in words."""
    screen_on: bool | None = None
    screen_brightness: int | None = None
    """0 to 255."""
    airplane_mode: bool | None = None


TORCH_ALONE = "1.4 to 21 times slower with fp32 weights, 1.9 to 67 times with narrower ones"
"""What a machine without kernels loses, by docs/measurements/first-start.md; a test holds one against the other."""


class Build(Record):
    """What an engine on this machine computes with: compiled kernels, or torch alone and why."""

    road: Literal["kernels", "torch"]
    reason: str | None = None
    """Why there are no kernels."""
    compiler: str | None = None
    """As it calls itself: "g++ (Debian 12.2.0-14) 12.2.0"."""
    flags: str | None = None
    instruction_set: str | None = None
    """What the kernels were compiled for, as they say themselves: "AVX-512", "AVX-512 without VNNI", "AVX2", ..."""
    sha256: str | None = None
    """Of the library."""
    torch_instruction_set: str | None = None
    """What torch's own products use on the CPU, in its words: "AVX512", "AVX2", ..."""


class Environment(Record):
    """The machine and the software of a run."""

    os: str
    machine: str
    cpu_model: str
    n_cores: int | None
    n_threads: int | None
    memory_bytes: int | None
    """These three are None where a device does not tell: an iPhone without Developer Mode."""
    python: str
    joulebench: str
    packages: dict[str, str]
    unit: str | None = None
    """Which of several alike: the first digits of the SHA-256 of a phone's serial number. None: it is not known."""

    gpus: tuple[str, ...] | None = None
    """Names in the order of their numbers, of a host whose engine computes on a GPU, or whose meter sees one. None: it
    uses none, they are not told, or the run is from before they were kept."""
    gpu_driver: str | None = None
    """Its version; None as with `gpus`."""

    @field_validator("os", "machine", "cpu_model")
    @classmethod
    def _printable(cls, told: str) -> str:
        """A device tells these itself."""
        return printable(told)

    build: Build | None = None
    """None where no engine of ours runs on the CPU (a phone, a GPU), and in runs from before it was kept."""

    def is_another_unit(self, other: Environment) -> bool:
        """Whether the two are known to be two of one kind."""
        return self.unit is not None and other.unit is not None and self.unit != other.unit

    def other_gpus(self, other: Environment) -> tuple[str, str] | None:
        """The GPUs of both in words, where they are known to be others."""
        if self.gpus is None or other.gpus is None or self.gpus == other.gpus:
            return None
        return ", ".join(self.gpus), ", ".join(other.gpus)

    def other_gpu_driver(self, other: Environment) -> tuple[str, str] | None:
        """Both versions, where they are known to differ."""
        if self.gpu_driver is None or other.gpu_driver is None or self.gpu_driver == other.gpu_driver:
            return None
        return self.gpu_driver, other.gpu_driver


class PhaseThreads(Record):
    """What a phase was computed with on this host's CPU, where a plan chooses it for each phase."""

    n_threads: int
    cores: str | None = None
    """Asked for, as "0-3,6". None: wherever the process may be."""
    found: tuple[str, ...] = ()
    """The cores on which the threads that computed might be, read back at the end of the phase; each set once. Empty
    where no cores were asked for in any phase."""

    @property
    def is_kept(self) -> bool:
        return self.cores is None or set(self.found) == {self.cores}


class Road(Record):
    """What computed the tokens of a window. Two arms with unlike roads differ in more than their techniques."""

    arithmetic: Literal["kernels", "torch"] | str
    """Ours by name; of another engine its name."""
    prefill: Literal["grouped", "expert by expert", "both"] | None = None
    """How steps that prefill computed the experts of a layer: all in one call, or one after the other in Python. None:
    no experts, or not kept, as in stores of before."""
    decoding: Literal["fused", "layer by layer", "plan by plan", "both"] | None = None
    """How steps that decode were computed: in one call of the kernels; with Python between layers; or with a plan made
    between router and experts, which stores of before call layer by layer too. None: no step."""
    device: Literal["cpu", "cuda", "mps"] = "cpu"
    dtype: str | None = "float32"
    """Of the arithmetic; weights may be narrower. None: of another engine, which does not tell it."""
    rounds_inputs: bool = False
    """Whether products took rounded inputs (`quantise.arithmetic`)."""
    rounded_to: Literal["int8", "bf16"] = "int8"
    """What to, where they did."""
    attention_rounded_to: Literal["bf16", "int8", "fp32"] | None = None
    """What queries, keys, values and shares of more than one token were rounded to; int8: queries and keys, and the
    others to whole numbers of more bits (to bf16 in stores of before 30 November 2026); fp32: nothing, beside products
    in bf16. None: nothing; or, in stores of before, bf16 where products were and the matrices of attention are bf16."""
    cache_rounded_to: Literal["bf16", "fp16"] | None = None
    """What keys and values were rounded to as they were kept. None: nothing."""
    n_threads: int
    """Of each process, the most in a phase."""
    threads_are_asked: bool = False
    """Whether these numbers are only what was asked: of another engine, which does not tell how many computed."""
    answers_are_seen: bool = True
    """Whether anybody sees what it answers: of another engine, whose interface may show times alone."""
    prefill_threads: PhaseThreads | None = None
    decoding_threads: PhaseThreads | None = None
    """Of phases on cores or thread counts of their own. None: the plan chooses neither, or the phase did not occur."""
    n_processes: int = 1
    links: Literal["gloo", "gloo and shared memory", "nccl"] | None = None
    """Over which several processes send each other what they compute."""
    instruction_set: str | None = None
    """Of what multiplies: the kernels', else torch's. None on a GPU."""
    build: str | None = None
    """The first `BUILD_DIGITS` of the library's SHA-256. None: torch alone."""


BUILD_DIGITS = 12
