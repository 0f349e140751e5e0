"""A device of the harness that is a hardware sheet: its clock is virtual, its one meter reads the timeline.

Everything it reports is of method `modelled`. Accuracy, routing and drops are real: the host computes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from devices.base import Channel, DeviceError, Meter
from devices.models.operations import operations_trace
from devices.models.priced_by import priced_by
from devices.models.sheet import Sheet, SheetRef, load_sheet
from devices.models.sheet import available_sheets as available_sheets
from devices.models.timeline import Timeline
from results.cpu_time import CpuSeconds
from results.derivation import PricedBy
from results.environments import Conditions, Environment
from results.records import COMM, Method, PowerTrace


class TimelineMeter:
    """Joules so far of each component, at every operation boundary. No reading is ever between two of them.

    Of a component whose watts the sheet does not state, both ends are NaN, and its note says why.
    """

    name = "timeline"
    method: Method = "modelled"

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._start_s: float | None = None
        self._first = 0
        self._raw: Sequence[PowerTrace] = ()
        self.channels = tuple(_channel(timeline.sheet, component) for component in timeline.sheet.components)

    def open(self) -> None:
        """The timeline is in this process: there is nothing to acquire."""

    def start(self) -> None:
        self._timeline.settle()
        self._start_s, self._first = self._timeline.now_s(), self._timeline.n_run

    def mark(self) -> None:
        """Every phase edge is an operation boundary, which has its reading already."""

    def stop(self) -> Sequence[PowerTrace]:
        if self._start_s is None:
            raise DeviceError("meter timeline: stop without start; call start at the window's beginning")
        start_s, self._start_s = self._start_s, None
        self._raw = operations_trace(
            self.name,
            self._timeline.sheet,
            *self._timeline.operations(self._first),
            self._timeline.program(self._first),
            self._timeline.launched(self._first),
        )
        return tuple(
            self._trace(channel, component, start_s)
            for channel, component in zip(self.channels, self._timeline.sheet.components, strict=True)
        )

    def raw_traces(self) -> Sequence[PowerTrace]:
        """The operations of the last window, which another sheet may price; empty where none ran."""
        return self._raw

    def close(self) -> None:
        """Nothing was acquired."""

    def _trace(self, channel: Channel, component: str, start_s: float) -> PowerTrace:
        times_s, values_j = self._timeline.readings(component, start_s)
        if not self._timeline.sheet.has_watts(component):
            times_s, values_j = times_s[[0, -1]], np.full(2, np.nan)
        return channel.trace(self.name, self.method, times_s, values_j, sample_interval_s=0.0)


def _channel(sheet: Sheet, component: str) -> Channel:
    return Channel(component=component, kind="counter", relative_accuracy=None, note=_note(sheet, component))


def _note(sheet: Sheet, component: str) -> str:
    if not sheet.has_watts(component):
        lacking = ", ".join(one for one in sheet.components if not sheet.has_watts(one))
        note = f"sheet {sheet.name} ({sheet.source}) states no power of {lacking}: joules and their sum are missing"
        return note if sheet.fit_words is None else f"{note}; {sheet.fit_words}"
    note = f"modelled with sheet {sheet.name} ({sheet.source}); {_idle_words(sheet)}; {_error_words(sheet)}"
    costs = sheet.memory if component == COMM else sheet.units.get(component)
    if costs is None or costs.relative_accuracy is None:
        return note
    return f"{note}; the fit meets its own rows of {component} to {100 * costs.relative_accuracy.value:.2g} % (RMS)"


def _idle_words(sheet: Sheet) -> str:
    """Which idle power is counted: of the whole machine, or of its units, and where 0 W stands for none."""
    stated = {name: unit.idle_w.value for name, unit in sheet.units.items() if unit.idle_w is not None}
    if sheet.idle_w is not None:
        stated = {"the machine between requests": sheet.idle_w.value} | stated
    if not stated:
        return "idle counted as 0 W: the sheet states none"
    words = "idle " + ", ".join(f"{watts:.4g} W of {what}" for what, watts in stated.items())
    silent = [name for name in sheet.units if name not in stated and sheet.has_watts(name)]
    return f"{words}; 0 W of {', '.join(silent)}: the sheet states none" if silent and sheet.idle_w is None else words


def _error_words(sheet: Sheet) -> str:
    """What is known of the error of seconds and joules."""
    if sheet.fit_words is not None:
        return f"their error on other requests is not stated: {sheet.fit_words}"
    if sheet.missed_by is None:
        return "their error is not stated: nothing of them was compared with the source"
    seconds, joules = sheet.missed_by.seconds, sheet.missed_by.joules
    return (
        f"their error is not stated: against its source, ratios between arms came out {seconds.words} (seconds) and"
        f" {joules.words} (joules)"
    )


class ModelDevice:
    """A machine known by its sheet. `timeline` is the clock of everything that runs on it."""

    def __init__(self, sheet: Sheet, environment: Callable[[], Environment], priced_by: PricedBy | None = None) -> None:
        self.name = f"model:{sheet.name}"
        self.priced_by = priced_by
        """None of a sheet that has no file."""
        self.timeline = Timeline(sheet)
        self.meters: Sequence[Meter] = (TimelineMeter(self.timeline),)
        self._environment = environment

    def open(self) -> None:
        """A sheet is always ready."""

    def environment(self) -> Environment:
        """The host that computes routing and accuracy; the sheet's machine ran nothing."""
        return self._environment()

    def conditions(self) -> Conditions:
        """Only the time: a sheet has no temperature and no battery."""
        return Conditions(at_s=self.timeline.now_s())

    def cpu_seconds(self) -> CpuSeconds | None:
        """None: what else the host does, does not change a modelled time."""
        return None

    def close(self) -> None:
        """Nothing was acquired."""


def load_model_device(ref: SheetRef, environment: Callable[[], Environment]) -> ModelDevice:
    """The device `model:NAME` of a sheet. Raises `DeviceError` for one that is absent or not whole.

    environment: describes the host that computes; called when the run asks for it.
    """
    return ModelDevice(load_sheet(ref), environment, priced_by(ref))
