"""The gates a phone passes before it is measured, so that all trials start alike. Waits with a countdown, to a limit.

What a kind of phone asks for beside (its battery must not charge, its state must not be faked) its own module says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from devices.base import Clock, NotReadyError

log = logging.getLogger(__name__)

CountdownListener = Callable[[str, float], None]
"""Told why the phone is not ready, and how many seconds are left."""


MIN_TOLD_C, MAX_TOLD_C = -40.0, 150.0
MAX_TOLD_PERCENT = 110.0
"""A gauge that has not learnt its battery goes a little beyond 100."""
LOOKS_AT_LASTING = 2
RESTART = "look at it again, and restart the phone where it goes on"


class Lasting(str):
    """A reason that no waiting takes away: it is told at once, and not after ten minutes."""

    __slots__ = ()


@dataclass(frozen=True)
class Gates:
    """Below this temperature, above this charge; how long to wait for it, and how often to look."""

    max_temperature_c: float = 40.0
    min_charge_percent: float = 50.0
    wait_s: float = 600.0
    look_every_s: float = 5.0


def too_hot_or_empty(
    temperature_c: float | None, percent: float | None, gates: Gates, is_charging: bool | None = False
) -> str | None:
    """What of a battery's state keeps a phone from being measured, with the remedy; None where nothing does.

    A figure that no battery has (NaN above all, which no comparison stops) is no figure: it opens no gate.
    """
    if temperature_c is not None and not MIN_TOLD_C <= temperature_c <= MAX_TOLD_C:
        return Lasting(f"the battery tells {temperature_c:g} degC, which no battery has; {RESTART}")
    if percent is not None and not 0 <= percent <= MAX_TOLD_PERCENT:
        return Lasting(f"the battery tells a level of {percent:g} %, which no battery has; {RESTART}")
    if temperature_c is not None and temperature_c >= gates.max_temperature_c:
        return f"the battery is at {temperature_c:.1f} degC, {gates.max_temperature_c:g} is the limit; let it cool"
    if percent is not None and percent <= gates.min_charge_percent:
        reason = f"the battery is at {percent:.0f} %, {gates.min_charge_percent:g} % is the limit; charge it"
        return reason if is_charging else Lasting(f"{reason}, then unplug it")
    return None


def wait_until_ready(
    subject: str,
    why_not_ready: Callable[[], str | None],
    gates: Gates,
    clock: Clock,
    on_wait: CountdownListener | None = None,
) -> None:
    """Returns when the phone may be measured. Raises `NotReadyError` when it still may not after `gates.wait_s`.

    A `Lasting` reason is believed when it is there at two looks: one odd answer ends no run.
    """
    n_lasting = 0
    deadline_s = clock.now_s() + gates.wait_s
    while (reason := why_not_ready()) is not None:
        left_s = deadline_s - clock.now_s()
        n_lasting = n_lasting + 1 if isinstance(reason, Lasting) else 0
        if n_lasting >= LOOKS_AT_LASTING:
            raise NotReadyError(f"{subject} is not ready: {reason}")
        if left_s <= 0:
            waited = f", and was not after {gates.wait_s:g} s of waiting" if gates.wait_s > 0 else ""
            raise NotReadyError(f"{subject} is not ready{waited}: {reason}")
        log.info("%s: %s; waiting, %.0f s left", subject, reason, left_s)
        if on_wait is not None:
            on_wait(reason, left_s)
        clock.sleep_until_s(clock.now_s() + min(gates.look_every_s, left_s))
