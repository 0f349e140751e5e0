"""Plays recorded power back in place of a meter: for demonstrations, tests and re-analysis.

A CSV has a column `time_s` (increasing, from any start) and one column per component that ends in `_w`: watts at an
instant, or means as it tells (`devices.meters.power_csv`). A text of Apple's powermetrics has the mean watts of each of
its samples. Every window replays the recording from its beginning; a window longer than it has no energy. Method
"replayed": these joules are not of this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from devices.meters.playback import Playback
from devices.meters.power_csv import is_power, read_power_csv
from devices.powermetrics import W_PER_MW, PowerSample, parse_powermetrics
from results.records import PowerTrace

LONGEST_BREAK_S = 2.0
"""Between two samples, by their dates, which are whole seconds."""
POWERMETRICS_ADDITIVE = ("cpu", "gpu", "ane", "dram")
"""Clusters lie in the CPU; `package` and `combined` hold several of these."""


class _Recording(NamedTuple):
    channels: tuple[Channel, ...]
    times_s: NDArray[np.float64]
    watts: NDArray[np.float64]
    """[readings, channels]"""


class ReplayMeter(Playback):
    """A recorded power CSV, or a powermetrics text (`.txt`)."""

    def __init__(self, path: Path, clock: Clock) -> None:
        super().__init__(path, clock)
        self._times_s: NDArray[np.float64] = np.array([])
        self._watts: NDArray[np.float64] = np.array([])

    def open(self) -> None:
        recording = _read_powermetrics(self._path) if self._path.suffix == ".txt" else _read_csv(self._path)
        self.channels, times_s, self._watts = recording
        self._times_s = times_s - times_s[0]

    def played(self, start_s: float, now_s: float) -> Sequence[PowerTrace]:
        later_s = max(channel.told_within_s for channel in self.channels)
        n = int(np.searchsorted(self._times_s, now_s - start_s + later_s, side="right")) + 1
        times_s = self._times_s[:n] + start_s
        interval_s = float(np.median(np.diff(self._times_s)))
        return [
            channel.trace(self.name, self.method, times_s, self._watts[:n, i], interval_s)
            for i, channel in enumerate(self.channels)
        ]


def _read_csv(path: Path) -> _Recording:
    table = read_power_csv(path)
    shown = tuple(c for c, is_summed in zip(table.components, table.additive, strict=True) if not is_summed)
    of_rows = np.array([words.of_rows for words in table.words])
    # Means that stand from the row before to their own.
    watts = np.where(of_rows, np.concatenate([table.watts[1:], table.watts[-1:]]), table.watts)
    parts = f"; a part of another column, not added: {', '.join(shown)}" if shown else ""
    channels = tuple(
        Channel(
            component=c,
            kind="held" if words.of_rows else "power",
            update_period_s=words.update_period_s,
            averaged_s=words.averaged_s,
            additive=is_summed,
            note=f"replayed from {path.name}" + (f": {words}" if str(words) else "") + parts,
        )
        for c, is_summed, words in zip(table.components, table.additive, table.words, strict=True)
    )
    return _Recording(channels, table.times_s, watts)


def _read_powermetrics(path: Path) -> _Recording:
    """Means that stand from the start of their sample to its end."""
    try:
        log = parse_powermetrics(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, DeviceError) as error:
        raise MeterUnavailableError(f"replay: {path}: {error}") from error
    samples = _whole_samples(path, log.samples)
    components = list(samples[0].power_w)
    if not components:
        raise MeterUnavailableError(f"replay: {path} tells no power; call powermetrics with --samplers cpu_power")
    durations_s = [sample.duration_s for sample in samples]
    watts = [[sample.power_w[c] for c in components] for sample in samples]
    note = f"replayed from {path.name}, {log.machine or 'a Mac'}: means of about {np.median(durations_s):.3g} s"
    channels = tuple(
        Channel(component=c, kind="held", resolution=W_PER_MW, additive=c in POWERMETRICS_ADDITIVE, note=note)
        for c in components
    )
    times_s, read = np.concatenate([[0.0], np.cumsum(durations_s)]), np.array([*watts, watts[-1]])
    if not is_power(times_s, read):
        raise MeterUnavailableError(
            f"replay: {path}: a sample is 0 ms long, or tells {read.max():.3g} W; is it as powermetrics wrote it?"
        )
    return _Recording(channels, times_s, read)


def _whole_samples(path: Path, samples: Sequence[PowerSample]) -> Sequence[PowerSample]:
    """Without the last one where the log was cut off in it. Raises `MeterUnavailableError` where another lacks a part:
    what is not told is not 0 W, and the total would lack it all the time."""
    told = samples[0].power_w.keys()
    if len(samples) > 1 and samples[-1].power_w.keys() < told:
        samples = samples[:-1]
    for number, sample in enumerate(samples, 1):
        if unlike := sorted(sample.power_w.keys() ^ told):
            raise MeterUnavailableError(
                f"replay: {path}: samples 1 and {number} do not tell the same parts ({', '.join(unlike)}); a total of"
                " the others would lack power; delete the samples that lack some"
            )
    _refuse_break(path, samples)
    return samples


def _refuse_break(path: Path, samples: Sequence[PowerSample]) -> None:
    """Samples are joined end to end. Raises `MeterUnavailableError` where their dates say that nobody sampled between
    two of them: the Mac slept, or the log is of two calls."""
    for number, (before, sample) in enumerate(pairwise(samples), 2):
        if before.ended_at_s is None or sample.ended_at_s is None:
            continue
        break_s = sample.ended_at_s - before.ended_at_s - sample.duration_s
        if break_s > LONGEST_BREAK_S:
            raise MeterUnavailableError(
                f"replay: {path}: by their dates {break_s:.0f} s lie between samples {number - 1} and {number}, and"
                " nothing says what flowed then (did the Mac sleep, or are these two logs?); play one part"
            )
        if break_s < -LONGEST_BREAK_S:
            raise MeterUnavailableError(
                f"replay: {path}: by their dates sample {number} began {-break_s:.0f} s before sample {number - 1} had"
                " ended (was the clock set back, or are these two logs?); play one part"
            )
