"""The charge that a battery gave, against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from devices.android.device_clock import Marker
from devices.android.gauge_loop import GaugeLog
from devices.android.raw_gauge import energy_of, raw_traces
from devices.base import Channel
from results.charge import BatteryCharge
from results.derivation import energies_of
from results.metrics import energy_observations
from results.records import PowerTrace
from results.tables import accuracy_rows, energy_rows, tidy
from results.trace_files import WINDOW, raw_part
from tests.fakes.waveforms import trace
from tests.run_builders import cell, completion, run, trial

AT_S = np.arange(0.0, 20.0, 0.05, dtype=np.float64)
WATTS = 3.0
WINDOW_S = (2.0, 18.0)
GAUGE = trace(
    "held", AT_S, np.full(len(AT_S), WATTS), 0.05, update_period_s=0.25, meter="battery", component="battery"
)  # fmt: skip


def voltage(shown: NDArray[np.float64] | float) -> PowerTrace:
    return replace(GAUGE, kind="raw", component="battery voltage", values=np.broadcast_to(shown, AT_S.shape))


def charge_uah(power: PowerTrace, *raw: PowerTrace) -> float | None:
    return BatteryCharge([power], raw, "battery").over_uah([WINDOW_S])


@pytest.mark.parametrize("shown", [3.75, 3750.0, 3.75e6])
def test_at_a_steady_voltage_it_is_the_energy_over_it(shown: float) -> None:
    """3 W for 16 s at 3.75 V, in V, mV and uV: 12.8 C."""
    assert charge_uah(GAUGE, voltage(shown)) == pytest.approx(12.8 / 3600 * 1e6)


def test_where_the_voltage_falls_the_current_grows() -> None:
    """From 4 V by 20 mV a second under 3 W: the integral of P / (a - b t) is P / b ln((a - b t0) / (a - b t1))."""
    shown = 4.0 - 0.02 * AT_S
    shown[5] = np.nan  # not read once
    expected_c = WATTS / 0.02 * math.log((4.0 - 0.02 * WINDOW_S[0]) / (4.0 - 0.02 * WINDOW_S[1]))
    # Half an update of 0.25 s late, in which the current grows by 0.06 %.
    assert charge_uah(GAUGE, voltage(shown)) == pytest.approx(expected_c / 3600 * 1e6, rel=1e-3)


def test_of_a_charge_counter_it_is_what_the_counter_showed() -> None:
    """1 mAh every 5 s for 500 s, while the voltage falls from 4.2 to 3.6 V; its joules were made of that."""
    at_s = np.arange(601.0, dtype=np.float64)
    left_uah, volts = 3_456_000 - np.floor(at_s / 5.0) * 1000, 4200.0 - at_s
    markers = tuple(Marker(t, t, np.nan, t) for t in (0.0, at_s[-1]))
    log = GaugeLog(at_s, at_s, left_uah, volts, (markers[:1], markers[1:]))
    raw = raw_traces(log, "charge", 1.0)
    joules = energy_of(raw, Channel("battery", "counter"))
    found = BatteryCharge([joules], raw, "battery").over_uah([(50.0, 550.0)])
    assert found == pytest.approx(100_000.0, rel=1e-3)


@pytest.mark.parametrize("raw", [(), (voltage(0.2),), (voltage(math.nan),), (replace(voltage(4.0), meter="other"),)])
def test_without_a_batterys_voltage_there_is_none(raw: tuple[PowerTrace, ...]) -> None:
    assert charge_uah(GAUGE, *raw) is None


def test_of_another_meter_and_of_a_window_that_is_not_resolved_there_is_none() -> None:
    assert charge_uah(replace(GAUGE, method="integrated power"), voltage(4.0)) is None
    assert BatteryCharge([GAUGE], [voltage(4.0)], "battery").over_uah([(2.0, 3.0)]) is None


def test_a_token_has_its_charge_beside_its_joules() -> None:
    """Of 30 tokens of a prompt in 8 s and 20 decoded in 8 s: 6.4 C each at 3.75 V."""
    times_s = (10.0, *(10.4 + 0.4 * n for n in range(20)))
    one = completion(start_s=2.0, n_prompt=30, token_times_s=times_s)
    traces = {WINDOW: [GAUGE], raw_part(WINDOW): [voltage(3.75)]}
    measured = trial(completions=(one,), energy=energies_of((one,), traces, WINDOW_S).readings)
    found = {o.phase: o for o in energy_observations(measured) if o.metric == "charge_per_token"}
    whole_uah = 12.8 / 3600 * 1e6
    assert {phase: o.value for phase, o in found.items()} == pytest.approx(
        {"prefill": whole_uah / 2 / 30, "decode": whole_uah / 2 / 20, "all": whole_uah / 51}
    )
    assert {(o.unit, o.method, o.meter) for o in found.values()} == {("uAh/token", "battery gauge", "battery")}
    frame = tidy(run([cell()], [measured]))
    assert (energy_rows(frame)["metric"] == "charge_per_token").sum() == 3
    assert "charge_per_token" not in set(accuracy_rows(frame)["metric"])


def test_other_meters_have_no_such_rows() -> None:
    one = completion(start_s=2.0, token_times_s=(10.0, 18.0))
    measured = trial(completions=(one,), energy=energies_of((one,), {WINDOW: [GAUGE]}, WINDOW_S).readings)
    assert "charge_per_token" not in {o.metric for o in energy_observations(measured)}
