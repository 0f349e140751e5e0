"""The text that Apple's `powermetrics` prints: mean power of the chip's parts over each of its samples.

It needs root (`sudo powermetrics --samplers cpu_power,gpu_power,ane_power -i 100`). A sample begins with a line that
tells how long it was; what the chip or the version of macOS does not tell is absent (DRAM power went with macOS 13).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime

from devices.base import DeviceError

W_PER_MW = 1e-3
_SAMPLE = re.compile(
    r"^\*\*\* Sampled system activity \((?P<at>[^)]*)\) \((?P<ms>[0-9.]+)ms elapsed\) \*\*\*$", re.MULTILINE
)
_POWER = re.compile(r"^(?P<what>[A-Za-z0-9-]+) Power: (?P<mw>[0-9.]+) mW$", re.MULTILINE)
_COMBINED = re.compile(r"^Combined Power \(CPU \+ GPU \+ ANE\): (?P<mw>[0-9.]+) mW$", re.MULTILINE)
_DATE = "%a %b %d %H:%M:%S %Y %z"
_MODEL = re.compile(r"^Machine model: (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class PowerSample:
    """Mean watts by part (cpu, gpu, ane, dram, package, e-cluster, p-cluster, ...) over the time of the sample."""

    duration_s: float
    power_w: dict[str, float]
    ended_at_s: float | None = None
    """By the Mac's wall clock, in whole seconds since 1970; None where its date is not understood."""


@dataclass(frozen=True)
class PowerLog:
    machine: str | None
    samples: tuple[PowerSample, ...]


def parse_powermetrics(text: str) -> PowerLog:
    """A log of any number of samples. Raises `DeviceError` where there is none."""
    heads = list(_SAMPLE.finditer(text))
    if not heads:
        raise DeviceError(f"powermetrics: no sample in {len(text)} characters; was it called with root (sudo)?")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    model = _MODEL.search(text)
    return PowerLog(
        model[1] if model else None,
        tuple(
            PowerSample(float(head["ms"]) * 1e-3, _powers(text[head.end() : end]), _seconds_of(head["at"]))
            for head, end in zip(heads, ends, strict=True)
        ),
    )


def _seconds_of(date: str) -> float | None:
    try:
        return datetime.strptime(date, _DATE).timestamp()
    except ValueError:
        return None


def _powers(sample: str) -> dict[str, float]:
    powers = {found["what"].lower(): float(found["mw"]) * W_PER_MW for found in _POWER.finditer(sample)}
    # The GPU sampler repeats the line of the CPU sampler: one entry. M2 and later sum three parts, the M1 its package.
    if combined := _COMBINED.search(sample):
        powers["combined"] = float(combined["mw"]) * W_PER_MW
    return powers
