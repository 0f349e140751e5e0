"""Xcode's energy gauge of one process: a relative gauge. Its units are Apple's own, and no joules.

The instruments give, for a process id, costs of the parts it uses, about once a second:

    energy.{cpu,gpu,networking,location,display}.cost   what the process costs there
    energy.cost                                         their sum, less a constant of 10: may be negative
    energy.appstate.cost                                8 in front, whatever it does; not in the sum
    energy.overhead                                     what is kept awake for it (a radio), less the same constant

so the parts are traced and added; the constant would make an idle process give energy back. A sample is read as a rate,
which stands until the next one: two windows of one phone and one release of iOS can be compared, and nothing else.

It answers faster than it updates: then it repeats itself, or gives zeros. The first samples carry what was before the
window, or lack keys. None of these are taken for values. A process that is not traced has an empty answer: an error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devices.base import Channel, Clock, DeviceError, MeterUnavailableError, TransientDeviceError
from devices.gauges import observed_update_period_s, renewed_readings, stuck_stretches_s
from devices.ios.link import Link
from devices.ios.phone import Phone
from devices.meters.polled import PolledMeter, answered_before
from results.records import Method, PowerTrace

Array = NDArray[np.float64]

log = logging.getLogger(__name__)

READ_EVERY_S = 1.0
"""Xcode's own pace."""
FIRST_VALUE_TIMEOUT_S = 15.0
"""The first whole sample comes some seconds after the tracing began."""
RECONNECT_S = 30.0
MOST_COST = 1e6
"""Published samples lie below 1000."""
PARTS = ("cpu", "gpu", "networking", "location", "display")
KEYS = ("energy.cost", *(f"energy.{part}.cost" for part in PARTS), "energy.appstate.cost", "energy.overhead")
"""Columns of a reading."""
COMPONENTS = ("gauge total", *PARTS, "appstate", "overhead")
_AGE_KEY = "kIDEGaugeSecondsSinceInitialQueryKey"
_COST = KEYS.index("energy.cost")
_PARTS = [KEYS.index(f"energy.{part}.cost") for part in PARTS]
SAME_SUM = 0.01
"""Of the cost, and one unit: within so much parts sum to it and the constant."""


def parse_sample(reply: Any, process_id: int) -> tuple[float, ...] | None:
    """One answer of the gauge: the values of `KEYS`, NaN where a key is missing; None where the process is not traced.

    A sample without a cost, at age 0, or of zeros alone is all NaN: it says nothing of the time since the last one.
    """
    samples: Mapping[Any, Any] = reply if isinstance(reply, Mapping) else {}
    own = next((s for pid, s in samples.items() if isinstance(s, Mapping) and str(pid) == str(process_id)), None)
    if not own:
        return None
    values = tuple(_cost(own.get(key)) for key in KEYS)
    nothing_new = own.get(_AGE_KEY) == 0 or math.isnan(values[_COST]) or not np.any(np.nan_to_num(values))
    return (math.nan,) * len(KEYS) if nothing_new else values


def _cost(value: object) -> float:
    """NaN for what is no cost."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= MOST_COST:
        return math.nan
    return float(value)


def adds_up(values: Array) -> NDArray[np.bool_]:
    """Which samples [n] have parts that sum to their cost and one constant, as in all that were published.

    Where a part fails, or the unit changes, the constant is another. All that have a cost, where less than half agree.
    """
    has_cost = np.isfinite(values[:, _COST])
    cost = values[has_cost, _COST]
    apart = np.nansum(values[has_cost][:, _PARTS], axis=1) - cost
    is_same = np.abs(apart - np.median(apart)) <= 1 + SAME_SUM * np.abs(cost)
    found = has_cost.copy()
    if 2 * is_same.sum() >= len(is_same):
        found[has_cost] = is_same
    return found


class EnergyGaugeMeter(PolledMeter):
    """The energy gauge of an app that runs. Its process is looked up at each window: an app may be started anew."""

    name = "energy gauge"
    method: Method = "relative gauge"

    def __init__(self, phone: Phone, app: str, interval_s: float, clock: Clock) -> None:
        """app: the bundle identifier of what is measured."""
        super().__init__(max(interval_s, READ_EVERY_S), clock)
        self._phone = phone
        self._app = app
        self._monitor: Any = None
        self._link: Link | None = None
        self._process_id = 0

    def open(self) -> None:
        """Waits for a first value, so that what is missing is told before a run. Raises `DeviceError`."""
        self._begin()
        try:
            self._await_value()
        finally:
            self._end()
        self.channels = tuple(
            Channel(
                component,
                "held",
                update_period_s=self._interval_s,
                additive=component in PARTS,
                note=f"relative units of {self._app}, no joules",
            )
            for component in COMPONENTS
        )

    def read(self) -> Sequence[float]:
        if not self._phone.is_on(self._link):
            # The link broke, and the tracing with it: a recording goes on with a gap.
            try:
                self._begin()
            except DeviceError as error:
                raise TransientDeviceError(str(error)) from error
        sample = self._sample()
        if sample is None:
            raise TransientDeviceError(
                f"energy gauge: process {self._process_id} ({self._app}) is not traced any more; did it end?"
            )
        return sample

    def start(self) -> None:
        """Begins a window. A phone that went away is waited for, up to a limit. Raises `DeviceError`."""
        if self._sampler is not None:
            raise DeviceError(f"meter {self.name} is already running; stop it before another window starts")
        with answered_before():
            try:
                self._begin()
            except TransientDeviceError as error:
                log.info("%s; looking for it", error)
                self._phone.reach(RECONNECT_S)
                self._begin()
            try:
                self._await_value()
                super().start()
            except DeviceError:
                self._end()
                raise

    def stop(self) -> Sequence[PowerTrace]:
        try:
            return super().stop()
        finally:
            self._end()

    def close(self) -> None:
        super().close()
        self._end()

    def _begin(self) -> None:
        process_id = self._phone.find_process(self._app)
        if process_id is None:
            raise DeviceError(f"energy gauge: {self._app} does not run on {self._phone.udid}; start it first")

        async def begin(link: Link) -> Any:
            from pymobiledevice3.services.dvt.instruments.energy_monitor import EnergyMonitor

            self._link = link
            return await EnergyMonitor(await link.instruments(), [process_id]).__aenter__()

        self._process_id = process_id
        self._monitor = self._phone.ask(begin, "energy gauge")

    def _end(self) -> None:
        """Ends the tracing. Where the link is gone, it has ended."""
        monitor, self._monitor = self._monitor, None
        if monitor is None or not self._phone.is_on(self._link):
            return

        async def end(link: Link) -> None:
            await monitor.__aexit__(None, None, None)

        try:
            self._phone.ask(end, "energy gauge")
        except DeviceError as error:
            log.debug("energy gauge: while ending: %s", error)

    def _sample(self) -> tuple[float, ...] | None:
        async def sample(link: Link) -> Any:
            return await self._monitor.service.sample_attributes_for_pids_({}, [self._process_id])

        return parse_sample(self._phone.ask(sample, "energy gauge"), self._process_id)

    def _await_value(self) -> None:
        """Until a sample has a cost: a window opened then is covered. Raises `MeterUnavailableError` at the limit."""
        deadline_s = self._clock.now_s() + FIRST_VALUE_TIMEOUT_S
        while (sample := self._sample()) is None or math.isnan(sample[_COST]):
            if self._clock.now_s() > deadline_s:
                what = "answers nothing" if sample is None else "gives no cost"
                raise MeterUnavailableError(
                    f"energy gauge: it {what} for process {self._process_id} ({self._app}) in"
                    f" {FIRST_VALUE_TIMEOUT_S:g} s: not 0, but unknown; keep the app in front and the phone unlocked"
                    " (iOS 18.0 and 18.1 are known to give nothing: update it)"
                )
            self._wait(self._interval_s)

    def traces(self, times_s: Array, values: Array) -> Sequence[PowerTrace]:
        """Units a second that stand until the next sample, one trace a component that the phone gives."""
        has_cost = np.isfinite(values[:, _COST])
        if not has_cost.any():
            raise TransientDeviceError(
                f"energy gauge: no cost in {len(values)} samples of {self._app}; is it in front?"
            )
        told = adds_up(values)
        at_s, rows = times_s[told], values[told]
        changed = np.any(np.diff(np.nan_to_num(rows), axis=0) != 0, axis=1)
        shown = np.concatenate([[0.0], np.cumsum(changed)])
        period_s = observed_update_period_s(at_s, shown)
        kept = renewed_readings(at_s, shown, period_s)
        stuck_s = stuck_stretches_s(at_s, shown, period_s)
        n_odd = {
            "had no value": int((~has_cost).sum()),
            "had parts that do not sum to their cost": int((has_cost & ~told).sum()),
        }
        left_out = "; ".join(f"{n} of {len(values)} samples {what}" for what, n in n_odd.items() if n) or None
        traces = []
        for i, channel in enumerate(self.channels):
            own = kept[np.isfinite(rows[kept, i])]
            if len(own):
                note = f"{channel.note}; process {self._process_id}"
                told_of = replace(channel, update_period_s=period_s, note=note)
                own_rows = at_s[own], rows[own, i]
                traces.append(told_of.trace(self.name, self.method, *own_rows, self._interval_s, stuck_s, left_out))
        return traces
