"""All that is computed for source 001, each thing once: findings and tables read it here."""

from __future__ import annotations

from functools import cache, cached_property

import numpy as np

from devices.models.sheet import Sheet, load_sheet
from harness.reproduce.gpu_ndp.configurations import (
    DEEPSEEK,
    MODELS,
    N_UNITS,
    PRINTED_UNITS,
    QWEN3,
    SHEET,
    WITHOUT_SHARED,
    no_room,
)  # fmt: skip
from harness.reproduce.gpu_ndp.decode import (
    UTILISATIONS,
    Configuration,
    Decoding,
    SpeedUps,
    all_speed_ups,
    supported,
    wanted_utilisation,
)  # fmt: skip
from harness.reproduce.gpu_ndp.end_to_end import Requests
from harness.reproduce.gpu_ndp.prefill import PrefillRatios, Reading, mean_ratios, readings
from harness.reproduce.gpu_ndp.recorded import recorded
from harness.reproduce.gpu_ndp.stage import ARMS, FULL, MONDE, TP_PRE
from harness.reproduce.gpu_ndp.utilisation import Utilisation
from harness.reproduce.ledger import Ledger, ledger

TP_PREFILL, LB_PREFILL, QWEN3_PREFILL, QWEN3_DECODE = "001-010", "001-011", "001-008", "001-009"
TP_DECODE, LB_DECODE, PRE_DECODE, FULL_DECODE = "001-012", "001-013", "001-014", "001-015"
ON_DEMAND_MOST = "001-005"
HELD_CLOCK_HZ = 0.8e9
"""The sheet's."""
UNIFORM, LEAST = 0.0, "least"


class Computed:
    """On the source's own sheet."""

    def __init__(self, book: Ledger, sheet: Sheet) -> None:
        self.book, self.sheet = book, sheet

    # --- decoding ------------------------------------------------------------------------------------------------

    @cached_property
    def decoding(self) -> dict[Configuration, SpeedUps]:
        """Of all of 1 to 6 units that hold their model."""
        return all_speed_ups(self.sheet, units=N_UNITS)

    @cached_property
    def without_shared(self) -> dict[Configuration, SpeedUps]:
        """Where a model has no shared experts, as in `decoding`."""
        others = {name: asked for name, asked in WITHOUT_SHARED.items() if asked != MODELS[name]}
        own = all_speed_ups(self.sheet, others)
        return {one: own[one] if one in own else self.decoding[one] for one in supported(self.sheet, WITHOUT_SHARED)}

    @property
    def printed_decoding(self) -> dict[Configuration, SpeedUps]:
        """Of the ten that the averages are of."""
        return {one: found for one, found in self.decoding.items() if one.n_units in PRINTED_UNITS}

    @cached_property
    def by_utilisation(self) -> dict[str, dict[float, float]]:
        """Of the two arms that fetch ahead, the mean of the ten by utilisation."""
        return _by_utilisation(self.printed_decoding)

    @cached_property
    def wanted(self) -> dict[str, float | None]:
        """Utilisation at which the mean of the ten is what the source states."""
        return self._wanted(self.by_utilisation)

    @cached_property
    def wanted_without_shared(self) -> dict[str, float | None]:
        return self._wanted(_by_utilisation(self.without_shared))

    def _wanted(self, by_utilisation: dict[str, dict[float, float]]) -> dict[str, float | None]:
        stated = {TP_PRE: self.book.calibration(PRE_DECODE), FULL: self.book.calibration(FULL_DECODE)}
        return {arm: wanted_utilisation(stated[arm], by_utilisation[arm]) for arm in stated}

    @cached_property
    def layer_seconds(self) -> dict[tuple[Configuration, str], float]:
        """Of the experts of a layer and a decoded token, by arm; of those that fetch ahead, where nothing that was
        fetched is used but what every token uses."""
        found = {}
        for one in supported(self.sheet, units=N_UNITS):
            decoding = Decoding(MODELS[one.model], one.n_units, self.sheet)
            for arm in ARMS:
                if arm == MONDE:
                    seconds = self.decoding[one].monde_s.mean
                elif arm in (TP_PRE, FULL):
                    seconds = decoding.fetched_ahead(arm, 0.0)
                else:
                    seconds = decoding.of_any_choice(arm)
                found[one, arm] = seconds
        return found

    def gain_of_balance(self, n_units: int) -> float:
        """Slices with balance over slices alone, the mean of the models that two units hold."""
        own = [self.decoding[Configuration(model, n_units)] for model in (DEEPSEEK, QWEN3)]
        return float(np.mean([one.tp_lb / one.tp for one in own]))

    def not_supported(self, units: tuple[int, ...] = PRINTED_UNITS) -> list[Configuration]:
        return [
            Configuration(name, n) for name in MODELS for n in units if no_room(MODELS[name], n, self.sheet) is not None
        ]

    # --- prefill -------------------------------------------------------------------------------------------------

    @cached_property
    def prefill(self) -> dict[Reading, dict[Configuration, PrefillRatios]]:
        return readings(self.sheet)

    @cached_property
    def held(self) -> dict[Configuration, PrefillRatios]:
        """Under the reading that was declared: uniform routing, the best split, the clock of the sheet."""
        own = readings(self.sheet, clocks_hz=(HELD_CLOCK_HZ,), skews=(UNIFORM,))
        return own[Reading(HELD_CLOCK_HZ, LEAST, UNIFORM)]

    @cached_property
    def best_clock_hz(self) -> float:
        """At which Qwen3-30B-A3B comes nearest to what is stated of it, under that reading."""
        stated = self.book.calibration(QWEN3_PREFILL)
        of_clock = {
            reading.clock_hz: mean_ratios(own, QWEN3).tp_lb
            for reading, own in self.prefill.items()
            if (reading.split, reading.skew) == (LEAST, UNIFORM)
        }
        return min(of_clock, key=lambda clock_hz: abs(of_clock[clock_hz] - stated))

    @property
    def stated_of_prefill(self) -> str:
        """To say so in a note, as the next."""
        return ", ".join(f"{self.book.figure(id_):g}" for id_ in (TP_PREFILL, LB_PREFILL, QWEN3_PREFILL))

    @property
    def stated_of_full(self) -> float:
        return self.book.figure(FULL_DECODE)

    @cached_property
    def all_three(self) -> list[Reading]:
        """Readings under which the two averages and that of Qwen3-30B-A3B are within 15 % of those stated."""
        stated = [self.book.figure(id_) for id_ in (TP_PREFILL, LB_PREFILL, QWEN3_PREFILL)]
        found = []
        for reading, own in self.prefill.items():
            all_models = mean_ratios(own)
            ours = (all_models.tp, all_models.tp_lb, mean_ratios(own, QWEN3).tp_lb)
            if all(abs(one / other - 1) <= 0.15 for one, other in zip(ours, stated, strict=True)):
                found.append(reading)
        return found

    # --- end to end, routing -------------------------------------------------------------------------------------

    @cached_property
    def requests(self) -> Requests:
        return Requests(self.sheet, {one: found.monde_s.mean for one, found in self.decoding.items()})

    @cached_property
    def multiple(self) -> float:
        """Of what is no expert, fitted."""
        return self.requests.fitted_multiple(self.book.calibration(ON_DEMAND_MOST))

    @cached_property
    def recorded(self) -> dict[int, Utilisation]:
        return {one.kept: one for one in recorded()}


def _by_utilisation(found: dict[Configuration, SpeedUps]) -> dict[str, dict[float, float]]:
    ten = list(found.values())
    return {
        TP_PRE: {q: float(np.mean([one.tp_pre[q] for one in ten])) for q in UTILISATIONS},
        FULL: {q: float(np.mean([one.full[q] for one in ten])) for q in UTILISATIONS},
    }


@cache
def computed() -> Computed:
    return Computed(ledger(), load_sheet(SHEET))
