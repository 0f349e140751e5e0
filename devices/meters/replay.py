"""Plays a recorded power CSV back in place of a meter: for demonstrations, tests and re-analysis.

The file has a column `time_s` (increasing, from any start) and one column per component that ends in `_w`. Every window
replays it from its beginning; a window longer than the recording has no energy. Method "replayed": these joules are
not of this run.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError
from results.records import Method, PowerTrace


class ReplayMeter:
    """A recorded power CSV."""

    name = "replay"
    method: Method = "replayed"

    def __init__(self, path: Path, clock: Clock) -> None:
        self.channels: tuple[Channel, ...] = ()
        self._path = path
        self._clock = clock
        self._times_s: NDArray[np.float64] = np.array([])
        self._watts: NDArray[np.float64] = np.array([])
        self._start_s: float | None = None

    def open(self) -> None:
        import pandas as pd

        try:
            with warnings.catch_warnings():
                # Fields without a name would be dropped with a warning, or shift the columns.
                warnings.simplefilter("error", pd.errors.ParserWarning)
                table = pd.read_csv(self._path, index_col=False)
        except pd.errors.ParserWarning as error:
            raise MeterUnavailableError(
                f"replay: {self._path} has rows with more fields than its header; name them all"
            ) from error
        except (OSError, ValueError) as error:
            raise MeterUnavailableError(f"replay: {self._path} cannot be read ({error})") from error
        components = [str(c) for c in table.columns if str(c).endswith("_w")]
        if "time_s" not in table.columns or not components:
            raise MeterUnavailableError(
                f"replay: {self._path} has the columns {', '.join(map(str, table.columns))};"
                " it needs time_s and at least one that ends in _w"
            )
        try:
            numbers = table[["time_s", *components]].to_numpy(dtype=np.float64)
        except ValueError as error:
            raise MeterUnavailableError(f"replay: {self._path} holds something other than numbers ({error})") from error
        if len(numbers) < 2 or not np.isfinite(numbers).all() or not (np.diff(numbers[:, 0]) > 0).all():
            raise MeterUnavailableError(
                f"replay: {self._path} needs at least two rows of finite numbers with increasing time_s"
            )
        self._times_s = numbers[:, 0] - numbers[0, 0]
        self._watts = numbers[:, 1:]
        self.channels = tuple(
            Channel(component=c.removesuffix("_w"), kind="power", note=f"replayed from {self._path.name}")
            for c in components
        )

    def start(self) -> None:
        if self._start_s is not None:
            raise DeviceError("meter replay is already running; stop it before another window starts")
        self._start_s = self._clock.now_s()

    def mark(self) -> None:
        """A recording has no more readings than it has."""

    def stop(self) -> Sequence[PowerTrace]:
        if self._start_s is None:
            raise DeviceError("meter replay is not running; start it first")
        start_s, self._start_s = self._start_s, None
        # One reading past the end of the window, so that its edge can be interpolated.
        n = int(np.searchsorted(self._times_s, self._clock.now_s() - start_s, side="right")) + 1
        times_s = self._times_s[:n] + start_s
        interval_s = float(np.median(np.diff(self._times_s)))
        return [
            channel.trace(self.name, self.method, times_s, self._watts[:n, i], interval_s)
            for i, channel in enumerate(self.channels)
        ]

    def close(self) -> None:
        self._start_s = None
